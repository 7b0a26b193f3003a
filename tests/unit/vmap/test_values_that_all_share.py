"""Operators on values that all examples share run once, and their results are the loop's."""

import pytest
import torch

from draws import make_generator
from forall import grad, jacfwd, vmap

D = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=make_generator(seed), dtype=D)


def written_view(y):
    row = y.clone()
    row[0].unsqueeze(0).mul_(3)
    return row


def written_base(y):
    base = y.clone()
    row = base.select(0, 1)
    base.add_(1)
    return row * base[0]


def read_alias(y):
    z = y.sin()
    alias = z.view_as(z)
    z.mul_(2)
    return alias


FUNCTIONS = {
    "sum": lambda y: y.sum(0),
    "product": lambda y: y @ y.T,
    "softmax": lambda y: y.softmax(-1),
    "concatenation": lambda y: torch.cat([y, y.T.contiguous()]),
    "solve": lambda y: torch.linalg.solve(y @ y.T + 2 * torch.eye(3, dtype=D), y),
    "eigenvalues": lambda y: torch.linalg.eigvalsh(y + y.T),
    "complex eigenvalues": lambda y: torch.linalg.eigvals(y).abs().sort().values,
    "fourier transform": lambda y: torch.fft.fft(y).conj().real,
    "lazy conjugate": lambda y: torch.complex(y, y).conj().imag,
    "sparse": lambda y: y.to_sparse().to_dense(),
    "index": lambda y: y[:, torch.tensor([2, 0])],
    "views": lambda y: y.unsqueeze(0).transpose(1, 2).expand(2, 3, 3)[1, 1:].reshape(-1),
    "split": lambda y: y.split([1, 2])[1] * y.unbind(1)[0][:2, None],
    "other dtype": lambda y: y.float().to(D) + y.to(torch.int64),
    "detached": lambda y: y.detach() * y,
    "a view is written": written_view,
    "its base is written": written_base,
    "an alias is read": read_alias,
    "sizes": lambda y: y * (y.shape == y.T.shape) + y.numel(),
    "sort": lambda y: y.sort(0).values + y.argsort(0),
    "norm": lambda y: torch.nn.functional.layer_norm(y, (3,)),
    "choice": lambda y: torch.where(y > 0, y, y.clamp(min=-0.1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_an_outer_example(name):
    f = FUNCTIONS[name]
    xs, bs = draw(2, 3, 3), draw(4, seed=1)

    def at(x):
        y = x.sin()  # the inner examples share this
        return lambda b: (f(y.cos()) * b).sum()

    found = vmap(lambda x: vmap(at(x))(bs))(xs)
    torch.testing.assert_close(found, torch.stack([torch.stack([*map(at(x), bs)]) for x in xs]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_made_inside_the_map(name):
    f = FUNCTIONS[name]
    y, bs = draw(3, 3), draw(4, seed=1)

    def g(b):
        return (f(torch.ones(3, 3, dtype=D).mul_(y).sin()) * b).sum()

    torch.testing.assert_close(vmap(g)(bs), torch.stack([*map(g, bs)]))


@pytest.mark.parametrize("name", ["product", "softmax", "views", "split", "solve", "norm"])
@pytest.mark.parametrize("mapped", [grad, jacfwd])
def test_derivatives_in_what_is_mapped(name, mapped):
    f = FUNCTIONS[name]
    xs, bs = draw(2, 3, 3), draw(4, seed=1)

    def at(x):
        y = x.sin()
        return mapped(lambda b: (f(y.cos() * b) * f(y)).sum())

    found = vmap(lambda x: vmap(at(x))(bs))(xs)
    torch.testing.assert_close(found, torch.stack([torch.stack([*map(at(x), bs)]) for x in xs]))
