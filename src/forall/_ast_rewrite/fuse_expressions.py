"""Fused expressions: an arithmetic expression as one function of its operands.

The runtime can then compute the expression on batched data with one check and one wrapper, not one
for each operator. The operands are evaluated before the operators. An expression in which Python
would run an operator before it evaluates an operand with possible side effects is left alone.
"""

from __future__ import annotations

import ast

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
# Methods without arguments that are one pointwise operator
METHODS = """
    abs sin cos tan exp log log1p expm1 sqrt rsqrt tanh sigmoid square reciprocal
"""
_METHODS = frozenset(METHODS.split())


class ExpressionFuser:
    """A fuser of one expression: its operands, in the order of their evaluation."""

    def __init__(self) -> None:
        self.operands: list[ast.expr] = []
        self.count = 0  # of its operators
        self.places: dict[str, int] = {}  # of names among the operands

    def fuse_expression(self, node: ast.expr) -> ast.expr | None:
        """Return an expression with names for its operands; None if their order would change."""
        match node:
            case ast.BinOp(op=op) if isinstance(op, _OPERATORS):
                made = self._fuse_both(node.left, node.right)
                made = made and ast.BinOp(made[0], op, made[1])
            case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
                inner = self.fuse_expression(node.operand)
                made = inner and ast.UnaryOp(node.op, inner)
            case ast.Compare(ops=[op]) if isinstance(op, _COMPARED):
                made = self._fuse_both(node.left, node.comparators[0])
                made = made and ast.Compare(made[0], node.ops, [made[1]])
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if (
                name in _METHODS and _is_operator(value)
            ):
                inner = self.fuse_expression(value)
                made = inner and ast.Call(
                    _copy_location(ast.Attribute(inner, name, ast.Load()), node), [], []
                )
            case ast.Constant():
                return node
            case _:
                return self._add_operand(node)
        if not made:
            return None
        self.count += 1
        return _copy_location(made, node)

    def _fuse_both(self, left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        a = self.fuse_expression(left)
        b = None if a is None else self.fuse_expression(right)
        return None if a is None or b is None else (a, b)

    def _add_operand(self, node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Name):
            place = self.places.setdefault(node.id, len(self.operands))
        else:
            if self.count:  # an operator that comes first may see a side effect of the operand
                return None
            self.places.clear()  # a name may have another value afterwards
            place = len(self.operands)
        if place == len(self.operands):
            self.operands.append(node)
        return _copy_location(ast.Name(f"__{place}__", ast.Load()), node)


def _is_operator(node: ast.expr) -> bool:
    return isinstance(node, (ast.BinOp, ast.UnaryOp))


def _copy_location(made: ast.expr, node: ast.expr) -> ast.expr:
    return ast.copy_location(made, node)
