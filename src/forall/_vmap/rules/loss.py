"""Rules of losses: torch's kernel without reduction, then a reduction within each example."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from forall._core.axes import fold_axis, pad_rank, unfold_axis
from forall._vmap.memory_layout import is_expanded_inside, keep_example_layout
from forall._vmap.registry import CALLS, register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    get_example_rank,
    get_example_shape,
    get_value,
    make_stack_handler,
)
from forall._vmap.rule_makers.pointwise import result_dtype

aten = torch.ops.aten
Tensor = torch.Tensor
NONE, MEAN, SUM = range(3)


def reduce_loss(x: Tensor, reduction: int) -> Tensor:
    """Reduce the losses of each example: (B, *S) -> (B,), or unchanged for ``NONE``."""
    if reduction == NONE:
        return x
    x = x.reshape(x.shape[0], -1)
    return x.mean(1) if reduction == MEAN else x.sum(1)


# --- losses per entry --------------------------------------------------------------------------


def broadcast_operands(size: int, tensors: list) -> list[Tensor]:
    """Return the operands (B, *S), broadcast and promoted as the examples are."""
    ranks = [get_example_rank(t) for t in tensors]
    rank = max(ranks)
    if rank and not min(ranks) and len({get_value(t).dtype for t in tensors}) > 1:
        tensors = _promote_dtypes(tensors)
    return list(torch.broadcast_tensors(*[pad_rank(expand_stack(t, size), rank) for t in tensors]))


def _promote_dtypes(tensors: list) -> list:
    """Promote dtypes as the examples do: one of rank 0 promotes less than its batched tensor."""
    common = result_dtype(
        tuple(get_value(t).dtype for t in tensors[:2] if get_example_rank(t)),
        tuple(get_value(t).dtype for t in tensors[:2] if not get_example_rank(t)),
    )
    return [
        MappedStack(t.v.to(common)) if isinstance(t, MappedStack) else t.to(common) for t in tensors
    ]


def _take_operands(size: int, args: tuple, count: int) -> tuple[list[Any], int]:
    """Return ``count`` broadcast tensors, None for each that is not given, and the reduction."""
    reduction = args[count] if len(args) > count else MEAN
    found = iter(broadcast_operands(size, [a for a in args[:count] if a is not None]))
    tensors = [None if a is None else next(found) for a in args[:count]]
    return tensors + [None] * (count - len(tensors)), reduction


def make_entry_handler(func: Any, count: int):
    """Return the handler of a loss ``func(*tensors, reduction, *rest)`` with ``count`` tensors."""

    def rule(size, *args):
        tensors, reduction = _take_operands(size, args, count)
        return reduce_loss(func(*tensors, NONE, *args[count + 1 :]), reduction)

    return keep_example_layout(make_stack_handler(rule), is_expanded_inside)


def make_entry_backward_handler(func: Any, count: int):
    """Return the handler of ``func(g, *tensors, reduction, *rest)`` with ``count`` tensors."""

    def rule(size, g, *args):
        tensors, reduction = _take_operands(size, args, count)
        g = spread_cotangent(g, tensors[0], reduction, size)
        return func(g, *tensors, NONE, *args[count + 1 :])

    return make_stack_handler(rule)


def spread_cotangent(g: MappedStack | Tensor, x: Tensor, reduction: int, size: int) -> Tensor:
    """Return the cotangent (B, *S) of the entries of x, from that of the reduced loss."""
    g = pad_rank(expand_stack(g, size), x.dim() - 1)
    return (g / x[0].numel() if reduction == MEAN else g).expand(x.shape)


register_rows(
    {
        aten.mse_loss.default: make_entry_handler(aten.mse_loss.default, 2),
        aten.smooth_l1_loss.default: make_entry_handler(aten.smooth_l1_loss.default, 2),
        aten.huber_loss.default: make_entry_handler(aten.huber_loss.default, 2),
        aten.soft_margin_loss.default: make_entry_handler(aten.soft_margin_loss.default, 2),
        aten.binary_cross_entropy.default: make_entry_handler(aten.binary_cross_entropy.default, 3),
        aten.binary_cross_entropy_with_logits.default: make_entry_handler(
            aten.binary_cross_entropy_with_logits.default, 4
        ),
    }
    | {
        op: make_entry_backward_handler(op, count)
        for op, count in (
            (aten.mse_loss_backward.default, 2),
            (aten.smooth_l1_loss_backward.default, 2),
            (aten.huber_loss_backward.default, 2),
            (aten.soft_margin_loss_backward.default, 2),
            (aten.binary_cross_entropy_backward.default, 3),
        )
    }
)


# --- losses per row: x (N, C) or (C,), one class or a list of classes per row -------------------


def flatten_loss_rows(a: MappedStack | Tensor, dims: int, size: int) -> Tensor:
    """Fold the batch axis into the rows: (B, [N,] *dims) -> (B*N, *dims).

    An example of rank 0 becomes a row of one entry.
    """
    v = expand_stack(a, size)
    if v.dim() == dims + 2:
        return v.flatten(0, 1)
    return v if v.dim() > dims else v.unsqueeze(-1)


def row_weights(weight: MappedStack | Tensor, target: Tensor, size: int) -> Tensor:
    """The weight of the class of each row; target: (B*N, *)."""
    if isinstance(weight, MappedStack):
        t = target.reshape(size, -1)
        return weight.v.gather(1, t).view(target.shape)
    return weight.index_select(0, target.flatten()).view(target.shape)


def _make_nll_handler(func: Any, dims: int):
    """Return the handler of a negative log-likelihood, which returns (loss, total weight).

    x is ([N,] C, *) and target ([N,] *), where * are ``dims`` dims.
    """

    def rule(size, x, target, weight, reduction, ignore):
        n = get_example_rank(x) - 1 - dims
        x, t = flatten_loss_rows(x, dims + 1, size), flatten_loss_rows(target, dims, size)
        loss = func(x, t, None, NONE, ignore)[0]
        counted = t != ignore
        if weight is not None:
            w = row_weights(weight, torch.where(counted, t, 0), size)
            loss = loss * w
            counted = torch.where(counted, w, 0)
        loss, counted = loss.view(size, -1), counted.reshape(size, -1)
        total = counted.sum(1, dtype=x.dtype) if reduction != NONE else x.new_zeros(size)
        if reduction == NONE:
            return loss.view(size, *(() if n < 1 else (-1,)), *t.shape[1:]), total
        loss = loss.sum(1)
        return (loss / total if reduction == MEAN else loss), total

    return make_stack_handler(rule)


def _make_nll_backward_handler(func: Any, dims: int):
    def rule(size, g, x, target, weight, reduction, ignore, total):
        shape = (size, *get_example_shape(x))
        x, t = flatten_loss_rows(x, dims + 1, size), flatten_loss_rows(target, dims, size)
        g = expand_stack(g, size)
        if reduction == MEAN:
            g = g / get_value(total)
        g = (
            g.reshape(t.shape)
            if reduction == NONE
            else (g.reshape(size, 1).expand(size, t.numel() // size).reshape(t.shape))
        )
        if weight is not None:
            g = g * row_weights(weight, torch.where(t != ignore, t, 0), size)
        return func(g, x, t, None, NONE, ignore, x.new_ones(())).view(shape)

    return make_stack_handler(rule)


register_rows(
    {
        aten.nll_loss_forward.default: _make_nll_handler(aten.nll_loss_forward.default, 0),
        aten.nll_loss2d_forward.default: _make_nll_handler(aten.nll_loss2d_forward.default, 2),
        aten.nll_loss_backward.default: _make_nll_backward_handler(
            aten.nll_loss_backward.default, 0
        ),
        aten.nll_loss2d_backward.default: _make_nll_backward_handler(
            aten.nll_loss2d_backward.default, 2
        ),
    }
)


def _unflatten_rows(out: Tensor, x: MappedStack | Tensor, size: int) -> Tensor:
    """Undo the fold of the batch axis into the rows: (B*N, *) -> (B, [N,] *)."""
    if get_example_rank(x) == 2:
        return out.unflatten(0, (size, -1))
    return out.flatten(0) if get_example_rank(x) == 0 else out


def row_cotangent(
    g: MappedStack | Tensor, x: MappedStack | Tensor, reduction: int, size: int
) -> Tensor:
    n = get_example_shape(x)[0] if get_example_rank(x) == 2 else 1
    g = expand_stack(g, size).reshape(size, -1)
    g = g / n if reduction == MEAN else g
    return g.expand(size, n).reshape(size * n)


@make_stack_handler
def _multi_margin(size, x, target, p=1, margin=1, weight=None, reduction=MEAN):
    t = flatten_loss_rows(target, 0, size)
    out = aten.multi_margin_loss.default(flatten_loss_rows(x, 1, size), t, p, margin, None, NONE)
    out = out if weight is None else out * row_weights(weight, t, size)
    return reduce_loss(_unflatten_rows(out, x, size), reduction)


@make_stack_handler
def _multi_margin_backward(size, g, x, target, p, margin, weight=None, reduction=MEAN):
    t = flatten_loss_rows(target, 0, size)
    g = row_cotangent(g, x, reduction, size)
    g = g if weight is None else g * row_weights(weight, t, size)
    func = aten.multi_margin_loss_backward.default
    return _unflatten_rows(
        func(g, flatten_loss_rows(x, 1, size), t, p, margin, None, NONE), x, size
    )


@make_stack_handler
def _multilabel(size, x, target, reduction):
    func = aten.multilabel_margin_loss_forward.default
    outs = func(flatten_loss_rows(x, 1, size), flatten_loss_rows(target, 1, size), NONE)
    out, is_target = (_unflatten_rows(o, x, size) for o in outs)
    return reduce_loss(out, reduction), is_target


@make_stack_handler
def _multilabel_backward(size, g, x, target, reduction, is_target):
    g = row_cotangent(g, x, reduction, size)
    operands = (flatten_loss_rows(a, 1, size) for a in (x, target))
    func = aten.multilabel_margin_loss_backward.default
    return _unflatten_rows(func(g, *operands, NONE, flatten_loss_rows(is_target, 1, size)), x, size)


register_rows(
    {
        aten.multi_margin_loss.default: _multi_margin,
        aten.multi_margin_loss_backward.default: _multi_margin_backward,
        aten.multilabel_margin_loss_forward.default: _multilabel,
        aten.multilabel_margin_loss_backward.default: _multilabel_backward,
    }
)


# --- sequences: log_probs (T, N, C) --------------------------------------------------------------


def _repeat_lengths(a: Any, size: int) -> Any:
    return a * size if isinstance(a, list) else flatten_loss_rows(a, 0, size)


def _flatten_in_time(a: MappedStack | Tensor, size: int) -> Tensor:
    return fold_axis(expand_stack(a, size), 1)


def _flatten_targets(a: MappedStack | Tensor, size: int) -> Tensor:
    """Fold the batch axis into the targets, which are padded (N, S) or concatenated."""
    return expand_stack(a, size).flatten(0, 1)


def _make_ctc_handler(func: Any):
    def rule(size, x, targets, inputs, lengths, *rest):
        inputs, lengths = _repeat_lengths(inputs, size), _repeat_lengths(lengths, size)
        outs = func(
            _flatten_in_time(x, size), _flatten_targets(targets, size), inputs, lengths, *rest
        )
        return tuple(o.unflatten(0, (size, -1)) for o in outs)

    return make_stack_handler(rule)


def _make_ctc_backward_handler(func: Any):
    def rule(size, g, x, targets, inputs, lengths, loss, alpha, *rest):
        out = func(
            flatten_loss_rows(g, 0, size),
            _flatten_in_time(x, size),
            _flatten_targets(targets, size),
            _repeat_lengths(inputs, size),
            _repeat_lengths(lengths, size),
            flatten_loss_rows(loss, 0, size),
            flatten_loss_rows(alpha, 2, size),
            *rest,
        )
        return unfold_axis(out, 1, size)

    return make_stack_handler(rule)


register_rows(
    {op: _make_ctc_handler(op) for op in (aten._ctc_loss.default, aten._ctc_loss.Tensor)}
    | {
        op: _make_ctc_backward_handler(op)
        for op in (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
    }
)


_REDUCED = {"none": 0, "mean": 1, "sum": 2}


def _make_ctc_call(call: Any, none: Any):
    """Return an override for calls with lengths in lists, or targets or lengths on another device.

    Torch copies a list of lengths to the memory address of a new tensor, which a wrapper lacks.
    Torch moves targets and lengths from the CPU, where cuDNN wants them, for plain tensors alone.
    """

    def handle(x, targets, inputs, lengths, blank, reduction, zero_infinity):
        how = _REDUCED.get(reduction, reduction)
        if how not in (0, 1, 2) or not (isinstance(x, Tensor) and isinstance(targets, Tensor)):
            return NotImplemented  # torch raises the error
        device, given = x.device, (targets, inputs, lengths)
        if all(isinstance(n, Tensor) and n.device == device for n in given):
            return NotImplemented
        inputs, lengths = (
            torch.as_tensor(n, dtype=None if isinstance(n, Tensor) else torch.int64, device=device)
            for n in (inputs, lengths)
        )
        targets = targets.to(device, torch.int64)
        out = call(x, targets, inputs, lengths, blank, none, zero_infinity)
        if how == 1:
            return (out / lengths.clamp_min(1)).mean()
        return out.sum() if how == 2 else out

    return handle


def _add_ctc_signature(handle: Any, default: Any):
    """Return an override with the parameters of ``ctc_loss`` and this default of reduction."""

    def call(
        log_probs, targets, input_lengths, target_lengths, blank=0, reduction=default,
        zero_infinity=False,
    ):  # fmt: skip
        if not isinstance(reduction, type(default)):
            return NotImplemented  # torch raises the error
        rest = (blank, reduction, zero_infinity)
        return handle(log_probs, targets, input_lengths, target_lengths, *rest)

    return call


CALLS[F.ctc_loss] = _add_ctc_signature(_make_ctc_call(F.ctc_loss, "none"), "mean")
# By its schema the mean is the default, but torch.ctc_loss returns the loss of each sequence.
CALLS[torch.ctc_loss] = _add_ctc_signature(_make_ctc_call(torch.ctc_loss, 0), 0)
