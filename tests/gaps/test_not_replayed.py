"""Where replaying does less than it could: a call runs as it is, a derivative is an error."""

import pytest
import torch

from forall import config, grad, vmap
from forall._transforms.replaying import calls_of


class Part:
    def __init__(self, whole):
        self.whole = whole

    def scaled(self, x):
        return x * 2


class Whole:
    def __init__(self):
        self.part = Part(self)

    def loss(self, x):
        return self.part.scaled(x).sin().sum()


@pytest.mark.xfail(strict=True, reason="its program would hold it for good, and no module is there")
def test_a_method_of_what_its_parts_lead_back_to(monkeypatch):
    monkeypatch.setattr(config, "patience", 0)
    whole, seen = Whole(), []
    for _ in range(6):
        made = grad(whole.loss)
        seen.append(calls_of(made))
        made(torch.ones(3))
    assert any(calls.replays is not None and calls.replays.hits for calls in seen)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="a node saves what all need, for all")
def test_a_write_into_what_the_derivative_in_another_argument_needs(monkeypatch):
    monkeypatch.setattr(config, "patience", 0)
    f = vmap(lambda v, u: v * u.sin(), (0, None))
    for _ in range(6):
        x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
        u = w * 1
        y = f(x, u)
        with torch.no_grad():
            u.mul_(2)
        (found,) = torch.autograd.grad(y.sum(), x)  # the sine, which is there
        torch.testing.assert_close(found, torch.ones(3).sin().expand(2, 3))
