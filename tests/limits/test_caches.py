"""What the first call leaves in a cache serves each later one as what a plain call had left there.

Rotary tables, a mask per length, `functools.lru_cache`, buffers that are made when first asked for:
a model fills them by what does not depend on its argument, so each call may use them.
"""

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from oracle import difference, loop

D = torch.float64
Cached = Callable[[], torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=make_generator(sum(shape)))


W = nn.Parameter(numbers(3, 3))
XS, X, T = numbers(4, 3), numbers(3), numbers(1, 3)[0]


# --- how a cache is made, how it is used, and in which call ------------------------------------


def in_place() -> torch.Tensor:
    table = torch.zeros(3, 3, dtype=D)
    table[0] = 2
    return table.add_(W)


MADE: dict[str, Cached] = {
    "an operator": lambda: W.exp(),
    "a view": lambda: W.T,
    "a view of an operator": lambda: W.exp()[None].expand(2, 3, 3)[1],
    "an operator on a view": lambda: W[0].outer(W[:, 1]),
    "a constant": lambda: torch.arange(9, dtype=D).reshape(3, 3).cos(),
    "a stack of constants": lambda: torch.stack(
        [torch.arange(3, dtype=D).sin(), torch.ones(3, dtype=D), torch.arange(3, dtype=D).cos()]
    ),
    "a leaf": lambda: torch.ones(3, 3, dtype=D).triu().requires_grad_(),
    "a parameter": lambda: nn.Parameter(torch.eye(3, dtype=D) + 1),
    "of a parameter": lambda: nn.Parameter(torch.eye(3, dtype=D) + 1).sin(),
    "in place": in_place,
    "a mask": lambda: torch.ones(3, 3).triu() > 0,
    "detached": lambda: W.exp().detach(),
    "solved": lambda: torch.linalg.solve(W, torch.eye(3, dtype=D)),
}

USED: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda c, x: c * x,
    lambda c, x: x.sin() * (c.to(D) @ x),
    lambda c, x: c[0] * x * x,
    lambda c, x: (c.T.to(D) @ x).sin(),
    lambda c, x: c.mT * x,
    lambda c, x: c.unsqueeze(0) * x.exp(),
    lambda c, x: c.expand(2, 3, 3) * x,
    lambda c, x: torch.cat([c.reshape(-1).to(D), x]) ** 2,
    lambda c, x: torch.where(c > 0, x, x * x),
    lambda c, x: F.linear(x.cos(), c.to(D)),
    lambda c, x: torch.einsum("ij,j->i", c.to(D), x).tanh(),
]


def transposed(f: Callable) -> torch.Tensor:
    y, pull = vjp(f, X)
    return pull(torch.ones_like(y))[0]


def plainly(f: Callable) -> torch.Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


CALLS: dict[str, Callable[[Callable], Any]] = {
    "vmap": lambda f: vmap(f)(XS),
    "grad": lambda f: grad(f)(X),
    "vmap of grad": lambda f: vmap(grad(f))(XS),
    "jacrev": lambda f: jacrev(f)(X),
    "jacfwd": lambda f: jacfwd(f)(X),
    "hessian": lambda f: hessian(f)(X),
    "jvp": lambda f: jvp(f, (X,), (T,)),
    "linearize": lambda f: linearize(f, X)[1](T),
    "vjp": transposed,
    "vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (T,))[1])(XS),
    "vmap of hessian": lambda f: vmap(hessian(f))(XS),
    "jvp of grad": lambda f: jvp(grad(f), (X,), (T,))[1],
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (T,))[1])(X),
    "no transform": lambda f: f(X),
    "a derivative of torch's": plainly,
}


# The other calls enter no level to run the function.
FIRST = ["vmap", "vmap of grad", "jacfwd", "hessian", "jvp", "linearize", "vmap of jvp"]


def model(made: Cached, used: list) -> Callable[[torch.Tensor], torch.Tensor]:
    cache = functools.lru_cache(made)
    return lambda x: sum((use(cache(), x).sum() for use in used), torch.zeros((), dtype=D))


def found(call: Callable[[Callable], Any], f: Callable) -> list[Any]:
    """What a call gives, and its derivative in what the cache was made of."""
    out = call(f)
    results = list(out) if isinstance(out, tuple) else [out]
    total = sum((r.sum() for r in results if r.requires_grad), torch.zeros((), dtype=D))
    if total.requires_grad:
        results += torch.autograd.grad(total, [W], allow_unused=True)
    return [r if r is None else r.detach() for r in results]


def truths(made: Cached, used: list) -> dict[str, list[Any]]:
    out = {}
    for then, call in CALLS.items():
        filled = model(made, used)
        filled(X)
        out[then] = found(call, filled)
    return out


def wrong(made: Cached, used: list, first: str, truth: dict[str, list[Any]]) -> Iterator[str]:
    for then, call in CALLS.items():
        mine = model(made, used)
        CALLS[first](mine)
        try:
            off = difference(found(call, mine), truth[then])
        except Exception as error:
            off = f"{type(error).__name__}: {error}".splitlines()[0]
        if off is not None:
            yield f"{first}, then {then}: {off}"


@pytest.mark.sweep(4)
@pytest.mark.parametrize("made", MADE)
def test_each_call_can_use_what_another_has_cached(made):
    truth = truths(MADE[made], USED)
    assert difference(truth["linearize"][0], truth["grad"][0] @ T) is None
    off = [w for first in FIRST for w in wrong(MADE[made], USED, first, truth)]
    assert not off, "\n".join(off)


@pytest.mark.parametrize("made", ["an operator", "a constant"])
@pytest.mark.parametrize("used", range(len(USED)))
def test_one_use_alone(used, made):
    truth = truths(MADE[made], [USED[used]])
    off = [w for first in ("vmap", "jvp") for w in wrong(MADE[made], [USED[used]], first, truth)]
    assert not off, "\n".join(off)


# --- what is no operator ------------------------------------------------------------------------


def cached(first: str, made: Cached) -> torch.Tensor:
    """The very tensor that a first call has left."""
    box = []

    def f(x):
        if not box:
            box.append(made())
        return (box[0] * x).sum()

    CALLS[first](f)
    return box[0]


class Scaled(torch.autograd.Function):
    """Its derivative in c is not that of its formula, so it is seen whether its own is taken."""

    @staticmethod
    def forward(ctx, c, x):
        ctx.save_for_backward(c, x)
        return c * x

    @staticmethod
    def backward(ctx, g):
        c, x = ctx.saved_tensors
        return 7 * g * x, (g * c).sum(0)


def in_w(out: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out.sum(), W, retain_graph=True)[0]


def checkpointed(c: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: checkpoint(lambda x: (c * x).sin().sum(), x, use_reentrant=False)


def saved_and_loaded(c: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(c.detach(), file)
    file.seek(0)
    return torch.load(file)


OTHERWISE: dict[str, Callable[[torch.Tensor], Any]] = {
    "an argument of grad": lambda c: grad(lambda c: c.sin().sum())(c),
    "an argument of vjp": lambda c: vjp(torch.sin, c)[1](c),
    "an argument of jacrev": lambda c: jacrev(lambda c: c.sin().sum(0))(c),
    "an argument of jacfwd": lambda c: jacfwd(lambda c: c.sin().sum(0))(c),
    "an argument of hessian": lambda c: hessian(lambda c: c.sin().sum())(c),
    "an argument of jvp": lambda c: jvp(torch.sin, (c,), (c,)),
    "an argument of linearize": lambda c: linearize(torch.sin, c)[1](c),
    "an argument of vmap": lambda c: in_w(vmap(torch.sin)(c)),
    "a result": lambda c: (*jvp(lambda x: c, (X,), (T,)), vmap(lambda x: c)(XS)),
    "a Function": lambda c: in_w(Scaled.apply(c, X)),
    "a Function in vmap": lambda c: in_w(vmap(lambda x: Scaled.apply(c, x))(XS)),
    "a Function in jvp": lambda c: jvp(lambda x: Scaled.apply(c, x), (X,), (T,)),
    "a checkpoint": lambda c: (grad(checkpointed(c))(X), vmap(grad(checkpointed(c)))(XS)),
    "a checkpoint of torch's": lambda c: in_w(checkpointed(c)(X.clone().requires_grad_())),
    "its numbers": lambda c: (torch.tensor(c.tolist()), torch.as_tensor(c.detach().numpy())),
    "its memory": lambda c: torch.tensor(c.detach().data_ptr() % 4),
    "a file": saved_and_loaded,
    "a second derivative": lambda c: in_w(
        torch.autograd.grad((c * X).sin().sum(), W, create_graph=True)[0] ** 2
    ),
    "torch.func": lambda c: torch.func.vmap(torch.func.grad(lambda x: (c * x).sin().sum()))(XS),
    "questions": lambda c: torch.tensor([c.requires_grad, c.is_leaf, type(c + 1) is torch.Tensor]),
}


@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_what_is_no_operator_takes_it_as_well(otherwise):
    use = OTHERWISE[otherwise]
    truth = use(cached("no transform", W.exp))
    for first in (*FIRST, "grad of jvp"):
        assert difference(use(cached(first, W.exp)), truth) is None, first


def test_no_mode_that_cuts_history_cuts_it_for_later():
    for cuts in (torch.no_grad, torch.inference_mode):
        for first in FIRST:
            c = cached(first, W.exp)
            with cuts():
                c.mul(1)
            assert difference(in_w(c * X), in_w(W.exp() * X)) is None


def test_what_is_written_into_it_stays():
    def f(c):
        c.add_(1)
        c[0] = 5
        c *= 2
        return c * 1

    for first in FIRST:
        c = cached(first, lambda: torch.arange(3, dtype=D).cos())
        assert difference(f(c), f(torch.arange(3, dtype=D).cos())) is None
        assert difference(c * 1, torch.tensor([10, *(2 * T.new_tensor([1, 2]).cos() + 2)])) is None


# --- a variable that was made in the call ---------------------------------------------------------


@pytest.mark.parametrize("first", ["vmap", "jvp", "jacfwd", "vmap of grad"])
def test_it_can_be_trained(first):
    def trained(first):
        p = cached(first, lambda: nn.Parameter(torch.ones(3, dtype=D)))
        steps = torch.optim.Adam([p], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            vmap(lambda x: (p * x).sin().sum())(XS).sum().backward()
            steps.step()
        return p.detach() * 1

    assert difference(trained(first), trained("no transform")) is None


@pytest.mark.parametrize("asked", ["after", "before", "both"])
def test_it_has_the_gradients_of_what_the_call_made_of_it(asked):
    def gradient(mapped):
        box = []

        def f(x):
            if not box:
                box.append(nn.Parameter(torch.arange(3, dtype=D)))
            return (box[0] * x).sin().sum()

        out = mapped(f)(XS)
        if asked != "after":
            assert box[0].grad is None
        out.sum().backward()
        if asked == "both":
            f(X).backward()
        return box[0].grad

    assert difference(gradient(vmap), gradient(loop)) is None
