"""Function modes of nested levels: each call is seen once, and captured tensors are shared."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from draws import make_generator
from forall import grad, jacfwd, vmap

D = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=make_generator(seed))


class Seen(TorchFunctionMode):
    def __init__(self):
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def see(f, mode):
    def seen(*args):
        with mode:
            return f(*args)

    return seen


@pytest.mark.parametrize("place", ["outside", "between", "inside"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_mode_of_the_users_sees_each_call_once(place, recorded):
    w = draw(4, seed=1).requires_grad_(recorded)

    def f(x):
        assert x.shape == (4,)
        return torch.nn.functional.softplus(x.mul(w).sin())

    mode, xs = Seen(), draw(2, 3, 4)
    inner = vmap(see(f, mode) if place == "inside" else f)
    outer = vmap(see(inner, mode) if place == "between" else inner)
    found = (see(outer, mode) if place == "outside" else outer)(xs)
    torch.testing.assert_close(found, torch.stack([torch.stack([f(x) for x in r]) for r in xs]))
    assert [mode.names.count(name) for name in ("mul", "sin", "softplus")] == [1, 1, 1]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_ctx, g):
        return 2 * g


WAYS = {
    "operator": lambda x, w: x * w,
    "composite": lambda x, w: torch.nn.functional.cosine_similarity(x, w, dim=0),
    "checkpoint": lambda x, w: checkpoint(lambda x: (x * w).sin(), x, use_reentrant=False),
    "function": lambda x, w: Double.apply(x * w),
    "gradient": lambda x, w: torch.autograd.grad((x * w).sin().sum(), w, create_graph=True)[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_captured_weight_has_the_gradient_of_the_loop(way, depth):
    w = draw(4, seed=1).requires_grad_()
    xs = draw(2, 2, 2, 4)[(0,) * (3 - depth)].requires_grad_()

    def f(x):
        return WAYS[way](x, w)

    mapped = f
    for _ in range(depth):
        mapped = vmap(mapped)
    loop = torch.stack([f(x) for x in xs.reshape(-1, 4)])
    found = mapped(xs).reshape(loop.shape)
    torch.testing.assert_close(found, loop)
    for wanted, got in zip(
        torch.autograd.grad(loop.sin().sum(), (xs, w)),
        torch.autograd.grad(found.sin().sum(), (xs, w)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_value_shows_is_the_examples(depth):
    shown = []

    def f(x):
        shown.append((x.shape, x.dtype, x.device, x.ndim, x.dim(), x.size(), x.size(0), x.size(-1)))
        return x.sum()

    xs = draw(2, 3, 4)[0 if depth == 1 else slice(None)]
    mapped = vmap(vmap(f)) if depth == 2 else vmap(f)
    mapped(xs)
    grad(lambda x: mapped(x).sum())(xs)
    jacfwd(mapped)(xs)
    size = torch.Size([4])
    assert set(shown) == {(size, D, xs.device, 1, 1, size, 4, 4)}


def test_a_kept_value_shows_what_it_did():
    kept = []

    def f(x):
        kept.append(x * 2)
        kept.append(torch.ones(3) * 2)
        return x

    vmap(f)(draw(2, 4))
    assert [(k.shape, k.dtype) for k in kept] == [((4,), D), ((3,), torch.float32)]
    vmap(lambda x: [None for k in kept if k.shape != x.shape and k.dim() != 1] or x)(draw(2, 4))
