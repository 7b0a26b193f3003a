"""Examples that part add what is detached to a tensor of an outer transform that has history."""

import pytest
import torch

from forall import grad, jacfwd, jacrev, jvp, vmap

pytestmark = pytest.mark.filterwarnings("ignore:vmap. ")
D = torch.float64
X = torch.arange(6.0, dtype=D).reshape(2, 3)


def added_to(make):
    def f(x):
        y = make(x)

        def inner(a):
            y.add_(a.detach())
            if a > 1:
                return a * 2
            return a.sin()

        return vmap(inner)(x).sum() + (y * y).sum()

    return f


def plainly(make, x):
    y = make(x)
    found = []
    for a in x:
        y.add_(a.detach())
        found.append(a * 2 if a > 1 else a.sin())
    return torch.stack(found).sum() + (y * y).sum()


def gradient(make, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(plainly(make, x), x)[0]


MADE = {
    "computed": lambda x: x.sum() * torch.ones(2, dtype=D),
    "a copy": lambda x: x.clone(),
    "a power": lambda x: x**2,
    "without history": lambda x: torch.ones(2, dtype=D),
}


@pytest.mark.parametrize("made", MADE)
def test_transforms_of_what_adds_where_examples_part(made):
    make = MADE[made]
    f, right = added_to(make), gradient(make, X[1])
    values = torch.stack([plainly(make, x) for x in X])
    gradients = torch.stack([gradient(make, x) for x in X])
    torch.testing.assert_close(vmap(f)(X), values)
    torch.testing.assert_close(vmap(vmap(f))(X[None])[0], values)
    torch.testing.assert_close(grad(f)(X[1]), right)
    torch.testing.assert_close(vmap(grad(f))(X), gradients)
    torch.testing.assert_close(vmap(vmap(grad(f)))(X[None])[0], gradients)
    torch.testing.assert_close(vmap(jacrev(f))(X), gradients)
    torch.testing.assert_close(vmap(jacfwd(f))(X), gradients)
    torch.testing.assert_close(grad(lambda x: vmap(f)(x).sum())(X), gradients)
    torch.testing.assert_close(jvp(f, (X[1],), (X[1],))[1], right @ X[1])
    x = X.clone().requires_grad_()
    vmap(f)(x).sum().backward()
    torch.testing.assert_close(x.grad, gradients)
