"""Rules of batch norm: each channel of each example is normalised over its own entries.

The batch axis is folded into the channels, (B, N, C, *S) -> (N, B*C, *S), and torch's kernel runs
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._vmap.mutation.in_place import done_once, step_later, writable
from forall._vmap.mutation.mutation_log import note_write
from forall._vmap.mutation.pending_updates import Step, is_shared_older
from forall._vmap.registry import BLIND, SHARED, register
from forall._vmap.rule_makers.basic import (
    front,
    is_mapped,
    lower,
    stacked,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor
_KERNEL = aten.native_batch_norm.default
_UPDATE = aten.batch_norm_update_stats.default
_BACK = aten.native_batch_norm_backward.default


def folded(x: Any, level: Any) -> Tensor:
    """Fold the batch axis into the channels: (B, N, C, *S) -> (N, B*C, *S)."""
    return stacked(x, level).transpose(0, 1).flatten(1, 2)


def unfolded(x: Tensor, size: int) -> Tensor:
    """Undo the fold into the channels: (N, B*C, *S) -> (B, N, C, *S)."""
    return x.unflatten(1, (size, x.shape[1] // size)).transpose(0, 1)


def per_channel(p: Any, level: Any) -> Tensor | None:
    """Flatten a parameter or a statistic: (B, C) -> (B*C,)."""
    return None if p is None else stacked(p, level).flatten()


def forward(level, x, params, stats, training, momentum, eps):
    """Return (output, saved mean, saved inverse deviation), wrapped, and new running statistics.

    The running statistics are batched in training mode only. Torch's kernel writes them in place.
    """
    size = level.size
    if not size:
        v = stacked(x, level)
        saved = v.new_empty(0, v.shape[2] if training else 0)
        return wrapped((v.clone(), saved, saved.clone()), 0, level), stats
    if not training and not any(is_mapped(p, level) for p in (*params, *stats)):
        params, stats_in = ([lower(p, level) for p in ps] for ps in (params, stats))
        outs = _KERNEL(front(x).flatten(0, 1), *params, *stats_in, False, momentum, eps)
        out = outs[0].unflatten(0, (size, -1))
        saved = [s.expand(size, *s.shape) for s in outs[1:]]
        return wrapped((out, *saved), 0, level), stats
    params = [per_channel(p, level) for p in params]
    new = [None if p is None else per_channel(p, level).clone() for p in stats]
    out, *saved = _KERNEL(folded(x, level), *params, *new, training, momentum, eps)
    saved = [s.reshape(size, -1 if s.numel() else 0) for s in saved]
    new = [None if p is None else p.view(size, -1) for p in new]
    return wrapped((unfolded(out, size), *saved), 0, level), new


def update(level, x, params, stats, training, momentum, eps):
    """Return the batch's mean and variance, wrapped, and the new running statistics, batched."""
    size = level.size
    if not size:
        v = stacked(x, level)
        found = v.new_empty(0, v.shape[2])
        return wrapped((found, found.clone()), 0, level), stats
    new = [None if p is None else per_channel(p, level).clone() for p in stats]
    found = _UPDATE(folded(x, level), *new, momentum)
    new = [None if p is None else p.view(size, -1) for p in new]
    return wrapped([f.view(size, -1) for f in found], 0, level), new


class Form(NamedTuple):
    """The signature of a batch norm: ``op(x, weight, bias, *stats, [training,] momentum, eps)``.

    ``trains`` is the mode of an operator that has no argument ``training``. With ``reserve``, the
    operator has an extra result for cuDNN, which is empty here. With ``functional``, the operator
    returns new statistics and writes none. With ``updates``, the operator is
    ``op(x, *stats, momentum)`` and computes statistics alone.
    """

    trains: bool | None = None
    stats: int = 2
    reserve: bool = False
    functional: bool = False
    updates: bool = False

    @property
    def at(self) -> int:
        """The index of the first running statistic in the arguments."""
        return 1 if self.updates else 3

    def parts(self, args: tuple) -> tuple[Any, tuple, tuple, bool, float, float]:
        """Return (x, parameters, statistics, training, momentum, eps)."""
        x, params, rest = args[0], args[1 : self.at], args[self.at :]
        running = rest[: self.stats] if self.stats else (None, None)
        training = rest[self.stats] if self.trains is None else self.trains
        momentum, eps = (*rest, 0.0)[-2:] if self.updates else rest[-2:]
        return x, params, running, training, momentum, eps


def _begun(running: tuple, level: Any) -> tuple:
    """Return the statistics that the kernel updates: zeros for those that all examples share.

    The updates of the examples are added to shared statistics later (`step_later`).
    """
    if level.calls == 1:
        done_once(level, running)
        return running
    return tuple(
        torch.zeros_like(lower(s, level)) if is_shared_older(s, level) else s for s in running
    )


def _note_reads(level: Any, func: Any, running: tuple) -> None:
    for s in running:
        if is_shared_older(s, level):
            level.ledger.reads(func, s)


def mapped(form: Form) -> Callable:
    """Return the handler for calls with a batched argument."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x, params, running, training, momentum, eps = form.parts(args)
        writes = training and running[0] is not None and momentum != 0 and not form.functional
        if not writes:
            _note_reads(level, func, running)
        begun = _begun(running, level) if writes else running
        run = update if form.updates else forward
        outs, new = run(level, x, params, begun, training, momentum, eps)
        if writes and level.size:
            for target, value in zip(running, new, strict=True):
                if is_shared_older(target, level):
                    step_later(level, func, target, Step(1 - momentum, value, mapped=True))
                else:
                    writable(level, func, target, [x]).copy_(value)
        if form.reserve:
            nothing = lower(x, level).new_empty((level.size, 0), dtype=torch.uint8)
            outs = (*outs, *wrapped((nothing,), 0, level))
        if form.functional:
            if not (training and level.size):
                new = [stacked(s, level).clone() for s in running]
            outs = (*outs, *wrapped(new, 0, level))
        return outs

    return handler


def once(form: Form) -> Callable:
    """Return the handler for unbatched calls, where each example makes the same update."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        _, _, running, training, momentum, _ = form.parts(args)
        given = [lower(a, level) for a in args]
        if training and running[0] is not None and momentum != 0 and not form.functional:
            begun = _begun(running, level)
            for target in running:
                note_write(target)
            given[form.at : form.at + 2] = [lower(s, level) for s in begun]
            out = func(*given)
            for target, value in zip(running, begun, strict=True):
                if value is not target and level.calls is None:
                    step_later(level, func, target, Step(1 - momentum, value, mapped=False))
        else:
            _note_reads(level, func, running)
            out = func(*given)
        return wrapped(out, None, level)

    return handler


def back(level, g, x, weight, running, saved, train, eps, mask):
    size = level.size
    if not size:
        v = stacked(x, level)
        return wrapped(
            (v.clone(), v.new_empty(0, v.shape[2]), v.new_empty(0, v.shape[2])), 0, level
        )
    if train:  # the saved statistics of the batch are used, not the running ones
        running = (None, None)
    vectors = [per_channel(p, level) for p in (weight, *running, *saved)]
    dx, *rest = _BACK(folded(g, level), folded(x, level), *vectors, train, eps, mask)
    dx = None if dx is None else unfolded(dx, size)
    asked = (p if wanted else None for p, wanted in zip(rest, mask[1:], strict=True))
    return wrapped((dx, *(None if p is None else p.view(size, -1) for p in asked)), 0, level)


def _native_backward(level, func, args, kwargs):
    g, x, weight, mean, var, *saved, train, eps, mask = args[:10]
    return back(level, g, x, weight, (mean, var), saved, train, eps, mask)


def _fused_backward(level, func, args, kwargs):
    x, g, weight, mean, var, *saved, eps = args[:8]
    return back(level, g, x, weight, (mean, var), saved, True, eps, [True] * 3)


_FORMS = {
    aten.native_batch_norm.default: Form(),
    aten._native_batch_norm_legit.default: Form(),
    aten._native_batch_norm_legit.no_stats: Form(stats=0),
    aten._native_batch_norm_legit_functional.default: Form(functional=True),
    aten._native_batch_norm_legit_no_training.default: Form(trains=False),
    aten._batch_norm_with_update.default: Form(trains=True, reserve=True),
    aten._batch_norm_with_update_functional.default: Form(
        trains=True, reserve=True, functional=True
    ),
    aten._batch_norm_no_update.default: Form(trains=False, reserve=True),
    aten.cudnn_batch_norm.default: Form(reserve=True),
    aten.miopen_batch_norm.default: Form(),
    _UPDATE: Form(trains=True, updates=True),
}
_BACKWARDS = {
    aten.native_batch_norm_backward.default: _native_backward,
    aten.batch_norm_backward.default: _native_backward,
    aten.cudnn_batch_norm_backward.default: _fused_backward,
    aten.miopen_batch_norm_backward.default: _fused_backward,
}
register({op: mapped(form) for op, form in _FORMS.items()} | _BACKWARDS)
SHARED.update({op: once(form) for op, form in _FORMS.items()})
BLIND.update(_FORMS, _BACKWARDS)  # a backward uses statistics that its forward has read
