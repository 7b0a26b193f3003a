"""Programs that count the messages between ranks. The first argument is a mesh of one dim."""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from forall import (
    all_gather,
    all_to_all,
    grad,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    vmap,
)
from forall._core import communication_log
from forall._mesh import rank_group
from mesh.rank_programs import settings, take_share


def make_tree(x):
    """Return a tree of several dtypes and shapes, from an x of shape (3,)."""
    return {
        "row": x,
        "table": (x[:, None] * x).T,
        "number": 2,
        "scalar": x.sum(),
        "single": [x.float().cos(), x.float()[:2, None]],
        "count": x > 0,
        "whole": (x * 3).long(),
        "shared": torch.ones(2, dtype=torch.float64),
        "none": x[:0],
    }


def _floats(x):
    return {k: t for k, t in make_tree(x).items() if k not in ("number", "count", "whole")}


def _stack(x):
    """Return a tree of which each tensor has an entry for each of 5 examples, in dim 0."""
    return tree_map(lambda t: torch.stack([t * k for k in range(5)]), _floats(x))


RING = [(i, (i + 1) % 5) for i in range(5)]
TREES = {
    "psum": lambda x: psum(make_tree(x), "b"),
    "pmean": lambda x: pmean(make_tree(x), "b"),
    "pmax": lambda x: pmax(make_tree(x), "b"),
    "all_gather": lambda x: all_gather(make_tree(x), "b"),
    "all_gather last": lambda x: all_gather(_floats(x), "b", dim=-1),
    "all_gather tiled": lambda x: all_gather(
        {"row": x, "table": x[:, None] * x}, "b", dim=-1, tiled=True
    ),
    "psum_scatter": lambda x: psum_scatter(_stack(x), "b"),
    "all_to_all": lambda x: all_to_all(_stack(x), "b", 0, -1),
    "ppermute": lambda x: ppermute(make_tree(x), "b", RING),
}


def weigh_tree(tree):
    leaves = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return sum(((k + 1) * t.double().sin()).sum() for k, t in enumerate(leaves))


def reduce_trees(mesh, xs, sizes):
    """Return what each program gives, its gradient, and how many messages each of them took."""
    share = take_share(xs, sizes, mesh.get_local_rank())
    group = rank_group.get_rank_group(mesh)
    found = {}
    for name, f in TREES.items():
        forms = {"value": f, "grad": grad(lambda x, f=f: weigh_tree(f(x)))}
        for form, g in forms.items():
            outcome = vmap(g, axis_name="b", mesh=mesh)(share)
            found[name, form] = outcome, group.position - 2  # without the start and the end
    return found


def count_kept_messages(mesh):
    """Return how many messages are kept by calls that can be undone, and by calls that cannot."""
    xs = torch.arange(3.0)
    log = []

    def f(x):
        y = psum(x, "b")
        found = communication_log.get_log()
        log.append(0 if found is None else len(found.entries))
        return x * y

    vmap(f, axis_name="b", mesh=mesh)(xs)  # in which the first rank call keeps them in any case
    log.clear()
    around = vmap(lambda s: s * vmap(f, axis_name="b", mesh=mesh, divergence="error")(xs)[0])
    with settings(replay=False):
        for options in {}, {"divergence": "error"}, {}:
            vmap(f, axis_name="b", mesh=mesh, **options)(xs)
        around(torch.ones(2))
    return log
