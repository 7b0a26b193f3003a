"""Functions that the ranks of a pool call, by name. The first argument is a mesh of one dim."""

import traceback

import torch
from torch.utils._pytree import tree_map

from forall import grad, jit, jvp, linearize, vjp, vmap
from mesh.programs import EXAMPLES, PROGRAMS
from mesh.test_laws_of_named_axes import INSIDE, named, weights

ALL = (len(EXAMPLES),)


def take_share(x, sizes, rank):
    start = sum(sizes[:rank])
    return x[start : start + sizes[rank]]


def weigh(f, share):
    """Return the sum of all results of ``f``, with a weight for each entry on each rank."""

    def loss(x):
        y = f(x)
        return (y * share(weights(torch.empty(*ALL, *y.shape[1:], dtype=y.dtype)))).sum()

    return loss


def push(f, x, share):
    return jvp(f, (x,), (share(EXAMPLES.cos()),))


def pull_by_backward(f, x, share):
    x = x.clone().requires_grad_()
    weigh(f, share)(x).backward()
    return x.grad


# Outcomes on one rank's examples that are a part of those on all examples.
OUTSIDE = {
    "value": lambda f, x, share: f(x),
    "grad": lambda f, x, share: grad(weigh(f, share))(x),
    "vjp": lambda f, x, share: vjp(weigh(f, share), x)[1](torch.tensor(2.0).double()),
    "jvp": push,
    "linearize": lambda f, x, share: linearize(f, x)[1](share(EXAMPLES.sin())),
    "grad of jvp": lambda f, x, share: grad(
        lambda x: weigh(lambda x: push(f, x, share)[1], share)(x)
    )(x),
    "backward": pull_by_backward,
    "vmap further out": lambda f, x, share: vmap(f, 1, 1)(torch.stack([x, 2 * x, x.cos()], 1)),
    "jit": lambda f, x, share: [jit(f)(x) for _ in range(3)][-1],
}


def list_cases():
    cases = [(name, "outside", transform) for name in PROGRAMS for transform in OUTSIDE]
    return cases + [(name, "inside", transform) for name in PROGRAMS for transform in INSIDE]


def run_case(case, sizes=ALL, rank=0, **options):
    """Return what one of the cases gives on a rank's examples."""
    name, place, transform = case
    f, x = named(PROGRAMS[name]), take_share(EXAMPLES, sizes, rank)
    if place == "inside":
        return vmap(INSIDE[transform][0](f), axis_name="i", **options)(x)
    f = vmap(f, axis_name="i", **options)
    return OUTSIDE[transform](f, x, lambda whole: take_share(whole, sizes, rank))


def run_cases(mesh, cases, sizes):
    """Return the outcome of each case on this rank's examples, or the text of its error."""
    rank = mesh.get_local_rank()
    found = {}
    for case in cases:
        try:
            found[case] = tree_map(torch.Tensor.detach, run_case(case, sizes, rank, mesh=mesh))
        except Exception:
            found[case] = traceback.format_exc()
    return found
