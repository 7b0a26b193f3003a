"""Random programs of collectives and pointwise operators, in one to three axes.

Each is compared with itself written on the stack: values, and derivatives inside and outside.
"""

import os
import random

import pytest
import torch

from draws import make_generator
from forall import grad, jacfwd, jacrev, jit, jvp, vmap
from mesh.programs import Explicit, Named

COUNT = int(os.environ.get("FORALL_MESH_PROGRAMS", "300"))
PER_TEST = 10
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


def make_step(rng, names):
    """Return one step: a function of (c, values), values all of the shape of an example."""
    pick = rng.random
    a, b = pick(), pick()

    def value(values, where):
        return values[int(where * len(values))]

    name = rng.choice(names)
    kind = rng.choice(KINDS)
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
    if kind == "softmax":
        return lambda c, v: (value(v, a) / 4).exp() / c.psum((value(v, a) / 4).exp(), name)
    return lambda c, v: value(v, a) / c.axis_size(name)


def make_program(seed):
    """Return a program, and the axes that it runs in, the outermost first."""
    rng = random.Random(seed)
    names = rng.sample([*SIZES], rng.choice([1, 1, 2, 2, 3]))
    steps = [make_step(rng, names) for _ in range(rng.randint(2, 6))]

    def program(c, x):
        values = [x]
        for step in steps:
            values.append(step(c, values))
        return values[-1] + values[len(values) // 2]

    return program, names


def mapped(f, names):
    for name in reversed(names):
        f = vmap(f, axis_name=name)
    return f


def check_program(seed):
    program, names = make_program(seed)
    rng = random.Random(-seed)
    sizes = {n: SIZES[n] for n in names}
    generator = make_generator(seed)
    shape = (*sizes.values(), *SHAPE)
    xs, ts = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))

    def of_all(xs):
        return program(Explicit(**sizes), xs)

    def of_one(x):
        return program(Named, x)

    def loss(f):
        return lambda xs: (f(xs) * ts).sum()

    def own_loss(x):
        return of_one(x).sin().sum()

    def check(got, want):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)

    f = mapped(of_one, names)
    check(f(xs), of_all(xs))
    check(grad(loss(f))(xs), grad(loss(of_all))(xs))
    check(jvp(f, (xs,), (ts,)), jvp(of_all, (xs,), (ts,)))
    check(mapped(grad(own_loss), names)(xs), grad(lambda xs: of_all(xs).sin().sum())(xs))
    push = mapped(lambda x, t: jvp(of_one, (x,), (t,)), names)
    check(push(xs, ts), jvp(of_all, (xs,), (ts,)))
    way = rng.randrange(4)
    if way == 0:
        for _ in range(2):
            check(jit(grad(loss(f)))(xs), grad(loss(of_all))(xs))
    elif way == 1:
        check(
            grad(lambda xs: mapped(grad(own_loss), names)(xs).cos().sum())(xs),
            grad(lambda xs: grad(lambda xs: of_all(xs).sin().sum())(xs).cos().sum())(xs),
        )
    elif way == 2:
        check(jacrev(grad(loss(f)))(xs), jacrev(grad(loss(of_all)))(xs))
    else:
        check(jacfwd(f)(xs), jacfwd(of_all)(xs))


@pytest.mark.parametrize("first", range(0, COUNT, PER_TEST))
def test_a_random_program_is_the_program_on_the_stack(first):
    for seed in range(first, first + PER_TEST):
        try:
            check_program(seed)
        except Exception as error:
            error.add_note(f"program {seed}")
            raise
