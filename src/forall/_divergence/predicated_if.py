"""Predicated ``if``: sides that only compute run on their rows of the stacks, joined at the end.

The lanes never diverge, so no active set, region or restricted tensor is needed. If the code needs
wrapper tensors after all, it is abandoned without side effects, and the lanes diverge as usual.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._ast_rewrite.convert import TRIES
from forall._compat.devices import on_device
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.levels import stack
from forall._divergence import aliases
from forall._divergence.pure_call import given_back, known
from forall._divergence.thread_state import thread
from forall._vmap.active_set.active_mask import World
from forall._vmap.active_set.sub_level import halves
from forall._vmap.batched_tensor import wrap
from forall._vmap.fast_path.raw_stack import (
    VIEW,
    Aside,
    Bare,
    may_be_bare,
)

Tensor = torch.Tensor
_tries: dict[int, int] = {}  # by site, how often a run may still fail midway


class _Missing:
    """Stands for a missing value."""


_MISSING, _KEPT = _Missing(), _Missing()


def at_once(site: int, test: Any, yes: Any, no: Any, joins: Any, local: dict) -> Any:
    """Run a predicated ``if`` and return the values of the names ``joins`` after it.

    Return None if the lanes must diverge for it. ``test`` is a function and the names of its
    arguments; a side also has the names that it returns.
    """
    if (
        _tries.get(site, TRIES) <= 0
        or thread.report is not None
        or stack.listening
        or not may_be_bare()
    ):
        return None
    level: Any = stack.top
    if level.parent is not None or not getattr(level, "parts", False):
        return None
    with functions_off(), no_dispatch():
        try:
            kept = [j for j in joins if j not in yes[2] or j not in no[2]]
            names = {*test[1], *yes[1], *no[1], *kept}
            values = {n: known(local[n]) if n in local else _MISSING for n in names}
        except Aside:
            return None
        try:
            flags = _flags(_run(test, values, None), level)
            return None if flags is None else _answer(flags, yes, no, joins, values, level)
        except Exception:  # noqa: BLE001 - the run with diverged lanes raises it properly
            _tries[site] = _tries.get(site, TRIES) - 1
            return None


def _run(side: Any, values: dict[str, Any], rows: Tensor | None) -> Any:
    """Run a side's function on all examples, or on these rows of them."""
    given = [values[n] for n in side[1]]
    if rows is not None:
        given = [
            Bare(a.v.index_select(0, rows), a.of) if type(a) is Bare else a  # keeps its identity
            for a in given
        ]
    return side[0](*given)


def _flags(test: Any, level: Any) -> Tensor | None:
    """Return (B,) bools: the examples for which the test holds; None if the test is a number."""
    if type(test) is not Bare:
        return None
    v = test.v.reshape(-1)
    if len(v) != level.size:
        raise Aside
    return v if v.dtype is torch.bool else v != 0


def _answer(flags: Tensor, yes: Any, no: Any, joins: Any, values: dict, level: Any) -> tuple:
    device = flags.device
    flags = flags if flags.is_cpu else flags.cpu()  # the one wait for the device
    some = flags.nonzero().view(-1)
    if len(some) in (0, level.size):
        side = yes if len(some) else no
        bound = dict(zip(side[2], _run(side, values, None), strict=True))
        return tuple([given_back(bound[j] if j in bound else values[j]) for j in joins])
    some = on_device(some, device)
    both = ((yes, some), (no, on_device((~flags).nonzero().view(-1), device)))
    found = [dict(zip(s[2], _run(s, values, rows), strict=True)) for s, rows in both]
    for bound in found:
        new = [id(v) for v in bound.values() if type(v) is Bare and v.of is None]
        if len({*new}) < len(new):
            raise Aside  # one tensor under two names
    made = _Made(level, flags, (some, both[1][1]))
    return tuple([made.joined(values.get(j), *[b.get(j, _KEPT) for b in found]) for j in joins])


class _Made:
    """Joins the values that the two sides have computed on their rows."""

    def __init__(self, level: Any, flags: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        self.level, self.flags, self.rows = level, flags, rows
        self.worlds: list[World] | None = None

    def joined(self, before: Any, *sides: Any) -> Any:
        """Join the values of both sides into one; a side may have kept the value ``before``."""
        values = [before if v is _KEPT else v for v in sides]
        if not all(type(v) is Bare and v.of is not VIEW for v in values):
            raise Aside
        a, b = values
        if a.of is b.of and a.of is not None:
            return a.of
        v, w = a.v, b.v
        if v.shape[1:] != w.shape[1:] or v.dtype is not w.dtype or v.device != w.device:
            raise Aside
        out = v.new_empty((self.level.size, *v.shape[1:]))
        for bare, side, rows in zip(values, sides, self.rows, strict=True):
            part = bare.v.index_select(0, rows) if side is _KEPT else bare.v
            out.index_copy_(0, rows, part)
        made = wrap(out, 0, self.level)
        if a.of is not None or b.of is not None:  # a write to one of them is a write to both
            if self.worlds is None:
                self.worlds = [World.alone(p) for p in halves(self.level, self.flags)]
            aliases.remember(made, [*zip(self.worlds, (a.of, b.of), strict=True)])
        return made
