"""Derivatives of functions whose examples diverge are the loop's, outside and inside."""

from __future__ import annotations

import pytest
import torch

import forall
from divergence.functions import CASES
from divergence.truth import (
    KEY,
    flat,
    for_each,
    gradient,
    jacobian,
    leaves,
    looped,
    of_copies,
    options,
    total,
    wanted,
)
from forall._core.errors import DataDependentError
from oracle import difference

REVERSE = [name for name, case in CASES.items() if case.grads]
# Its backward asks what examples answer differently, which nobody can run apart after the call.
OUTSIDE = [name for name in REVERSE if name != "backward_with_a_branch"]
FORWARD = [name for name in REVERSE if CASES[name].forward]
# A second derivative needs functions that are not linear between their tests.
SECOND = (
    "if_else",
    "and_guards_its_right_side",
    "while_with_walrus",
    "newton",
    "bisection_with_early_return",
    "recursive_adaptive_quadrature",
    "generator",
    "mask_written_with_as_many",
    "nonzero",
    "list_under_two_names",
    "an_error_that_carries_a_value",
    "root_before_the_test",
    "argument_written_before_and_after",
)


def all_at_once(case, f, stacks, reduce):
    """A reduction of all examples' results, and the stacks with a derivative."""
    xs = leaves(case, stacks)
    given = [x.clone() for x in xs]
    result = f(*given)
    return reduce((result, given) if case.writes else result), wanted(case, xs)


def by_rows(case):
    """The loop, on rows in memory of their own: slices of one stack share its version."""

    def run(*stacks):
        rows = [[t.clone() for t in stack] for stack in stacks]
        plain = looped(lambda i: case.plain(*(r[int(i)] for r in rows)), [0], key_of(case))
        result = plain(torch.arange(len(stacks[0])))
        for stack, left in zip(stacks, rows, strict=True):
            if case.writes:
                stack.copy_(torch.stack(left))
        return result

    return run


def key_of(case):
    return KEY if case.keyed else None


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [2, 13])
@pytest.mark.parametrize("name", OUTSIDE)
def test_gradient_outside(name, size):
    case = CASES[name]
    stacks = case.stacks(size, seed=1)
    truth = gradient(*all_at_once(case, by_rows(case), stacks, total))
    mapped = forall.vmap(case.f, **options(case))
    told = difference(gradient(*all_at_once(case, mapped, stacks, total)), truth)
    assert told is None, told


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", OUTSIDE)
def test_transform_outside(name):
    case = CASES[name]
    stacks = case.stacks(7, seed=2)
    truth = gradient(*all_at_once(case, by_rows(case), stacks, total))
    mapped = of_copies(case, forall.vmap(case.f, **options(case)), total)
    told = difference(list(forall.grad(mapped, case.grads)(*stacks)), truth)
    assert told is None, told


def test_a_branch_in_a_backward_pass_after_the_call_is_refused():
    f = CASES["backward_with_a_branch"].f
    xs = torch.tensor([1.0, -1.0, 0.5], requires_grad=True)
    with pytest.raises(DataDependentError) as caught:
        forall.vmap(f)(xs).sum().backward()
    assert "return g * 2 if x > 0 else g * x" in str(caught.value)
    assert any("vmap(grad(f))" in note for note in caught.value.__notes__)
    alike = torch.tensor([1.0, 2.0, 0.5], requires_grad=True)
    forall.vmap(f)(alike).sum().backward()
    assert alike.grad is not None
    assert alike.grad.tolist() == forall.vmap(forall.grad(f))(alike.detach()).tolist()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [1, 2, 13])
@pytest.mark.parametrize("name", REVERSE)
def test_vmap_of_grad(name, size):
    case = CASES[name]
    stacks = case.stacks(size, seed=2)

    def derive(f, xs):
        return gradient(of_copies(case, f, total)(*xs), wanted(case, xs))

    truth = for_each(case, stacks, derive)
    slope = forall.grad(of_copies(case, case.f, total), case.grads)
    told = difference(list(forall.vmap(slope, **options(case))(*stacks)), truth)
    assert told is None, told


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FORWARD)
def test_vmap_of_jacfwd(name):
    case = CASES[name]
    stacks = case.stacks(7, seed=3)

    def derive(f, xs):
        return jacobian(of_copies(case, f, flat)(*xs), wanted(case, xs))

    truth = for_each(case, stacks, derive)
    slope = forall.jacfwd(of_copies(case, case.f, flat), case.grads)
    told = difference(list(forall.vmap(slope, **options(case))(*stacks)), truth)
    assert told is None, told


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FORWARD)
def test_jacfwd_of_vmap(name):
    case = CASES[name]
    stacks = case.stacks(4, seed=4)
    truth = jacobian(*all_at_once(case, by_rows(case), stacks, flat))
    mapped = of_copies(case, forall.vmap(case.f, **options(case)), flat)
    told = difference(list(forall.jacfwd(mapped, case.grads)(*stacks)), truth)
    assert told is None, told


@pytest.mark.parametrize("name", SECOND)
def test_vmap_of_hessian(name):
    case = CASES[name]
    stacks = case.stacks(7, seed=5)

    def derive(f, xs):
        (x,) = wanted(case, xs)
        y = of_copies(case, f, total)(*xs)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return jacobian(g.reshape(-1), [x])[0].reshape((*x.shape, *x.shape))

    truth = for_each(case, stacks, derive)
    second = forall.hessian(of_copies(case, case.f, total))
    told = difference(forall.vmap(second, **options(case))(*stacks), truth)
    assert told is None, told


@pytest.mark.parametrize("name", ["root_in_a_branch", "root_before_the_test"])
def test_no_nan_from_the_way_not_taken(name):
    xs = CASES[name].stacks(13)[0].requires_grad_()
    forall.vmap(CASES[name].f)(xs).sum().backward()
    assert xs.grad is not None
    assert xs.grad.isfinite().all()
    assert forall.vmap(forall.grad(CASES[name].f))(xs.detach()).isfinite().all()
