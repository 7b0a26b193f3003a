"""Names for calls in a profile, and a record of the operators that a call runs.

NOTE [operators in a profile]
    torch's profiler sees an operator twice if a mode or a tensor class of Python's gets it: on the
    wrapped tensors, with all that Python does, and then what Python runs in its place on ordinary
    tensors. Only the latter does the work. An event counts as an operator if neither it nor an
    operator within leads into Python. The outermost such event is taken, with what it calls.

    In forward mode an operator computes the value itself and calls others for the tangent, which
    may lead into Python. If it allocated memory itself, it counts alone, without those it called.
"""

from __future__ import annotations

import ctypes
import os
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.exception_safety import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterator

is_profiling = torch._C._autograd._profiler_enabled


def make_span(name: str) -> Any:
    """Return a context under this name. It is no operator, so modes do not see it."""
    return torch._C._profiler._RecordFunctionFast(f"forall.{name}")


class OperatorEvent(NamedTuple):
    """One call of an operator on ordinary tensors, with the operators that it calls."""

    name: str
    nanoseconds: int
    allocated: int  # bytes, those freed again included


@contextmanager
def record_operators() -> Iterator[list[OperatorEvent]]:
    """Return a context with a list, which holds the operators that ran once the context ends.

    It is torch's profiler, of which there is one at a time: see `is_profiling`.
    """
    found: list[OperatorEvent] = []
    profile = torch.autograd.profiler.profile(record_shapes=True, profile_memory=True)
    _start_quietly(profile)
    try:
        yield found
    finally:
        profile.__exit__(None, None, None)
        results = profile.kineto_results
        if results is not None:
            found.extend(_find_operators(results.experimental_event_tree()))


_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "6"  # above all levels


def _start_quietly(profile: Any) -> None:
    """Start the profiler. The first one of a process reads what it prints about itself."""
    is_set = _LEVEL in os.environ
    os.environ.setdefault(_LEVEL, _SILENT)
    try:
        profile.__enter__()
    finally:
        if not is_set:
            os.environ.pop(_LEVEL, None)


def _find_operators(roots: list) -> Iterator[OperatorEvent]:
    """Return the operators among these events, see NOTE [operators in a profile]."""
    events, parents = [*roots], [-1] * len(roots)
    for i, event in enumerate(events):  # grows, parents come before their children
        events += event.children
        parents += [i] * len(event.children)
    own = [_is_operator(event) for event in events]
    plain, allocated = [*own], [_count_bytes(event) for event in events]
    for i in reversed(range(len(events))):
        if (parent := parents[i]) >= 0:
            allocated[parent] += allocated[i]
            plain[parent] &= plain[i] or not _is_call(events[i])
    for i, event in enumerate(events):
        if plain[i] and (parents[i] < 0 or not plain[parents[i]]):
            yield OperatorEvent(event.name, event.duration_time_ns, allocated[i])
        elif own[i] and not plain[i] and (alone := sum(map(_count_bytes, event.children))):
            within = sum(child.duration_time_ns for child in event.children)
            yield OperatorEvent(event.name, max(0, event.duration_time_ns - within), alone)


def _is_call(event: Any) -> bool:
    return event.tag == torch._C._profiler._EventType.TorchOp


def _count_bytes(event: Any) -> int:
    is_memory = event.tag == torch._C._profiler._EventType.Allocation
    return max(event.extra_fields.alloc_size, 0) if is_memory else 0


def _is_operator(event: Any) -> bool:
    """Return True for a call of an operator on ordinary tensors."""
    if not _is_call(event) or event.extra_fields.scope != torch._C._profiler.RecordScope.FUNCTION:
        return False
    name = event.name
    if "::" not in name or name.startswith(("autograd::", "profiler::", "forall.")):
        return False
    return not any(map(_has_no_memory, event.extra_fields.inputs))


def _has_no_memory(value: Any) -> bool:
    """Return True for a dense tensor without memory of its own: a wrapper, or one on meta."""
    if isinstance(value, list):
        return any(map(_has_no_memory, value))
    if not isinstance(value, torch._C._profiler._TensorMetadata):
        return False
    if value.layout != torch.strided or prod(value.sizes) == 0:
        return False
    if value.storage_data_ptr is not None:
        return False
    # This property returns None without a reference of its own. Python below 3.12 frees None, and
    # ends, once all references to it are lost like that.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
    return True
