"""Which operators are computed in small steps, where a derivative is asked for that torch lacks.

Three places ask. Forward mode through an operator takes `FORWARD`; through its backward, `BACKWARD`.
A second reverse pass meets the node of the backward, which keeps its kernel's numbers and gets the
history of the pull-back of the small steps: `NODES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._derivatives import composites
from forall._derivatives.reverse import gradients, variable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten


def pulled(f: Callable, g: torch.Tensor, *xs: torch.Tensor | None) -> tuple:
    """The cotangent ``g`` of ``f``'s result, pulled back to each of ``xs``."""
    there = [i for i, x in enumerate(xs) if x is not None]
    own = [variable(xs[i]) for i in there]
    full: list = list(xs)
    for i, x in zip(there, own, strict=True):
        full[i] = x
    found = dict(zip(there, gradients((f(*full),), (g,), own), strict=True))
    return tuple(found.get(i) for i in range(len(xs)))


# ------------------------------------------------------------------ forward


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return composites.attention(q, k, v, dropout_p, is_causal, bias, scale)


def _cudnn(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, **kw):
    return composites.attention(q, k, v, dropout_p, is_causal, bias, **kw)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    return composites.attention(q, k, v, dropout_p, is_causal, None, scale)


def _for_cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    return composites.attention(q, k, v, dropout_p, is_causal, attn_mask, scale)


def _batch_norm_with_update(x, weight, bias, mean, var, momentum, eps):
    return composites.batch_norm(x, weight, bias, mean, var, True, momentum, eps)


def _batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return composites.batch_norm(x, weight, bias, None, None, training, momentum, eps)


def _largest(size: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.masked_fill((size == 0).unsqueeze(1), -1)


def _embedding_bag(
    weight, indices, offsets, scaled=False, mode=0, sparse=False, own=None, last=False, padding=-1
):
    n = offsets.shape[0] - last
    rows = None
    if mode == composites.MAX:
        outs = aten._embedding_bag.default(
            weight, indices, offsets, scaled, mode, sparse, own, last, padding
        )
        rows = _largest(outs[2], outs[3])
    return composites.bags(weight, own, indices, offsets, mode, padding, n, rows)


# The first result; what an operator returns beside it comes from its kernel.
FORWARD: dict[Any, Callable] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _for_cpu,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten.hardsigmoid.default: composites.hardsigmoid,
    aten._cdist_forward.default: composites.cdist,
    aten._pdist_forward.default: composites.pdist,
    aten.multi_margin_loss.default: composites.multi_margin_loss,
    aten.multilabel_margin_loss_forward.default: composites.multilabel_margin_loss,
    aten._ctc_loss.default: composites.ctc_loss,
    aten._ctc_loss.Tensor: composites.ctc_loss,
    aten.segment_reduce.default: composites.segment_reduce,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.native_layer_norm.default: composites.layer_norm,
    aten.native_batch_norm.default: composites.batch_norm,
    aten._native_batch_norm_legit.default: composites.batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_no_stats,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
    aten.cudnn_batch_norm.default: composites.batch_norm,
    aten.miopen_batch_norm.default: composites.batch_norm,
}


# ---------------------------------------------------------- backward operators


def _attention_backward(
    g, q, k, v, p: float, causal: bool, mask: Any = None, scale: float | None = None
) -> tuple:
    return pulled(lambda *qkv: composites.attention(*qkv, p, causal, mask, scale), g, q, k, v)


def _for_cpu_backward(g, q, k, v, out, lse, p, causal, *, attn_mask=None, scale=None):
    return _attention_backward(g, q, k, v, p, causal, attn_mask, scale)


def _flash_backward(g, q, k, v, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
    return _attention_backward(g, q, k, v, p, causal, None, scale)


def _efficient_backward(
    g, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None
):
    found = pulled(
        lambda q, k, v, b: composites.attention(q, k, v, p, causal, b, scale), g, q, k, v, bias
    )
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))


def _cudnn_backward(
    g, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, p, causal, *, scale=None
):
    return _attention_backward(g, q, k, v, p, causal, bias, scale)


def _cdist_backward(g, x, y, p, dist):
    return pulled(lambda x: composites.cdist(x, y, p), g, x)[0]


def _pdist_backward(g, x, p, dist):
    return pulled(lambda x: composites.pdist(x, p), g, x)[0]


def _hardsigmoid_backward(g, x):
    return torch.where((x > -3) & (x < 3), g / 6, 0)


def _multi_margin_backward(g, x, target, p, margin, weight=None, reduction=1):
    return pulled(
        lambda x: composites.multi_margin_loss(x, target, p, margin, weight, reduction), g, x
    )[0]


def _multilabel_margin_backward(g, x, target, reduction, is_target):
    return pulled(lambda x: composites.multilabel_margin_loss(x, target, reduction), g, x)[0]


def _ctc_backward(g, log_probs, targets, times, sizes, nll, alpha, blank, zero_infinity=False):
    """With what vanishes where ``log_probs`` come from a softmax, as the kernel has it."""
    (found,) = pulled(
        lambda x: composites.ctc_loss(x, targets, times, sizes, blank, zero_infinity), g, log_probs
    )
    steps = torch.arange(len(log_probs), device=log_probs.device).unsqueeze(1)
    runs = steps < torch.as_tensor(times, device=log_probs.device)
    if zero_infinity:
        runs = runs & (nll != torch.inf)
    return found + log_probs.exp() * (g * runs).unsqueeze(2)


def _segment_backward(
    g, out, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None
):
    return pulled(
        lambda x: composites.segment_reduce(
            x, reduce, lengths, None, offsets, axis, initial=initial
        ),
        g,
        data,
    )[0]


def _bags_of(g, indices, offsets, size, rows, mode, padding) -> Callable:
    largest = _largest(size, rows) if mode == composites.MAX else None
    return lambda weight, own: composites.bags(
        weight, own, indices, offsets, mode, padding, g.shape[0], largest
    )


def _refuse_scaled(scaled: bool) -> None:
    if scaled:
        raise NotImplementedError(
            "embedding_bag: scale_grad_by_freq=True makes the gradient another than the "
            "derivative, which has no derivative of its own.\nUse scale_grad_by_freq=False."
        )


def _embedding_bag_backward(
    g, indices, offsets, bag, size, rows, n, scaled, mode, sparse, own, padding=-1
):
    _refuse_scaled(scaled)
    weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
    f = _bags_of(g, indices, offsets, size, rows, mode, padding)
    return pulled(lambda w: f(w, own), g, weight)[0]


def _own_weights_backward(g, weight, indices, offsets, bag, mode, padding=-1):
    f = _bags_of(g, indices, offsets, None, None, mode, padding)
    return pulled(lambda own: f(weight, own), g, torch.ones_like(indices, dtype=g.dtype))[0]


BACKWARD: dict[Any, Callable] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._cdist_backward.default: _cdist_backward,
    aten._pdist_backward.default: _pdist_backward,
    aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    aten.multi_margin_loss_backward.default: _multi_margin_backward,
    aten.multilabel_margin_loss_backward.default: _multilabel_margin_backward,
    aten._ctc_loss_backward.default: _ctc_backward,
    aten._ctc_loss_backward.Tensor: _ctc_backward,
    aten._segment_reduce_backward.default: _segment_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _own_weights_backward,
}


# ------------------------------------------------------- nodes of the backward
# Of a node and the cotangent: the pull-back, and the tensors beside the cotangent that it is of.


def _attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = node._saved_dropout_p, node._saved_is_causal, node._saved_scale
    mask = getattr(node, "_saved_attn_mask", None)

    def pull(g, q, k, v):
        return _attention_backward(g, q, k, v, p, causal, mask, scale)

    return pull, (node._saved_query, node._saved_key, node._saved_value)


def _biased_attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = node._saved_dropout_p, node._saved_is_causal, node._saved_scale

    def pull(g, q, k, v, bias):
        return pulled(
            lambda q, k, v, b: composites.attention(q, k, v, p, causal, b, scale), g, q, k, v, bias
        )

    return pull, (
        node._saved_query,
        node._saved_key,
        node._saved_value,
        node._saved_attn_bias,
    )


def _cdist_node(node: Any) -> tuple[Callable, tuple]:
    p = node._saved_p
    return (
        lambda g, x, y: pulled(lambda x, y: composites.cdist(x, y, p), g, x, y),
        (node._saved_x1, node._saved_x2),
    )


def _pdist_node(node: Any) -> tuple[Callable, tuple]:
    p = node._saved_p
    return lambda g, x: (_pdist_backward(g, x, p, None),), (node._saved_self,)


def _hardsigmoid_node(node: Any) -> tuple[Callable, tuple]:
    return lambda g, x: (_hardsigmoid_backward(g, x),), (node._saved_self,)


def _multi_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        node._saved_target,
        node._saved_p,
        node._saved_margin,
        node._saved_weight,
        node._saved_reduction,
    )
    return lambda g, x: (_multi_margin_backward(g, x, *rest),), (node._saved_self,)


def _multilabel_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = node._saved_target, node._saved_reduction, None
    return lambda g, x: (_multilabel_margin_backward(g, x, *rest),), (node._saved_self,)


def _ctc_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        node._saved_targets,
        node._saved_input_lengths,
        node._saved_target_lengths,
        node._saved_result0,
        None,
        node._saved_blank,
        node._saved_zero_infinity,
    )
    return lambda g, x: (_ctc_backward(g, x, *rest),), (node._saved_log_probs,)


def _segment_node(node: Any) -> tuple[Callable, tuple]:
    named = {n: getattr(node, f"_saved_{n}") for n in ("lengths", "offsets", "axis", "initial")}
    reduce = node._saved_reduce
    return lambda g, x: (_segment_backward(g, None, x, reduce, **named),), (node._saved_data,)


def _embedding_bag_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        node._saved_indices,
        node._saved_offsets,
        node._saved_result2,
        node._saved_result3,
        node._saved_mode,
        node._saved_padding_idx,
    )
    scaled, n = node._saved_scale_grad_by_freq, node._saved_weight_sym_argsize_0

    def pull(g, weight, own):
        _refuse_scaled(scaled)
        if weight is None:  # the result is linear in it
            weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
        return pulled(_bags_of(g, *rest), g, weight, own)

    return pull, (node._saved_weight, node._saved_per_sample_weights)


NODES: dict[str, Callable[[Any], tuple[Callable, tuple]]] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention_node,
    "ScaledDotProductFlashAttentionBackward0": _attention_node,
    "ScaledDotProductEfficientAttentionBackward0": _biased_attention_node,
    "CdistBackward0": _cdist_node,
    "PdistBackward0": _pdist_node,
    "HardsigmoidBackward0": _hardsigmoid_node,
    "MultiMarginLossBackward0": _multi_margin_node,
    "MultilabelMarginLossBackward0": _multilabel_margin_node,
    "CtcLossBackward0": _ctc_node,
    "CtcLossBackward1": _ctc_node,
    "SegmentReduceBackward0": _segment_node,
    "EmbeddingBagBackward0": _embedding_bag_node,
}
