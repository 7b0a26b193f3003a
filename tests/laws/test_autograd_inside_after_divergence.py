"""torch.autograd.grad inside a mapped function, where examples have diverged.

Its outputs and inputs may be captured tensors, or depend on them, and those have graphs of their
own from before the call. Each gradient is the one of the example's own call, as in the loop, and
all examples run at once: a warning that they do not fails the test.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draws import make_generator
from forall import grad, vmap
from oracle import difference, loop

D = torch.float64
take_grad = torch.autograd.grad


class Captured:
    """Tensors from before the call, and examples with a history of their own."""

    def __init__(self) -> None:
        draw = make_generator(0)
        self.w = torch.randn(3, dtype=D, generator=draw).requires_grad_()
        self.scale = torch.tensor(1.5, dtype=D, requires_grad=True)
        self.y = (3 * self.w).sin()  # depends on w outside
        self.first = torch.randn(5, 3, dtype=D, generator=draw).requires_grad_()
        self.xs = (self.first * self.scale).cos() + self.first
        self.leaves = [self.w, self.scale, self.first]


def without_cotangents(c: Captured, x: Any) -> Any:
    total = c.y.sum()
    if x[0] > 0:
        return take_grad(total, c.w, retain_graph=True)[0] * x
    return take_grad(total, c.w, retain_graph=True)[0]


def all_outside(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        return take_grad(c.y, c.w, 2 * x, retain_graph=True)[0]
    return take_grad([c.y, c.w], [c.w], [x, x * x], retain_graph=True)[0]


def leaf_and_what_depends_on_it(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        of_y, of_w = take_grad(c.y * c.w, [c.y, c.w], x, retain_graph=True)
        return of_y + of_w
    return take_grad(c.y, [c.y], x.detach(), retain_graph=True)[0]


def computed_before_the_branch(c: Captured, x: Any) -> Any:
    z = c.y * x
    if x[0] > 0:
        return take_grad(z.sum(), c.w, retain_graph=True)[0]
    return take_grad((z * x).sum(), c.w, retain_graph=True)[0]


def branches_in_branches(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        z = x * c.w
        if x[1] > 0:
            return take_grad((z * c.y).sum(), c.w, retain_graph=True)[0]
        return take_grad((z**2).sum(), [c.w], retain_graph=True)[0]
    return take_grad((x * c.y).sum(), [c.w], retain_graph=True)[0]


def loop_of_several_lengths(c: Captured, x: Any) -> Any:
    z, total = x * c.w, torch.zeros((), dtype=D)
    while z.sum() < 6:
        z = z + c.w.abs()
        total = total + take_grad((z * c.y).sum(), c.w, retain_graph=True)[0].sum()
    return total


def second_derivative(c: Captured, x: Any) -> Any:
    z = c.w * x
    if x[0] > 0:
        g = take_grad((z**3).sum(), c.w, create_graph=True)[0]
        return take_grad((g * c.w).sum(), c.w)[0]
    return take_grad(z.sum(), c.w)[0]


def kept_graph(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        return take_grad((c.y * x).sum(), c.w, create_graph=True)[0] * c.w
    return take_grad((c.w * c.w * x).sum(), c.w, create_graph=True)[0] * c.w


def history_of_the_example(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        return take_grad(x.sum(), c.scale, retain_graph=True)[0]
    return take_grad((x**2).sum(), c.scale, retain_graph=True)[0]


def all_examples_before_the_call(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        return take_grad((x * x * c.w).sum(), c.first, retain_graph=True)[0]
    return take_grad((x**2 * c.y).sum(), c.first, retain_graph=True)[0]


def both_histories(c: Captured, x: Any) -> Any:
    z = x * c.w
    if x[0] > 0:
        of_scale, of_w = take_grad(z.sum(), [c.scale, c.w], retain_graph=True)
        return of_scale + of_w.sum()
    of_scale, of_w = take_grad((c.y * z).sum(), [c.scale, c.w], retain_graph=True)
    return of_scale * 2 + of_w[0]


def name_of_a_captured_tensor(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        same = c.w.contiguous()
        return take_grad((same * x).sum(), same)[0]
    return take_grad((c.w * x).sum(), c.w)[0]


def unused(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        of_w, none = take_grad(
            c.y, [c.w, c.scale], x.detach(), retain_graph=True, allow_unused=True
        )
        return of_w if none is None else none
    of_w, zeros = take_grad((x.detach() * c.w).sum(), [c.w, c.scale], materialize_grads=True)
    return of_w + zeros


def several_cotangents_at_once(c: Captured, x: Any) -> Any:
    if x[0] > 0:
        basis = torch.eye(3, dtype=D)
        rows = take_grad(c.y * c.w, c.w, basis, is_grads_batched=True, retain_graph=True)[0]
        return rows.sum(0) * x
    return take_grad((c.w * c.w * x).sum(), c.w)[0]


def without_recording(c: Captured, x: Any) -> Any:
    with torch.no_grad():
        if x[0] > 0:
            return take_grad(c.y, [c.w], x, retain_graph=True)[0]
        return take_grad(c.y, [c.w], 2 * x, retain_graph=True)[0] * 2


def inner_vmap(c: Captured, x: Any) -> Any:
    def of_entry(a: Any) -> Any:
        if a > 0:
            return take_grad((c.y * a).sum(), c.w, retain_graph=True)[0]
        return take_grad((c.w * a).sum(), c.w)[0]

    return vmap(of_entry)(x).sum(0)


def inner_vmap_of_a_value_of_both_branches(c: Captured, x: Any) -> Any:
    h = (x * c.w).sin() if x[0] > 0 else x * c.w * c.y

    def of_row(row: Any) -> Any:
        if row[0] > 0:
            return take_grad((h * row).sum(), c.w, retain_graph=True)[0]
        return take_grad((h * row**2).sum(), c.w, retain_graph=True)[0]

    return vmap(of_row)(c.first.detach())


def inner_grad(c: Captured, x: Any) -> Any:
    def total(a: Any) -> Any:
        if a[0] > 0:
            return (take_grad((c.y * a).sum(), c.w, retain_graph=True)[0] * a).sum()
        return (take_grad((c.w * a).sum(), c.w, create_graph=True)[0] * a).sum()

    return grad(total)(x)


BODIES: list[Callable[[Captured, Any], Any]] = [
    without_cotangents,
    all_outside,
    leaf_and_what_depends_on_it,
    computed_before_the_branch,
    branches_in_branches,
    loop_of_several_lengths,
    second_derivative,
    kept_graph,
    history_of_the_example,
    all_examples_before_the_call,
    both_histories,
    name_of_a_captured_tensor,
    unused,
    several_cotangents_at_once,
    without_recording,
    inner_vmap,
    inner_vmap_of_a_value_of_both_branches,
    inner_grad,
]


def _compute_outer_gradients(c: Captured, result: Any) -> Any:
    if not result.requires_grad:
        return None
    weights = torch.linspace(1, 2, result.numel(), dtype=D).view(result.shape)
    return take_grad((result * weights).sum(), c.leaves, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_are_those_of_the_loop(body, dim):
    c = Captured()
    xs = c.xs.movedim(0, dim)
    assert {True, False} == {bool(x[0] > 0) for x in c.xs}
    expected = loop(lambda x: body(c, x), dim)(xs)
    found = vmap(lambda x: body(c, x), dim)(xs)
    assert not difference(found, expected)
    assert not difference(_compute_outer_gradients(c, found), _compute_outer_gradients(c, expected))


@pytest.mark.parametrize("create_graph", [False, True])
def test_ones_are_the_cotangent_where_none_is_given(create_graph):
    c = Captured()
    total = c.y.sum()

    def body(x: Any) -> Any:
        return take_grad(total, c.w, retain_graph=True, create_graph=create_graph)[0] * x

    assert not difference(vmap(body)(c.xs), loop(body)(c.xs))


def backward_in_both_branches(c: Captured, x: Any) -> None:
    if x[0] > 0:
        (x * c.w).sum().backward(retain_graph=True)
    else:
        (x * c.y).sum().backward(retain_graph=True)


def backward_in_a_loop(c: Captured, x: Any) -> None:
    step = 0
    while x.sum() > step:
        step += 1
        torch.autograd.backward((x * c.y).sum() * step, retain_graph=True)


def backward_to_some_inputs(c: Captured, x: Any) -> None:
    if x[0] > 0:
        (x * c.w).sum().backward(retain_graph=True, inputs=[c.scale])
    else:
        (x * c.y).sum().backward(retain_graph=True, inputs=[c.w, c.scale])


def backward_through_a_retained_gradient(c: Captured, x: Any) -> None:
    z = x * c.w
    z.retain_grad()
    if x[0] > 0:
        (z**2).sum().backward(retain_graph=True)
    else:
        (z * c.y).sum().backward(retain_graph=True)
    assert z.grad is not None


@pytest.mark.parametrize(
    "body",
    [
        backward_in_both_branches,
        backward_in_a_loop,
        backward_to_some_inputs,
        backward_through_a_retained_gradient,
    ],
)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_backward_accumulates_on_leaves_as_the_loop_does(body, has_gradients):
    def run(call: Callable) -> list[Any]:
        c = Captured()
        for leaf in c.leaves if has_gradients else ():
            leaf.grad = torch.ones_like(leaf)

        def mapped(x: Any) -> Any:
            body(c, x)
            return x.detach()

        call(mapped)(c.xs)
        return [leaf.grad for leaf in c.leaves]

    found = run(vmap)
    assert {*map(type, found)} <= {torch.Tensor, type(None)}
    assert not difference(found, run(loop))
