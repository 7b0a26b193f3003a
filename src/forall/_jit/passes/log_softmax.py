"""A log-softmax of many rows of few entries, of which torch's kernel takes one row at a time.

Along a first dim it takes a vector of rows at a time, so there the rows are copied to columns, and
back: a third of the time of ten classes. Where a row has fewer entries than a vector of the CPU's
both sum them one after the other, so each bit is the same; which is tried, once. The last rows,
fewer than a vector has, would be taken one by one, by another `exp`: there are none.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._jit.graph import (
    Layout,
    Node,
    Ref,
    Value,
    dense_strides,
)
from forall._jit.passes.bitwise_check import alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._jit.graph import Program

aten = torch.ops.aten
_FORWARD = aten._log_softmax.default
_BACKWARD = aten._log_softmax_backward_data.default
_VECTOR = 64  # rows, of which no kernel takes more at a time
# From how many entries of a row, and of all, it is worth the copies (measured on one CPU).
_LEAST = {_FORWARD: (2, 1024), _BACKWARD: (5, 2048)}


def along_columns(program: Program, back: list[Node]) -> None:
    """Let rows of few entries be columns."""
    second, written = set(map(id, back)), program.written()
    known: dict[Any, int] = {}  # the columns that a value was made of
    nodes = []
    for node in program.nodes:
        if node.op not in _LEAST or not _fits(program, node):
            nodes.append(node)
            continue
        half = id(node) in second
        made = _in_columns(program, node, {n: m for (n, h), m in known.items() if h == half})
        if node.outs not in written:
            known[node.outs, half] = made[-2].args[0].n
        back += made if half else []
        nodes += made
    program.nodes[:] = nodes


def _fits(program: Program, node: Node) -> bool:
    if len(node.args) != len(node.op._schema.arguments):
        return False  # some come by their names
    layouts = [program.values[n].layout for n in (*node.reads(), node.outs)]
    shape, (few, least) = layouts[0].shape, _LEAST[node.op]
    entries, rows = prod(shape), prod(shape[:-1])
    return (
        len(shape) > 1
        and node.args[-2] in (-1, len(shape) - 1)
        and node.args[-1] in (False, layouts[0].dtype)
        and shape[-1] >= few
        and entries >= least
        and rows % _VECTOR == 0
        and all(x._replace(offset=0) == _dense(shape, layouts[0]) for x in layouts)
        and layouts[0].device == torch.device("cpu")
        and layouts[0].dtype in (torch.float32, torch.float64)
        and _have_the_bits(node.op, shape[-1], layouts[0].dtype)
    )


def _dense(shape: Sequence[int], like: Layout) -> Layout:
    where = tuple(shape), dense_strides(shape), 0
    return Layout(*where, like.dtype, like.device, conj=False, neg=False)


def _in_columns(program: Program, node: Node, known: dict[int, int]) -> list[Node]:
    """The same along the first dim, of copies: ``known`` are such that there are."""
    layout = program.values[node.outs].layout
    rank = len(layout.shape)
    there, here = [rank - 1, *range(rank - 1)], [*range(1, rank), 0]
    columns = _dense([layout.shape[d] for d in there], layout)
    nodes: list[Node] = []

    def do(op: Any, layout: Layout, *args: Any, root: int | None = None, **kwargs: Any) -> int:
        n = len(program.values)
        program.values.append(Value(layout, n if root is None else root))
        nodes.append(Node(op, args, kwargs, n))
        return n

    def turned(n: int, order: list[int]) -> int:
        value = program.values[n]
        shape, strides = ([x[d] for d in order] for x in value.layout[:2])
        layout = value.layout._replace(shape=tuple(shape), strides=tuple(strides))
        return do(aten.permute.default, layout, Ref(n), order, root=value.root)

    def copied(n: int, layout: Layout) -> int:
        return do(aten.clone.default, layout, Ref(n), memory_format=torch.contiguous_format)

    *tensors, _, last = node.args
    given = [known.get(a.n) or copied(turned(a.n, there), columns) for a in tensors]
    n = do(node.op, columns, *map(Ref, given), 0, last)
    copied(turned(n, here), layout)
    nodes[-1].outs = node.outs
    program.values.pop()
    return nodes


@cache
def _have_the_bits(op: Any, entries: int, dtype: torch.dtype) -> bool:
    """Whether rows and columns of so many entries are summed alike."""
    random = torch.Generator().manual_seed(0)
    given = range(1 if op is _FORWARD else 2)
    rows = [torch.randn(4 * _VECTOR, entries, generator=random, dtype=dtype) for _ in given]
    last = False if op is _FORWARD else dtype
    with alone():
        along = op(*(x.t().contiguous() for x in rows), 0, last).t()
        return torch.equal(op(*rows, 1, last), along)
