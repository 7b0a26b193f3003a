"""A function may write into its argument, by any view; its Jacobian is the same as of a copy."""

import pytest
import torch

from forall import hessian, jacfwd, jacrev, jit, vmap

D = torch.float64
W = torch.linspace(-1, 1, 16, dtype=D).sin().view(4, 4)
X = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=D)

WRITES = {
    "itself": lambda x: x.mul_(2),
    "a view": lambda x: x.view(-1).mul_(2),
    "a view of another shape": lambda x: x.view(2, 2).mul_(2),
    "a part": lambda x: x[1:].mul_(2),
    "a part, overwritten": lambda x: x[1].fill_(3.0),
    "a view of a view": lambda x: x.view(2, 2)[1].copy_(x[:2]),
    "of two": lambda x: x.view(-1).addcmul_(X, X.sin()).mul_(X),
}
PRODUCTS = {
    "mv": lambda x: W @ x,
    "linear": lambda x: torch.nn.functional.linear(x, W),
    "from the left": lambda x: x @ W,
}
WAYS = {
    "jacfwd": lambda f: jacfwd(f),
    "jacfwd, as a copy": lambda f: jacfwd(lambda x: f(x.clone())),
    "jacrev, as a copy": lambda f: jacrev(lambda x: f(x.clone())),
    "jit": lambda f: jit(jacfwd(f)),
    "vmap": lambda f: lambda x: vmap(jacfwd(f))(x.repeat(3, 1))[1],
    "vmap over nothing": lambda f: lambda x: vmap(lambda _: jacfwd(f)(x.clone()))(x)[1],
    "vmap inside": lambda f: jacfwd(lambda x: vmap(f)(x.unsqueeze(0))[0]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("write", WRITES)
def test_jacobian(write, product, way):
    def f(x):
        WRITES[write](x)
        return PRODUCTS[product](x)

    truth = torch.autograd.functional.jacobian(lambda x: f(x.clone()), X.clone())
    torch.testing.assert_close(WAYS[way](f)(X.clone()), truth)


def test_hessian():
    def f(x):
        x.view(2, 2)[0].mul_(2)
        return (W @ x).tanh().sum()

    truth = torch.autograd.functional.hessian(lambda x: f(x.clone()), X.clone())
    found = hessian(lambda x: f(x.clone()))(X), jacfwd(jacfwd(f))(X.clone())
    torch.testing.assert_close(found, (truth, truth))


@pytest.mark.parametrize("write", WRITES)
def test_the_callers_tensor_shows_a_write_by_a_view(write):
    x = X.repeat(3, 1)
    before = x._version
    vmap(lambda row: WRITES[write](row).sum())(x)
    assert x._version > before


def test_who_has_saved_what_a_view_wrote_to_is_told():
    x = X.repeat(3, 1)
    w = torch.ones(3, 4, dtype=D, requires_grad=True)
    y = (w * x).sum()
    vmap(lambda row: row.view(-1).mul_(2))(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
