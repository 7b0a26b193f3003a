"""A jitted function's cache in readable form: counts, and each kind of call with its program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import pytree
from forall._compat.devices import default_device
from forall._compat.dispatch_state import is_autocast
from forall._core.errors import columns, short
from forall._jit.cache.differentiable_entry import Differentiated
from forall._jit.graph import Ref
from forall._jit.static_args import unboxed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forall._jit.cache.entry import Recorded
    from forall._jit.graph import Node, Program

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


def listed(name: str, recorded: Recorded) -> Kind:
    """The `Kind` of a recorded call, with its program as readable text."""
    count, times = len(recorded.program.nodes), recorded.times
    head = f"{name}({recorded.arguments}): {count} operator{'' if count == 1 else 's'}"
    again = f", recorded {times} times" if times > 1 else ""
    text = f"{head}{again}\n{columns(_rows(recorded))}"
    return Kind(recorded.arguments, count, times, None, text)


def unlisted(name: str, arguments: str, why: str) -> Kind:
    """The `Kind` of a call that is not recorded."""
    return Kind(arguments, 0, 0, why, f"{name}({arguments}): not recorded: {why}")


def words(args: tuple, kwargs: dict[str, Any]) -> str:
    """Text for the arguments of a call and the state of torch, as far as they tell kinds apart."""
    given = [*map(_word, args), *(f"{k}={_word(a)}" for k, a in kwargs.items())]
    state = {
        "no_grad": not torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": is_autocast(),
    }
    device = default_device()
    state[f"default device {device}"] = device is not None
    under = " and ".join(name for name, on in state.items() if on)
    return ", ".join(given) + (f"; under {under}" if under else "")


def _word(a: Any) -> str:
    a = unboxed(a)
    if isinstance(a, torch.Tensor):
        if a.is_nested:  # it has no shape to show
            return "nested"
        strides = "" if a.layout is not torch.strided or a.is_contiguous() else f" by {a.stride()}"
        return f"{short(a)}{strides}{' requires_grad' if a.requires_grad else ''}"
    if isinstance(a, _SHOWN):
        return short(a)
    inside = pytree.leaves(a)
    if len(inside) == 1 and inside[0] is a:
        return type(a).__name__  # the object's own repr may be long, or may fail
    return f"{type(a).__name__}({', '.join(map(_word, inside))})"


def _rows(recorded: Recorded) -> list[tuple[str, ...]]:
    program = recorded.program
    two = isinstance(recorded, Differentiated)
    first, last = recorded.halves if two else (program.nodes, [])
    rows = [
        *_given(program, program.inputs, "argument"),
        *_given(program, program.captured, "captured, read anew"),
        *_given(program, program.constants, "constant"),
        *(_row(program, node) for node in first),
        (f"return {_names(program.outputs)}",),
    ]
    if two:
        rows += [
            *_given(program, recorded.back.cotangents, "cotangent of the backward pass"),
            *(_row(program, node) for node in last),
            (f"return {_names(n for n in recorded.back.gradients if n is not None)}",),
        ]
    return [row if len(row) == 2 else (*row, "") for row in rows]


def _given(program: Program, numbers: Iterable[int], what: str) -> list[tuple[str, ...]]:
    return [(f"v{n}: {what}", _layout(program, n)) for n in numbers]


def _row(program: Program, node: Node) -> tuple[str, ...]:
    given = [_argument(a) for a in node.args]
    given += [f"{k}={_argument(a)}" for k, a in node.kwargs.items()]
    made = [*node.makes()]
    call = f"{str(node.op).removeprefix('aten.')}({', '.join(given)})"
    layouts = ", ".join(_layout(program, n) for n in made)
    return (f"{_names(made)} = {call}" if made else call), layouts


def _argument(a: Any) -> str:
    if type(a) is Ref or type(a) in (bool, int, float, str, type(None)):
        return repr(a)
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(map(_argument, a))}]"
    return str(a).removeprefix("torch.")


def _names(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{n}" for n in numbers)


def _layout(program: Program, n: int) -> str:
    layout = program.values[n].layout
    return f"{str(layout.dtype).removeprefix('torch.')}{[*layout.shape]}"
