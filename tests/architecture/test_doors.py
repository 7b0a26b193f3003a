"""What users and extenders see: doors without code, torch.func's names and signatures."""

import inspect
import subprocess
import sys

import pytest
import torch.func

import forall
import forall.extend
import forall.random
import forall.testing
from source import files, functions


@pytest.mark.parametrize("door", ["__init__.py", "extend.py"])
def test_a_door_defines_nothing(door):
    assert not list(functions(files()[door]))


@pytest.mark.parametrize("door", [forall, forall.extend, forall.random, forall.testing])
def test_a_door_opens_on_what_it_promises(door):
    assert all(hasattr(door, name) for name in door.__all__)
    assert len(set(door.__all__)) == len(door.__all__)


@pytest.mark.parametrize("name", torch.func.__all__)
def test_every_name_of_torch_func_is_here_with_its_signature(name):
    assert name in forall.__all__
    ours = inspect.signature(getattr(forall, name)).parameters
    theirs = inspect.signature(getattr(torch.func, name)).parameters
    by_place = [p for p in theirs.values() if p.kind is not p.KEYWORD_ONLY]
    assert list(ours)[: len(by_place)] == [p.name for p in by_place]
    for p in theirs.values():
        assert (ours[p.name].kind, ours[p.name].default) == (p.kind, p.default)
    for extra in ours.keys() - theirs.keys():
        assert ours[extra].kind is inspect.Parameter.KEYWORD_ONLY


PUBLIC = [
    *(f for f in (getattr(forall, n) for n in forall.__all__) if f.__module__.startswith("forall")),
    *(getattr(forall.extend, name) for name in forall.extend.__all__),
    *(getattr(forall.random, name) for name in forall.random.__all__),
    *(getattr(forall.testing, name) for name in forall.testing.__all__),
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda f: getattr(f, "__name__", type(f).__name__))
def test_a_public_name_says_what_it_is(public):
    first = (inspect.getdoc(public) or "").splitlines()[0]
    assert first.endswith((".", ":"))


@pytest.mark.parametrize(
    "verb",
    [f for f in PUBLIC if f.__module__.startswith("forall._api")],
    ids=lambda f: f.__name__,
)
def test_a_verb_is_documented_with_an_example(verb):
    doc = inspect.getdoc(verb) or ""
    assert "Example:" in doc
    if verb is not forall.debug_unwrap:
        assert "Source:" in doc
        assert "Cost" in doc


def test_importing_forall_imports_no_compiler():
    heavy = "'torch._dynamo', 'torch._inductor', 'torch._decomp', 'sympy', 'numpy.f2py'"
    code = (
        "import sys, torch, torch.func; before = set(sys.modules); import forall; "
        f"print(*sorted({{{heavy}}} & (set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_importing_forall_leaves_the_programs_to_the_first_jit():
    code = (
        "import sys, forall; loaded = lambda: 'forall._jit.tracing.trace_call' in sys.modules; "
        "print(loaded()); forall.jit(abs); print(loaded())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]
