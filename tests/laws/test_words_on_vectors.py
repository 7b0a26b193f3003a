"""Words over seven transforms on functions of vectors, where each Jacobian adds axes.

The same word spelled with a loop and `torch.autograd.functional.jacobian` is the truth, for values
and for derivatives taken outside. Words with torch.func's transforms among ours count as well.
"""

import itertools
import random

import pytest
import torch
import torch.func

import forall
from draws import make_generator
from oracle import difference

D = torch.float64


def coupled(x):
    """(n, ...) -> (n, ...); no derivative of it is diagonal or symmetric."""
    return (x * x * x.flip(0)).cumsum(0).sin()


def verbs(library):
    def both(f):
        return lambda x: sum(library.jvp(f, (x,), (torch.ones_like(x),)))

    def pulled(f):
        def gradient(x):
            y, pull = library.vjp(f, x)
            return pull(torch.ones_like(y))[0]

        return gradient

    return {
        "vmap": library.vmap,
        "grad": lambda f: library.grad(lambda x: f(x).sum()),
        "vjp": pulled,
        "jvp": both,
        "jacrev": library.jacrev,
        "jacfwd": library.jacfwd,
        "hessian": library.hessian,
    }


def jacobian(f):
    return lambda x: torch.autograd.functional.jacobian(f, x, create_graph=True)


def gradient(f):
    return jacobian(lambda x: f(x).sum())


TRUTH = {
    "vmap": lambda f: lambda xs: torch.stack([f(x) for x in xs]),
    "grad": gradient,
    "vjp": gradient,
    "jvp": lambda f: lambda x: f(x) + jacobian(f)(x).flatten(-x.dim()).sum(-1),
    "jacrev": jacobian,
    "jacfwd": jacobian,
    "hessian": lambda f: jacobian(jacobian(f)),
}
OURS = verbs(forall)
MIXED = {**OURS, **{f"torch {name}": verb for name, verb in verbs(torch.func).items()}}


def words(names, length, count):
    """A sample of the words whose truth is quick: of third order, and with at most 64 rows."""

    def order(word):
        weights = {"vmap": 0, "hessian": 2}
        return sum(weights.get(name.removeprefix("torch "), 1) for name in word)

    def depth(word):
        return sum(name.endswith("vmap") for name in word)

    def rows(word):
        return 2 ** ((depth(word) + 1) * order(word))

    fit = [w for w in itertools.product(names, repeat=length) if order(w) <= 3 and rows(w) <= 64]
    return random.Random(length).sample(fit, count)


# Each of these was once an error or, the last two, a wrong number.
HARD = [
    ("hessian", "jacfwd", "vmap"),
    ("vmap", "hessian", "jacfwd"),
    ("vmap", "torch hessian", "jacfwd"),
    ("vmap", "torch hessian", "torch jacfwd"),
    ("jacfwd", "grad", "jacrev", "vmap"),
    ("jacfwd", "vjp", "jacrev", "jacfwd"),
]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "word",
    [*HARD, *words(OURS, 3, 40), *words(OURS, 4, 40), *words(MIXED, 3, 40)],
    ids=" of ".join,
)
def test_a_word_is_the_loop_of_jacobians(word, needs_grad):
    depth = sum(name.endswith("vmap") for name in word)
    generator = make_generator(len(word))
    results = []
    for spelling in (MIXED, TRUTH):
        f = coupled
        for name in reversed(word):
            f = spelling[name.removeprefix("torch ") if spelling is TRUTH else name](f)
        generator.manual_seed(len(word))
        x = torch.randn((2,) * (depth + 1), dtype=D, generator=generator)
        y = f(x.requires_grad_(needs_grad))
        assert spelling is TRUTH or y.requires_grad == needs_grad
        results.append([y, *torch.autograd.grad(y.sum(), x)] if needs_grad else [y])
    assert difference(*results) is None
