"""Writing whole tensors in place."""

from __future__ import annotations

import torch

from forall._batching.families import level_on, level_write, writable
from forall._batching.table import register

aten = torch.ops.aten


def _copy(level, func, args, kwargs):
    return level_write(level, func, [args[0]], [args[1]])


def _fill(level, func, args, kwargs):
    """Numbers are the same for all examples."""
    func(writable(level, func, args[0], []), *args[1:])
    return args[0]


def _filled(level, func, args, kwargs):
    with level_on(level):
        return torch.empty_like(args[0]).copy_(args[1])


def _filled_alike(make):
    def handler(level, func, args, kwargs):
        with level_on(level):
            return make(args[0], *args[1:])

    return handler


register(
    {
        aten.copy_.default: _copy,
        aten.fill_.Tensor: _copy,
        aten.fill_.Scalar: _fill,
        aten.zero_.default: _fill,
        aten.fill.Tensor: _filled,
        aten.fill.Scalar: _filled_alike(torch.full_like),
        aten.zero.default: _filled_alike(torch.zeros_like),
    }
)
