"""Functions whose examples diverge, under a vmap inside a vmap."""

from __future__ import annotations

import pytest
import torch

import forall
from divergence.cases import between
from divergence.functions import CASES
from divergence.truth import KEY, copies, looped, options
from forall import vmap
from oracle import difference

PURE = [name for name, case in CASES.items() if not case.writes]
OF_TWO = [name for name in PURE if len(CASES[name].makers) > 1]
YS = between(-2.0, 2.0)(3, 0, 1)


def inner_loop(case, f, in_dims):
    """A loop inside a loop: its key is the next draw of the example around it."""

    def run(*stacks):
        key = forall.random.next_key() if case.keyed else None
        return looped(f, in_dims, key)(*stacks)

    return run


def outer_loop(case, f, in_dims):
    return looped(f, in_dims, KEY if case.keyed else None)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_both_mapped(name):
    case = CASES[name]
    stacks = [t.reshape(3, 4, *t.shape[1:]) for t in case.stacks(12, seed=1)]
    mine, theirs = copies(stacks), copies(stacks)
    each = [0] * len(stacks)
    truth = outer_loop(case, inner_loop(case, case.plain, each), each)(*theirs)
    told = difference(vmap(vmap(case.f), **options(case))(*mine), truth)
    assert told is None, told
    assert difference(mine, theirs) is None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PURE)
def test_of_x_under_vmap_over_y(name):
    case = CASES[name]
    xs = case.stacks(5, seed=2)
    inner = inner_loop(case, case.plain, [0] * len(xs))
    truth = outer_loop(case, lambda y: (inner(*xs), y.sin()), [0])(YS)
    found = vmap(lambda y: (vmap(case.f)(*xs), y.sin()), **options(case))(YS)
    told = difference(found, truth)
    assert told is None, told


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PURE)
def test_of_x_with_a_vmap_over_y_around_it(name):
    case = CASES[name]
    xs = case.stacks(5, seed=3)

    def over_y(*x):
        return inner_loop(case, lambda y: (case.plain(*x), y.sin()), [0])(YS)

    truth = outer_loop(case, over_y, [0] * len(xs))(*xs)
    mapped = vmap(lambda *x: vmap(lambda y: (case.f(*x), y.sin()))(YS), **options(case))
    told = difference(mapped(*xs), truth)
    assert told is None, told


@pytest.mark.parametrize("first_is_inner", [True, False])
@pytest.mark.parametrize("name", OF_TWO)
def test_each_argument_at_a_level_of_its_own(name, first_is_inner):
    case = CASES[name]
    first, *rest = case.stacks(4, seed=4)
    stacks = [first, *(t[:3] for t in rest)]
    one, other = (0, *[None] * len(rest)), (None, *[0] * len(rest))
    inner, outer = (one, other) if first_is_inner else (other, one)
    truth = outer_loop(case, inner_loop(case, case.plain, inner), outer)(*stacks)
    told = difference(vmap(vmap(case.f, inner), outer, **options(case))(*stacks), truth)
    assert told is None, told


@pytest.mark.parametrize("shape", [(2, 3, 2), (1, 4, 1)])
@pytest.mark.parametrize(
    "name", ["nested_if", "newton", "collatz", "mask_read", "return_from_inner_loop"]
)
def test_three_levels(name, shape):
    case = CASES[name]
    size = int(torch.tensor(shape).prod())
    stacks = [t.reshape(*shape, *t.shape[1:]) for t in case.stacks(size, seed=5)]
    each = [0] * len(stacks)
    truth = looped(looped(looped(case.plain, each), each), each)(*stacks)
    told = difference(vmap(vmap(vmap(case.f)))(*stacks), truth)
    assert told is None, told
