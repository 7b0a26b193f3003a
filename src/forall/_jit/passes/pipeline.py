"""Optimization passes over a program; without ``fastmath`` each keeps every bit of the results.

NOTE [what passes may not do]
    Passes look at layouts, and at which memory is shared; never at a program's data. ``x + 0``,
    ``1 * x`` and ``zeros @ x`` stay: they promote dtypes, clear the sign of a zero, and turn inf
    into nan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._compat.dispatch_state import without_history
from forall._compat.op_schema import get_facts
from forall._jit.graph import OpNode, bind_outs, map_refs
from forall._jit.passes.cse import MOST_ENTRIES, eliminate_duplicates, remove_copies
from forall._jit.passes.log_softmax import transpose_log_softmax
from forall._jit.passes.matmul_order import fuse_bias, reorder_products
from forall._jit.passes.peephole import (
    canonicalize_transposes,
    lift_scalar_operands,
    reuse_operand_memory,
)
from forall._jit.passes.view_chains import collapse_views
from forall._jit.tracing.uninitialized import LAYOUT_ONLY_OPS, UNINITIALIZED_OPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forall._jit.graph import Program

aten = torch.ops.aten
_MOST_ROUNDS = 16  # rounds of the fixed point: a write may show that an earlier operator varies
_POWER = aten.pow.Tensor_Scalar


def iter_passes(
    program: Program, back: list[OpNode] | None = None, *, fastmath: bool = False
) -> Iterator[None]:
    """Run all passes on a program as a generator, one per step.

    Each runs where the passes before it have made it useful. ``back`` are the operators of the
    backward half, which runs later than the others. Passes that replace operators of this half
    append the new ones to ``back``.
    """
    back = [] if back is None else back
    yield fold_constants(program)
    yield program.eliminate_dead_code()
    yield collapse_views(program)
    yield remove_copies(program, back)
    yield eliminate_duplicates(program, back)
    before = len(program.values)
    yield reorder_products(program, back, fastmath=fastmath)
    yield fuse_bias(program, back, fastmath=fastmath)
    yield transpose_log_softmax(program, back)
    if len(program.values) > before:
        yield fold_constants(program)
    yield collapse_views(program)
    yield program.eliminate_dead_code()
    yield lift_scalar_operands(program)
    yield canonicalize_transposes(program)
    yield reuse_operand_memory(program, back)


def fold_constants(program: Program) -> None:
    """Fold constants: run once what has the same result in each call."""
    nodes = _find_constant_nodes(program)
    env = dict(program.constants)
    with without_history(), torch.no_grad():
        for node in nodes:
            given = map_refs((node.args, node.kwargs), lambda r: _get_value(program, env, r.n))
            bind_outs(node.outs, node.op(*given[0], **given[1]), env)
    program.constants.update(env)
    gone = set(map(id, nodes))
    program.nodes[:] = [node for node in program.nodes if id(node) not in gone]


def _find_constant_nodes(program: Program) -> list[OpNode]:
    """The operators on constants alone, whose memory no other operator writes, or reads before."""
    roots = [v.root for v in program.values]
    # Results are made anew in each call: the caller may write into them.
    varying = {roots[n] for n in (*program.inputs, *program.captured, *program.outputs)}
    for _ in range(_MOST_ROUNDS):
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


def _is_constant(program: Program, node: OpNode, varying: set[int]) -> bool:
    if get_facts(node.op).has_effect or node.op in UNINITIALIZED_OPS:
        return False
    of_layout = node.op in LAYOUT_ONLY_OPS or (node.op is _POWER and node.args[1:] == (0,))  # ones
    if varying and not of_layout:
        return False
    return all(program.values[n].layout.storage_entries <= MOST_ENTRIES for n in node.makes())


def _get_value(program: Program, env: dict[int, torch.Tensor], n: int) -> torch.Tensor:
    if n in env:
        return env[n]
    shape, strides, _, dtype, device, *_ = program.values[n].layout  # the operator reads no more
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
