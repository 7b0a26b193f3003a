"""The syntax tree of a function, found by its line in the parsed source file."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import Any, NamedTuple

from forall._ast_rewrite.liveness import list_argument_names
from forall._ast_rewrite.unsupported import CannotConvert

Def = ast.FunctionDef | ast.Lambda


class FoundFunction(NamedTuple):
    """The node of a function, and the name of the class around it, which mangles names."""

    node: Def
    inside: str | None


@functools.lru_cache(maxsize=64)
def _index_functions(text: str, filename: str) -> dict[int, list[FoundFunction]]:
    """The functions of a file, by their first line (of a decorator, if there are any)."""
    places: dict[int, list[FoundFunction]] = {}

    def visit(node: ast.AST, inside: str | None) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", [])
            line = min([node.lineno, *(d.lineno for d in decorators)])
            places.setdefault(line, []).append(FoundFunction(node, inside))
        elif isinstance(node, ast.ClassDef):
            inside = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(text, filename), None)
    return places


def find_function_node(f: types.FunctionType) -> FoundFunction:
    """Return the node of a function, in the text that its tracebacks show."""
    code = f.__code__
    lines = linecache.getlines(code.co_filename, f.__globals__)
    if not lines:
        raise CannotConvert("its source is not to be had")
    try:
        places = _index_functions("".join(lines), code.co_filename)
    except SyntaxError:
        raise CannotConvert("its file is no longer Python") from None
    found = [p for p in places.get(code.co_firstlineno, []) if _matches_code(p.node, code)]
    if len(found) > 1:
        found = _find_innermost(found, code)
    if len(found) != 1:
        raise CannotConvert("its source has changed, or cannot be told from its neighbour's")
    return found[0]


def _matches_code(node: Def, code: types.CodeType) -> bool:
    """True if a node has the name and the arguments of a code object."""
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    names = list_argument_names(node.args)
    theirs = code.co_varnames[: len(names)]
    mangled = all(
        m == n or (n.startswith("__") and m.endswith(n))
        for n, m in zip(names, theirs, strict=False)
    )
    return name == code.co_name and len(theirs) == len(names) and mangled


def _find_innermost(lambdas: list[FoundFunction], code: types.CodeType) -> list[FoundFunction]:
    """Return the innermost lambda of a line whose body holds all instructions of the code."""
    at = [
        ((line, column), end)
        for line, end_line, column, end_column in code.co_positions()
        if line is not None and (line, column) < (end := (end_line, end_column))
    ]
    around = [
        p
        for p in lambdas
        for first, last in [_get_span(p.node)]
        if at and all(first <= start and end <= last for start, end in at)
    ]  # Python 3.12 has no columns for ``lambda: 1``
    return sorted(around, key=lambda p: _get_span(p.node)[0])[-1:]


def _get_span(node: Def) -> tuple[tuple[int, int], tuple[int, int]]:
    """The start and the end of a lambda's body in the source."""
    body: Any = node.body
    return (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)


def make_plain_def(node: Def) -> ast.FunctionDef:
    """Return the function as a ``def`` without decorators, defaults and annotations."""
    import copy

    node = copy.deepcopy(node)
    if isinstance(node, ast.Lambda):
        value = ast.copy_location(ast.Return(node.body), node.body)
        made = ast.FunctionDef("<lambda>", node.args, [value], [], None)
        node = ast.copy_location(made, node)
    node.decorator_list, node.returns = [], None
    node.type_params = []  # Python 3.12's `def f[T]`: T comes by its cell
    arguments = node.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for a in ast.walk(arguments):
        if isinstance(a, ast.arg):
            a.annotation = None
    return node
