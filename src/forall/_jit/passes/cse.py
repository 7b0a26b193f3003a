"""Common-subexpression elimination: passes that remove copies and repeated operators.

NOTE [one value in the place of two]
    Two tensors with the same bits must stay two where a user can tell them apart: if either is
    written into, if one is returned, or if one is saved for backward and the other is returned. So
    memory that is written into stays as it is. So do results, except for a copy of a value that
    nothing else reads.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import get_facts
from forall._jit.graph import OpNode, Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from forall._jit.graph import Program

aten = torch.ops.aten
MOST_ENTRIES = 1 << 16  # entries of the largest value that is worth keeping
_COPIES = {aten.clone.default, aten._to_copy.default, aten.pow.Tensor_Scalar}
# Operators that are never merged: their memory is written into, or uninitialized.
_NEVER_MERGED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "alias"}
_DRAWING = {"dropout", "dropout_p", "train"}
_PLAIN_CLASSES = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def remove_copies(program: Program, back: Collection[OpNode] = ()) -> None:
    """Remove copies that have the layout of the original, where the two need not be two."""
    values = program.values
    written = program.find_written_roots()
    outside = {values[n].root for n in (*program.inputs, *program.captured, *program.constants)}
    leaves = {values[n].root for n in program.outputs}
    joining = RootMerger(program)
    readers = Counter(r for node in program.nodes for r in {values[n].root for n in node.reads()})
    other: dict[int, int] = {}
    kept = []
    for node in program.nodes:
        node.replace_inputs(other)
        kept.append(node)
        n, a = node.outs, _find_copied_value(node)
        if a is None or values[a].layout != values[n].layout:
            continue
        mine, its = values[n].root, values[a].root
        shown = mine in leaves and (its in outside | leaves or readers[its] > 1)
        if shown or {mine, its} & written or (back and its in outside):
            continue
        kept.pop()
        other[n] = a
        readers[its] += readers[mine] - 1
        if mine in leaves:
            leaves.add(its)
        joining(mine, its)
    program.nodes[:] = kept
    program.outputs[:] = [other.get(n, n) for n in program.outputs]


class RootMerger:
    """A merger of memory roots: values that share memory with one root move to another."""

    def __init__(self, program: Program) -> None:
        self.values = program.values
        self.sharing: dict[int, list[int]] = {}  # the values of each root
        self.add_values(0)

    def add_values(self, first: int) -> None:
        """Add the values from number ``first`` on, which are new."""
        for n in range(first, len(self.values)):
            self.sharing.setdefault(self.values[n].root, []).append(n)

    def __call__(self, mine: int, its: int) -> None:
        if mine == its:
            return
        numbers = self.sharing.pop(mine, [])
        for n in numbers:
            self.values[n] = self.values[n]._replace(root=its)
        self.sharing.setdefault(its, []).extend(numbers)


def _find_copied_value(node: OpNode) -> int | None:
    """The value that an operator copies, None if it does not copy."""
    if node.op not in _COPIES or not isinstance(node.outs, int):
        return None
    if node.op is aten.pow.Tensor_Scalar and node.args[1:] != (1,):  # torch copies for x ** 1
        return None
    return node.args[0].n


def eliminate_duplicates(program: Program, back: Collection[OpNode] = ()) -> None:
    """Compute once what is computed twice (CSE), unless the result is large to keep.

    A checkpoint computes large values twice on purpose.
    """
    values = program.values
    written = program.find_written_roots()
    leaves = {values[n].root for n in program.outputs}
    second = set(map(id, back))
    joining = RootMerger(program)
    known: dict[Any, OpNode] = {}
    other: dict[int, int] = {}
    kept = []
    for node in program.nodes:
        node.replace_inputs(other)
        made = [*node.makes()]
        roots = {values[n].root for n in made}
        key = _make_merge_key(node)
        if (
            key is None
            or roots & leaves
            or any(values[n].root in written for n in (*made, *node.reads()))
            or any(values[n].root == n and not _is_small(program, n) for n in made)
        ):
            kept.append(node)
            continue
        twin = known.setdefault((key, id(node) in second), node)
        if twin is node:
            kept.append(node)
            continue
        for n, m in zip(made, twin.makes(), strict=True):
            other[n] = m
            if values[n].root == n:
                joining(n, values[m].root)
    program.nodes[:] = kept


def _is_small(program: Program, n: int) -> bool:
    return prod(program.values[n].layout.shape) <= MOST_ENTRIES


def _make_merge_key(node: OpNode) -> Any:
    """A key that is equal for two operators with the same result; None if they never merge."""
    fact = get_facts(node.op)
    if fact.seeded or node.writes() or node.op.namespace != "aten":
        return None
    if not _DRAWING.isdisjoint(fact.names):  # composite ones have no tag that says so
        return None
    if node.op.overloadpacket.__name__ in _NEVER_MERGED:
        return None
    try:
        return node.op, freeze_arguments(node.args), freeze_arguments(node.kwargs)
    except TypeError:
        return None


def freeze_arguments(a: Any, of_value: Callable[[int], Any] = int) -> Any:
    """Return a hashable key of a tree of arguments; `TypeError` for an argument of unknown type.

    ``of_value`` makes the key of a value, which is the value's number as a rule.
    """
    if type(a) is Ref:
        return Ref, of_value(a.n)
    if isinstance(a, (tuple, list)):
        return type(a) is list, tuple([freeze_arguments(b, of_value) for b in a])
    if isinstance(a, dict):
        return tuple([(k, freeze_arguments(b, of_value)) for k, b in a.items()])
    if isinstance(a, _PLAIN_CLASSES):
        return type(a), repr(a)  # 0.0 is not -0.0
    raise TypeError
