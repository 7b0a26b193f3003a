"""Random programs of writes, views, reductions and autograd calls: each transform is the loop.

`FORALL_PROGRAMS` sets how many programs each of the transforms is tried on, and
`FORALL_SEED` lets hypothesis look elsewhere than where it always looks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from draws import make_generator
from forall import grad, jvp, vmap
from limits.programs import NOT_FORWARD, D, Program
from oracle import difference
from sampling import SAMPLED

PROGRAMS = os.environ.get("FORALL_PROGRAMS")
SEED = os.environ.get("FORALL_SEED")
B = 3

small = st.integers(0, 31)
programs = st.builds(
    Program,
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.tuples(small, small, small, small), min_size=1, max_size=12).map(tuple),
)


def many(test: Callable, programs: int = 100) -> Callable:
    """Run a test on so many random programs, or on a third of them in a sample."""
    few = programs // 3 if SAMPLED else programs
    options = settings(
        max_examples=int(PROGRAMS or few),
        deadline=None,
        database=None,
        derandomize=SEED is None,
        suppress_health_check=list(HealthCheck),
    )
    return options(test) if SEED is None else options(seed(int(SEED))(test))


def numbers(*shape: int) -> Tensor:
    generator = make_generator(len(shape) + sum(shape))
    return torch.randn(shape, dtype=D, generator=generator)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class of what it raises."""
    try:
        return call()
    except Exception as error:
        return error


def agree(ours: Callable[[], Any], loop: Callable[[], Any], program: Program) -> None:
    truth = outcome(loop)
    found = outcome(ours)
    if any("single memory location" in str(e) for e in (truth, found) if isinstance(e, Exception)):
        return  # torch's guess about operands that overlap, which a stack may answer otherwise
    if isinstance(truth, Exception):
        assert isinstance(found, Exception), f"{program}: the loop raises {truth!r}, we do not"
        return
    if isinstance(found, Exception):
        raise AssertionError(f"{program}: the loop has an answer") from found
    told = difference(found, truth)
    assert told is None, f"{program}: {told}"


def alone(example: Tensor) -> Tensor:
    """An example in memory of its own, laid out as it is in the stack.

    Slices of one stack share its version, so one example's writes would forbid the backward pass
    of another; and what one example leaves in the stack's graph another would find there.
    """
    room = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
    return room.copy_(example)


def examples(*stacks: Tensor) -> list[tuple[Tensor, ...]]:
    return [tuple(alone(s[i]) for s in stacks) for i in range(len(stacks[0]))]


def detached(tree: Any) -> Any:
    return [t.detach() for t in tree]


def stacked(rows: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def by_loop(call: Callable[..., list[Tensor]], *stacks: Tensor) -> list[Tensor]:
    """The results of all examples; the stacks hold what each has left in its arguments."""
    rows = examples(*stacks)
    results = detached(stacked([call(*row) for row in rows]))
    for stack, left in zip(stacks, stacked([detached(row) for row in rows]), strict=True):
        stack.copy_(left)
    return results


@many
@given(programs, st.integers(0, 2))
def test_vmap(program, axis):
    def run(mapped: bool) -> list[Tensor]:
        w = numbers(2)
        at = axis % (len(program.example) + 1)
        xs, vs = numbers(B, *program.example).movedim(0, at).contiguous(), numbers(B, 2)
        if mapped:
            out = vmap(lambda x, v: program(x, v, w), (at, 0))(xs, vs)
        else:
            out = by_loop(lambda x, v: program(x, v, w), xs.movedim(at, 0), vs)
        return [*detached(out), xs.movedim(at, 0), vs]

    agree(lambda: run(mapped=True), lambda: run(mapped=False), program)


@many
@given(programs)
def test_vmap_of_grad(program):
    def run(mapped: bool) -> list[Tensor]:
        w = numbers(2).requires_grad_()
        xs, vs = numbers(B, *program.example), numbers(B, 2)
        if mapped:
            out = vmap(grad(lambda x, v: program.number(x, v, w), (0, 1)))(xs, vs)
        else:
            out = by_loop(lambda x, v: by_torch(program, x, v, w), xs, vs)
        return [*detached(out), xs, vs]

    agree(lambda: run(mapped=True), lambda: run(mapped=False), program)


def by_torch(program: Program, x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, v)]
    y = program.number(*leaves, w)
    if not y.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    found = torch.autograd.grad(y, leaves, create_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


@many
@given(programs)
def test_grad_of_vmap(program):
    def run(mapped: bool) -> list[Tensor]:
        leaves = [numbers(B, *program.example), numbers(B, 2), numbers(2)]
        xs, vs, w = leaves = [t.requires_grad_() for t in leaves]
        if mapped:
            given = xs.clone(), vs.clone()
            ys = vmap(lambda x, v: program.number(x, v, w))(*given)
        else:
            rows = examples(xs, vs)
            ys = torch.stack([program.number(*row, w) for row in rows])
            given = stacked(rows)
        # What is written into the arguments has a derivative as well.
        total = ys.square().sum() + sum(3 * g.sin().sum() for g in given)
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        got = [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]
        return [ys.detach(), *got]

    agree(lambda: run(mapped=True), lambda: run(mapped=False), program)


def pushed(program: Program, x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    """Values and tangents, from reverse mode twice: the pull-back's own pull-back."""
    xs = [t.detach().requires_grad_() for t in (x, v)]
    values = program(*(t.clone() for t in xs), w)
    live = [y for y in values if y.requires_grad]
    cots = [torch.zeros_like(y, requires_grad=True) for y in live]
    pulled = torch.autograd.grad(live, xs, cots, create_graph=True, materialize_grads=True)
    along = sum((g * direction(t)).sum() for g, t in zip(pulled, xs, strict=True))
    found = iter(torch.autograd.grad(along, cots, materialize_grads=True) if live else ())
    return [*values, *(next(found) if y.requires_grad else torch.zeros_like(y) for y in values)]


def direction(t: Tensor) -> Tensor:
    return t.cos() + 0.5


@many
@given(programs)
def test_vmap_of_jvp(program):
    program = program.without(*NOT_FORWARD)

    def run(mapped: bool) -> list[Tensor]:
        w = numbers(2)
        xs, vs = numbers(B, *program.example), numbers(B, 2)

        def once(x: Tensor, v: Tensor) -> list[Tensor]:
            values, tangents = jvp(
                lambda x, v: program(x.clone(), v.clone(), w),
                (x, v),
                (direction(x), direction(v)),
            )
            return [*values, *tangents]

        if mapped:
            return detached(vmap(once)(xs, vs))
        return by_loop(lambda x, v: pushed(program, x, v, w), xs, vs)

    if not isinstance(outcome(lambda: run(mapped=False)), Exception):  # reverse mode refuses more
        agree(lambda: run(mapped=True), lambda: run(mapped=False), program)


@many
@given(programs)
def test_vmap_of_vmap(program):
    def run(mapped: bool) -> list[Tensor]:
        w = numbers(2)
        xs, vs = numbers(2, B, *program.example), numbers(2, 2)

        def once(x: Tensor, v: Tensor) -> list[Tensor]:
            return program(x, v * 1, w)

        if mapped:
            out = vmap(vmap(once, (0, None)))(xs, vs)
        else:
            out = by_loop(lambda x, v: by_loop(lambda x: once(x, v), x), xs, vs)
        return [*detached(out), xs, vs]

    agree(lambda: run(mapped=True), lambda: run(mapped=False), program)


if __name__ == "__main__":
    pytest.main([__file__, "-q"])
