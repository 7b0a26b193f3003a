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


def _saved(node: Any, names: str) -> tuple:
    """What a node keeps under these names."""
    return tuple(getattr(node, f"_saved_{name}") for name in names.split())


def _attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = _saved(node, "dropout_p is_causal scale")
    mask = getattr(node, "_saved_attn_mask", None)

    def pull(g, q, k, v):
        return back.attention_backward(g, q, k, v, p, causal, mask, scale)

    return pull, _saved(node, "query key value")


def _biased_attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = _saved(node, "dropout_p is_causal scale")

    def pull(g, q, k, v, bias):
        return pulled(
            lambda q, k, v, b: composites.attention(q, k, v, p, causal, b, scale), g, q, k, v, bias
        )

    return pull, _saved(node, "query key value attn_bias")


def _cdist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _saved(node, "p")

    def pull(g, x, y):
        return pulled(lambda x, y: composites.cdist(x, y, p), g, x, y)

    return pull, _saved(node, "x1 x2")


def _pdist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _saved(node, "p")
    return lambda g, x: (back.pdist_backward(g, x, p, None),), _saved(node, "self")


def _hardsigmoid_node(node: Any) -> tuple[Callable, tuple]:
    return lambda g, x: (back.hardsigmoid_backward(g, x),), _saved(node, "self")


def _multi_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = _saved(node, "target p margin weight reduction")
    return lambda g, x: (back.multi_margin_backward(g, x, *rest),), _saved(node, "self")


def _multilabel_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = *_saved(node, "target reduction"), None
    return lambda g, x: (back.multilabel_margin_backward(g, x, *rest),), _saved(node, "self")


def _ctc_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        *_saved(node, "targets input_lengths target_lengths result0"),
        None,
        *_saved(node, "blank zero_infinity"),
    )
    return lambda g, x: (back.ctc_backward(g, x, *rest),), _saved(node, "log_probs")


def _segment_node(node: Any) -> tuple[Callable, tuple]:
    names = "lengths", "offsets", "axis", "initial"
    named = dict(zip(names, _saved(node, " ".join(names)), strict=True))
    (reduce,) = _saved(node, "reduce")
    return lambda g, x: (back.segment_backward(g, None, x, reduce, **named),), _saved(node, "data")


def _embedding_bag_node(node: Any) -> tuple[Callable, tuple]:
    rest = _saved(node, "indices offsets result2 result3 mode padding_idx")
    scaled, n = _saved(node, "scale_grad_by_freq weight_sym_argsize_0")

    def pull(g, weight, own):
        back.refuse_scaled(scaled)
        if weight is None:  # the result is linear in it
            weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
        return pulled(back.bags_of(g, *rest), g, weight, own)

    return pull, _saved(node, "weight per_sample_weights")


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
