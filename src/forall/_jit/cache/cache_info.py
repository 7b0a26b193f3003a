"""A jitted function's cache in readable form: counts, and each kind of call with its program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import pytree
from forall._compat.devices import find_default_device
from forall._compat.dispatch_state import is_autocast
from forall._core.errors import format_columns, format_short
from forall._jit.cache.differentiable_entry import DifferentiableEntry
from forall._jit.graph import Ref
from forall._jit.static_args import unbox_static

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forall._jit.cache.entry import CacheEntry
    from forall._jit.graph import OpNode, Program

_SHOWN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class CacheInfo(NamedTuple):
    """Counts as in `functools.lru_cache`: ``hits`` were replayed, ``misses`` ran the function."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Kind(NamedTuple):
    """One kind of call: its arguments, and its program, or ``why`` it has none.

    ``times`` is how often it was recorded: once, and again whenever a captured value has changed.
    """

    arguments: str
    operators: int
    times: int
    why: str | None
    text: str

    def __str__(self) -> str:
        return self.text


def describe_entry(name: str, recorded: CacheEntry, arguments: str | None = None) -> Kind:
    """The `Kind` of a recorded call, with its program as readable text."""
    arguments = recorded.history.arguments if arguments is None else arguments
    count, times = len(recorded.program.nodes), recorded.history.times
    head = f"{name}({arguments}): {count} operator{'' if count == 1 else 's'}"
    again = f", recorded {times} times" if times > 1 else ""
    text = f"{head}{again}\n{format_columns(_make_rows(recorded))}"
    return Kind(arguments, count, times, None, text)


def describe_eager_kind(name: str, arguments: str, why: str) -> Kind:
    """The `Kind` of a call that is not recorded."""
    return Kind(arguments, 0, 0, why, f"{name}({arguments}): not recorded: {why}")


def describe_arguments(args: tuple, kwargs: dict[str, Any]) -> str:
    """Text for the arguments of a call and the state of torch, as far as they tell kinds apart."""
    given = [
        *map(_describe_argument, args),
        *(f"{k}={_describe_argument(a)}" for k, a in kwargs.items()),
    ]
    state = {
        "no_grad": not torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": is_autocast(),
    }
    device = find_default_device()
    state[f"default device {device}"] = device is not None
    under = " and ".join(name for name, on in state.items() if on)
    return ", ".join(given) + (f"; under {under}" if under else "")


def _describe_argument(a: Any) -> str:
    a = unbox_static(a)
    if isinstance(a, torch.Tensor):
        if a.is_nested:  # it has no shape to show
            return "nested"
        strides = "" if a.layout is not torch.strided or a.is_contiguous() else f" by {a.stride()}"
        return f"{format_short(a)}{strides}{' requires_grad' if a.requires_grad else ''}"
    if isinstance(a, _SHOWN):
        return format_short(a)
    inside = pytree.get_leaves(a)
    if len(inside) == 1 and inside[0] is a:
        return type(a).__name__  # the object's own repr may be long, or may fail
    return f"{type(a).__name__}({', '.join(map(_describe_argument, inside))})"


def _make_rows(recorded: CacheEntry) -> list[tuple[str, ...]]:
    program = recorded.program
    derivative = recorded.derivative if isinstance(recorded, DifferentiableEntry) else None
    first, last = derivative.halves if derivative else (program.nodes, [])
    rows = [
        *_make_value_rows(program, program.inputs, "argument"),
        *_make_value_rows(program, program.captured, "captured, read anew"),
        *_make_value_rows(program, program.constants, "constant"),
        *(_make_node_row(program, node) for node in first),
        (f"return {_format_names(program.outputs)}",),
    ]
    if derivative:
        rows += [
            *_make_value_rows(
                program, derivative.back.cotangents, "cotangent of the backward pass"
            ),
            *(_make_node_row(program, node) for node in last),
            (f"return {_format_names(n for n in derivative.back.gradients if n is not None)}",),
        ]
    return [row if len(row) == 2 else (*row, "") for row in rows]


def _make_value_rows(program: Program, numbers: Iterable[int], what: str) -> list[tuple[str, ...]]:
    return [(f"v{n}: {what}", _format_layout(program, n)) for n in numbers]


def _make_node_row(program: Program, node: OpNode) -> tuple[str, ...]:
    given = [_format_argument(a) for a in node.args]
    given += [f"{k}={_format_argument(a)}" for k, a in node.kwargs.items()]
    made = [*node.makes()]
    call = f"{str(node.op).removeprefix('aten.')}({', '.join(given)})"
    layouts = ", ".join(_format_layout(program, n) for n in made)
    return (f"{_format_names(made)} = {call}" if made else call), layouts


def _format_argument(a: Any) -> str:
    if type(a) is Ref or type(a) in (bool, int, float, str, type(None)):
        return repr(a)
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(map(_format_argument, a))}]"
    return str(a).removeprefix("torch.")


def _format_names(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{n}" for n in numbers)


def _format_layout(program: Program, n: int) -> str:
    layout = program.values[n].layout
    return f"{str(layout.dtype).removeprefix('torch.')}{[*layout.shape]}"
