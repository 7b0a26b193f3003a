"""numpy functions on batched values: numpy itself runs once per example."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import numpy_interop, pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import Wrapper, unwrap_all
from forall._core.errors import make_data_dependent_error
from forall._core.host_reads import notify_host_read
from forall._core.levels import run_outside
from forall._core.looped_operators import note_looped_operator
from forall._vmap.batched_tensor import BatchedTensor, replace_ended_args
from forall._vmap.per_example import (
    find_mapped_levels,
    iter_example_numbers,
    rewrap_examples,
    select_example,
)


def run_numpy_per_example(_level: Any, func: Any, args: tuple, kwargs: dict, /) -> Any:
    """Run a numpy function for each example, and stack its results as one tensor of all."""
    args, kwargs = replace_ended_args(_format_numpy_name(func), args, kwargs)
    flat, spec = pytree.flatten((args, kwargs))
    for a in flat:
        _refuse_derivatives(func, a)
    notify_host_read()
    levels = find_mapped_levels(flat)
    if levels:
        note_looped_operator(
            _format_numpy_name(func),
            f"vmap: numpy runs {_format_numpy_name(func)} once per example.\n"
            "Use torch's function, or one of numpy's that torch has too.",
        )
    results = []
    for places in iter_example_numbers(levels):
        with functions_off(), run_outside(levels[0]) if levels else functions_off():
            given = [numpy_interop.to_numpy(unwrap_all(select_example(a, places))) for a in flat]
        a, k = pytree.unflatten(given, spec)
        results.append(pytree.flatten(func(*a, **k)))
    columns = zip(*(leaves for leaves, _ in results), strict=True)
    return pytree.unflatten(
        [_rewrap_results(func, list(c), levels) for c in columns], results[0][1]
    )


def _format_numpy_name(func: Any) -> str:
    return f"np.{getattr(func, '__name__', func)}"


def _refuse_derivatives(func: Any, a: Any) -> None:
    while isinstance(a, torch.Tensor):
        if a.requires_grad:
            raise documented_error(RuntimeError, "numpy")(
                f"{_format_numpy_name(func)}: numpy has no derivative of this "
                "for a tensor that requires grad.\n"
                "Use torch's function, or x.detach()."
            )
        if not isinstance(a, Wrapper):
            return
        if type(a) is not BatchedTensor:
            raise documented_error(NotImplementedError, "numpy")(
                f"{_format_numpy_name(func)}: numpy has no derivative of this "
                "for a value with a tangent.\n"
                "Use torch's function."
            )
        a = a.value


def _rewrap_results(func: Any, results: list, levels: list) -> Any:
    head = results[0]
    if not levels:
        return numpy_interop.to_tensors(head)
    if not numpy_interop.is_numpy_value(head):
        if all(r == head for r in results):
            return head
        if not isinstance(head, (bool, int, float, complex)):
            raise make_data_dependent_error(_format_numpy_name(func), "Compute it outside vmap.")
    with functions_off(), run_outside(levels[0]):
        tensors = [torch.as_tensor(numpy_interop.to_tensors(r)) for r in results]
        if any(t.shape != tensors[0].shape for t in tensors):
            what = f"the shape that {_format_numpy_name(func)} gives"
            raise make_data_dependent_error(what, "Use an operation with a result of fixed shape.")
        return rewrap_examples(torch.stack(tensors), levels)
