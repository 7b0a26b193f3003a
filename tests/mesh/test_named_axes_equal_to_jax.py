"""Named axes give what jax.vmap gives with an axis_name: values and derivatives."""

import os

import pytest
import torch

import forall
from draws import HERE
from mesh.programs import EXAMPLES, PROGRAMS, Named
from oracle import difference

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is in the dev extra")
np = pytest.importorskip("numpy")
jnp, lax = jax.numpy, jax.lax


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


class Theirs:
    """JAX's collectives, with ``dim`` for ``axis``."""

    psum, pmean, pmax, pmin = map(staticmethod, (lax.psum, lax.pmean, lax.pmax, lax.pmin))
    axis_size = staticmethod(lax.axis_size)

    @staticmethod
    def index(name, _x):
        return lax.axis_index(name)

    @staticmethod
    def all_gather(x, name, dim=0, tiled=False):
        return lax.all_gather(x, name, axis=dim % (x.ndim + (not tiled)), tiled=tiled)

    @staticmethod
    def psum_scatter(x, name, scatter_dim=0, tiled=False):
        return lax.psum_scatter(x, name, scatter_dimension=scatter_dim, tiled=tiled)

    @staticmethod
    def all_to_all(x, name, split_dim=0, concat_dim=0, tiled=False):
        return lax.all_to_all(x, name, split_dim, concat_dim, tiled=tiled)

    @staticmethod
    def ppermute(x, name, perm):
        return lax.ppermute(x, name, perm)


# The same programs with the functions of JAX: its arrays lack some methods of tensors.
WITH_JAX = {
    "psum": lambda c, x: x * c.psum(jnp.sin(x), "i"),
    "psum twice": lambda c, x: jnp.cos(c.psum(c.psum(x, "i") * x, "i")),
    "pmean": lambda c, x: (x - c.pmean(x, "i")) / jnp.sqrt(c.pmean(x * x, "i") + 1),
    "pmax": lambda c, x: jnp.exp(x - c.pmax(x, "i")),
    "pmin": lambda c, x: x * c.pmin(x * x, "i"),
    "all_gather": lambda c, x: (jnp.sin(c.all_gather(x, "i")) * x[None]).sum(-3),
    "all_gather last": lambda c, x: jnp.cos(c.all_gather(x * x, "i", dim=-1)),
    "all_gather tiled": lambda c, x: c.all_gather(jnp.sin(x), "i", dim=1, tiled=True),
    "psum_scatter": lambda c, x: c.psum_scatter(x * x, "i"),
    "psum_scatter dim": lambda c, x: c.psum_scatter(jnp.sin(x), "i", scatter_dim=1),
    "psum_scatter tiled": lambda c, x: c.psum_scatter(x * x, "i", 1, tiled=True),
    "all_to_all": lambda c, x: c.all_to_all(jnp.sin(x), "i") * x,
    "all_to_all dims": lambda c, x: c.all_to_all(jnp.sin(x), "i", 1, 0) * x,
    "all_to_all tiled": lambda c, x: c.all_to_all(x * x, "i", 0, 1, tiled=True),
    "ppermute": lambda c, x: c.ppermute(x * x, "i", [(0, 1), (1, 2), (2, 0)]) - x,
    "axis_index": lambda c, x: jnp.sin(x) * (c.index("i", x) + 1) / c.axis_size("i"),
}
# JAX 0.10 has no derivative of pmax and pmin, and fails at that of all_to_all with two dims.
VALUES_ALONE = {"pmax", "pmin", "all_to_all dims", "all_to_all tiled"}


def theirs(t):
    return jnp.asarray(t.cpu().numpy())


def call(f, *args):
    """Return ``f`` of the arguments by JAX, as one compiled program."""
    return jax.jit(f)(*map(theirs, args))


def agree(got, want):
    found = difference(got, torch.from_numpy(np.array(want)).to(HERE))
    assert found is None, found


def both(name):
    return (lambda x: PROGRAMS[name](Named, x)), (lambda x: WITH_JAX[name](Theirs, x))


@pytest.mark.parametrize("name", WITH_JAX)
def test_values(name):
    f, g = both(name)
    agree(
        forall.vmap(f, axis_name="i")(EXAMPLES),
        call(jax.vmap(g, axis_name="i"), EXAMPLES),
    )


WITH_DERIVATIVES = sorted({*WITH_JAX} - VALUES_ALONE)


@pytest.mark.parametrize("name", WITH_DERIVATIVES)
def test_gradients_inside_and_outside(name):
    f, g = both(name)
    agree(
        forall.vmap(forall.grad(lambda x: f(x).sin().sum()), axis_name="i")(EXAMPLES),
        call(jax.vmap(jax.grad(lambda x: jnp.sin(g(x)).sum()), axis_name="i"), EXAMPLES),
    )
    agree(
        forall.grad(lambda xs: forall.vmap(f, axis_name="i")(xs).sin().sum())(EXAMPLES),
        call(jax.grad(lambda xs: jnp.sin(jax.vmap(g, axis_name="i")(xs)).sum()), EXAMPLES),
    )


@pytest.mark.parametrize("name", WITH_DERIVATIVES)
def test_push_forwards_and_jacobians_inside(name):
    f, g = both(name)
    agree(
        forall.vmap(lambda x: forall.jvp(f, (x,), (x.cos(),))[1], axis_name="i")(EXAMPLES),
        call(jax.vmap(lambda x: jax.jvp(g, (x,), (jnp.cos(x),))[1], axis_name="i"), EXAMPLES),
    )
    for ours, of_jax in ((forall.jacrev, jax.jacrev), (forall.jacfwd, jax.jacfwd)):
        agree(
            forall.vmap(ours(f), axis_name="i")(EXAMPLES),
            call(jax.vmap(of_jax(g), axis_name="i"), EXAMPLES),
        )


def test_the_table_of_derivatives():
    """``psum(x**2)`` of 1, 2, 3, 4, with respect to x and to a parameter that all share."""
    xs = torch.arange(1.0, 5.0)
    inside = forall.vmap(forall.grad(lambda x: forall.psum(x**2, "i")), axis_name="i")(xs)
    assert inside.tolist() == [8.0, 16.0, 24.0, 32.0]
    agree(inside, jax.vmap(jax.grad(lambda x: lax.psum(x**2, "i")), axis_name="i")(theirs(xs)))
    w = torch.tensor(1.0)
    own = forall.vmap(forall.grad(lambda w, x: w * x**2), (None, 0), axis_name="i")(w, xs)
    assert own.tolist() == [1.0, 4.0, 9.0, 16.0]
    shared = forall.vmap(
        forall.grad(lambda w, x: forall.psum(w * x**2, "i")), (None, 0), axis_name="i"
    )
    assert shared(w, xs).tolist() == [4.0, 16.0, 36.0, 64.0]
    agree(
        shared(w, xs),
        jax.vmap(jax.grad(lambda w, x: lax.psum(w * x**2, "i")), (None, 0), axis_name="i")(
            theirs(w), theirs(xs)
        ),
    )
