"""Checks of values that torch's API functions make before they call an operator."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import pytree, trace_modes
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.value_errors import has_unknown_class
from forall._compat.wrapper_tensor import Wrapper, unwrap_all
from forall._core.levels import run_outside_all
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.failing_example import first_error
from forall._vmap.per_example import find_mapped_levels
from forall._vmap.registry import CALLS, register_rows

aten = torch.ops.aten
Tensor = torch.Tensor


def _get_stack(a: Any) -> Tensor | None:
    """Return the plain tensor with all examples of ``a``; None for what torch itself checks."""
    return unwrap_all(a) if isinstance(a, Wrapper) else None


def _detach_stack(a: Tensor) -> Tensor:
    with functions_off(), no_dispatch():  # a level would take it for one of its own
        return a if (examples := _get_stack(a)) is None else examples.detach()


def make_checked_call(func: Any, fails: Any) -> Any:
    """Return an override of ``func`` that raises the error of the first example that fails.

    ``fails(*args, **kwargs)`` is True if any example has a bad value.
    """

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with functions_off(), no_dispatch():  # where a mode is on, torch leaves the check out
            return func(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if trace_modes.is_tracer_on():
            return NotImplemented  # a tracer has no values to check
        with run_outside_all():  # a program that is being recorded includes the check
            failed = fails(*args, **kwargs)
        if failed:
            error = first_error(func.__name__, unseen, args, kwargs)
            if error is not None:
                raise error
            if not find_mapped_levels(
                pytree.get_leaves((args, kwargs))
            ):  # nothing is batched: all fail alike
                args, kwargs = pytree.map_tensors(_detach_stack, (args, kwargs))
                unseen(*args, **kwargs)
        return NotImplemented

    return call


def _has_bad_class(x: Any, num_classes: int = -1) -> bool:
    v = _get_stack(x)
    if v is None or isinstance(num_classes, Wrapper):
        return False
    return has_unknown_class(v, num_classes)


def _has_bad_quantile(x: Any, q: Any, *_: Any, **__: Any) -> bool:
    v = _get_stack(q)
    return v is not None and not bool(((v >= 0) & (v <= 1)).all())


def _has_bad_std(mean: Any = 0.0, std: Any = 1.0, *_: Any, **__: Any) -> bool:
    v = _get_stack(std)
    return v is not None and not v.is_complex() and not bool((v >= 0).all())


def _has_bad_range(x: Any, bins: int = 100, min: float = 0, max: float = 0, **_: Any) -> bool:
    v = _get_stack(x)
    if v is None or isinstance(min, Wrapper) or isinstance(max, Wrapper):
        return False
    return max < min or (max == min and not bool(v.isfinite().all()))


def _all_true(level: Any, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Return the unbatched answer for all examples together, which torch reads before it raises."""
    return wrap_stack(func(args[0].value), None, level)


register_rows({aten._is_all_true.default: _all_true})
CALLS.update(
    {
        func: make_checked_call(func, fails)
        for func, fails in (
            (torch.nn.functional.one_hot, _has_bad_class),
            (torch.quantile, _has_bad_quantile),
            (Tensor.quantile, _has_bad_quantile),
            (torch.nanquantile, _has_bad_quantile),
            (Tensor.nanquantile, _has_bad_quantile),
            (torch.normal, _has_bad_std),
            (torch.histc, _has_bad_range),
            (Tensor.histc, _has_bad_range),
        )
    }
)
