"""Proof that functions use `id` for nothing but keys, by which they know objects again.

NOTE [ids as keys]
    A walk through nested containers notes ``visited[id(x)] = ...``, to visit no object twice. What
    it computes depends on which objects are one, as by ``is``, and not on their addresses. That
    holds if ids are only compared with each other: stored in, looked up in and removed from tables,
    which are dicts and sets whose keys nobody lists.

    The proof follows two kinds of variables through the source of the functions that ran. An *id*
    is assigned by ``k = id(x)``. A *table* is assigned by ``{}``, ``set()`` or a display of ids, or
    is a parameter. Whatever else is done with either leaves a doubt. A table may be passed to a
    function by its global name; then the parameter must be a table in all calls of that function.

    These calls are those that were seen when the call was observed. A key that is not in its table
    leaves in a KeyError, so none may have been raised there.

    Python may give a new object the id of one that has died. Code that asks for ids of the dead may
    then compute this or that, and a replayed call gives what the recorded one gave.
"""

from __future__ import annotations

import ast
import functools
import linecache
import warnings
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from forall._ast_rewrite.find_source import find_function_node
from forall._ast_rewrite.unsupported import CannotConvert
from forall._core.code_table import walk_codes
from forall._core.python_state import globals_of, may_rebind_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forall._jit.tracing.coverage import FullCoverage

_METHODS = frozenset({"add", "discard", "remove", "get", "pop", "setdefault"})  # of one key
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
# Nodes whose text binds no variable; names are looked at one by one.
_BIND_NOTHING = (ast.Name, ast.Attribute, ast.keyword, ast.Constant)


def uses_ids_as_keys(functions: Iterable[FunctionType], ran: FullCoverage) -> bool:
    """Return True if the functions that ran, all of which are given, use `id` for keys alone."""
    try:
        _Proof([*functions], ran).check()
    except _InDoubt:
        return False
    return True


class _InDoubt(Exception):  # noqa: N818 - no error: the function is not replayed
    """Code that may tell an address."""


class _Variable(NamedTuple):
    """A variable that holds an id or a table, in a function and those written inside it."""

    code: CodeType
    name: str
    is_table: bool


class _Argument(NamedTuple):
    """A table as an argument of a call."""

    call: ast.Call
    value: ast.expr


class _Proof:
    def __init__(self, functions: list[FunctionType], ran: FullCoverage) -> None:
        self.functions, self.ran = functions, ran
        self._owners: dict[CodeType, FunctionType] = {}  # the functions that have or make code
        self._sources: dict[CodeType, _Source] = {}
        self._stored: set[str] = set()  # attributes that are set, of modules perhaps

    def check(self) -> None:
        for code in self.ran.list_codes():
            if may_rebind_by(code, self.ran.list_names(code)):
                raise _InDoubt
            self._stored.update(
                i.argval for i in self.ran.list_instructions(code) if i.opname == "STORE_ATTR"
            )
        for func in self.functions:
            for code in walk_codes(func.__code__):
                owner = self._owners.setdefault(code, func)
                if owner.__globals__ is not func.__globals__:
                    raise _InDoubt
        asking = [f for f in self.functions if "id" in self.ran.list_globals(f.__code__)]
        left = [v for f in asking for v in self._read(f).find_variables()]
        done = set()
        while left:
            variable = left.pop()
            if variable not in done:
                done.add(variable)
                left += self._follow(variable)

    def _read(self, func: FunctionType) -> _Source:
        code = func.__code__
        if any(map(self.ran.has_missed_key, walk_codes(code))):
            raise _InDoubt
        if code not in self._sources:
            self._sources[code] = _Source(func)
        return self._sources[code]

    def _follow(self, variable: _Variable) -> Iterator[_Variable]:
        """Check all uses of a variable; yield those that have the same table, or its ids."""
        source = self._sources[variable.code]
        source.check_bindings(variable)
        if not variable.is_table:
            yield from source.find_tables(variable.name)
            return
        for argument in source.find_arguments(variable.name):
            yield self._find_parameter(source, argument)
        if variable.name in source.parameters:
            for site in self.ran.list_call_sites(variable.code):
                yield from self._check_call(site, source, variable.name)

    def _find_parameter(self, source: _Source, argument: _Argument) -> _Variable:
        """Return the parameter that an argument is given to."""
        func = self._find_callee(source, argument.call)
        callee = self._read(func)
        for name in callee.parameters:
            if callee.find_argument(argument.call, name) is argument.value:
                return _Variable(func.__code__, name, is_table=True)
        raise _InDoubt

    def _find_callee(self, source: _Source, call: ast.Call) -> FunctionType:
        name = source.find_called_global(call)
        func = None if name in self._stored else source.func.__globals__.get(name)
        if type(func) is not FunctionType or func.__code__ not in self._owners:
            raise _InDoubt
        return func

    def _check_call(
        self, site: tuple[CodeType, int] | None, callee: _Source, name: str
    ) -> Iterator[_Variable]:
        """Check that a call gives a parameter a table or None; yield the variable of the table."""
        owner = None if site is None else self._owners.get(site[0])
        if site is None or owner is None:
            raise _InDoubt
        source = self._read(owner)
        call = source.find_call(*site)
        func = self._find_callee(source, call)
        if func.__code__ is not callee.func.__code__:
            raise _InDoubt
        value = callee.find_argument(call, name)
        if _is_name(value):
            yield _Variable(owner.__code__, value.id, is_table=True)
        elif not (
            _has_default_of_none(func, name)
            if value is None
            else _is_none(value) or source.is_new_table(value)
        ):
            raise _InDoubt


class _Source:
    """The syntax tree of a function, with what is known of its names."""

    def __init__(self, func: FunctionType) -> None:
        self.func, self.node = func, _find_node(func)
        self.parents = {c: p for p in ast.walk(self.node) for c in ast.iter_child_nodes(p)}
        args = self.node.args
        self._positional = [a.arg for a in (*args.posonlyargs, *args.args)]
        self.parameters = [*self._positional, *(a.arg for a in args.kwonlyargs)]
        self._outer = {*func.__code__.co_freevars, *(n for n, _ in globals_of(func.__code__))}
        if "vars" in self._outer:  # it gives the values of all variables
            raise _InDoubt
        self._bound = {n.id for n in self.parents if _is_name(n) and not _is_load(n)}.union(
            *map(_list_texts, self.parents)
        )

    def find_variables(self) -> Iterator[_Variable]:
        """Yield the variables that hold ids, and tables that an id goes straight into."""
        for node in self.parents:
            if _is_name(node) and node.id == "id":
                call = self.parents[node]
                if not (isinstance(call, ast.Call) and call.func is node and self.is_id(call)):
                    raise _InDoubt
                yield from self._follow_id(call)

    def check_bindings(self, variable: _Variable) -> None:
        """Check that a variable is nothing else, and belongs to this function alone."""
        name, args = variable.name, self.node.args
        if name in self._outer or name.startswith("__"):  # such names are mangled in classes
            raise _InDoubt
        parameters = (*args.posonlyargs, *args.args, *args.kwonlyargs) if variable.is_table else ()
        for node in self.parents:
            if name in _list_texts(node) and node not in parameters:
                raise _InDoubt
            if not _is_name(node) or node.id != name or _is_load(node):
                continue
            value = _find_assigned(self.parents[node])
            is_same = self.is_new_table if variable.is_table else self._is_call_of_id
            if not is_same(value) or isinstance(self._find_scope(node), ast.ClassDef):
                raise _InDoubt

    def find_tables(self, name: str) -> Iterator[_Variable]:
        """Yield the tables that an id of a variable goes into; there are no other uses."""
        for node in self._list_loads(name):
            yield from self._follow_id(node)

    def find_arguments(self, name: str) -> Iterator[_Argument]:
        """Yield the calls that a table is passed to; all its other uses are of one key."""
        for node in self._list_loads(name):
            match self.parents[node]:
                case ast.Subscript(value=table, slice=key) if table is node and self.is_id(key):
                    pass
                case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()]) if self.is_id(key):
                    pass
                case ast.Compare(left=table, ops=[ast.Is() | ast.IsNot()], comparators=[other]) if (
                    table is node and _is_none(other)
                ):
                    pass
                case ast.Attribute() as method if self._find_key(method) is not None:
                    pass
                case ast.Call(func=ast.Name("len"), args=[_]) if self._is_builtin("len"):
                    pass
                case ast.Call(args=args) as call if node in args:
                    yield _Argument(call, node)
                case ast.keyword() as word if isinstance(self.parents[word], ast.Call):
                    yield _Argument(self.parents[word], node)
                case _:
                    raise _InDoubt

    def _list_loads(self, name: str) -> list[ast.Name]:
        return [n for n in self.parents if _is_name(n) and n.id == name and _is_load(n)]

    def _follow_id(self, node: ast.expr) -> Iterator[_Variable]:
        """Yield the variable that an id is assigned to, or the table that it is a key of."""
        parent = self.parents[node]
        match parent:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield _Variable(self.func.__code__, name, is_table=False)
            case ast.Subscript(value=ast.Name(name), slice=key) if key is node:
                yield _Variable(self.func.__code__, name, is_table=True)
            case ast.Compare(left=a, ops=[ast.Eq() | ast.NotEq()], comparators=[b]):
                if not (self.is_id(a) and self.is_id(b)):
                    raise _InDoubt
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[table]) if (
                key is node
            ):
                yield from self._follow_table(table)
            case ast.Call(func=ast.Attribute(value=ast.Name(name)) as method) if (
                self._find_key(method) is node
            ):
                yield _Variable(self.func.__code__, name, is_table=True)
            case ast.Dict() | ast.Set() | ast.SetComp() | ast.DictComp() if self.is_new_table(
                parent
            ) and not _holds_as_value(parent, node):
                yield from self._follow_display(parent)
            case _:
                raise _InDoubt

    def _follow_table(self, table: ast.expr) -> Iterator[_Variable]:
        if _is_name(table):
            yield _Variable(self.func.__code__, table.id, is_table=True)
        elif not self.is_new_table(table):
            raise _InDoubt

    def _follow_display(self, display: ast.expr) -> Iterator[_Variable]:
        """Yield the variable that a display of ids is assigned to, unless it is only looked in."""
        match self.parents[display]:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield _Variable(self.func.__code__, name, is_table=True)
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()]) if self.is_id(key):
                pass
            case _:
                raise _InDoubt

    def is_id(self, node: ast.expr | None) -> bool:
        """Return True for a call of `id`, and a variable that one is assigned to."""
        if not _is_name(node):
            return self._is_call_of_id(node)
        stores = [n for n in self.parents if _is_name(n) and n.id == node.id and not _is_load(n)]
        return bool(stores) and all(
            self._is_call_of_id(_find_assigned(self.parents[n])) for n in stores
        )

    def is_new_table(self, node: ast.expr | None) -> bool:
        """Return True for an expression that makes a dict or set of ids."""
        match node:
            case ast.Dict(keys=keys) | ast.Set(elts=keys):
                return all(map(self.is_id, keys))
            case ast.DictComp(key=key) | ast.SetComp(elt=key):
                return self.is_id(key)
            case ast.Call(func=ast.Name("set" | "dict" as name), args=[], keywords=[]):
                return self._is_builtin(name)
        return False

    def _is_call_of_id(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Call(func=ast.Name("id"), args=[arg], keywords=[]):
                return self._is_builtin("id") and not isinstance(arg, ast.Starred)
        return False

    def _is_builtin(self, name: str) -> bool:
        known = (*self._bound, *self.func.__code__.co_freevars)
        return name not in known and name not in self.func.__globals__

    def _find_key(self, method: ast.Attribute) -> ast.expr | None:
        """Return the id that is the key in a call of a table's method, None for other calls."""
        match self.parents[method]:
            case ast.Call(func=func, args=[key, *_], keywords=[]) if func is method:
                return key if method.attr in _METHODS and self.is_id(key) else None
        return None

    def _find_scope(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, _SCOPES):
            node = self.parents[node]
        return node

    def find_called_global(self, call: ast.Call) -> str:
        """Return the global name by which a call finds its function."""
        if not _is_name(call.func) or call.func.id.startswith("__"):
            raise _InDoubt
        name = call.func.id
        if name in self._bound or name in self.func.__code__.co_freevars:
            raise _InDoubt
        return name

    def find_argument(self, call: ast.Call, name: str) -> ast.expr | None:
        """Return what a call of this function gives a parameter; None if it gives nothing."""
        words = {word.arg: word.value for word in call.keywords}
        if None in words or any(isinstance(a, ast.Starred) for a in call.args):
            raise _InDoubt
        given = dict(zip(self._positional, call.args, strict=False))
        return given.get(name, words.get(name))

    def find_call(self, code: CodeType, offset: int) -> ast.Call:
        """Return the call that an instruction makes, of this function or of one inside it."""
        line, last_line, column, last_column = [*code.co_positions()][offset // 2]
        for node in self.parents:
            if (
                isinstance(node, ast.Call)
                and (node.lineno, node.col_offset) == (line, column)
                and (node.end_lineno, node.end_col_offset) == (last_line, last_column)
            ):
                return node
        raise _InDoubt


def _find_node(func: FunctionType) -> Any:
    """Return the node of a function, if its source is what it was compiled from."""
    lines = linecache.getlines(func.__code__.co_filename, func.__globals__)
    with warnings.catch_warnings(action="ignore"):  # Python gave them when it compiled the file
        try:
            found = find_function_node(func)
            if func.__code__ in _compile_functions("".join(lines)):
                return found.node
        except (CannotConvert, SyntaxError, ValueError):
            pass
    raise _InDoubt


@functools.lru_cache(maxsize=16)
def _compile_functions(text: str) -> frozenset[CodeType]:
    """Return the code of all functions of a file."""
    return frozenset(walk_codes(compile(text, "?", "exec", dont_inherit=True)))


def _find_assigned(statement: ast.AST) -> ast.expr | None:
    """Return the value that a statement assigns to one target, None for other statements."""
    match statement:
        case ast.Assign(targets=[_], value=value) | ast.AnnAssign(value=value):
            return value
    return None


def _holds_as_value(display: ast.AST, node: ast.AST) -> bool:
    match display:
        case ast.Dict(values=values):
            return node in values
        case ast.DictComp(value=value):
            return node is value
    return False


def _list_texts(node: ast.AST) -> set[str]:
    """Return the names that a node binds in another way than a name that is stored to."""
    if isinstance(node, _BIND_NOTHING):
        return set()
    texts = set()
    for _, value in ast.iter_fields(node):
        texts.update(x for x in (value if type(value) is list else [value]) if type(x) is str)
    return texts


def _has_default_of_none(func: FunctionType, name: str) -> bool:
    """Return True if a parameter is None where a call gives it nothing."""
    code, defaults = func.__code__, func.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    known = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return {**known, **(func.__kwdefaults__ or {})}.get(name, ...) is None


def _is_name(node: Any) -> TypeGuard[ast.Name]:
    return type(node) is ast.Name


def _is_load(node: ast.Name) -> bool:
    return type(node.ctx) is ast.Load


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
