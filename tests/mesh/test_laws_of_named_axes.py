"""Laws 1 to 3 of named axes: a program of collectives is the program written on the stack.

Values and all derivatives, taken outside of the call and inside of it, in nestings of two axes.
"""

from itertools import product

import pytest
import torch

from forall import (
    grad,
    hessian,
    hessian_diag,
    jacfwd,
    jacrev,
    jit,
    jvp,
    vmap,
)
from mesh.programs import EXAMPLES, PROGRAMS, Explicit
from mesh.transforms import (
    INSIDE,
    explicit,
    linearized,
    named,
    pulled,
    pushed,
    weighed,
    weights,
)


def check(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


def by_backward(f, x):
    x = x.clone().requires_grad_()
    weighed(f)(x).backward()
    return x.grad


OUTSIDE = {
    "value": lambda f, x: f(x),
    "grad": lambda f, x: grad(weighed(f))(x),
    "vjp": pulled,
    "jvp": pushed,
    "linearize": linearized,
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(weighed(f))(x),
    "hessian_diag": lambda f, x: hessian_diag(weighed(f))(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(weighed(f)))(x),
    "grad of jvp": lambda f, x: grad(lambda x: pushed(weighed(f), x)[1])(x),
    "backward": by_backward,
    "vmap further out": lambda f, x: vmap(f)(torch.stack([x, 2 * x, x.cos()])),
    "grad of vmap further out": lambda f, x: grad(weighed(vmap(f)))(torch.stack([x, x.cos()])),
    "jit": lambda f, x: [jit(f)(x) for _ in range(3)][-1],
    "jit of grad": lambda f, x: [jit(grad(weighed(f)))(x) for _ in range(3)][-1],
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("transform", OUTSIDE)
def test_a_call_is_the_program_on_the_stack(program, transform):
    how = OUTSIDE[transform]
    check(how(vmap(named(program), axis_name="i"), EXAMPLES), how(explicit(program), EXAMPLES))


OTHERS = {  # derivatives of these derivatives
    "call": lambda f: f,
    "grad outside": lambda f: grad(lambda x: sum((y * weights(y)).sum() for y in leaves(f(x)))),
    "jit outside": lambda f: lambda x: [jit(f)(x) for _ in range(3)][-1],
}


def leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


# A gradient that .backward() leaves has no derivative, and jit does not record one.
ASIDE = {
    ("backward", "grad outside"),
    ("backward", "jit outside"),
    ("autograd.grad", "jit outside"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("transform", "outside"), [x for x in product(INSIDE, OTHERS) if x not in ASIDE]
)
def test_a_derivative_inside_is_that_of_the_program_over_all_examples(program, transform, outside):
    how, of_program = INSIDE[transform]
    other = OTHERS[outside]
    got = other(vmap(how(named(program)), axis_name="i"))(EXAMPLES)
    check(got, other(lambda xs: of_program(explicit(program), xs))(EXAMPLES))


# --- two axes ----------------------------------------------------------------------------------

PAIRS = torch.linspace(-1.0, 2.0, 54, dtype=torch.float64).view(3, 2, 3, 3).sin()  # i, j
OF_BOTH = {
    "sum of both": lambda c, x: x * c.psum(x.sin(), ("i", "j")),
    "sum of both, other order": lambda c, x: x * c.pmean(x.sin(), ("j", "i")),
    "max of both": lambda c, x: x - c.pmax(x, ("i", "j")),
    "one in the other": lambda c, x: c.psum(c.psum(x * x, "j") * x, "i").sin(),
    "gather j": lambda c, x: c.all_gather(x, "j", dim=1).sin(),
    "gather both": lambda c, x: c.all_gather(c.all_gather(x, "j", -1), "i").cos(),
    "index": lambda c, x: x * c.index("i", x) + x.sin() * c.index("j", x) / c.axis_size(("i", "j")),
    "permute j": lambda c, x: c.ppermute(x * c.psum(x, "i"), "j", [(0, 1)]),
    "all_to_all of a sum": lambda c, x: c.all_to_all(c.psum(x, "j").sin() * x, "i", 0, 1),
    "scatter of a gather": lambda c, x: c.psum_scatter(
        c.all_gather(x, "j") * x.unsqueeze(-3), "j"
    ).sin(),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [*OF_BOTH, *(f"{name} of i" for name in PROGRAMS)])
@pytest.mark.parametrize("transform", OUTSIDE)
def test_two_axes_are_the_program_on_the_stack(name, transform):
    program, how = OF_BOTH.get(name) or PROGRAMS[name.removesuffix(" of i")], OUTSIDE[transform]
    f = vmap(vmap(named(program), axis_name="j"), axis_name="i")
    check(how(f, PAIRS), how(lambda xs: program(Explicit(i=3, j=2), xs), PAIRS))


@pytest.mark.parametrize("name", OF_BOTH)
@pytest.mark.parametrize("between", [False, True])
def test_a_gradient_inside_of_one_or_two_axes(name, between):
    program = OF_BOTH[name]
    if between:  # of one example of i: all of its j
        f = vmap(grad(lambda x: vmap(named(program), axis_name="j")(x).sum()), axis_name="i")
    else:
        f = vmap(vmap(grad(lambda x: named(program)(x).sum()), axis_name="j"), axis_name="i")
    want = grad(lambda xs: program(Explicit(i=3, j=2), xs).sum())(PAIRS)
    check(f(PAIRS), want)


@pytest.mark.parametrize("name", OF_BOTH)
def test_a_push_forward_inside_of_two_axes(name):
    program, tangent = OF_BOTH[name], PAIRS.cos()
    f = vmap(vmap(lambda x, t: jvp(named(program), (x,), (t,)), axis_name="j"), axis_name="i")
    want = jvp(lambda xs: program(Explicit(i=3, j=2), xs), (PAIRS,), (tangent,))
    check(f(PAIRS, tangent), want)


@pytest.mark.parametrize("transform", OUTSIDE)
def test_an_inner_axis_hides_an_outer_one_of_the_same_name(transform):
    from forall import psum

    how = OUTSIDE[transform]
    f = vmap(vmap(lambda x: x * psum(x, "i"), axis_name="i"), axis_name="i")
    check(how(f, PAIRS), how(lambda xs: xs * xs.sum(1, keepdim=True), PAIRS))


def test_other_dims_of_arguments_and_results():
    from forall import all_gather, psum

    xs = EXAMPLES
    f = vmap(lambda x, y: (psum(x * y, "i"), all_gather(x, "i")), (2, 1), (1, 2), axis_name="i")
    a, b = f(xs, xs)
    rows, columns = xs.movedim(2, 0), xs.movedim(1, 0)
    check(a, (rows * columns).sum(0).unsqueeze(1).expand(3, 3, 3))
    check(b, rows.unsqueeze(2).expand(3, 3, 3, 3))
    same = vmap(lambda x: psum(x, "i"), 2, None, axis_name="i")
    check(same(xs), xs.sum(2))
