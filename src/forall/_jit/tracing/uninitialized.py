"""Detection of uninitialized memory: values that no recorded operator has written.

Some functions of torch's in C++ make a tensor of a list (`ctc_loss` of its lengths). A dispatch
mode sees ``empty`` alone, not the data that C++ puts there. A program would read uninitialized
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._compat.op_schema import get_facts
from forall._jit.graph import find_refs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forall._jit.graph import OpNode, Value

aten = torch.ops.aten


def _collect_overloads(names: str) -> frozenset:
    packets = [getattr(aten, name) for name in names.split()]
    return frozenset(getattr(packet, o) for packet in packets for o in packet.overloads())


UNINITIALIZED_OPS = _collect_overloads("empty empty_like new_empty empty_strided new_empty_strided")
# Operators whose result depends on the layout of their argument, and not on its data.
LAYOUT_ONLY_OPS = _collect_overloads("zeros_like ones_like full_like new_zeros new_ones new_full")
# Operators that read a tensor's metadata, and not its data.
_METADATA_READERS = (
    UNINITIALIZED_OPS
    | LAYOUT_ONLY_OPS
    | _collect_overloads("rand_like randn_like randint_like _assert_tensor_metadata")
)
# Operators that write into memory, in whole or in part, without reading it, as random ones do too.
_FILL_OPS = _collect_overloads(
    """
    copy_ fill_ zero_ eye fill_diagonal_ index_put_ _index_put_impl_ index_copy_ index_fill_
    masked_fill_ masked_scatter_ scatter_ put_
    """
)


def reads_uninitialized(
    nodes: Sequence[OpNode], values: Sequence[Value], seen: Iterable[int]
) -> bool:
    """True if uninitialized memory may flow into these values, or into an assertion.

    Memory that is written after all does not count, even if it was copied before.
    """
    roots = [value.root for value in values]
    unfilled: set[int] = set()
    for node in nodes:
        made = {roots[n] for n in node.makes()}
        if node.op in UNINITIALIZED_OPS:
            unfilled |= {n for n in made if 0 not in values[n].layout.shape}
        elif unfilled and node.op not in _METADATA_READERS:
            written = {roots[n] for n in node.writes()}
            unfilled -= written if _fills_memory(node) else set()
            if any(roots[n] in unfilled for n in _list_data_reads(node)):
                if not made and not written:
                    return True
                unfilled |= made | written
    return not unfilled.isdisjoint(roots[n] for n in seen)


def _list_data_reads(node: OpNode) -> Iterator[int]:
    """The values whose data an operator reads."""
    if node.op is not aten.convolution_backward.default:
        return node.reads()
    cotangent, images, weight, *_, asked = node.args
    return find_refs((cotangent, images if asked[1] else None, weight if asked[0] else None))


def _fills_memory(node: OpNode) -> bool:
    fact = get_facts(node.op)
    return node.op in _FILL_OPS or fact.seeded or bool(fact.out_names)
