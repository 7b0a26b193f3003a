"""What a mapped function captures, or has from further out, may be its result as it is.

Values, gradients and their class are the loop's: each example answers with the same tensor, so its
gradient is the sum over the examples.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import forall
from draws import make_generator
from forall import cond, grad, hessian, jacfwd, jacrev, jit, jvp, linearize, scan, vmap
from oracle import difference, loop

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=make_generator(seed))


X = numbers(4, 3)
Z = numbers(4, 2, 3, seed=1)


def of_what_it_is_given(run: Callable, w: torch.Tensor) -> Any:
    return run(lambda _: w)(X)


# Functions of w, which they capture, under ``run``: vmap, or the loop.
BODIES: dict[str, Callable[[Callable, torch.Tensor], Any]] = {
    "as it is": lambda run, w: run(lambda _: w)(X),
    "along the last dim": lambda run, w: run(lambda _: w, out_dims=-1)(X),
    "in a tree": lambda run, w: run(lambda x: {"w": w, "more": (x * w, [w, w])})(X),
    "a view": lambda run, w: run(lambda _: w[1:])(X),
    "made of it outside": lambda run, w: of_what_it_is_given(run, w.exp()),
    "an argument that all share": lambda run, w: run(lambda _, v: v, in_dims=(0, None))(X, w),
    "of an inner call": lambda run, w: run(lambda z: run(lambda _: w)(z))(Z),
    "of an inner call, which computes": lambda run, w: run(lambda z: run(lambda _: w)(z) * z)(Z),
    "the outer example": lambda run, w: run(lambda v: run(lambda _: v)(X))(torch.stack([w, w * w])),
    "beside the outer example": lambda run, w: run(lambda v: run(lambda _: (v, w))(X))(
        torch.stack([w, w * w])
    ),
    "beside the example": lambda run, w: run(lambda x: (w, x, x * w))(X),
    "where examples diverge": lambda run, w: run(lambda x: w if x[0] > 0 else w * 2)(X),
    "where all are one way": lambda run, w: run(lambda x: w if x.sum() < 100 else w * 2)(X),
}


def total(tree: Any) -> torch.Tensor:
    """A sum in which each number has another weight."""
    parts = []
    for i, t in enumerate(tree_leaves(tree)):
        parts.append((t * torch.linspace(1, 2 + i, t.numel(), dtype=D).view(t.shape)).square())
    return torch.stack([p.sum() for p in parts]).sum()


def by_torch(f: Callable) -> Callable:
    def gradient(w: torch.Tensor) -> torch.Tensor:
        w = w.view_as(w) if w.requires_grad else w.detach().requires_grad_()
        return torch.autograd.grad(f(w), w, create_graph=True)[0]

    return gradient


@pytest.mark.parametrize("replay", [False, True], ids=["", "replayed"])
@pytest.mark.parametrize("name", BODIES)
def test_values_and_gradients_outside_are_the_loops(name, replay):
    forall.config.replay = replay
    body = BODIES[name]
    true = numbers(3, seed=2).requires_grad_()
    total(body(loop, true)).backward()
    for _ in range(4 if replay else 1):
        w = numbers(3, seed=2).requires_grad_()
        seen = []
        w.register_hook(lambda g, seen=seen: seen.append(type(g)))
        found = body(vmap, w)
        assert difference(found, body(loop, w)) is None
        assert all(type(t) is torch.Tensor for t in tree_leaves(found))
        total(found).backward()
        assert difference(w.grad, true.grad) is None
        assert type(w.grad) is torch.Tensor
        assert seen == [torch.Tensor]


@pytest.mark.parametrize("name", BODIES)
def test_derivatives_of_all_kinds_are_the_loops(name):
    w, t = numbers(3, seed=2), numbers(3, seed=3)

    def ours(w: torch.Tensor) -> torch.Tensor:
        return total(BODIES[name](vmap, w))

    def true(w: torch.Tensor) -> torch.Tensor:
        return total(BODIES[name](loop, w))

    gradient = by_torch(true)(w)
    second = torch.stack([by_torch(lambda w, i=i: by_torch(true)(w)[i])(w) for i in range(3)])
    gradient, second = gradient.detach(), second.detach()
    for found in (grad(ours)(w), jacrev(ours)(w), jacfwd(ours)(w)):
        assert difference(found, gradient) is None
    assert difference(jvp(ours, (w,), (t,))[1], gradient @ t) is None
    assert difference(linearize(ours, w)[1](t), gradient @ t) is None
    for found in (hessian(ours)(w), jacrev(jacrev(ours))(w), jacrev(jacfwd(ours))(w)):
        assert difference(found, second) is None
    both = torch.stack([w, t])
    assert difference(vmap(grad(ours))(both), loop(grad(true))(both)) is None
    leaf = w.clone().requires_grad_()
    first = torch.autograd.grad(ours(leaf), leaf, create_graph=True)[0]
    again = torch.stack([torch.autograd.grad(g, leaf, retain_graph=True)[0] for g in first])
    assert difference(again, second) is None
    if name != "where examples diverge":  # of which nothing is recorded
        assert difference(jit(grad(ours))(w), gradient) is None


def test_the_jacobian_of_what_is_returned_as_it_is():
    w = numbers(3, seed=2)
    true = torch.eye(3, dtype=D).expand(4, 3, 3)
    for derivative in (jacrev, jacfwd):
        assert difference(derivative(lambda w: vmap(lambda _: w)(X))(w), true) is None


def test_in_chunks_each_example_counts_once():
    w = numbers(3, seed=2).requires_grad_()
    vmap(lambda _: w, chunk_size=3)(X).sum().backward()
    assert difference(w.grad, torch.full((3,), 4.0, dtype=D)) is None


def test_an_optimizer_steps_with_gradients_of_parameters_that_were_returned():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    theirs.load_state_dict(ours.state_dict())
    for run, layer in ((vmap, ours), (loop, theirs)):
        sgd = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            sgd.zero_grad()
            out = run(lambda x, layer=layer: (layer.weight, layer(x), layer.bias))(X)
            total(out).backward()
            sgd.step()
    assert difference([*ours.parameters()], [*theirs.parameters()]) is None


def test_each_example_has_the_derivative_of_its_own():
    """In the loop a leaf made inside is another one for each example."""

    def f(x: torch.Tensor, run: Callable) -> Any:
        w = x.detach().requires_grad_()
        total(run(lambda _: w)(X)).backward()
        return w.grad

    ours, true = vmap(lambda x: f(x, vmap))(X), loop(lambda x: f(x, loop))(X)
    assert difference(ours, true) is None
    found = vmap(lambda x: grad(lambda w: (vmap(lambda _: w)(X) * x).sum())(X[0]))(X)
    assert difference(found, 4 * X) is None


@pytest.mark.parametrize("requires", [False, True])
@pytest.mark.parametrize("f", [lambda w: lambda _: w, lambda w: lambda x: (w, w * x)])
def test_a_tangent_of_the_users_own_goes_with_it(f, requires):
    w, t = numbers(3, seed=2).requires_grad_(requires), numbers(3, seed=3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, t)
        for ours, true in zip(
            tree_leaves(vmap(f(dual))(X)), tree_leaves(loop(f(dual))(X)), strict=True
        ):
            mine, theirs = forward_ad.unpack_dual(ours), forward_ad.unpack_dual(true)
            assert difference(mine.primal, theirs.primal) is None
            assert difference(mine.tangent, theirs.tangent) is None
        mapped = forward_ad.make_dual(X, X)
        assert difference(forward_ad.unpack_dual(vmap(lambda x: x)(mapped)).tangent, X) is None


def test_control_flow_may_answer_with_it():
    def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return cond(x[0] > 0, lambda: w, lambda: w * 1)

    def steps(x: torch.Tensor, w: torch.Tensor) -> Any:
        return scan(lambda c, y: (c + y, w), x, X)

    for f in (branches, steps):
        pair = []
        for run in (vmap, loop):
            w = numbers(3, seed=2).requires_grad_()
            out = run(lambda x, f=f, w=w: f(x, w))(X)
            total(out).backward()
            pair.append(([t.detach() for t in tree_leaves(out)], w.grad))
        assert difference(*pair) is None
