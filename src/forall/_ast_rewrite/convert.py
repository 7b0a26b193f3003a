"""Conversion of a function to code that lanes (vmap's examples) can run with divergence."""

from __future__ import annotations

import ast
import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

from forall._ast_rewrite.desugar import Desugarer
from forall._ast_rewrite.find_source import find_function_node, make_plain_def
from forall._ast_rewrite.liveness import ScopeNames, walk_scope
from forall._ast_rewrite.pure_compute import straight
from forall._ast_rewrite.quasiquote import FRAME, RUNTIME, stmts
from forall._ast_rewrite.scalar_code import extract_scalar_code
from forall._ast_rewrite.statements import StatementRewriter
from forall._ast_rewrite.unsupported import CannotConvert, Refusal

RAW_STACK_TRIES = 4  # runs on raw stacks that may fail before a function is always run on wrappers
_FUTURE = 0x1FF0000  # the flags of `from __future__ import ..`, as in Python's code.h
_runtime = types.CellType()
_templates: dict[types.CodeType, CodeTemplate | Refusal] = {}


def set_runtime(runtime: Any) -> None:
    """Set the runtime that converted code asks for its frames."""
    _runtime.cell_contents = runtime


class CodeTemplate:
    """The converted code of all functions that one ``def`` makes."""

    __slots__ = ("code", "straight", "tries")

    def __init__(self, code: types.CodeType, straight: CodeTemplate | None = None) -> None:
        self.code = code
        self.straight = straight  # a version for raw stacks, for a function that only computes
        self.tries = RAW_STACK_TRIES  # how often that version may still fail

    def make_function(self, f: types.FunctionType) -> Callable:
        """Return the converted f, with the cells, defaults and globals of f itself."""
        code = self.code
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        cells[RUNTIME] = _runtime
        closure = tuple(cells[name] for name in code.co_freevars)
        made = types.FunctionType(code, f.__globals__, f.__name__, f.__defaults__, closure)
        made.__kwdefaults__ = f.__kwdefaults__
        return made


class FunctionScope:
    """The state of the rewriting of one function."""

    def __init__(self, inside: str | None, counts: dict[str, int]) -> None:
        self.inside = inside
        self.counts = counts
        self.borrowed: set[str] = set()
        self.functions: list[ast.stmt] = []  # scalar code, for one example
        self.names: Any = None
        self.may_be_unbound: set[str] = set()  # names that are read where they may have no value
        self.leaves = False

    def make_name(self, kind: str) -> str:
        """Return a new name for generated code; as a dunder it is not mangled and not a user's."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return f"__{kind}{self.counts[kind]}__"

    def mangle_name(self, name: str) -> str:
        """Return a name after the mangling of private names."""
        owner = (self.inside or "").lstrip("_")
        if owner and name.startswith("__") and not name.endswith("__"):
            return f"_{owner}{name}"
        return name

    def borrow_names(self, names: set[str]) -> None:
        """Note that generated inner functions assign these local names, which must stay locals."""
        if names & self.names.globals:
            raise CannotConvert(":= of a global name within a larger expression")
        self.borrowed |= names - self.names.nonlocals

    def convert_inner(self, f: ast.FunctionDef) -> ast.FunctionDef:
        """Convert a generated function inside this one."""
        return rewrite_function(f, FunctionScope(self.inside, self.counts))

    def make_prologue(self, f: ast.FunctionDef) -> list[ast.stmt]:
        made = [ast.Global(sorted(self.names.globals))] if self.names.globals else []
        made += [ast.Nonlocal(sorted(self.names.nonlocals))] if self.names.nonlocals else []
        for name in sorted(self.borrowed):
            made += stmts("if False:\n    NAME = None", f, NAME=name)
        made += self.functions
        made += stmts(f"{FRAME} = {RUNTIME}.Frame()", f)
        return [ast.copy_location(s, f.body[0]) for s in made]


def rewrite_function(
    f: ast.FunctionDef, scope: FunctionScope, lookup: Any = None
) -> ast.FunctionDef:
    """Rewrite a function for lanes. ``lookup`` gives the value of a name that is not its own."""
    desugar = Desugarer(scope.make_name)
    f.body = [made for s in f.body for made in _wrap_in_list(desugar.visit(s))] or [ast.Pass()]
    ast.fix_missing_locations(f)
    if lookup is not None:
        extract_scalar_code(f, scope, lookup)
    scope.names = ScopeNames(f)
    scope.leaves = any(
        isinstance(n, ast.Return)
        for s in walk_scope(f.body)
        if isinstance(s, (ast.If, ast.While, ast.For))
        for n in walk_scope([s])
    )
    rewriter = StatementRewriter(f, scope)
    body = rewriter.rewrite_body(f.body)
    if scope.leaves:
        body += stmts("return F.result()", f.body[-1])
    doc = [s for s in body[:1] if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    f.body = doc + scope.make_prologue(f) + body[len(doc) :]
    return f


def _wrap_in_list(found: Any) -> list[ast.stmt]:
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def find_template(f: types.FunctionType) -> CodeTemplate | Refusal:
    """Return the converted code of f, cached; or a `Refusal` with the reason against it."""
    found = _templates.get(f.__code__)
    if found is None:
        found = _templates[f.__code__] = _make_template(f)
    return found


def _make_template(f: types.FunctionType) -> CodeTemplate | Refusal:
    code = f.__code__
    line: int | None = None
    try:
        if code.co_flags & 0x2A0:  # generators, coroutines
            raise CannotConvert("a generator or a coroutine")
        node, inside = find_function_node(f)
        made = rewrite_function(
            make_plain_def(node), FunctionScope(inside, {}), functools.partial(_find_value, f)
        )
        computes = straight(make_plain_def(node))
        return CodeTemplate(
            _compile_code(made, inside, f),
            None if computes is None else CodeTemplate(_compile_code(computes, inside, f)),
        )
    except CannotConvert as cannot:
        reason, line = cannot.reason, cannot.line
    except (SyntaxError, RecursionError) as error:  # too many loops inside each other
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a defect, which is told, and is no error of the call
        reason = f"forall itself failed with {type(error).__name__}: {error}"
        return Refusal(reason, f"{code.co_filename}:{code.co_firstlineno}", is_internal=True)
    return Refusal(reason, f"{code.co_filename}:{line or code.co_firstlineno}")


def _find_value(f: types.FunctionType, name: str) -> Any:
    """Return the value of a name in a function that is not its own; None for one that has none."""
    if name in f.__code__.co_freevars:
        cell = (f.__closure__ or ())[f.__code__.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:
            return None
    return f.__globals__.get(name, getattr(builtins, name, None))


def _compile_code(
    node: ast.FunctionDef, inside: str | None, f: types.FunctionType
) -> types.CodeType:
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
