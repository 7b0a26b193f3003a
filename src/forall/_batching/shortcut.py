"""Pointwise API calls without a derivative at stake, answered before the dispatcher is asked.

The function mode sees `torch.sin(x)` first. Where no operand requires grad, all are mapped alike
and the stacks are ordinary tensors, the call on the stacks is the answer: what the dispatcher
would reach after autograd and the level's dispatch mode, in a third of the time.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._batching.batched import Batched, wrap
from forall._torch.dispatch import dispatch_modes, no_dispatch, users_tangents
from forall._torch.names import OpOverloadPacket
from forall._torch.schema import facts

_PLAIN = (torch.Tensor, torch.nn.Parameter)


_known: dict[Any, bool] = {}


def is_pointwise(func: Any) -> bool:
    """Whether this function of torch, or method of Tensor, is one pointwise operator."""
    known = _known.get(func)
    return _is_pointwise(func) if known is None else known


def _is_pointwise(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    known = False
    if func in (getattr(torch, name, None), getattr(torch.Tensor, name, None)):
        packet = getattr(torch.ops.aten, name, None)
        # Of a name like __format__ the namespace has Python's own method.
        ops = (
            [getattr(packet, o) for o in packet.overloads()]
            if type(packet) is OpOverloadPacket
            else []
        )
        on_tensors = [op for op in ops if _takes_tensors(op) and not facts(op).out_names]
        known = bool(on_tensors) and all(
            facts(op).pointwise
            and not facts(op).mutates
            and not facts(op).seeded
            and not facts(op).dynamic
            and len(op._schema.returns) == 1
            for op in on_tensors
        )
    _known[func] = known
    return known


def overruled(op: Any) -> None:
    """Somebody gave this operator a rule of their own, so nothing here answers for it."""
    if op.namespace == "aten":
        for home in (torch, torch.Tensor):
            _known[getattr(home, op.overloadpacket.__name__, None)] = False


def _takes_tensors(op: Any) -> bool:
    """TorchScript's overloads on numbers share the name of the operator."""
    return any("Tensor" in str(a.type) for a in op._schema.arguments)


def answer(func: Any, args: tuple, level: Any) -> Any:
    """The result, or None where the long way must be taken."""
    if not is_pointwise(func) or dispatch_modes() != 1 or users_tangents():
        return None
    axis = rank = dtype = None
    values = []
    for a in args:
        if type(a) is Batched:
            v = a.value
            if a.level is not level or a.requires_grad or type(v) not in _PLAIN or v.requires_grad:
                return None
            if dtype is None:
                axis, rank, dtype = a.axis, v.dim(), v.dtype
            elif a.axis != axis or v.dim() != rank or v.dtype != dtype:
                return None
            values.append(v)
        elif type(a) is float or type(a) is int:
            values.append(a)
        else:
            return None
    if axis is None:
        return None
    try:
        with no_dispatch():
            out = func(*values)
    except RuntimeError:
        return None  # the long way tells which example failed
    return wrap(out, axis, level)
