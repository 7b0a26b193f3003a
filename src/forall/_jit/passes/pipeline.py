"""Optimization passes over a program; without ``fastmath`` each keeps every bit of the results.

NOTE [what passes may not do]
    Passes look at layouts, and at which memory is shared; never at a program's data. ``x + 0``,
    ``1 * x`` and ``zeros @ x`` stay: they promote dtypes, clear the sign of a zero, and turn inf
    into nan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import without_history
from forall._compat.op_schema import facts
from forall._jit.graph import Node, with_refs
from forall._jit.passes.cse import MOST, copies, twins
from forall._jit.passes.log_softmax import along_columns
from forall._jit.passes.matmul_order import biased, reordered
from forall._jit.passes.peephole import in_place, numbers, turned
from forall._jit.passes.view_chains import views
from forall._jit.tracing.uninitialized import OF_LAYOUT, UNFILLED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forall._jit.graph import Program

aten = torch.ops.aten
_ROUNDS = 16  # rounds of the fixed point: a write may show that an earlier operator varies
_POWER = aten.pow.Tensor_Scalar


def clean(program: Program, back: list[Node] | None = None, *, fastmath: bool = False) -> Program:
    """Run all passes on a program, each where the passes before it have made it useful.

    ``back`` are the operators of the backward half, which runs later than the others. Passes that
    replace operators of this half append the new ones to ``back``.
    """
    for _ in cleaning(program, back, fastmath=fastmath):
        pass
    return program


def cleaning(
    program: Program, back: list[Node] | None = None, *, fastmath: bool = False
) -> Iterator[None]:
    """Run the passes of `clean` as a generator, one per step."""
    back = [] if back is None else back
    yield constants(program)
    yield dead(program)
    yield views(program)
    yield copies(program, back)
    yield twins(program, back)
    before = len(program.values)
    yield reordered(program, back, fastmath=fastmath)
    yield biased(program, back, fastmath=fastmath)
    yield along_columns(program, back)
    if len(program.values) > before:
        yield constants(program)
    yield views(program)
    yield dead(program)
    yield numbers(program)
    yield turned(program)
    yield in_place(program, back)


def constants(program: Program) -> None:
    """Fold constants: run once what has the same result in each call."""
    nodes = _constant(program)
    env = dict(program.constants)
    with without_history(), torch.no_grad():
        for node in nodes:
            given = with_refs((node.args, node.kwargs), lambda r: _value(program, env, r.n))
            _bind(node.outs, node.op(*given[0], **given[1]), env)
    program.constants.update(env)
    gone = set(map(id, nodes))
    program.nodes[:] = [node for node in program.nodes if id(node) not in gone]


def _constant(program: Program) -> list[Node]:
    """The operators on constants alone, whose memory no other operator writes, or reads before."""
    roots = [v.root for v in program.values]
    # Results are made anew in each call: the caller may write into them.
    varying = {roots[n] for n in (*program.inputs, *program.captured, *program.outputs)}
    for _ in range(_ROUNDS):
        before = len(varying)
        nodes = []
        early: set[int] = set()  # memory that operators on other values have read so far
        for node in program.nodes:
            read = {roots[n] for n in node.reads()}
            made = {roots[n] for n in node.makes()}
            if _is_constant(program, node, read & varying) and not made & varying:
                if early.isdisjoint(roots[n] for n in node.writes()):
                    nodes.append(node)
                    continue
                varying |= read
            varying |= made | {roots[n] for n in node.writes()}
            early |= read
        if len(varying) == before:
            return nodes
    return []


def _is_constant(program: Program, node: Node, varying: set[int]) -> bool:
    if facts(node.op).seeded or node.op in UNFILLED:
        return False
    of_layout = node.op in OF_LAYOUT or (node.op is _POWER and node.args[1:] == (0,))  # ones
    if varying and not of_layout:
        return False
    return all(program.values[n].layout.room <= MOST for n in node.makes())


def _value(program: Program, env: dict[int, torch.Tensor], n: int) -> torch.Tensor:
    if n in env:
        return env[n]
    shape, strides, _, dtype, device, *_ = program.values[n].layout  # the operator reads no more
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _bind(outs: Any, made: Any, env: dict[int, torch.Tensor]) -> None:
    if isinstance(outs, int):
        env[outs] = made
    elif isinstance(outs, (tuple, list)):
        for o, m in zip(outs, made, strict=True):
            _bind(o, m, env)


def dead(program: Program) -> None:
    """Eliminate dead code: operators that neither lead to a result nor have a side effect.

    An error that depends on the data is a side effect too.
    """
    roots = [v.root for v in program.values]
    lasting = {roots[n] for n in (*program.inputs, *program.captured)}
    needed = set(program.outputs)
    read = {roots[n] for n in needed} | lasting
    nodes = []
    for node in reversed(program.nodes):
        used = not needed.isdisjoint(node.makes()) or any(roots[n] in read for n in node.writes())
        called = node.outs is None or program.may_raise(node)  # for its error
        if used or called or facts(node.op).seeded:
            nodes.append(node)
            needed.update(node.reads())
            read.update(roots[n] for n in node.reads())
    program.nodes[:] = reversed(nodes)
    for given in (program.constants, program.captured):
        for n in given.keys() - needed:
            del given[n]
