"""Nodes of backwards that torch does not differentiate, and their pull-backs in small steps.

Each function here takes a node and gives the pull-back, and the tensors that this is a function of
beside the cotangent, in the order of the node's gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._derivatives import composites
from forall._derivatives import pullbacks as back
from forall._derivatives.pullbacks import pulled

if TYPE_CHECKING:
    from collections.abc import Callable


def _attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = node._saved_dropout_p, node._saved_is_causal, node._saved_scale
    mask = getattr(node, "_saved_attn_mask", None)

    def pull(g, q, k, v):
        return back.attention_backward(g, q, k, v, p, causal, mask, scale)

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
    return lambda g, x: (back.pdist_backward(g, x, p, None),), (node._saved_self,)


def _hardsigmoid_node(node: Any) -> tuple[Callable, tuple]:
    return lambda g, x: (back.hardsigmoid_backward(g, x),), (node._saved_self,)


def _multi_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        node._saved_target,
        node._saved_p,
        node._saved_margin,
        node._saved_weight,
        node._saved_reduction,
    )
    return lambda g, x: (back.multi_margin_backward(g, x, *rest),), (node._saved_self,)


def _multilabel_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = node._saved_target, node._saved_reduction, None
    return lambda g, x: (back.multilabel_margin_backward(g, x, *rest),), (node._saved_self,)


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
    return lambda g, x: (back.ctc_backward(g, x, *rest),), (node._saved_log_probs,)


def _segment_node(node: Any) -> tuple[Callable, tuple]:
    named = {n: getattr(node, f"_saved_{n}") for n in ("lengths", "offsets", "axis", "initial")}
    reduce = node._saved_reduce
    return lambda g, x: (back.segment_backward(g, None, x, reduce, **named),), (node._saved_data,)


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
        back.refuse_scaled(scaled)
        if weight is None:  # the result is linear in it
            weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
        return pulled(back.bags_of(g, *rest), g, weight, own)

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
