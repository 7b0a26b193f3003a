"""The cheapest way to call an operator: torch's own functions cost less than `OpOverload`s.

Which operator such a function dispatches to depends on its arguments. So each candidate is called
once, on meta tensors, under a dispatch mode that runs nothing. A function that dispatches to the
recorded operator alone, with the recorded arguments, takes the operator's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import is_autocast, without_history
from forall._compat.op_schema import facts
from forall._compat.private_api import DispatchMode, fast_operator, function_homes
from forall._jit.cache.call_key import ambient
from forall._jit.graph import (
    Node,
    Piece,
    Program,
    Ref,
    with_refs,
)
from forall._jit.passes.cse import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def binding(program: Program, node: Node) -> tuple[Callable, tuple, dict]:
    """Return the cheapest function that does what a node says, and its arguments."""
    if isinstance(node, Piece):
        return node.op, node.args, node.kwargs
    asked = program.calls.get(id(node))
    if asked is not None and asked[0] is node:
        return asked[1], node.args, node.kwargs
    try:
        key = _key(program, node)
    except TypeError:
        return _asked(program, node), node.args, node.kwargs
    func = _known.get(key)
    if func is None:
        if len(_known) >= _MOST:
            _known.clear()
        func = _known[key] = _asked(program, node)
    return func, node.args, node.kwargs


def asking(program: Program) -> Iterator[None]:
    """Choose the functions that call the operators, some at a time, before code generation."""
    if is_autocast():  # generated code runs without autocast, so the functions are chosen there
        return
    for i, node in enumerate(program.nodes):
        program.calls[id(node)] = node, binding(program, node)[0]
        if not (i + 1) % _EACH:
            yield


_EACH = 64
_MOST = 4096  # choices that are kept: the same operator comes back in program after program
_known: dict[Any, Callable] = {}


def _key(program: Program, node: Node) -> Any:
    """The cache key of a choice: operator, arguments, the tensors' layouts and torch's state."""
    seen: dict[int, int] = {}

    def of_value(n: int) -> Any:
        shape, strides, _, dtype, *_ = program.values[n].layout
        return seen.setdefault(n, len(seen)), shape, strides, dtype

    given = frozen((node.args, node.kwargs), of_value)
    return node.op, given, frozen(_made(node.outs, lambda r: r), of_value), ambient()


def _asked(program: Program, node: Node) -> Callable:
    for func in () if facts(node.op).seeded else _candidates(node):  # a random one would draw
        if _reaches(program, node, func, node.args, node.kwargs):
            return func
    return fast_operator(node.op)


def _candidates(node: Node) -> Iterator[Callable]:
    name = node.op.overloadpacket.__name__
    # A method takes tensors for less than a function does, and lists for more.
    alone = all(type(a) is Ref for a in node.args)
    for home in reversed(function_homes) if alone else function_homes:
        func = getattr(home, name, None)
        if callable(func):
            yield func


def _reaches(program: Program, node: Node, func: Callable, args: tuple, kwargs: dict) -> bool:
    stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(r: Any) -> torch.Tensor:
        if r.n not in stand_ins:
            shape, strides, _, dtype, *_ = program.values[r.n].layout
            stand_ins[r.n] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return stand_ins[r.n]

    given, named = with_refs((args, kwargs), stand_in)
    wanted = (node.op, *with_refs((node.args, node.kwargs), stand_in))
    with without_history(), _Asked(wanted, _made(node.outs, stand_in)) as asked:
        try:
            func(*given, **named)
        except Exception:  # noqa: BLE001 - not meant for these arguments
            return False
    return asked.times == 1


def _made(outs: Any, stand_in: Callable[[Ref], torch.Tensor]) -> Any:
    """Stand-ins for the results of an operator, nested as ``outs`` are."""
    if isinstance(outs, (tuple, list)):
        return tuple(_made(o, stand_in) for o in outs)
    return stand_in(Ref(outs)) if isinstance(outs, int) else outs


class _Asked(DispatchMode):
    """A dispatch mode that counts calls of the wanted operator and returns stand-ins for it."""

    def __init__(self, wanted: tuple, made: Any) -> None:
        super().__init__()
        self.wanted = wanted
        self.made = made
        self.times = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _same((func, args, kwargs or {}), self.wanted):
            raise _AnotherOne
        self.times += 1
        return self.made


class _AnotherOne(Exception):  # noqa: N818 - no error: the function is not taken
    """Signal that a function dispatches to another operator than the recorded one."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a is b or repr(a) == repr(b))
