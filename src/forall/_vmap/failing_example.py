"""The error of one example, as the loop would raise it, with the number of that example.

An operator that fails on the stacks is run once more for each example, in the loop's order, on
plain tensors, until one fails as it would in the loop. This happens only after a failure, so that a
successful call costs nothing. Arguments that the operator writes into are copied for the rerun, and
the state of the random generators is put back.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree, rng_state
from forall._compat.call_site import find_users_line
from forall._compat.dispatch_state import functions_off
from forall._compat.op_schema import find_written_args
from forall._compat.wrapper_tensor import unwrap_all
from forall._core.divergence import Diverged
from forall._core.errors import CollectiveError, DataDependentError, format_columns
from forall._core.levels import run_outside_all
from forall._vmap.concretize import concretize
from forall._vmap.per_example import (
    CopyPerExample,
    find_mapped_levels,
    iter_example_numbers,
    rewrap_examples,
    select_example,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._core.errors import CallOrigin
    from forall._vmap.per_example import ExampleNumbers

_NOT_ONE_EXAMPLES = (CollectiveError, DataDependentError, Warning, torch.OutOfMemoryError)
_OURS = ("vmap:", "vmap(", "jvp:", "jvp(")  # how messages of this library begin


def is_library_error(error: Exception) -> bool:
    """Return True for an error of this library, which tells of all examples."""
    return isinstance(error, CollectiveError) or str(error).startswith(_OURS)


class AllFailAlikeError(torch.linalg.LinAlgError):
    """An error that all examples have, with one message."""


def find_example_error(
    _level: Any, error: Exception, func: Any, args: tuple, kwargs: dict, /
) -> BaseException:
    """The error to raise where the operator ``func`` failed with ``error`` on the stacks."""
    if isinstance(error, _NOT_ONE_EXAMPLES) or is_library_error(error):
        return error
    mutates = find_written_args(func, args)
    if mutates:
        args = tuple(CopyPerExample(a) if i in mutates else a for i, a in enumerate(args))
        kwargs = {k: CopyPerExample(a) if k in mutates else a for k, a in kwargs.items()}
    # Then all examples fail with the same error, and the first one is enough.
    most = 1 if isinstance(error, (NotImplementedError, AllFailAlikeError)) else None
    return first_error(str(func), func, args, kwargs, most) or error


def first_error(
    name: str, call: Callable, args: tuple, kwargs: dict, most: int | None = None
) -> BaseException | None:
    """The error of the first example for which ``call`` fails, with a note that names it.

    If the examples do not all fail alike they diverge, since the function may catch the error.
    """
    with functions_off():
        flat, spec = pytree.flatten((args, kwargs))
        levels = find_mapped_levels(flat)
        if not levels:
            return None
        parts = most is None and all(level.config.diverges for level in levels)
        errors: list[Exception | None] = []
        found: Exception | None = None
        drawn = rng_state.save_states(flat)
        try:
            with run_outside_all():
                for places in islice(iter_example_numbers(levels), most):
                    a, k = pytree.unflatten([select_example(x, places) for x in flat], spec)
                    try:
                        call(*a, **k)
                        errors.append(None)
                    except Exception as theirs:  # noqa: BLE001 - the user's error, whatever it is
                        if found is None:
                            found = theirs
                            found.add_note(_format_note(name, places))
                        errors.append(theirs)
                        if not parts:
                            break
        finally:
            rng_state.restore_states(drawn)
    return found if found is None or not parts else _diverge_on_errors(errors, levels) or found


def _diverge_on_errors(errors: list[Exception | None], levels: list) -> BaseException | None:
    """The exception that splits the examples where not all fail alike; None where all do."""
    kinds = [None if e is None else (type(e), str(e)) for e in errors]
    known = list(dict.fromkeys(kinds))
    codes = rewrap_examples(torch.tensor([known.index(k) for k in kinds]), levels)
    try:
        concretize(codes, RuntimeError)
    except Diverged as diverged:
        return diverged
    return None


def _format_note(name: str, places: ExampleNumbers) -> str:
    line = find_users_line()
    rows = [(name, f"at {line}", line.text())]
    for level, number in reversed(places.items()):
        if level.origin is not None and level.origin.is_users:
            rows.append(_format_row(level.origin, number))
    return f"{_FAILED}\n{format_columns(rows)}"


_FAILED = "vmap: one example failed."


def _format_row(origin: CallOrigin, number: int) -> tuple[str, str, str]:
    which = f"example {origin.numbers[number]} of {origin.size}, counted from 0"
    return str(origin.call), f"at {origin.place}", which


def name_example(error: Exception, origin: CallOrigin, number: int) -> None:
    """Say for which example of a call the user's own code failed, if no note has said so."""
    row = _format_row(origin, number)
    notes = getattr(error, "__notes__", [])
    if not origin.is_users or is_library_error(error) or any(row[2] in n for n in notes):
        return
    ours = [i for i, note in enumerate(notes) if note.startswith(_FAILED)]
    if ours:
        notes[ours[0]] += f"\n{format_columns([row])}"
    else:
        error.add_note(f"{_FAILED}\n{format_columns([row])}")


def check_fits(value: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise torch's error if a number does not fit a dtype; torch checks only Python's numbers."""
    name = _NAMES.get(dtype)
    if value.dtype in (dtype, torch.bool) or value.is_complex() or name is None:
        return
    low, high = _get_range(dtype)
    if dtype is torch.uint8 and not value.is_floating_point():
        low = -high  # torch lets negative numbers wrap
    least, most = _get_range(value.dtype)
    may_be_nan = value.is_floating_point() and not dtype.is_floating_point  # NaN does not fit
    if not may_be_nan and low <= least and most <= high:
        return  # every number fits
    with run_outside_all():  # a program that is being recorded makes the test too
        v = unwrap_all(value)
        fits = (v >= low) & (v <= high)
        if dtype.is_floating_point and v.is_floating_point():
            fits |= ~v.isfinite()
        if bool(fits.all()):
            return
    raise RuntimeError(f"value cannot be converted to type {name} without overflow")


def _get_range(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


# Names of dtypes in torch's errors.
_NAMES = {
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int",
    torch.int64: "int64_t",
    torch.float16: "at::Half",
    torch.bfloat16: "at::BFloat16",
    torch.float32: "float",
}
