"""Calls without a derivative at stake, answered before the dispatcher is asked.

The function mode sees `torch.sin(x)` first. Where no operand requires grad and the stacks are
ordinary tensors, the answer is what the dispatcher would reach after autograd and the level's
dispatch mode, in a third of the time. A pointwise call whose operands are all mapped alike is made
on the stacks. A call in `registry.DIRECT` has a rule, as its operators have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from forall._compat.devices import count_function_modes
from forall._compat.dispatch_state import (
    below_autograd,
    functions_off,
    has_users_tangents,
    in_torch_func,
    is_autocast,
    no_dispatch,
)
from forall._compat.op_schema import get_facts
from forall._compat.private_api import PLAIN, OpOverloadPacket, count_dispatch_modes
from forall._core import communication_log
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.memory_layout import is_layout_open
from forall._vmap.registry import DIRECT, HANDLERS
from forall._vmap.rule_makers.pointwise import handle_pointwise, pad_stacks

_NUMBERS = frozenset({int, float})
_WORDS = frozenset({int, float, bool, str, type(None), torch.dtype})


_known: dict[Any, Any] = {}


def _find_fast_rule(func: Any) -> Any:
    """Find and keep the rule that answers a function of torch or method of Tensor, if any."""
    if func in DIRECT:
        rule, ops = DIRECT[func]
        _known[func] = None if _overruled & ops else rule
    else:
        _known[func] = _call_on_stacks if _is_pointwise(func) else None
    return _known[func]


def is_pointwise(func: Any) -> bool:
    """True if this function of torch, or method of Tensor, is one pointwise operator."""
    return (_known[func] if func in _known else _find_fast_rule(func)) is _call_on_stacks


def _is_pointwise(func: Any) -> bool:
    """True if all overloads on tensors of this function are pointwise and return a new tensor."""
    name = getattr(func, "__name__", "")
    if func not in [getattr(home, name, None) for home in _HOMES]:
        return False
    packet = getattr(torch.ops.aten, name, None)
    # For a name like __format__ the namespace has Python's own method.
    ops = (
        [getattr(packet, o) for o in packet.overloads()] if type(packet) is OpOverloadPacket else []
    )
    on_tensors = [op for op in ops if _takes_tensors(op) and not get_facts(op).out_names]
    return bool(on_tensors) and all(
        get_facts(op).pointwise
        and not get_facts(op).mutates
        and not get_facts(op).seeded
        and not get_facts(op).dynamic
        and len(op._schema.returns) == 1
        and op not in _overruled
        and (op is _CLONE or HANDLERS.get(op, handle_pointwise) is handle_pointwise)
        for op in on_tensors
    )


_HOMES = (torch, torch.Tensor, functional)
_CLONE = torch.ops.aten.clone.default  # its row differs in layout alone, which is looked at here
_overruled: set[Any] = set()


def leave_to_own_rule(op: Any) -> None:
    """Leave an operator to the rule that somebody gave it, so that nothing here answers for it."""
    _overruled.add(op)
    _known.clear()


def is_any_overruled(ops: frozenset) -> bool:
    """True if somebody gave one of these operators a rule of their own."""
    return not _overruled.isdisjoint(ops)


def _takes_tensors(op: Any) -> bool:
    """True for overloads on tensors; TorchScript's overloads on numbers have the same name."""
    return any("Tensor" in str(a.type) for a in op._schema.arguments)


def answer_call(func: Any, args: tuple, kwargs: dict | None, level: Any, modes: int = 0) -> Any:
    """The result, or None where the dispatcher must be asked; ``modes`` counts our own modes."""
    try:
        way = _known[func]
    except KeyError:
        way = _find_fast_rule(func)
    if way is None or count_dispatch_modes() != 1 or has_users_tangents():
        return None
    if way is _call_on_stacks:
        return _call_on_stacks(func, args, kwargs, level)
    return _answer_by_rule(way, func, args, kwargs or {}, level, modes)


def _call_on_stacks(func: Any, args: tuple, kwargs: dict | None, level: Any) -> Any:
    axis = rank = dtype = None
    ranks_differ = False
    values = []
    for a in args:
        if type(a) is BatchedTensor:
            v = a.value
            if a.level is not level or a.requires_grad or type(v) not in PLAIN or v.requires_grad:
                return None
            if dtype is None:
                axis, rank, dtype = a.axis, v.dim(), v.dtype
            elif a.axis != axis or v.dtype != dtype:
                return None
            elif v.dim() != rank:
                if axis != 0:
                    return None
                ranks_differ = True
            values.append(v)
        elif type(a) in _NUMBERS:
            values.append(a)
        else:
            return None
    if axis is None or (kwargs and not are_plain_options(kwargs)):
        return None
    try:
        with no_dispatch():
            if ranks_differ:
                values = pad_stacks(values)
            out = func(*values, **kwargs) if kwargs else func(*values)
    except RuntimeError:
        return None  # the long way tells which example failed
    if axis and is_layout_open(out, values):
        return None
    return wrap_stack(out, axis, level)


def are_plain_options(kwargs: dict) -> bool:
    """True if these arguments are options, none of them a tensor or an in-place flag."""
    return not kwargs.get("inplace") and all(type(a) in _WORDS for a in kwargs.values())


def _are_dims(a: Any) -> bool:
    return type(a) in (tuple, list) and all(type(d) is int for d in a)


def _answer_by_rule(rule: Any, func: Any, args: tuple, kwargs: dict, level: Any, modes: int) -> Any:
    met = []
    given = (*args, *kwargs.values()) if kwargs else args
    if not _has_mapped_operand(given, level, torch.is_grad_enabled(), met):
        return None
    if "out" in kwargs or in_torch_func() or is_autocast() or count_function_modes() != modes:
        return None
    try:
        with functions_off(), no_dispatch(), below_autograd():
            if met and level.state.logs_writes:
                level.state.mutation_log.log_operand_reads(func, met)
            out = rule(level, func, args, kwargs)
    except Exception as error:
        if communication_log.is_final(error):
            raise
        return None  # the long way tells what is wrong, and for which example
    return None if out is NotImplemented else out


def _has_mapped_operand(given: Any, level: Any, recording: bool, met: list) -> bool | None:
    """True if any differs between the examples; None where a rule cannot take them all.

    Tensors from before the call that all examples share are added to ``met``.
    """
    mapped = False
    for a in given:
        kind = type(a)
        if kind is BatchedTensor:
            v = a.value
            if a.level is not level or type(v) not in PLAIN:
                return None
            if recording and (a.requires_grad or v.requires_grad):
                return None
            if a.axis is not None:
                mapped = True
            elif a.is_external:
                met.append(a)
        elif kind in PLAIN:
            if recording and a.requires_grad:
                return None
            met.append(a)
        elif kind in _WORDS or _are_dims(a):
            continue
        elif kind is not tuple and kind is not list:
            return None
        else:
            inside = _has_mapped_operand(a, level, recording, met)
            if inside is None:
                return None
            mapped |= inside
    return mapped
