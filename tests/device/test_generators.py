"""The generators of every device are kept and put back, whatever device the arguments lie on."""

import pytest
import torch

from device import fakedev
from forall import config, grad, vmap
from forall._compat import rng_state

D = fakedev.NAME


def drawing(x):
    """Draws on the device, of which no argument tells."""
    return x * 2 + torch.rand(3, device=D).cpu()


def diverging(x):
    """The same, where examples diverge: the run of all of them is undone."""
    y = torch.rand(3, device=D).cpu()
    return x + y if x.sum() > 0 else x - y


def states():
    return [torch.get_rng_state(), *(g.get_state() for g in torch.fakedev.default_generators)]


@pytest.mark.parametrize("other", [D, f"{D}:1"])
def test_states_are_of_all_devices(other):
    before = states()
    kept = rng_state.save_states([])
    torch.rand(3, device=other)
    torch.rand(3)
    rng_state.restore_states(kept)
    assert all(map(torch.equal, states(), before))


def test_draws_that_are_the_same_in_chunks():
    torch.manual_seed(0)
    wanted = vmap(drawing, randomness="same")(torch.ones(4, 3))
    torch.manual_seed(0)
    found = vmap(drawing, randomness="same", chunk_size=2)(torch.ones(4, 3))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("func", [drawing, diverging])
def test_replayed_calls_draw_on(func, monkeypatch):
    """What a recording draws once more is put back."""
    monkeypatch.setattr(config, "patience", 0)
    found = {}
    xs = torch.tensor([[1.0, 2, 3], [-1, -2, -3]])
    for replay in (False, True):
        monkeypatch.setattr(config, "replay", replay)
        torch.manual_seed(0)
        f = vmap(func, randomness="same")
        found[replay] = torch.stack([f(xs) for _ in range(6)])
    assert torch.equal(found[True], found[False])


def test_mapped_numbers_that_are_drawn_alike():
    """Each example draws from the same place of the device's generator."""
    rates = torch.full((3, 4), 5.0, device=D)
    torch.manual_seed(0)
    found = vmap(torch.poisson, randomness="same")(rates)
    assert torch.equal(found[0], found[1])
    torch.manual_seed(0)
    assert torch.equal(found[0], torch.poisson(rates[0]))


def test_a_gradient_of_what_draws_on_the_device():
    w = torch.ones(3, device=D)
    torch.manual_seed(0)
    wanted = torch.nn.functional.dropout(torch.ones(3, device=D))
    torch.manual_seed(0)
    found = grad(lambda w: torch.nn.functional.dropout(w).sum())(w)
    assert torch.equal(found, wanted)
