"""FlexAttention inside our transforms: its formula, in operators that have every derivative.

Torch's own, if called eagerly, compiles its code, which refuses wrapper tensors, and on a CPU it
has no derivative. It is still used outside our transforms, and while Dynamo traces.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from forall._api.vmap import vmap
from forall._compat import higher_order_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensor = torch.Tensor

# Which of (batch, head, query, key) a vmap maps, innermost first.
_PLACES = (
    (None, None, None, 0),
    (None, None, 0, None),
    (None, 0, None, None),
    (0, None, None, None),
)


def map_over_scores(
    fn: Callable,
    prefix: tuple,
    suffix: tuple = (),
    out_dims: Any = 0,
    group_dim: bool = False,
) -> Callable:
    """Map ``fn`` over batch, head, query and key: a replacement of torch's ``_vmap_for_bhqkv``."""
    for dims in (*_PLACES[:3], *_PLACES[2 : 2 + group_dim], *_PLACES[3:]):
        fn = vmap(fn, in_dims=(*prefix, *dims, *suffix), out_dims=out_dims)
    return fn


def make_dense_mask(counts: Tensor, columns: Tensor, width: int | None = None) -> Tensor:
    """Return a block mask as 0 and 1, from lists of column indices of each row's blocks.

    This replaces torch's ``_ordered_to_dense``, which uses a transform of torch's own, and so
    cannot be traced here. Before torch 2.12 there are as many columns as a list has entries.
    """
    width = columns.shape[-1] if width is None else width
    counted = torch.arange(columns.shape[-1], device=columns.device) < counts.unsqueeze(-1)
    dense = columns.new_zeros((*columns.shape[:-1], width + 1), dtype=torch.int32)
    at = torch.where(counted, columns, width).long()
    return dense.scatter(-1, at, 1)[..., :width].contiguous()


def attend_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable,
    block_mask: tuple,
    scale: float,
    _kernel_options: dict[str, Any],
    score_buffers: tuple = (),
    mask_buffers: tuple = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention, and for each row of scores its log-sum-exp and maximum, in base 2.

    The attention of a row that is fully masked is 0.
    """
    kind = query.device.type
    autocasts = torch.is_autocast_enabled(kind)
    if autocasts:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (
            x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value)
        )
    with torch.autocast(kind, enabled=False) if autocasts else nullcontext():
        groups = query.size(1) // key.size(1)
        if groups > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        precise = torch.float64 if query.dtype is torch.float64 else torch.float32
        scores = (query.to(precise) @ key.to(precise).transpose(-2, -1)) * scale
        places = [torch.arange(n, device=query.device) for n in scores.shape]
        if not higher_order_ops.is_identity_score(score_mod):
            own = (None,) * len(score_buffers)
            scores = map_over_scores(score_mod, (0,), own)(scores, *places, *score_buffers)
        if not higher_order_ops.masks_nothing(block_mask[-1]):
            own = (None,) * len(mask_buffers)
            mask = map_over_scores(block_mask[-1], (), own)(*places, *mask_buffers)
            scores = torch.where(mask, scores, -math.inf)
        most = scores.amax(-1)
        is_empty = most == -math.inf
        some = scores.masked_fill(is_empty.unsqueeze(-1), 0.0)  # else these have derivatives nan
        weights = some.softmax(-1).masked_fill(is_empty.unsqueeze(-1), 0.0)
        out = weights.to(query.dtype) @ value.to(query.dtype)
        total = some.logsumexp(-1).masked_fill(is_empty, -math.inf)
    return _copy_layout(query, out), total / math.log(2), most / math.log(2)


def _copy_layout(query: Tensor, out: Tensor) -> Tensor:
    """Copy ``out`` to a memory layout with the dims in the order of ``query``'s strides."""
    order = sorted(range(3), key=lambda d: -query.stride(d))
    back = sorted(range(3), key=order.__getitem__)
    return out.permute(*order, 3).contiguous().permute(*back, 3)


def install_flex_attention() -> None:
    """Replace torch's functions by these, once."""
    higher_order_ops.redirect_flex_attention(
        attend_by_formula,
        {"_vmap_for_bhqkv": map_over_scores, "_ordered_to_dense": make_dense_mask},
    )
