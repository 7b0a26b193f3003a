"""Tables of operators that are decomposed if a derivative is needed that torch lacks.

Forward mode through an operator uses `FORWARD`, forward mode through its backward
`backwards.BACKWARD`. A second reverse pass through its backward node uses `node_formulas.NODES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff import sparse_errors
from forall._autodiff.decompositions import kernels, losses
from forall._autodiff.decompositions.losses import find_max_rows
from forall._core import rnn_decompositions
from forall._core.sparse_operands import PLACING

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def _efficient_attention(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    return kernels.fused_attention(q, k, v, dropout_p, is_causal, bias, scale)


def _cudnn_attention(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, **kw
):
    return kernels.fused_attention(q, k, v, dropout_p, is_causal, bias, **kw)


def _flash_attention(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    return kernels.fused_attention(q, k, v, dropout_p, is_causal, None, scale)


def _cpu_flash_attention(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    return kernels.fused_attention(q, k, v, dropout_p, is_causal, attn_mask, scale)


def _batch_norm_with_update(x, weight, bias, mean, var, momentum, eps):
    return kernels.batch_norm(x, weight, bias, mean, var, True, momentum, eps)


def _batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return kernels.batch_norm(x, weight, bias, None, None, training, momentum, eps)


def _embedding_bag(
    kernel,
    weight,
    indices,
    offsets,
    scaled=False,
    mode=0,
    sparse=False,
    own=None,
    last=False,
    padding=-1,
):
    out, _, size, rows = kernel
    rows = find_max_rows(size, rows) if mode == losses.MAX else None
    return losses.reduce_bags(weight, own, indices, offsets, mode, padding, len(out), rows)


def _linear_cross_entropy(x, w, target, bias, weight, reduction, ignore_index, label_smoothing, *_):
    return losses.linear_cross_entropy(
        x, w, target, bias, weight, reduction, ignore_index, label_smoothing
    )


def _linear_cross_entropy_each(x, w, target, bias, weight, ignore_index, *_):
    return losses.linear_cross_entropy(x, w, target, bias, weight, "none", ignore_index)


# Decompositions of these get the kernel's results as well.
READS_RESULTS = frozenset({aten._embedding_bag.default, aten._embedding_bag_forward_only.default})

# Decompositions return the first result, or several. Other results come from the kernel.
FORWARD: dict[Any, Callable] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_flash_attention,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    aten.hardsigmoid.default: kernels.hardsigmoid,
    aten.glu.default: kernels.glu,
    aten.mse_loss.default: kernels.mse_loss,
    aten.huber_loss.default: kernels.huber_loss,
    aten.soft_margin_loss.default: kernels.soft_margin_loss,
    aten.polar.default: kernels.polar,
    aten.aminmax.default: kernels.aminmax,
    aten.logcumsumexp.default: kernels.logcumsumexp,
    aten.linalg_vector_norm.default: kernels.vector_norm,
    aten.dist.default: kernels.dist,
    aten.renorm.default: kernels.renorm,
    aten.std.correction: kernels.std,
    aten.std_mean.correction: kernels.std_mean,
    aten.norm.Scalar: kernels.norm,
    aten.norm.ScalarOpt_dtype: kernels.norm,
    aten.norm.ScalarOpt_dim: kernels.norm,
    aten.norm.ScalarOpt_dim_dtype: kernels.norm,
    aten.cholesky_inverse.default: kernels.cholesky_inverse,
    aten._cdist_forward.default: kernels.cdist,
    aten._pdist_forward.default: kernels.pdist,
    aten.multi_margin_loss.default: losses.multi_margin_loss,
    aten.multilabel_margin_loss_forward.default: losses.multilabel_margin_loss,
    aten._ctc_loss.default: losses.ctc_loss,
    aten._ctc_loss.Tensor: losses.ctc_loss,
    aten.segment_reduce.default: losses.segment_reduce,
    **dict.fromkeys(READS_RESULTS, _embedding_bag),
    **dict.fromkeys(PLACING, sparse_errors.refuse_sparse_tangent),
    aten.native_layer_norm.default: kernels.layer_norm,
    aten._weight_norm_interface.default: kernels.weight_norm,
    aten.native_batch_norm.default: kernels.batch_norm,
    aten._native_batch_norm_legit.default: kernels.batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_no_stats,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
    aten.cudnn_batch_norm.default: kernels.batch_norm,
    aten.miopen_batch_norm.default: kernels.batch_norm,
    aten._cudnn_rnn.default: rnn_decompositions.cudnn_rnn,
    aten._thnn_fused_lstm_cell.default: rnn_decompositions.lstm_cell,
    aten._thnn_fused_gru_cell.default: rnn_decompositions.gru_cell,
}
# Torch registers these when it first calls them.
_LATE: dict[str, Callable] = {
    "torch_nn::_linear_cross_entropy_batch_chunked": _linear_cross_entropy,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _linear_cross_entropy_each,
}


def find_decomposition(func: Any) -> Callable | None:
    """Return the decomposition of an operator, or None."""
    return FORWARD.get(func) or _LATE.get(func._schema.name)
