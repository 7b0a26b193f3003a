"""Kernels of accelerators for recurrent layers and cells: in ordinary operators, for all examples.

A call of torch's API with a derivative at stake, or with weights of each example, never comes to
cuDNN: autograd records the ordinary operators. Its backward has examples where the call itself was
made outside, as in `jacrev`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.wrapper_tensor import Wrapper
from forall._core import rnn_decompositions
from forall._core.rnn_decompositions import (
    GRU,
    LSTM,
    RELU,
    TANH,
    Layers,
)
from forall._vmap.registry import CALLS, register
from forall._vmap.rule_makers.basic import level_on, loop

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def has_kernel(x: Tensor) -> bool:
    """Return True if a recurrent layer of ``x`` may be one kernel, which knows no examples."""
    return not x.is_cpu


def _layers(mode: int, before: Callable) -> Callable:
    """Return what answers a call of torch's of this kind of layer, where ``before`` does not."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        out = before(*args, **kwargs)
        if out is not NotImplemented or kwargs or not has_kernel(args[0]):
            return out
        if not any(isinstance(t, Wrapper) for t in pytree.leaves(args)):
            return out
        x, sizes, *rest = args
        if isinstance(sizes, Tensor) and sizes.dim() == 1:
            hx, params, _, count, dropout, train, both_ways = rest
            how = (False, sizes.tolist())
        else:
            hx, (params, _, count, dropout, train, both_ways, batch_first) = sizes, rest
            how = (batch_first, ())
        h, c = hx if mode == LSTM else (hx, None)
        is_dropped = rnn_decompositions.drops_out(count, dropout, train)
        drop = partial(torch.dropout, p=dropout, train=True) if is_dropped else None
        layers = Layers(mode, count, 2 if both_ways else 1, *how)
        out, h, c = layers(x, h, c, params, drop)
        return (out, h) if c is None else (out, h, c)

    return answer


def _for_examples(f: Callable) -> Callable:
    """Return the rule that ``f`` makes of ordinary operators."""

    def rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        with level_on(level):
            return f(*args, **kwargs)

    return rule


def _unless_dropped_out(rule: Callable, first: int) -> Callable:
    """Return ``rule`` where nothing is dropped out; ``first`` is where the words for that begin."""

    def checked(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        count, _, dropout, train = args[first : first + 4]
        if rnn_decompositions.drops_out(count, dropout, train):
            return loop(level, func, args, kwargs)
        return rule(level, func, args, kwargs)

    return checked


def _cudnn(*args: Any) -> tuple:
    out, h, c = rnn_decompositions.cudnn(*args)
    # What the kernel keeps for its backward, which nobody reads here.
    return out, h, c, out.new_empty(0, dtype=torch.uint8), out.new_empty(0)


CALLS.update(
    {
        call: _layers(mode, CALLS[call])
        for call, mode in {
            torch.lstm: LSTM,
            torch.gru: GRU,
            torch.rnn_tanh: TANH,
            torch.rnn_relu: RELU,
        }.items()
    }
)
register(
    {
        aten._cudnn_rnn.default: _unless_dropped_out(_for_examples(_cudnn), 9),
        aten._cudnn_rnn_backward.default: _unless_dropped_out(
            _for_examples(rnn_decompositions.cudnn_backward), 13
        ),
        aten._thnn_fused_lstm_cell.default: _for_examples(rnn_decompositions.lstm_cell),
        aten._thnn_fused_lstm_cell_backward_impl.default: _for_examples(
            rnn_decompositions.fused_lstm_cell_backward
        ),
        aten._thnn_fused_gru_cell.default: _for_examples(rnn_decompositions.gru_cell),
        aten._thnn_fused_gru_cell_backward.default: _for_examples(
            rnn_decompositions.fused_gru_cell_backward
        ),
    }
)
