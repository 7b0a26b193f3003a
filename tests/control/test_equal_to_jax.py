"""The operators give what jax.lax gives, values and derivatives, on the programs of the matrix."""

import os
from functools import partial

import pytest
import torch

import forall
from control.programs import PROGRAMS
from draws import HERE, make_generator
from forall import associative_scan, cond, fori_loop, grad, hessian, jvp, scan, switch, vmap
from oracle import difference

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is in the dev extra")
np = pytest.importorskip("numpy")
jnp, lax = jax.numpy, jax.lax

D = torch.float64
XS = torch.tensor([[0.3, -0.4, 0.9], [0.1, 1.2, -0.8], [-0.5, 0.7, 0.2]], dtype=D)
TS = torch.tensor([[1.0, -0.5, 0.25], [0.2, 0.3, -2.0], [0.9, -0.1, 0.4]], dtype=D)
PS = torch.tensor([3, 0, 5])


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def theirs(tree):
    return jax.tree.map(lambda t: jnp.asarray(t.cpu().numpy()), tree)


def ours(tree):
    return jax.tree.map(lambda a: torch.from_numpy(np.array(a)).to(HERE), tree)


def jitted(f, *args):
    return jax.jit(f)(*theirs(args))


def agree(result, truth):
    found = difference(result, ours(truth))
    assert found is None, found


def both(name):
    """The program for forall and for JAX, whose reverse mode needs p to be a Python number."""
    f = PROGRAMS[name]
    return (
        lambda p: lambda x: f(forall, torch, x, p),
        lambda p: lambda x: f(lax, jnp, x, p),
    )


def numbers(name):
    """What decides: compiling for each takes JAX a while."""
    return PS.tolist() if " in " not in name else [3]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_slopes(name):
    mine, jaxs = both(name)
    for p, x, t in zip(numbers(name), XS, TS, strict=False):
        pushed = partial(jax.jvp, jaxs(p))
        agree(jvp(mine(p), (x,), (t,)), jitted(lambda x, t, f=pushed: f((x,), (t,)), x, t))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "while_loop" not in name])
def test_gradients_and_hessians(name):
    mine, jaxs = both(name)
    for p, x in zip(numbers(name), XS, strict=False):
        agree(grad(mine(p))(x), jitted(jax.grad(jaxs(p)), x))
    if " in " not in name:
        agree(hessian(mine(3))(XS[0]), jitted(jax.hessian(jaxs(3)), XS[0]))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "while_loop" in name])
def test_derivatives_of_while_which_jax_has_forward_only(name):
    mine, jaxs = both(name)
    for p, x in zip(numbers(name), XS, strict=False):
        agree(grad(mine(p))(x), jitted(jax.jacfwd(jaxs(p)), x))
    agree(hessian(mine(3))(XS[0]), jitted(jax.jacfwd(jax.jacfwd(jaxs(3))), XS[0]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_predicate_that_all_examples_share(name):
    mine, jaxs = both(name)
    agree(vmap(mine(3))(XS), jitted(jax.vmap(jaxs(3)), XS))
    result = vmap(lambda x, p: PROGRAMS[name](forall, torch, x, p), (0, None))(XS, torch.tensor(3))
    agree(result, jitted(jax.vmap(jaxs(3)), XS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_predicate_of_each_example(name):
    result = vmap(lambda x, p: PROGRAMS[name](forall, torch, x, p))(XS, PS)
    truth = jax.vmap(lambda x, p: PROGRAMS[name](lax, jnp, x, p))
    agree(result, jitted(truth, XS, PS))


# --- what the arguments mean ----------------------------------------------------------------------


@pytest.mark.parametrize("index", [-2, 0, 1, 2, 9])
def test_an_index_outside_takes_the_nearest_branch(index):
    branches = [lambda x: x + 1, lambda x: x * 2, lambda x: -x]
    agree(switch(index, branches, XS), lax.switch(index, branches, theirs(XS)))


@pytest.mark.parametrize("pred", [True, False, 2.5, 0])
def test_a_predicate_is_a_bool_or_a_number(pred):
    agree(cond(pred, torch.sin, torch.cos, XS), lax.cond(pred, jnp.sin, jnp.cos, theirs(XS)))


@pytest.mark.parametrize("bounds", [(0, 4), (2, 5), (-3, 0), (3, 3), (4, 1)])
def test_bounds(bounds):
    body = lambda i, x: x * 0.5 + i  # noqa: E731
    agree(fori_loop(*bounds, body, XS), lax.fori_loop(*bounds, body, theirs(XS)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_trees_of_scan(n, reverse):
    def step(carry, x):
        (a, b), (c, _, d) = carry, x
        a = a * 0.5 + c.sum()
        return (a, b + 1), {"y": c * a, "none": None, "z": (d, b)}

    rows = torch.arange(6.0 * n, dtype=D).reshape(n, 2, 3)
    xs = (rows, None, rows[:, 0, 0] > 2)
    init = (torch.tensor(0.5, dtype=D), torch.tensor(3))
    result = scan(step, init, xs, reverse=reverse)
    truth = lax.scan(step, theirs(init), (theirs(xs[0]), None, theirs(xs[2])), reverse=reverse)
    assert result[1].pop("none") is truth[1].pop("none") is None
    agree(result, truth)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_without_xs(reverse):
    step = lambda carry, _: (carry * 1.5 + 1, carry)  # noqa: E731
    start = torch.tensor([1.0, -2.0], dtype=D)
    agree(scan(step, start, None, 4, reverse), lax.scan(step, theirs(start), None, 4, reverse))


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 9])
def test_batches_of_map(batch_size):
    xs = {"a": torch.arange(10.0, dtype=D).reshape(5, 2), "b": torch.arange(5)}
    f = lambda x: {"b": x["b"] + 1, "sum": x["a"].sum() * x["b"]}  # noqa: E731
    agree(forall.map(f, xs, batch_size=batch_size), lax.map(f, theirs(xs), batch_size=batch_size))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_associative_scan_of_products_of_matrices(n, axis, reverse):
    shape = [2, 3]
    shape.insert(axis % 3, n)
    generator = make_generator(n)
    a = torch.randn(shape, dtype=D, generator=generator)
    b = torch.randn(shape, dtype=D, generator=generator)

    def after(f, g):  # of affine functions; not commutative
        return {"a": f["a"] * g["a"], "b": g["a"] * f["b"] + g["b"]}

    elems = {"a": a, "b": b}
    agree(
        associative_scan(after, elems, reverse, axis),
        lax.associative_scan(after, theirs(elems), reverse, axis % 3),  # -1 fails in reverse
    )


def test_a_number_in_the_carry_takes_the_dtype_that_the_function_gives_it():
    step = lambda carry, x: (carry + x, carry)  # noqa: E731
    xs = XS[0]
    agree(scan(step, 0, xs), lax.scan(step, 0, theirs(xs)))
