"""Desugaring: ``match`` and ``assert`` statements become ``if`` statements."""

from __future__ import annotations

import ast
import copy
from typing import Any

from forall._ast_rewrite.quasiquote import (
    FRAME,
    expr,
    make_constant,
    stmts,
)
from forall._ast_rewrite.unsupported import CannotConvert


class Desugarer(ast.NodeTransformer):
    """A transformer of one function, without the functions nested in it."""

    def __init__(self, fresh: Any) -> None:
        self.fresh = fresh

    def visit_Assert(self, node: ast.Assert) -> Any:
        if not __debug__:
            return None
        test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        error = ast.Attribute(ast.Name(FRAME, ast.Load()), "AssertionError", ast.Load())
        call = ast.Call(error, [node.msg] if node.msg else [], [])
        raised = ast.Raise(call if node.msg else error, None)
        made = ast.If(test, [raised], [])
        for new in (made, raised, error, error.value, call):
            ast.copy_location(new, node)
        return made

    def visit_Match(self, node: ast.Match) -> Any:
        self.generic_visit(node)
        name = self.fresh("subject")
        made = stmts("NAME = VALUE", node, NAME=name, VALUE=node.subject)
        return made + self._make_cases(node.cases, name)

    def _make_cases(self, cases: list[ast.match_case], subject: str) -> list[ast.stmt]:
        """Return an ``if`` with the first case as body and the other cases in its ``else``."""
        if not cases:
            return []
        case, rest = cases[0], self._make_cases(cases[1:], subject)
        at = case.pattern
        value = ast.copy_location(ast.Name(subject, ast.Load()), at)
        names: list[ast.stmt] = []
        test = self._make_test(case.pattern, value, names)
        if test is None and case.guard is None:
            return [*names, *case.body]
        if case.guard is None:
            return [ast.copy_location(ast.If(test, [*names, *case.body], rest), at)]
        fits = self.fresh("fits")
        guarded = [*names, *stmts("FITS = GUARD", case.guard, FITS=fits, GUARD=case.guard)]
        if test is not None:
            no = stmts("FITS = False", at, FITS=fits)
            guarded = [ast.copy_location(ast.If(test, guarded, no), at)]
        asked = ast.copy_location(ast.Name(fits, ast.Load()), at)
        return [*guarded, ast.copy_location(ast.If(asked, case.body, rest), at)]

    def _make_test(self, p: ast.pattern, value: ast.expr, names: list[ast.stmt]) -> ast.expr | None:
        """Return the test of a pattern, None if it always fits; add its bindings to ``names``."""
        value = copy.deepcopy(value)  # each use is rewritten on its own
        match p:
            case ast.MatchValue():
                return expr("V == W", p, V=value, W=p.value)
            case ast.MatchSingleton():
                return expr("V is W", p, V=value, W=make_constant(p.value, p))
            case ast.MatchAs():
                test = None if p.pattern is None else self._make_test(p.pattern, value, names)
                if p.name is not None:
                    names += stmts("NAME = V", p, NAME=p.name, V=value)
                return test
            case ast.MatchOr():
                return self._make_or_test(p, value)
            case ast.MatchSequence():
                return self._make_sequence_test(p, value, names)
        raise CannotConvert("match with a class or a mapping as pattern", p)

    def _make_or_test(self, p: ast.MatchOr, value: ast.expr) -> ast.expr | None:
        names: list[ast.stmt] = []
        tests = [self._make_test(q, value, names) for q in p.patterns]
        if names:
            raise CannotConvert("match with names inside |", p)
        if None in tests:
            return None
        return ast.copy_location(ast.BoolOp(ast.Or(), tests), p)  # type: ignore[arg-type]

    def _make_sequence_test(
        self, p: ast.MatchSequence, value: ast.expr, names: list[ast.stmt]
    ) -> ast.expr:
        count = len(p.patterns)
        stars = [n for n, q in enumerate(p.patterns) if isinstance(q, ast.MatchStar)]
        least, more = make_constant(count - len(stars), p), make_constant(bool(stars), p)
        tests: list[Any] = [expr("F.is_sequence(V, N, M)", p, V=value, N=least, M=more)]
        for n, q in enumerate(p.patterns):
            place = n if not stars or n < stars[0] else n - count
            if isinstance(q, ast.MatchStar):
                if q.name is not None:
                    end = make_constant(n - count + 1 or None, p)
                    part = expr(
                        "list(V[A:B])", p, V=copy.deepcopy(value), A=make_constant(n, p), B=end
                    )
                    names += stmts("NAME = V", p, NAME=q.name, V=part)
                continue
            test = self._make_test(q, expr("V[N]", p, V=value, N=make_constant(place, p)), names)
            if test is not None:
                tests.append(test)
        if len(tests) == 1:
            return tests[0]
        return ast.copy_location(ast.BoolOp(ast.And(), tests), p)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return node
        return super().visit(node)
