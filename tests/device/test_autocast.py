"""Autocast of a device that is neither the CPU nor CUDA."""

import pytest
import torch

from device import fakedev
from forall import config, grad, jit, vmap

D = fakedev.NAME


def cast(on=True):
    return torch.autocast(D, dtype=torch.bfloat16, enabled=on)


def f(x):
    return (x @ W @ W).sin()


torch.manual_seed(0)
W = torch.randn(3, 3, device=D)
XS = torch.randn(4, 3, device=D)


@pytest.mark.parametrize("replay", [False, True])
def test_calls_are_cast_as_in_the_loop(replay, monkeypatch):
    monkeypatch.setattr(config, "replay", replay)
    monkeypatch.setattr(config, "patience", 0)
    mapped = vmap(f)
    for _ in range(6):
        for on in (True, False):
            with cast(on):
                wanted = torch.stack([f(x) for x in XS])
                found = mapped(XS)
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted)


def test_jit_tells_calls_apart():
    jitted = jit(f)
    for _ in range(3):
        for on in (True, False):
            with cast(on):
                assert jitted(XS).dtype == (torch.bfloat16 if on else torch.float32)


def test_what_was_cast_is_not_cast_again():
    """A program under autocast off within it stays so."""

    def g(x):
        with cast(on=False):
            return (x @ W).float() @ W

    jitted = jit(g)
    for _ in range(3):
        with cast():
            assert jitted(XS).dtype == torch.float32
            assert torch.equal(jitted(XS), g(XS))


def test_gradients():
    jitted = jit(vmap(grad(lambda x: f(x).sum())))
    with cast():
        wanted = torch.stack(
            [torch.autograd.grad(f(x).sum(), x)[0] for x in XS.clone().requires_grad_()]
        )
        for _ in range(3):
            torch.testing.assert_close(jitted(XS), wanted, rtol=0.02, atol=0.02)
