"""The cheapest way to call an operator: torch's own functions cost less than `OpOverload`s.

Which operator such a function dispatches to depends on its arguments. So each candidate is called
once, on meta tensors, under a dispatch mode that runs nothing. A function that dispatches to the
recorded operator alone, with the recorded arguments, takes the operator's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import is_autocast, without_history
from forall._compat.op_schema import get_facts
from forall._compat.private_api import DispatchMode, function_homes, get_fast_operator
from forall._jit.cache.call_key import read_torch_state
from forall._jit.graph import (
    FusedNode,
    OpNode,
    Program,
    Ref,
    map_refs,
)
from forall._jit.passes.cse import freeze_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def choose_call(program: Program, node: OpNode) -> tuple[Callable, tuple, dict]:
    """Return the cheapest function that does what a node says, and its arguments."""
    if isinstance(node, FusedNode):
        return node.op, node.args, node.kwargs
    asked = program.calls.get(id(node))
    if asked is not None and asked[0] is node:
        return asked[1], node.args, node.kwargs
    try:
        key = _make_choice_key(program, node)
    except TypeError:
        return _choose_function(program, node), node.args, node.kwargs
    func = _known.get(key)
    if func is None:
        if len(_known) >= _MOST:
            _known.clear()
        func = _known[key] = _choose_function(program, node)
    return func, node.args, node.kwargs


def choose_calls(program: Program) -> Iterator[None]:
    """Choose the functions that call the operators, some at a time, before code generation."""
    if is_autocast():  # generated code runs without autocast, so the functions are chosen there
        return
    for i, node in enumerate(program.nodes):
        program.calls[id(node)] = node, choose_call(program, node)[0]
        if not (i + 1) % _EACH:
            yield


_EACH = 64
_MOST = 4096  # choices that are kept: the same operator comes back in program after program
_known: dict[Any, Callable] = {}


def _make_choice_key(program: Program, node: OpNode) -> Any:
    """The cache key of a choice: operator, arguments, the tensors' layouts and torch's state."""
    seen: dict[int, int] = {}

    def of_value(n: int) -> Any:
        shape, strides, _, dtype, *_ = program.values[n].layout
        return seen.setdefault(n, len(seen)), shape, strides, dtype

    given = freeze_arguments((node.args, node.kwargs), of_value)
    return (
        node.op,
        given,
        freeze_arguments(_make_stand_ins(node.outs, lambda r: r), of_value),
        read_torch_state(),
    )


def _choose_function(program: Program, node: OpNode) -> Callable:
    for func in (
        () if get_facts(node.op).has_effect else _list_candidates(node)
    ):  # a random one would draw
        if _dispatches_to_operator(program, node, func, node.args, node.kwargs):
            return func
    return get_fast_operator(node.op)


def _list_candidates(node: OpNode) -> Iterator[Callable]:
    name = node.op.overloadpacket.__name__
    # A method takes tensors for less than a function does, and lists for more.
    alone = all(type(a) is Ref for a in node.args)
    for home in reversed(function_homes) if alone else function_homes:
        func = getattr(home, name, None)
        if callable(func):
            yield func


def _dispatches_to_operator(
    program: Program, node: OpNode, func: Callable, args: tuple, kwargs: dict
) -> bool:
    stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(r: Any) -> torch.Tensor:
        if r.n not in stand_ins:
            shape, strides, _, dtype, *_ = program.values[r.n].layout
            stand_ins[r.n] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return stand_ins[r.n]

    given, named = map_refs((args, kwargs), stand_in)
    wanted = (node.op, *map_refs((node.args, node.kwargs), stand_in))
    with without_history(), _DispatchProbe(wanted, _make_stand_ins(node.outs, stand_in)) as asked:
        try:
            func(*given, **named)
        except Exception:  # noqa: BLE001 - not meant for these arguments
            return False
    return asked.times == 1


def _make_stand_ins(outs: Any, stand_in: Callable[[Ref], torch.Tensor]) -> Any:
    """Stand-ins for the results of an operator, nested as ``outs`` are."""
    if isinstance(outs, (tuple, list)):
        return tuple(_make_stand_ins(o, stand_in) for o in outs)
    return stand_in(Ref(outs)) if isinstance(outs, int) else outs


class _DispatchProbe(DispatchMode):
    """A dispatch mode that counts calls of the wanted operator and returns stand-ins for it."""

    def __init__(self, wanted: tuple, made: Any) -> None:
        super().__init__()
        self.wanted = wanted
        self.made = made
        self.times = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_same_argument((func, args, kwargs or {}), self.wanted):
            raise _OtherOperator
        self.times += 1
        return self.made


class _OtherOperator(Exception):  # noqa: N818 - no error: the function is not taken
    """Signal that a function dispatches to another operator than the recorded one."""


def _is_same_argument(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same_argument, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same_argument(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a is b or repr(a) == repr(b))
