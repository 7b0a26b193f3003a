"""Draws with fixed keys against the distributions they are drawn from."""

import math

import pytest
import torch
from torch.distributions import Gamma, Laplace, Normal

import forall.random as R
from forall import grad, jvp, vmap
from forall._random import rejection
from forall._random.keys import split_words
from forall._random.threefry import make_counters

N = 50_000
KEY = R.key(2024)


def kolmogorov_smirnov(x: torch.Tensor, cdf) -> float:
    """How likely a distance from the distribution function is that is as large as x's."""
    x = x.double().sort().values
    n = len(x)
    f, steps = cdf(x), torch.arange(n + 1, dtype=torch.float64) / n
    distance = max(float((f - steps[:-1]).max()), float((steps[1:] - f).max()))
    s = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * s) ** 2) for k in range(1, 101))


def chi_squared(x: torch.Tensor, mass) -> float:
    """How likely counts are that are as far from ``mass(k)`` as those of the integers x."""
    x = x.double()
    k = torch.arange(int(x.min()), int(x.max()) + 1, dtype=torch.float64)
    expected = mass(k) * len(x)
    seen = torch.stack([(x == i).sum() for i in k]).double()
    many = expected > 10
    rest = len(x) - expected[many].sum()
    cells = ((seen - expected) ** 2 / expected)[many].sum()
    if rest > 10:
        cells += (len(x) - seen[many].sum() - rest) ** 2 / rest
    degrees = many.sum() - 1 + (rest > 10)
    return 1 - float(torch.special.gammainc(degrees / 2.0, cells / 2))


def beta_cdf(a, b):
    """By Simpson's rule, over a grid of arcsines: the ends may be steep."""
    t = torch.linspace(0, math.pi / 2, 20_001, dtype=torch.float64)
    x = t.sin() ** 2
    density = (
        2 * t.sin().clamp(min=1e-300) ** (2 * a - 1) * t.cos().clamp(min=1e-300) ** (2 * b - 1)
    )
    area = torch.cumulative_trapezoid(density, t)
    area = torch.cat([torch.zeros(1, dtype=torch.float64), area]) / area[-1]

    def cdf(y):
        i = torch.searchsorted(x, y).clamp(1, len(x) - 1)
        part = (y - x[i - 1]) / (x[i] - x[i - 1])
        return area[i - 1] + part * (area[i] - area[i - 1])

    return cdf


def gamma_cdf(a):
    return lambda x: torch.special.gammainc(torch.tensor(a, dtype=torch.float64), x)


DOUBLE = torch.float64
CONTINUOUS = {
    "uniform": (R.uniform(KEY, (N,)), lambda x: x),
    "uniform between": (R.uniform(KEY, (N,), None, -2.0, 3.0), lambda x: (x + 2) / 5),
    "uniform in double": (R.uniform(KEY, (N,), DOUBLE), lambda x: x),
    "normal": (R.normal(KEY, (N,)), Normal(0, 1).cdf),
    "normal in half": (
        R.normal(KEY, (2000,), torch.float16),
        Normal(0, 1).cdf,
    ),
    "truncated normal": (
        R.truncated_normal(KEY, -1.0, 2.5, (N,)),
        lambda x: (Normal(0, 1).cdf(x) - 0.15865525) / (0.99379033 - 0.15865525),
    ),
    "truncated normal, far out": (
        R.truncated_normal(KEY, 9.0, math.inf, (N,), DOUBLE),
        lambda x: 1 - torch.erfc(x / 2**0.5) / math.erfc(9 / 2**0.5),
    ),
    "exponential": (R.exponential(KEY, (N,)), lambda x: 1 - torch.exp(-x)),
    "gumbel": (R.gumbel(KEY, (N,)), lambda x: torch.exp(-torch.exp(-x))),
    "laplace": (R.laplace(KEY, (N,)), Laplace(0, 1).cdf),
    **{f"gamma {a}": (R.gamma(KEY, a, (N,)), gamma_cdf(a)) for a in (0.3, 1.0, 2.5, 50.0)},
    "gamma 0.02": (R.gamma(KEY, 0.02, (N,), DOUBLE), gamma_cdf(0.02)),
    **{
        f"beta {a} {b}": (R.beta(KEY, a, b, (N,), DOUBLE), beta_cdf(a, b))
        for a, b in ((0.5, 0.5), (2.0, 3.0), (8.0, 1.5))
    },
    "dirichlet": (R.dirichlet(KEY, torch.tensor([1.0, 2.0, 0.5]), (N,))[:, 1], beta_cdf(2.0, 1.5)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_draws(name):
    x, cdf = CONTINUOUS[name]
    assert kolmogorov_smirnov(x, cdf) > 0.001


def poisson_mass(rate):
    return lambda k: torch.exp(k * math.log(rate) - rate - torch.lgamma(k + 1))


def binomial_mass(n, p):
    def mass(k):
        ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        return torch.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))

    return mass


def binomial(n, p):
    shape = (torch.full((N,), float(n)), torch.full((N,), p))
    return rejection.binomial_operator(
        *split_words("binomial", KEY), make_counters((N,), None)[1], *shape
    )


def among(*probabilities):
    return lambda k: torch.tensor(probabilities, dtype=torch.float64)[k.long()]


THIRDS = torch.tensor([0.5, 0.2, 0.3])
DISCRETE = {
    "bernoulli": (R.bernoulli(KEY, 0.3, (N,)), among(0.7, 0.3)),
    "rademacher": ((R.rademacher(KEY, (N,)) + 1) // 2, among(0.5, 0.5)),
    "randint": (R.randint(KEY, (N,), -3, 17), lambda k: torch.full_like(k, 1 / 20)),
    "randint, the remainder of a large range": (
        R.randint(KEY, (N,), 0, 3 * 2**40) % 6,
        lambda k: torch.full_like(k, 1 / 6),
    ),
    "categorical": (R.categorical(KEY, THIRDS.log(), shape=(N,)), among(0.5, 0.2, 0.3)),
    "choice": (R.choice(KEY, 3, (N,), p=THIRDS), among(0.5, 0.2, 0.3)),
    "choice, all alike": (R.choice(KEY, 7, (N,)), lambda k: torch.full_like(k, 1 / 7)),
    **{
        f"poisson {rate}": (R.poisson(KEY, rate, (N,)), poisson_mass(rate))
        for rate in (0.3, 4.0, 9.99, 10.0, 35.0, 1000.0)
    },
    **{
        f"binomial {n} {p}": (binomial(n, p), binomial_mass(n, p))
        for n, p in ((10, 0.3), (100, 0.05), (100, 0.5), (1000, 0.9), (10_000, 0.2))
    },
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_draws(name):
    x, mass = DISCRETE[name]
    assert chi_squared(x, mass) > 0.001


def test_all_orders_are_equally_likely():
    orders = vmap(lambda key: R.permutation(key, 4))(R.split(KEY, 12_000))
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(12_000, 4))
    code = orders @ torch.tensor([64, 16, 4, 1])
    seen = torch.unique(code, return_counts=True)[1]
    assert len(seen) == 24
    assert chi_squared(
        torch.repeat_interleave(torch.arange(24), seen), lambda k: torch.full_like(k, 1 / 24)
    ) > 0.001  # fmt: skip


def test_choices_without_replacement():
    drawn = vmap(lambda key: R.choice(key, 4, (2,), replace=False))(R.split(KEY, 12_000))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert chi_squared(drawn[:, 0] * 4 + drawn[:, 1], lambda k: (k % 5 != 0) / 12.0) > 0.001
    p = torch.tensor([0.5, 0.25, 0.25])
    drawn = vmap(lambda key: R.choice(key, 3, (3,), replace=False, p=p))(R.split(KEY, 12_000))
    assert chi_squared(drawn[:, 0], among(0.5, 0.25, 0.25)) > 0.001
    assert torch.equal(drawn.sort(1).values, torch.arange(3).expand(12_000, 3))


def test_neighbouring_keys_and_places_are_not_correlated():
    x = vmap(lambda key: R.normal(key, (64,)))(R.split(KEY, 2000))
    for rows in (x, x.T, vmap(lambda i: R.normal(R.fold_in(KEY, i), (64,)))(torch.arange(2000))):
        c = torch.corrcoef(rows.T if rows.shape[0] == 2000 else rows)
        off = c[~torch.eye(len(c), dtype=torch.bool)]
        assert off.abs().max() < 6 / math.sqrt(2000)


def test_moments_of_a_normal_vector():
    mean = torch.tensor([1.0, -2.0, 0.5])
    root = torch.tensor([[1.0, 0, 0], [0.5, 2, 0], [-1, 0.3, 0.7]])
    x = R.multivariate_normal(KEY, mean, root @ root.T, (N,))
    torch.testing.assert_close(x.mean(0), mean, atol=0.04, rtol=0)
    torch.testing.assert_close(x.T.cov(), root @ root.T, atol=0.1, rtol=0)
    many = R.multivariate_normal(KEY, mean.expand(4, 3), root @ root.T)
    assert many.shape == (4, 3)


def test_permutations_of_tensors():
    x = torch.arange(12).reshape(3, 4)
    rows = R.permutation(KEY, x)
    assert torch.equal(rows.sort(0).values, x)
    columns = R.permutation(KEY, x, 1)
    assert torch.equal(columns - columns[:1], x[:, :1].expand(3, 4) - x[:1, :1])
    alone = R.permutation(KEY, x, -1, independent=True)
    assert torch.equal(alone.sort(1).values, x)
    assert R.choice(KEY, x, (2, 5), dim=1).shape == (3, 2, 5)


def test_what_lies_outside_the_parameters():
    assert R.gamma(KEY, torch.tensor([0.0, -1.0])).isnan().all()
    odd = R.poisson(KEY, torch.tensor([-1.0, 0.0, math.inf]), dtype=torch.float32)
    assert odd[0].isnan()
    assert odd[1] == 0
    assert odd[2] == math.inf
    assert R.gamma(KEY, torch.empty(0)).shape == (0,)


# --- derivatives ---------------------------------------------------------------------------------


def moved(draw, at, cdf):
    """d x / d a where x stays at its place in the distribution: -(dF/da) / (dF/dx)."""
    h = 1e-5
    x = draw(at)
    by_parameter = (cdf(at + h)(x) - cdf(at - h)(x)) / (2 * h)
    by_place = (cdf(at)(x + h * x) - cdf(at)(x - h * x)) / (2 * h * x)
    return -by_parameter / by_place


@pytest.mark.parametrize("a", [0.4, 1.0, 3.0, 20.0])
def test_the_derivative_of_a_gamma_draw_keeps_its_place(a):
    at = torch.tensor(a, dtype=torch.float64)

    def draw(alpha):
        return R.gamma(KEY, alpha, (20,))

    derivative = jvp(draw, (at,), (torch.ones_like(at),))[1]
    torch.testing.assert_close(
        derivative, moved(draw, at, lambda a: Gamma(a, 1.0).cdf), rtol=2e-3, atol=1e-5
    )
    torch.testing.assert_close(grad(lambda a: draw(a).sum())(at), derivative.sum())


def test_the_mean_of_derivatives_is_the_derivative_of_the_mean():
    def of_beta(p: torch.Tensor) -> torch.Tensor:
        return R.beta(KEY, p[0], p[1], (N,)).mean()

    def of_dirichlet(alpha: torch.Tensor) -> torch.Tensor:
        return R.dirichlet(KEY, alpha, (N,)).mean(0)[0]

    for drawn, values in ((of_beta, [2.0, 3.0]), (of_dirichlet, [0.5, 1.0, 4.0])):
        at = torch.tensor(values, dtype=torch.float64)
        (exact,) = torch.autograd.functional.jacobian(lambda p: p / p.sum(), at)[:1]
        torch.testing.assert_close(grad(drawn)(at), exact, atol=3e-3, rtol=0)


def test_bounds_and_moments_have_derivatives():
    low = torch.tensor(-1.0, dtype=torch.float64)
    u = R.uniform(KEY, (5,), torch.float64)
    d = grad(lambda v: R.uniform(KEY, (5,), torch.float64, v, 2.0).sum())(low)
    torch.testing.assert_close(d, (1 - u).sum())
    draw = lambda v: R.truncated_normal(KEY, v, 2.0, (5,)).sum()  # noqa: E731
    h = 1e-6
    torch.testing.assert_close(grad(draw)(low), (draw(low + h) - draw(low - h)) / (2 * h))
    cov = torch.eye(2, dtype=torch.float64)
    d = grad(lambda c: R.multivariate_normal(KEY, torch.zeros(2), c, (9,)).square().sum())(cov)
    assert d.isfinite().all()
