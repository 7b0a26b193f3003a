"""Random programs of named axes are those programs written on the stack.

Values are compared, and derivatives inside and outside. `FORALL_PROGRAMS` sets how many there are,
and `FORALL_SEED` is the first.
"""

import random

import pytest
import torch

from forall import grad, jacfwd, jacrev, jit, jvp
from mesh.programs import Explicit, Named
from mesh.random_programs import (
    FIRST_SEEDS,
    PER_TEST,
    SIZES,
    make_examples,
    make_program,
    mapped,
    own_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore:jit.*not recorded")  # it has a branch


def check_program(seed):
    program, names, _ = make_program(seed)
    rng = random.Random(-seed)
    sizes = {n: SIZES[n] for n in names}
    xs, ts = make_examples(seed, names)
    own = own_loss(program)

    def of_all(xs):
        return program(Explicit(**sizes), xs)

    def of_one(x):
        return program(Named, x)

    def loss(f):
        return lambda xs: (f(xs) * ts).sum()

    def check(got, want):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)

    f = mapped(of_one, names)
    check(f(xs), of_all(xs))
    check(grad(loss(f))(xs), grad(loss(of_all))(xs))
    check(jvp(f, (xs,), (ts,)), jvp(of_all, (xs,), (ts,)))
    check(mapped(grad(own), names)(xs), grad(lambda xs: of_all(xs).sin().sum())(xs))
    push = mapped(lambda x, t: jvp(of_one, (x,), (t,)), names)
    check(push(xs, ts), jvp(of_all, (xs,), (ts,)))
    way = rng.randrange(4)
    if way == 0:
        for _ in range(2):
            check(jit(grad(loss(f)))(xs), grad(loss(of_all))(xs))
    elif way == 1:
        check(
            grad(lambda xs: mapped(grad(own), names)(xs).cos().sum())(xs),
            grad(lambda xs: grad(lambda xs: of_all(xs).sin().sum())(xs).cos().sum())(xs),
        )
    elif way == 2:
        check(jacrev(grad(loss(f)))(xs), jacrev(grad(loss(of_all)))(xs))
    else:
        check(jacfwd(f)(xs), jacfwd(of_all)(xs))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_a_random_program_is_the_program_on_the_stack(first):
    for seed in range(first, first + PER_TEST):
        try:
            check_program(seed)
        except Exception as error:
            error.add_note(f"program {seed}")
            raise
