"""Peephole passes that make an operator cheaper: numbers as constants, in-place variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._jit.graph import (
    Layout,
    OpNode,
    Ref,
    Value,
)
from forall._jit.passes.view_chains import is_pure_view

if TYPE_CHECKING:
    from collections.abc import Collection

    from forall._jit.graph import Program

aten = torch.ops.aten
# Operators with a number as the second operand, and their overloads with a tensor.
_WITH_NUMBERS = {
    op: packet.Tensor
    for packet in (aten.add, aten.sub, aten.mul, aten.div)
    for op in (packet.Tensor, packet.Scalar)
}
_WIDE_DTYPES = (torch.float32, torch.float64)  # kernels of narrower dtypes take the number itself
_CPU = torch.device("cpu")


def lift_scalar_operands(program: Program) -> None:
    """Turn each number that a tensor is combined with into a constant tensor of its dtype.

    Torch does so in each call: it makes a tensor of the number's own dtype, and then a copy.
    """
    known: dict[Any, int] = {}
    for node in program.nodes:
        if node.op not in _WITH_NUMBERS or len(node.args) != 2 or node.kwargs:
            continue
        x, number = node.args
        if type(x) is not Ref or type(number) not in (int, float):
            continue
        layout, result = (program.values[n].layout for n in (x.n, node.outs))
        if (
            layout.dtype not in _WIDE_DTYPES
            or layout.dtype != result.dtype
            or layout.device != _CPU
        ):
            continue
        key = layout.dtype, type(number), repr(number)
        if key not in known:
            known[key] = _add_constant(program, _make_number_tensor(number).to(layout.dtype))
        node.op = _WITH_NUMBERS[node.op]
        node.args = (x, Ref(known[key]))


def _make_number_tensor(number: float) -> torch.Tensor:
    """A number as the tensor that torch makes of it, before the cast to the other's dtype."""
    return torch.tensor(number, dtype=torch.float64 if type(number) is float else torch.int64)


def _add_constant(program: Program, t: torch.Tensor) -> int:
    n = len(program.values)
    program.values.append(Value(Layout.from_tensor(t), n))
    program.constants[n] = t
    return n


def canonicalize_transposes(program: Program) -> None:
    """Replace each view that transposes a matrix by `t`, whose call has the fewest arguments."""
    for node in program.nodes:
        if not is_pure_view(node.op) or not isinstance(node.outs, int):
            continue
        a, b = (program.values[n] for n in (node.args[0].n, node.outs))
        here, there = a.layout, b.layout
        if len(there.shape) == 2 and a.root == b.root and here.dtype == there.dtype:
            back = there._replace(shape=there.shape[::-1], strides=there.strides[::-1])
            if here == back:
                node.op, node.args, node.kwargs = aten.t.default, node.args[:1], {}


# Operators and their in-place variants: pointwise, with one kernel for both.
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


def reuse_operand_memory(program: Program, back: Collection[OpNode] = ()) -> None:
    """Use in-place variants where an operator is the last to read its first operand.

    The backward half may be run again on the same saved tensors, so an operator of one half writes
    only into what that half has made.
    """
    roots = [v.root for v in program.values]
    second = set(map(id, back))
    kept = {roots[n] for n in (*program.inputs, *program.captured, *program.constants)}
    kept |= {roots[n] for n in program.outputs}
    last: dict[int, OpNode] = {}
    makers: dict[int, OpNode] = {}
    for node in program.nodes:
        last.update((roots[n], node) for n in node.reads())
        if isinstance(node.outs, int):  # results of one operator may share memory
            makers.setdefault(node.outs, node)
    for node in program.nodes:
        a = _find_reusable_operand(program, node)
        if a is None or a in kept or last[a] is not node or a not in makers:
            continue
        if (id(node) in second) is (id(makers[a]) in second):
            node.op = IN_PLACE[node.op]


def _find_reusable_operand(program: Program, node: OpNode) -> int | None:
    """The first operand if the result may be written into its memory, else None.

    The two need one layout, and no other operand may share that memory. Zeros without memory (torch
    calls them ZeroTensors) cannot be written into. A product with them is zero even for inf, which
    the in-place variant would turn into nan.
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
