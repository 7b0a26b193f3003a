"""What the cases change of their module is put back after each; a compiler that takes no time."""

import operator

import pytest
import torch

import forall
import jit.cases as home
from forall import jit
from forall._api.execution.transform_decorator import replay_transform
from forall._compat import compile_backends
from forall._jit.backends import torch_compile


@pytest.fixture(autouse=True)
def globals_as_before():
    before = {n: getattr(home, n) for n in ("SCALE", "WEIGHT", "helper")}
    table, factor = list(home.HOME.table["a"]), home.HOME.factor
    yield
    for n, value in before.items():
        setattr(home, n, value)
    home.HOME.table["a"][:], home.HOME.factor = table, factor


def on_copies(program, examples):
    """Compiled, as far as anybody can tell."""

    def run(*tensors):
        copies = [torch_compile._copy_with_layout(t) for t in tensors]
        before = [torch_compile._copy_with_layout(t) for t in tensors]
        made = [y.clone() for y in program(*copies)]
        for t, copy, old in zip(tensors, copies, before, strict=True):
            if not torch.allclose(copy, old, 0, 0, equal_nan=True):
                t.copy_(copy)
        return made

    return run


@pytest.fixture
def stand_in(monkeypatch):
    """A compiler that is quick, and what it was given."""
    asked = []

    def compiled(program, examples, *, writes):
        asked.append([str(node.target) for node in program.graph.nodes])
        return on_copies(program, examples)

    monkeypatch.setattr(compile_backends, "compile_by_inductor", compiled)
    monkeypatch.setattr(compile_backends, "find_inductor_obstacle", lambda: None)
    monkeypatch.setattr(torch_compile, "_FEWEST_OPERATORS", 1)
    return asked


@pytest.fixture(params=["jit", "replayed", "checked"])
def recorded(request, monkeypatch):
    """What makes a function one whose second call is a recorded one."""
    if request.param == "jit":
        return jit
    monkeypatch.setattr(forall.config, "replay", True if request.param == "replayed" else "check")
    monkeypatch.setattr(forall.config, "patience", 0)
    return lambda f: replay_transform(f)(operator.call)
