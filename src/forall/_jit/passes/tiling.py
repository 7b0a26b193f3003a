"""Loop tiling: operators on tensors larger than the caches run a block at a time.

They are pointwise operators, and sums of their results: those over all dims but the first, which
is split then, or those over the first, if the second is split.

Run one after the other, each operator reads from main memory what the one before wrote there. A
block stays in the caches until all operators have run, and only what is read later is kept. On one
thread of a CPU with 32 MB of cache, 20 cheap operators on 16 MB took 0.7 of the time, on 64 MB 0.5,
and the memory of the result alone. On 4 MB they took 1.2: a block costs a call of each operator.

NOTE [where blocks end]
    Kernels take a vector of entries at a time, and the last few one by one, by functions that may
    round differently. So blocks end where whole vectors do, and no thread's share ends elsewhere.

NOTE [rematerialization]
    A few cheap operators may make a large tensor of small ones, as an outer product, which several
    groups of operators read: one sums its squares by rows, the next sums what the norms scale. To
    keep it means to write it to main memory, and each group reads it from there. Instead each group
    makes it again, a block at a time, and it never exists as a whole.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

import torch

from forall._compat.op_schema import get_facts
from forall._jit.graph import (
    FusedNode,
    Layout,
    OpNode,
    Ref,
    Subgraph,
)
from forall._jit.passes.peephole import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.graph import Program

    Tensor = torch.Tensor
    Shape = tuple[int, ...]

_BLOCK_ENTRIES = 1 << 16  # entries of a block, for each thread
_COLUMN_ENTRIES = 1 << 18  # of a block of columns, whose rows are short
# Tiling is worth it from so many entries on: of a result that does not fit in the caches, and of
# all intermediate results together.
_LARGE, _WORTH = 1 << 21, 6 << 20
_LEAST_SPARED = 2  # intermediate results that are not written to main memory, or not read from it
_MOST_REMADE = 3  # operators that make a tensor again
_SMALL = 8  # what these read is at most this part of the tensor
_VECTORS = 128  # entries that a kernel takes at a time at most
_OUT_OF_PLACE = {there: new for new, there in IN_PLACE.items()}
_WITH_OUT = {op: getattr(torch.ops.aten, op._opname).out for op in IN_PLACE}
_CPU = torch.device("cpu")
# Operators that take less time than their result takes to come from main memory.
_CHEAP = {
    op
    for new, there in IN_PLACE.items()
    for op in (new, there)
    if new._opname in {"neg", "abs", "relu", "add", "sub", "mul", "div"}
}
_SUMS = frozenset({torch.ops.aten.sum.dim_IntList})


def tile_pointwise(
    graph: Subgraph, compile_part: Callable[[Subgraph], Callable]
) -> Sequence[OpNode]:
    """Return the operators of a subgraph, with some as one that takes its tensors in blocks."""
    program, nodes, _, results = graph
    groups = _group_operators(program, nodes)
    if all(group.shape is None for group in groups):
        return nodes
    kept = _rematerialize(program, groups, {*results})
    return [node for group in groups for node in _tile_group(program, group, kept, compile_part)]


def _tile_group(
    program: Program, group: _OpGroup, kept: set[int], compile_part: Callable
) -> Sequence[OpNode]:
    """Return the operators of a group, as one that takes its tensors in blocks if that is faster.

    ``kept`` has the values that other groups read, and the results.
    """
    cut = _choose_tiling(program, group, group.nodes, kept)
    if cut is None:
        return group.nodes
    results = kept - group.remade
    wanted = [n for node in group.nodes for n in node.makes() if n in results]
    return [_make_tiled_node(program, group.nodes, wanted, cut, compile_part)]


def _group_operators(program: Program, nodes: Sequence[OpNode]) -> list[_OpGroup]:
    """Return the operators in groups that may run together.

    A group is pointwise operators of one shape with sums of their results, or another operator
    alone, without a shape. A group is open until an operator outside reads what the group makes, or
    writes where the group reads.
    """
    waiting: dict[Shape, _OpGroup] = {}
    found: list[_OpGroup] = []
    roots = [v.root for v in program.values]
    for node in nodes:
        shape, dim = _find_tiled_shape(program, node), _find_split_dim(program, node)
        for other, group in [*waiting.items()]:
            alike = other == shape
            if group.cannot_take(node, dim) if alike else group.conflicts_with(node):
                found.append(waiting.pop(other))
        if shape is None:
            found.append(_OpGroup(roots, None))
            found[-1].nodes.append(node)
        else:
            waiting.setdefault(shape, _OpGroup(roots, shape)).add(node, dim)
    return [*found, *waiting.values()]


class _OpGroup:
    """A group of operators, and the memory that they write and read.

    ``dim`` is the one that has to be split for the sums among them, if there are any.
    """

    def __init__(self, roots: list[int], shape: Shape | None) -> None:
        self.roots, self.shape = roots, shape
        self.nodes: list[OpNode] = []  # first those that make what is made again
        self.remade: set[int] = set()  # what an earlier group has made too
        self.made: set[int] = set()
        self.read: set[int] = set()
        self.dim: int | None = None
        self.narrow: set[int] = set()  # sums of rows that have lost their dims

    def cannot_take(self, node: OpNode, dim: int | None) -> bool:
        """Return True for an operator of the same shape that cannot run in the blocks of this one.

        It is a sum that needs another dim to be split. Or it reads a sum of rows that has lost its
        dims: with it a row of a block would be combined with the entries of others.
        """
        if None not in (dim, self.dim) and dim != self.dim:
            return True
        return not self.narrow.isdisjoint(node.reads())

    def add(self, node: OpNode, dim: int | None) -> None:
        self.dim = dim if self.dim is None else self.dim
        if dim == 0 and not (len(node.args) > 2 and node.args[2]):  # keepdim
            self.narrow.update(node.makes())
        self.nodes.append(node)
        self.made.update(self.roots[n] for n in (*node.makes(), *node.writes()))
        self.read.update(self.roots[n] for n in node.reads())

    def drop_unread(self, steps: Sequence[OpNode], kept: set[int]) -> None:
        """Drop the ``steps`` whose results neither this group nor another one reads any more."""
        unread = {step.outs for step in steps} - kept
        nodes = []
        for node in reversed(self.nodes):
            if node.outs not in unread:
                nodes.append(node)
                unread.difference_update(node.reads())
        self.nodes = nodes[::-1]
        self.remade -= unread

    def list_inputs(self) -> list[int]:
        """Return what the group reads and does not make."""
        if self.shape is None:  # an in-place operator makes what it reads
            return [*self.nodes[0].reads()]
        return _list_inputs(self.nodes)

    def conflicts_with(self, node: OpNode) -> bool:
        """True if a node depends on the group: by a read after write, or a write after either."""
        reads, writes = ({self.roots[n] for n in ns} for ns in (node.reads(), node.writes()))
        return not (self.made.isdisjoint(reads | writes) and self.read.isdisjoint(writes))


def _find_tiled_shape(program: Program, node: OpNode) -> Shape | None:
    """The shape of a pointwise operator's result that is large and contiguous, else None.

    Of a sum that blocks have for themselves it is the shape of what is summed.
    """
    if isinstance(node, FusedNode) or not isinstance(node.outs, int) or node.outs in node.reads():
        return None  # the last condition: an in-place operator of the user's
    if node.op in _SUMS:
        return _find_summed_shape(program, node)
    fact = get_facts(_OUT_OF_PLACE.get(node.op, node.op))
    value = program.values[node.outs]
    layout = value.layout
    if not fact.pointwise or prod(layout.shape) < _LARGE:
        return None
    if fact.writes or fact.seeded or value.root != node.outs:
        return None
    given = [program.values[n] for n in node.reads()]
    plain = not any(v.zeros or v.layout.device != _CPU for v in (value, *given))
    return layout.shape if plain and layout.is_dense else None


def _find_summed_shape(program: Program, node: OpNode) -> Shape | None:
    (x,) = node.reads()
    value, out = program.values[x], program.values[node.outs]
    layout = value.layout
    if prod(layout.shape) < _LARGE or node.kwargs or _find_split_dim(program, node) is None:
        return None
    plain = layout.is_dense and layout.device == _CPU and not value.zeros
    return layout.shape if plain and layout.dtype == out.layout.dtype else None


def _find_split_dim(program: Program, node: OpNode) -> int | None:
    """Return the dim to split for a sum whose blocks are each summed by themselves, else None."""
    if node.op not in _SUMS or not node.args[1]:
        return None
    shape = program.values[next(node.reads())].layout.shape
    summed, rank = {d % len(shape) for d in node.args[1]}, len(shape)
    if rank > 1 and summed == {*range(1, rank)}:
        return 0 if shape[0] > 1 else None
    return 1 if rank > 1 and summed == {0} else None


def _rematerialize(program: Program, groups: list[_OpGroup], results: set[int]) -> set[int]:
    """Let groups make again what is cheaper to make than to keep, see NOTE [rematerialization].

    Return the values that are kept: the results, and what a group reads of another.
    """
    kept = results.union(*(group.list_inputs() for group in groups))
    for i, maker in enumerate(groups):
        for n in [] if maker.shape is None else [node.outs for node in maker.nodes]:
            steps = _find_steps(program, maker, n) if n in kept and n not in results else []
            if steps and _insert_steps(program, groups[i:], steps, kept - {n}):
                kept = results.union(*(group.list_inputs() for group in groups))
                maker.drop_unread(steps, kept)
    return kept


def _find_steps(program: Program, maker: _OpGroup, n: int) -> list[OpNode]:
    """Return the operators that make a value of small ones, none if that is not cheap."""
    needed, steps = {n}, []
    for node in reversed(maker.nodes):
        if node.outs in needed:
            steps.append(node)
            needed.update(m for m in node.reads() if not _is_small(program, m, maker.shape))
    is_cheap = len(steps) <= _MOST_REMADE and all(node.op in _CHEAP for node in steps)
    is_whole = needed == {node.outs for node in steps}
    # Out of place: other steps that are made again may read the same operand.
    return [*map(_make_out_of_place, reversed(steps))] if is_cheap and is_whole else []


def _is_small(program: Program, n: int, shape: Shape) -> bool:
    return program.values[n].layout.storage_entries * _SMALL <= prod(shape)


def _insert_steps(
    program: Program, groups: list[_OpGroup], steps: list[OpNode], kept: set[int]
) -> bool:
    """Let all groups that read the result of ``steps`` make it again; return False if one cannot.

    The first group has made it. What an operator in between writes into the memory that the steps
    read, it writes into new memory.
    """
    maker = groups[0]
    readers = [group for group in groups[1:] if steps[-1].outs in group.list_inputs()]
    found = []
    for group in readers:
        made = {n for node in group.nodes for n in node.makes()}
        new = [step for step in steps if step.outs not in made]
        count = len(group.remade)
        nodes = [*group.nodes[:count], *new, *group.nodes[count:]]
        found.append((nodes, group.remade.union(step.outs for step in new)))
        if group.shape != maker.shape or _choose_tiling(program, group, nodes, kept) is None:
            return False
    between = [node for group in groups[: groups.index(readers[-1])] for node in group.nodes]
    made = [step.outs for step in steps]
    if not all(_has_new_result(program, x) for x in _find_writers(program, between, made)):
        return False  # it is no longer what the steps have made
    writers = _find_writers(program, between, _list_inputs(steps))
    if not all(_has_new_result(program, node) for node in writers):
        return False
    for group, (nodes, remade) in zip(readers, found, strict=True):
        group.nodes, group.remade = nodes, remade
    changed = set(map(id, writers))
    for group in groups if writers else []:
        group.nodes = [_make_out_of_place(x) if id(x) in changed else x for x in group.nodes]
    return True


def _find_writers(program: Program, nodes: Sequence[OpNode], values: Sequence[int]) -> list[OpNode]:
    """Return the operators that write into the memory of some values."""
    roots = program.find_roots()
    memory = {roots[n] for n in values}
    return [node for node in nodes if not memory.isdisjoint(roots[n] for n in node.writes())]


def _has_new_result(program: Program, node: OpNode) -> bool:
    """True for an in-place operator that a pass has made: its result is not its operand."""
    is_new = node.op in _OUT_OF_PLACE and node.outs not in node.reads()
    return is_new and program.values[node.outs].root == node.outs


class _Tiling:
    """A way to split values of a shape: into ``size`` rows along ``dim``, or as flat entries."""

    def __init__(self, shape: Shape, dim: int, size: int, *, flat: bool) -> None:
        self.shape, self.dim, self.size, self.flat = shape, dim, size, flat

    def is_split(self, layout: Layout) -> bool:
        """True if a tensor is split among the blocks; else each block gets the whole tensor."""
        back = self.dim - len(self.shape)
        return len(layout.shape) >= -back and layout.shape[back] == self.shape[self.dim]

    def __call__(self, t: Tensor) -> Sequence[Tensor]:
        if self.flat:
            return t.view(-1).split(self.size)
        return t.split(self.size, self.dim - len(self.shape))

    def split_result(self, t: Tensor) -> Sequence[Tensor]:
        """Split a result: of the shape of the tiling, or a sum of each row or column."""
        return self(t) if t.shape == self.shape or self.dim else t.split(self.size)


def _choose_tiling(
    program: Program, group: _OpGroup, nodes: list[OpNode], kept: set[int]
) -> _Tiling | None:
    """Return the way to split the values of a group's operators.

    None is returned where blocks gain nothing, and where they would not keep each bit.
    """
    shape = group.shape
    if shape is None or _count_spared(nodes, kept) < max(_LEAST_SPARED, _WORTH / prod(shape)):
        return None
    threads = torch.get_num_threads()
    whole = _VECTORS * threads
    if threads > 1 and prod(shape) % whole:
        return None
    if group.dim == 1:
        return _choose_columns(shape, threads)
    given = [program.values[n].layout for n in _list_inputs(nodes)]
    flat = all(v.shape in ((), (1,)) or (v.shape == shape and v.is_dense) for v in given)
    flat = flat and group.dim is None  # what is summed stays whole
    dim = next(i for i, size in enumerate(shape) if size > 1)
    row = 1 if flat else prod(shape[dim + 1 :])
    step = whole // gcd(whole, row)  # rows that fill whole vectors
    size = _BLOCK_ENTRIES * threads // row // step * step
    rows = prod(shape) // row
    if group.dim == 0 and (size < 2 or rows % size == 1):
        return None  # threads share the sum of a single row
    return _Tiling(shape, dim, size, flat=flat) if 0 < size < rows else None


def _count_spared(nodes: list[OpNode], kept: set[int]) -> int:
    """Count values that need not be written to main memory, and those that sums need not read."""
    made = [n for node in nodes for n in node.makes()]
    summed = {n for node in nodes if node.op in _SUMS for n in node.reads()}
    return sum(n not in kept for n in made) + len(summed.intersection(made))


def _choose_columns(shape: Shape, threads: int) -> _Tiling | None:
    """Split the second dim: a sum over the first adds whole vectors of columns.

    Threads share columns otherwise for a block than for the whole.
    """
    column = prod(shape[2:])
    step = _VECTORS // gcd(_VECTORS, column)
    size = max(_COLUMN_ENTRIES // (shape[0] * column) // step, 1) * step
    fits = size * column * shape[0] <= _COLUMN_ENTRIES
    is_whole = threads == 1 and column * shape[1] % _VECTORS == 0
    return _Tiling(shape, 1, size, flat=False) if fits and is_whole and size < shape[1] else None


def _list_inputs(group: list[OpNode]) -> list[int]:
    made = {n for node in group for n in node.makes()}
    return [*dict.fromkeys(n for node in group for n in node.reads() if n not in made)]


def _make_tiled_node(
    program: Program, group: list[OpNode], wanted: list[int], cut: _Tiling, compile_part: Callable
) -> FusedNode:
    read = _list_inputs(group)
    first = {n for n in read if cut.is_split(program.values[n].layout)}
    given = sorted(read, key=lambda n: n not in first)
    own = [
        _make_out_of_place(node) if node.writes() and node.args[0].n in read else node
        for node in group
    ]
    whole = {n for n in wanted if program.values[n].layout.shape == cut.shape}
    own = [_write_to_place(node) if node.outs in whole else node for node in own]
    placed = [node.outs for node in own if "out" in node.kwargs]
    results = [*placed, *[n for n in wanted if n not in placed]]
    part = Subgraph(program, own, [*given, *placed], results[len(placed) :])
    layouts = [program.values[n].layout for n in results]
    run = TiledSubgraph(compile_part(part), cut, len(first), layouts, len(placed))
    return FusedNode(run, tuple(map(Ref, given)), {}, results, [])


def _make_out_of_place(node: OpNode) -> OpNode:
    return OpNode(_OUT_OF_PLACE.get(node.op, node.op), node.args, node.kwargs, node.outs)


def _write_to_place(node: OpNode) -> OpNode:
    """The operator with a block of its result as ``out``, if it has such a form."""
    op = _WITH_OUT.get(node.op)
    if op is None:
        return node
    return OpNode(op, node.args, {**node.kwargs, "out": Ref(node.outs)}, node.outs)


class TiledSubgraph:
    """Operators that run on blocks of the first ``cut_count`` values, and on the others whole.

    They write to the blocks of the first ``placed`` results by themselves.
    """

    def __init__(
        self, run: Callable, cut: _Tiling, cut_count: int, layouts: list[Layout], placed: int
    ) -> None:
        self.run, self.cut, self.cut_count, self.layouts = run, cut, cut_count, layouts
        self.placed = placed

    def __str__(self) -> str:
        return f"in blocks of {self.cut.size}"

    def __call__(self, *given: Tensor) -> list[Tensor]:
        cut, whole = self.cut, given[self.cut_count :]
        outs = [
            torch.empty(layout.shape, dtype=layout.dtype, device="cpu") for layout in self.layouts
        ]
        places = zip(*map(cut.split_result, outs), strict=True)
        blocks = zip(*map(cut, given[: self.cut_count]), strict=True)
        for block, there in zip(blocks, places, strict=True):
            made_here = self.run(*block, *whole, *there[: self.placed])
            for made, place in zip(made_here, there[self.placed :], strict=True):
                place.copy_(made)
        return outs
