"""Rules of fused attention on (N, H, L, E): the batch axis is folded into N."""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    is_mapped,
    lower_shared,
    make_stack_handler,
    move_to_front,
)

aten = torch.ops.aten
Tensor = torch.Tensor


def fold_into_batch(a: Any, size: int) -> Any:
    """Fold the batch axis into N: (B, N, *) -> (B*N, *).

    Seeds and counters, of rank 0 or 1, are the same for all examples and lose their batch axis.
    """
    if isinstance(a, MappedStack):
        return a.v.flatten(0, 1) if a.v.dim() > 2 else a.v[0]
    if isinstance(a, Tensor) and a.dim() > 1:
        return a.expand(size, *a.shape).flatten(0, 1)
    return a


def fold_mask(a: MappedStack | Tensor | None, size: int, n: int) -> Tensor | None:
    """Return a mask of rank 2 or 4 that broadcasts to (B*N, H, L, S)."""
    if a is None or (isinstance(a, Tensor) and (a.dim() == 2 or a.shape[0] == 1)):
        return a
    v = expand_stack(a, size)
    if v.dim() == 3:
        v = v.unsqueeze(1).unsqueeze(1)
    return v.expand(size, n, *v.shape[2:]).flatten(0, 1)


def align_mask_rows(mask: Tensor | None) -> Tensor | None:
    """Return a mask whose rows begin where the memory efficient kernel reads them.

    Torch pads the rows before it calls the kernel, but a copy of all examples is dense again.
    """
    if mask is None or mask.stride(-2) % ROW == 0:
        return mask
    n = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, -n % ROW))[..., :n]


ROW = 16  # the stride of rows has to be a multiple of it
EFFICIENT = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}


def unfold_from_batch(out: Any, size: int) -> Any:
    """Undo the fold of the batch axis into N: (B*N, *) -> (B, N, *)."""
    if not isinstance(out, Tensor):
        return out
    return out.unflatten(0, (size, -1)) if out.dim() > 1 else out.expand(size, *out.shape)


def make_attention_handler(func: Any, mask: int = -1):
    """Return the handler of an attention operator.

    ``mask`` is the position of the attention mask, or -1 if the mask is a keyword.
    """

    def rule(size, *args, **kwargs):
        q = args[0]
        n = q.v.shape[1] if isinstance(q, MappedStack) else q.shape[0]
        if "attn_mask" in kwargs:
            kwargs["attn_mask"] = fold_mask(kwargs["attn_mask"], size, n)
        args = [
            fold_mask(a, size, n) if i == mask else fold_into_batch(a, size)
            for i, a in enumerate(args)
        ]
        if func in EFFICIENT:
            args[mask] = align_mask_rows(args[mask])
        return tuple(unfold_from_batch(o, size) for o in func(*args, **kwargs))

    return make_stack_handler(rule)


register_rows(
    {
        op: make_attention_handler(op, mask)
        for op, mask in (
            (aten._scaled_dot_product_flash_attention_for_cpu.default, -1),
            (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, -1),
            (aten._scaled_dot_product_flash_attention.default, -1),
            (aten._scaled_dot_product_flash_attention_backward.default, -1),
            (aten._scaled_dot_product_efficient_attention.default, 3),
            (aten._scaled_dot_product_efficient_attention_backward.default, 4),
            (aten._scaled_dot_product_cudnn_attention.default, 3),
            (aten._scaled_dot_product_cudnn_attention_backward.default, 8),
        )
    }
)


@make_stack_handler
def _split_heads(size, qkv, bias, heads):
    """(B, N, T, 3*D), (3*D) -> three of (B, N, H, T, D/H): the batch axis is folded into N.

    A bias of each example is added before, as one call has one bias.
    """
    joined = fold_into_batch(qkv, size)
    if isinstance(bias, MappedStack):
        biased = joined.unflatten(0, (size, -1)) + bias.v[:, None, None]
        joined, bias = biased.flatten(0, 1), bias.v.new_zeros(bias.v.shape[1:])
    found = aten._transform_bias_rescale_qkv.default(joined, bias, heads)
    return tuple(x.unflatten(0, (size, -1)) for x in found)


register_rows({aten._transform_bias_rescale_qkv.default: _split_heads})


def _choose_sdp_kernel(level, func, args, kwargs):
    """Return the kernel that torch would choose for the batched tensor, or 0, the unfused one.

    It is 0 if q is not (N, H, L, E), and with dropout. A fused kernel draws random numbers by
    itself, whatever the randomness of the level is.
    """
    q, k, v, mask, dropout, causal = (*args, *(None, 0.0, False)[len(args) - 3 :])
    if dropout or q.dim() != 4 or not level.size:
        return 0
    take = [
        MappedStack(move_to_front(a)) if is_mapped(a, level) else lower_shared(a, level)
        for a in (q, k, v, mask)
    ]
    n = q.shape[0]
    mask = fold_mask(take.pop(), level.size, n)
    return func(*[fold_into_batch(a, level.size) for a in take], mask, dropout, causal, **kwargs)


register_rows({aten._fused_sdp_choice.default: _choose_sdp_kernel})
