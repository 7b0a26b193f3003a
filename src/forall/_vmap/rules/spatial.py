"""Rules of operators on images: pooling, resizing, grid sampling, padding, im2col.

All read (N, *C, *spatial) and treat each image of N independently, so the batch axis is folded into
N. If the examples have no N, the batch axis takes its place.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import MappedStack, get_example_rank, make_stack_handler

aten = torch.ops.aten
Tensor = torch.Tensor


def make_image_handler(func: Any, rank: int, *, alone: bool = True, sized: int | None = None):
    """Return the handler of ``func`` on images of ``rank`` dims, N not counted.

    ``alone``: True if it takes an image without N. ``sized``: the index of an argument that lists
    sizes, N first.
    """

    def rule(size, *args):
        r = get_example_rank(args[0])
        if r != rank + 1 and not (alone and r == rank):
            return func(*map(get_first_example, args))  # the operator raises the error
        join = r == rank + 1
        args = [_fold_images(a, size, join) for a in args]
        if sized is not None:
            args[sized] = [size * args[sized][0], *args[sized][1:]]
        out = func(*args)
        if not join:
            return out
        if isinstance(out, Tensor):
            return out.unflatten(0, (size, -1))
        return tuple(None if o is None else o.unflatten(0, (size, -1)) for o in out)

    return make_stack_handler(rule)


def _fold_images(a: Any, size: int, join: bool) -> Any:
    if isinstance(a, MappedStack):
        a = a.v
    elif isinstance(a, Tensor):
        a = a.expand(size, *a.shape)
    else:
        return a
    a = a.flatten(0, 1) if join else a
    # Indices of maxima: some kernels read them as contiguous, whatever the strides are.
    return a if a.is_floating_point() or a.is_complex() else a.contiguous()


def get_first_example(a: Any) -> Any:
    """The first example of a batched argument."""
    return a.v[0] if isinstance(a, MappedStack) else a


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


def _find_default(name: str) -> list:
    """Return the operator's default overload in a list, empty in a torch version that lacks it."""
    return [getattr(aten, name).default] if hasattr(aten, name) else []


register_rows(
    {
        op: make_image_handler(op, rank)
        for rank, names in _POOLS.items()
        for name in names
        for op in _find_default(name) + _find_default(f"{name}_backward")
    }
)
register_rows(
    {
        op: make_image_handler(op, rank, alone=False, sized=sized)
        for rank, names in _RESIZES.items()
        for name in names
        for op, sized in [
            *((op, None) for op in _find_default(name)),
            *((op, 2) for op in _find_default(f"{name}_backward")),
        ]
    }
)
register_rows(
    {
        op: make_image_handler(op, rank, alone=False)
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
register_rows(
    {
        aten.affine_grid_generator.default: make_image_handler(
            aten.affine_grid_generator.default, 2, alone=False, sized=1
        )
    }
)


def _make_fractional_handler(func: Any, rank: int):
    """Return the handler of a fractional pooling.

    The kernel uses the first N of the random samples (M, C, D), or the first if there is no N.
    """

    def rule(size, x, kernel, output, samples):
        join = get_example_rank(x) == rank + 1
        x = _fold_images(x, size, join)
        samples = _fold_images(samples, size, False)[:, : x.shape[0] // size if join else 1]
        outs = func(x, kernel, output, samples.flatten(0, 1))
        return tuple(o.unflatten(0, (size, -1)) for o in outs) if join else outs

    return make_stack_handler(rule)


register_rows(
    {
        op: _make_fractional_handler(op, rank)
        for op, rank in (
            (aten.fractional_max_pool2d.default, 3),
            (aten.fractional_max_pool3d.default, 4),
        )
    }
    | {
        op: make_image_handler(op, rank)
        for op, rank in (
            (aten.fractional_max_pool2d_backward.default, 3),
            (aten.fractional_max_pool3d_backward.default, 4),
        )
    }
)


# --- operators on channels --------------------------------------------------------------------


def _make_channel_handler(func: Any):
    """Return the handler of an operator on (*, C, H, W), which takes any leading dims."""

    def rule(size, x, factor):
        return func(x.v if x.v.dim() > 3 else x.v[0], factor)

    return make_stack_handler(rule)


register_rows(
    {
        op: _make_channel_handler(op)
        for op in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
    }
)


@make_stack_handler
def _channel_shuffle(size, x, groups):
    if x.v.dim() < 4:
        return aten.channel_shuffle.default(x.v[0], groups)
    return aten.channel_shuffle.default(x.v.flatten(0, 1), groups).unflatten(0, (size, -1))


register_rows({aten.channel_shuffle.default: _channel_shuffle})
