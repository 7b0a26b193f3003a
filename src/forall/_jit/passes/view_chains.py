"""A pass over views: it removes views that change nothing, and collapses chains of views."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import get_facts
from forall._jit.graph import OpNode, Ref

if TYPE_CHECKING:
    from forall._jit.graph import Program

# Views that change shape, strides and offset alone: same memory, same dtype, no conjugation.
_VIEWS = frozenset(
    {
        "detach",
        "alias",
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "select",
        "slice",
        "narrow",
        "as_strided",
        "diagonal",
        "movedim",
        "swapaxes",
        "flatten",
        "unflatten",
        "view_as",
        "expand_as",
        "contiguous",
        "_reshape_alias",
        "lift_fresh",
        "numpy_T",
        "mT",
    }
)
_LONGEST = 16  # views of a chain that are compared with its last layout


@cache
def is_pure_view(op: Any) -> bool:
    return (
        op.namespace == "aten"
        and op.overloadpacket.__name__ in _VIEWS
        and not get_facts(op).mutates
    )


def collapse_views(program: Program) -> None:
    """Replace a view by a value with the same layout in its chain, and a chain by one view."""
    made: dict[int, OpNode] = {}  # the view that made a value
    origin: dict[int, int] = {}  # the base of such a value
    bases: set[int] = set()  # new memory of operators, with the same layout in each call
    other: dict[int, int] = {}
    outputs = {*program.outputs}
    pinned = {*program.inputs, *program.captured, *program.constants, *outputs}
    for node in program.nodes:
        node.replace_inputs(other)
        n = node.outs
        cut = node.op is torch.ops.aten.detach.default and n in outputs
        if cut or not is_pure_view(node.op) or not isinstance(n, int):
            bases.update(m for m in node.makes() if program.values[m].root == m)
            continue
        first = node.args[0].n
        if program.values[first].root != program.values[n].root:
            continue  # a copy, which `reshape` may make
        if program.values[first].layout.dtype != program.values[n].layout.dtype:
            continue  # other entries
        chain = [first]
        while chain[-1] in made and len(chain) < _LONGEST:
            chain.append(made[chain[-1]].args[0].n)
        layout = program.values[n].layout
        twin = next((m for m in chain if program.values[m].layout == layout), None)
        if twin is not None and not (n in outputs and twin in pinned):
            other[n] = twin
            continue
        made[n] = node
        base = origin[n] = origin.get(first, first)
        known = base in bases  # others may have another storage offset in each call
        if base != first and (known or program.values[base].layout.offset == layout.offset):
            node.op = torch.ops.aten.as_strided.default
            node.args = (Ref(base), layout.shape, layout.strides)
            node.args += (layout.offset,) if known else ()
            node.kwargs = {}
    program.outputs[:] = [other.get(n, n) for n in program.outputs]
