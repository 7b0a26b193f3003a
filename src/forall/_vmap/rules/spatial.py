"""Rules of operators on images: pooling, resizing, grid sampling, padding, im2col.

All read (N, *C, *spatial) and treat each image of N independently, so the batch axis is folded into
N. If the examples have no N, the batch axis takes its place.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import Stack, by_front

aten = torch.ops.aten
Tensor = torch.Tensor


def over_images(func: Any, rank: int, *, alone: bool = True, sized: int | None = None):
    """Return the handler of ``func`` on images of ``rank`` dims, N not counted.

    ``alone``: True if it takes an image without N. ``sized``: the index of an argument that lists
    sizes, N first.
    """

    def rule(size, *args):
        r = rank_of(args[0])
        if r != rank + 1 and not (alone and r == rank):
            return func(*map(example, args))  # the operator raises the error
        join = r == rank + 1
        args = [_joined(a, size, join) for a in args]
        if sized is not None:
            args[sized] = [size * args[sized][0], *args[sized][1:]]
        out = func(*args)
        if not join:
            return out
        if isinstance(out, Tensor):
            return out.unflatten(0, (size, -1))
        return tuple(None if o is None else o.unflatten(0, (size, -1)) for o in out)

    return by_front(rule)


def rank_of(a: Stack | Tensor) -> int:
    return a.v.dim() - 1 if isinstance(a, Stack) else a.dim()


def _joined(a: Any, size: int, join: bool) -> Any:
    if isinstance(a, Stack):
        a = a.v
    elif isinstance(a, Tensor):
        a = a.expand(size, *a.shape)
    else:
        return a
    a = a.flatten(0, 1) if join else a
    # Indices of maxima: some kernels read them as contiguous, whatever the strides are.
    return a if a.is_floating_point() or a.is_complex() else a.contiguous()


def example(a: Any) -> Any:
    """The first example of a batched argument."""
    return a.v[0] if isinstance(a, Stack) else a


_POOLS = {
    2: ("reflection_pad1d", "replication_pad1d", "col2im"),
    3: (
        "max_pool2d_with_indices",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "max_unpool2d",
        "reflection_pad2d",
        "replication_pad2d",
        "im2col",
    ),
    4: (
        "max_pool3d_with_indices",
        "avg_pool3d",
        "_adaptive_avg_pool3d",
        "adaptive_max_pool3d",
        "max_unpool3d",
        "reflection_pad3d",
        "replication_pad3d",
    ),
}
_RESIZES = {
    2: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    3: (
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "_upsample_lanczos2d_aa",
    ),
    4: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}


def _default(name: str) -> list:
    """Return the operator's default overload in a list, empty in a torch version that lacks it."""
    return [getattr(aten, name).default] if hasattr(aten, name) else []


register(
    {
        op: over_images(op, rank)
        for rank, names in _POOLS.items()
        for name in names
        for op in _default(name) + _default(f"{name}_backward")
    }
)
register(
    {
        op: over_images(op, rank, alone=False, sized=sized)
        for rank, names in _RESIZES.items()
        for name in names
        for op, sized in [
            *((op, None) for op in _default(name)),
            *((op, 2) for op in _default(f"{name}_backward")),
        ]
    }
)
register(
    {
        op: over_images(op, rank, alone=False)
        for rank, ops in {
            3: (
                aten.grid_sampler_2d.default,
                aten.grid_sampler_2d_backward.default,
                aten._grid_sampler_2d_cpu_fallback.default,
            ),
            4: (aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default),
        }.items()
        for op in ops
    }
)
register(
    {
        aten.affine_grid_generator.default: over_images(
            aten.affine_grid_generator.default, 2, alone=False, sized=1
        )
    }
)


def _fractional(func: Any, rank: int):
    """Return the handler of a fractional pooling.

    The kernel uses the first N of the random samples (M, C, D), or the first if there is no N.
    """

    def rule(size, x, kernel, output, samples):
        join = rank_of(x) == rank + 1
        x = _joined(x, size, join)
        samples = _joined(samples, size, False)[:, : x.shape[0] // size if join else 1]
        outs = func(x, kernel, output, samples.flatten(0, 1))
        return tuple(o.unflatten(0, (size, -1)) for o in outs) if join else outs

    return by_front(rule)


register(
    {
        op: _fractional(op, rank)
        for op, rank in (
            (aten.fractional_max_pool2d.default, 3),
            (aten.fractional_max_pool3d.default, 4),
        )
    }
    | {
        op: over_images(op, rank)
        for op, rank in (
            (aten.fractional_max_pool2d_backward.default, 3),
            (aten.fractional_max_pool3d_backward.default, 4),
        )
    }
)


# --- operators on channels --------------------------------------------------------------------


def _leading(func: Any):
    """Return the handler of an operator on (*, C, H, W), which takes any leading dims."""

    def rule(size, x, factor):
        return func(x.v if x.v.dim() > 3 else x.v[0], factor)

    return by_front(rule)


register({op: _leading(op) for op in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default)})


@by_front
def _channel_shuffle(size, x, groups):
    if x.v.dim() < 4:
        return aten.channel_shuffle.default(x.v[0], groups)
    return aten.channel_shuffle.default(x.v.flatten(0, 1), groups).unflatten(0, (size, -1))


register({aten.channel_shuffle.default: _channel_shuffle})
