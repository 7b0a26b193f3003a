"""A view that is older than ``y.t_()``, written to: the derivative takes the wrong row.

Autograd makes a view of a wrapper again by the call that made it (here `select`), and after `t_`
that call means another part of the base. On ordinary tensors it goes by strides and is right.
"""

import pytest
import torch

from forall import grad, jvp, vmap


def f(x):
    y = x.sin()
    row = y[0]
    y.t_()
    row.mul_(2)
    return (y * 1).sum()


@pytest.mark.xfail(strict=True, reason="autograd replays the view call on the transposed base")
@pytest.mark.parametrize("through", ["vmap", "jvp"])
def test_a_row_written_after_its_base_was_transposed_in_place(through):
    x = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) / 6
    leaf = x.clone().requires_grad_()
    truth = torch.autograd.grad(f(leaf), leaf)[0]
    if through == "vmap":
        found = vmap(grad(f))(x[None])[0]
    else:
        found = jvp(grad(f), (x,), (torch.zeros_like(x),))[0]
    torch.testing.assert_close(found, truth)
