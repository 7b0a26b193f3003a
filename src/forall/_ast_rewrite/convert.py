"""Conversion of a function to code that lanes (vmap's examples) can run with divergence."""

from __future__ import annotations

import ast
import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

from forall._ast_rewrite.desugar import Desugar
from forall._ast_rewrite.find_source import find, whole
from forall._ast_rewrite.liveness import Names, own
from forall._ast_rewrite.pure_compute import straight
from forall._ast_rewrite.quasiquote import FRAME, RUNTIME, stmts
from forall._ast_rewrite.scalar_code import with_scalar_code
from forall._ast_rewrite.statements import Statements
from forall._ast_rewrite.unsupported import CannotConvert, Refused

TRIES = 4  # runs on raw stacks that may fail before a function is always run on wrappers
_FUTURE = 0x1FF0000  # the flags of `from __future__ import ..`, as in Python's code.h
_runtime = types.CellType()
_templates: dict[types.CodeType, Template | Refused] = {}


def runs_with(runtime: Any) -> None:
    """Set the runtime that converted code asks for its frames."""
    _runtime.cell_contents = runtime


class Template:
    """The converted code of all functions that one ``def`` makes."""

    __slots__ = ("code", "straight", "tries")

    def __init__(self, code: types.CodeType, straight: Template | None = None) -> None:
        self.code = code
        self.straight = straight  # a version for raw stacks, for a function that only computes
        self.tries = TRIES  # how often that version may still fail

    def function(self, f: types.FunctionType) -> Callable:
        """Return the converted f, with the cells, defaults and globals of f itself."""
        code = self.code
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        cells[RUNTIME] = _runtime
        closure = tuple(cells[name] for name in code.co_freevars)
        made = types.FunctionType(code, f.__globals__, f.__name__, f.__defaults__, closure)
        made.__kwdefaults__ = f.__kwdefaults__
        return made


class Scope:
    """The state of the rewriting of one function."""

    def __init__(self, inside: str | None, counts: dict[str, int]) -> None:
        self.inside = inside
        self.counts = counts
        self.borrowed: set[str] = set()
        self.functions: list[ast.stmt] = []  # scalar code, for one example
        self.names: Any = None
        self.may_be_unbound: set[str] = set()  # names that are read where they may have no value
        self.leaves = False

    def fresh(self, kind: str) -> str:
        """Return a new name for generated code; as a dunder it is not mangled and not a user's."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return f"__{kind}{self.counts[kind]}__"

    def mangled(self, name: str) -> str:
        """Return a name after the mangling of private names."""
        owner = (self.inside or "").lstrip("_")
        if owner and name.startswith("__") and not name.endswith("__"):
            return f"_{owner}{name}"
        return name

    def borrow(self, names: set[str]) -> None:
        """Note that generated inner functions assign these local names, which must stay locals."""
        if names & self.names.globals:
            raise CannotConvert(":= of a global name within a larger expression")
        self.borrowed |= names - self.names.nonlocals

    def inner(self, f: ast.FunctionDef) -> ast.FunctionDef:
        """Convert a generated function inside this one."""
        return rewrite(f, Scope(self.inside, self.counts))

    def prologue(self, f: ast.FunctionDef) -> list[ast.stmt]:
        made = [ast.Global(sorted(self.names.globals))] if self.names.globals else []
        made += [ast.Nonlocal(sorted(self.names.nonlocals))] if self.names.nonlocals else []
        for name in sorted(self.borrowed):
            made += stmts("if False:\n    NAME = None", f, NAME=name)
        made += self.functions
        made += stmts(f"{FRAME} = {RUNTIME}.Frame()", f)
        return [ast.copy_location(s, f.body[0]) for s in made]


def rewrite(f: ast.FunctionDef, scope: Scope, lookup: Any = None) -> ast.FunctionDef:
    """Rewrite a function for lanes. ``lookup`` gives the value of a name that is not its own."""
    desugar = Desugar(scope.fresh)
    f.body = [made for s in f.body for made in _listed(desugar.visit(s))] or [ast.Pass()]
    ast.fix_missing_locations(f)
    if lookup is not None:
        with_scalar_code(f, scope, lookup)
    scope.names = Names(f)
    scope.leaves = any(
        isinstance(n, ast.Return)
        for s in own(f.body)
        if isinstance(s, (ast.If, ast.While, ast.For))
        for n in own([s])
    )
    rewriter = Statements(f, scope)
    body = rewriter.body(f.body)
    if scope.leaves:
        body += stmts("return F.result()", f.body[-1])
    doc = [s for s in body[:1] if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    f.body = doc + scope.prologue(f) + body[len(doc) :]
    return f


def _listed(found: Any) -> list[ast.stmt]:
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def template(f: types.FunctionType) -> Template | Refused:
    """Return the converted code of f, cached; or a `Refused` with the reason against it."""
    found = _templates.get(f.__code__)
    if found is None:
        found = _templates[f.__code__] = _template(f)
    return found


def _template(f: types.FunctionType) -> Template | Refused:
    code = f.__code__
    line: int | None = None
    try:
        if code.co_flags & 0x2A0:  # generators, coroutines
            raise CannotConvert("a generator or a coroutine")
        node, inside = find(f)
        made = rewrite(whole(node), Scope(inside, {}), functools.partial(_find_value, f))
        computes = straight(whole(node))
        return Template(
            _compiled(made, inside, f),
            None if computes is None else Template(_compiled(computes, inside, f)),
        )
    except CannotConvert as cannot:
        reason, line = cannot.reason, cannot.line
    except (SyntaxError, RecursionError) as error:  # too many loops inside each other
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a defect, which is told, and is no error of the call
        reason = f"forall itself failed with {type(error).__name__}: {error}"
        return Refused(reason, f"{code.co_filename}:{code.co_firstlineno}", is_internal=True)
    return Refused(reason, f"{code.co_filename}:{line or code.co_firstlineno}")


def _find_value(f: types.FunctionType, name: str) -> Any:
    """Return the value of a name in a function that is not its own; None for one that has none."""
    if name in f.__code__.co_freevars:
        cell = (f.__closure__ or ())[f.__code__.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:
            return None
    return f.__globals__.get(name, getattr(builtins, name, None))


def _compiled(node: ast.FunctionDef, inside: str | None, f: types.FunctionType) -> types.CodeType:
    """Compile a node inside a function that binds its free names, and a class of its name.

    So free names stay free, and private names are mangled.
    """
    code = f.__code__
    # A name of the user's that was bound out here would become free in the function
    node.name = "__converted__"
    names = [*(n for n in code.co_freevars if n != "__class__"), RUNTIME]
    body: ast.stmt = node
    if inside is not None:
        # Leading underscores do not count where Python mangles
        body = ast.ClassDef("______" + inside.lstrip("_"), [], [], [node], [])
    given = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
    outer = ast.FunctionDef("__outer__", given, [body], [], None)
    module = ast.Module([ast.copy_location(outer, node)], [])
    for new in (body, *given.args):
        ast.copy_location(new, node)
    ast.fix_missing_locations(module)
    made = compile(module, code.co_filename, "exec", code.co_flags & _FUTURE, dont_inherit=True)
    for _ in range(3 if inside is not None else 2):
        made = next(c for c in made.co_consts if isinstance(c, types.CodeType))
    return made.replace(co_name=code.co_name, co_qualname=code.co_qualname)
