"""Draws under each of vmap's words for randomness: 'error', 'different', 'same' and a key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torch.nn import init

import forall
from by_groups import EXPECTED
from draws import make_generator
from oracle import difference

B = 5
KEY = forall.random.key(7)
pytestmark = [
    EXPECTED,  # torch's own loops that draw until they may stop
    pytest.mark.filterwarnings("ignore:Singular sample detected:UserWarning"),
]

DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x[None, ..., None], 0.5),
    "dropout2d in place": lambda x: F.dropout2d(x[None, ..., None].clone(), 0.5, inplace=True),
    "dropout3d": lambda x: F.dropout3d(x[None, ..., None, None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "alpha_dropout in place": lambda x: F.alpha_dropout(x.clone(), 0.5, True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout in place": lambda x: F.feature_alpha_dropout(
        x.clone(), 0.5, True, inplace=True
    ),
    "module": lambda x: nn.FeatureAlphaDropout(0.3)(nn.Dropout(0.3)(x)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        x.repeat(3, 3)[None], 2, output_size=3
    ),
}

FAMILIES = {
    "Bernoulli": lambda x: D.Bernoulli(logits=x),
    "Beta": lambda x: D.Beta(x.exp(), (-x).exp()),
    "Binomial": lambda x: D.Binomial(10, x.sigmoid()),
    "Categorical": lambda x: D.Categorical(logits=x),
    "Cauchy": lambda x: D.Cauchy(x, x.exp()),
    "Chi2": lambda x: D.Chi2(x.exp()),
    "ContinuousBernoulli": lambda x: D.ContinuousBernoulli(x.sigmoid()),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()),
    "Exponential": lambda x: D.Exponential(x.exp()),
    "FisherSnedecor": lambda x: D.FisherSnedecor(x.exp() + 3, x.exp() + 3),
    "Gamma": lambda x: D.Gamma(x.exp(), (-x).exp()),
    "Geometric": lambda x: D.Geometric(x.sigmoid()),
    "Gumbel": lambda x: D.Gumbel(x, x.exp()),
    "HalfCauchy": lambda x: D.HalfCauchy(x.exp()),
    "HalfNormal": lambda x: D.HalfNormal(x.exp()),
    "Independent": lambda x: D.Independent(D.Normal(x, x.exp()), 1),
    "InverseGamma": lambda x: D.InverseGamma(x.exp(), x.exp()),
    "Kumaraswamy": lambda x: D.Kumaraswamy(x.exp(), x.exp()),
    "LKJCholesky": lambda x: D.LKJCholesky(3, x[0, 0].exp()),
    "Laplace": lambda x: D.Laplace(x, x.exp()),
    "LogNormal": lambda x: D.LogNormal(x, x.exp()),
    "LogisticNormal": lambda x: D.LogisticNormal(x, x.exp()),
    "LowRankMultivariateNormal": lambda x: D.LowRankMultivariateNormal(
        x[0], x.mT[:, :2], x[0].exp()
    ),
    "MixtureSameFamily": lambda x: D.MixtureSameFamily(
        D.Categorical(logits=x), D.Normal(x, x.exp())
    ),
    "Multinomial": lambda x: D.Multinomial(7, logits=x),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x[0], x.mT @ x + torch.eye(4)),
    "NegativeBinomial": lambda x: D.NegativeBinomial(5.0, x.sigmoid()),
    "Normal": lambda x: D.Normal(x, x.exp()),
    "OneHotCategorical": lambda x: D.OneHotCategoricalStraightThrough(logits=x),
    "Pareto": lambda x: D.Pareto(x.exp(), x.exp() + 1),
    "Poisson": lambda x: D.Poisson(x.exp()),
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x),
    "RelaxedOneHotCategorical": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x),
    "StudentT": lambda x: D.StudentT(x.exp() + 2, x, x.exp()),
    "TransformedDistribution": lambda x: D.TransformedDistribution(
        D.Normal(x, x.exp()), [D.transforms.SigmoidTransform()]
    ),
    "Uniform": lambda x: D.Uniform(x, x + x.exp()),
    "VonMises": lambda x: D.VonMises(x, x.exp()),
    "Weibull": lambda x: D.Weibull(x.exp(), x.exp()),
    "Wishart": lambda x: D.Wishart(torch.tensor(6.0), x @ x.mT + torch.eye(3)),
}

INITS = {
    "uniform_": init.uniform_,
    "normal_": init.normal_,
    "trunc_normal_": init.trunc_normal_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": init.kaiming_uniform_,
    "kaiming_normal_": init.kaiming_normal_,
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda w: init.sparse_(w, 0.5),
}

DRAWS = {
    **DROPOUTS,
    **{f"{n} of a buffer": lambda x, f=f: f(torch.empty(3, 4)) + x for n, f in INITS.items()},
    **{f"{n} of the argument": lambda x, f=f: f(x.clone()) for n, f in INITS.items()},
    "a module made inside": lambda x: nn.Linear(4, 2)(x).detach(),
    "an order": lambda x: x[:, torch.randperm(4)],
    "a part of a buffer": lambda x: _part(x),
}


def _part(x: Tensor) -> Tensor:
    buffer = torch.zeros(3, 4)
    buffer[1:].diagonal().normal_()
    return buffer + x


def data() -> Tensor:
    return torch.randn(B, 3, 4, generator=make_generator(0))


def scoped(f, xs: Tensor) -> Tensor:
    """The loop, each example in the scope of its own key."""
    found = []
    for i, x in enumerate(xs):
        with forall.random.scope(KEY, i):
            found.append(f(x))
    return torch.stack(found)


def seeded_again(f, xs: Tensor) -> Tensor:
    """The loop, torch's generator put back for each example."""
    found = []
    for x in xs:
        torch.manual_seed(3)
        found.append(f(x))
    return torch.stack(found)


def are_apart(found: Tensor) -> bool:
    return len({tuple(x.flatten().tolist()) for x in found}) > 1


@pytest.mark.parametrize("name", DRAWS)
def test_every_word(name):
    f, xs = DRAWS[name], data()
    torch.manual_seed(3)
    if name != "dropout of all":
        with pytest.raises(RuntimeError, match="randomness='error' forbids"):
            forall.vmap(f)(xs)
    assert difference(forall.vmap(f, randomness=KEY)(xs), scoped(f, xs)) is None
    torch.manual_seed(3)
    assert difference(forall.vmap(f, randomness="same")(xs), seeded_again(f, xs)) is None
    alike = xs[:1].expand(B, 3, 4)
    out = forall.vmap(f, randomness="different")(alike)
    assert (out.shape, out.dtype) == (seeded_again(f, alike).shape, xs.dtype)
    assert are_apart(out) or name == "dropout of all"


# Their samplers reject, so that one example may draw more often than another.
REJECTING = {"Beta", "Chi2", "FisherSnedecor", "LKJCholesky", "VonMises", "Wishart"}


@pytest.mark.parametrize("name", FAMILIES)
def test_distributions_with_parameters_of_each_example(name):
    family, xs = FAMILIES[name], data()

    def sample(x):
        return family(x).sample((2,))

    with pytest.raises(RuntimeError, match="randomness='error' forbids"):
        forall.vmap(sample)(xs)
    truth = scoped(sample, xs)
    assert difference(forall.vmap(sample, randomness=KEY)(xs), truth) is None
    torch.manual_seed(3)
    same = forall.vmap(sample, randomness="same")(xs)
    if name not in REJECTING:
        assert difference(same, seeded_again(sample, xs)) is None
    alike = forall.vmap(sample, randomness="same")(xs[:1].expand(B, 3, 4))
    assert difference(alike, alike[:1].expand_as(alike)) is None
    apart = forall.vmap(sample, randomness="different")(xs[:1].expand(B, 3, 4))
    assert (apart.shape, apart.dtype) == (truth.shape, truth.dtype)
    assert are_apart(apart)


def have_rsample(name: str) -> bool:
    return FAMILIES[name](data()[0]).has_rsample


@pytest.mark.parametrize("name", [n for n in FAMILIES if have_rsample(n)])
def test_reparametrised_draws_have_the_loops_derivative(name):
    family, xs = FAMILIES[name], data().double()

    def value(x):
        return family(x).rsample().sum()

    def truth(x):
        own = x.clone().requires_grad_()
        return torch.autograd.grad(value(own), own)[0]

    found = forall.vmap(forall.grad(value), randomness=KEY)(xs)
    assert difference(found, scoped(truth, xs)) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_densities_are_the_loop(name):
    family, xs = FAMILIES[name], data()
    taken = scoped(lambda x: family(x).sample(), xs)

    def density(x, value):
        return family(x).log_prob(value)

    found = forall.vmap(density)(xs, taken)
    assert difference(found, torch.stack(list(map(density, xs, taken)))) is None
    taken = scoped(lambda x: family(x).sample(), xs[:1].expand_as(xs))
    one = torch.stack([density(xs[0], v) for v in taken])
    assert difference(forall.vmap(density, (None, 0))(xs[0], taken), one) is None


# --- generators given by the user ----------------------------------------------------------------

GIVEN = {
    "rand": lambda x, g: torch.rand(3, 4, generator=g) + x,
    "randn": lambda x, g: torch.randn(3, 4, generator=g) + x,
    "randint": lambda x, g: torch.randint(2, 10**6, (3, 4), generator=g) + x,
    "randperm": lambda x, g: torch.randperm(4, generator=g) + x,
    "normal": lambda x, g: torch.normal(x, x.exp(), generator=g),
    "normal of a mean": lambda x, g: torch.normal(x, 1.0, generator=g),
    "normal of a size": lambda x, g: (
        torch.normal(0.0, 1.0, (3, 4), generator=g, device=x.device) + x
    ),
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
    "multinomial": lambda x, g: torch.multinomial(x.exp(), 3, generator=g),
    "poisson": lambda x, g: torch.poisson(x.exp() * 9, generator=g),
    "binomial": lambda x, g: torch.binomial(torch.full((3, 4), 9.0), x.sigmoid(), generator=g),
    "gamma": lambda x, g: torch._standard_gamma(x.exp(), generator=g),
    "dirichlet": lambda x, g: torch._sample_dirichlet(x.exp(), generator=g),
    "uniform_": lambda x, g: torch.empty(3, 4).uniform_(generator=g) + x,
    "normal_ of the argument": lambda x, g: x.clone().normal_(generator=g),
    "exponential_": lambda x, g: torch.empty(3, 4).exponential_(generator=g) + x,
    "geometric_": lambda x, g: torch.empty(3, 4).geometric_(0.01, generator=g) + x,
    "bernoulli_ of each": lambda x, g: torch.empty(3, 4).bernoulli_(x.sigmoid(), generator=g) + x,
    "kaiming_uniform_": lambda x, g: init.kaiming_uniform_(torch.empty(3, 4), generator=g) + x,
    "rand with out": lambda x, g: torch.rand(3, 4, generator=g, out=torch.empty(3, 4)) + x,
}


def fresh() -> torch.Generator:
    return make_generator(5)


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_generator_that_is_given(name, chunk):
    draw, xs = GIVEN[name], data()
    before = torch.get_rng_state()
    given = fresh()

    def call(x):
        return draw(x, given)

    truth = torch.stack([draw(x, fresh()) for x in xs])
    same = forall.vmap(call, randomness="same", chunk_size=chunk)(xs)
    assert difference(same, truth) is None
    used = fresh()
    draw(xs[-1], used)
    assert torch.equal(given.get_state(), used.get_state())
    alike = xs[:1].expand(B, 3, 4)
    runs = []
    for _ in range(2):
        given.manual_seed(5)
        runs.append(forall.vmap(call, randomness="different", chunk_size=chunk)(alike))
    assert torch.equal(*runs)
    assert are_apart(runs[0])
    state = given.get_state()
    assert (
        difference(forall.vmap(call, randomness=KEY, chunk_size=chunk)(xs), scoped(call, xs))
        is None
    )
    with pytest.raises(RuntimeError, match="randomness='error' forbids"):
        forall.vmap(call)(xs)
    assert torch.equal(given.get_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_noise_of_rrelu_comes_from_the_generator_that_is_given():
    x, before = -torch.ones(B, 3), torch.get_rng_state()

    def noisy(g):
        return lambda x: torch.ops.aten.rrelu_with_noise(x, torch.empty(3), 0.1, 0.9, True, g)

    first, second = (forall.vmap(noisy(fresh()), randomness="different")(x) for _ in range(2))
    assert torch.equal(first, second)
    assert are_apart(first)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_from_a_hidden_generator_are_taken_back_all():
    deep = SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=SimpleNamespace())))
    deep.b.c.d.generator = generator = make_generator(3)

    def f(x):
        a = torch.rand((), generator=deep.b.c.d.generator)
        y = x + a + 10 * torch.rand((), generator=deep.b.c.d.generator)
        return y * 2 if x > 0 else y

    xs = torch.tensor([1.0, -1.0, 2.0])
    found = forall.vmap(f, randomness="same")(xs)
    left = generator.get_state()
    generator.manual_seed(3)
    y = xs + torch.rand((), generator=generator) + 10 * torch.rand((), generator=generator)
    torch.testing.assert_close(found, torch.where(xs > 0, y * 2, y))
    assert left.equal(generator.get_state())
