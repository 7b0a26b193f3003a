"""The nine transforms nest in any order, and keep their options and trees as they do."""

import gc
import tracemalloc
import weakref

import pytest
import torch
from torch.utils import _pytree as pytree

from draws import make_generator
from forall import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from laws.nesting import PAIRS, TRIPLES, Cube, check_nesting
from oracle import difference

D = torch.float64


def seeded(*shape):
    generator = make_generator(sum(shape))
    return torch.randn(shape, dtype=D, generator=generator)


# --- every pair, on functions of a number ---------------------------------------------------------


@pytest.mark.parametrize("captured_requires_grad", [False, True])
@pytest.mark.parametrize("names", PAIRS, ids=" of ".join)
def test_every_pair_equals_its_closed_form(names, captured_requires_grad):
    check_nesting(names, captured_requires_grad)


@pytest.mark.parametrize("names", TRIPLES, ids=" of ".join)
def test_three_deep_equals_its_closed_form(names):
    check_nesting(names, captured_requires_grad=len(names[0]) % 2 == 0)


# --- Jacobians of Jacobians: shapes ---------------------------------------------------------------

A = seeded(2, 3)


def bent(x):
    """(3,) -> (2,); its second derivative is no diagonal."""
    return (A @ x).sin() * x.prod()


def truth_of_second(x):
    jacobian = torch.autograd.functional.jacobian
    return jacobian(lambda x: jacobian(bent, x, create_graph=True), x)


@pytest.mark.parametrize(
    "second",
    [
        hessian,
        lambda f: jacrev(jacrev(f)),
        lambda f: jacrev(jacfwd(f)),
        lambda f: jacfwd(jacrev(f)),
        lambda f: jacfwd(jacfwd(f)),
        lambda f: jacfwd(jacrev(f, chunk_size=1), chunk_size=2),
        lambda f: jacrev(jacfwd(f, chunk_size=2), chunk_size=4),
        lambda f: hessian(f, chunk_size=2),
    ],
)
def test_second_derivatives_of_a_vector_have_output_dims_first(second):
    x = seeded(3)
    assert difference(second(bent)(x), truth_of_second(x)) is None
    xs = seeded(4, 3)
    truth = torch.stack([truth_of_second(x) for x in xs])
    assert difference(vmap(second(bent))(xs), truth) is None


# --- options --------------------------------------------------------------------------------------


def three(x, y, z):
    """(2,), (3,), () -> (3,)."""
    return x.sum() ** 2 * y.sin() + z * y


@pytest.mark.parametrize("argnums", [0, 1, 2, -1, (0,), (2, 0), (0, -2), (0, 1, 2)])
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_argnums_choose_what_a_jacobian_is_taken_of(jacobian, argnums):
    args = seeded(2), seeded(3), seeded()
    every = torch.autograd.functional.jacobian(three, args)
    truth = every[argnums] if isinstance(argnums, int) else tuple(every[i] for i in argnums)
    assert difference(jacobian(three, argnums)(*args), truth) is None


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (2, 0), (0, 1, 2)])
def test_argnums_choose_what_a_gradient_is_taken_of(argnums):
    args = seeded(2), seeded(3), seeded()
    every = torch.autograd.functional.jacobian(lambda *a: three(*a).sum(), args)
    truth = every[argnums] if isinstance(argnums, int) else tuple(every[i] for i in argnums)
    assert difference(grad(lambda *a: three(*a).sum(), argnums)(*args), truth) is None
    found, value = grad_and_value(lambda *a: three(*a).sum(), argnums)(*args)
    assert difference(found, truth) is None
    assert difference(value, three(*args).sum()) is None


def test_argnums_of_a_hessian_give_its_blocks():
    args = seeded(2), seeded(3), seeded()
    every = torch.autograd.functional.hessian(lambda *a: three(*a).sum(), args)
    found = hessian(lambda *a: three(*a).sum(), (0, 2))(*args)
    truth = tuple(tuple(every[i][j] for j in (0, 2)) for i in (0, 2))
    assert difference(found, truth) is None


def test_aux_comes_out_beside_the_result():
    x, t = seeded(3), seeded(3)

    def f(x):
        return x.pow(3).sum(), {"twice": x * 2, "name": "aux"}

    aux = {"twice": x * 2, "name": "aux"}
    assert difference(grad(f, has_aux=True)(x), (3 * x**2, aux)) is None
    assert difference(grad_and_value(f, has_aux=True)(x), (3 * x**2, (x.pow(3).sum(), aux))) is None
    y, pull, given = vjp(f, x, has_aux=True)
    assert (
        difference((y, pull(torch.ones_like(y)), given), (x.pow(3).sum(), (3 * x**2,), aux)) is None
    )
    pushed = jvp(f, (x,), (t,), has_aux=True)
    assert difference(pushed, (x.pow(3).sum(), (3 * x**2) @ t, aux)) is None
    assert difference(jacrev(f, has_aux=True)(x), (3 * x**2, aux)) is None
    assert difference(jacfwd(f, has_aux=True)(x), (3 * x**2, aux)) is None
    assert difference(hessian(f, has_aux=True)(x), (torch.diag(6 * x), aux)) is None


def test_aux_under_vmap_is_stacked():
    xs = seeded(4, 3)
    found = vmap(grad(lambda x: (x.pow(3).sum(), x * 2), has_aux=True))(xs)
    assert difference(found, (3 * xs**2, xs * 2)) is None


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_chunks_change_no_value(chunk_size):
    x, xs = seeded(3), seeded(5, 3)
    truth = torch.autograd.functional.jacobian(bent, x)
    assert difference(jacrev(bent, chunk_size=chunk_size)(x), truth) is None
    assert difference(jacfwd(bent, chunk_size=chunk_size)(x), truth) is None
    assert difference(hessian(bent, chunk_size=chunk_size)(x), truth_of_second(x)) is None
    mapped = vmap(jacrev(bent, chunk_size=chunk_size), chunk_size=chunk_size)(xs)
    each = torch.stack([torch.autograd.functional.jacobian(bent, x) for x in xs])
    assert difference(mapped, each) is None


# --- trees ----------------------------------------------------------------------------------------


class Pair:
    def __init__(self, first, second):
        self.first = first
        self.second = second


pytree.register_pytree_node(
    Pair, lambda p: ([p.first, p.second], None), lambda children, _: Pair(*children)
)


def weighted(tree):
    return tree["w"].first.pow(2).sum() * tree["w"].second + tree["b"][0].sum()


def a_tree():
    return {"w": Pair(seeded(2), seeded()), "b": (seeded(3), 7, None)}


def test_a_gradient_has_the_tree_of_its_argument():
    tree = a_tree()
    first, second = tree["w"].first, tree["w"].second
    found = grad(weighted)(tree)
    assert isinstance(found["w"], Pair)
    assert difference(found["w"].first, 2 * first * second) is None
    assert difference(found["w"].second, first.pow(2).sum()) is None
    assert difference(found["b"][0], torch.ones(3, dtype=D)) is None
    assert found["b"][1:] == (None, None)


@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_a_jacobian_has_the_outputs_tree_with_the_arguments_at_its_leaves(jacobian):
    p = Pair(seeded(2), seeded(3))
    found = jacobian(lambda p: Pair(p.first.sum() * p.second, {"prod": p.first.prod()}))(p)
    truth = Pair(
        Pair(p.second[:, None].expand(3, 2), p.first.sum() * torch.eye(3, dtype=D)),
        {"prod": Pair(p.first.flip(0), torch.zeros(3, dtype=D))},
    )
    assert difference(found, truth) is None


def test_jvp_vjp_and_linearize_take_and_give_trees():
    p, t = Pair(seeded(2), seeded(3)), Pair(seeded(2) + 1, seeded(3) - 1)

    def f(p):
        return Pair(p.first.sum() * p.second, {"square": p.first**2})

    value = f(p)
    push = Pair(
        t.first.sum() * p.second + p.first.sum() * t.second, {"square": 2 * p.first * t.first}
    )
    assert difference(jvp(f, (p,), (t,)), (value, push)) is None
    y, push_fn = linearize(f, p)
    assert difference((y, push_fn(t)), (value, push)) is None
    y, pull = vjp(f, p)
    cotangent = Pair(seeded(3), {"square": seeded(2)})
    pulled = Pair(
        (cotangent.first @ p.second) + 2 * p.first * cotangent.second["square"],
        p.first.sum() * cotangent.first,
    )
    assert difference((y, pull(cotangent)), (value, (pulled,))) is None


def test_a_mapped_tree_equals_the_loop():
    xs = Pair(seeded(4, 2), seeded(4, 3))
    found = vmap(lambda p: Pair(p.first.sum() * p.second, {"prod": p.first.prod()}))(xs)
    truth = Pair(xs.first.sum(1, keepdim=True) * xs.second, {"prod": xs.first.prod(1)})
    assert difference(found, truth) is None


# --- results and the outside ----------------------------------------------------------------------


def every_result(f, x):
    """What each reverse-mode transform gives for a scalar function."""
    y, pull = vjp(f, x)
    return [
        grad(f)(x),
        *grad_and_value(f)(x),
        y,
        *pull(torch.ones_like(y)),
        jacrev(f)(x),
        *grad(lambda x: (f(x), x * 2), has_aux=True)(x),
        *jvp(f, (x,), (x.detach(),)),
        jacfwd(f)(x),
        hessian(f)(x),
        vmap(grad(f))(torch.stack([x, x])),
        linearize(f, x)[0],
        linearize(f, x)[1](x.detach()),
    ]


def test_results_require_no_grad_where_nothing_outside_does():
    found = every_result(lambda x: x.pow(3).sum(), seeded(3))
    assert not any(t.requires_grad for t in found)
    assert all(t.grad_fn is None for t in found)


def test_results_require_grad_where_the_point_does():
    found = every_result(lambda x: x.pow(3).sum(), seeded(3).requires_grad_())
    assert all(t.requires_grad for t in found)


def test_results_require_grad_where_a_captured_tensor_does():
    w = seeded(3).requires_grad_()
    found = every_result(lambda x: (w * x.pow(3)).sum() * w.prod(), seeded(3))
    assert [i for i, t in enumerate(found) if not t.requires_grad] == [7]  # aux is x * 2 alone


def test_results_are_ordinary_tensors():
    found = every_result(lambda x: x.pow(3).sum(), seeded(3))
    assert {type(t) for t in found} == {torch.Tensor}


# --- linearize ------------------------------------------------------------------------------------


def test_linearize_runs_the_function_once():
    runs = []

    def f(x):
        runs.append(1)
        return (A @ x).sin()

    x = seeded(3)
    y, push = linearize(f, x)
    jacobian = torch.autograd.functional.jacobian(lambda x: (A @ x).sin(), x)
    for t in (seeded(3), torch.zeros(3, dtype=D), 2 * x):
        assert difference(push(t), jacobian @ t) is None
    assert difference(vmap(push)(torch.eye(3, dtype=D)).T.contiguous(), jacobian) is None
    assert difference(y, (A @ x).sin()) is None
    assert len(runs) == 1


def test_linearize_is_differentiable_in_the_point_and_in_the_direction():
    x, t = seeded(3), seeded(3) + 1
    second = truth_of_second(x)
    found = jacrev(lambda x: linearize(bent, x)[1](t))(x)
    assert difference(found, torch.einsum("oij,i->oj", second, t)) is None
    point = x.clone().requires_grad_()
    _, push = linearize(bent, point)
    (outside,) = torch.autograd.grad(push(t).sum(), point)
    assert difference(outside, torch.einsum("oij,i->j", second, t)) is None
    jacobian = torch.autograd.functional.jacobian(bent, x)
    assert difference(jacrev(linearize(bent, x)[1])(t), jacobian) is None
    assert difference(jacfwd(linearize(bent, x)[1])(t), jacobian) is None


def test_linearize_under_vmap_equals_the_loop():
    xs, ts = seeded(4, 3), seeded(4, 3) + 1
    found = vmap(lambda x, t: linearize(bent, x)[1](t))(xs, ts)
    truth = [torch.autograd.functional.jacobian(bent, x) @ t for x, t in zip(xs, ts, strict=True)]
    assert difference(found, torch.stack(truth)) is None


# --- vjp_fn ---------------------------------------------------------------------------------------


def mapped_inside(x):
    """Its graph contains a map: (3,) -> (2,)."""
    return vmap(lambda a: (a * x).sin().sum() * x.prod())(A)


@pytest.mark.parametrize("f", [bent, mapped_inside])
def test_a_pull_back_can_be_used_again_and_under_any_transform(f):
    x, rows = seeded(3), seeded(4, 2)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: (
            torch.stack([(a * x).sin().sum() * x.prod() for a in A])
            if f is mapped_inside
            else bent(x)
        ),
        x,
    )
    _, pull = vjp(f, x)
    truth = rows @ jacobian
    assert difference(torch.stack([pull(r)[0] for r in rows]), truth) is None
    assert difference(vmap(lambda r: pull(r)[0])(rows), truth) is None
    assert difference(vmap(lambda r: pull(r)[0], 1, 1)(rows.T), truth.T) is None
    twice = vmap(vmap(lambda r: pull(r)[0]))(rows.reshape(2, 2, 2))
    assert difference(twice, truth.reshape(2, 2, 3)) is None
    pushed = jvp(lambda r: pull(r)[0], (rows[0],), (rows[1],))
    assert difference(pushed, (truth[0], truth[1])) is None
    assert difference(jacrev(lambda r: pull(r)[0])(rows[0]), jacobian.T.contiguous()) is None
    assert difference(jacfwd(lambda r: pull(r)[0])(rows[0]), jacobian.T.contiguous()) is None
    under_jvp = vmap(lambda r, t: jvp(lambda r: pull(r)[0], (r,), (t,))[1])(rows, rows.flip(0))
    assert difference(under_jvp, truth.flip(0)) is None
    over_vmap = jvp(vmap(lambda r: pull(r)[0]), (rows,), (rows.flip(0),))[1]
    assert difference(over_vmap, truth.flip(0)) is None


def gradient_of_bent(x):
    return grad(lambda y: bent(y).square().sum())(x)


OF_PULLED = {
    "linear": lambda pulled: pulled.sum(),
    "squared": lambda pulled: pulled.square().sum(),
    "cubed": lambda pulled: (pulled**3 * pulled.sum()).sum(),
}
DERIVED = {
    "grad": grad,
    "grad of grad": lambda h: grad(lambda c: grad(h)(c).square().sum()),
    "hessian": hessian,
    "jvp of grad": lambda h: lambda c: jvp(grad(h), (c,), (c.cos(),))[1],
    "jacrev of jacfwd": lambda h: jacrev(jacfwd(h)),
    "autograd": lambda h: lambda c: _autograd(h, c),
}


def _autograd(h, c):
    c = c.clone().requires_grad_()
    return torch.autograd.grad(h(c), c)[0]


# `tests/gaps` has those of a pull-back through a map that has ended.
CASES = [
    (f, derive)
    for f in (torch.sin, bent, mapped_inside, gradient_of_bent)
    for derive in DERIVED
    if f is not mapped_inside or derive in ("hessian", "jvp of grad", "jacrev of jacfwd")
]


@pytest.mark.parametrize(("f", "derive"), CASES)
@pytest.mark.parametrize("of_pulled", OF_PULLED)
def test_derivatives_of_functions_of_a_pull_back_from_outside_are_the_loops(f, of_pulled, derive):
    x = seeded(3)
    y, pull = vjp(f, x)
    cotangents = seeded(4, *y.shape) + 0.5
    g = DERIVED[derive](lambda c: OF_PULLED[of_pulled](pull(c.sin())[0]))
    truth = torch.stack([g(c) for c in cotangents])
    assert difference(vmap(g)(cotangents), truth) is None
    nested = vmap(vmap(g))(cotangents.unflatten(0, (2, 2)))
    assert difference(nested, truth.unflatten(0, (2, 2))) is None


@pytest.mark.parametrize("f", [torch.sin, bent, gradient_of_bent])
def test_a_gradient_per_example_through_a_pull_back_leads_to_the_point(f):
    """The point of the pull-back has a history of its own, outside the map."""

    def slope(run):
        x = seeded(3).requires_grad_()
        y, pull = vjp(f, x)
        cotangents = (seeded(4, *y.shape) + 0.5).requires_grad_()
        g = grad(lambda c: pull(c.sin())[0].square().sum())
        return torch.autograd.grad(run(g, cotangents).square().sum(), (x, cotangents))

    truth = slope(lambda g, cotangents: torch.stack([g(c) for c in cotangents]))
    assert difference(slope(lambda g, cotangents: vmap(g)(cotangents)), truth) is None


def test_the_tangent_of_mapped_second_derivatives_of_a_function():
    """`tests/gaps` has that of `hessian`, which is forward over reverse."""
    xs = seeded(3, 2)
    expected = jvp(vmap(jacrev(jacrev(lambda x: x**3))), (xs,), (xs.cos(),))
    assert difference(jvp(vmap(jacrev(jacrev(Cube.apply))), (xs,), (xs.cos(),)), expected) is None


def test_a_pull_back_made_under_vmap_works_there():
    xs, cs = seeded(4, 3), seeded(4, 2)

    def pulled_twice(x, c):
        _, pull = vjp(bent, x)
        return pull(c)[0], vmap(lambda s: pull(s * c)[0])(torch.arange(3.0, dtype=D))

    jacobians = [torch.autograd.functional.jacobian(bent, x) for x in xs]
    once = torch.stack([c @ j for c, j in zip(cs, jacobians, strict=True)])
    many = torch.arange(3.0, dtype=D)[None, :, None] * once[:, None, :]
    assert difference(vmap(pulled_twice)(xs, cs), (once, many)) is None


def test_a_pull_back_stays_differentiable_in_its_point():
    x = seeded(3).requires_grad_()
    c = seeded(2)
    _, pull = vjp(bent, x)
    (found,) = torch.autograd.grad(pull(c)[0].sum(), x)
    truth = torch.einsum("oij,o->j", truth_of_second(x.detach()), c)
    assert difference(found, truth) is None


# --- nothing is kept ------------------------------------------------------------------------------


def live_tensors():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.counted
@pytest.mark.parametrize(
    "step",
    [
        lambda p, f: p - 0.01 * grad(f)(p),
        lambda p, f: p - 0.01 * grad_and_value(f)(p)[0],
        lambda p, f: p - 0.01 * vmap(grad(f))(p[None])[0],
        lambda p, f: p - 0.01 * vjp(f, p)[1](torch.tensor(1.0, dtype=D))[0],
        lambda p, f: p - 0.01 * jacrev(f)(p),
        lambda p, f: p - 0.01 * jvp(f, (p,), (torch.ones_like(p),))[1],
    ],
    ids=["grad", "grad_and_value", "vmap of grad", "vjp", "jacrev", "jvp"],
)
def test_a_thousand_steps_keep_no_graph_and_no_tensor(step):
    points = []

    def f(p):
        points.append(weakref.ref(p))
        return (p.cos() * p).sum()

    p = seeded(3)
    for _ in range(100):
        p = step(p, f)
    before = live_tensors()
    tracemalloc.start()
    size = tracemalloc.get_traced_memory()[0]
    for _ in range(900):
        p = step(p, f)
    points_alive = sum(r() is not None for r in points)
    gc.collect()  # Python keeps some thousands of small tuples that are free, and counts them
    grown = tracemalloc.get_traced_memory()[0] - size
    tracemalloc.stop()
    assert not p.requires_grad
    assert live_tensors() <= before
    assert points_alive <= 2
    assert grown < 400_000  # one weakref per step is ours; a kept graph is tens of kilobytes


def test_a_mapped_result_without_grad_frees_what_was_computed():
    born = []

    def f(a):
        h = a * 2
        born.append(weakref.ref(h))
        return h.sum()

    y = vmap(f)(seeded(4, 3))
    gc.collect()
    assert born[0]() is None
    assert y.shape == (4,)
