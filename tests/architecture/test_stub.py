"""The stub of the public names, src/forall/__init__.pyi, says what the functions take."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import forall

INIT = Path(forall.__file__)
STUB = ast.parse(INIT.with_suffix(".pyi").read_text())
OVERLOADS = [node for node in STUB.body if isinstance(node, ast.FunctionDef)]


def imports(tree: ast.Module) -> dict[str, tuple[str | None, str]]:
    """The public names that a module imports, each with where it is from and its name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_stub_has_all_public_names():
    names = next(n.value for n in STUB.body if isinstance(n, ast.Assign))
    assert ast.literal_eval(names) == forall.__all__
    found, stubs = imports(ast.parse(INIT.read_text())), imports(STUB)
    overloaded = {node.name for node in OVERLOADS}
    for name in [*forall.__all__, "random"]:
        if name not in overloaded:
            assert stubs[name] == found[name]
    assert overloaded <= {*forall.__all__}


@pytest.mark.parametrize(
    "overload", [pytest.param(n, id=f"{n.name}, line {n.lineno}") for n in OVERLOADS]
)
def test_each_overload_takes_what_the_function_takes(overload):
    assert [ast.unparse(d) for d in overload.decorator_list] == ["overload"]
    parameters = inspect.signature(getattr(forall, overload.name)).parameters
    args = overload.args
    by_position = [a.arg for a in args.args]
    assert by_position == [*parameters][: len(by_position)]
    several = [args.vararg.arg] if args.vararg else []
    assert {*by_position, *several, *(a.arg for a in args.kwonlyargs)} == {*parameters}
    assert all(parameters[n].kind is inspect.Parameter.VAR_POSITIONAL for n in several)
    given = dict(zip(reversed(by_position), reversed(args.defaults), strict=False))
    given |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d}
    for name, default in given.items():
        assert ast.literal_eval(default) == parameters[name].default


def test_the_stub_has_the_overloads_of_all_transforms():
    names = {node.name for node in OVERLOADS}
    assert {"grad", "jacrev", "jacfwd", "hessian", "jvp", "vjp", "linearize", "hvp"} <= names
    for path in INIT.parent.glob("_api/**/*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                assert "overload" not in map(ast.unparse, node.decorator_list), path
