"""Our transforms put in the place of torch.func's by name, as a program does that tries them."""

from __future__ import annotations

import pytest
import torch
import torch.func

import forall
from forall._api.torch_func_patch import OURS

NAMES = [ours.__name__ for ours in OURS]
OWN = {name: getattr(torch.func, name) for name in NAMES}
X = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.25, -0.5]])
MODULE = torch.nn.Linear(3, 3)
PARAMETERS = {k: v.detach() for k, v in MODULE.named_parameters()}


@pytest.fixture(autouse=True)
def ours_in_torchs_place(monkeypatch):
    for name in NAMES:
        monkeypatch.setattr(torch.func, name, getattr(forall, name))
    monkeypatch.setattr(torch, "vmap", forall.vmap)
    torch.compiler.reset()


def cubes(x):
    return x**3


CALLS = {
    "functional_call": lambda x: torch.func.functional_call(MODULE, PARAMETERS, (x,)),
    "grad": lambda x: torch.func.grad(lambda x: cubes(x).sum())(x),
    "grad_and_value": lambda x: torch.func.grad_and_value(lambda x: cubes(x).sum())(x)[0],
    "hessian": lambda x: torch.func.hessian(lambda x: cubes(x).sum())(x),
    "jacfwd": lambda x: torch.func.jacfwd(cubes)(x),
    "jacrev": lambda x: torch.func.jacrev(cubes)(x),
    "jvp": lambda x: torch.func.jvp(cubes, (x,), (x,))[1],
    "vjp": lambda x: torch.func.vjp(cubes, x)[1](x)[0],
    "vmap": lambda x: torch.func.vmap(cubes)(x),
    "torch.vmap": lambda x: torch.vmap(cubes)(x),
    "per-example gradients": lambda x: torch.func.vmap(torch.func.grad(lambda y: y.sin().sum()))(x),
    "linearize": lambda x: torch.func.linearize(cubes, x)[1](x),
}


def by_torch(name):
    """The same call with torch's own transforms; its linearize warns."""
    name = "jvp" if name == "linearize" else name
    with pytest.MonkeyPatch.context() as own:
        for n in NAMES:
            own.setattr(torch.func, n, OWN[n])
        own.setattr(torch, "vmap", OWN["vmap"])
        return CALLS[name](X)


@pytest.mark.parametrize("name", CALLS)
def test_call_with_ours_in_torchs_place_equals_torchs(name):
    torch.testing.assert_close(CALLS[name](X), by_torch(name))


@pytest.mark.parametrize("name", CALLS)
def test_compiled_call_with_ours_in_torchs_place_equals_torchs(name):
    compiled = torch.compile(CALLS[name], backend="eager")
    torch.testing.assert_close(compiled(X), by_torch(name))


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"linearize"}))
def test_call_inside_torchs_own_vmap_equals_torchs(name):
    found = OWN["vmap"](CALLS[name])(X[None])
    torch.testing.assert_close(found[0], by_torch(name))


def test_stacked_modules_with_ours_in_torchs_place_are_the_modules():
    parameters, _ = torch.func.stack_module_state([MODULE, MODULE])
    torch.testing.assert_close(
        parameters["bias"].detach(), MODULE.bias.detach().expand(2, 3).clone()
    )
