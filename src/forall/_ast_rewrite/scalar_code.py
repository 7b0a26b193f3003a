"""Scalar code: statements that compute with Python's own values, and touch no tensor.

``n = int(x)``, a loop over such numbers, ``sorted(x.tolist())[-3:]``: here each example runs plain
Python on its own numbers. Such statements are collected in one function, which is called for one
example after another. The code before and after it runs for all examples at once. The numbers that
the function needs from tensors are read before it begins.

The choice of names that are tensors is a guess: the arguments are, and what is computed from them.
The runtime checks the actual values, and runs the statements as they are written where the guess
was wrong. For that they are kept, as the body of a `ScalarCode`.
"""

from __future__ import annotations

import ast
import copy
import types
from typing import TYPE_CHECKING, Any

from forall._ast_rewrite.liveness import (
    COMPREHENSIONS,
    SCOPES,
    Liveness,
    ScopeNames,
    find_assigned_names,
    find_read_names,
    find_text_bindings,
    list_argument_names,
    walk_scope,
)
from forall._ast_rewrite.quasiquote import (
    FRAME,
    expr,
    make_constant,
    stmts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UNBOUND = "__unbound__"  # the name of the value that stands for no value
# Methods and functions that read the numbers of a tensor
_READ = frozenset({"item", "tolist"})
_CONVERT = frozenset({"int", "float", "bool"})
# Attributes and methods of a tensor with the same answer for all examples
_UNIFORM_ATTRIBUTES = frozenset(
    {"shape", "ndim", "dtype", "device", "is_complex", "is_floating_point"}
)
_UNIFORM_METHODS = frozenset(
    {"dim", "size", "numel", "nelement", "is_complex", "is_floating_point"}
)
# Functions that may be called to compute a tensor that is read
_NAMES_OF_COMPUTING = """
    abs all amax amin any argmax argmin ceil clamp clone cos cumsum det detach diff dot double exp
    flatten flip float floor len log logsumexp long matmul max mean median min mul norm prod
    reshape round select sigmoid sign sin softmax sort sqrt square squeeze std sub sum tanh topk
    trace unsqueeze var view
"""
_COMPUTES = _READ | _CONVERT | _UNIFORM_METHODS | frozenset(_NAMES_OF_COMPUTING.split())
# Built-in functions that do more than compute, or depend on their caller's frame
_NAMES_OF_OTHERS = """
    __import__ aiter anext breakpoint compile delattr dir eval exec getattr globals hasattr help
    id input isinstance issubclass iter locals memoryview next object open print setattr super
    type vars
"""
_NOT_SCALAR = frozenset(_NAMES_OF_OTHERS.split())
# Functions that the runtime computes in one call for all examples, without scalar code
_ARITHMETIC = frozenset({"int", "float", "bool", "abs", "min", "max", "round", "len", "range"})
# Built-in functions that do not change their arguments
_ONLY_READ = _ARITHMETIC | {
    "all", "any", "dict", "list", "map", "set", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
_MAKERS = frozenset({"tensor", "as_tensor", "scalar_tensor"})  # of tensors, from numbers
_HEAVY = (
    ast.While, ast.For, ast.Try, ast.FunctionDef, ast.If, ast.IfExp, ast.JoinedStr, ast.Dict,
    ast.Subscript, ast.Lambda, *COMPREHENSIONS,
)  # fmt: skip


# Expressions that may leave out a part, that bind a name, or that have a scope of their own
_NOT_EARLY = (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Lambda, *COMPREHENSIONS)
_WITHOUT_HOLES = (*_NOT_EARLY, ast.Compare)


class ScalarCode(ast.If):
    """The statements ``body``, and ``orelse`` for after they ran example by example.

    ``function`` does the same as ``body`` for one example, of the values of the names ``takes`` and
    of ``reads``. ``test`` holds all that is read, for the analysis of names.
    """

    function: str  # the name of a function that does the same for one example
    takes: list[str]  # the names whose values it takes
    optional: list[str]  # more such names, which it binds itself and may be unbound before
    reads: list[tuple[str, ast.expr]]  # a method and a tensor, for each number that it takes
    gives: list[list[str]]  # the names of the values that it returns, for each way out of it
    way: str  # the variable with the number of the way out
    may_change: bool  # True if it may change a list that it takes


def extract_scalar_code(f: ast.FunctionDef, scope: Any, lookup: Callable[[str], Any]) -> None:
    """Collect the scalar code of a function into `ScalarCode` statements."""
    if any(isinstance(n, (ast.Match, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(f)):
        return
    rename_arguments(f, scope)
    names = ScopeNames(f)
    finder = _ScalarCodeFinder(f, names, scope, lookup)
    f.body = finder.rewrite(f.body)


def rename_arguments(f: ast.FunctionDef, scope: Any) -> None:
    """Rename a rebound argument, as in ``n = int(n)``, from its second value on.

    The second value is another variable, which need not be a tensor. Names that nested functions or
    other scopes see are left.
    """
    names = ScopeNames(f)
    by_text = [find_text_bindings(n) for s in f.body for n in ast.walk(s)]
    seen = (names.captured | names.noted | names.globals).union(*by_text)
    given = {*list_argument_names(f.args)}
    if any(isinstance(n, ast.Name) and n.id in _NOT_SCALAR for n in ast.walk(f)):
        return  # the function may look up its names as text
    for n, s in enumerate(f.body):
        if not isinstance(s, ast.Assign):
            continue
        for name in sorted(given & find_assigned_names(s.targets) - seen):
            new = scope.make_name(name)
            for node in (t for target in s.targets for t in ast.walk(target)):
                if isinstance(node, ast.Name) and node.id == name:
                    node.id = new
            for later in f.body[n + 1 :]:
                for node in ast.walk(later):
                    if isinstance(node, ast.Name) and node.id == name:
                        node.id = new


class _ScalarCodeFinder:
    """A search for scalar code in one function."""

    def __init__(self, f: ast.FunctionDef, names: ScopeNames, scope: Any, lookup: Callable) -> None:
        self.f, self.names, self.scope, self.lookup = f, names, scope, lookup
        self.tensors = {*list_argument_names(f.args)}  # names that may be tensors
        self.fixed = names.noted | names.globals  # names whose every write is seen by others
        self.live = _analyze_liveness(f, names)
        self._propagate_tensors()

    # --- which names may be tensors

    def _propagate_tensors(self) -> None:
        """Find the names that may be tensors, or are no scalars for other reasons."""
        statements = [n for n in walk_scope(self.f.body) if isinstance(n, ast.stmt)]
        while True:
            before = len(self.tensors)
            for s in statements:
                self._bind_statement(s)
            if len(self.tensors) == before:
                return

    def _bind_statement(self, s: ast.stmt) -> None:
        match s:
            case ast.Assign():
                for target in s.targets:
                    self._bind_target(target, s.value)
            case ast.AugAssign() | ast.AnnAssign() if s.value and not self.is_scalar(s.value):
                self.tensors |= find_assigned_names([s.target])
            case ast.For() if not self.is_scalar(s.iter):
                self.tensors |= find_assigned_names([s.target])
            case ast.With():
                self.tensors |= find_assigned_names(
                    [i.optional_vars for i in s.items if i.optional_vars]
                )
            case ast.FunctionDef() if not self.is_statement(s):
                self.tensors.add(s.name)
            case ast.ClassDef() | ast.AsyncFunctionDef():
                self.tensors.add(s.name)
            case ast.Import() | ast.ImportFrom():
                self.tensors |= find_assigned_names([s])
        for n in ast.walk(s):
            if isinstance(n, ast.NamedExpr) and not self.is_scalar(n.value):
                self.tensors.add(n.target.id)

    def _bind_target(self, target: ast.expr, value: ast.expr) -> None:
        sides = target, value
        if all(isinstance(side, (ast.Tuple, ast.List)) for side in sides):
            parts: list[list[ast.expr]] = [side.elts for side in sides]  # type: ignore[attr-defined]
            starred = any(isinstance(p, ast.Starred) for part in parts for p in part)
            if not starred and len(parts[0]) == len(parts[1]):
                for inner, its in zip(*parts, strict=True):
                    self._bind_target(inner, its)
                return
        if not self.is_scalar(value):
            self.tensors |= find_assigned_names([target])

    # --- expressions

    def is_scalar(self, node: ast.AST | None) -> bool:
        """Return True if an expression only computes with Python's own values."""
        match node:
            case None | ast.Constant():
                return True
            case ast.Name():
                return self._is_scalar_name(node.id)
            case ast.Attribute():
                if self.is_scalar(node.value):
                    return not node.attr.startswith("_")
                return node.attr in _UNIFORM_ATTRIBUTES and self.is_read_early(node.value)
            case ast.Call():
                return self.find_read(node) is not None or self._is_scalar_call(node)
            case ast.IfExp():
                return self.is_test(node.test) and self._are_scalars(node.body, node.orelse)
            case ast.UnaryOp(op=ast.Not()):
                return self.is_test(node.operand)
            case ast.BinOp(op=ast.MatMult()):
                return False
            case ast.Lambda():
                return self._is_scalar_function(node.args, [node.body])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._is_scalar_comprehension(node.generators, [node.elt])
            case ast.DictComp():
                return self._is_scalar_comprehension(node.generators, [node.key, node.value])
            case (
                ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.Tuple()
                | ast.List() | ast.Set() | ast.Dict()
                | ast.JoinedStr() | ast.FormattedValue() | ast.Starred() | ast.keyword()
            ):  # fmt: skip
                kinds = (ast.expr, ast.keyword)
                return self._are_scalars(
                    *(p for p in ast.iter_child_nodes(node) if isinstance(p, kinds))
                )
            case ast.Subscript():
                return self.is_scalar(node.value) and self._is_scalar_key(node.slice)
            case ast.NamedExpr():
                return self.is_scalar(node.value) and self._may_bind(node.target)
        return False

    def _is_scalar_key(self, key: ast.expr) -> bool:
        """Return True for a scalar key of a subscript; a slice is no expression by itself."""
        if isinstance(key, ast.Slice):
            return self._are_scalars(key.lower, key.upper, key.step)
        if isinstance(key, ast.Tuple):
            return all(map(self._is_scalar_key, key.elts))
        return self.is_scalar(key)

    def _are_scalars(self, *nodes: ast.AST | None) -> bool:
        return all(map(self.is_scalar, nodes))

    def is_test(self, node: ast.expr) -> bool:
        """Return True if the truth of an expression is found with Python's own values."""
        if isinstance(node, ast.BoolOp):
            return all(map(self.is_test, node.values))
        return self.is_scalar(node) or self._is_tensor_comparison(node)

    def _is_tensor_comparison(self, node: ast.expr) -> bool:
        """Return True for a comparison of a tensor, whose truth value is read from the tensor."""
        return isinstance(node, ast.Compare) and len(node.ops) == 1 and self.is_read_early(node)

    def _is_scalar_name(self, name: str) -> bool:
        if name in self.tensors or name == FRAME:
            return False
        return name in self.names.local or not _is_of_torch(self.lookup(name))

    def _is_scalar_call(self, node: ast.Call) -> bool:
        f = node.func
        if isinstance(f, ast.Name) and f.id in _NOT_SCALAR:
            return False
        return self.is_scalar(f) and self._are_scalars(*node.args, *node.keywords)

    def find_read(self, node: ast.AST) -> tuple[str, ast.expr] | None:
        """Return the method by which a call reads a tensor's numbers, and the tensor."""
        if not isinstance(node, ast.Call) or node.keywords:
            return None
        f, args = node.func, node.args
        if isinstance(f, ast.Name) and f.id not in self.names.local and len(args) == 1:
            if f.id in _CONVERT and not self.is_scalar(args[0]) and self.is_read_early(args[0]):
                return f.id, args[0]
            if f.id == "len" and not self.is_scalar(args[0]) and self.is_read_early(args[0]):
                return "", node
        if isinstance(f, ast.Attribute) and not self.is_scalar(f.value):
            if f.attr in _READ and not args and self.is_read_early(f.value):
                return f.attr, f.value
            if (
                f.attr in _UNIFORM_METHODS
                and self._are_scalars(*args)
                and self.is_read_early(f.value)
            ):
                return "", node
        return None

    def is_read_early(self, node: ast.AST) -> bool:
        """Return True if an expression of tensors may be evaluated before scalar code begins.

        It calls only functions that compute, and its names are tensors, which scalar code does not
        bind.
        """
        for n in ast.walk(node):
            if isinstance(n, ast.Name):
                if n.id not in self.tensors and n.id in self.names.local:
                    return False
            elif isinstance(n, ast.Call):
                name = getattr(n.func, "attr", getattr(n.func, "id", ""))
                if name not in _COMPUTES or name in self.names.local:
                    return False
            elif isinstance(n, _NOT_EARLY):
                return False
        return True

    def _is_scalar_comprehension(
        self, generators: list[ast.comprehension], results: list[ast.expr]
    ) -> bool:
        if any(g.is_async for g in generators) or not self.is_scalar(generators[0].iter):
            return False
        names = find_assigned_names([g.target for g in generators])
        later = [g.iter for g in generators[1:]]
        tests = [test for g in generators for test in g.ifs]
        return self._ask_in_scope(names, lambda: self._are_scalars(*later, *tests, *results))

    def _is_scalar_function(self, args: ast.arguments, body: list[ast.AST]) -> bool:
        """Return True if a nested function is scalar code, for arguments that are scalars."""
        if not self._are_scalars(*args.defaults, *args.kw_defaults):
            return False
        names = {*list_argument_names(args)} | find_assigned_names(body)
        return self._ask_in_scope(names, lambda: all(map(self._is_part, body)))

    def _is_part(self, node: ast.AST) -> bool:
        if isinstance(node, ast.stmt):
            return self.is_statement(node, returns=True)
        return self.is_scalar(node)

    def _ask_in_scope(self, names: set[str], ask: Callable[[], bool]) -> bool:
        """Answer a question in an inner scope, in which these names are scalars."""
        kept = self.tensors, self.names.local, self.fixed
        self.tensors = self.tensors - names
        self.names.local = self.names.local | names
        self.fixed = self.fixed - names
        try:
            return ask()
        finally:
            self.tensors, self.names.local, self.fixed = kept

    # --- statements

    def _may_bind(self, target: ast.AST) -> bool:
        match target:
            case ast.Name():
                return target.id in self.names.local and target.id not in self.tensors | self.fixed
            case ast.Tuple() | ast.List():
                return all(map(self._may_bind, target.elts))
            case ast.Starred():
                return self._may_bind(target.value)
            case ast.Subscript():
                return self.is_scalar(target.value) and self._is_scalar_key(target.slice)
        return False

    def is_statement(self, s: ast.stmt, *, returns: bool = False, in_loop: bool = False) -> bool:
        """Return True if a statement is scalar code.

        With ``returns``, a ``return`` is allowed, as in a nested function.
        """

        def block(nodes: list[ast.stmt], *, loop: bool = in_loop) -> bool:
            return all(self.is_statement(n, returns=returns, in_loop=loop) for n in nodes)

        match s:
            case ast.Pass():
                return True
            case ast.Break() | ast.Continue():
                return in_loop
            case ast.Expr():
                return self.is_scalar(s.value)
            case ast.Assign():
                return self.is_scalar(s.value) and all(map(self._may_bind, s.targets))
            case ast.AugAssign():
                return self.is_scalar(s.value) and self._may_bind(s.target)
            case ast.AnnAssign():
                return s.value is not None and self.is_scalar(s.value) and self._may_bind(s.target)
            case ast.If():
                return self.is_test(s.test) and block(s.body) and block(s.orelse)
            case ast.While():
                return self.is_test(s.test) and block(s.body, loop=True) and block(s.orelse)
            case ast.For():
                if not (self.is_scalar(s.iter) and self._may_bind(s.target)):
                    return False
                return block(s.body, loop=True) and block(s.orelse)
            case ast.Try():
                handlers = all(self._is_handler(h) and block(h.body) for h in s.handlers)
                return handlers and block(s.body) and block(s.orelse) and block(s.finalbody)
            case ast.Raise():
                return s.cause is None and self.is_scalar(s.exc)
            case ast.FunctionDef():
                if s.decorator_list or any(isinstance(n, ast.Nonlocal) for n in ast.walk(s)):
                    return False
                return s.name not in self.fixed and self._is_scalar_function(s.args, list(s.body))
            case ast.Return():
                return returns and self.is_scalar(s.value)
        return False

    def _is_handler(self, handler: ast.ExceptHandler) -> bool:
        return self.is_scalar(handler.type) and handler.name not in self.tensors | self.fixed

    def can_leave(self, s: ast.stmt) -> bool:
        """Return True if a statement is scalar code except for the values that it returns."""
        kept = [n for n in walk_scope([s]) if isinstance(n, ast.Return)]
        if not kept or not isinstance(s, (ast.Try, ast.While, ast.For)):
            return False
        in_try = any(isinstance(n, ast.Try) for n in walk_scope([s]))
        if not all(self._can_return(r.value, in_try=in_try) for r in kept):
            return False
        values = [r.value for r in kept]
        for r in kept:
            r.value = None
        try:
            return self.is_statement(s, returns=True)
        finally:
            for r, value in zip(kept, values, strict=True):
                r.value = value

    def _can_return(self, value: ast.expr | None, *, in_try: bool) -> bool:
        """Return True if the returned value may be made after scalar code has ended.

        From a ``try`` only a value that cannot fail may be: a tensor made of a number.
        """
        if self.is_scalar(value):
            return True
        if not in_try:
            return self._is_made_later(value)
        return _makes_tensor(value) and not value.keywords and self._are_scalars(*value.args)

    def _is_made_later(self, value: ast.AST | None) -> bool:
        """Return True if an expression can be evaluated later, with its scalar parts as holes."""
        if self.is_scalar(value):
            return True
        if isinstance(value, _WITHOUT_HOLES):
            return False
        kinds = (ast.expr, ast.keyword)
        return all(
            self._is_made_later(n) for n in ast.iter_child_nodes(value) if isinstance(n, kinds)
        )

    # --- putting it together

    def rewrite(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a block, with runs of scalar code collected."""
        made: list[ast.stmt] = []
        run: list[ast.stmt] = []
        for n, s in enumerate(nodes):
            is_doc = n == 0 and isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
            if is_doc or not (self.is_statement(s) or self.can_leave(s)):
                made += self._rewrite_run(run, s)
                run = []
            else:
                run.append(s)
        return made + self._rewrite_run(run, None) if run else made

    def _rewrite_run(self, run: list[ast.stmt], last: ast.stmt | None) -> list[ast.stmt]:
        """Collect a run of scalar code, and the scalar parts of the statement after it."""
        holes = self._find_holes(last) if last is not None else []
        read_later: set[str] = set()
        if isinstance(last, ast.If):  # before its sides are rewritten
            read_later = self.live.find_live_at_start(
                last.body, last
            ) | self.live.find_live_at_start(last.orelse, last)
        elif last is not None and not isinstance(last, ast.Return):
            read_later = self.live.after[last]
        after = [] if last is None else [self._rewrite_inside(last)]
        if not any(map(self._is_heavy, run)) and not any(self._is_heavy(h) for h, _ in holes):
            return run + after
        return _ScalarCodeBuilder(self, run, last, holes, read_later).build_statement(after)

    def _is_heavy(self, node: ast.AST) -> bool:
        """Return True if code is more than arithmetic, which the runtime does for all at once."""
        for n in ast.walk(node):
            if isinstance(n, _HEAVY):
                if not isinstance(n, ast.Subscript) or self.is_scalar(n.value):
                    return True
            elif isinstance(n, ast.Call) and self.find_read(n) is None:
                f = n.func
                if isinstance(f, ast.Name) and f.id not in _ARITHMETIC:
                    return True
                if isinstance(f, ast.Attribute) and getattr(f.value, "id", "") != "math":
                    return True
        return False

    def _find_holes(self, s: ast.stmt) -> list[tuple[ast.expr, Callable[[ast.expr], None]]]:
        """Find the scalar expressions in another statement, each with a function to replace it."""
        if isinstance(s, (ast.If, ast.While)):
            if isinstance(s, ast.If) and self.is_scalar(s.test):
                return [(s.test, lambda new: setattr(s, "test", new))]
            return []
        if not isinstance(s, (ast.Return, ast.Assign, ast.Expr, ast.AugAssign)):
            return []
        found: list = []
        self.look_for_holes(s, found, leaves=False)
        inside = {id(n) for value, _ in found for n in ast.walk(value)}
        calls = (n for n in ast.walk(s) if isinstance(n, ast.Call) and id(n) not in inside)
        return found if all(map(self._is_quiet, calls)) else []

    def _is_quiet(self, call: ast.Call) -> bool:
        """Return True if a call changes no tensor that is read after it in the same statement."""
        f = call.func
        if any(k.arg in (None, "out", "inplace") for k in call.keywords):
            return False
        if isinstance(f, ast.Name):
            value = None if f.id in self.names.local else self.lookup(f.id)
            return isinstance(value, types.BuiltinFunctionType | type)
        if not isinstance(f, ast.Attribute) or f.attr.endswith("_"):
            return False
        owner: ast.expr = f.value
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if isinstance(owner, ast.Name) and owner.id not in self.names.local:
            value = self.lookup(owner.id)
            return isinstance(value, types.ModuleType) and _get_home(value).startswith("torch")
        return f.attr in _COMPUTES

    def look_for_holes(self, node: ast.AST, found: list, *, leaves: bool) -> None:
        """Append the scalar parts of another expression to ``found``.

        With ``leaves``, scalar code returns by the expression. Then plain names are among them, as
        no other code has their values. Numbers in calls that make tensors are too, so that two ways
        out that differ in a number are one.
        """
        if isinstance(node, _WITHOUT_HOLES):
            return  # parts of it may not be evaluated, or have another scope
        for field, value in ast.iter_fields(node):
            items = value if isinstance(value, list) else [value]
            for i, item in enumerate(items):
                if isinstance(item, (ast.keyword, ast.Slice)):
                    self.look_for_holes(item, found, leaves=leaves)
                if not isinstance(item, ast.expr) or isinstance(item, (ast.Constant, ast.Slice)):
                    if leaves and field == "args" and _is_number(item) and _makes_tensor(node):
                        found.append((item, _make_setter(node, field, i)))
                    continue
                if isinstance(getattr(item, "ctx", None), (ast.Store, ast.Del)):
                    continue
                is_callee = field == "func" and isinstance(node, ast.Call)
                if is_callee or isinstance(item, ast.Starred) or not self.is_scalar(item):
                    self.look_for_holes(item, found, leaves=leaves)
                elif (leaves or not isinstance(item, ast.Name)) and self._is_value(item):
                    found.append((item, _make_setter(node, field, i if value is items else None)))

    def _is_value(self, node: ast.expr) -> bool:
        """Return True if an expression reads a value that may differ between examples."""
        return any(
            self.find_read(n) is not None
            or (isinstance(n, ast.Name) and n.id in self.names.local and n.id not in self.tensors)
            for n in ast.walk(node)
        )

    def _rewrite_inside(self, s: ast.stmt) -> ast.stmt:
        """Collect the scalar code in the blocks of another statement."""
        if isinstance(s, (ast.If, ast.While, ast.For, ast.With)):
            s.body = self.rewrite(s.body)
            if getattr(s, "orelse", None):
                s.orelse = self.rewrite(s.orelse)  # type: ignore[attr-defined]
        return s


class _ScalarCodeBuilder:
    """A builder of one `ScalarCode` statement."""

    def __init__(
        self,
        finder: _ScalarCodeFinder,
        run: list,
        last: ast.stmt | None,
        holes: list,
        read_later: set[str],
    ) -> None:
        self.finder, self.run, self.last, self.holes = finder, run, last, holes
        self.read_later = read_later  # names that are read after the last statement's holes
        self.at: ast.AST = run[0] if run else holes[0][0]
        self.reads: list[tuple[str, ast.expr]] = []
        self.read_names: list[str] = []
        self.ways: list[tuple[str, list[str], ast.Return]] = []  # text, names of values, return

    def build_statement(self, after: list[ast.stmt]) -> list[ast.stmt]:
        """Build the statement; ``after`` are the statements after it."""
        finder, last = self.finder, self.last
        as_written = copy.deepcopy(self.run)
        hole_names = [finder.scope.make_name("hole") for _ in self.holes]
        hole_values = [copy.deepcopy(value) for value, _ in self.holes]
        is_test = isinstance(last, ast.If)
        if self.holes and not is_test:
            as_written.append(copy.deepcopy(last))  # type: ignore[arg-type]
        elif self.holes:
            as_written += stmts("NAME = V", self.at, NAME=hole_names[0], V=hole_values[0])
        for (value, put), name in zip(self.holes, hole_names, strict=True):
            put(_make_load(name, value))
        outs = self._find_outs()
        body = [self._rewrite_for_one(copy.deepcopy(s)) for s in self.run]
        given = [self._rewrite_for_one(copy.deepcopy(v)) for v in hole_values]
        takes = self._find_takes([*body, *(ast.copy_location(ast.Expr(v), v) for v in given)])
        is_bound = find_assigned_names(self.run)
        optional = [n for n in takes if n in is_bound]
        for n in reversed(optional):
            body[:0] = stmts("if NAME is UNBOUND:\n    del NAME", self.at, NAME=n, UNBOUND=UNBOUND)
        results = ast.Tuple(
            [ast.Constant(0), *(ast.Name(n, ast.Load()) for n in outs), *given], ast.Load()
        )
        body += stmts("return V", self.at, V=results)
        name = finder.scope.make_name("scalar")
        (function,) = stmts("def NAME(): BODY", self.at, BODY=body)
        takes = [n for n in takes if n not in is_bound]
        args = [ast.arg(n) for n in (UNBOUND, *takes, *optional, *self.read_names)]
        function.name = name  # type: ignore[attr-defined]
        function.args = ast.arguments([], args, None, [], [], None, [])  # type: ignore[attr-defined]
        ast.fix_missing_locations(function)
        finder.scope.functions.append(function)
        node = self._build_node(as_written, (takes, optional), [*outs, *hole_names])
        node.function = name
        if self.holes and not is_test:
            node.orelse += after
            after = []
        node.orelse = node.orelse or [ast.Pass()]
        ast.copy_location(node, self.at)
        ast.fix_missing_locations(node)
        return [node, *after]

    def _build_node(
        self, as_written: list, names: tuple[list, list], falls: list[str]
    ) -> ScalarCode:
        """Build the statement without the code for the way out at its end."""
        loaded = [ast.Name(n, ast.Load()) for n in (*names[0], *names[1])]
        reads = [copy.deepcopy(tensor) for _, tensor in self.reads]
        node = ScalarCode(ast.Tuple([*loaded, *reads], ast.Load()), as_written, [])
        node.takes, node.optional = names
        node.reads = self.reads
        node.way = self.finder.scope.make_name("way")
        node.gives = [falls, *(values for _, values, _ in self.ways)]
        node.may_change = any(map(_may_change, self.run))
        for n, (_, _, left) in enumerate(self.ways, 1):
            test = expr("WAY == N", self.at, WAY=node.way, N=make_constant(n, self.at))
            node.orelse.append(ast.copy_location(ast.If(test, [left], []), self.at))
        return node

    def _find_outs(self) -> list[str]:
        """Return the names bound by the scalar code that are read after it."""
        finder, last = self.finder, self.last
        if not self.run:
            return []
        if last is None or not self.holes:
            after = finder.live.after[self.run[-1]]
        elif isinstance(last, ast.If):
            after = self.read_later
        else:
            after = self.read_later | find_read_names(last)
        inside = {id(n) for s in self.run for n in ast.walk(s)}
        for node in walk_scope(finder.f.body):
            if isinstance(node, (*SCOPES, ast.GeneratorExp)) and id(node) not in inside:
                after = after | find_read_names(node)
        return sorted(find_assigned_names(self.run) & after & finder.names.local)

    def _find_takes(self, body: list[ast.stmt]) -> list[str]:
        """Return the names whose values the scalar code needs from before."""
        body = [_ScopeHider(find_assigned_names(body)).visit(copy.deepcopy(s)) for s in body]
        if not body:
            return []
        f = ast.FunctionDef("f", ast.arguments([], [], None, [], [], None, []), body, [])
        live = _analyze_liveness(f, self.finder.names)
        return sorted(live.before[body[0]] & self.finder.names.local)

    def _rewrite_for_one(self, node: Any) -> Any:
        """Rewrite code for one example, with names for reads of tensors, and numbered ways out."""
        return _OneExampleRewriter(self).visit(node)

    def name_read(self, how: str, tensor: ast.expr) -> ast.expr:
        """Return the name of a number that is read from a tensor."""
        text = how, ast.dump(tensor)
        known = [(m, ast.dump(t)) for m, t in self.reads]
        if text not in known:
            self.reads.append((how, tensor))
            self.read_names.append(self.finder.scope.make_name("read"))
            known.append(text)
        return _make_load(self.read_names[known.index(text)], tensor)

    def rewrite_return(self, node: ast.Return) -> ast.Return:
        """Rewrite a ``return`` for one example: return the number of the way, and its scalars."""
        values: list[ast.expr] = []
        names: list[str] = []

        def make_hole(value: ast.expr) -> ast.expr:
            values.append(self._rewrite_for_one(value))
            names.append(self.finder.scope.make_name("hole"))
            return _make_load(names[-1], value)

        left = copy.deepcopy(node)
        if left.value is not None and self.finder.is_scalar(left.value):
            if not isinstance(left.value, ast.Constant):
                left.value = make_hole(left.value)
        elif left.value is not None:
            holes: list = []
            self.finder.look_for_holes(left, holes, leaves=True)
            for value, put in holes:
                put(make_hole(value))
        text = ast.dump(left)
        for n, name in enumerate(names):
            text = text.replace(repr(name), f"'{n}'")
        known = [way for way, _, _ in self.ways]
        if text not in known:
            self.ways.append((text, names, left))
            known.append(text)
        way = make_constant(known.index(text) + 1, node)
        made = ast.Return(ast.Tuple([way, *values], ast.Load()))
        return ast.copy_location(made, node)


class _OneExampleRewriter(ast.NodeTransformer):
    """A rewriter of scalar code for one example."""

    def __init__(self, region: _ScalarCodeBuilder) -> None:
        self.region, self.finder = region, region.finder
        self.depth = 0  # nested functions around the node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        found = self.finder.find_read(node)
        return self.generic_visit(node) if found is None else self.region.name_read(*found)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if self.finder.is_scalar(node) and not self.finder.is_scalar(node.value):
            return self.region.name_read("", node)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if not self.finder.is_scalar(node):
            return self.region.name_read("bool", node)
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return self.generic_visit(node) if self.depth else self.region.rewrite_return(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return self._visit_function(node)

    def _visit_function(self, node: Any) -> ast.AST:
        self.depth += 1
        try:
            return self.generic_visit(node)
        finally:
            self.depth -= 1


class _ScopeHider(ast.NodeTransformer):
    """A transformer that hides the names of nested scopes, for the analysis of names read."""

    def __init__(self, later: set[str]) -> None:
        self.later = later  # names that the code binds, which nested functions read afterwards

    def _hide_names(self, node: Any, names: set[str]) -> ast.AST:
        for n in ast.walk(node):
            if isinstance(n, ast.Name) and n.id in names:
                n.id = "__hidden__"
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        given = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
        return self._hide_names(node, given | find_assigned_names(node.body) | self.later)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        return self._hide_names(node, {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)})

    def _hide_comprehension(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        return self._hide_names(node, find_assigned_names([g.target for g in node.generators]))

    visit_ListComp = visit_SetComp = visit_DictComp = _hide_comprehension  # noqa: N815 - ast's names
    visit_GeneratorExp = _hide_comprehension  # noqa: N815 - ast's name


def _analyze_liveness(f: ast.FunctionDef, names: ScopeNames) -> Liveness:
    """Return the liveness of names, without the reads of nested functions."""
    without = types.SimpleNamespace(local=names.local, captured=set())
    return Liveness(f, without, all_live=False)  # type: ignore[arg-type]


def _make_load(name: str, at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Name(name, ast.Load()), at)


def _may_change(node: ast.AST) -> bool:
    """Return True if code may change a list that it is given."""
    for n in ast.walk(node):
        if isinstance(n, ast.AugAssign):
            return True
        if isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load):
            return True
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") not in _ONLY_READ:
            return True
    return False


def _is_number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _makes_tensor(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _MAKERS


def _make_setter(node: ast.AST, field: str, i: int | None) -> Callable[[ast.expr], None]:
    def set_field(new: ast.expr) -> None:
        if i is None:
            setattr(node, field, new)
        else:
            getattr(node, field)[i] = new

    return set_field


def _is_of_torch(value: Any) -> bool:
    """Return True if a value is torch's, or a function of the user's that names torch."""
    if isinstance(value, types.FunctionType):
        home = value.__globals__
        named = {n for code in _walk_codes(value.__code__) for n in code.co_names}
        return _get_home(value).startswith("torch") or any(
            isinstance(home.get(n), types.ModuleType) and _get_home(home[n]).startswith("torch")
            for n in named
        )
    return _get_home(value).split(".")[0] in ("torch", "forall") or any(
        _get_home(kind).startswith("torch") for kind in type(value).__mro__
    )


def _walk_codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant_ in code.co_consts:
        if isinstance(constant_, types.CodeType):
            yield from _walk_codes(constant_)


def _get_home(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    found = getattr(value, "__module__", None)
    return found if isinstance(found, str) else ""
