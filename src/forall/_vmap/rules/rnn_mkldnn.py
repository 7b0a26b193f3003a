"""Rules of oneDNN's operator for one LSTM layer, and of its backward.

With unbatched weights, the batch axis is folded into the batch of one fused call. The gradient of a
weight is batched, so the backward is made of ordinary operators. The gates of all steps are
computed at once, since the hidden states are known. Then there is one product per step back through
time, and one product per weight.

Source: Hochreiter and Schmidhuber, "Long short-term memory" (1997).
"""

from __future__ import annotations

from typing import Any

import torch

from forall._core.axes import fold_axis
from forall._core.half_precision import to_float32
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    expand_stack,
    expand_to_stack,
    get_value,
    is_mapped,
    lower_shared,
    make_stack_handler,
    wrap_results,
)

aten = torch.ops.aten
Tensor = torch.Tensor


def _fold_contiguous(a: Tensor, dim: int, level: Any) -> Tensor:
    """Fold the batch axis into ``dim``: (B, *S) -> *S with B * N at ``dim``, contiguous."""
    return fold_axis(expand_to_stack(a, level), dim).contiguous()


def _lstm_layer(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a layer on x (T, N, I), weights (4H, I) and (4H, H), biases (4H,), states (N, H)."""
    x, *params, h, c = args[:7]
    if not level.size or any(is_mapped(p, level) for p in params):
        found = _run_lstm(level, func, args, kwargs)
        return *found, wrap_stack(torch.empty(0, dtype=torch.uint8), None, level)
    given = (_fold_contiguous(x, 1, level), *(lower_shared(p, level).contiguous() for p in params))
    states = (_fold_contiguous(h, 0, level), _fold_contiguous(c, 0, level))
    *outs, workspace = func(*given, *states, *args[7:])
    outs = [
        wrap_stack(o.unflatten(dim, (level.size, -1)), dim, level)
        for o, dim in zip(outs, (1, 0, 0), strict=True)
    ]
    # The workspace has no batch axis; only the fused backward could read it.
    return *outs, wrap_results(workspace, None, level)


@make_stack_handler
def _run_lstm(size, x, w, u, b, d, h, c, reverse, sizes, mode, hidden, layers, biases, *_):
    stacks = [to_float32(expand_stack(a, size)) for a in (x, h, c)]
    w, u, b, d = map(get_value, (w, u, b, d))
    x, h, c = stacks
    given = _compute_gates(x, w, b, d, biases)
    steps = given.unbind(1)
    outs = []
    for step in reversed(steps) if reverse else steps:
        i, f, g, o = (step + h @ to_float32(u).mT).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outs.append(h)
    return tuple(a.to(w.dtype) for a in (torch.stack(outs[:: -1 if reverse else 1], 1), h, c))


def _compute_gates(x: Tensor, w: Tensor, b: Tensor, d: Tensor, biases: bool) -> Tensor:
    """Return the part of the gates that comes from x: (B, T, N, I) -> (B, T, N, 4H)."""
    out = _multiply(x, w.mT)
    if not biases:
        return out
    b = to_float32(b + d)
    return out + (b.unsqueeze(1).unsqueeze(1) if b.dim() == 2 else b)


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    """Multiply (B, T, N, I) with (B, I, O), or with an unbatched (I, O)."""
    return (x.flatten(1, 2) @ to_float32(w)).unflatten(1, x.shape[1:3])


@make_stack_handler
def _lstm_layer_backward(
    size, x, w, u, b, d, h, c, y, hy, cy, gy, gh, gc, reverse, mode, hidden, layers, biases, *_
):
    given = (x, h, c, y, *(torch.zeros_like(h) if g is None else g for g in (gh, gc)))
    dtype = get_value(w).dtype
    x, h, c, y, gh, gc = (to_float32(expand_stack(a, size)) for a in given)
    gy = torch.zeros_like(y) if gy is None else to_float32(expand_stack(gy, size))
    w, u, b, d = map(get_value, (w, u, b, d))
    if reverse:
        x, y, gy = x.flip(1), y.flip(1), gy.flip(1)
    before = torch.cat([h.unsqueeze(1), y[:, :-1]], 1)
    gates = _compute_gates(x, w, b, d, biases) + _multiply(before, u.mT)
    by_gate, gh, gc = _pull_through_time(gates, c, to_float32(u), gy, gh, gc)
    rows = by_gate.flatten(1, 2)
    gx = _multiply(by_gate, w)
    gb = rows.sum(1)
    found = (rows.mT @ x.flatten(1, 2), rows.mT @ before.flatten(1, 2), gb, gb, gh, gc)
    return tuple(a.to(dtype) for a in (gx.flip(1) if reverse else gx, *found))


def _pull_through_time(
    gates: Tensor, c: Tensor, u: Tensor, gy: Tensor, gh: Tensor, gc: Tensor
) -> tuple:
    """Return the cotangents of the gates (B, T, N, 4H) and of the initial states."""
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cells = [c]
    for forget, new in zip(f.unbind(1), (i * g).unbind(1), strict=True):
        cells.append(forget * cells[-1] + new)
    seen = torch.stack(cells[1:], 1).tanh()
    before = torch.stack(cells[:-1], 1)
    by_cell = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], -2).unbind(1)
    by_out = (seen * o * (1 - o)).unsqueeze(-2).unbind(1)
    to_cell = (o * (1 - seen * seen)).unbind(1)
    found = []
    for t in reversed(range(gy.shape[1])):
        gh = gh + gy[:, t]
        gc = gc + gh * to_cell[t]
        parts = (gc.unsqueeze(-2) * by_cell[t], gh.unsqueeze(-2) * by_out[t])
        found.append(torch.cat(parts, -2).flatten(-2))
        gh, gc = found[-1] @ u, gc * f[:, t]
    return torch.stack(found[::-1], 1), gh, gc


register_rows(
    {
        aten.mkldnn_rnn_layer.default: _lstm_layer,
        aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
    }
)
