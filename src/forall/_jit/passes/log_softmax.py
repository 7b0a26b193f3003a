"""A pass for the log-softmax of many short rows, which torch's CPU kernel takes one at a time.

Along the first dim the kernel takes a vector of rows at a time. So this pass copies the rows to
columns and the result back, which takes a third of the time for ten classes. Where a row has fewer
entries than a vector of the CPU, both kernels sum the entries in order, so each bit is the same;
one trial checks that. The kernel would take the last rows, if they do not fill a vector, one by
one and by another `exp`, so the pass asks for a whole number of vectors.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._jit.graph import (
    Layout,
    OpNode,
    Ref,
    Value,
    make_contiguous_strides,
)
from forall._jit.passes.bitwise_check import disable_grad_and_casts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._jit.graph import Program

aten = torch.ops.aten
_FORWARD = aten._log_softmax.default
_BACKWARD = aten._log_softmax_backward_data.default
_VECTOR = 64  # rows that a kernel takes at a time at most
# The fewest entries of a row, and of all rows, that are worth the copies (measured on one CPU).
_LEAST = {_FORWARD: (2, 1024), _BACKWARD: (5, 2048)}


def transpose_log_softmax(program: Program, back: list[OpNode]) -> None:
    """Compute each log-softmax of short rows, and its backward, along the first dim of copies."""
    second, written = set(map(id, back)), program.find_written_roots()
    known: dict[Any, int] = {}  # the columns that a value was made of
    nodes = []
    for node in program.nodes:
        if node.op not in _LEAST or not _can_transpose(program, node):
            nodes.append(node)
            continue
        half = id(node) in second
        made = _run_along_columns(program, node, {n: m for (n, h), m in known.items() if h == half})
        if node.outs not in written:
            known[node.outs, half] = made[-2].args[0].n
        back += made if half else []
        nodes += made
    program.nodes[:] = nodes


def _can_transpose(program: Program, node: OpNode) -> bool:
    if len(node.args) != len(node.op._schema.arguments):
        return False  # some are keyword arguments
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
        and all(x._replace(offset=0) == _make_dense_layout(shape, layouts[0]) for x in layouts)
        and layouts[0].device == torch.device("cpu")
        and layouts[0].dtype in (torch.float32, torch.float64)
        and _has_same_bits(node.op, shape[-1], layouts[0].dtype)
    )


def _make_dense_layout(shape: Sequence[int], like: Layout) -> Layout:
    where = tuple(shape), make_contiguous_strides(shape), 0
    return Layout(*where, like.dtype, like.device, conj=False, neg=False)


def _run_along_columns(program: Program, node: OpNode, known: dict[int, int]) -> list[OpNode]:
    """Return operators that do the same along the first dim of transposed copies.

    ``known`` maps values to their transposed copies, where there are some already.
    """
    layout = program.values[node.outs].layout
    rank = len(layout.shape)
    there, here = [rank - 1, *range(rank - 1)], [*range(1, rank), 0]
    columns = _make_dense_layout([layout.shape[d] for d in there], layout)
    nodes: list[OpNode] = []

    def add_node(
        op: Any, layout: Layout, *args: Any, root: int | None = None, **kwargs: Any
    ) -> int:
        n = len(program.values)
        program.values.append(Value(layout, n if root is None else root))
        nodes.append(OpNode(op, args, kwargs, n))
        return n

    def permute_value(n: int, order: list[int]) -> int:
        value = program.values[n]
        shape, strides = ([x[d] for d in order] for x in value.layout[:2])
        layout = value.layout._replace(shape=tuple(shape), strides=tuple(strides))
        return add_node(aten.permute.default, layout, Ref(n), order, root=value.root)

    def clone_value(n: int, layout: Layout) -> int:
        return add_node(aten.clone.default, layout, Ref(n), memory_format=torch.contiguous_format)

    *tensors, _, last = node.args
    given = [known.get(a.n) or clone_value(permute_value(a.n, there), columns) for a in tensors]
    n = add_node(node.op, columns, *map(Ref, given), 0, last)
    clone_value(permute_value(n, here), layout)
    nodes[-1].outs = node.outs
    program.values.pop()
    return nodes


@cache
def _has_same_bits(op: Any, entries: int, dtype: torch.dtype) -> bool:
    """True if a trial on rows and on columns of so many entries gives the same bits."""
    random = torch.Generator().manual_seed(0)
    given = range(1 if op is _FORWARD else 2)
    rows = [torch.randn(4 * _VECTOR, entries, generator=random, dtype=dtype) for _ in given]
    last = False if op is _FORWARD else dtype
    with disable_grad_and_casts():
        along = op(*(x.t().contiguous() for x in rows), 0, last).t()
        return torch.equal(op(*rows, 1, last), along)
