"""Copies, twins, numbers and memory used again: what passes leave out, and that no bit tells."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forall import grad, jit, vmap
from forall._compat import pytree
from forall._jit.tracing.trace_call import record

INF, NAN = math.inf, math.nan
X = torch.tensor([[1.0, -0.0, INF], [NAN, 2.0, -3.0]])


def names(f, *args):
    made = record(f, *pytree.flatten((args, {})))
    assert made.recorded is not None, made.why
    return [node.op.overloadpacket.__name__ for node in made.recorded.program.nodes]


def bits(t):
    return t.detach().contiguous().view(-1).view(torch.uint8)


def agree(f, *args, calls=3):
    """Each call gives the function's own bits, layouts and aliases, and leaves the same behind."""
    g = jit(f)
    for i in range(calls):
        mine, its = ([(a * (i + 1)).clone() for a in args] for _ in range(2))
        found, wanted = (pytree.get_leaves(h(*a)) for h, a in ((g, mine), (f, its)))
        for a, b in zip((*found, *mine), (*wanted, *its), strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert bits(a).equal(bits(b))
        memory = [[t.untyped_storage()._cdata for t in ts] for ts in (found + mine, wanted + its)]
        shared, wanted = ([m.index(place) for place in m] for m in memory)
        assert shared == wanted


def of(y, f):
    return f(y)


# --- copies ---------------------------------------------------------------------------------------


def test_a_copy_that_nobody_can_tell_is_none():
    assert names(lambda x: (x * 2).clone() + 1, X) == ["mul", "add_"]
    assert names(lambda x: x.clone().sin(), X) == ["sin"]
    assert names(lambda x: (x * 2).clone(), X) == ["mul"]
    assert names(lambda x: (x * 2).pow(1.0).sin(), X) == ["mul", "sin_"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.clone(),
        lambda x: (x.clone(), x),
        lambda x: x.view(3, 2).clone().t(),
        lambda x: of(x * 2, lambda y: (y, y.clone())),
        lambda x: of(x * 2, lambda y: (y.clone(), y.sin())),
        lambda x: x.clone().add_(1),
        lambda x: of(x.clone(), lambda y: (y, x.mul_(2), y + 1)),
        lambda x: of(x * 2, lambda y: of(y.clone(), lambda z: (z.add_(1), y + 0))),
        lambda x: of(x * 2, lambda y: of(y.clone(), lambda z: (y.add_(1), z + 0))),
        lambda x: x.t().clone(memory_format=torch.contiguous_format) * 2,
        lambda x: x.expand(2, 2, 3).clone() * 2,
        lambda x: x[1:].clone() + x[:1],
        lambda x: x.double().pow(1),
        lambda x: x.pow(1.0),
        lambda x: x.pow(0.0),
        lambda x: x.nan_to_num().long().pow(1) + 0.5,
        lambda x: torch.complex(x, x).conj().clone().imag.clone(),
        lambda x: torch.stack([torch.complex(x, x).conj().imag.clone()]).neg(),
    ],
)
def test_a_copy_that_somebody_can_tell_stays(f):
    agree(f, X)
    agree(f, torch.randn(2, 3))


def test_a_copy_of_an_argument_is_what_a_pull_back_keeps():
    def f(x):
        return x.clone() ** 3

    x = torch.randn(3, dtype=torch.float64)
    g = jit(f)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(g(leaf).sum(), leaf)
        assert found.equal(3 * x**2)
        y = g(leaf)
        with torch.no_grad():
            leaf.add_(1)
        (found,) = torch.autograd.grad(y.sum(), leaf)
        assert found.equal(3 * x**2)


def test_a_result_may_be_written_into_before_the_backward_pass():
    def f(x):
        return x.exp().clone()

    x = torch.randn(3, dtype=torch.float64)
    for g in (f, jit(f)):
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = g(leaf)
            with torch.no_grad():
                y.zero_()
            (found,) = torch.autograd.grad(y, leaf, torch.ones(3, dtype=torch.float64))
            torch.testing.assert_close(found, x.exp())


# --- twins ----------------------------------------------------------------------------------------


def test_what_is_asked_twice_is_computed_once():
    assert names(lambda x: x.sin() + x.sin() * x.t().sin().t(), X).count("sin") == 2
    assert names(lambda x: (x.sum(0), x.sum(0) * 2), X).count("sum") == 2  # one of them leaves


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.sin(), x.sin()),
        lambda x: (x.sin() + x.sin()).add_(x.sin()),
        lambda x: torch.stack([x.sin(), x.mul_(2).sin(), x.sin()]),
        lambda x: x.sin().add_(1) + x.sin(),
        lambda x: (x * 0.0 + 1 / (x * -0.0)) + (x * 0.0) / (x * -0.0),
        lambda x: x * 2 + x * 2.0 + x * True,
        lambda x: (x + 1).view(3, 2).sum() + (x + 1).view(3, 2).sum(),
        lambda x: (x.t(), x.t()),
        lambda x: torch.empty_like(x).fill_(1) + torch.empty_like(x).fill_(2),
        lambda x: torch.zeros_like(x).add_(x) + torch.zeros_like(x),
        lambda x: x.to(torch.float64).sum() + x.to(torch.float32).sum() + x.to(torch.float64).sum(),
    ],
)
def test_what_is_not_the_same_twice_stays(f):
    agree(f, X)
    agree(f, torch.randn(2, 3))


def test_two_draws_are_two():
    def f(x):
        return torch.rand(3) + torch.rand(3) * x.sin() + torch.rand(3) * x.sin()

    g = jit(f)
    for i in range(3):
        torch.manual_seed(i)
        found = g(X)
        torch.manual_seed(i)
        assert bits(found).equal(bits(f(X)))
    assert names(f, X).count("rand") == 3


def test_what_a_checkpoint_computes_again_is_not_kept():
    def f(x):
        return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum()

    f(X)  # torch wraps `checkpoint` anew at its first call
    asked = [name.rstrip("_") for name in names(grad(f), torch.randn(300, 300))]
    assert asked.count("sin") == 2
    assert names(grad(f), torch.randn(3, 3)).count("sin") == 1


def test_halves_do_not_share_what_they_compute():
    def f(x):
        return x.sin().cos()

    leaf = torch.randn(3, dtype=torch.float64, requires_grad=True)
    g = jit(lambda x: f(x) + x.sin())
    for _ in range(2):
        found = torch.autograd.grad(g(leaf).sum(), leaf)
        wanted = torch.autograd.grad((f(leaf) + leaf.sin()).sum(), leaf)
        torch.testing.assert_close(found, wanted)


# --- numbers --------------------------------------------------------------------------------------

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]
NUMBERS = [2, -1, 0, 0.0, -0.0, 0.1, 1 / 3, INF, NAN, 1e-45, 1e300, 2**24 + 1, True]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", KINDS)
def test_a_number_is_what_it_is_to_torch(dtype, number):
    x = torch.tensor([1.0, -0.0, 3.5, -2e20, 1e-38] if dtype.is_floating_point else [1, 0, 3])
    x = torch.cat([x, torch.tensor([INF, NAN])]) if dtype.is_floating_point else x
    x = x.to(dtype)
    functions = [torch.add, torch.mul, torch.div]
    if number is not True:  # which torch will not subtract
        functions += [torch.sub, lambda x, a: a - x]
    for function in functions:
        agree(lambda x, function=function: function(x, number), x, calls=1)
        agree(lambda x, function=function: function(x[0], number), x, calls=1)
        g = jit(lambda x, function=function: function(x * 1, number))
        assert bits(g(x)).equal(bits(g(x)))


def test_numbers_of_one_kind_are_one_tensor():
    made = record(lambda x: (x * 2 + 2) * 2.0, *pytree.flatten(((X,), {}))).recorded
    assert made is not None
    assert len(made.program.constants) == 2


# --- memory used again ----------------------------------------------------------------------------


def test_memory_that_nobody_reads_again_is_written_into():
    assert names(lambda x: (x.sin() * x).tanh() + 1, X) == ["sin", "mul_", "tanh_", "add_"]
    assert names(lambda x: x.sin_().cos(), X.clone()) == ["sin_", "cos"]
    assert names(lambda x: (x * 2).tril(-1).triu(), X) == ["mul", "tril_", "triu_"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sin(),
        lambda x: of(x * 2, lambda y: (y, y.sin())),
        lambda x: of(x * 2, lambda y: (y.sin(), y.cos())),
        lambda x: of(x * 2, lambda y: y.sin() + y.t().reshape(2, 3)),
        lambda x: of(x * 2, lambda y: of(y[1:], lambda v: (y.sin(), v.cos()))),
        lambda x: of(x * 2, lambda y: y.t().sin()),
        lambda x: (x * 2)[1:].sin(),
        lambda x: (x * 2).expand(2, 2, 3).sin(),
        lambda x: (x.sum(0) * 2) + x,
        lambda x: (x * 2) + x.double(),
        lambda x: of(x * 2, lambda y: y * y),
        lambda x: of(x * 2, lambda y: y + y.t().reshape(3, 2).t()),
        lambda x: of(x * 2, lambda y: y[:1] + y[1:]).sin(),
        lambda x: torch.ones(2, 3).sin() + x,
        lambda x: [y.sin() for y in (x * 2).unbind()],
        lambda x: [y.sin() for y in torch.aminmax(x, dim=0)],
        lambda x: torch.var_mean(x, 0)[0].sqrt(),
        lambda x: torch.addcmul(x * 2, x + 1, x - 1).sin(),
        lambda x: (x > 0).to(x.dtype).add(1),
        lambda x: (x.nan_to_num().long() + 1) / 2,
        lambda x: of(x * 2, lambda y: (y.tril(), y.tril(-1))),
        lambda x: of((x * 2).tril(), lambda y: y + y.tril(-1)),
        lambda x: (x * 2).t().triu(1),
        lambda x: (x * 2).expand(2, 2, 3).tril(),
    ],
)
def test_memory_that_somebody_reads_stays(f):
    agree(f, X)
    agree(f, torch.randn(2, 3))
    agree(vmap(f), torch.randn(4, 2, 3))


def test_a_captured_tensor_and_a_constant_stay_what_they_are():
    w = torch.ones(3)
    g = jit(lambda x: (w.sin() + torch.tensor([1.0, 2.0, 3.0]).sin() + x).sin())
    first = g(X)
    assert bits(g(X)).equal(bits(first))
    assert w.equal(torch.ones(3))


def test_a_backward_pass_can_be_made_twice():
    def f(x):
        return ((x.sin() * x).exp().tanh() + 1).sqrt()

    x = torch.rand(3, dtype=torch.float64)
    g = jit(f)
    for _ in range(2):
        leaf, its = (x.clone().requires_grad_() for _ in range(2))
        y, wanted = g(leaf), f(its)
        for scale in (1.0, 2.0):
            c = torch.full_like(x, scale)
            (found,) = torch.autograd.grad(y, leaf, c, retain_graph=True)
            torch.testing.assert_close(
                found, torch.autograd.grad(wanted, its, c, retain_graph=True)[0]
            )
            assert c.equal(torch.full_like(x, scale))


# --- what becomes a view of itself ----------------------------------------------------------------


def under_another_name(y):
    z = y * 2
    w = z.view(-1)
    return w, z.t_(), w.add_(1)


def a_part_of_it(y):
    z = y * 2
    w = z[0]
    return w, z.t_().mul_(2), w + z[:, 0]


RESEATED = {
    "squeeze": lambda y: y.unsqueeze(0).mul(2).squeeze_(),
    "squeeze of one": lambda y: y.unsqueeze(1).mul(2).squeeze_(1),
    "squeeze of some": lambda y: y[None, :, None].mul(2).squeeze_((0, 2)),
    "unsqueeze": lambda y: (y * 2).unsqueeze_(1),
    "t": lambda y: (y * 2).t_(),
    "transpose": lambda y: (y * 2).transpose_(0, 1),
    "twice": lambda y: (y * 2).t_().unsqueeze_(0).transpose_(1, 2),
    "a view of an argument": lambda y: y.unsqueeze(0).squeeze_(0),
    "written to": lambda y: (y * 2).t_().mul_(3).add_(1),
    "another name, from before": under_another_name,
    "a view, from before": a_part_of_it,
    "a product of a row": lambda y: y[0].nan_to_num() @ torch.ones(3, 4),
}


@pytest.mark.parametrize("name", RESEATED)
def test_what_becomes_a_view_of_itself_is_recorded(name):
    agree(RESEATED[name], X)
    assert names(RESEATED[name], X)


@pytest.mark.parametrize("f", [lambda x: x.t_() + 1, lambda x: x.unsqueeze_(0) * 2])
def test_an_argument_that_becomes_one_is_not(f):
    why = record(f, *pytree.flatten(((X.clone(),), {}))).why
    assert "changes what a tensor is" in str(why)


def test_a_captured_tensor_that_becomes_one_is_not():
    w = torch.ones(2, 3)

    def f(x):
        return x @ w.t_()

    why = record(f, *pytree.flatten(((X,), {}))).why
    assert "changes what a tensor is" in str(why)
    assert w.shape == (3, 2)


@pytest.mark.parametrize("product", [lambda w, x: x @ w, lambda w, x: w.t() @ x])
def test_the_derivative_of_a_vector_times_a_matrix(product):
    w, x = torch.randn(3, 4), torch.randn(3, requires_grad=True)
    f = jit(lambda x: product(w, x).sin())
    (wanted,) = torch.autograd.grad(product(w, x).sin().sum(), x)
    for _ in range(3):
        (found,) = torch.autograd.grad(f(x).sum(), x)
        assert found.equal(wanted)
    assert f.cache_info().misses == 1
    g = jit(grad(lambda x: product(w, x).sin().sum()))
    assert g(x.detach()).equal(wanted)
    assert g(x.detach()).equal(wanted)
    assert g.cache_info().misses == 1
