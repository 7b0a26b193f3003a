"""Public modules: names without code, torch.func's names and signatures, docstrings."""

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


@pytest.mark.parametrize("path", ["__init__.py", "extend.py"])
def test_a_public_module_defines_nothing(path):
    assert not list(functions(files()[path]))


@pytest.mark.parametrize("module", [forall, forall.extend, forall.random, forall.testing])
def test_a_public_module_has_the_names_it_lists(module):
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


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
    "transform",
    [f for f in PUBLIC if f.__module__.startswith("forall._api")],
    ids=lambda f: f.__name__,
)
def test_a_transform_is_documented_with_an_example(transform):
    doc = inspect.getdoc(transform) or ""
    assert "Example:" in doc
    if transform is not forall.debug_unwrap:
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


def test_importing_forall_imports_nothing_of_torch_distributed():
    code = (
        "import sys, torch; before = set(sys.modules); import forall; "
        "print(*(n for n in set(sys.modules) - before if n.startswith('torch.distributed')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_importing_forall_imports_no_tracer_before_the_first_jit():
    code = (
        "import sys, forall; loaded = lambda: 'forall._jit.tracing.trace_call' in sys.modules; "
        "print(loaded()); forall.jit(abs); print(loaded())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]
