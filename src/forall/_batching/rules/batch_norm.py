"""Batch norm: every channel of every example is normalised over its own entries.

Examples fold into the channels, (B, N, C, *S) -> (N, B*C, *S), and torch's kernel runs once.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._batching.batched import Batched
from forall._batching.families import (
    front,
    is_mapped,
    lower,
    stacked,
    wrapped,
    writable,
)
from forall._batching.table import SHARED, register
from forall._core.errors import columns, short

aten = torch.ops.aten
Tensor = torch.Tensor
_KERNEL = aten.native_batch_norm.default
_BACK = aten.native_batch_norm_backward.default


def folded(x: Any, level: Any) -> Tensor:
    """(B, N, C, *S) -> (N, B*C, *S)."""
    return stacked(x, level).transpose(0, 1).flatten(1, 2)


def unfolded(x: Tensor, size: int) -> Tensor:
    """(N, B*C, *S) -> (B, N, C, *S)."""
    return x.unflatten(1, (size, x.shape[1] // size)).transpose(0, 1)


def per_channel(p: Any, level: Any) -> Tensor | None:
    """(B, C) -> (B*C,)."""
    return None if p is None else stacked(p, level).flatten()


def _shared_statistics(stat: Tensor) -> RuntimeError:
    rows = [("running statistics", short(stat), "from before the call, one for all examples")]
    return RuntimeError(
        "vmap: batch_norm in training mode updates running statistics that all examples share.\n"
        f"{columns(rows)}\n"
        "Each example would overwrite the last one's update. Use the module in eval mode, build it "
        "with track_running_stats=False, use GroupNorm, or map the statistics (in_dims)."
    )


def forward(level, x, params, stats, training, momentum, eps):
    """Output, saved mean, saved inverse deviation: wrapped; and the running statistics after it.

    Those are stacks in training mode only; torch's kernel writes them in place.
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


def rule(*, trains: bool | None = None, stats: int = 2, reserve: bool = False, functional=False):
    """``op(x, weight, bias, *stats, [training,] momentum, eps)`` and what it returns.

    ``trains`` says it where the operator does not ask; ``reserve`` is an extra result for cuDNN,
    which has no part in this; ``functional`` returns new statistics and writes none.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x, params, rest = args[0], args[1:3], args[3:]
        running = rest[:stats] if stats else (None, None)
        training = rest[stats] if trains is None else trains
        momentum, eps = rest[-2:]
        writes = training and running[0] is not None and momentum != 0 and not functional
        if writes:
            _check(level, running)
        outs, new = forward(level, x, params, running, training, momentum, eps)
        if writes and level.size:
            for target, value in zip(running, new, strict=True):
                writable(level, func, target, [x]).copy_(value)
        if reserve:
            nothing = lower(x, level).new_empty((level.size, 0), dtype=torch.uint8)
            outs = (*outs, *wrapped((nothing,), 0, level))
        if functional:
            if not (training and level.size):
                new = [stacked(s, level).clone() for s in running]
            outs = (*outs, *wrapped(new, 0, level))
        return outs

    return handler


def once(level, func, args, kwargs):
    """With the same x for all examples. The schema is silent about the statistics it writes."""
    running, training, momentum = args[3:5], args[5], args[6]
    if training and running[0] is not None and momentum != 0:
        _check(level, running)
    return wrapped(func(*[lower(a, level) for a in args]), None, level)


def _check(level: Any, running: tuple) -> None:
    for stat in running:
        mine = type(stat) is Batched and stat.level is level
        if not mine or (stat.axis is None and stat.older):
            raise _shared_statistics(stat)


def back(level, g, x, weight, running, saved, train, eps, mask):
    size = level.size
    if not size:
        v = stacked(x, level)
        return wrapped(
            (v.clone(), v.new_empty(0, v.shape[2]), v.new_empty(0, v.shape[2])), 0, level
        )
    vectors = [per_channel(p, level) for p in (weight, *running, *saved)]
    dx, *rest = _BACK(folded(g, level), folded(x, level), *vectors, train, eps, mask)
    dx = None if dx is None else unfolded(dx, size)
    return wrapped((dx, *(None if p is None else p.view(size, -1) for p in rest)), 0, level)


def _native_backward(level, func, args, kwargs):
    g, x, weight, mean, var, *saved, train, eps, mask = args[:10]
    return back(level, g, x, weight, (mean, var), saved, train, eps, mask)


def _fused_backward(level, func, args, kwargs):
    x, g, weight, mean, var, *saved, eps = args[:8]
    return back(level, g, x, weight, (mean, var), saved, True, eps, [True] * 3)


register(
    {
        aten.native_batch_norm.default: rule(),
        aten._native_batch_norm_legit.default: rule(),
        aten._native_batch_norm_legit.no_stats: rule(stats=0),
        aten._native_batch_norm_legit_functional.default: rule(functional=True),
        aten._native_batch_norm_legit_no_training.default: rule(trains=False),
        aten._batch_norm_with_update.default: rule(trains=True, reserve=True),
        aten._batch_norm_with_update_functional.default: rule(
            trains=True, reserve=True, functional=True
        ),
        aten._batch_norm_no_update.default: rule(trains=False, reserve=True),
        aten.cudnn_batch_norm.default: rule(reserve=True),
        aten.miopen_batch_norm.default: rule(),
        aten.native_batch_norm_backward.default: _native_backward,
        aten.batch_norm_backward.default: _native_backward,
        aten.cudnn_batch_norm_backward.default: _fused_backward,
        aten.miopen_batch_norm_backward.default: _fused_backward,
    }
)
SHARED.update(
    dict.fromkeys(
        (
            aten.native_batch_norm.default,
            aten.cudnn_batch_norm.default,
            aten.miopen_batch_norm.default,
        ),
        once,
    )
)
