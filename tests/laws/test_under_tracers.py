"""What torch's tracers record of a transformed call is the call: for other inputs too."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import forall
from oracle import same

D = torch.float64
WEIGHT = torch.tensor([1.3, 0.4, -0.6], dtype=D)
ROWS = torch.tensor([[0.3, -0.7, 1.1], [0.6, -1.4, 2.2]], dtype=D)
INTO = torch.tensor([1, 1])
torch.manual_seed(0)
NET = torch.nn.Sequential(
    torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
).to(D)
PARAMETERS = {name: p.detach() for name, p in NET.named_parameters()}
CONV = torch.nn.Conv1d(1, 2, 2, dtype=D)


def wave(x: Tensor) -> Tensor:
    return WEIGHT * x.sin() * x.sin()


def summed(x: Tensor) -> Tensor:
    return wave(x).sum()


def loss(p: dict, x: Tensor) -> Tensor:
    return torch.func.functional_call(NET, p, (x,)).square().sum()


def energy(x: Tensor) -> Tensor:
    return NET(x).sum()


PROGRAMS = {
    "grad": forall.grad(summed),
    "grad_and_value": forall.grad_and_value(summed),
    "grad∘grad": forall.grad(lambda x: forall.grad(summed)(x).sin().sum()),
    "jacrev": forall.jacrev(lambda x: wave(x).sum(0)),
    "jacrev∘jacrev": forall.jacrev(forall.jacrev(summed)),
    "jacfwd": forall.jacfwd(wave),
    "jacfwd∘jacfwd": forall.jacfwd(forall.jacfwd(summed)),
    "hessian": forall.hessian(summed),
    "vmap∘hessian": forall.vmap(forall.hessian(summed)),
    "vmap∘jacrev": forall.vmap(forall.jacrev(wave)),
    "jacrev∘vmap": forall.jacrev(forall.vmap(wave)),
    "vjp": lambda x: forall.vjp(wave, x)[1](x)[0],
    "vmap of a pull-back": lambda x: forall.vmap(forall.vjp(wave, x)[1])(torch.stack([x, x])),
    "vjp∘vmap": lambda x: forall.vjp(forall.vmap(wave), x)[1](x.cos())[0],
    "vmap∘vjp": forall.vmap(lambda x: forall.vjp(wave, x)[1](x)[0]),
    "jvp": lambda x: forall.jvp(wave, (x,), (x.sin(),)),
    "jvp with numbers": lambda x: forall.jvp(lambda x: (x + 1) * 2 - x, (x,), (x,)),
    "vmap∘jvp with numbers": forall.vmap(
        lambda x: forall.jvp(lambda x: (x + 1) * 2 - x, (x,), (x,))
    ),
    "jvp∘grad": lambda x: forall.jvp(forall.grad(summed), (x,), (x.sin(),)),
    "vmap∘jvp": forall.vmap(lambda x: forall.jvp(wave, (x,), (x.sin(),))),
    "linearize": lambda x: forall.linearize(wave, x)[1](x.exp()),
    "vmap of a push": lambda x: forall.vmap(forall.linearize(NET, x)[1])(torch.stack([x, x.sin()])),
    "shared inside vmap": lambda x: forall.vmap(lambda row: (x * row).sum(0))(x),
    "written inside": forall.grad(lambda x: x.clone().mul_(x).index_add_(0, INTO, x).sum()),
    "written inside vmap": forall.vmap(lambda x: x.clone().index_fill_(0, INTO, 1.0).mul_(x)),
    "autograd inside": forall.vmap(
        lambda x: torch.autograd.grad(summed(y := x.detach().requires_grad_()), y)[0]
    ),
    "autograd outside": lambda x: torch.autograd.grad(
        forall.vmap(energy)(y := x.clone().requires_grad_()).sum(), y
    )[0],
    "gradients of each example": lambda x: forall.vmap(forall.grad(loss), (None, 0))(PARAMETERS, x),
    "gradient of a mapped mean": lambda x: forall.grad(
        lambda p: forall.vmap(lambda row: loss(p, row))(x).mean()
    )(PARAMETERS),
    "norms of each example": lambda x: forall.per_example_grad_norm(loss)(PARAMETERS, x),
    "forces": forall.vmap(forall.grad(energy)),
    "laplacian": forall.vmap(forall.laplacian(energy)),
    "in chunks": forall.vmap(forall.grad(energy), chunk_size=1),
    "convolution": forall.vmap(forall.grad(lambda x: CONV(x[None]).square().sum())),
    "batch_norm": forall.jacrev(
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True)
    ),
    "scan": lambda x: forall.scan(lambda c, row: (c + row.sin(), c * row), x[0], x),
    "where": forall.vmap(lambda x: torch.where(x > 0, x, x.sin())),
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_make_fx(name: str, mode: str):
    f = PROGRAMS[name]
    traced = make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(ROWS)
    other = ROWS.cos()
    for actual, expected in zip(tree_leaves(traced(other)), tree_leaves(f(other)), strict=True):
        assert same(actual, expected)


OPEN = ("vmap∘hessian", "vmap∘jvp", "gradients of each example")


@pytest.mark.parametrize("name", OPEN)
def test_make_fx_leaves_the_number_of_examples_open(name: str):
    f = PROGRAMS[name]
    traced = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(ROWS)
    more = torch.cat([ROWS.cos(), ROWS, ROWS.sin()])
    for actual, expected in zip(tree_leaves(traced(more)), tree_leaves(f(more)), strict=True):
        assert same(actual, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_fake_tensors(name: str):
    """They have no numbers: shapes and dtypes alone are found."""
    f = PROGRAMS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        found = tree_leaves(f(fake.from_tensor(ROWS)))
    for actual, expected in zip(found, tree_leaves(f(ROWS)), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


def branch(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 0 else x.cos()


def loop(x: Tensor) -> Tensor:
    while x.sum() < 3:
        x = x + 0.5
    return x


ASKING = {
    "if": branch,
    "while": loop,
    "item": lambda x: x * x.sum().item(),
    "cond": lambda x: forall.cond(x.sum() > 0, torch.sin, torch.cos, x),
    "nonzero": lambda x: x[x > 0].sum(),
    "tolist": lambda x: x * x.tolist()[0],
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ASKING)
def test_a_trace_has_no_answer_to_a_question(name: str, mode: str):
    """As where torch traces the loop: the answer of now would be that of all inputs."""
    with pytest.raises(RuntimeError, match="asks for an example's numbers"):
        make_fx(forall.vmap(ASKING[name]), tracing_mode=mode)(ROWS)
    assert same(forall.vmap(ASKING[name])(ROWS), torch.stack([ASKING[name](row) for row in ROWS]))
