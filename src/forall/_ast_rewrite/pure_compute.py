"""Functions that only compute, rewritten for raw stacks: batched data without wrapper tensors.

Such a function binds its own names and has no other effect, so it may be left in the middle and
called again on wrapper tensors. The runtime checks each value from outside and each call (`known`,
`does`). It leaves the function at a value that is no number, no stack and no function that only
computes.
"""

from __future__ import annotations

import ast
import copy
from typing import NamedTuple

from forall._ast_rewrite.liveness import (
    COMPREHENSIONS,
    ScopeNames,
    find_assigned_names,
    list_argument_names,
)
from forall._ast_rewrite.quasiquote import RUNTIME, expr, make_constant
from forall._ast_rewrite.unsupported import CannotConvert

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_AS_THEY_ARE = (
    ast.Constant, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.IfExp, ast.Tuple, ast.List,
    ast.Slice, ast.expr_context, ast.keyword, ast.operator, ast.cmpop, ast.comprehension,
    ast.Pass, ast.Expr, ast.Return, ast.If, ast.Break, ast.Continue,
)  # fmt: skip


def straight(f: ast.FunctionDef) -> ast.FunctionDef | None:
    """Rewrite a function for raw stacks; None if it does more than compute."""
    if f.args.kwarg is not None:
        return None
    try:
        rewriter = _Straight(find_assigned_names(f.body) | {*list_argument_names(f.args)})
        f.body = [rewriter.visit(s) for s in f.body]
    except CannotConvert:
        return None
    return f


class _Straight(ast.NodeTransformer):
    """A rewriter for raw stacks that refuses each construct with a side effect, now or later."""

    def __init__(self, own: set[str]) -> None:
        self.own = own  # the names of the function's

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, _AS_THEY_ARE):
            raise CannotConvert(f"a {type(node).__name__}", node)
        return super().generic_visit(node)

    # --- names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.own or not isinstance(node.ctx, ast.Load):
            return node
        return expr("R.known(A)", node, R=RUNTIME, A=node)

    def _owner(self, node: ast.expr) -> ast.expr:
        """Rewrite the expression before a dot, which may be a module."""
        if isinstance(node, ast.Name):
            return node
        return self._part(node) if isinstance(node, ast.Attribute) else self.visit(node)

    def _is_own(self, node: ast.expr) -> bool:
        """Return True if the expression before a dot is a name of the function's, or computed."""
        return (
            node.id in self.own
            if isinstance(node, ast.Name)
            else not isinstance(node, ast.Attribute)
        )

    def _part(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in self.own:
            raise CannotConvert("what belongs to an object", node)
        name = make_constant(node.attr, node)
        return expr("R.part(A, N)", node, R=RUNTIME, A=self._owner(node.value), N=name)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return expr("R.known(A)", node, R=RUNTIME, A=self._part(node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        f = node.func
        if isinstance(f, ast.Attribute):
            name = make_constant(f.attr, f)
            text = "R.method(A, N)()" if self._is_own(f.value) else "R.outside_method(A, N)()"
            made = expr(text, node, R=RUNTIME, A=self._owner(f.value), N=name)
        elif isinstance(f, ast.Name):
            made = expr("R.does(A)()", node, R=RUNTIME, A=f)
        else:
            raise CannotConvert("a call of what was computed", node)
        if any(k.arg is None for k in node.keywords):
            raise CannotConvert("**", node)
        made.args = [self.visit(a) for a in node.args]
        made.keywords = [self.visit(k) for k in node.keywords]
        return made

    # --- operators

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not isinstance(node.op, (*_OPERATORS, ast.BitAnd, ast.BitOr, ast.BitXor)):
            raise CannotConvert("an operator", node)
        return super().generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        none = all(isinstance(c, ast.Constant) and c.value is None for c in node.comparators)
        asks = (ast.Is, ast.IsNot) if none else _COMPARED
        if not all(isinstance(op, asks) for op in node.ops):
            raise CannotConvert("a comparison", node)
        return super().generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            raise CannotConvert("a write", node)
        return super().generic_visit(node)

    # --- what binds names

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            self._require_names(target)
        return super().generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self._require_names(node.target)
        return super().generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self._require_names(node.target)
        return super().generic_visit(node)

    def _require_names(self, target: ast.AST) -> None:
        """Refuse a target that is not made of names alone, as it would be written into."""
        if not all(
            isinstance(n, (ast.Name, ast.Tuple, ast.List, ast.expr_context))
            for n in ast.walk(target)
        ):
            raise CannotConvert("a write", target)

    def _loop(self, node: ast.AST) -> ast.AST:
        assert isinstance(node, COMPREHENSIONS)  # noqa: S101 - by their visitors
        first = node.generators[0]
        source = self.visit(first.iter)  # outside of the scope that follows
        first.iter = ast.copy_location(ast.Constant(None), source)
        outer = self.own
        for g in node.generators:
            if g.is_async:
                raise CannotConvert("an async comprehension", node)
            self._require_names(g.target)
            self.own = self.own | find_assigned_names([g.target])
        node = super().generic_visit(node)  # type: ignore[assignment]
        self.own, first.iter = outer, source
        return node

    visit_ListComp = visit_GeneratorExp = _loop  # noqa: N815 - ast's names


class Side(NamedTuple):
    """One side of an ``if`` that binds names and does nothing else."""

    body: list[ast.stmt]
    reads: list[str]  # local names that it reads
    binds: list[str]  # names that it binds and that are read afterwards


def sides(
    node: ast.If, joins: list[str], names: ScopeNames
) -> tuple[ast.expr, list[str], list] | None:
    """Rewrite an ``if`` for raw stacks: its test, the names that it reads, and both sides.

    None if the ``if`` does more than compute.
    """
    if not joins or any(isinstance(n, _CHOOSES) for n in ast.walk(node.test)):
        return None
    node = copy.deepcopy(node)
    try:
        rewriter = _Straight(names.local)
        test, *both = (
            ([node.test], []),
            (node.body, find_assigned_names(node.body)),
            (node.orelse, find_assigned_names(node.orelse)),
        )
        if not all(_binds_only(body, names) for body, _ in both):
            return None
        found = [
            Side(
                [rewriter.visit(s) for s in body],
                sorted(_read(body) & names.local),
                [j for j in joins if j in binds],
            )
            for body, binds in (test, *both)
        ]
    except CannotConvert:
        return None
    return found[0].body[0], found[0].reads, found[1:]  # type: ignore[return-value]


_CHOOSES = (ast.BoolOp, ast.Not, ast.IfExp, ast.comprehension)


def _binds_only(body: list[ast.stmt], names: ScopeNames) -> bool:
    return all(isinstance(s, (ast.Assign, ast.Pass)) for s in body) and not find_assigned_names(
        body
    ) & (names.noted | names.globals)


def _read(body: list) -> set[str]:
    return {
        n.id
        for node in body
        for n in ast.walk(node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
