"""Rewriting of expressions: short-circuit operators, calls, subscripts, comprehensions."""

from __future__ import annotations

import ast
import copy
from typing import Any

from forall._ast_rewrite.fuse_expressions import ExpressionFuser
from forall._ast_rewrite.liveness import COMPREHENSIONS, find_walrus_names
from forall._ast_rewrite.quasiquote import (
    FRAME,
    ITERABLE,
    expr,
    make_constant,
    make_lambda,
    make_thunk,
    stmts,
)
from forall._ast_rewrite.unsupported import CannotConvert

# Builtins that act on the frame that calls them
_OF_THE_FRAME = frozenset(
    ["super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint", "__import__"]
)
# Builtins that use up a generator at once
_CONSUME = frozenset(
    ["sum", "list", "tuple", "set", "frozenset", "dict", "min", "max", "sorted", "any", "all"]
)
# Operators that the runtime frame computes: those of tensors on their stacks
# (`forall._vmap.fast_path.operators`), those of containers for each lane that has its own
_OPERATORS = {
    ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv",
    ast.Mod: "mod", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
}  # fmt: skip
_COMPARED = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
    ast.Is: "is_", ast.IsNot: "is_not", ast.In: "in_", ast.NotIn: "not_in",
}  # fmt: skip


class ExpressionRewriter(ast.NodeTransformer):
    """A rewriter of the expressions of a function; functions nested in it stay as they are."""

    def __init__(self, scope: Any) -> None:
        self.scope = scope  # the function: its names, its class, how to convert one inside it
        self.hoisted: list[ast.stmt] = []  # functions to be defined before the statement
        self.whole = True  # True if arithmetic expressions are fused

    def rewrite_test(self, node: ast.expr) -> ast.expr:
        """Rewrite an expression of which only the truth value is used."""
        match node:
            case ast.BoolOp():
                return self._rewrite_lazy(node, "both_test", "either_test", self.rewrite_test)
            case ast.UnaryOp(op=ast.Not()):
                return expr("F.negate_test(A)", node, A=self.rewrite_test(node.operand))
            case _:
                return self.visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return self._rewrite_lazy(node, "both", "either", self.visit)

    def _rewrite_lazy(self, node: ast.BoolOp, both: str, either: str, inner: Any) -> ast.expr:
        name = both if isinstance(node.op, ast.And) else either
        found = self._rewrite_delayed(node.values[-1], inner) if len(node.values) > 1 else None
        for value in reversed(node.values[1:-1]):
            step = expr(f"F.{name}(A, B)", node, A=inner(value), B=found)
            found = self._wrap_in_thunk(step, find_walrus_names(node))
        return expr(f"F.{name}(A, B)", node, A=inner(node.values[0]), B=found)

    def _rewrite_delayed(self, node: ast.expr, inner: Any) -> ast.expr:
        return self._wrap_in_thunk(inner(node), find_walrus_names(node))

    def _wrap_in_thunk(self, value: ast.expr, assigned: set[str]) -> ast.expr:
        """Return a thunk of the value: a lambda, or a hoisted function if it assigns names."""
        if not assigned:
            return make_thunk(value)
        name = self.scope.make_name("operand")
        made = stmts("def NAME():\n    DECLARE\n    return VALUE", value, VALUE=value, DECLARE=[
            ast.copy_location(ast.Nonlocal(sorted(assigned)), value)
        ])  # fmt: skip
        made[0].name = name  # type: ignore[attr-defined]
        self.scope.borrow_names(assigned)
        self.hoisted += made
        return ast.copy_location(ast.Name(name, ast.Load()), value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return expr("F.negate_value(A)", node, A=self.rewrite_test(node.operand))
        if (whole := self._fuse_operators(node)) is not None:
            return whole
        self.generic_visit(node)
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            return expr("F.neg(A)", node, A=node.operand)
        return node

    def _fuse_operators(self, node: ast.expr) -> ast.expr | None:
        """Fuse an expression of several operators into one call; None if there is one or none."""
        if not self.whole:
            return None
        found = ExpressionFuser()
        body = found.fuse_expression(node)
        if body is None or found.count < 2:
            return None
        self.whole = False
        slow = self.visit(copy.deepcopy(body))
        self.whole = True
        names = [f"__{n}__" for n in range(len(found.operands))]
        made = expr(
            "F.run_fused(A, B)",
            node,
            A=make_lambda(names, body),
            B=make_lambda([FRAME, *names], slow),
        )
        made.args += [self.visit(operand) for operand in found.operands]
        return made

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Rewrite an operator; ``+`` without a number may also add lists and has its own call."""
        if (whole := self._fuse_operators(node)) is not None:
            return whole
        self.generic_visit(node)
        constants = [isinstance(s, ast.Constant) for s in (node.left, node.right)]
        name = _OPERATORS.get(type(node.op))
        if isinstance(node.op, ast.Add):
            name = "add" if any(constants) else "binary_add"
        if name is None or all(constants):
            return node
        return expr(f"F.{name}(A, B)", node, A=node.left, B=node.right)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.rewrite_test(node.test)
        a, b = (
            self._rewrite_delayed(node.body, self.visit),
            self._rewrite_delayed(node.orelse, self.visit),
        )
        return expr("F.evaluate_if_exp(TEST, A, B)", node, TEST=test, A=a, B=b)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if (whole := self._fuse_operators(node)) is not None:
            return whole
        names = tuple(_COMPARED[type(op)] for op in node.ops)
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        if len(names) == 1:
            if names[0] in ("is_", "is_not"):
                wanted = make_constant(names[0] == "is_", node)
                return expr("F.same(A, B, C)", node, A=left, B=right, C=wanted)
            if names[0] in ("in_", "not_in"):
                wanted = make_constant(names[0] == "in_", node)
                return expr("F.contains(A, B, C)", node, A=left, B=right, C=wanted)
            return expr(f"F.{names[0]}(A, B)", node, A=left, B=right)
        rest = [self._rewrite_delayed(c, self.visit) for c in node.comparators[1:]]
        made = expr("F.chain(N, A, B)", node, N=make_constant(names, node), A=left, B=right)
        made.args += rest
        return made

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == FRAME:
            return self.generic_visit(node)  # type: ignore[return-value]  # our own
        if (whole := self._fuse_operators(node)) is not None:
            return whole
        name = getattr(node.func, "id", None)
        if name in _OF_THE_FRAME and name not in self.scope.names.local:
            return self.generic_visit(node)  # type: ignore[return-value]
        args = [self._rewrite_argument(node, a) for a in node.args]
        keywords = [self._rewrite_keyword(k) for k in node.keywords]
        function = self.visit(node.func)
        made = expr("F.call(FUNCTION)", node, FUNCTION=function)
        made.args += args
        made.keywords = keywords
        return made

    def _rewrite_keyword(self, node: ast.keyword) -> ast.keyword:
        value = self.visit(node.value)
        if node.arg is None:
            value = expr("F.unpack_mapping(A)", node.value, A=value)
        return ast.copy_location(ast.keyword(node.arg, value), node)

    def _rewrite_argument(self, call: ast.Call, node: ast.expr) -> ast.expr:
        """Rewrite an argument; a generator that the call consumes becomes a list or a search."""
        if not isinstance(node, ast.GeneratorExp):
            return self.visit(node)
        match call.func:
            case ast.Name(id=name) if name in _CONSUME and name not in self.scope.names.local:
                pass
            case ast.Attribute(attr="join"):
                name = "join"
            case _:
                name = ""
        if len(call.args) > 1 + (name == "sum") or not name:
            raise CannotConvert("a generator expression", node)
        if name not in ("any", "all"):
            return self._rewrite_comprehension(node, "list")
        return expr("[FOUND]", node, FOUND=self._rewrite_comprehension(node, name))

    def visit_Starred(self, node: ast.Starred) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            node.value = expr("F.starred(A)", node, A=self.visit(node.value))
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        """Rewrite a dict as a call with ``(key, value)`` and ``(unpacked dict,)``."""
        self.generic_visit(node)
        if all(isinstance(key, ast.Constant) for key in node.keys):
            return node
        made = expr("F.make_dict()", node)
        made.args = [
            expr("(V,)", value, V=value) if key is None else expr("(K, V)", key, K=key, V=value)
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return made

    def visit_List(self, node: ast.List) -> ast.expr:
        return self._rewrite_display(node, "make_list")

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return self._rewrite_display(node, "make_tuple")

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return self._rewrite_display(node, "make_set", may_stay=False)

    def _rewrite_display(self, node: Any, make: str, *, may_stay: bool = True) -> ast.expr:
        """Rewrite ``[a, *b]`` as a call with ``(a,)`` and ``(b, True)``; a plain one may stay."""
        starred = [isinstance(item, ast.Starred) for item in node.elts]
        if (may_stay and not any(starred)) or isinstance(getattr(node, "ctx", None), ast.Store):
            return self.generic_visit(node)  # type: ignore[return-value]
        made = expr(f"F.{make}()", node)
        made.args = [
            expr("(A, True)", item, A=self.visit(item.value))
            if is_starred
            else expr("(A,)", item, A=self.visit(item))
            for item, is_starred in zip(node.elts, starred, strict=True)
        ]
        return made

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        key = self.rewrite_key(node.slice)
        return expr("F.item(A, K)", node, A=self.visit(node.value), K=key)

    def rewrite_key(self, node: ast.expr) -> ast.expr:
        """Rewrite a subscript's key as an ordinary expression, slices included."""
        if isinstance(node, ast.Slice):
            ends = [node.lower, node.upper, node.step]
            a, b, c = (make_constant(None, node) if e is None else self.visit(e) for e in ends)
            return expr("F.slice(A, B, C)", node, A=a, B=b, C=c)
        if isinstance(node, ast.Tuple):
            made = ast.Tuple([self.rewrite_key(e) for e in node.elts], ast.Load())
            return ast.copy_location(made, node)
        return self.visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.scope.may_be_unbound and isinstance(node.ctx, ast.Load):
            return expr("F.check_bound(A)", node, A=node)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        node.value = self.visit(node.value)
        if node.target.id in self.scope.names.noted:
            reader = make_thunk(ast.copy_location(ast.Name(node.target.id, ast.Load()), node))
            node.value = expr("F.note_cell_before(READER, V)", node, READER=reader, V=node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Rewrite an f-string as a call with its constants and ``(value, conversion, format)``."""
        made = expr("F.text()", node)
        made.args = [self._rewrite_piece(piece) for piece in node.values]
        return made

    def _rewrite_piece(self, piece: ast.expr) -> ast.expr:
        if not isinstance(piece, ast.FormattedValue):
            return piece
        spec = (
            make_constant("", piece) if piece.format_spec is None else self.visit(piece.format_spec)
        )
        how = make_constant(piece.conversion, piece)
        return expr("(A, B, C)", piece, A=self.visit(piece.value), B=how, C=spec)

    # --- comprehensions become functions with loops

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        return self._rewrite_comprehension(node, "list")

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        return self._rewrite_comprehension(node, "set")

    def visit_DictComp(self, node: ast.DictComp) -> ast.expr:
        return self._rewrite_comprehension(node, "dict")

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        raise CannotConvert("a generator expression", node)

    def _rewrite_comprehension(self, node: Any, kind: str) -> ast.expr:
        if any(g.is_async for g in node.generators):
            raise CannotConvert("an async comprehension", node)
        out = "__out__"
        empty = {"list": "OUT = []", "dict": "OUT = {}", "set": "OUT = F.new_set()"}
        step = {
            "list": "F.grow(OUT, E)", "set": "OUT.add(E)", "dict": "OUT[K] = E",
            "any": "if E: return True", "all": "if not E: return False",
        }  # fmt: skip
        last = {"any": "return False", "all": "return True"}.get(kind, "return OUT")
        parts: dict[str, Any] = {"OUT": out}
        if kind == "dict":
            parts["K"], parts["E"] = node.key, node.value
        else:
            parts["E"] = node.elt
        body = stmts(step[kind], node, **parts)
        for n, g in reversed(list(enumerate(node.generators))):
            for test in reversed(g.ifs):
                body = [ast.copy_location(ast.If(test, body, []), test)]
            source = g.iter if n else ast.copy_location(ast.Name(ITERABLE, ast.Load()), node)
            body = [ast.copy_location(ast.For(g.target, source, body, []), node)]
        body = [*stmts(empty.get(kind, "pass"), node, **parts), *body, *stmts(last, node, **parts)]
        name = self.scope.make_name("comprehension")
        return self._hoist_function(node, name, body)

    def _hoist_function(self, node: Any, name: str, body: list[ast.stmt]) -> ast.expr:
        first = self.visit(node.generators[0].iter)
        (made,) = stmts(f"def NAME({ITERABLE}):\n    BODY", node, BODY=body)
        made.name = name  # type: ignore[attr-defined]
        assigned = find_walrus_names(node)
        if assigned:
            made.body.insert(0, ast.copy_location(ast.Nonlocal(sorted(assigned)), node))
            self.scope.borrow_names(assigned)
        self.hoisted.append(self.scope.convert_inner(made))
        function = ast.copy_location(ast.Name(name, ast.Load()), node)
        return expr("F.run(FUNCTION, IT)", node, FUNCTION=function, IT=first)

    # --- what stays

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return node

    def visit_Yield(self, node: ast.AST) -> ast.expr:
        raise CannotConvert("a generator", node)

    visit_YieldFrom = visit_Yield  # noqa: N815 - ast's name

    def visit_Await(self, node: ast.AST) -> ast.expr:
        raise CannotConvert("a coroutine", node)


__all__ = ["COMPREHENSIONS", "FRAME", "ExpressionRewriter"]
