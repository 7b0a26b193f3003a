"""Rewriting of statements: bodies stay in the function, inside loops of one trip.

`forall._divergence.frame` describes the frame on which the generated code calls.
"""

from __future__ import annotations

import ast
import itertools
from typing import Any

from forall._ast_rewrite.expressions import ExpressionRewriter
from forall._ast_rewrite.liveness import (
    Liveness,
    ScopeNames,
    find_assigned_names,
    list_argument_names,
)
from forall._ast_rewrite.pure_compute import sides
from forall._ast_rewrite.quasiquote import (
    FRAME,
    ITERABLE,
    expr,
    make_constant,
    make_lambda,
    make_thunk,
    stmts,
)
from forall._ast_rewrite.scalar_code import ScalarCode
from forall._ast_rewrite.templates import (
    AGAIN,
    AT_ONCE,
    FINISH,
    FINISH_ELSE,
    FOR,
    IF,
    IF_ELSE,
    IN_PLACE,
    LEAVE,
    SCALAR,
    SIDE,
    WHILE,
)
from forall._ast_rewrite.unsupported import CannotConvert

_sites = itertools.count()  # a number for each `if` that is predicated


class StatementRewriter:
    """A rewriter of the body of one function."""

    def __init__(self, f: ast.FunctionDef, scope: Any) -> None:
        self.scope = scope
        self.names: ScopeNames = scope.names
        self.live = Liveness(f, self.names, all_live=_may_read_all_names(f))
        if f.body:
            read_first = self.live.before[f.body[0]] - self.live.always
            scope.may_be_unbound = read_first & self.names.local - {*list_argument_names(f.args)}
        self.loops: list[str] = []  # the records of the loops around, innermost last
        self.trips = 0  # how many one-trip loops around

    def rewrite_body(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        return [made for node in nodes for made in self.rewrite_statement(node)]

    def rewrite_statement(self, node: ast.stmt) -> list[ast.stmt]:
        rewrite = getattr(self, f"_rewrite_{type(node).__name__.lower()}", None)
        if rewrite is None:
            raise CannotConvert(f"a statement of kind {type(node).__name__}", node)
        e = ExpressionRewriter(self.scope)
        made = rewrite(node, e)
        return [*e.hoisted, *made]

    # --- lanes that leave, and names that are saved

    def _make_dead_check(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the check after a construct in which all lanes may have left."""
        if not _may_exit(node):
            return []
        way_out = "break" if self.trips else "return F.result()"
        return stmts(f"if F.dead:\n    {way_out}", node)

    def _rewrite_trip(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        self.trips += 1
        try:
            return self.rewrite_body(nodes)
        finally:
            self.trips -= 1

    def _list_saved_names(self, names: set[str]) -> list[str]:
        return sorted(names - self.names.noted - self.names.globals)

    def _make_name_tuple(self, names: list[str], node: ast.stmt) -> ast.expr:
        return make_constant(tuple(self.scope.mangle_name(n) for n in names), node)

    def _restore_names(self, record: str, method: str, names: list[str], node: ast.stmt) -> list:
        """Return ``a, b = record.method(F.locals())``; a name without a value is unbound again."""
        value = expr(f"RECORD.{method}(F.locals())", node, RECORD=record)
        if not names:
            return stmts("VALUE", node, VALUE=value)
        target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
        made = stmts("TARGET = VALUE", node, TARGET=target, VALUE=value)
        unbound = [
            s for n in names for s in stmts("if NAME is F.undefined:\n    del NAME", node, NAME=n)
        ]
        ast.fix_missing_locations(made[0])
        return made + stmts("if RECORD.holes:\n    UNBOUND", node, RECORD=record, UNBOUND=unbound)

    # --- constructs

    def _rewrite_if(self, node: ast.If, e: ExpressionRewriter) -> list[ast.stmt]:
        record = self.scope.make_name("if")
        after = self.live.after[node]
        first = find_assigned_names(node.body)
        joins = self._list_saved_names((first | find_assigned_names(node.orelse)) & after)
        kept = self._list_saved_names(
            first & self.live.find_live_at_start(node.orelse, node) | set(joins)
        )
        found = sides(node, joins, self.names)
        test = e.rewrite_test(node.test)
        parts: dict[str, Any] = {
            "IF": record,
            "TEST": test,
            "KEPT": self._make_name_tuple(kept, node),
            "JOINS": self._make_name_tuple(joins, node),
            "BODY": self._rewrite_trip(node.body),
        }
        if node.orelse:
            parts["ORELSE"] = self._rewrite_trip(node.orelse)
            parts["FLIP"] = self._restore_names(record, "flip", kept, node)
            parts["MEET"] = self._restore_names(record, "join", joins, node)
        else:
            parts["MEET"] = self._restore_names(record, "skip", joins, node)
        apart = stmts(IF_ELSE if node.orelse else IF, node, **parts)
        if found is not None:
            return self._rewrite_predicated(node, joins, found, apart)
        return apart + self._make_dead_check(node)

    def _rewrite_predicated(
        self, node: ast.If, joins: list[str], found: Any, apart: list
    ) -> list[ast.stmt]:
        """Rewrite an ``if`` whose sides only compute: predicated on raw stacks, else diverging."""
        test, reads, both = found
        made: list[ast.stmt] = []
        given = []
        for side in both:
            names = self._make_name_tuple(side.reads, node), self._make_name_tuple(side.binds, node)
            name = self.scope.make_name("side")
            values = ast.Tuple([ast.Name(n, ast.Load()) for n in side.binds], ast.Load())
            (f,) = stmts(SIDE, node, BODY=side.body, VALUES=values)
            f.name, f.args = name, make_lambda(side.reads, values).args  # type: ignore[attr-defined]
            made.append(f)
            given.append(expr("(A, B, C)", node, A=name, B=names[0], C=names[1]))
        asked = expr(
            "(A, B)", node, A=make_lambda(reads, test), B=self._make_name_tuple(reads, node)
        )
        target = ast.Tuple([ast.Name(n, ast.Store()) for n in joins], ast.Store())
        made += stmts(
            AT_ONCE, node,
            DONE=self.scope.make_name("done"), SITE=make_constant(next(_sites), node),
            TEST=asked, YES=given[0], NO=given[1], JOINS=self._make_name_tuple(joins, node),
            APART=apart, TARGET=target,
        )  # fmt: skip
        for s in made:
            ast.fix_missing_locations(s)
        return made

    def _rewrite_scalarcode(self, node: ScalarCode, e: ExpressionRewriter) -> list[ast.stmt]:
        """Rewrite scalar code: called example by example, or else run as it is written."""
        reads = [
            expr("(A, B)", node, A=make_constant(how, node), B=make_thunk(e.visit(tensor)))
            for how, tensor in node.reads
        ]
        names = [node.way, *itertools.chain(*node.gives)]
        target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
        try:
            as_written = self.rewrite_body(node.body)
        except CannotConvert as cannot:
            reason = make_constant(cannot.reason, node)
            as_written = stmts("raise F.Unsplittable(REASON)", node, REASON=reason)
        made = stmts(
            SCALAR, node, DONE=self.scope.make_name("done"), FUNCTION=node.function,
            NAMES=self._make_name_tuple(node.takes, node),
            OPTIONAL=self._make_name_tuple(node.optional, node),
            GIVES=make_constant((*map(len, node.gives),), node),
            READS=ast.copy_location(ast.Tuple(reads, ast.Load()), node),
            CHANGES=make_constant(node.may_change, node), AS_WRITTEN=as_written,
            TARGET=target, AFTER=self.rewrite_body(node.orelse),
        )  # fmt: skip
        for s in made:
            ast.fix_missing_locations(s)
        return made

    def _find_loop_names(self, node: ast.While | ast.For) -> list[str]:
        written = find_assigned_names(node.body) | find_assigned_names(node.orelse)
        written |= find_assigned_names(
            [node.test] if isinstance(node, ast.While) else [node.target]
        )
        return self._list_saved_names(written & (self.live.head[node] | self.live.after[node]))

    def _rewrite_while(self, node: ast.While, e: ExpressionRewriter) -> list[ast.stmt]:
        return self._rewrite_loop(WHILE, node, TEST=e.rewrite_test(node.test))

    def _rewrite_for(self, node: ast.For, e: ExpressionRewriter) -> list[ast.stmt]:
        source = e.visit(node.iter)
        kept = isinstance(node.iter, (ast.Name, ast.Attribute, ast.Subscript))
        if kept and getattr(node.iter, "id", "") != ITERABLE:
            source = expr("F.refuse_iterator(A)", node.iter, A=source)
        plain = all(isinstance(n, (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context))
                    for n in ast.walk(node.target))  # fmt: skip
        first: list[ast.stmt] = []
        target: ast.expr = node.target
        if not plain or find_assigned_names([target]) & (self.names.noted | self.names.globals):
            name = self.scope.make_name("item")
            target = ast.copy_location(ast.Name(name, ast.Store()), target)
            value = ast.copy_location(ast.Name(name, ast.Load()), target)
            first = self._store_target(node.target, value, e)
            first = self._log_old_values(node.target, node) + first
        items = self.scope.make_name("items")
        return self._rewrite_loop(FOR, node, first, IT=source, TARGET=target, ITEMS=items)

    def _rewrite_loop(
        self, text: str, node: Any, first: list[ast.stmt] | None = None, **parts: Any
    ) -> list[ast.stmt]:
        record = self.scope.make_name("loop")
        names = self._find_loop_names(node)
        self.loops.append(record)
        body = (first or []) + self._rewrite_trip(node.body)
        self.loops.pop()
        again = stmts(
            AGAIN, node, LOOP=record, REJOIN=self._restore_names(record, "rejoin", names, node)
        )
        meet = self._restore_names(record, "finish", names, node)
        if node.orelse:
            normal = self._restore_names(record, "finish_normal", names, node)
            orelse = self._rewrite_trip(node.orelse)
            finish = stmts(FINISH_ELSE, node, LOOP=record, NORMAL=normal, MEET=meet, ORELSE=orelse)
        else:
            finish = stmts(FINISH, node, LOOP=record, MEET=meet)
        made = stmts(text, node, LOOP=record, BODY=body, AGAIN=again, FINISH=finish, **parts)
        made[0].value.args = list(self._make_name_tuple(names, node).elts)  # type: ignore[attr-defined]
        return made + self._make_dead_check(node)

    def _rewrite_return(self, node: ast.Return, e: ExpressionRewriter) -> list[ast.stmt]:
        value = make_constant(None, node) if node.value is None else e.visit(node.value)
        if self.trips:
            return stmts(LEAVE, node, VALUE=self.scope.make_name("value"), RESULT=value)
        if self.scope.leaves:
            return stmts("return F.result(VALUE)", node, VALUE=value)
        return stmts("return VALUE", node, VALUE=value)

    def _rewrite_break(self, node: ast.Break, e: ExpressionRewriter) -> list[ast.stmt]:
        text = "LOOP.note_break(F.locals() if F.apart else None)\nbreak"
        return stmts(text, node, LOOP=self.loops[-1])

    def _rewrite_continue(self, node: ast.Continue, e: ExpressionRewriter) -> list[ast.stmt]:
        text = "LOOP.note_continue(F.locals() if F.apart else None)\nbreak"
        return stmts(text, node, LOOP=self.loops[-1])

    def _rewrite_with(self, node: ast.With, e: ExpressionRewriter) -> list[ast.stmt]:
        mark = self.scope.make_name("mark")
        for item in node.items:
            made = e.visit(item.context_expr)
            item.context_expr = expr("F.manager(A, MARK)", node, A=made, MARK=mark)
        targets = [i.optional_vars for i in node.items if i.optional_vars is not None]
        before = [s for t in targets for s in self._log_old_values(t, node)]
        for t in targets:
            if any(isinstance(n, (ast.Attribute, ast.Subscript)) for n in ast.walk(t)):
                raise CannotConvert("with .. as an attribute or an item", node)
        ended = stmts("MARK.end()", node.body[-1], MARK=mark)
        node.body = self.rewrite_body(node.body) + ended
        before += stmts("MARK = F.mark()", node, MARK=mark)
        return [*before, node, *stmts("F.unmark(MARK)", node, MARK=mark)]

    def _rewrite_try(self, node: ast.Try, e: ExpressionRewriter) -> list[ast.stmt]:
        if node.handlers or node.orelse:
            raise CannotConvert("try .. except", node)
        # a lane that leaves early would have to run the finally at once
        if any(_may_exit(s) for s in (*node.body, *node.finalbody)):
            raise CannotConvert("return, break or continue in a try .. finally", node)
        node.body = self.rewrite_body(node.body)
        node.finalbody = self.rewrite_body(node.finalbody)
        return [node]

    # --- simple statements

    def _rewrite_assign(self, node: ast.Assign, e: ExpressionRewriter) -> list[ast.stmt]:
        value = e.visit(node.value)
        before = [s for t in node.targets for s in self._log_old_values(t, node)]
        if len(node.targets) == 1:
            return before + self._store_target(node.targets[0], value, e)
        name = self.scope.make_name("value")
        made = stmts("NAME = VALUE", node, NAME=name, VALUE=value)
        for target in node.targets:
            loaded = ast.copy_location(ast.Name(name, ast.Load()), node)
            made += self._store_target(target, loaded, e)
        return before + made

    def _store_target(
        self, target: ast.expr, value: ast.expr, e: ExpressionRewriter
    ) -> list[ast.stmt]:
        """Return ``target = value`` for a value that is rewritten already."""
        match target:
            case ast.Name():
                return [ast.copy_location(ast.Assign([target], value), value)]
            case ast.Attribute():
                name = make_constant(self.scope.mangle_name(target.attr), target)
                owner = e.visit(target.value)
                return stmts("F.store_attr(V, X, N)", target, V=value, X=owner, N=name)
            case ast.Subscript():
                owner, key = e.visit(target.value), e.rewrite_key(target.slice)
                return stmts("F.store_item(V, X, K)", target, V=value, X=owner, K=key)
            case ast.Starred():
                return self._store_target(target.value, value, e)
        return self._unpack_targets(target, value, e)

    def _unpack_targets(
        self, target: Any, value: ast.expr, e: ExpressionRewriter
    ) -> list[ast.stmt]:
        """Rewrite ``a, x.b = value``: names are bound first, then other targets from the left."""
        if not isinstance(value, ast.Tuple):
            value = expr("F.unpack_items(V)", value, V=value)
        later = []
        for n, part in enumerate(target.elts):
            inner = part.value if isinstance(part, ast.Starred) else part
            if isinstance(inner, ast.Name):
                continue
            name = self.scope.make_name("part")
            store = ast.copy_location(ast.Name(name, ast.Store()), inner)
            target.elts[n] = (
                ast.copy_location(ast.Starred(store, ast.Store()), part)
                if isinstance(part, ast.Starred)
                else store
            )
            later += self._store_target(
                inner, ast.copy_location(ast.Name(name, ast.Load()), inner), e
            )
        made = ast.copy_location(ast.Assign([target], value), value)
        return [made, *later]

    def _rewrite_annassign(self, node: ast.AnnAssign, e: ExpressionRewriter) -> list[ast.stmt]:
        if node.value is None:
            return [node]
        before = self._log_old_values(node.target, node)
        return before + self._store_target(node.target, e.visit(node.value), e)

    def _rewrite_augassign(self, node: ast.AugAssign, e: ExpressionRewriter) -> list[ast.stmt]:
        op = make_constant(IN_PLACE[type(node.op)], node)
        value = e.visit(node.value)
        target: Any = node.target
        before = self._log_old_values(target, node)
        if isinstance(target, ast.Name):
            old = ast.copy_location(ast.Name(target.id, ast.Load()), target)
            new = expr("F.update_in_place(OP, A, B)", node, OP=op, A=old, B=value)
            return [*before, ast.copy_location(ast.Assign([target], new), node)]
        owner = self.scope.make_name("owner")
        made = stmts("OWNER = X", node, OWNER=owner, X=e.visit(target.value))
        if isinstance(target, ast.Attribute):
            old = expr("OWNER", node, OWNER=owner)
            old = ast.copy_location(ast.Attribute(old, target.attr, ast.Load()), target)
            new = expr("F.update_in_place(OP, A, B)", node, OP=op, A=old, B=value)
            name = make_constant(self.scope.mangle_name(target.attr), target)
            return made + stmts("F.store_attr(V, X, N)", node, V=new, X=owner, N=name)
        key = self.scope.make_name("key")
        made += stmts("KEY = K", node, KEY=key, K=e.rewrite_key(target.slice))
        old = expr("F.item(X, K)", node, X=owner, K=key)
        new = expr("F.update_in_place(OP, A, B)", node, OP=op, A=old, B=value)
        return made + stmts("F.store_item(V, X, K)", node, V=new, X=owner, K=key)

    def _rewrite_delete(self, node: ast.Delete, e: ExpressionRewriter) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for target in node.targets:
            match target:
                case ast.Name():
                    name = ast.copy_location(ast.Name(target.id, ast.Load()), target)
                    made += stmts(
                        "F.check_bound(NAME)", node, NAME=name
                    )  # for all examples that run
                    made += self._log_old_values(target, node)
                    made.append(ast.copy_location(ast.Delete([target]), node))
                case ast.Attribute():
                    name = make_constant(self.scope.mangle_name(target.attr), target)
                    owner = e.visit(target.value)
                    made += stmts("F.delete_attr(X, N)", node, X=owner, N=name)
                case ast.Subscript():
                    owner, key = e.visit(target.value), e.rewrite_key(target.slice)
                    made += stmts("F.delete_item(X, K)", node, X=owner, K=key)
                case _:
                    raise CannotConvert("del of several targets at once", node)
        return made

    def _log_old_values(self, target: ast.AST, node: ast.stmt) -> list[ast.stmt]:
        """Return the code that logs old values before a statement binds names seen elsewhere."""
        names = find_assigned_names([target])
        made = []
        for name in sorted(names & self.names.noted):
            reader = make_thunk(ast.copy_location(ast.Name(name, ast.Load()), node))
            made += stmts("F.note_cell(READER)", node, READER=reader)
        for name in sorted(names & self.names.globals):
            key = make_constant(name, node)
            made += stmts("F.note_global(F.globals(), NAME)", node, NAME=key)
        return made

    def _rewrite_expr(self, node: ast.Expr, e: ExpressionRewriter) -> list[ast.stmt]:
        if isinstance(node.value, ast.Constant):
            return [node]
        node.value = e.visit(node.value)
        return [node]

    def _rewrite_raise(self, node: ast.Raise, e: ExpressionRewriter) -> list[ast.stmt]:
        node.exc = e.visit(node.exc) if node.exc else None
        node.cause = e.visit(node.cause) if node.cause else None
        return [node]

    def _rewrite_functiondef(self, node: ast.FunctionDef, e: ExpressionRewriter) -> list[ast.stmt]:
        node.decorator_list = [e.visit(d) for d in node.decorator_list]
        node.args.defaults = [e.visit(d) for d in node.args.defaults]
        node.args.kw_defaults = [d and e.visit(d) for d in node.args.kw_defaults]
        return [*self._log_old_values(node, node), node]

    def _rewrite_binding(self, node: ast.stmt, e: ExpressionRewriter) -> list[ast.stmt]:
        return [*self._log_old_values(node, node), node]

    _rewrite_import = _rewrite_importfrom = _rewrite_classdef = _rewrite_pass = _rewrite_binding
    _rewrite_asyncfunctiondef = _rewrite_binding

    def _rewrite_global(self, node: ast.stmt, e: ExpressionRewriter) -> list[ast.stmt]:
        return []  # the function declares them at its top

    _rewrite_nonlocal = _rewrite_global


def _may_exit(node: ast.stmt) -> bool:
    """True if a statement has a ``return``, or a ``break`` or ``continue`` of an outer loop."""

    def search(nodes: list[ast.stmt], *, in_loop: bool) -> bool:
        for n in nodes:
            if isinstance(n, ast.Return) or (
                not in_loop and isinstance(n, (ast.Break, ast.Continue))
            ):
                return True
            if isinstance(n, (ast.While, ast.For)):
                if search(n.body, in_loop=True) or search(n.orelse, in_loop=in_loop):
                    return True
            elif isinstance(n, (ast.If, ast.With, ast.Try)):
                blocks = [getattr(n, b, []) for b in ("body", "orelse", "finalbody")]
                if any(search(b, in_loop=in_loop) for b in blocks):
                    return True
        return False

    return search([node], in_loop=False)


def _may_read_all_names(f: ast.FunctionDef) -> bool:
    """True if a function may read its names by a call such as `locals` or `eval`."""
    seers = {"locals", "vars", "eval", "exec", "dir", "breakpoint"}
    return any(isinstance(n, ast.Name) and n.id in seers for n in ast.walk(f))


__all__ = ["FRAME", "StatementRewriter"]
