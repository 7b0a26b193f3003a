"""The stateless draws under every transform: what is drawn depends on the key alone."""

import pytest
import torch

import forall.random as R
from forall import grad, jacrev, jvp, vmap

KEY = R.key(1)
X = torch.tensor([0.3, -1.0, 2.0])
DRAWS = {
    "key": lambda k: R.key(k[1]),
    "split": lambda k: R.split(k, 3),
    "split into a shape": lambda k: R.split(k, (2, 2)),
    "fold_in": lambda k: R.fold_in(k, 5),
    "fold_in a tensor": lambda k: R.fold_in(k, k[0]),
    "bits": lambda k: R.bits(k, (3,), torch.int32),
    "bits, 8 of them": lambda k: R.bits(k, (3,), torch.uint8),
    "bits, 64 of them": lambda k: R.bits(k, (3,), torch.int64),
    "uniform": lambda k: R.uniform(k, (2, 3)),
    "uniform between": lambda k: R.uniform(k, (3,), None, X, X + 1),
    "uniform, double": lambda k: R.uniform(k, (3,), torch.float64),
    "normal": lambda k: R.normal(k, (3,)),
    "normal, complex": lambda k: torch.view_as_real(R.normal(k, (3,), torch.complex64)),
    "truncated_normal": lambda k: R.truncated_normal(k, X, 2.5),
    "bernoulli": lambda k: R.bernoulli(k, X.sigmoid(), (4, 3)),
    "rademacher": lambda k: R.rademacher(k, (5,)),
    "randint": lambda k: R.randint(k, (3,), 0, 1000),
    "randint of tensors": lambda k: R.randint(k, (3,), torch.arange(3), 2**40),
    "categorical": lambda k: R.categorical(k, X, shape=(5,)),
    "categorical along a dim": lambda k: R.categorical(k, X.expand(2, 3).T, 0),
    "permutation": lambda k: R.permutation(k, 6),
    "permutation of lines": lambda k: R.permutation(k, X.expand(2, 3), 1, independent=True),
    "choice": lambda k: R.choice(k, X, (4,)),
    "choice by p": lambda k: R.choice(k, X, (4,), p=X.softmax(0)),
    "choice without replacement": lambda k: R.choice(k, X, (2,), False),
    "exponential": lambda k: R.exponential(k, (3,)),
    "gumbel": lambda k: R.gumbel(k, (3,)),
    "laplace": lambda k: R.laplace(k, (3,)),
    "gamma": lambda k: R.gamma(k, X.exp()),
    "gamma of a number": lambda k: R.gamma(k, 0.5),
    "beta": lambda k: R.beta(k, X.exp(), 2.0),
    "dirichlet": lambda k: R.dirichlet(k, X.exp(), (2,)),
    "poisson": lambda k: R.poisson(k, X.exp() * 4, (2, 3)),
    "multivariate_normal": lambda k: R.multivariate_normal(k, X, torch.eye(3)),
}


def loop(f, *args):
    return torch.stack([f(*a) for a in zip(*args, strict=True)])


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_over_keys_is_the_loop(name):
    f, keys = DRAWS[name], R.split(KEY, (2, 3))
    expected = loop(f, keys[0])
    torch.testing.assert_close(vmap(f)(keys[0]), expected)
    torch.testing.assert_close(vmap(f, in_dims=1)(keys[0].T), expected)
    torch.testing.assert_close(vmap(f, chunk_size=2)(keys[0]), expected)
    torch.testing.assert_close(vmap(vmap(f))(keys), torch.stack([expected, loop(f, keys[1])]))
    torch.testing.assert_close(vmap(lambda k, x: f(k), (None, 0))(KEY, X), loop(f, [KEY] * 3))


@pytest.mark.parametrize("size", [1, 2, 33, 100, 257])
def test_numbers_do_not_depend_on_how_many_keys_there_are(size):
    keys = R.split(KEY, 257)

    def f(k):
        return R.normal(k, (3,)) + R.gamma(k, 0.5, (3,)) + R.poisson(k, 3.0, (3,))

    whole = vmap(f)(keys)
    torch.testing.assert_close(vmap(f)(keys[:size]), whole[:size])
    torch.testing.assert_close(vmap(f, chunk_size=size)(keys), whole)


PARAMETRISED = {
    "gamma": lambda k, x: R.gamma(k, x.exp(), (3,)).sum(),
    "beta": lambda k, x: R.beta(k, x.exp(), 1.5, (3,)).sum(),
    "dirichlet": lambda k, x: R.dirichlet(k, x.exp().expand(3))[0],
    "normal": lambda k, x: (x + x.exp() * R.normal(k, (3,))).sum(),
    "truncated_normal": lambda k, x: R.truncated_normal(k, x - 2, x, (3,)).sum(),
    "uniform": lambda k, x: R.uniform(k, (3,), None, x, x * 2 + 5).sum(),
}


@pytest.mark.parametrize("name", PARAMETRISED)
def test_derivatives_by_the_parameters(name):
    f, keys = PARAMETRISED[name], R.split(KEY, 3)
    d = grad(f, 1)
    expected = loop(d, keys, X)
    torch.testing.assert_close(vmap(d)(keys, X), expected)
    torch.testing.assert_close(
        vmap(lambda k, x: jvp(lambda y: f(k, y), (x,), (torch.ones_like(x),))[1])(keys, X), expected
    )
    outside = grad(lambda x: vmap(f)(keys, x).sum())(X)
    torch.testing.assert_close(outside, expected)
    torch.testing.assert_close(jacrev(lambda x: vmap(f)(keys, x))(X), expected.diag())


def test_a_second_derivative_of_gamma_is_refused():
    twice = grad(grad(lambda a: R.gamma(KEY, a, (2,)).sum()))
    with pytest.raises(RuntimeError, match="not implemented"):
        twice(torch.tensor(1.5))


def test_keys_under_torch_func():
    keys = R.split(KEY, 3)
    ours = loop(lambda k: R.normal(k, (2,)), keys)
    torch.testing.assert_close(torch.func.vmap(lambda k: R.normal(k, (2,)))(keys), ours)


def test_keys_on_other_devices():
    drawn = R.normal(R.key(0, device="meta"), (3,))
    assert drawn.device.type == "meta"
    assert R.gamma(R.key(0, device="meta"), 2.0, (3,)).shape == (3,)
    if torch.cuda.is_available():
        key = R.key(0, device="cuda")
        assert torch.equal(R.bits(key, (99,)).cpu(), R.bits(R.key(0), (99,)))
        assert torch.equal(R.uniform(key, (99,)).cpu(), R.uniform(R.key(0), (99,)))
