"""Decompositions of backward operators that torch does not differentiate in forward mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.decompositions import kernels, losses
from forall._autodiff.decompositions.losses import find_max_rows
from forall._autodiff.reverse_mode import compute_gradients, make_variable
from forall._compat.documented_error import documented_error
from forall._core import rnn_decompositions
from forall._core.levels import find_innermost_of, lift

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def pull_back_through(f: Callable, g: Any, *xs: torch.Tensor | None) -> tuple:
    """Pull the cotangent ``g`` of ``f``'s result back to each of ``xs``.

    For several results, ``g`` is a tuple, with None for a missing cotangent.
    """
    gs = g if isinstance(g, tuple) else (g,)
    there = [i for i, x in enumerate(xs) if x is not None]
    level = find_innermost_of((*(c for c in gs if c is not None), *(xs[i] for i in there)))
    own = [make_variable(lift(xs[i], level)) for i in there]
    full: list = list(xs)
    for i, x in zip(there, own, strict=True):
        full[i] = x
    ys = f(*full)
    ys = ys if isinstance(ys, tuple) else (ys,)
    pairs = [(y, c) for y, c in zip(ys, gs, strict=True) if y is not None and c is not None]
    outs, given = tuple(y for y, _ in pairs), tuple(c for _, c in pairs)
    found = dict(zip(there, compute_gradients(outs, given, own), strict=True))
    return tuple(found.get(i) for i in range(len(xs)))


def _make_backward(f: Callable, count: int) -> Callable:
    """Return the backward ``(g, x, *rest)`` of ``f``, which takes x and ``count`` of the rest."""

    def backward(g, x, *rest):
        return pull_back_through(lambda x: f(x, *rest[:count]), g, x)[0]

    return backward


def attention_backward(
    g, q, k, v, p: float, causal: bool, mask: Any = None, scale: float | None = None
) -> tuple:
    return pull_back_through(
        lambda *qkv: kernels.fused_attention(*qkv, p, causal, mask, scale), g, q, k, v
    )


def _cpu_flash_backward(g, q, k, v, out, lse, p, causal, *, attn_mask=None, scale=None):
    return attention_backward(g, q, k, v, p, causal, attn_mask, scale)


def _flash_backward(g, q, k, v, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
    return attention_backward(g, q, k, v, p, causal, None, scale)


def _efficient_backward(
    g, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None
):
    found = pull_back_through(
        lambda q, k, v, b: kernels.fused_attention(q, k, v, p, causal, b, scale), g, q, k, v, bias
    )
    return _keep_requested(found, mask)


def _cudnn_backward(
    g, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, p, causal, *, scale=None
):
    return attention_backward(g, q, k, v, p, causal, bias, scale)


def layer_norm_backward(g, x, shape, mean, rstd, weight, bias, mask):
    """Differentiate a layer norm; eps is recovered from the kernel's rstd."""
    dims = list(range(-len(shape), 0))
    spread = (x - x.mean(dims, keepdim=True)).square().mean(dims, keepdim=True)
    eps = (rstd**-2 - spread).detach()
    found = pull_back_through(
        lambda *xs: kernels.layer_norm(*xs[:1], shape, *xs[1:], eps), g, x, weight, bias
    )
    return _keep_requested(found, mask)


def _weight_norm_backward(grad, v, g, norm, dim):
    return pull_back_through(lambda v, g: kernels.weight_norm(v, g, dim)[0], grad, v, g)


def batch_norm_backward(g, x, weight, mean, var, saved, saved_var, train, eps, mask):
    found = pull_back_through(
        lambda x, weight, shift: kernels.batch_norm(x, weight, shift, mean, var, train, 0.0, eps),
        g,
        x,
        weight,
        torch.zeros(x.shape[1], dtype=x.dtype, device=x.device),
    )
    return _keep_requested(found, mask)


def _batch_norm_update_backward(
    g, x, weight, mean, var, saved, saved_var, update, eps, mask, reserve
):
    return batch_norm_backward(g, x, weight, mean, var, saved, saved_var, update, eps, mask)


def _keep_requested(found: tuple, mask: list[bool]) -> tuple:
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))


def hardsigmoid_backward(g, x):
    return torch.where((x > -3) & (x < 3), g / 6, 0)


def ctc_backward(g, log_probs, targets, times, sizes, nll, alpha, blank, zero_infinity=False):
    """Differentiate ctc_loss, with the kernel's extra term, which vanishes behind a log_softmax."""
    (found,) = pull_back_through(
        lambda x: losses.ctc_loss(x, targets, times, sizes, blank, zero_infinity), g, log_probs
    )
    steps = torch.arange(len(log_probs), device=log_probs.device).unsqueeze(1)
    runs = steps < torch.as_tensor(times, device=log_probs.device)
    if zero_infinity:
        runs = runs & (nll != torch.inf)
    return found + log_probs.exp() * (g * runs).unsqueeze(2)


def segment_backward(g, out, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    return pull_back_through(
        lambda x: losses.segment_reduce(x, reduce, lengths, None, offsets, axis, initial=initial),
        g,
        data,
    )[0]


def make_bag_function(g, indices, offsets, size, rows, mode, padding) -> Callable:
    first = find_max_rows(size, rows) if mode == losses.MAX else None
    return lambda weight, own: losses.reduce_bags(
        weight, own, indices, offsets, mode, padding, g.shape[0], first
    )


def refuse_scaled_grad(scaled: bool) -> None:
    if scaled:
        raise documented_error(NotImplementedError, "no-second-derivative")(
            "embedding_bag: scale_grad_by_freq=True makes the gradient another than the "
            "derivative, which has no derivative of its own.\nUse scale_grad_by_freq=False."
        )


def _embedding_bag_backward(
    g, indices, offsets, bag, size, rows, n, scaled, mode, sparse, own, padding=-1
):
    refuse_scaled_grad(scaled)
    weight = torch.zeros(n, g.shape[1], dtype=g.dtype, device=g.device)
    f = make_bag_function(g, indices, offsets, size, rows, mode, padding)
    return pull_back_through(lambda w: f(w, own), g, weight)[0]


def _sample_weights_backward(g, weight, indices, offsets, bag, mode, padding=-1):
    f = make_bag_function(g, indices, offsets, None, None, mode, padding)
    return pull_back_through(
        lambda own: f(weight, own), g, torch.ones_like(indices, dtype=g.dtype)
    )[0]


BACKWARD: dict[Any, Callable] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_flash_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.batch_norm_backward.default: _batch_norm_update_backward,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten._cdist_backward.default: _make_backward(kernels.cdist, 2),
    aten._pdist_backward.default: _make_backward(kernels.pdist, 1),
    aten.glu_backward.default: _make_backward(kernels.glu, 1),
    aten.mse_loss_backward.default: _make_backward(kernels.mse_loss, 2),
    aten.huber_loss_backward.default: _make_backward(kernels.huber_loss, 3),
    aten.soft_margin_loss_backward.default: _make_backward(kernels.soft_margin_loss, 2),
    aten.hardsigmoid_backward.default: hardsigmoid_backward,
    aten.multi_margin_loss_backward.default: _make_backward(losses.multi_margin_loss, 5),
    aten.multilabel_margin_loss_backward.default: _make_backward(losses.multilabel_margin_loss, 2),
    aten._ctc_loss_backward.default: ctc_backward,
    aten._ctc_loss_backward.Tensor: ctc_backward,
    aten._segment_reduce_backward.default: segment_backward,
    aten._cudnn_rnn_backward.default: rnn_decompositions.cudnn_rnn_backward,
    aten._thnn_fused_lstm_cell_backward_impl.default: rnn_decompositions.fused_lstm_cell_backward,
    aten._thnn_fused_gru_cell_backward.default: rnn_decompositions.fused_gru_cell_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _sample_weights_backward,
}
