"""Where replaying does less than it could: a derivative is an error."""

import pytest
import torch

from forall import config, vmap


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
