"""Name analysis: the names that a function binds, closures over them, and their liveness."""

from __future__ import annotations

import ast
from collections.abc import Iterable

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def own(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Yield nodes and their descendants in the same scope (a comprehension has its own)."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from own(
                [*node.decorator_list, *node.args.defaults, *_given(node.args.kw_defaults)]
            )
        elif isinstance(node, ast.Lambda):
            yield from own([*node.args.defaults, *_given(node.args.kw_defaults)])
        elif isinstance(node, ast.ClassDef):
            yield from own([*node.decorator_list, *node.bases, *node.keywords])
        elif isinstance(node, COMPREHENSIONS):
            yield from own([node.generators[0].iter])
        else:
            yield from own(ast.iter_child_nodes(node))


def _given(values: Iterable[ast.AST | None]) -> list[ast.AST]:
    return [v for v in values if v is not None]


def bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these statements bind, in their own scope."""
    found: set[str] = set()
    for node in own(nodes):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, COMPREHENSIONS):
            found |= walrus(node)
        else:
            found |= bound_by_text(node)
    return found


def bound_by_text(node: ast.AST) -> set[str]:
    """Return the names that one node binds as plain text, not as a `Name` node."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {(a.asname or a.name).split(".")[0] for a in node.names}
        case ast.ExceptHandler(name=str(name)):
            return {name}
        case _:
            return set()


def arguments(a: ast.arguments) -> list[str]:
    """Return the names of all arguments of a function, in the order of `co_varnames`."""
    given = (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))
    return [x.arg for x in given]


def walrus(node: ast.AST) -> set[str]:
    """The names that an expression binds by ``:=``."""
    return {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}


def delayed(node: ast.AST) -> list[ast.expr]:
    """The operands that an operator may leave unevaluated."""
    match node:
        case ast.BoolOp():
            return node.values[1:]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.Compare():
            return node.comparators[1:]
        case _:
            return []


def read(node: ast.AST) -> set[str]:
    """All names that a statement or expression may read, nested scopes included."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


class Names:
    """The names of one function by scope: local, global, nonlocal, captured."""

    def __init__(self, f: ast.FunctionDef) -> None:
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        for node in own(f.body):
            if isinstance(node, ast.Global):
                self.globals |= set(node.names)
            elif isinstance(node, ast.Nonlocal):
                self.nonlocals |= set(node.names)
        everything = bound(f.body) | {*arguments(f.args)}
        self.local = everything - self.globals - self.nonlocals
        self.captured: set[str] = set()  # read by a nested function, which may run at any time
        rebound: set[str] = set()
        for node in own(f.body):
            if isinstance(node, (*SCOPES, ast.GeneratorExp)):
                self.captured |= read(node)
                for n in ast.walk(node):
                    if isinstance(n, ast.Nonlocal):
                        rebound |= set(n.names)
            elif isinstance(node, COMPREHENSIONS):
                rebound |= walrus(node)
                for n in ast.walk(node):
                    if isinstance(n, SCOPES):
                        self.captured |= read(n)
            else:
                for operand in delayed(node):
                    rebound |= walrus(operand)
        # Written in other scopes too, so that each write is logged, not saved and restored here
        self.noted = self.nonlocals | (rebound & self.local)


class Liveness:
    """For each statement, the names whose values may be read after it."""

    def __init__(self, f: ast.FunctionDef, names: Names, *, all_live: bool) -> None:
        self.always = names.local if all_live else names.captured & names.local
        self.after: dict[ast.stmt, set[str]] = {}
        self.before: dict[ast.stmt, set[str]] = {}
        self.head: dict[ast.stmt, set[str]] = {}
        self._breaks: list[tuple[set[str], set[str]]] = []
        self._block(f.body, set())

    def _block(self, body: list[ast.stmt], after: set[str]) -> set[str]:
        """Return the names that are live before these statements."""
        for node in reversed(body):
            self.after[node] = after | self.always
            after = self._before(node, after)
            self.before[node] = after | self.always
        return after

    def start(self, body: list[ast.stmt], node: ast.stmt) -> set[str]:
        """Return the names that are live where a body of ``node`` begins."""
        return self.before[body[0]] if body else self.after[node]

    def _before(self, node: ast.stmt, after: set[str]) -> set[str]:
        match node:
            case ast.If():
                sides = self._block(node.body, after) | self._block(node.orelse, after)
                return sides | read(node.test)
            case ast.While() | ast.For():
                return self._loop(node, after)
            case ast.With():
                inside = self._block(node.body, after)
                for item in reversed(node.items):
                    if item.optional_vars is not None:
                        inside = (inside - _killed(item.optional_vars)) | _used(item.optional_vars)
                    inside = inside | read(item.context_expr)
                return inside
            case ast.Try():
                final = self._block(node.finalbody, after)
                final |= set().union(*(read(s) for s in node.finalbody))
                outer = self._breaks
                self._breaks = [(b | final, c | final) for b, c in outer]
                inside = self._block(node.body, final) | final
                self._breaks = outer
                return inside
            case ast.Return():
                return read(node.value) if node.value else set()
            case ast.Raise():
                return read(node)
            case ast.Break():
                return self._breaks[-1][0]
            case ast.Continue():
                return self._breaks[-1][1]
            case ast.Assign():
                return (after - set().union(*map(_killed, node.targets))) | read(node.value).union(
                    *map(_used, node.targets)
                )
            case ast.FunctionDef() | ast.ClassDef():
                return (after - {node.name}) | read(node)
            case _:
                return after | read(node)

    def _loop(self, node: ast.While | ast.For, after: set[str]) -> set[str]:
        left = self._block(node.orelse, after)
        head = set(left)
        while True:
            self._breaks.append((after, head))
            body = self._block(node.body, head)
            self._breaks.pop()
            if isinstance(node, ast.While):
                before = body | left | read(node.test)
            else:
                before = (body - _killed(node.target)) | left | _used(node.target)
            if before <= head:
                break
            head = head | before
        self.head[node] = head | self.always
        return head | read(node.iter) if isinstance(node, ast.For) else head


def _killed(target: ast.AST) -> set[str]:
    """The names that an assignment certainly rebinds."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(_killed, target.elts))
    if isinstance(target, ast.Starred):
        return _killed(target.value)
    return set()


def _used(target: ast.AST) -> set[str]:
    """The names that an assignment reads: ``x`` and ``k`` of ``x[k] = v``."""
    return read(target) - _killed(target)
