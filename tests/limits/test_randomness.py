"""`vmap(f, randomness=key)` against the loop under `forall.random.scope(key, i)`."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import forall.random as R
from draws import HERE, make_generator
from forall import cond, grad, hessian, hvp, jacfwd, jacrev, jvp, laplacian, linearize, vjp, vmap

KEY = R.key(7)
SIZE = 5


def data(*shape: int) -> torch.Tensor:
    return torch.randn(SIZE, *shape, generator=make_generator(0))


def keyed_loop(f, *args, key=KEY):
    out = []
    for i in range(len(args[0])):
        with R.scope(key, i):
            out.append(f(*(a[i] for a in args)))
    return torch.stack(out)


def check(f, *args):
    """One call of vmap, any chunks of it, any part of it: always the numbers of the loop."""
    expected = keyed_loop(f, *args)
    torch.testing.assert_close(vmap(f, randomness=KEY)(*args), expected)
    for chunk in (1, 2, 4):
        torch.testing.assert_close(vmap(f, randomness=KEY, chunk_size=chunk)(*args), expected)
    first = vmap(f, randomness=KEY)(*(a[:2] for a in args))
    torch.testing.assert_close(first, expected[:2])
    assert not torch.equal(expected[0], expected[1])


FACTORIES = {
    "rand": lambda x: x + torch.rand(3),
    "rand in double": lambda x: x + torch.rand(3, dtype=torch.float64),
    "rand, complex": lambda x: torch.view_as_real(torch.rand(3, dtype=torch.complex64)),
    "randn": lambda x: x * torch.randn(2, 3),
    "randn of no dims": lambda x: x * torch.randn(()),
    "randn in half": lambda x: torch.randn(3, dtype=torch.float16),
    "randn, complex": lambda x: torch.view_as_real(torch.randn(3, dtype=torch.complex64)),
    "rand with a generator": lambda x: torch.rand(3, generator=torch.Generator(HERE)),
    "rand out=": lambda x: torch.rand(3, out=torch.empty(3)) + x,
    "randint": lambda x: x + torch.randint(10, (3,)),
    "randint between": lambda x: x + torch.randint(-5, 1000, (3,)),
    "randint of floats": lambda x: x + torch.randint(10, (3,), dtype=torch.float32),
    "randperm": lambda x: x[torch.randperm(3)] + torch.randperm(3),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randn_like of what all share": lambda x: torch.randn_like(torch.zeros(3)) + x,
    "randint_like": lambda x: x + torch.randint_like(x, 100),
    "normal of a size": lambda x: torch.normal(2.0, 3.0, (4,)),
    "normal of means": lambda x: torch.normal(x, 0.1),
    "normal of spreads": lambda x: torch.normal(0.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.abs()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + x,
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.5) + x,
    "multinomial": lambda x: x[torch.multinomial(x.softmax(0), 2)],
    "multinomial with replacement": lambda x: x[torch.multinomial(x.softmax(0), 7, True)],
    "poisson": lambda x: torch.poisson(x.exp() * 20) + x,
    "binomial": lambda x: torch.binomial(torch.full((3,), 30.0), x.sigmoid()) + x,
    "two draws": lambda x: torch.rand(3) - torch.rand(3),
    "a draw that decides a place": lambda x: x[torch.randint(3, ())] + torch.rand(()),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_new_draws(name):
    check(FACTORIES[name], data(3))


def filled(fill):
    return lambda x: fill(torch.empty(3)) + x


IN_PLACE = {
    "uniform_": filled(lambda b: b.uniform_(-1, 4)),
    "normal_": filled(lambda b: b.normal_(1, 2)),
    "exponential_": filled(lambda b: b.exponential_(2.0)),
    "geometric_": filled(lambda b: b.geometric_(0.3)),
    "cauchy_": filled(lambda b: b.cauchy_()),
    "log_normal_": filled(lambda b: b.log_normal_()),
    "random_": filled(lambda b: b.random_()),
    "random_ to": filled(lambda b: b.random_(10)),
    "random_ between": filled(lambda b: b.random_(-3, 10)),
    "random_ of ints": lambda x: torch.empty(3, dtype=torch.int64).random_() + x.long(),
    "bernoulli_": filled(lambda b: b.bernoulli_(0.4)),
    "bernoulli_ with ps": lambda x: torch.empty(3).bernoulli_(x.sigmoid()) + x,
    "a part of a buffer": lambda x: (
        torch.zeros(2, 3).index_fill_(0, torch.tensor(1), 0.5)[0].normal_() + x
    ),
    "a copy of the argument": lambda x: x.clone().uniform_(),
    "a diagonal": lambda x: _diagonal(x),
}


def _diagonal(x):
    square = torch.zeros(3, 3)
    square.diagonal().normal_()
    return square + x


@pytest.mark.parametrize("name", IN_PLACE)
def test_draws_in_place(name):
    check(IN_PLACE[name], data(3))


def test_a_draw_into_a_mapped_argument_reaches_the_caller():
    mine, loops = data(3), data(3)
    vmap(lambda x: x.uniform_().sum(), randomness=KEY)(mine)
    for i in range(SIZE):
        with R.scope(KEY, i):
            loops[i].uniform_()
    assert torch.equal(mine, loops)


def test_a_draw_into_what_all_share_is_refused():
    shared = torch.zeros(3)
    with pytest.raises(RuntimeError, match="from before the call"):
        vmap(lambda x: shared.normal_() + x, randomness=KEY)(data(3))


DROPOUT = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout, all of it": lambda x: F.dropout(x, 1.0) + torch.rand(()),
    "dropout1d": lambda x: F.dropout1d(x.expand(4, 3), 0.5),
    "dropout2d": lambda x: F.dropout2d(x.expand(2, 4, 3, 3), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.expand(4, 3), 0.5, training=True),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        x.expand(2, 4, 6), x.expand(2, 4, 6), x.expand(2, 4, 6), dropout_p=0.5
    ),
    "rrelu without a write": lambda x: torch.ops.aten.rrelu_with_noise_functional(
        x, torch.zeros(3), 0.1, 0.3, True
    )[0],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_of_all_kinds(name):
    check(DROPOUT[name], data(6) if name == "attention" else data(3))


def test_modules_in_training():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    check(layer, data(3, 8))
    check(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.AlphaDropout()), data(3, 8))
    gru = nn.GRU(8, 4, num_layers=2, dropout=0.5)
    check(lambda x: gru(x)[0], data(3, 8))


DISTRIBUTIONS = {
    "Normal": lambda x: D.Normal(x, 1.0, validate_args=False).sample(),
    "Normal, reparametrised": lambda x: D.Normal(x, 1.0, validate_args=False).rsample((2,)),
    "Uniform": lambda x: D.Uniform(x, x + 2, validate_args=False).rsample(),
    "Categorical": lambda x: D.Categorical(logits=x, validate_args=False).sample((6,)) + x[0],
    "Gamma": lambda x: D.Gamma(x.exp(), 1.0, validate_args=False).rsample(),
    "Beta": lambda x: D.Beta(x.exp(), 1.0, validate_args=False).rsample(),
    "Dirichlet": lambda x: D.Dirichlet(x.exp(), validate_args=False).rsample(),
    "Poisson": lambda x: D.Poisson(x.exp(), validate_args=False).sample() + x,
    "Exponential": lambda x: D.Exponential(x.exp(), validate_args=False).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0, validate_args=False).rsample(),
    "StudentT": lambda x: D.StudentT(x.exp() + 3, validate_args=False).rsample(),
    "Bernoulli": lambda x: D.Bernoulli(logits=x, validate_args=False).sample() + x,
    "MultivariateNormal": lambda x: D.MultivariateNormal(
        x, torch.eye(3), validate_args=False
    ).rsample(),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    check(DISTRIBUTIONS[name], data(3))


INITS = {
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "normal_": nn.init.normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.4),
}


@pytest.mark.parametrize("name", INITS)
def test_initialisation(name):
    check(lambda x: INITS[name](torch.empty(4, 3)) @ x, data(3))


# --- nesting -------------------------------------------------------------------------------------


def noisy(x):
    return x * torch.rand(2) + torch.randn(())


def draw_by_python(x):
    return x + random.random()


def draw_by_numpy(x):
    return x + float(np.random.rand())  # noqa: NPY002 - the generator that all code shares


@pytest.mark.parametrize(
    ("f", "module"), [(draw_by_python, "the module random"), (draw_by_numpy, "numpy.random")]
)
def test_a_number_that_python_draws_once_for_all_gets_a_warning(f, module):
    xs = torch.zeros(3)
    np.random.rand()  # noqa: NPY002 - its first use may be that of a module being imported
    with pytest.warns(UserWarning, match=f"{module} draw numbers once for all 3 examples"):
        found = vmap(f)(xs)
    assert len(found.unique()) == 1


def test_a_number_that_python_draws_for_one_example_gets_no_warning(recwarn):
    vmap(lambda x: draw_by_python(x))(torch.zeros(1))
    vmap(lambda x: x + len(recwarn))(torch.zeros(3))
    grad(lambda x: draw_by_python(x))(torch.zeros(()))
    assert not recwarn.list


def test_an_inner_vmap_inherits_the_key():
    def inner(row):
        return vmap(noisy)(row) + torch.rand(())

    def looped(row):
        key = R.next_key()
        return keyed_loop(noisy, row, key=key) + torch.rand(())

    x = data(4, 2)
    check(inner, x)
    torch.testing.assert_close(vmap(inner, randomness=KEY)(x), keyed_loop(looped, x))
    torch.testing.assert_close(vmap(looped, randomness=KEY)(x), keyed_loop(looped, x))


def test_two_inner_vmaps_draw_different_numbers():
    check(lambda row: vmap(noisy)(row) - vmap(noisy, chunk_size=3)(row), data(4, 2))


def test_three_levels():
    def f(x):
        return vmap(lambda y: vmap(noisy)(y) + torch.rand(()))(x) + vmap(vmap(noisy))(x)

    check(f, data(2, 3, 2))


def test_an_inner_vmap_that_draws_the_same_for_all():
    def looped(row):
        scope_draws = torch.rand(2)
        return row * scope_draws + torch.randn(())

    def f(row):
        return vmap(noisy, randomness="same")(row)

    x = data(4, 2)
    check(f, x)
    torch.testing.assert_close(vmap(f, randomness=KEY)(x), keyed_loop(looped, x))
    same_of_each = lambda row: vmap(lambda y: torch.normal(y, 1.0), randomness="same")(row)  # noqa: E731
    check(same_of_each, x)
    drawn = vmap(same_of_each, randomness=KEY)(x) - x
    torch.testing.assert_close(drawn, drawn[:, :1].expand_as(drawn))


def test_chunks_inside_that_draw_the_same_for_all():
    def f(row):
        return vmap(noisy, randomness="same", chunk_size=2)(row) + torch.rand(())

    def whole(row):
        return vmap(noisy, randomness="same")(row) + torch.rand(())

    torch.testing.assert_close(
        vmap(f, randomness=KEY)(data(4, 2)), vmap(whole, randomness=KEY)(data(4, 2))
    )


def test_a_key_for_an_inner_vmap():
    inner = vmap(noisy, randomness=R.key(3))
    row = data(2)
    expected = keyed_loop(noisy, row, key=R.key(3))
    torch.testing.assert_close(vmap(inner)(row.expand(3, SIZE, 2)), expected.expand(3, SIZE, 2))
    keys = R.split(KEY, 3)
    mapped = vmap(lambda key: vmap(noisy, randomness=key)(row))(keys)
    torch.testing.assert_close(
        mapped, torch.stack([keyed_loop(noisy, row, key=key) for key in keys])
    )


def test_next_key_inside():
    check(lambda x: x + R.normal(R.next_key(), (3,)) + torch.rand(3), data(3))


def test_a_scope_inside():
    def f(x):
        a = torch.rand(3)
        with R.scope(R.key(1), 2):
            b = torch.rand(3) + torch.empty(3).normal_()
        return a + b * x + torch.rand(3)

    check(f, data(3))


def _in_a_branch(key, x):
    with R.scope(key):
        y = torch.rand(3)
        if x[0] > 0:
            y = y + torch.rand(3)
        return y * torch.rand(3)


def _until_it_accepts(key, x):
    with R.scope(key, x.abs().sum().int()):
        y = torch.rand(())
        while torch.rand(()) > 0.3:
            y = y + torch.rand(())
        return x * y + R.normal(R.next_key(), (3,))


def _in_an_operator(key, x):
    with R.scope(key):
        y = cond(x[0] > 0, lambda: torch.rand(3) + torch.rand(3), lambda: torch.ones(3))
        return x + y * torch.rand(3)


def _entered_by_some(key, x):
    y = x
    if x[0] > 0:
        with R.scope(key):
            y = y * torch.rand(3) if x[1] > 0 else y + 1
            y = y * torch.rand(3)
    with R.scope(key):
        return y + torch.rand(3)


def _mapped_within(key, x):
    def one(a):
        b = torch.rand(())
        return (b + torch.rand(()) if a > 0 else b) * torch.rand(())

    with R.scope(key):
        return vmap(one)(x) + torch.rand(3)


def _its_gradient(key, x):
    with R.scope(key):
        return grad(lambda x: (x * torch.rand(3) if x[0] > 0 else x).prod())(x) + torch.rand(3)


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")  # two vmaps that both part
@pytest.mark.parametrize(
    "f",
    [
        _in_a_branch,
        _until_it_accepts,
        _in_an_operator,
        _entered_by_some,
        _mapped_within,
        _its_gradient,
    ],
    ids=lambda f: f.__name__,
)
def test_each_example_counts_its_draws_in_a_scope_of_its_own(f):
    xs = data(3)
    keys, inner = R.split(KEY, SIZE), R.split(R.key(3), 2)
    expected = torch.stack([f(k, x) for k, x in zip(keys, xs, strict=True)])
    torch.testing.assert_close(vmap(f)(keys, xs), expected)
    shared = torch.stack([f(KEY, x) for x in xs])
    torch.testing.assert_close(vmap(f, in_dims=(None, 0))(KEY, xs), shared)
    nested = torch.stack([torch.stack([f(k, x) for x in xs]) for k in inner])
    twice = vmap(vmap(f, in_dims=(None, 0)), in_dims=(0, None))
    torch.testing.assert_close(twice(inner, xs), nested)
    check(lambda x: f(R.key(1), x) + torch.rand(3), xs)


# --- derivatives ---------------------------------------------------------------------------------


def wavy(x):
    return (x * torch.rand(3) + F.dropout(x, 0.5)).sin().sum()


DERIVATIVES = {
    "grad": grad(wavy),
    "grad of grad": grad(lambda x: grad(wavy)(x).square().sum()),
    "jacrev": jacrev(lambda x: x * torch.rand(3) + torch.rand(())),
    "jacfwd": jacfwd(lambda x: x**2 * torch.rand(3) + torch.rand(())),
    "hessian": hessian(wavy),
    "jvp": lambda x: jvp(wavy, (x,), (x.cos(),))[1],
    "jvp of grad": lambda x: jvp(grad(wavy), (x,), (x.cos(),))[1],
    "linearize": lambda x: linearize(wavy, x)[1](x.cos()),
    "laplacian": laplacian(wavy),
    "hvp": lambda x: hvp(wavy)(x, x.cos()),
    "vjp": lambda x: vjp(lambda y: y * torch.rand(3), x)[1](x)[0],
    "jacfwd in chunks": jacfwd(lambda x: x**2 * torch.rand(3) + torch.rand(()), chunk_size=2),
    "a vmap in a jacfwd": jacfwd(lambda x: vmap(lambda y: y * torch.rand(2))(x)),
    "grad through gamma": grad(lambda x: torch._standard_gamma(x.exp()).sum()),
    "jvp through gamma": lambda x: torch.stack(
        jvp(lambda y: torch._standard_gamma(y.exp()), (x,), (x.cos(),))
    ),
    "grad through dirichlet": grad(lambda x: R.dirichlet(R.next_key(), x.exp())[0]),
    "backward inside": lambda x: _backward(x),
}


def _backward(x):
    x = x.detach().requires_grad_()
    (wavy(x) + F.rrelu(x, training=True).sum()).backward()
    return x.grad


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_inside(name):
    check(DERIVATIVES[name], data(3))


@pytest.mark.parametrize("verb", [jacrev, jacfwd, lambda f: jacfwd(f, chunk_size=2)])
def test_a_derivative_is_that_of_one_draw(verb):
    x = data(3)[0]
    with R.scope(KEY):
        jacobian = verb(lambda x: x**2 * torch.rand(3))(x)
        after = torch.rand(())
    with R.scope(KEY):
        torch.testing.assert_close(jacobian, torch.diag(2 * x * torch.rand(3)))
        assert after == torch.rand(())


def test_derivatives_outside():
    x = data(3)
    outside = grad(lambda x: vmap(wavy, randomness=KEY)(x).sum())(x)
    torch.testing.assert_close(outside, keyed_loop(grad(wavy), x))
    torch.testing.assert_close(
        jacrev(vmap(wavy, randomness=KEY))(x), jacrev(lambda x: keyed_loop(wavy, x))(x)
    )
    torch.testing.assert_close(
        jvp(vmap(wavy, randomness=KEY), (x,), (x.cos(),)),
        jvp(lambda x: keyed_loop(wavy, x), (x,), (x.cos(),)),
    )
    torch.testing.assert_close(
        jacfwd(vmap(wavy, randomness=KEY))(x), jacfwd(lambda x: keyed_loop(wavy, x))(x)
    )


def test_primal_and_value_draw_alike():
    value = keyed_loop(lambda x: torch._standard_gamma(x.exp()), data(3))
    primal = keyed_loop(
        lambda x: jvp(lambda y: torch._standard_gamma(y.exp()), (x,), (x,))[0], data(3)
    )
    torch.testing.assert_close(primal, value)


def checkpointed(reentrant):
    def block(x, w):
        return F.dropout((x * w + torch.rand(3)).sin() * torch.randn_like(x), 0.3)

    def f(x, w):
        once = checkpoint(block, x, w, use_reentrant=reentrant) * torch.rand(())
        return checkpoint(block, once, w, use_reentrant=reentrant).sum() + torch.rand(())

    def plain(x, w):
        once = block(x, w) * torch.rand(())
        return block(once, w).sum() + torch.rand(())

    return f, plain


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_their_draws(reentrant):
    f, plain = checkpointed(reentrant)
    gradients = []
    for g, run in ((f, vmap(f, randomness=KEY)), (plain, lambda *a: keyed_loop(plain, *a))):
        x, w = data(3).requires_grad_(), data(3).cos().requires_grad_()
        y = run(x, w)
        y.sum().backward()
        gradients.append((y.detach(), x.grad, w.grad))
        assert g is not None
    torch.testing.assert_close(*gradients)


def test_checkpoints_repeat_their_draws_where_the_derivative_is_inside():
    f, plain = checkpointed(False)
    x, w = data(3), data(3).cos()
    expected = keyed_loop(grad(plain), x, w)
    torch.testing.assert_close(vmap(grad(f), randomness=KEY)(x, w), expected)
    torch.testing.assert_close(keyed_loop(grad(f), x, w), expected)
    jac = vmap(jacrev(lambda x, w: f(x, w) * w), randomness=KEY)(x, w)
    torch.testing.assert_close(jac, keyed_loop(jacrev(lambda x, w: plain(x, w) * w), x, w))
    again = grad(lambda x: vmap(grad(f), randomness=KEY)(x, w).sin().sum())(x)
    second = grad(lambda x: keyed_loop(grad(plain), x, w).sin().sum())(x)
    torch.testing.assert_close(again, second)


def test_checkpoints_in_an_inner_vmap():
    f, plain = checkpointed(False)
    x, w = data(4, 3), data(4, 3)
    expected = keyed_loop(vmap(grad(plain)), x, w)
    torch.testing.assert_close(vmap(vmap(grad(f)), randomness=KEY)(x, w), expected)
    outside = grad(lambda x: vmap(vmap(f), randomness=KEY)(x, w).sum())(x)
    torch.testing.assert_close(outside, expected)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.noise = torch.rand(3)
        return x * ctx.noise

    @staticmethod
    def backward(ctx, g):
        return g * ctx.noise


def test_a_custom_function_that_draws():
    check(lambda x: Noisy.apply(x) + torch.rand(3), data(3))
    check(grad(lambda x: Noisy.apply(x).sum() + torch.rand(())), data(3))
    x = data(3)
    check(lambda x: jvp(Noisy.apply, (x,), (x.cos(),))[1], x)
    torch.testing.assert_close(
        jvp(vmap(Noisy.apply, randomness=KEY), (x,), (x.cos(),)),
        jvp(lambda x: keyed_loop(Noisy.apply, x), (x,), (x.cos(),)),
    )


# --- what else holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 257])
def test_numbers_do_not_depend_on_how_many_examples_there_are(size):
    def f(x):
        return x + torch.randn(2) + torch._standard_gamma(torch.full((2,), 0.7))

    whole = vmap(f, randomness=KEY)(torch.zeros(257, 2))
    torch.testing.assert_close(vmap(f, randomness=KEY)(torch.zeros(size, 2)), whole[:size])
    chunked = vmap(f, randomness=KEY, chunk_size=size)(torch.zeros(257, 2))
    torch.testing.assert_close(chunked, whole)


def test_every_number_of_examples_up_to_257():
    def f(x):
        return x + torch.randn(2)

    whole = vmap(f, randomness=KEY)(torch.zeros(257, 2))
    assert len(whole.unique()) == whole.numel()
    for size in range(1, 257):
        assert torch.equal(vmap(f, randomness=KEY)(torch.zeros(size, 2)), whole[:size])


def test_no_examples():
    assert vmap(noisy, randomness=KEY)(torch.zeros(0, 2)).shape == (0, 2)


def test_a_draw_is_what_forall_random_draws():
    with R.scope(KEY, 3):
        first, second, third = torch.rand(4), torch.randn(2, 2), torch.randperm(6)
    k = R.fold_in(KEY, 3)
    assert torch.equal(first, R.uniform(R.fold_in(k, 0), (4,)))
    assert torch.equal(second, R.normal(R.fold_in(k, 1), (2, 2)))
    assert torch.equal(third, R.permutation(R.fold_in(k, 2), 6))


def test_generators_are_neither_asked_nor_changed():
    before = torch.get_rng_state()
    vmap(noisy, randomness=KEY)(data(2))
    with R.scope(KEY):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scope_may_be_entered_again():
    scope = R.scope(KEY)
    with scope:
        first = torch.rand(2)
        with scope:
            assert torch.equal(torch.rand(2), first)
        second = torch.rand(2)
    with scope:
        assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.rand(2), second)


def test_a_recorded_program_draws_what_was_drawn():
    def f(x):
        return vmap(noisy, randomness=KEY)(x) + R.gamma(KEY, 2.0, (2,))

    program = make_fx(f)(data(2))
    torch.testing.assert_close(program(data(2) + 1), f(data(2) + 1))


def test_a_scope_ends_with_an_exception():
    def fails(x):
        torch.rand(2)
        raise KeyError

    with pytest.raises(KeyError):
        vmap(fails, randomness=KEY)(data(2))
    with pytest.raises(KeyError), R.scope(KEY):
        fails(None)
    with pytest.raises(RuntimeError, match="no scope"):
        R.next_key()
    with pytest.raises(RuntimeError, match="forbids"):
        vmap(noisy)(data(2))


def test_an_ensemble_initialised_by_key():
    def init(_):
        net = nn.Linear(3, 2)
        return dict(copy.copy(net._parameters))["weight"].detach()

    check(init, data(1))
