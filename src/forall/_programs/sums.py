"""Sums of outer products: the gradient of a weight that all examples share is one product.

A second reverse pass through `vmap(grad(f))` finds a weight's gradient for each example,
``left[n]`` times ``right[n]``, and adds these up. Written so, a program goes twice through N
matrices of the weight's size; the product of the matrices of all ``left`` and all ``right`` is the
same sum.

NOTE [what this pass may change]
    The products are the same, and they are added up in another order, as a matrix product adds. So
    it is the one pass that does not keep each bit; it leaves small sums alone.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._programs.program import Layout, Node, Program, Ref, Value

if TYPE_CHECKING:
    from collections.abc import Collection

aten = torch.ops.aten
WORTH = 1 << 14  # entries of what is added up, from which on it is worth it
_DTYPES = (torch.float32, torch.float64)


class _Outer(NamedTuple):
    """``left`` (N, V, 1) times ``right`` (N, 1, D), or the transpose of that."""

    left: int
    right: int
    turned: bool


def sums(program: Program, back: Collection[Node] = ()) -> None:
    """Products of matrices in the place of sums over examples of outer products."""
    reading = _Reading(program)
    second = set(map(id, back))
    nodes: list[Node] = []
    for node in program.nodes:
        terms = reading.summed(node)
        made = _products(program, node, terms) if terms else [node]
        if terms and id(node) in second:
            assert isinstance(back, list)  # noqa: S101 - of the nodes of a pull-back
            back += made
        nodes += made
    program.nodes[:] = nodes


class _Reading:
    """Who makes the values of a program, and how many read them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.makers = {n: node for node in program.nodes for n in node.makes()}
        self.readers = Counter(n for node in program.nodes for n in node.reads())
        self.written = program.written()

    def summed(self, node: Node) -> list[_Outer] | None:
        """The outer products of which a node makes nothing but the sum over the first axis."""
        if node.op is not aten.sum.dim_IntList or node.kwargs or len(node.args) != 2:
            return None
        a, axes = node.args
        layout = self.program.values[node.outs].layout
        if [*axes] != [0] or len(layout.shape) != 2 or layout.dtype not in _DTYPES:
            return None
        dense = layout.strides == (layout.shape[1], 1)
        if not dense or prod(self.program.values[a.n].layout.shape) < WORTH:
            return None
        return self._terms(a.n, layout, turned=False)

    def _terms(self, n: int, like: Layout, *, turned: bool) -> list[_Outer] | None:
        node, value = self.makers.get(n), self.program.values[n]
        if node is None or self.readers[n] != 1 or n in self.program.outputs or node.kwargs:
            return None
        if len(value.layout.shape) != 3 or value.layout.dtype != like.dtype:
            return None
        if not self._stays(n):
            return None
        if node.op is aten.transpose.int and {d % 3 for d in node.args[1:]} == {1, 2}:
            return self._terms(node.args[0].n, like, turned=not turned)
        if not all(type(a) is Ref for a in node.args) or len(node.args) != 2:
            return None
        first, other = (a.n for a in node.args)
        if node.op is aten.add.Tensor:
            if not self._alike(first, other):
                return None
            found = [self._terms(m, like, turned=turned) for m in (first, other)]
            return None if None in found else [t for terms in found for t in terms or ()]
        return self._outer(node, value.layout, turned) if node.op is aten.mul.Tensor else None

    def _outer(self, node: Node, whole: Layout, turned: bool) -> list[_Outer] | None:
        n, rows, columns = whole.shape
        left, right = (a.n for a in node.args)
        shapes = [self.program.values[m].layout.shape for m in (left, right)]
        if shapes == [(n, 1, columns), (n, rows, 1)]:
            left, right, shapes = right, left, shapes[::-1]
        if shapes != [(n, rows, 1), (n, 1, columns)] or not all(map(self._stays, (left, right))):
            return None
        dtypes = {self.program.values[m].layout.dtype for m in (left, right)}
        return [_Outer(left, right, turned)] if dtypes == {whole.dtype} else None

    def _alike(self, a: int, b: int) -> bool:
        return self.program.values[a].layout.shape == self.program.values[b].layout.shape

    def _stays(self, n: int) -> bool:
        """Whether nobody writes into its memory, and it has some."""
        value = self.program.values[n]
        return value.root not in self.written and not value.zeros


def _products(program: Program, node: Node, terms: list[_Outer]) -> list[Node]:
    """The nodes that make what ``node`` made, of the factors."""
    made: list[Node] = []

    def view(op: Any, n: int, *args: Any) -> int:
        value = program.values[n]
        shape, strides = [*value.layout.shape], [*value.layout.strides]
        if op is aten.t.default:
            shape, strides = shape[::-1], strides[::-1]
        else:
            del shape[args[0]], strides[args[0]]
        layout = value.layout._replace(shape=tuple(shape), strides=tuple(strides))
        program.values.append(Value(layout, value.root))
        made.append(Node(op, (Ref(n), *args), {}, len(program.values) - 1))
        return len(program.values) - 1

    out, layout = node.outs, program.values[node.outs].layout
    total: int | None = None
    for i, (left, right, turned) in enumerate(terms):
        a, b = view(aten.select.int, left, 2, 0), view(aten.select.int, right, 1, 0)
        a, b = (b, a) if turned else (a, b)
        given = (Ref(view(aten.t.default, a)), Ref(b))
        if i + 1 < len(terms):
            program.values.append(Value(layout, len(program.values)))
        outs = out if i + 1 == len(terms) else len(program.values) - 1
        op = aten.mm.default if total is None else aten.addmm.default
        made.append(Node(op, given if total is None else (Ref(total), *given), {}, outs))
        total = outs
    return made
