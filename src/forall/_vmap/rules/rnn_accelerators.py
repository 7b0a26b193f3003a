"""Rules of accelerator kernels for recurrent layers and cells, made of ordinary operators.

A call of torch's API that needs a derivative, or has batched weights, does not reach cuDNN: it is
decomposed, and autograd records ordinary operators. The backward of cuDNN is batched if the call
itself was made outside, as in `jacrev`.
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
from forall._vmap.registry import CALLS, register_rows
from forall._vmap.rule_makers.basic import loop_and_stack, reenter_level

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def has_kernel(x: Tensor) -> bool:
    """True if a recurrent layer of ``x`` may be one kernel, which has no batching rule."""
    return not x.is_cpu


def _make_layer_call(mode: int, before: Callable) -> Callable:
    """Return the override of a torch function for such layers, used if ``before`` declines."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        out = before(*args, **kwargs)
        if out is not NotImplemented or kwargs or not has_kernel(args[0]):
            return out
        if not any(isinstance(t, Wrapper) for t in pytree.get_leaves(args)):
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


def _make_handler(f: Callable) -> Callable:
    """Return a handler that runs ``f``, which is made of ordinary operators."""

    def rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        with reenter_level(level):
            return f(*args, **kwargs)

    return rule


def _loop_with_dropout(rule: Callable, first: int) -> Callable:
    """Return a handler that runs ``rule``, but loops over the examples if there is dropout.

    ``first`` is the index of the arguments (num_layers, .., dropout, train).
    """

    def run_unless_dropout(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        count, _, dropout, train = args[first : first + 4]
        if rnn_decompositions.drops_out(count, dropout, train):
            return loop_and_stack(level, func, args, kwargs)
        return rule(level, func, args, kwargs)

    return run_unless_dropout


def _cudnn(*args: Any) -> tuple:
    out, h, c = rnn_decompositions.cudnn_rnn(*args)
    # The last two stand for the kernel's reserve and weight buffer, which are not read here.
    return out, h, c, out.new_empty(0, dtype=torch.uint8), out.new_empty(0)


CALLS.update(
    {
        call: _make_layer_call(mode, CALLS[call])
        for call, mode in {
            torch.lstm: LSTM,
            torch.gru: GRU,
            torch.rnn_tanh: TANH,
            torch.rnn_relu: RELU,
        }.items()
    }
)
register_rows(
    {
        aten._cudnn_rnn.default: _loop_with_dropout(_make_handler(_cudnn), 9),
        aten._cudnn_rnn_backward.default: _loop_with_dropout(
            _make_handler(rnn_decompositions.cudnn_rnn_backward), 13
        ),
        aten._thnn_fused_lstm_cell.default: _make_handler(rnn_decompositions.lstm_cell),
        aten._thnn_fused_lstm_cell_backward_impl.default: _make_handler(
            rnn_decompositions.fused_lstm_cell_backward
        ),
        aten._thnn_fused_gru_cell.default: _make_handler(rnn_decompositions.gru_cell),
        aten._thnn_fused_gru_cell_backward.default: _make_handler(
            rnn_decompositions.fused_gru_cell_backward
        ),
    }
)
