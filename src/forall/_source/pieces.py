"""Code from text: templates in which names stand for nodes."""

from __future__ import annotations

import ast
import copy
import functools
from typing import Any

FRAME = "__frame__"
TRIP = "__trip__"


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class _Fill(ast.NodeTransformer):
    def __init__(self, parts: dict[str, Any], at: ast.AST) -> None:
        self.parts, self.at = parts, at

    def visit(self, node: ast.AST) -> Any:
        if "lineno" in node._attributes:
            ast.copy_location(node, self.at)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Name):
            part = self.parts.get(node.value.id)
            if isinstance(part, list):
                return part
        if isinstance(node, ast.Name) and node.id in self.parts:
            part = self.parts[node.id]
            if isinstance(part, str):
                return ast.copy_location(ast.Name(part, node.ctx), self.at)
            return part
        return self.generic_visit(node)


def stmts(text: str, at: ast.AST, **parts: Any) -> list[ast.stmt]:
    """The statements of a template. A name in ``parts`` is replaced: by another name (a string), by
    an expression, or, where it is a statement of its own, by a list of statements."""
    parts.setdefault("F", FRAME)
    parts.setdefault("TRIP", TRIP)
    header = ast.Pass(**_header(at))
    tree = copy.deepcopy(_parsed(text))
    return [s for node in tree.body for s in _listed(_Fill(parts, header).visit(node))]


def expr(text: str, at: ast.AST, **parts: Any) -> Any:
    """The expression of a template."""
    (node,) = stmts(text, at, **parts)
    return node.value  # type: ignore[attr-defined]


def _listed(found: Any) -> list[ast.stmt]:
    return found if isinstance(found, list) else [found]


def _header(at: ast.AST) -> dict[str, Any]:
    """Where the first line of a statement is, so that its body does not count."""
    line, column = at.lineno, at.col_offset
    end = (at.end_lineno, at.end_col_offset) if isinstance(at, ast.expr) else (line, column)
    return {"lineno": line, "col_offset": column, "end_lineno": end[0], "end_col_offset": end[1]}


def delayed(value: ast.expr) -> ast.Lambda:
    """``lambda: value``."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(nothing, value), value)


def constant(value: Any, at: ast.AST) -> ast.expr:
    if isinstance(value, tuple):
        made: ast.expr = ast.Tuple([constant(v, at) for v in value], ast.Load())
    else:
        made = ast.Constant(value)
    return ast.copy_location(made, at)
