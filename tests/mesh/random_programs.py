"""Random programs of collectives and pointwise operators, in one to three axes.

A program is a function of (c, x), as in `programs`. `run_forms` runs one in several transforms, on
all examples or on those of one rank.
"""

import os
import random
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, vmap
from mesh.programs import Named

PER_TEST = 10
_START, _COUNT = (
    int(os.environ.get(name) or usual)
    for name, usual in (("FORALL_SEED", 0), ("FORALL_PROGRAMS", 300))
)
FIRST_SEEDS = range(_START, _START + _COUNT, PER_TEST)

SIZES = {"i": 2, "j": 3, "k": 2}
SHAPE = (2, 3)  # of each value; its dims are sizes of axes, so that they can be split


_KINDS = """
    unary mul add where psum pmean pmax pmin several gather gather_tiled scatter exchange permute
    index softmax size
"""
KINDS = _KINDS.split()


def unary(rng):
    return rng.choice(["sin", "cos", "tanh", "square", "neg", "exp_small"])


def apply_unary(name, x):
    if name == "exp_small":
        return (x / 4).exp()
    return getattr(x, name)()


def make_step(rng, names, kinds, chosen):
    """Return one step: a function of (c, values), values all of the shape of an example.

    Its kind is added to ``chosen``.
    """
    pick = rng.random
    a, b = pick(), pick()

    def value(values, where):
        return values[int(where * len(values))]

    name = rng.choice(names)
    kind = rng.choice(kinds)
    chosen.append(kind)
    n = SIZES[name]
    at = SHAPE.index(n)  # the dim of an example with the size of the axis
    if kind == "unary":
        f = unary(rng)
        return lambda c, v: apply_unary(f, value(v, a))
    if kind == "mul":
        return lambda c, v: value(v, a) * value(v, b).tanh()
    if kind == "add":
        return lambda c, v: value(v, a) - 0.5 * value(v, b)
    if kind == "where":
        return lambda c, v: torch.where(value(v, a) > 0.1, value(v, b), value(v, a) * 0.3)
    if kind in ("psum", "pmean", "pmax", "pmin"):
        return lambda c, v: getattr(c, kind)(value(v, a).tanh(), name) / n
    if kind == "several":
        chosen = tuple(rng.sample(names, rng.randint(1, len(names))))
        verb = rng.choice(["psum", "pmean", "pmax", "pmin"])
        return lambda c, v: getattr(c, verb)(value(v, a).tanh(), chosen) / 3
    if kind == "gather":
        dim = rng.choice([0, 1, 2, -1])
        row = rng.randrange(n)
        return lambda c, v: (
            (
                c.all_gather(value(v, a), name, dim=dim).movedim(dim - 3 if dim >= 0 else dim, -3)
            ).select(-3, row)
            * value(v, b)
        )
    if kind == "gather_tiled":
        dim = rng.choice([-1, -2])
        return lambda c, v: (
            c.all_gather(value(v, a), name, dim=dim, tiled=True)
            .unflatten(dim, (n, -1))
            .square()
            .mean(dim - 1)
        )
    if kind == "scatter":
        return lambda c, v: (
            c.psum_scatter(value(v, a), name, at).unsqueeze(at - 2) * value(v, b) / n
        )
    if kind == "exchange":
        return lambda c, v: c.all_to_all(value(v, a), name, at - 2, at) * value(v, b)
    if kind == "permute":
        targets = rng.sample(range(n), rng.randint(0, n))
        perm = list(zip(rng.sample(range(n), len(targets)), targets, strict=True))
        return lambda c, v: c.ppermute(value(v, a), name, perm) + value(v, b)
    if kind == "index":
        return lambda c, v: value(v, a) * (c.index(name, value(v, a)) + 1) / n
    if kind == "branch":
        return lambda c, v: c.choose(value(v, a), value(v, b), value(v, a) * 0.3)
    if kind == "softmax":
        return lambda c, v: (value(v, a) / 4).exp() / c.psum((value(v, a) / 4).exp(), name)
    return lambda c, v: value(v, a) / c.axis_size(name)


class Program(NamedTuple):
    """A program, the axes that it runs in, the outermost first, and if examples may diverge."""

    run: Callable
    names: list[str]
    has_branch: bool


def make_program(seed):
    rng = random.Random(seed)
    names = rng.sample([*SIZES], rng.choice([1, 1, 2, 2, 3]))
    # Examples that part at a test in several vmaps at once run in groups, where none is complete.
    kinds = KINDS if len(names) > 1 else [*KINDS, "branch"]
    chosen = []
    steps = [make_step(rng, names, kinds, chosen) for _ in range(rng.randint(2, 6))]

    def program(c, x):
        values = [x]
        for step in steps:
            values.append(step(c, values))
        return values[-1] + values[len(values) // 2]

    return Program(program, names, "branch" in chosen)


def mapped(f, names, **meshes):
    """Return ``f`` mapped over these axes, of which some are over the ranks of a mesh."""
    for name in reversed(names):
        f = vmap(f, axis_name=name, mesh=meshes.get(name))
    return f


def make_examples(seed, names):
    """Return examples along these axes, and as many weights."""
    generator = make_generator(seed)
    shape = (*[SIZES[n] for n in names], *SHAPE)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)]


def own_loss(program):
    return lambda x: program(Named, x).sin().sum()


# --- on two ranks --------------------------------------------------------------------------------


def draw_shares(seed):
    """Return the axis whose examples two ranks have, its dim, and how many each rank has."""
    program = make_program(seed)
    rng = random.Random(seed + 0.5)
    dim = rng.randrange(len(program.names))
    name = program.names[dim]
    least = int(program.has_branch)  # a rank without examples takes no branch
    cut = rng.randint(least, SIZES[name] - least)
    return name, dim, [cut, SIZES[name] - cut]


def call_again(f, x):
    """Return the results of four calls: the first ones are recorded, and then replayed."""
    before, forall.config.patience = forall.config.patience, 0.0
    try:
        return [f(x) for _ in range(4)]
    finally:
        forall.config.patience = before


def run_forms(seed, mesh=None):
    """Return what a program and its derivatives give, on the examples of a rank if in a mesh."""
    program, names, _ = make_program(seed)
    axis, dim, shares = draw_shares(seed)
    xs, ts = make_examples(seed, names)
    if mesh is not None:
        rank = mesh.get_local_rank()
        xs, ts = (t.split(shares, dim)[rank].clone() for t in (xs, ts))

    def map_all(f):
        return mapped(f, names, **{axis: mesh})

    def of_one(x):
        return program(Named, x)

    def loss(xs):
        return (f(xs) * ts).sum()

    def pushed_loss(xs):
        return (jvp(f, (xs,), (ts,))[1] * ts).sum()

    def loss_of_gradients(xs):
        return map_all(grad(own))(xs).cos().sum()

    f, own = map_all(of_one), own_loss(program)
    forms = {
        "value": lambda: f(xs),
        "grad outside": lambda: grad(loss)(xs),
        "jvp outside": lambda: jvp(f, (xs,), (ts,)),
        "grad inside": lambda: map_all(grad(own))(xs),
        "jvp inside": lambda: map_all(lambda x, t: jvp(of_one, (x,), (t,)))(xs, ts),
    }
    gradient_outside, gradients_inside = grad(loss), map_all(grad(own))
    more = {
        "value again": lambda: call_again(f, xs),
        "grad outside again": lambda: call_again(gradient_outside, xs),
        "grad inside again": lambda: call_again(gradients_inside, xs),
        "jit of grad": lambda: call_again(jit(gradient_outside), xs),
        "jacrev inside": lambda: map_all(jacrev(of_one))(xs),
        "jacfwd inside": lambda: map_all(jacfwd(of_one))(xs),
        "hessian inside": lambda: map_all(hessian(own))(xs),
    }
    if 0 not in shares:  # else autograd leaves out operators, and with them messages
        more["grad of jvp outside"] = lambda: grad(pushed_loss)(xs)
        more["grad of grad inside"] = lambda: grad(loss_of_gradients)(xs)
    name = random.Random(-seed).choice([*more])
    return {name: form() for name, form in {**forms, name: more[name]}.items()}


def run_all(mesh, seeds):
    """Return what each program gives on this rank's examples, or the text of its error."""
    found = {}
    for seed in seeds:
        try:
            outcome = run_forms(seed, mesh)
            found[seed] = tree_map(lambda x: x.detach().clone(), outcome)  # zeros get memory
        except Exception:
            found[seed] = traceback.format_exc()
    return found
