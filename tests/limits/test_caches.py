"""What the first call leaves in a cache serves each later one as what a plain call had left there.

Rotary tables, a mask per length, `functools.lru_cache`, buffers that are made when first asked for:
a model fills them by what does not depend on its argument, so each call may use them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from oracle import difference

D = torch.float64
Cached = Callable[[], torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape)))


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


@pytest.mark.parametrize("made", MADE)
def test_each_call_can_use_what_another_has_cached(made):
    truth = truths(MADE[made], USED)
    off = [w for first in FIRST for w in wrong(MADE[made], USED, first, truth)]
    assert not off, "\n".join(off)


@pytest.mark.parametrize("made", ["an operator", "a constant"])
@pytest.mark.parametrize("used", range(len(USED)))
def test_one_use_alone(used, made):
    truth = truths(MADE[made], [USED[used]])
    off = [w for first in ("vmap", "jvp") for w in wrong(MADE[made], [USED[used]], first, truth)]
    assert not off, "\n".join(off)
