"""Overrides of ``apply_``, ``map_`` and ``map2_``, which call a Python function on each entry.

They read memory without the dispatcher. A wrapper tensor, which has no memory, would crash the
process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import ENTRYWISE, Wrapper
from forall._core.errors import make_shared_write_error
from forall._core.levels import run_outside, top
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.mutation.mutation_log import log_plain_read
from forall._vmap.mutation.rollback import find_logs
from forall._vmap.per_example import (
    find_mapped_levels,
    iter_example_numbers,
    rewrap_examples,
    select_example,
)
from forall._vmap.registry import CALLS

Tensor = torch.Tensor


def _make_apply(name: str) -> Any:
    method = getattr(Tensor, name)

    def call(x: Tensor, *others_and_function: Any) -> Any:
        *others, function = others_and_function
        tensors = [x, *others]
        if top() is None and not any(isinstance(t, Wrapper) for t in tensors):
            return NotImplemented
        if any(t.requires_grad for t in tensors):
            raise documented_error(RuntimeError, "numpy")(
                f"{name}: a function of Python's has no derivative, and a tensor requires grad.\n"
                f"Use x.detach().{name}(..), or torch's functions."
            )
        for t in others:
            if not isinstance(t, Wrapper):
                log_plain_read(f"x.{name}()", t)
        around = _list_levels()
        if find_logs(top()) and _is_shared_older(x):
            raise make_shared_write_error(
                f"x.{name}()", x, []
            )  # examples would see each other's results
        levels, root = find_mapped_levels(tensors), around[-1] if around else None
        found = []
        for places in iter_example_numbers(levels):  # in the order of the loop
            with run_outside(root) if root is not None else nullcontext():
                with functions_off():
                    first, *rest = (select_example(t, places) for t in tensors)
                    first = first.clone()
                found.append(method(first, *rest, function))  # visible to a recorder of calls
        if not levels:
            return x.copy_(found[0])
        with functions_off(), run_outside(levels[0]):
            out = rewrap_examples(torch.stack(found), levels)
        return x.copy_(out)

    return call


def _is_shared_older(t: Any) -> bool:
    while isinstance(t, Wrapper):
        if type(t) is BatchedTensor and (t.axis is not None or not t.is_external):
            return False
        t = t.value
    return True


def _list_levels() -> list[Any]:
    """Return the levels that are running, the innermost first."""
    found, level = [], top()
    while level is not None:
        found.append(level)
        level = level.parent
    return found


CALLS.update({getattr(Tensor, name): _make_apply(name) for name in ENTRYWISE})
