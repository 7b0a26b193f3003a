"""Rules of softmax and glu along one dim of each example, and their backwards."""

from __future__ import annotations

import torch

from forall._core.axes import stacked_dim
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.along_dims import make_dim_handler
from forall._vmap.rule_makers.basic import expand_stack, make_stack_handler, unsqueeze_shared

aten = torch.ops.aten


@make_stack_handler
def _masked_softmax(size, x, mask, dim=None, mask_type=None):
    v = expand_stack(x, size)
    m = _expand_mask(v, mask, mask_type)
    return aten._masked_softmax.default(
        v, m, stacked_dim(-1 if dim is None else dim, v.dim() - 1), 2
    )


@make_stack_handler
def _masked_softmax_backward(size, g, out, mask, dim=None):
    """Return the gradient: masked entries are zero in it and in the sum along ``dim``."""
    g, out = (expand_stack(a, size) for a in (g, out))
    dim, mask = stacked_dim(-1 if dim is None else dim, out.dim() - 1), _expand_mask(out, mask, 2)
    out = torch.where(mask, 0, out)
    return aten._softmax_backward_data.default(g, out, dim, out.dtype)


def _expand_mask(v, mask, mask_type):
    """Expand a mask to (B, N, H, L, L): type 0 is (L, L), type 1 is (N, L), type 2 is full."""
    m = unsqueeze_shared(mask)
    if mask_type == 0:
        m = m[:, None, None]
    elif mask_type == 1:
        m = m[:, :, None, None]
    return m.expand(v.shape)


register_rows(
    {
        op: make_dim_handler(op)
        for op in (aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
    }
    | {
        op: make_dim_handler(op, tensors=2)
        for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
    }
    | {
        aten._masked_softmax.default: _masked_softmax,
        aten._masked_softmax_backward.default: _masked_softmax_backward,
        aten.glu_jvp.default: make_dim_handler(aten.glu_jvp.default, tensors=3),
        aten.glu_backward_jvp.default: make_dim_handler(aten.glu_backward_jvp.default, tensors=5),
    }
)
