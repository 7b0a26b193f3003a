"""Passes that let an operator do the same for less: numbers made once, memory used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._jit.graph import (
    Layout,
    Node,
    Ref,
    Value,
)
from forall._jit.passes.view_chains import only_views

if TYPE_CHECKING:
    from collections.abc import Collection

    from forall._jit.graph import Program

aten = torch.ops.aten
# With a number as the second operand, and with a tensor.
_WITH_NUMBERS = {
    op: packet.Tensor
    for packet in (aten.add, aten.sub, aten.mul, aten.div)
    for op in (packet.Tensor, packet.Scalar)
}
_WIDE = (torch.float32, torch.float64)  # kernels of narrower ones take a number as it is
_CPU = torch.device("cpu")


def numbers(program: Program) -> None:
    """A number that a tensor is combined with is a tensor already, of the tensor's dtype.

    Torch makes that of it in each call: first a tensor of its own dtype, then a copy.
    """
    known: dict[Any, int] = {}
    for node in program.nodes:
        if node.op not in _WITH_NUMBERS or len(node.args) != 2 or node.kwargs:
            continue
        x, number = node.args
        if type(x) is not Ref or type(number) not in (int, float):
            continue
        layout, result = (program.values[n].layout for n in (x.n, node.outs))
        if layout.dtype not in _WIDE or layout.dtype != result.dtype or layout.device != _CPU:
            continue
        key = layout.dtype, type(number), repr(number)
        if key not in known:
            known[key] = _constant(program, _exact(number).to(layout.dtype))
        node.op = _WITH_NUMBERS[node.op]
        node.args = (x, Ref(known[key]))


def _exact(number: float) -> torch.Tensor:
    """A number as torch takes it, before it makes it the other operand's dtype."""
    return torch.tensor(number, dtype=torch.float64 if type(number) is float else torch.int64)


def _constant(program: Program, t: torch.Tensor) -> int:
    n = len(program.values)
    program.values.append(Value(Layout.of(t), n))
    program.constants[n] = t
    return n


def turned(program: Program) -> None:
    """A view of a matrix with its dims the other way round is `t`, which is told nothing else."""
    for node in program.nodes:
        if not only_views(node.op) or not isinstance(node.outs, int):
            continue
        a, b = (program.values[n] for n in (node.args[0].n, node.outs))
        here, there = a.layout, b.layout
        if len(there.shape) == 2 and a.root == b.root and here.dtype == there.dtype:
            back = there._replace(shape=there.shape[::-1], strides=there.strides[::-1])
            if here == back:
                node.op, node.args, node.kwargs = aten.t.default, node.args[:1], {}


# Each entry from what lies in its place, by one kernel whether the result is new memory or the
# first operand's.
IN_PLACE = {
    getattr(aten, name).default: getattr(aten, f"{name}_").default
    for name in [
        "sin",
        "cos",
        "tanh",
        "exp",
        "log",
        "neg",
        "abs",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "sigmoid",
        "relu",
        "tril",
        "triu",
    ]
} | {
    getattr(aten, name).Tensor: getattr(aten, f"{name}_").Tensor
    for name in ["add", "sub", "mul", "div"]
}


def in_place(program: Program, back: Collection[Node] = ()) -> None:
    """Write a result where its operand lay, of which this is the last that is heard.

    What a pull-back is handed it may be handed again, so it writes only into what it has made.
    """
    roots = [v.root for v in program.values]
    second = set(map(id, back))
    kept = {roots[n] for n in (*program.inputs, *program.captured, *program.constants)}
    kept |= {roots[n] for n in program.outputs}
    last: dict[int, Node] = {}
    makers: dict[int, Node] = {}
    for node in program.nodes:
        last.update((roots[n], node) for n in node.reads())
        if isinstance(node.outs, int):  # results of one operator may share memory
            makers.setdefault(node.outs, node)
    for node in program.nodes:
        a = _first(program, node)
        if a is None or a in kept or last[a] is not node or a not in makers:
            continue
        if (id(node) in second) is (id(makers[a]) in second):
            node.op = IN_PLACE[node.op]


def _first(program: Program, node: Node) -> int | None:
    """The first operand, if the result would fit where it lies, and no other operand does.

    Zeros without memory cannot be written into, and a product with them is none where it is not
    new: 0 * inf is nan then.
    """
    n, values = node.outs, program.values
    if node.op not in IN_PLACE or type(node.args[0]) is not Ref or node.kwargs:
        return None
    if values[n].zeros or any(values[m].zeros for m in node.reads()):
        return None
    a = node.args[0].n
    whole = values[a].root == a and values[n].root == n and values[a].layout == values[n].layout
    others = [m for m in node.reads() if m != a and values[m].root == a]
    return a if whole and not others else None
