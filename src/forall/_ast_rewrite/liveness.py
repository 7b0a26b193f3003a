"""Name analysis: the names that a function binds, closures over them, and their liveness."""

from __future__ import annotations

import ast
from collections.abc import Iterable

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def walk_scope(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Yield nodes and their descendants in the same scope (a comprehension has its own)."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from walk_scope(
                [*node.decorator_list, *node.args.defaults, *_drop_none(node.args.kw_defaults)]
            )
        elif isinstance(node, ast.Lambda):
            yield from walk_scope([*node.args.defaults, *_drop_none(node.args.kw_defaults)])
        elif isinstance(node, ast.ClassDef):
            yield from walk_scope([*node.decorator_list, *node.bases, *node.keywords])
        elif isinstance(node, COMPREHENSIONS):
            yield from walk_scope([node.generators[0].iter])
        else:
            yield from walk_scope(ast.iter_child_nodes(node))


def _drop_none(values: Iterable[ast.AST | None]) -> list[ast.AST]:
    return [v for v in values if v is not None]


def find_assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these statements bind, in their own scope."""
    found: set[str] = set()
    for node in walk_scope(nodes):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, COMPREHENSIONS):
            found |= find_walrus_names(node)
        else:
            found |= find_text_bindings(node)
    return found


def find_text_bindings(node: ast.AST) -> set[str]:
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


def list_argument_names(a: ast.arguments) -> list[str]:
    """Return the names of all arguments of a function, in the order of `co_varnames`."""
    given = (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))
    return [x.arg for x in given]


def find_walrus_names(node: ast.AST) -> set[str]:
    """The names that an expression binds by ``:=``."""
    return {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}


def list_lazy_operands(node: ast.AST) -> list[ast.expr]:
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


def find_read_names(node: ast.AST) -> set[str]:
    """All names that a statement or expression may read, nested scopes included."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


class ScopeNames:
    """The names of one function by scope: local, global, nonlocal, captured."""

    def __init__(self, f: ast.FunctionDef) -> None:
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        for node in walk_scope(f.body):
            if isinstance(node, ast.Global):
                self.globals |= set(node.names)
            elif isinstance(node, ast.Nonlocal):
                self.nonlocals |= set(node.names)
        everything = find_assigned_names(f.body) | {*list_argument_names(f.args)}
        self.local = everything - self.globals - self.nonlocals
        self.captured: set[str] = set()  # read by a nested function, which may run at any time
        rebound: set[str] = set()
        for node in walk_scope(f.body):
            if isinstance(node, (*SCOPES, ast.GeneratorExp)):
                self.captured |= find_read_names(node)
                for n in ast.walk(node):
                    if isinstance(n, ast.Nonlocal):
                        rebound |= set(n.names)
            elif isinstance(node, COMPREHENSIONS):
                rebound |= find_walrus_names(node)
                for n in ast.walk(node):
                    if isinstance(n, SCOPES):
                        self.captured |= find_read_names(n)
            else:
                for operand in list_lazy_operands(node):
                    rebound |= find_walrus_names(operand)
        # Written in other scopes too, so that each write is logged, not saved and restored here
        self.noted = self.nonlocals | (rebound & self.local)


class Liveness:
    """For each statement, the names whose values may be read after it."""

    def __init__(self, f: ast.FunctionDef, names: ScopeNames, *, all_live: bool) -> None:
        self.always = names.local if all_live else names.captured & names.local
        self.after: dict[ast.stmt, set[str]] = {}
        self.before: dict[ast.stmt, set[str]] = {}
        self.head: dict[ast.stmt, set[str]] = {}
        self._breaks: list[tuple[set[str], set[str]]] = []
        self._analyze_block(f.body, set())

    def _analyze_block(self, body: list[ast.stmt], after: set[str]) -> set[str]:
        """Return the names that are live before these statements."""
        for node in reversed(body):
            self.after[node] = after | self.always
            after = self._analyze_statement(node, after)
            self.before[node] = after | self.always
        return after

    def find_live_at_start(self, body: list[ast.stmt], node: ast.stmt) -> set[str]:
        """Return the names that are live where a body of ``node`` begins."""
        return self.before[body[0]] if body else self.after[node]

    def _analyze_statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        match node:
            case ast.If():
                sides = self._analyze_block(node.body, after) | self._analyze_block(
                    node.orelse, after
                )
                return sides | find_read_names(node.test)
            case ast.While() | ast.For():
                return self._analyze_loop(node, after)
            case ast.With():
                inside = self._analyze_block(node.body, after)
                for item in reversed(node.items):
                    if item.optional_vars is not None:
                        inside = (
                            inside - _find_killed_names(item.optional_vars)
                        ) | _find_used_names(item.optional_vars)
                    inside = inside | find_read_names(item.context_expr)
                return inside
            case ast.Try():
                final = self._analyze_block(node.finalbody, after)
                final |= set().union(*(find_read_names(s) for s in node.finalbody))
                outer = self._breaks
                self._breaks = [(b | final, c | final) for b, c in outer]
                inside = self._analyze_block(node.body, final) | final
                self._breaks = outer
                return inside
            case ast.Return():
                return find_read_names(node.value) if node.value else set()
            case ast.Raise():
                return find_read_names(node)
            case ast.Break():
                return self._breaks[-1][0]
            case ast.Continue():
                return self._breaks[-1][1]
            case ast.Assign():
                return (
                    after - set().union(*map(_find_killed_names, node.targets))
                ) | find_read_names(node.value).union(*map(_find_used_names, node.targets))
            case ast.FunctionDef() | ast.ClassDef():
                return (after - {node.name}) | find_read_names(node)
            case _:
                return after | find_read_names(node)

    def _analyze_loop(self, node: ast.While | ast.For, after: set[str]) -> set[str]:
        left = self._analyze_block(node.orelse, after)
        head = set(left)
        while True:
            self._breaks.append((after, head))
            body = self._analyze_block(node.body, head)
            self._breaks.pop()
            if isinstance(node, ast.While):
                before = body | left | find_read_names(node.test)
            else:
                before = (
                    (body - _find_killed_names(node.target)) | left | _find_used_names(node.target)
                )
            if before <= head:
                break
            head = head | before
        self.head[node] = head | self.always
        return head | find_read_names(node.iter) if isinstance(node, ast.For) else head


def _find_killed_names(target: ast.AST) -> set[str]:
    """The names that an assignment certainly rebinds."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(_find_killed_names, target.elts))
    if isinstance(target, ast.Starred):
        return _find_killed_names(target.value)
    return set()


def _find_used_names(target: ast.AST) -> set[str]:
    """The names that an assignment reads: ``x`` and ``k`` of ``x[k] = v``."""
    return find_read_names(target) - _find_killed_names(target)
