"""Quasiquotation: code from text templates, in which some names are holes for nodes."""

from __future__ import annotations

import ast
import functools
from typing import Any

RUNTIME = "__forall__"  # the free name by which converted code finds its runtime
FRAME = "__frame__"
TRIP = "__trip__"
ITERABLE = "__iterable__"  # the name of a comprehension's iterable


@functools.cache
def _parse_template(text: str) -> ast.Module:
    return ast.parse(text)


def _fill_node(node: Any, parts: dict[str, Any], at: dict[str, Any]) -> Any:
    """Return a copy of a template's node with its holes filled, all at one source position."""
    if type(node) is ast.Name and node.id in parts:
        part = parts[node.id]
        return ast.Name(part, node.ctx, **at) if isinstance(part, str) else part
    if type(node) is ast.Expr and type(node.value) is ast.Name:
        part = parts.get(node.value.id)
        if isinstance(part, list):
            return part
    fields: dict[str, Any] = {}
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            items = [_fill_node(v, parts, at) if isinstance(v, ast.AST) else v for v in value]
            value = [v for item in items for v in (item if isinstance(item, list) else [item])]
        elif isinstance(value, ast.AST):
            value = _fill_node(value, parts, at)
        fields[field] = value
    return type(node)(**fields, **(at if "lineno" in node._attributes else {}))


def stmts(text: str, at: ast.AST, **parts: Any) -> list[ast.stmt]:
    """Return the statements of a template.

    A name in ``parts`` is replaced: by another name (a string), by an expression, or, where it is
    a statement of its own, by a list of statements.
    """
    parts.setdefault("F", FRAME)
    parts.setdefault("TRIP", TRIP)
    place = _get_header_position(at)
    made = [_fill_node(node, parts, place) for node in _parse_template(text).body]
    return [s for found in made for s in (found if isinstance(found, list) else [found])]


def expr(text: str, at: ast.AST, **parts: Any) -> Any:
    """Return the expression of a template, filled as by `stmts`."""
    (node,) = stmts(text, at, **parts)
    return node.value  # type: ignore[attr-defined]


def _get_header_position(at: ast.AST) -> dict[str, Any]:
    """The position of a statement's first line, without its body."""
    line, column = at.lineno, at.col_offset
    end = (at.end_lineno, at.end_col_offset) if isinstance(at, ast.expr) else (line, column)
    return {"lineno": line, "col_offset": column, "end_lineno": end[0], "end_col_offset": end[1]}


def make_thunk(value: ast.expr) -> ast.Lambda:
    """Return the node of ``lambda: value``."""
    return make_lambda([], value)


def make_lambda(names: list[str], value: ast.expr) -> ast.Lambda:
    """Return the node of ``lambda a, b: value``."""
    args = [ast.copy_location(ast.arg(name), value) for name in names]
    given = ast.arguments(posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(given, value), value)


def make_constant(value: Any, at: ast.AST) -> ast.expr:
    if isinstance(value, tuple):
        made: ast.expr = ast.Tuple([make_constant(v, at) for v in value], ast.Load())
    else:
        made = ast.Constant(value)
    return ast.copy_location(made, at)
