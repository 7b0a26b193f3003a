"""Checks of values that torch's API functions make before they call an operator."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import pytree, trace_modes
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.value_errors import has_unknown_class
from forall._compat.wrapper_tensor import Wrapper, innermost
from forall._core.levels import outside_all
from forall._vmap.batched_tensor import wrap
from forall._vmap.failing_example import first_error
from forall._vmap.per_example import levels_of
from forall._vmap.registry import CALLS, register

aten = torch.ops.aten
Tensor = torch.Tensor


def _stack(a: Any) -> Tensor | None:
    """Return the plain tensor with all examples of ``a``; None for what torch itself checks."""
    return innermost(a) if isinstance(a, Wrapper) else None


def _plain(a: Tensor) -> Tensor:
    with functions_off(), no_dispatch():  # a level would take it for one of its own
        return a if (examples := _stack(a)) is None else examples.detach()


def checked(func: Any, fails: Any) -> Any:
    """Return an override of ``func`` that raises the error of the first example that fails.

    ``fails(*args, **kwargs)`` is True if any example has a bad value.
    """

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with functions_off(), no_dispatch():  # where a mode is on, torch leaves the check out
            return func(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if trace_modes.are_on():
            return NotImplemented  # a tracer has no values to check
        with outside_all():  # a program that is being recorded includes the check
            failed = fails(*args, **kwargs)
        if failed:
            error = first_error(func.__name__, unseen, args, kwargs)
            if error is not None:
                raise error
            if not levels_of(pytree.leaves((args, kwargs))):  # nothing is batched: all fail alike
                args, kwargs = pytree.map_tensors(_plain, (args, kwargs))
                unseen(*args, **kwargs)
        return NotImplemented

    return call


def _one_hot(x: Any, num_classes: int = -1) -> bool:
    v = _stack(x)
    if v is None or isinstance(num_classes, Wrapper):
        return False
    return has_unknown_class(v, num_classes)


def _quantile(x: Any, q: Any, *_: Any, **__: Any) -> bool:
    v = _stack(q)
    return v is not None and not bool(((v >= 0) & (v <= 1)).all())


def _normal(mean: Any = 0.0, std: Any = 1.0, *_: Any, **__: Any) -> bool:
    v = _stack(std)
    return v is not None and not v.is_complex() and not bool((v >= 0).all())


def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0, **_: Any) -> bool:
    v = _stack(x)
    if v is None or isinstance(min, Wrapper) or isinstance(max, Wrapper):
        return False
    return max < min or (max == min and not bool(v.isfinite().all()))


def _all_true(level: Any, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Return the unbatched answer for all examples together, which torch reads before it raises."""
    return wrap(func(args[0].value), None, level)


register({aten._is_all_true.default: _all_true})
CALLS.update(
    {
        func: checked(func, fails)
        for func, fails in (
            (torch.nn.functional.one_hot, _one_hot),
            (torch.quantile, _quantile),
            (Tensor.quantile, _quantile),
            (torch.nanquantile, _quantile),
            (Tensor.nanquantile, _quantile),
            (torch.normal, _normal),
            (torch.histc, _histc),
            (Tensor.histc, _histc),
        )
    }
)
