"""numpy functions on batched values: numpy itself runs once per example."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import numpy_interop, pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.wrapper_tensor import Wrapper, innermost
from forall._core.errors import data_dependent, slow
from forall._core.host_reads import numbers_told
from forall._core.levels import outside
from forall._vmap.batched_tensor import Batched, without_ended
from forall._vmap.per_example import (
    all_places,
    back_in,
    example_of,
    levels_of,
)


def by_numpy(_level: Any, func: Any, args: tuple, kwargs: dict, /) -> Any:
    """Run a numpy function for each example, and stack its results as one tensor of all."""
    args, kwargs = without_ended(_name(func), args, kwargs)
    flat, spec = pytree.flatten((args, kwargs))
    for a in flat:
        _refuse_derivatives(func, a)
    numbers_told()
    levels = levels_of(flat)
    if levels:
        slow(
            f"vmap: numpy runs {_name(func)} once per example.\n"
            "Use torch's function, or one of numpy's that torch has too."
        )
    results = []
    for places in all_places(levels):
        with functions_off(), outside(levels[0]) if levels else functions_off():
            given = [numpy_interop.plain(innermost(example_of(a, places))) for a in flat]
        a, k = pytree.unflatten(given, spec)
        results.append(pytree.flatten(func(*a, **k)))
    columns = zip(*(leaves for leaves, _ in results), strict=True)
    return pytree.unflatten([_joined(func, list(c), levels) for c in columns], results[0][1])


def _name(func: Any) -> str:
    return f"np.{getattr(func, '__name__', func)}"


def _refuse_derivatives(func: Any, a: Any) -> None:
    while isinstance(a, torch.Tensor):
        if a.requires_grad:
            raise RuntimeError(
                f"{_name(func)}: numpy has no derivative of this for a tensor that requires grad.\n"
                "Use torch's function, or x.detach()."
            )
        if not isinstance(a, Wrapper):
            return
        if type(a) is not Batched:
            raise NotImplementedError(
                f"{_name(func)}: numpy has no derivative of this for a value with a tangent.\n"
                "Use torch's function."
            )
        a = a.value


def _joined(func: Any, results: list, levels: list) -> Any:
    head = results[0]
    if not levels:
        return numpy_interop.tensor(head)
    if not numpy_interop.is_array(head):
        if all(r == head for r in results):
            return head
        if not isinstance(head, (bool, int, float, complex)):
            raise data_dependent(_name(func), "Compute it outside vmap.")
    with functions_off(), outside(levels[0]):
        tensors = [torch.as_tensor(numpy_interop.tensor(r)) for r in results]
        if any(t.shape != tensors[0].shape for t in tensors):
            what = f"the shape that {_name(func)} gives"
            raise data_dependent(what, "Use an operation with a result of fixed shape.")
        return back_in(torch.stack(tensors), levels)
