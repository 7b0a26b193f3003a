"""Concretization: Python asks a tensor for a value (`if x > 0`, ``x.item()``, ``x[mask]``).

If all examples answer alike, that is the answer. If not, the level whose examples differ is run
once more for each group of them that agrees (`_core.divergence`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import make_divergence
from forall._core.levels import run_outside, stack, top
from forall._vmap.active_set.merge import is_stale, restrict_to_running
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.concretize_listeners import notify_if_traced, notify_listeners

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensor = torch.Tensor


def read_answers(t: Tensor) -> tuple[Tensor, list]:
    """All values (n_1, .., n_k, *S) of examples of shape (*S), and the k levels that differ."""
    if not isinstance(t, Wrapper):
        with no_dispatch(), functions_off():
            return t.detach(), []
    if type(t) is not BatchedTensor:
        with functions_off(), run_outside(t.level):
            return read_answers(t.level.fallback_value(t))
    values, levels = read_answers(t.value)
    if t.axis is None:
        return values, levels
    notify_if_traced()
    with no_dispatch(), functions_off():
        return values.movedim(len(levels) + t.axis, len(levels)), [*levels, t.level]


def make_truth_reader(t: Tensor) -> Callable[[], Tensor] | None:
    """A function that reads a boolean tensor's values of all examples; None for other dtypes."""
    return (lambda: read_answers(t)[0]) if t.dtype is torch.bool else None


def get_plain_numbers(x: Any) -> Tensor | None:
    """The stack of a tensor with one entry, if no level but its own has a part in it; else None.

    A short way for the common case.
    """
    if type(x) is not BatchedTensor or x.axis is None or type(x.value) is not torch.Tensor:
        return None
    stack.asked = True
    if stack.listening:
        return None  # listeners are told of questions on the long way
    level = x.level
    alone = level is top() and level.parent is None and level.size == x.value.numel() > 0
    return x.value if alone else None


def concretize(asked: Tensor, complaint: Callable[[], Exception]) -> Tensor:
    """Return the one value of all examples that run.

    Where they differ, raise `Diverged` to run them in groups, or ``complaint`` if the level cannot.
    """
    stack.asked = True
    notify_if_traced()
    values, levels = read_answers(restrict_if_stale(asked))
    with no_dispatch(), functions_off():
        for level in levels:
            if not level.size:
                raise complaint()
            rows = values.reshape(level.size, -1)
            rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
            if level.size > 1 and not _are_equal(rows):
                groups = _group_equal_rows(rows)
                if len(groups) > 1:
                    raise make_divergence(level, groups, complaint)
            values = values[0]
    return values


def restrict_if_stale(t: Tensor) -> Tensor:
    """Restrict a tensor that may be one of more examples."""
    if not stack.diverged:
        return t
    return restrict_to_running(t) if is_stale(t) else t


def _are_equal(rows: Tensor) -> bool:
    """Return True if all rows (B, N) are the same; 0.0 and -0.0 are not, and NaN is nothing's."""
    if not torch.equal(rows[1:], rows[:-1]):
        return False
    if not rows.is_floating_point():
        return True
    signs = rows.signbit()
    return torch.equal(signs[1:], signs[:-1])


def _group_equal_rows(rows: Tensor) -> list[list[int]]:
    """The numbers of equal rows (B, N), in the order of their first ones. NaN equals NaN."""
    if rows.shape[1] == 1 and rows.dtype == torch.bool:
        found = [rows[:, 0].nonzero()[:, 0].tolist(), (~rows[:, 0]).nonzero()[:, 0].tolist()]
        return sorted((g for g in found if g), key=lambda g: g[0])
    same: dict[Any, list[int]] = {}
    for i, row in enumerate(rows.tolist()):
        key = tuple(x if x and x == x else str(x) for x in row)  # noqa: PLR0124 - nan, -0.0
        same.setdefault(key, []).append(i)
    return list(same.values())


def concretize_for_user(asked: Tensor, complaint: Callable[[], Exception]) -> Tensor:
    """Return `concretize` to user code, and tell the listeners."""
    if stack.listening:
        notify_listeners(make_truth_reader(asked))
    return concretize(asked, complaint)


def concretize_number(t: Tensor, complaint: Callable[[], Exception]) -> Any:
    """The Python number of a tensor with one entry."""
    answer = concretize_for_user(t, complaint)
    with no_dispatch(), functions_off():
        return answer.item()
