"""The syntax tree of a function: its file is parsed, and searched for what stands at its line."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import NamedTuple

from forall._source.refused import CannotConvert

Def = ast.FunctionDef | ast.Lambda


class Found(NamedTuple):
    """A function's node, and the class that its private names belong to."""

    node: Def
    inside: str | None


@functools.lru_cache(maxsize=64)
def _places(text: str, filename: str) -> dict[int, list[Found]]:
    """All functions of a file, by their first line (a decorator's, if there are any)."""
    places: dict[int, list[Found]] = {}

    def visit(node: ast.AST, inside: str | None) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", [])
            line = min([node.lineno, *(d.lineno for d in decorators)])
            places.setdefault(line, []).append(Found(node, inside))
        elif isinstance(node, ast.ClassDef):
            inside = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(text, filename), None)
    return places


def find(f: types.FunctionType) -> Found:
    """The node of this function, from the text that its tracebacks show."""
    code = f.__code__
    lines = linecache.getlines(code.co_filename, f.__globals__)
    if not lines:
        raise CannotConvert("its source is not to be had")
    try:
        places = _places("".join(lines), code.co_filename)
    except SyntaxError:
        raise CannotConvert("its file is no longer Python") from None
    found = [p for p in places.get(code.co_firstlineno, []) if _is(p.node, code)]
    if len(found) > 1:
        at = set(code.co_positions())
        found = [p for p in found if _returns_at(p.node, at)]
    if len(found) != 1:
        raise CannotConvert("its source has changed, or cannot be told from its neighbour's")
    return found[0]


def _is(node: Def, code: types.CodeType) -> bool:
    """Whether a node has the name and the arguments of some code."""
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    a = node.args
    names = [
        x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))
    ]
    theirs = code.co_varnames[: len(names)]
    mangled = all(
        m == n or (n.startswith("__") and m.endswith(n))
        for n, m in zip(names, theirs, strict=False)
    )
    return name == code.co_name and len(theirs) == len(names) and mangled


def _returns_at(node: Def, at: set) -> bool:
    """Whether the code has an instruction exactly where a lambda's value stands."""
    body = node.body if isinstance(node, ast.Lambda) else node.body[-1]
    return (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in at


def whole(node: Def) -> ast.FunctionDef:
    """The function as a definition of its own: no decorators, no defaults, no annotations."""
    import copy

    node = copy.deepcopy(node)
    if isinstance(node, ast.Lambda):
        value = ast.copy_location(ast.Return(node.body), node.body)
        made = ast.FunctionDef("<lambda>", node.args, [value], [], None)
        node = ast.copy_location(made, node)
    node.decorator_list, node.returns = [], None
    arguments = node.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for a in ast.walk(arguments):
        if isinstance(a, ast.arg):
            a.annotation = None
    return node
