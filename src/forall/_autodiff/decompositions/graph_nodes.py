"""Backward nodes that torch does not differentiate, or not rightly, and their decompositions.

Each function here takes an autograd node and returns (pull-back, tensors). The tensors are the
pull-back's arguments after the cotangents, in the order of the node's gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.decompositions import backwards as back
from forall._autodiff.decompositions import kernels
from forall._autodiff.decompositions.backwards import pull_back_through
from forall._autodiff.node_formulas import NODES, NodeDerivative
from forall._core import rnn_decompositions

if TYPE_CHECKING:
    from collections.abc import Callable


def _get_saved(node: Any, names: str) -> tuple:
    """Return the values that a node has saved under these names."""
    return tuple(getattr(node, f"_saved_{name}") for name in names.split())


def _attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = _get_saved(node, "dropout_p is_causal scale")
    mask = getattr(node, "_saved_attn_mask", None)

    def pull(g, q, k, v):
        return back.attention_backward(g, q, k, v, p, causal, mask, scale)

    return pull, _get_saved(node, "query key value")


def _biased_attention_node(node: Any) -> tuple[Callable, tuple]:
    p, causal, scale = _get_saved(node, "dropout_p is_causal scale")

    def pull(g, q, k, v, bias):
        return pull_back_through(
            lambda q, k, v, b: kernels.fused_attention(q, k, v, p, causal, b, scale),
            g,
            q,
            k,
            v,
            bias,
        )

    return pull, _get_saved(node, "query key value attn_bias")


def _cdist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _get_saved(node, "p")

    def pull(g, x, y):
        return pull_back_through(lambda x, y: kernels.cdist(x, y, p), g, x, y)

    return pull, _get_saved(node, "x1 x2")


def _pdist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _get_saved(node, "p")
    return lambda g, x: (back.pdist_backward(g, x, p, None),), _get_saved(node, "self")


def _hardsigmoid_node(node: Any) -> tuple[Callable, tuple]:
    return lambda g, x: (back.hardsigmoid_backward(g, x),), _get_saved(node, "self")


def _multi_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = _get_saved(node, "target p margin weight reduction")
    return lambda g, x: (back.multi_margin_backward(g, x, *rest),), _get_saved(node, "self")


def _multilabel_margin_node(node: Any) -> tuple[Callable, tuple]:
    rest = *_get_saved(node, "target reduction"), None
    return lambda g, x: (back.multilabel_margin_backward(g, x, *rest),), _get_saved(node, "self")


def _ctc_node(node: Any) -> tuple[Callable, tuple]:
    rest = (
        *_get_saved(node, "targets input_lengths target_lengths result0"),
        None,
        *_get_saved(node, "blank zero_infinity"),
    )
    return lambda g, x: (back.ctc_backward(g, x, *rest),), _get_saved(node, "log_probs")


def _segment_node(node: Any) -> tuple[Callable, tuple]:
    names = "lengths", "offsets", "axis", "initial"
    named = dict(zip(names, _get_saved(node, " ".join(names)), strict=True))
    (reduce,) = _get_saved(node, "reduce")
    return lambda g, x: (back.segment_backward(g, None, x, reduce, **named),), _get_saved(
        node, "data"
    )


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


# ------------------------------- backwards that torch differentiates wrongly


def _det_node(node: Any) -> tuple[Callable, tuple]:
    """Decompose det's backward: torch's uses the SVD under a mode, and fails for equal values."""
    return lambda g, x: pull_back_through(kernels.det, g, x), _get_saved(node, "A")


def _logcumsumexp_node(node: Any) -> tuple[Callable, tuple]:
    """Decompose logcumsumexp's backward: torch's takes the logarithm of the cotangent."""
    dim = _restore_sign(*_get_saved(node, "dim"))
    return lambda g, x: pull_back_through(lambda x: kernels.logcumsumexp(x, dim), g, x), _get_saved(
        node, "self"
    )


def _restore_sign(dim: int) -> int:
    """Restore the sign of a dim, which a node saves as an unsigned integer."""
    return dim - 2**64 if dim >= 2**63 else dim


def _weight_norm_node(node: Any) -> tuple[Callable, tuple]:
    (dim,) = _get_saved(node, "dim")

    def pull(g, v, size):
        return pull_back_through(
            lambda v, size: kernels.weight_norm(v, size, _restore_sign(dim))[0], g, v, size
        )

    return pull, _get_saved(node, "v g")


def _make_norm_node(
    f: Callable, names: str, dim: str = "dim"
) -> Callable[[Any], tuple[Callable, tuple]]:
    """Return a node function for a norm ``f``.

    Torch's backward writes zeros into a value that a tangent may be computed from.
    """

    def steps(node: Any) -> tuple[Callable, tuple]:
        known = {name: getattr(node, f"_saved_{name}") for name in names.split()}
        if known.get(dim) is not None:
            dims = known[dim]
            signed = (
                [_restore_sign(d) for d in dims] if isinstance(dims, tuple) else _restore_sign(dims)
            )
            known[dim] = signed

        def pull(*both):
            *gs, x = both

            def compute_norm(x):
                out = f(x, **known)
                outs = out if isinstance(out, tuple) else (out,)
                pairs = zip(outs, gs, strict=True)
                return tuple(y if g is None else y.to(g.dtype) for y, g in pairs)

            return pull_back_through(compute_norm, tuple(gs), x)

        return pull, _get_saved(node, "self")

    return steps


def _vector_norm(x, ord=2, dim=None, keepdim=False):
    return kernels.vector_norm(x, ord, dim, keepdim)


def _aten_norm(x, p=2, dim=None, keepdim=False):
    return kernels.vector_norm(x, 2 if p is None else p, dim or None, keepdim)


def _dist_node(node: Any) -> tuple[Callable, tuple]:
    (p,) = _get_saved(node, "p")

    def pull(g, x, y):
        return pull_back_through(lambda x, y: kernels.vector_norm(x - y, p), g, x, y)

    return pull, _get_saved(node, "self other")


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
        "ScaledDotProductEfficientAttentionBackward0": NodeDerivative(_biased_attention_node),
        "CdistBackward0": NodeDerivative(_cdist_node),
        "PdistBackward0": NodeDerivative(_pdist_node),
        "HardsigmoidBackward0": NodeDerivative(_hardsigmoid_node),
        "MultiMarginLossBackward0": NodeDerivative(_multi_margin_node),
        "MultilabelMarginLossBackward0": NodeDerivative(_multilabel_margin_node),
        "CtcLossBackward0": NodeDerivative(_ctc_node),
        "CtcLossBackward1": NodeDerivative(_ctc_node),
        "SegmentReduceBackward0": NodeDerivative(_segment_node),
        "CudnnRnnBackward0": NodeDerivative(_cudnn_rnn_node, cotangents=3),
        "EmbeddingBagBackward0": NodeDerivative(_embedding_bag_node),
        "WeightNormInterfaceBackward0": NodeDerivative(_weight_norm_node),
        "LinalgDetBackward0": NodeDerivative(_det_node, lacks_tangents=True),
        "LogcumsumexpBackward0": NodeDerivative(_logcumsumexp_node, lacks_tangents=True),
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
        "LinalgVectorNormBackward0": _fix_tangents(
            _make_norm_node(_vector_norm, "ord dim keepdim")
        ),
        "DistBackward0": _fix_tangents(_dist_node),
        "NormBackward0": _fix_tangents(_make_norm_node(_aten_norm, "p")),
        "NormBackward1": _fix_tangents(_make_norm_node(_aten_norm, "p dim keepdim")),
        "NormBackward2": _fix_tangents(_make_norm_node(_aten_norm, "p")),
        "NormBackward3": _fix_tangents(_make_norm_node(_aten_norm, "p dim keepdim")),
        "RenormBackward0": _fix_tangents(_make_norm_node(kernels.renorm, "p dim maxnorm")),
        "StdBackward0": _fix_tangents(_make_norm_node(kernels.std, "dim correction keepdim")),
        "StdMeanBackward0": _fix_tangents(
            _make_norm_node(kernels.std_mean, "dim correction keepdim"), 2
        ),
    }
)
