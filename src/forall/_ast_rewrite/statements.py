"""Rewriting of statements: bodies stay in the function, inside loops of one trip.

`forall._divergence.frame` describes the frame on which the generated code calls.
"""

from __future__ import annotations

import ast
import itertools
from typing import Any

from forall._ast_rewrite.expressions import Expressions
from forall._ast_rewrite.liveness import (
    Liveness,
    Names,
    arguments,
    bound,
)
from forall._ast_rewrite.pure_compute import sides
from forall._ast_rewrite.quasiquote import (
    FRAME,
    ITERABLE,
    constant,
    delayed,
    expr,
    function,
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


class Statements:
    """A rewriter of the body of one function."""

    def __init__(self, f: ast.FunctionDef, scope: Any) -> None:
        self.scope = scope
        self.names: Names = scope.names
        self.live = Liveness(f, self.names, all_live=_sees_all(f))
        if f.body:
            read_first = self.live.before[f.body[0]] - self.live.always
            scope.may_be_unbound = read_first & self.names.local - {*arguments(f.args)}
        self.loops: list[str] = []  # the records of the loops around, innermost last
        self.trips = 0  # how many one-trip loops around

    def body(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        return [made for node in nodes for made in self.statement(node)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        rewrite = getattr(self, f"_{type(node).__name__.lower()}", None)
        if rewrite is None:
            raise CannotConvert(f"a statement of kind {type(node).__name__}", node)
        e = Expressions(self.scope)
        made = rewrite(node, e)
        return [*e.hoisted, *made]

    # --- lanes that leave, and names that are saved

    def _dead(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the check after a construct in which all lanes may have left."""
        if not _may_exit(node):
            return []
        way_out = "break" if self.trips else "return F.result()"
        return stmts(f"if F.dead:\n    {way_out}", node)

    def _trip(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        self.trips += 1
        try:
            return self.body(nodes)
        finally:
            self.trips -= 1

    def _kept(self, names: set[str]) -> list[str]:
        return sorted(names - self.names.noted - self.names.globals)

    def _strings(self, names: list[str], node: ast.stmt) -> ast.expr:
        return constant(tuple(self.scope.mangled(n) for n in names), node)

    def _restored(self, record: str, method: str, names: list[str], node: ast.stmt) -> list:
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

    def _if(self, node: ast.If, e: Expressions) -> list[ast.stmt]:
        record = self.scope.fresh("if")
        after = self.live.after[node]
        first = bound(node.body)
        joins = self._kept((first | bound(node.orelse)) & after)
        kept = self._kept(first & self.live.start(node.orelse, node) | set(joins))
        found = sides(node, joins, self.names)
        test = e.test(node.test)
        parts: dict[str, Any] = {
            "IF": record,
            "TEST": test,
            "KEPT": self._strings(kept, node),
            "JOINS": self._strings(joins, node),
            "BODY": self._trip(node.body),
        }
        if node.orelse:
            parts["ORELSE"] = self._trip(node.orelse)
            parts["FLIP"] = self._restored(record, "flip", kept, node)
            parts["MEET"] = self._restored(record, "join", joins, node)
        else:
            parts["MEET"] = self._restored(record, "skip", joins, node)
        apart = stmts(IF_ELSE if node.orelse else IF, node, **parts)
        if found is not None:
            return self._at_once(node, joins, found, apart)
        return apart + self._dead(node)

    def _at_once(self, node: ast.If, joins: list[str], found: Any, apart: list) -> list[ast.stmt]:
        """Rewrite an ``if`` whose sides only compute: predicated on raw stacks, else diverging."""
        test, reads, both = found
        made: list[ast.stmt] = []
        given = []
        for side in both:
            names = self._strings(side.reads, node), self._strings(side.binds, node)
            name = self.scope.fresh("side")
            values = ast.Tuple([ast.Name(n, ast.Load()) for n in side.binds], ast.Load())
            (f,) = stmts(SIDE, node, BODY=side.body, VALUES=values)
            f.name, f.args = name, function(side.reads, values).args  # type: ignore[attr-defined]
            made.append(f)
            given.append(expr("(A, B, C)", node, A=name, B=names[0], C=names[1]))
        asked = expr("(A, B)", node, A=function(reads, test), B=self._strings(reads, node))
        target = ast.Tuple([ast.Name(n, ast.Store()) for n in joins], ast.Store())
        made += stmts(
            AT_ONCE, node, DONE=self.scope.fresh("done"), SITE=constant(next(_sites), node),
            TEST=asked, YES=given[0], NO=given[1], JOINS=self._strings(joins, node),
            APART=apart, TARGET=target,
        )  # fmt: skip
        for s in made:
            ast.fix_missing_locations(s)
        return made

    def _scalarcode(self, node: ScalarCode, e: Expressions) -> list[ast.stmt]:
        """Rewrite scalar code: called example by example, or else run as it is written."""
        reads = [
            expr("(A, B)", node, A=constant(how, node), B=delayed(e.visit(tensor)))
            for how, tensor in node.reads
        ]
        names = [node.way, *itertools.chain(*node.gives)]
        target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
        try:
            as_written = self.body(node.body)
        except CannotConvert as cannot:
            reason = constant(cannot.reason, node)
            as_written = stmts("raise F.Unsplittable(REASON)", node, REASON=reason)
        made = stmts(
            SCALAR, node, DONE=self.scope.fresh("done"), FUNCTION=node.function,
            NAMES=self._strings(node.takes, node), OPTIONAL=self._strings(node.optional, node),
            GIVES=constant((*map(len, node.gives),), node),
            READS=ast.copy_location(ast.Tuple(reads, ast.Load()), node),
            CHANGES=constant(node.may_change, node), AS_WRITTEN=as_written,
            TARGET=target, AFTER=self.body(node.orelse),
        )  # fmt: skip
        for s in made:
            ast.fix_missing_locations(s)
        return made

    def _loop_names(self, node: ast.While | ast.For) -> list[str]:
        written = bound(node.body) | bound(node.orelse)
        written |= bound([node.test] if isinstance(node, ast.While) else [node.target])
        return self._kept(written & (self.live.head[node] | self.live.after[node]))

    def _while(self, node: ast.While, e: Expressions) -> list[ast.stmt]:
        return self._looping(WHILE, node, TEST=e.test(node.test))

    def _for(self, node: ast.For, e: Expressions) -> list[ast.stmt]:
        source = e.visit(node.iter)
        kept = isinstance(node.iter, (ast.Name, ast.Attribute, ast.Subscript))
        if kept and getattr(node.iter, "id", "") != ITERABLE:
            source = expr("F.many_times(A)", node.iter, A=source)
        plain = all(isinstance(n, (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context))
                    for n in ast.walk(node.target))  # fmt: skip
        first: list[ast.stmt] = []
        target: ast.expr = node.target
        if not plain or bound([target]) & (self.names.noted | self.names.globals):
            name = self.scope.fresh("item")
            target = ast.copy_location(ast.Name(name, ast.Store()), target)
            value = ast.copy_location(ast.Name(name, ast.Load()), target)
            first = self._stored(node.target, value, e)
            first = self._noting(node.target, node) + first
        items = self.scope.fresh("items")
        return self._looping(FOR, node, first, IT=source, TARGET=target, ITEMS=items)

    def _looping(
        self, text: str, node: Any, first: list[ast.stmt] | None = None, **parts: Any
    ) -> list[ast.stmt]:
        record = self.scope.fresh("loop")
        names = self._loop_names(node)
        self.loops.append(record)
        body = (first or []) + self._trip(node.body)
        self.loops.pop()
        again = stmts(
            AGAIN, node, LOOP=record, REJOIN=self._restored(record, "rejoin", names, node)
        )
        meet = self._restored(record, "finish", names, node)
        if node.orelse:
            normal = self._restored(record, "finish_normal", names, node)
            orelse = self._trip(node.orelse)
            finish = stmts(FINISH_ELSE, node, LOOP=record, NORMAL=normal, MEET=meet, ORELSE=orelse)
        else:
            finish = stmts(FINISH, node, LOOP=record, MEET=meet)
        made = stmts(text, node, LOOP=record, BODY=body, AGAIN=again, FINISH=finish, **parts)
        made[0].value.args = list(self._strings(names, node).elts)  # type: ignore[attr-defined]
        return made + self._dead(node)

    def _return(self, node: ast.Return, e: Expressions) -> list[ast.stmt]:
        value = constant(None, node) if node.value is None else e.visit(node.value)
        if self.trips:
            return stmts(LEAVE, node, VALUE=self.scope.fresh("value"), RESULT=value)
        if self.scope.leaves:
            return stmts("return F.result(VALUE)", node, VALUE=value)
        return stmts("return VALUE", node, VALUE=value)

    def _break(self, node: ast.Break, e: Expressions) -> list[ast.stmt]:
        text = "LOOP.broke(F.locals() if F.apart else None)\nbreak"
        return stmts(text, node, LOOP=self.loops[-1])

    def _continue(self, node: ast.Continue, e: Expressions) -> list[ast.stmt]:
        text = "LOOP.continued(F.locals() if F.apart else None)\nbreak"
        return stmts(text, node, LOOP=self.loops[-1])

    def _with(self, node: ast.With, e: Expressions) -> list[ast.stmt]:
        for item in node.items:
            item.context_expr = expr("F.manager(A)", node, A=e.visit(item.context_expr))
        targets = [i.optional_vars for i in node.items if i.optional_vars is not None]
        before = [s for t in targets for s in self._noting(t, node)]
        for t in targets:
            if any(isinstance(n, (ast.Attribute, ast.Subscript)) for n in ast.walk(t)):
                raise CannotConvert("with .. as an attribute or an item", node)
        mark = self.scope.fresh("mark")
        node.body = self.body(node.body)
        before += stmts("MARK = F.mark()", node, MARK=mark)
        return [*before, node, *stmts("F.unmark(MARK)", node, MARK=mark)]

    def _try(self, node: ast.Try, e: Expressions) -> list[ast.stmt]:
        if node.handlers or node.orelse:
            raise CannotConvert("try .. except", node)
        # a lane that leaves early would have to run the finally at once
        if any(_may_exit(s) for s in (*node.body, *node.finalbody)):
            raise CannotConvert("return, break or continue in a try .. finally", node)
        node.body = self.body(node.body)
        node.finalbody = self.body(node.finalbody)
        return [node]

    # --- simple statements

    def _assign(self, node: ast.Assign, e: Expressions) -> list[ast.stmt]:
        value = e.visit(node.value)
        before = [s for t in node.targets for s in self._noting(t, node)]
        if len(node.targets) == 1:
            return before + self._stored(node.targets[0], value, e)
        name = self.scope.fresh("value")
        made = stmts("NAME = VALUE", node, NAME=name, VALUE=value)
        for target in node.targets:
            loaded = ast.copy_location(ast.Name(name, ast.Load()), node)
            made += self._stored(target, loaded, e)
        return before + made

    def _stored(self, target: ast.expr, value: ast.expr, e: Expressions) -> list[ast.stmt]:
        """Return ``target = value`` for a value that is rewritten already."""
        match target:
            case ast.Name():
                return [ast.copy_location(ast.Assign([target], value), value)]
            case ast.Attribute():
                name = constant(self.scope.mangled(target.attr), target)
                owner = e.visit(target.value)
                return stmts("F.store_attr(V, X, N)", target, V=value, X=owner, N=name)
            case ast.Subscript():
                owner, key = e.visit(target.value), e.key(target.slice)
                return stmts("F.store_item(V, X, K)", target, V=value, X=owner, K=key)
            case ast.Starred():
                return self._stored(target.value, value, e)
        return self._unpacked(target, value, e)

    def _unpacked(self, target: Any, value: ast.expr, e: Expressions) -> list[ast.stmt]:
        """Rewrite ``a, x.b = value``: names are bound first, then other targets from the left."""
        if not isinstance(value, ast.Tuple):
            value = expr("F.unpacked(V)", value, V=value)
        later = []
        for n, part in enumerate(target.elts):
            inner = part.value if isinstance(part, ast.Starred) else part
            if isinstance(inner, ast.Name):
                continue
            name = self.scope.fresh("part")
            store = ast.copy_location(ast.Name(name, ast.Store()), inner)
            target.elts[n] = (
                ast.copy_location(ast.Starred(store, ast.Store()), part)
                if isinstance(part, ast.Starred)
                else store
            )
            later += self._stored(inner, ast.copy_location(ast.Name(name, ast.Load()), inner), e)
        made = ast.copy_location(ast.Assign([target], value), value)
        return [made, *later]

    def _annassign(self, node: ast.AnnAssign, e: Expressions) -> list[ast.stmt]:
        if node.value is None:
            return [node]
        before = self._noting(node.target, node)
        return before + self._stored(node.target, e.visit(node.value), e)

    def _augassign(self, node: ast.AugAssign, e: Expressions) -> list[ast.stmt]:
        op = constant(IN_PLACE[type(node.op)], node)
        value = e.visit(node.value)
        target: Any = node.target
        before = self._noting(target, node)
        if isinstance(target, ast.Name):
            old = ast.copy_location(ast.Name(target.id, ast.Load()), target)
            new = expr("F.updated(OP, A, B)", node, OP=op, A=old, B=value)
            return [*before, ast.copy_location(ast.Assign([target], new), node)]
        owner = self.scope.fresh("owner")
        made = stmts("OWNER = X", node, OWNER=owner, X=e.visit(target.value))
        if isinstance(target, ast.Attribute):
            old = expr("OWNER", node, OWNER=owner)
            old = ast.copy_location(ast.Attribute(old, target.attr, ast.Load()), target)
            new = expr("F.updated(OP, A, B)", node, OP=op, A=old, B=value)
            name = constant(self.scope.mangled(target.attr), target)
            return made + stmts("F.store_attr(V, X, N)", node, V=new, X=owner, N=name)
        key = self.scope.fresh("key")
        made += stmts("KEY = K", node, KEY=key, K=e.key(target.slice))
        old = expr("F.item(X, K)", node, X=owner, K=key)
        new = expr("F.updated(OP, A, B)", node, OP=op, A=old, B=value)
        return made + stmts("F.store_item(V, X, K)", node, V=new, X=owner, K=key)

    def _delete(self, node: ast.Delete, e: Expressions) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for target in node.targets:
            match target:
                case ast.Name():
                    name = ast.copy_location(ast.Name(target.id, ast.Load()), target)
                    made += stmts("F.bound(NAME)", node, NAME=name)  # for all examples that run
                    made += self._noting(target, node)
                    made.append(ast.copy_location(ast.Delete([target]), node))
                case ast.Attribute():
                    name = constant(self.scope.mangled(target.attr), target)
                    owner = e.visit(target.value)
                    made += stmts("F.delete_attr(X, N)", node, X=owner, N=name)
                case ast.Subscript():
                    owner, key = e.visit(target.value), e.key(target.slice)
                    made += stmts("F.delete_item(X, K)", node, X=owner, K=key)
                case _:
                    raise CannotConvert("del of several targets at once", node)
        return made

    def _noting(self, target: ast.AST, node: ast.stmt) -> list[ast.stmt]:
        """Return the code that logs old values before a statement binds names seen elsewhere."""
        names = bound([target])
        made = []
        for name in sorted(names & self.names.noted):
            reader = delayed(ast.copy_location(ast.Name(name, ast.Load()), node))
            made += stmts("F.note_cell(READER)", node, READER=reader)
        for name in sorted(names & self.names.globals):
            key = constant(name, node)
            made += stmts("F.note_global(F.globals(), NAME)", node, NAME=key)
        return made

    def _expr(self, node: ast.Expr, e: Expressions) -> list[ast.stmt]:
        if isinstance(node.value, ast.Constant):
            return [node]
        node.value = e.visit(node.value)
        return [node]

    def _raise(self, node: ast.Raise, e: Expressions) -> list[ast.stmt]:
        node.exc = e.visit(node.exc) if node.exc else None
        node.cause = e.visit(node.cause) if node.cause else None
        return [node]

    def _functiondef(self, node: ast.FunctionDef, e: Expressions) -> list[ast.stmt]:
        node.decorator_list = [e.visit(d) for d in node.decorator_list]
        node.args.defaults = [e.visit(d) for d in node.args.defaults]
        node.args.kw_defaults = [d and e.visit(d) for d in node.args.kw_defaults]
        return [*self._noting(node, node), node]

    def _as_it_is(self, node: ast.stmt, e: Expressions) -> list[ast.stmt]:
        return [*self._noting(node, node), node]

    _import = _importfrom = _classdef = _pass = _as_it_is
    _asyncfunctiondef = _as_it_is

    def _global(self, node: ast.stmt, e: Expressions) -> list[ast.stmt]:
        return []  # the function declares them at its top

    _nonlocal = _global


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


def _sees_all(f: ast.FunctionDef) -> bool:
    """True if a function may read its names by a call such as `locals` or `eval`."""
    seers = {"locals", "vars", "eval", "exec", "dir", "breakpoint"}
    return any(isinstance(n, ast.Name) and n.id in seers for n in ast.walk(f))


__all__ = ["FRAME", "Statements"]
