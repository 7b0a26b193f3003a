"""Rules of batch norm: each channel of each example is normalised over its own entries.

The batch axis is folded into the channels, (B, N, C, *S) -> (N, B*C, *S), and torch's kernel runs
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._vmap.mutation.in_place import get_writable_stack
from forall._vmap.mutation.mutation_log import count_write, keep_once_written, log_step
from forall._vmap.mutation.pending_updates import AffineUpdate, is_shared_external
from forall._vmap.registry import BLIND, SHARED, register_rows
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    wrap_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor
_KERNEL = aten.native_batch_norm.default
_UPDATE = aten.batch_norm_update_stats.default
_BACK = aten.native_batch_norm_backward.default


def fold_into_channels(x: Any, level: Any) -> Tensor:
    """Fold the batch axis into the channels: (B, N, C, *S) -> (N, B*C, *S)."""
    return expand_to_stack(x, level).transpose(0, 1).flatten(1, 2)


def unfold_channels(x: Tensor, size: int) -> Tensor:
    """Undo the fold into the channels: (N, B*C, *S) -> (B, N, C, *S)."""
    return x.unflatten(1, (size, x.shape[1] // size)).transpose(0, 1)


def flatten_channels(p: Any, level: Any) -> Tensor | None:
    """Flatten a parameter or a statistic: (B, C) -> (B*C,)."""
    return None if p is None else expand_to_stack(p, level).flatten()


def batch_norm_forward(level, x, params, stats, training, momentum, eps):
    """Return (output, saved mean, saved inverse deviation), wrapped, and new running statistics.

    The running statistics are batched in training mode only. Torch's kernel writes them in place.
    """
    size = level.size
    if not size:
        v = expand_to_stack(x, level)
        saved = v.new_empty(0, v.shape[2] if training else 0)
        return wrap_results((v.clone(), saved, saved.clone()), 0, level), stats
    if not training and not any(is_mapped(p, level) for p in (*params, *stats)):
        params, stats_in = ([lower_shared(p, level) for p in ps] for ps in (params, stats))
        outs = _KERNEL(move_to_front(x).flatten(0, 1), *params, *stats_in, False, momentum, eps)
        out = outs[0].unflatten(0, (size, -1))
        saved = [s.expand(size, *s.shape) for s in outs[1:]]
        return wrap_results((out, *saved), 0, level), stats
    params = [flatten_channels(p, level) for p in params]
    new = [None if p is None else flatten_channels(p, level).clone() for p in stats]
    out, *saved = _KERNEL(fold_into_channels(x, level), *params, *new, training, momentum, eps)
    saved = [s.reshape(size, -1 if s.numel() else 0) for s in saved]
    new = [None if p is None else p.view(size, -1) for p in new]
    return wrap_results((unfold_channels(out, size), *saved), 0, level), new


def update_stats(level, x, params, stats, training, momentum, eps):
    """Return the batch's mean and variance, wrapped, and the new running statistics, batched."""
    size = level.size
    if not size:
        v = expand_to_stack(x, level)
        found = v.new_empty(0, v.shape[2])
        return wrap_results((found, found.clone()), 0, level), stats
    new = [None if p is None else flatten_channels(p, level).clone() for p in stats]
    found = _UPDATE(fold_into_channels(x, level), *new, momentum)
    new = [None if p is None else p.view(size, -1) for p in new]
    return wrap_results([f.view(size, -1) for f in found], 0, level), new


class BatchNormSignature(NamedTuple):
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
    def stats_index(self) -> int:
        """The index of the first running statistic in the arguments."""
        return 1 if self.updates else 3

    def split_args(self, args: tuple) -> tuple[Any, tuple, tuple, bool, float, float]:
        """Return (x, parameters, statistics, training, momentum, eps)."""
        x, params, rest = args[0], args[1 : self.stats_index], args[self.stats_index :]
        running = rest[: self.stats] if self.stats else (None, None)
        training = rest[self.stats] if self.trains is None else self.trains
        momentum, eps = (*rest, 0.0)[-2:] if self.updates else rest[-2:]
        return x, params, running, training, momentum, eps


def _make_initial_stats(running: tuple, level: Any) -> tuple:
    """Return the statistics that the kernel updates: zeros for those that all examples share.

    The updates of the examples are added to shared statistics later (`log_step`).
    """
    if level.state.calls == 1:
        keep_once_written(level, running)
        return running
    return tuple(
        torch.zeros_like(lower_shared(s, level)) if is_shared_external(s, level) else s
        for s in running
    )


def _note_reads(level: Any, func: Any, running: tuple) -> None:
    for s in running:
        if is_shared_external(s, level):
            level.state.mutation_log.log_read(func, s)


def make_mapped_handler(form: BatchNormSignature) -> Callable:
    """Return the handler for calls with a batched argument."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x, params, running, training, momentum, eps = form.split_args(args)
        writes = training and running[0] is not None and momentum != 0 and not form.functional
        if not writes:
            _note_reads(level, func, running)
        begun = _make_initial_stats(running, level) if writes else running
        run = update_stats if form.updates else batch_norm_forward
        outs, new = run(level, x, params, begun, training, momentum, eps)
        if writes and level.size:
            for target, value in zip(running, new, strict=True):
                if is_shared_external(target, level):
                    log_step(level, func, target, AffineUpdate(1 - momentum, value, mapped=True))
                else:
                    get_writable_stack(level, func, target, [x]).copy_(value)
        if form.reserve:
            nothing = lower_shared(x, level).new_empty((level.size, 0), dtype=torch.uint8)
            outs = (*outs, *wrap_results((nothing,), 0, level))
        if form.functional:
            if not (training and level.size):
                new = [expand_to_stack(s, level).clone() for s in running]
            outs = (*outs, *wrap_results(new, 0, level))
        return outs

    return handler


def make_shared_handler(form: BatchNormSignature) -> Callable:
    """Return the handler for unbatched calls, where each example makes the same update."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        _, _, running, training, momentum, _ = form.split_args(args)
        given = [lower_shared(a, level) for a in args]
        if training and running[0] is not None and momentum != 0 and not form.functional:
            begun = _make_initial_stats(running, level)
            for target in running:
                count_write(target)
            given[form.stats_index : form.stats_index + 2] = [lower_shared(s, level) for s in begun]
            out = func(*given)
            for target, value in zip(running, begun, strict=True):
                if value is not target and level.state.calls is None:
                    log_step(level, func, target, AffineUpdate(1 - momentum, value, mapped=False))
        else:
            _note_reads(level, func, running)
            out = func(*given)
        return wrap_results(out, None, level)

    return handler


def batch_norm_backward(level, g, x, weight, running, saved, train, eps, mask):
    size = level.size
    if not size:
        v = expand_to_stack(x, level)
        return wrap_results(
            (v.clone(), v.new_empty(0, v.shape[2]), v.new_empty(0, v.shape[2])), 0, level
        )
    if train:  # the saved statistics of the batch are used, not the running ones
        running = (None, None)
    vectors = [flatten_channels(p, level) for p in (weight, *running, *saved)]
    dx, *rest = _BACK(
        fold_into_channels(g, level), fold_into_channels(x, level), *vectors, train, eps, mask
    )
    dx = None if dx is None else unfold_channels(dx, size)
    asked = (p if wanted else None for p, wanted in zip(rest, mask[1:], strict=True))
    return wrap_results((dx, *(None if p is None else p.view(size, -1) for p in asked)), 0, level)


def _native_backward(level, func, args, kwargs):
    g, x, weight, mean, var, *saved, train, eps, mask = args[:10]
    return batch_norm_backward(level, g, x, weight, (mean, var), saved, train, eps, mask)


def _fused_backward(level, func, args, kwargs):
    x, g, weight, mean, var, *saved, eps = args[:8]
    return batch_norm_backward(level, g, x, weight, (mean, var), saved, True, eps, [True] * 3)


_SIGNATURES = {
    aten.native_batch_norm.default: BatchNormSignature(),
    aten._native_batch_norm_legit.default: BatchNormSignature(),
    aten._native_batch_norm_legit.no_stats: BatchNormSignature(stats=0),
    aten._native_batch_norm_legit_functional.default: BatchNormSignature(functional=True),
    aten._native_batch_norm_legit_no_training.default: BatchNormSignature(trains=False),
    aten._batch_norm_with_update.default: BatchNormSignature(trains=True, reserve=True),
    aten._batch_norm_with_update_functional.default: BatchNormSignature(
        trains=True, reserve=True, functional=True
    ),
    aten._batch_norm_no_update.default: BatchNormSignature(trains=False, reserve=True),
    aten.cudnn_batch_norm.default: BatchNormSignature(reserve=True),
    aten.miopen_batch_norm.default: BatchNormSignature(),
    _UPDATE: BatchNormSignature(trains=True, updates=True),
}
_BACKWARDS = {
    aten.native_batch_norm_backward.default: _native_backward,
    aten.batch_norm_backward.default: _native_backward,
    aten.cudnn_batch_norm_backward.default: _fused_backward,
    aten.miopen_batch_norm_backward.default: _fused_backward,
}
register_rows({op: make_mapped_handler(form) for op, form in _SIGNATURES.items()} | _BACKWARDS)
SHARED.update({op: make_shared_handler(form) for op, form in _SIGNATURES.items()})
BLIND.update(_SIGNATURES, _BACKWARDS)  # a backward uses statistics that its forward has read
