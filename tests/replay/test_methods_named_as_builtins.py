"""A method that is named as a built-in function is another: `model.eval()` evaluates no text."""

from __future__ import annotations

import builtins

import pytest
import torch
from torch import nn

from forall import grad, jit, vmap
from forall._jit.guards import attribute_names, module_names
from forall._jit.tracing import coverage

# The built-in functions, and functions of modules, that the analyses know by name.
NAMES = sorted(
    (
        attribute_names._BUILT_IN
        | attribute_names.NAMES_OF_TEXT_LOOKUP
        | module_names._FUNCTIONS
        | coverage._BY_LOCALS
        | {"breakpoint", "input", "open", "id", "hash"}
    )
    - {"__import__"}
)
MODEL = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
MODEL.eval()
X = torch.arange(6.0).reshape(2, 3)


def double(self, x):
    return 2 * x


TOOL = type("Tool", (), dict.fromkeys(NAMES, double))()


def evaluated(x):
    return MODEL.eval()(x).square()


@pytest.mark.parametrize("name", NAMES)
def test_a_function_that_calls_the_method_is_replayed(name, at_once, hits):
    text = f"def call(x):\n    return TOOL.{name}(x)\n"
    home = {"TOOL": TOOL, "__name__": "users"}
    exec(text, home)  # noqa: S102 - the name is what differs
    call = home["call"]
    for _ in range(6):
        torch.testing.assert_close(vmap(call)(X), 2 * X)
    assert hits
    hits.clear()
    for _ in range(6):  # a function that is made anew
        torch.testing.assert_close(grad(lambda x: call(x).sum())(X), torch.full_like(X, 2))
    assert hits


def test_a_function_that_sets_its_model_for_evaluation(at_once, hits):
    for _ in range(8):
        torch.testing.assert_close(vmap(evaluated)(X), MODEL[0](X).square())
    assert hits
    MODEL.train()  # the next call changes it, as the function does
    torch.testing.assert_close(vmap(evaluated)(X), MODEL[0](X).square())
    assert not MODEL.training


def test_a_function_that_is_made_anew(at_once, hits):
    for step in range(8):
        x = X + step
        got = grad(lambda w, x=x: (MODEL.eval()(x) * w).sum())(torch.ones(3))
        torch.testing.assert_close(got, MODEL(x).sum(0))
    assert hits


CLOSED = 2.0


def by_name(x):
    return x * eval("CLOSED")  # noqa: S307 - this is what is tested


def by_the_module(x):
    return x * builtins.eval("CLOSED", globals())  # noqa: S307


def by_import(x):
    from builtins import eval as run

    return x * run("CLOSED", {"CLOSED": CLOSED})  # noqa: S307


@pytest.mark.parametrize("func", [by_name, by_the_module, by_import])
def test_what_evaluates_a_text_is_not_replayed(func, at_once, hits, monkeypatch):
    mapped = vmap(func)
    for _ in range(6):
        torch.testing.assert_close(mapped(X), 2 * X)
    monkeypatch.setitem(globals(), "CLOSED", 3.0)
    torch.testing.assert_close(mapped(X), 3 * X)
    assert not hits


@pytest.mark.parametrize("func", [by_name, by_the_module, by_import])
def test_a_recorded_call_that_evaluates_a_text_sees_what_it_reads(func, monkeypatch):
    jitted = jit(func)
    for _ in range(3):
        torch.testing.assert_close(jitted(X), 2 * X)
    monkeypatch.setitem(globals(), "CLOSED", 3.0)
    torch.testing.assert_close(jitted(X), 3 * X)
