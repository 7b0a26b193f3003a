"""Values that a call has left behind, where what is left of them is not found."""

import pytest
import torch

from forall import grad, jvp, vmap

D = torch.float64
X = torch.arange(3, dtype=D)


def kept_by(run):
    box = []

    def f(x):
        if not box:
            box.append(torch.arange(3, dtype=D).cos())
        return (box[0] * x).sum()

    run(f)
    return box[0]


@pytest.mark.xfail(
    strict=True,
    reason="in a backward pass values of any ended level may be met by right",
    raises=RuntimeError,
)
def test_a_hook_uses_a_cache_of_another_call():
    c = kept_by(lambda f: vmap(f)(X.expand(2, 3)))

    def f(x):
        h = x * 1
        h.register_hook(lambda g: c * g)
        return (h * h).sum()

    found = vmap(grad(f))(X.expand(2, 3))
    torch.testing.assert_close(found, (2 * X * X.cos()).expand(2, 3))


@pytest.mark.xfail(
    strict=True, reason="what is left of a jvp's value is a view", raises=RuntimeError
)
def test_detach_in_place_of_a_value_kept_from_a_jvp():
    w = torch.ones(3, dtype=D, requires_grad=True)
    box = []
    jvp(lambda x: (box.append(w.exp()), x)[1], (X,), (X,))
    assert not box[0].detach_().requires_grad
