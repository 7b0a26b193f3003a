"""Backward nodes that torch does not differentiate, or not rightly, and their decompositions.

Each function here takes an autograd node and returns (pull-back, tensors). The tensors are the
pull-back's arguments after the cotangents, in the order of the node's gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._autodiff.decompositions import backwards as back
from forall._autodiff.decompositions import kernels
from forall._autodiff.decompositions.backwards import pulled
from forall._core import rnn_decompositions

if TYPE_CHECKING:
    from collections.abc import Callable


def _saved(node: Any, names: str) -> tuple:
    """Return the values that a node has saved under these names."""
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
            lambda q, k, v, b: kernels.attention(q, k, v, p, causal, b, scale), g, q, k, v, bias
        )

    return pull, _saved(node, "query key value attn_bias")


def _cdist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _saved(node, "p")

    def pull(g, x, y):
        return pulled(lambda x, y: kernels.cdist(x, y, p), g, x, y)

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
        if weight is None:  # the result is linear in the weight, so any weight will do
            weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
        return pulled(back.bags_of(g, *rest), g, weight, own)

    return pull, _saved(node, "weight per_sample_weights")


def _cudnn_rnn_node(node: Any) -> tuple[Callable, tuple]:
    x, params, hx, cx = _saved(node, "input weight hx cx")
    mode, count, both_ways = _saved(node, "mode num_layers bidirectional")
    rnn_decompositions.refuse_dropout(count, *_saved(node, "dropout train"))
    how = (count, 2 if both_ways else 1, *_saved(node, "batch_first batch_sizes"))
    layers = rnn_decompositions.Layers(mode, *how)

    def pull(gy, gh, gc, x, *rest):
        *params, hx, cx = rest
        gc = gc if mode == rnn_decompositions.LSTM else None
        gx, gh, gc, by_params = layers.backward(x, hx, cx, params, gy, gh, gc)
        return gx, *by_params, gh, gc

    return pull, (x, *params, hx, cx)


# ------------------------------- backwards that torch differentiates wrongly


def _det_node(node: Any) -> tuple[Callable, tuple]:
    """Decompose det's backward: torch's uses the SVD under a mode, and fails for equal values."""
    return lambda g, x: pulled(kernels.det, g, x), _saved(node, "A")


def _logcumsumexp_node(node: Any) -> tuple[Callable, tuple]:
    """Decompose logcumsumexp's backward: torch's takes the logarithm of the cotangent."""
    dim = _signed(*_saved(node, "dim"))
    return lambda g, x: pulled(lambda x: kernels.logcumsumexp(x, dim), g, x), _saved(node, "self")


def _signed(dim: int) -> int:
    """Restore the sign of a dim, which a node saves as an unsigned integer."""
    return dim - 2**64 if dim >= 2**63 else dim


def _weight_norm_node(node: Any) -> tuple[Callable, tuple]:
    (dim,) = _saved(node, "dim")

    def pull(g, v, size):
        return pulled(lambda v, size: kernels.weight_norm(v, size, _signed(dim))[0], g, v, size)

    return pull, _saved(node, "v g")


def _of_norm(f: Callable, names: str, dim: str = "dim") -> Callable[[Any], tuple[Callable, tuple]]:
    """Return a node function for a norm ``f``.

    Torch's backward writes zeros into a value that a tangent may be computed from.
    """

    def steps(node: Any) -> tuple[Callable, tuple]:
        known = {name: getattr(node, f"_saved_{name}") for name in names.split()}
        if known.get(dim) is not None:
            dims = known[dim]
            signed = [_signed(d) for d in dims] if isinstance(dims, tuple) else _signed(dims)
            known[dim] = signed

        def pull(*both):
            *gs, x = both

            def of(x):
                out = f(x, **known)
                outs = out if isinstance(out, tuple) else (out,)
                pairs = zip(outs, gs, strict=True)
                return tuple(y if g is None else y.to(g.dtype) for y, g in pairs)

            return pulled(of, tuple(gs), x)

        return pull, _saved(node, "self")

    return steps


def _length(x, ord=2, dim=None, keepdim=False):
    return kernels.vector_norm(x, ord, dim, keepdim)


def _older_norm(x, p=2, dim=None, keepdim=False):
    return kernels.vector_norm(x, 2 if p is None else p, dim or None, keepdim)


def _dist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _saved(node, "p")

    def pull(g, x, y):
        return pulled(lambda x, y: kernels.vector_norm(x - y, p), g, x, y)

    return pull, _saved(node, "self other")


def _layer_norm_backward_node(node: Any) -> tuple[Callable, tuple]:
    """Decompose the double backward: torch's takes mean and rstd for constants."""
    shape, mean, rstd = _saved(node, "normalized_shape mean rstd")

    def f(g, x, weight):
        bias = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return back.layer_norm_backward(g, x, shape, mean, rstd, weight, bias, [True] * 3)

    def pull(gx, gw, gb, g, x, weight):
        g, x, weight = pulled(f, (gx, gw, gb), g, x, weight)
        return g, x, None, None, weight, None

    return pull, _saved(node, "grad_out input weight")


def _batch_norm_backward_node(names: str, none: int) -> Callable[[Any], tuple[Callable, tuple]]:
    """Return a node function for the double backward of batch norm.

    Torch's takes mean and rstd for constants. ``none`` is the number of last arguments that have no
    derivative.
    """

    def steps(node: Any) -> tuple[Callable, tuple]:
        rest = _saved(node, names)

        def f(g, x, weight):
            return back.batch_norm_backward(g, x, weight, *rest, [True] * 3)

        def pull(gx, gw, gb, g, x, weight):
            return *pulled(f, (gx, gw, gb), g, x, weight), *(None,) * none

        return pull, _saved(node, "grad_out input weight")

    return steps


class Node(NamedTuple):
    """The replacement for the derivative of a torch node, whose numbers are right."""

    steps: Callable[[Any], tuple[Callable, tuple]]
    # True if the numbers need another history: torch's is missing, or lacks terms.
    lacks_history: bool = True
    # True if the numbers need other tangents as well.
    lacks_tangents: bool = False
    # The number of cotangents that the pull-back takes, the first ones of the node's.
    cotangents: int = 1


def _moving(steps: Callable, cotangents: int = 1) -> Node:
    return Node(steps, lacks_history=False, lacks_tangents=True, cotangents=cotangents)


NODES: dict[str, Node] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": Node(_attention_node),
    "ScaledDotProductFlashAttentionBackward0": Node(_attention_node),
    "ScaledDotProductEfficientAttentionBackward0": Node(_biased_attention_node),
    "CdistBackward0": Node(_cdist_node),
    "PdistBackward0": Node(_pdist_node),
    "HardsigmoidBackward0": Node(_hardsigmoid_node),
    "MultiMarginLossBackward0": Node(_multi_margin_node),
    "MultilabelMarginLossBackward0": Node(_multilabel_margin_node),
    "CtcLossBackward0": Node(_ctc_node),
    "CtcLossBackward1": Node(_ctc_node),
    "SegmentReduceBackward0": Node(_segment_node),
    "CudnnRnnBackward0": Node(_cudnn_rnn_node, cotangents=3),
    "EmbeddingBagBackward0": Node(_embedding_bag_node),
    "WeightNormInterfaceBackward0": Node(_weight_norm_node),
    "LinalgDetBackward0": Node(_det_node, lacks_tangents=True),
    "LogcumsumexpBackward0": Node(_logcumsumexp_node, lacks_tangents=True),
    "NativeLayerNormBackwardBackward0": Node(
        _layer_norm_backward_node, lacks_tangents=True, cotangents=3
    ),
    "NativeBatchNormBackwardBackward0": Node(
        _batch_norm_backward_node(
            "running_mean running_var save_mean save_invstd train eps", none=2
        ),
        lacks_tangents=True,
        cotangents=3,
    ),
    "BatchNormBackwardBackward0": Node(
        _batch_norm_backward_node("running_mean running_var save_mean save_var update eps", none=3),
        lacks_tangents=True,
        cotangents=3,
    ),
    "LinalgVectorNormBackward0": _moving(_of_norm(_length, "ord dim keepdim")),
    "DistBackward0": _moving(_dist_node),
    "NormBackward0": _moving(_of_norm(_older_norm, "p")),
    "NormBackward1": _moving(_of_norm(_older_norm, "p dim keepdim")),
    "NormBackward2": _moving(_of_norm(_older_norm, "p")),
    "NormBackward3": _moving(_of_norm(_older_norm, "p dim keepdim")),
    "RenormBackward0": _moving(_of_norm(kernels.renorm, "p dim maxnorm")),
    "StdBackward0": _moving(_of_norm(kernels.std, "dim correction keepdim")),
    "StdMeanBackward0": _moving(_of_norm(kernels.std_mean, "dim correction keepdim"), 2),
}
