"""Three of the programs that `make clients` runs, where their libraries are installed."""

import pytest
import torch

import forall
from clients.compare import difference, load, make_both, run_ours, transforms_called

X = torch.ones(2)
CALLS = {
    "grad": lambda: forall.grad(torch.sum)(X),
    "jvp": lambda: forall.jvp(torch.sin, (X,), (X,)),
    "linearize": lambda: forall.linearize(torch.sin, X),
    "vjp": lambda: forall.vjp(torch.sin, X),
    "vmap": lambda: forall.vmap(torch.sin)(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_transform_that_is_called_is_named(name):
    with transforms_called() as called:
        CALLS[name]()
    assert called == {name}


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", ["einx", "opacus", "tensordict"])
def test_a_librarys_program_has_the_results_of_torch_func(name):
    pytest.importorskip(name, reason=f"{name} is not installed: `make test` installs it")
    theirs, ours, called = make_both(load(name))
    assert "vmap" in called
    expected = theirs()
    for _ in range(4):
        assert difference(run_ours(ours), expected) < 1e-5
    assert difference(theirs(), expected) == 0  # torch.func is back
