"""torch.autograd inside vmap, through history that a tensor from outside brings along."""

import pytest
import torch
from torch import Tensor

from draws import make_generator
from forall import grad, jacrev, jvp, vmap
from forall._vmap.boundary import Broadcast
from oracle import difference, loop

D = torch.float64
V = torch.rand(4, 3, dtype=D, generator=make_generator(0))
W = torch.rand(2, 4, 3, dtype=D, generator=make_generator(1))


def outside() -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, and two tensors computed from it before the call."""
    x = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    y = x**2
    return x, y, y.sin() * x


def d(out, wrt, cotangent=None, **options):
    return torch.autograd.grad(out, wrt, cotangent, retain_graph=True, **options)


def under_no_grad(out, x):
    with torch.no_grad():
        return d(out, x)


def own_leaf(v, y, z):
    u = (v * 1).requires_grad_()
    return d((u * z * y).sum(), (y, u))


def filled(found, v):
    return [v if g is None else g for g in found]


INSIDE = {
    "a cotangent": lambda x, y, z: lambda v: d(y, x, v),
    "a shared cotangent": lambda x, y, z: lambda v: [v, *d(z, x, torch.ones(3, dtype=D))],
    "a sum": lambda x, y, z: lambda v: d((y * v).sum(), x),
    "both ways": lambda x, y, z: lambda v: d((y * v * x).sum(), x),
    "all three": lambda x, y, z: lambda v: d((y * v * x * z).sum(), (y, x, z)),
    "twice the same": lambda x, y, z: lambda v: d((y * v * z).sum(), (x, x)),
    "part of the way": lambda x, y, z: lambda v: d((v * z).sum(), y),
    "beside a leaf made inside": lambda x, y, z: lambda v: own_leaf(v, y, z),
    "several outputs": lambda x, y, z: (
        lambda v: d((y, (z * v).sum()), x, (v, torch.ones((), dtype=D)))
    ),
    "under no_grad": lambda x, y, z: lambda v: under_no_grad((x * v * y).sum(), x),
    "under no_grad, one graph": lambda x, y, z: lambda v: under_no_grad((x * v).sin().sum(), x),
    "many cotangents": lambda x, y, z: (
        lambda v: d(z * v, x, torch.eye(3, dtype=D), is_grads_batched=True)
    ),
    "one unused": lambda x, y, z: lambda v: filled(d((y * v).sum(), (x, z), allow_unused=True), v),
    "zeros": lambda x, y, z: lambda v: d((y * v).sum(), (x, z), materialize_grads=True),
    "of a graph that is kept": lambda x, y, z: (
        lambda v: d((y * v * z).sum(), x, create_graph=True)[0].detach()
    ),
    "jvp": lambda x, y, z: (
        lambda v: jvp(lambda v: d(z, x, v.sin(), create_graph=True)[0], (v,), (v * v,))
    ),
    "jvp of a sum": lambda x, y, z: (
        lambda v: jvp(lambda v: d((z * v * x).sum().sin(), x, create_graph=True)[0], (v,), (v * v,))
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_each_example_has_a_gradient_of_its_own(name):
    made = INSIDE[name]
    assert difference(vmap(made(*outside()))(V), loop(made(*outside()))(V)) is None
    mine, theirs = vmap(vmap(made(*outside()))), loop(loop(made(*outside())))
    assert difference(mine(W), theirs(W)) is None


def with_a_hook(x, y, z):
    y.register_hook(lambda g: 2 * g)
    z.register_hook(lambda g: g.sin())
    return lambda v: d((y, z), x, (v, v * v))


OUTSIDE = {
    "an output twice": lambda x, y, z: lambda v: d((y, y), x, (v, v.sin())),
    "an output that is wanted": lambda x, y, z: lambda v: d((y, z), (y, x), (v, v.sin())),
    "wanted twice": lambda x, y, z: lambda v: d(z, (x, x), v),
    "an output that is a leaf": lambda x, y, z: lambda v: d((x, y), x, (v, v.cos())),
    "no cotangent": lambda x, y, z: lambda v: [v, *d(z.sum(), x)],
    "one cotangent of two": lambda x, y, z: lambda v: d((z.sum(), y), x, (None, v)),
    "hooks": with_a_hook,
    "unused": lambda x, y, z: lambda v: filled(d(y, (x, z), v, allow_unused=True), v),
    "unused, as zeros": lambda x, y, z: lambda v: d(y, (x, z), v, materialize_grads=True),
    "after a read of an output": lambda x, y, z: lambda v: d(y, x, (y * v).detach()),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_graph_from_before_the_call_is_pulled_through_as_the_loop_does(name):
    made = OUTSIDE[name]
    assert difference(vmap(made(*outside()))(V), loop(made(*outside()))(V)) is None
    mine, theirs = vmap(vmap(made(*outside()))), loop(loop(made(*outside())))
    assert difference(mine(W), theirs(W)) is None


def test_no_node_is_made_for_a_tensor_of_a_graph_from_before_the_call(monkeypatch):
    x, y, z = outside()
    monkeypatch.setattr(Broadcast, "forward", lambda *_: pytest.fail("it was shared"))
    vmap(lambda v: d((y, z), x, (v, v)))(V)


def test_a_freed_graph_is_an_error_in_torchs_words():
    x, y, _ = outside()
    vmap(lambda v: torch.autograd.grad(y, x, v))(V)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        vmap(lambda v: torch.autograd.grad(y, x, v))(V)


def test_cotangents_of_other_shapes_are_an_error_in_torchs_words():
    x, y, _ = outside()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        vmap(lambda v: d(y, x, v[:2]))(V)


def test_results_require_grad_where_the_loops_do():
    x, y, z = outside()
    assert not vmap(lambda v: d((y * v).sum(), x)[0])(V).requires_grad
    assert vmap(lambda v: d((z * v).sum(), x, create_graph=True)[0])(V).requires_grad


def unused(x, y, z):
    return lambda v: d((y * v).sum(), (x, z))


def test_what_is_unused_is_an_error_in_torchs_words():
    # Later releases of torch tell which tensor it is.
    for run in (vmap, loop):
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            run(unused(*outside()))(V)


def test_a_second_derivative_outside():
    def second(run):
        x, y, z = outside()
        first = run(lambda v: d((y * v * x * z).sum().sin(), x, create_graph=True)[0])(V)
        return d(first.pow(2).sum(), (x, y))

    assert difference(second(vmap), second(loop)) is None


def between(run):
    x, y, z = outside()

    def f(a):
        a = a.requires_grad_()
        w = (a * y).sin()
        return run(lambda v: d((w * v * x * z).sum(), (a, x, w)))(V)

    return run(f)(V.clone())


def through_mapped_arguments(run):
    x, y, _ = outside()
    return run(lambda a: d((a * x).sin().sum(), (x, y)))(y * V)


def through_an_axis_further_back(run):
    x, y, _ = outside()
    stack, f = (y * V).mT.contiguous(), lambda a: d((a * x).sin().sum(), (x, y))
    return vmap(f, in_dims=1)(stack) if run is vmap else loop(f, 1)(stack)


def for_the_mapped_tensor_itself(run):
    x, y, _ = outside()
    stack = y * V
    return run(lambda a: d((a * x).sin().sum(), stack))(stack)


def for_a_leaf_that_is_mapped(run):
    x, _, _ = outside()
    stack = V.clone().requires_grad_()
    return run(lambda a: d((a * a * x).sin().sum(), (stack, x)))(stack)


def through_two_levels_of_arguments(run):
    x, y, _ = outside()
    return run(run(lambda a: d((a * x).sin().sum(), (x, y))))(y * W)


def through_arguments_of_either_level(run):
    x, y, _ = outside()

    def f(row, w):
        return run(lambda a: d((a * x * row).sin().sum(), (x, y, row)))(row * w)

    return run(f)(y * V, W.movedim(1, 0))


WAYS = [
    between,
    through_mapped_arguments,
    through_an_axis_further_back,
    for_the_mapped_tensor_itself,
    for_a_leaf_that_is_mapped,
    through_two_levels_of_arguments,
    through_arguments_of_either_level,
]


@pytest.mark.parametrize("way", WAYS)
def test_the_way_may_cross_the_border_anywhere(way):
    assert difference(way(vmap), way(loop)) is None


BACKWARD = {
    "a cotangent": lambda x, y, z: lambda v: y.backward(v, retain_graph=True),
    "by name": lambda x, y, z: lambda v: y.backward(gradient=v, retain_graph=True),
    "a sum": lambda x, y, z: lambda v: (y * v * x * z).sum().backward(retain_graph=True),
    "the same for all": lambda x, y, z: lambda v: z.sum().backward(retain_graph=True),
    "inputs": lambda x, y, z: lambda v: (z * v).sum().backward(retain_graph=True, inputs=[x]),
    "the leaf itself": lambda x, y, z: lambda v: x.backward(v),
    "several": lambda x, y, z: (
        lambda v: torch.autograd.backward([y, (z * v).sum()], [v, None], retain_graph=True)
    ),
    "twice": lambda x, y, z: (
        lambda v: [
            (z * v).sum().backward(retain_graph=True),
            (y * v).sum().backward(retain_graph=True),
        ]
    ),
}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_leaves_the_loops_sum_on_a_leaf(name, before, levels):
    left = []
    for run in (vmap, loop):
        x, y, z = outside()
        if before:
            x.grad = torch.ones_like(x)
        f = BACKWARD[name](x, y, z)
        g = lambda v, f=f: (f(v), v)[1]  # noqa: E731
        (run(g) if levels == 1 else run(run(g)))(V if levels == 1 else W)
        assert type(x.grad) is Tensor
        left.append(x.grad)
    assert difference(*left) is None


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y, z: grad(lambda v: d(z, x, v, create_graph=True)[0].pow(2).sum()),
        lambda x, y, z: jacrev(lambda v: d(z, x, v.sin(), create_graph=True)[0]),
        lambda x, y, z: jacrev(
            jacrev(lambda v: d(z, x, v.sin(), create_graph=True)[0].pow(3).sum())
        ),
    ],
)
def test_a_derivative_of_a_gradient_inside_is_the_loops(f):
    assert difference(vmap(f(*outside()))(V), loop(f(*outside()))(V)) is None
    assert difference(vmap(vmap(f(*outside())))(W), loop(loop(f(*outside())))(W)) is None


def test_a_second_derivative_inside_is_refused():
    x, y, z = outside()
    with pytest.raises(NotImplementedError, match="vmap"):
        vmap(lambda v: d(d((y * v * z).sum().sin(), x, create_graph=True)[0].sum(), x))(V)


def test_a_map_inside_jvp_is_refused():
    x, y, z = outside()

    def pushed(a):
        w = (a * y).sin()
        return vmap(lambda v: d((w * v * x * z).sum(), x, create_graph=True)[0])(V)

    with pytest.raises(NotImplementedError, match="inside jvp"):
        jvp(pushed, (V[0],), (V[1],))
