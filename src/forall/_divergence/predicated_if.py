"""Predicated ``if``: sides that only compute run on their rows of the stacks, joined at the end.

The lanes never diverge, so no active set, region or restricted tensor is needed. If the code needs
wrapper tensors after all, it is abandoned without side effects, and the lanes diverge as usual.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._ast_rewrite.convert import RAW_STACK_TRIES
from forall._compat.devices import copy_index_to
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.levels import stack
from forall._divergence import aliases
from forall._divergence.pure_call import take_outside_value, wrap_result
from forall._divergence.thread_state import thread
from forall._vmap.active_set.active_mask import ActiveSet
from forall._vmap.active_set.sub_level import split_by_test
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.fast_path.raw_stack import (
    VIEW,
    LeaveFastPath,
    RawStack,
    can_use_raw_stacks,
)
from forall._vmap.vmap_level import VmapLevel

Tensor = torch.Tensor
_tries: dict[int, int] = {}  # by site, how often a run may still fail midway


class _Missing:
    """Stands for a missing value."""


_MISSING, _KEPT = _Missing(), _Missing()


def run_predicated_if(site: int, test: Any, yes: Any, no: Any, joins: Any, local: dict) -> Any:
    """Run a predicated ``if`` and return the values of the names ``joins`` after it.

    Return None if the lanes must diverge for it. ``test`` is a function and the names of its
    arguments; a side also has the names that it returns.
    """
    if (
        _tries.get(site, RAW_STACK_TRIES) <= 0
        or thread.report is not None
        or stack.listening
        or not can_use_raw_stacks()
    ):
        return None
    level: Any = stack.top
    if level.parent is not None or not isinstance(level, VmapLevel) or not level.config.diverges:
        return None
    with functions_off(), no_dispatch():
        try:
            kept = [j for j in joins if j not in yes[2] or j not in no[2]]
            names = {*test[1], *yes[1], *no[1], *kept}
            values = {n: take_outside_value(local[n]) if n in local else _MISSING for n in names}
        except LeaveFastPath:
            return None
        try:
            flags = _read_flags(_run_side(test, values, None), level)
            return None if flags is None else _run_on_rows(flags, yes, no, joins, values, level)
        except Exception:  # noqa: BLE001 - the run with diverged lanes raises it properly
            _tries[site] = _tries.get(site, RAW_STACK_TRIES) - 1
            return None


def _run_side(side: Any, values: dict[str, Any], rows: Tensor | None) -> Any:
    """Run a side's function on all examples, or on these rows of them."""
    given = [values[n] for n in side[1]]
    if rows is not None:
        given = [
            RawStack(a.v.index_select(0, rows), a.of)
            if type(a) is RawStack
            else a  # keeps its identity
            for a in given
        ]
    return side[0](*given)


def _read_flags(test: Any, level: Any) -> Tensor | None:
    """Return (B,) bools: the examples for which the test holds; None if the test is a number."""
    if type(test) is not RawStack:
        return None
    v = test.v.reshape(-1)
    if len(v) != level.size:
        raise LeaveFastPath
    return v if v.dtype is torch.bool else v != 0


def _run_on_rows(flags: Tensor, yes: Any, no: Any, joins: Any, values: dict, level: Any) -> tuple:
    device = flags.device
    flags = flags if flags.is_cpu else flags.cpu()  # the one wait for the device
    some = flags.nonzero().view(-1)
    if len(some) in (0, level.size):
        side = yes if len(some) else no
        bound = dict(zip(side[2], _run_side(side, values, None), strict=True))
        return tuple([wrap_result(bound[j] if j in bound else values[j]) for j in joins])
    some = copy_index_to(some, device)
    both = ((yes, some), (no, copy_index_to((~flags).nonzero().view(-1), device)))
    found = [dict(zip(s[2], _run_side(s, values, rows), strict=True)) for s, rows in both]
    for bound in found:
        new = [id(v) for v in bound.values() if type(v) is RawStack and v.of is None]
        if len({*new}) < len(new):
            raise LeaveFastPath  # one tensor under two names
    made = _RowJoiner(level, flags, (some, both[1][1]))
    return tuple([made.join_sides(values.get(j), *[b.get(j, _KEPT) for b in found]) for j in joins])


class _RowJoiner:
    """Joins the values that the two sides have computed on their rows."""

    def __init__(self, level: Any, flags: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        self.level, self.flags, self.rows = level, flags, rows
        self.worlds: list[ActiveSet] | None = None

    def join_sides(self, before: Any, *sides: Any) -> Any:
        """Join the values of both sides into one; a side may have kept the value ``before``."""
        values = [before if v is _KEPT else v for v in sides]
        if not all(type(v) is RawStack and v.of is not VIEW for v in values):
            raise LeaveFastPath
        a, b = values
        if a.of is b.of and a.of is not None:
            return a.of
        v, w = a.v, b.v
        if v.shape[1:] != w.shape[1:] or v.dtype is not w.dtype or v.device != w.device:
            raise LeaveFastPath
        out = v.new_empty((self.level.size, *v.shape[1:]))
        for bare, side, rows in zip(values, sides, self.rows, strict=True):
            part = bare.v.index_select(0, rows) if side is _KEPT else bare.v
            out.index_copy_(0, rows, part)
        made = wrap_stack(out, 0, self.level)
        if a.of is not None or b.of is not None:  # a write to one of them is a write to both
            if self.worlds is None:
                self.worlds = [
                    ActiveSet.from_level(p) for p in split_by_test(self.level, self.flags)
                ]
            aliases.note_join(made, [*zip(self.worlds, (a.of, b.of), strict=True)])
        return made
