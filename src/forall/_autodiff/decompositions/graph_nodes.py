"""Backward nodes that torch does not differentiate, or not rightly, and their decompositions.

Each function here takes an autograd node and returns (pull-back, tensors). The tensors are the
pull-back's arguments after the cotangents, in the order of the node's gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.decompositions import backwards as back
from forall._autodiff.decompositions import kernels, losses
from forall._autodiff.decompositions.backwards import pull_back_through
from forall._autodiff.node_formulas import NODES, NodeDerivative
from forall._core import rnn_decompositions

if TYPE_CHECKING:
    from collections.abc import Callable


def _get_saved(node: Any, names: str) -> tuple:
    """Return the values that a node has saved under these names."""
    return tuple(_restore_sign(getattr(node, f"_saved_{name}")) for name in names.split())


def _restore_sign(value: Any) -> Any:
    """Restore the sign of a dim, or of each of several: a node saves it as an unsigned integer."""
    if isinstance(value, tuple):
        return tuple(map(_restore_sign, value))
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def _make_node(f: Callable, tensors: str, names: str = "") -> Callable[[Any], tuple]:
    """Return a node function for ``f(*tensors, *names)``, of values saved under these names."""

    def steps(node: Any) -> tuple[Callable, tuple]:
        rest, given = _get_saved(node, names), _get_saved(node, tensors)

        def pull(*both):
            gs, xs = both[: -len(given)], both[-len(given) :]

            def compute(*xs):
                out = f(*xs, *rest)
                pairs = zip(out if isinstance(out, tuple) else (out,), gs, strict=True)
                return tuple(y if g is None else y.to(g.dtype) for y, g in pairs)

            return pull_back_through(compute, gs, *xs)

        return pull, given

    return steps


def _attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = _get_saved(node, "dropout_p is_causal scale")
    mask = getattr(node, "_saved_attn_mask", None)

    def pull(g, q, k, v):
        return back.attention_backward(g, q, k, v, p, causal, mask, scale)

    return pull, _get_saved(node, "query key value")


def _biased_attention(q, k, v, bias, p, causal, scale):
    return kernels.fused_attention(q, k, v, p, causal, bias, scale)


def _hardsigmoid_node(node: Any) -> tuple[Callable, tuple]:
    return lambda g, x: (back.hardsigmoid_backward(g, x),), _get_saved(node, "self")


def _ctc_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        *_get_saved(node, "targets input_lengths target_lengths result0"),
        None,
        *_get_saved(node, "blank zero_infinity"),
    )
    return lambda g, x: (back.ctc_backward(g, x, *rest),), _get_saved(node, "log_probs")


def _reduce_segments(x, reduce, lengths, offsets, axis, initial):
    return losses.segment_reduce(x, reduce, lengths, None, offsets, axis, initial=initial)


def _embedding_bag_node(node: Any) -> tuple[Callable, tuple]:
    rest = _get_saved(node, "indices offsets result2 result3 mode padding_idx")
    scaled, n = _get_saved(node, "scale_grad_by_freq weight_sym_argsize_0")

    def pull(g, weight, own):
        back.refuse_scaled_grad(scaled)
        if weight is None:  # the result is linear in the weight, so any weight will do
            weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
        return pull_back_through(back.make_bag_function(g, *rest), g, weight, own)

    return pull, _get_saved(node, "weight per_sample_weights")


def _cudnn_rnn_node(node: Any) -> tuple[Callable, tuple]:
    x, params, hx, cx = _get_saved(node, "input weight hx cx")
    mode, count, both_ways = _get_saved(node, "mode num_layers bidirectional")
    rnn_decompositions.refuse_dropout(count, *_get_saved(node, "dropout train"))
    how = (count, 2 if both_ways else 1, *_get_saved(node, "batch_first batch_sizes"))
    layers = rnn_decompositions.Layers(mode, *how)

    def pull(gy, gh, gc, x, *rest):
        *params, hx, cx = rest
        gc = gc if mode == rnn_decompositions.LSTM else None
        gx, gh, gc, by_params = layers.backward(x, hx, cx, params, gy, gh, gc)
        return gx, *by_params, gh, gc

    return pull, (x, *params, hx, cx)


def _weight_norm(v, g, dim):
    return kernels.weight_norm(v, g, dim)[0]


def _aten_norm(x, p=2, dim=None, keepdim=False):
    return kernels.vector_norm(x, 2 if p is None else p, dim or None, keepdim)


def _dist(x, y, p):
    return kernels.vector_norm(x - y, p)


def _layer_norm_backward_node(node: Any) -> tuple[Callable, tuple]:
    """Decompose the double backward: torch's takes mean and rstd for constants."""
    shape, mean, rstd = _get_saved(node, "normalized_shape mean rstd")

    def f(g, x, weight):
        bias = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return back.layer_norm_backward(g, x, shape, mean, rstd, weight, bias, [True] * 3)

    def pull(gx, gw, gb, g, x, weight):
        g, x, weight = pull_back_through(f, (gx, gw, gb), g, x, weight)
        return g, x, None, None, weight, None

    return pull, _get_saved(node, "grad_out input weight")


def _make_batch_norm_node(names: str, none: int) -> Callable[[Any], tuple[Callable, tuple]]:
    """Return a node function for the double backward of batch norm.

    Torch's takes mean and rstd for constants. ``none`` is the number of last arguments that have no
    derivative.
    """

    def steps(node: Any) -> tuple[Callable, tuple]:
        rest = _get_saved(node, names)

        def f(g, x, weight):
            return back.batch_norm_backward(g, x, weight, *rest, [True] * 3)

        def pull(gx, gw, gb, g, x, weight):
            return *pull_back_through(f, (gx, gw, gb), g, x, weight), *(None,) * none

        return pull, _get_saved(node, "grad_out input weight")

    return steps


def _fix_tangents(steps: Callable, cotangents: int = 1) -> NodeDerivative:
    return NodeDerivative(steps, lacks_history=False, lacks_tangents=True, cotangents=cotangents)


NODES.update(
    {
        "ScaledDotProductFlashAttentionForCpuBackward0": NodeDerivative(_attention_node),
        "ScaledDotProductFlashAttentionBackward0": NodeDerivative(_attention_node),
        "ScaledDotProductEfficientAttentionBackward0": NodeDerivative(
            _make_node(_biased_attention, "query key value attn_bias", "dropout_p is_causal scale")
        ),
        "CdistBackward0": NodeDerivative(_make_node(kernels.cdist, "x1 x2", "p")),
        "PdistBackward0": NodeDerivative(_make_node(kernels.pdist, "self", "p")),
        "HardsigmoidBackward0": NodeDerivative(_hardsigmoid_node),
        "MultiMarginLossBackward0": NodeDerivative(
            _make_node(losses.multi_margin_loss, "self", "target p margin weight reduction")
        ),
        "MultilabelMarginLossBackward0": NodeDerivative(
            _make_node(losses.multilabel_margin_loss, "self", "target reduction")
        ),
        "CtcLossBackward0": NodeDerivative(_ctc_node),
        "CtcLossBackward1": NodeDerivative(_ctc_node),
        "SegmentReduceBackward0": NodeDerivative(
            _make_node(_reduce_segments, "data", "reduce lengths offsets axis initial")
        ),
        "CudnnRnnBackward0": NodeDerivative(_cudnn_rnn_node, cotangents=3),
        "EmbeddingBagBackward0": NodeDerivative(_embedding_bag_node),
        "WeightNormInterfaceBackward0": NodeDerivative(_make_node(_weight_norm, "v g", "dim")),
        # Uses the SVD under a mode, and fails for equal values.
        "LinalgDetBackward0": NodeDerivative(_make_node(kernels.det, "A"), lacks_tangents=True),
        # Takes the logarithm of the cotangent.
        "LogcumsumexpBackward0": NodeDerivative(
            _make_node(kernels.logcumsumexp, "self", "dim"), lacks_tangents=True
        ),
        "NativeLayerNormBackwardBackward0": NodeDerivative(
            _layer_norm_backward_node, lacks_tangents=True, cotangents=3
        ),
        "NativeBatchNormBackwardBackward0": NodeDerivative(
            _make_batch_norm_node(
                "running_mean running_var save_mean save_invstd train eps", none=2
            ),
            lacks_tangents=True,
            cotangents=3,
        ),
        "BatchNormBackwardBackward0": NodeDerivative(
            _make_batch_norm_node("running_mean running_var save_mean save_var update eps", none=3),
            lacks_tangents=True,
            cotangents=3,
        ),
        # Norms: torch writes zeros into a value that a tangent may be computed from.
        "LinalgVectorNormBackward0": _fix_tangents(
            _make_node(kernels.vector_norm, "self", "ord dim keepdim")
        ),
        "DistBackward0": _fix_tangents(_make_node(_dist, "self other", "p")),
        "NormBackward0": _fix_tangents(_make_node(_aten_norm, "self", "p")),
        "NormBackward1": _fix_tangents(_make_node(_aten_norm, "self", "p dim keepdim")),
        "NormBackward2": _fix_tangents(_make_node(_aten_norm, "self", "p")),
        "NormBackward3": _fix_tangents(_make_node(_aten_norm, "self", "p dim keepdim")),
        "RenormBackward0": _fix_tangents(_make_node(kernels.renorm, "self", "p dim maxnorm")),
        "StdBackward0": _fix_tangents(_make_node(kernels.std, "self", "dim correction keepdim")),
        "StdMeanBackward0": _fix_tangents(
            _make_node(kernels.std_mean, "self", "dim correction keepdim"), 2
        ),
    }
)
