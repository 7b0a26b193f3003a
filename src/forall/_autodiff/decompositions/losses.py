"""Decompositions of losses, and of sums over segments and bags: see `kernels`."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.assertions import require


def reduce_loss(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return all losses, their mean or their sum, by aten's number of the reduction: 0, 1, 2."""
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def multi_margin_loss(x, target, p=1, margin=1, weight=None, reduction=1):
    if x.ndim < 2:
        loss = multi_margin_loss(x.reshape(1, -1), target.reshape(1), p, margin, weight, 0)
        return loss.squeeze(0) if target.ndim == 0 else reduce_loss(loss, reduction)
    own = target.unsqueeze(1)
    z = (margin - x.gather(1, own) + x).clamp_min(0)
    z = z if p == 1 else z * z
    z = z if weight is None else z * weight[target].unsqueeze(1)
    others = torch.arange(x.shape[1], device=x.device) != own
    return reduce_loss((z * others).sum(1) / x.shape[1], reduction)


def multilabel_margin_loss(x, target, reduction):
    if x.ndim < 2:
        loss = multilabel_margin_loss(x.reshape(1, -1), target.reshape(1, -1), 0)
        return loss.squeeze(0)
    meant = (target >= 0).to(torch.int64).cumprod(1)  # up to the first -1
    place = target.clamp_min(0)
    labels = torch.arange(x.shape[1], device=x.device)
    named = ((place.unsqueeze(2) == labels) & meant.bool().unsqueeze(2)).any(1)
    z = (1 - x.gather(1, place).unsqueeze(2) + x.unsqueeze(1)).clamp_min(0)
    z = z * meant.unsqueeze(2) * ~named.unsqueeze(1)
    return reduce_loss(z.sum((1, 2)) / x.shape[1], reduction)


_FAR = -1e30  # instead of minus infinity, so that differences are not nan


def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """Return minus the log probability of all alignments, by dynamic programming.

    (T, N, C) -> (N,).

    Source: Graves et al., "Connectionist temporal classification" (2006), section 4.1.
    """
    device = log_probs.device
    times = torch.as_tensor(input_lengths, device=device)
    sizes = torch.as_tensor(target_lengths, device=device)
    labels, skips = _ctc_labels(targets.to(device), sizes, log_probs.shape[1], blank)
    steps = log_probs.gather(2, labels.expand(len(log_probs), *labels.shape))  # (T, N, 2S + 1)
    alpha = steps[0].masked_fill(torch.arange(labels.shape[1], device=device) > 1, _FAR)
    for t in range(1, len(steps)):
        before = torch.nn.functional.pad(alpha, (2, 0), value=_FAR)
        twice = before[:, :-2].masked_fill(~skips, _FAR)
        joined = torch.stack((alpha, before[:, 1:-1], twice)).logsumexp(0) + steps[t]
        alpha = torch.where((t < times).unsqueeze(1), joined, alpha)
    ends = torch.stack((2 * sizes, (2 * sizes - 1).clamp_min(0)), 1)
    last = alpha.gather(1, ends)
    last = torch.stack((last[:, 0], last[:, 1].masked_fill(sizes == 0, _FAR))).logsumexp(0)
    impossible = (last < _FAR / 2) | (times == 0) & (sizes > 0)
    last = torch.where((times == 0) & (sizes == 0), 0.0, last)
    loss = (-last).masked_fill(impossible, torch.inf)
    if zero_infinity:
        return loss
    steep = (last - last + ~impossible).rsqrt()  # as in the kernel, infinity has derivative nan
    return torch.where(impossible, steep, loss)


def _ctc_labels(targets, sizes, n, blank):
    """Return labels (N, 2S + 1) with blanks between, and a mask of those that may skip a blank."""
    if targets.ndim == 1:  # concatenated
        most = targets.shape[0] if n else 0
        starts = sizes.cumsum(0) - sizes
        place = starts.unsqueeze(1) + torch.arange(most, device=targets.device)
        targets = targets[place.clamp_max(max(most - 1, 0))]
    labels = torch.stack((torch.full_like(targets, blank), targets), 2).flatten(1)
    labels = torch.nn.functional.pad(labels, (0, 1), value=blank).clamp_min(0)
    other = labels[:, 2:] != labels[:, :-2]
    return labels, torch.nn.functional.pad(other & (labels[:, 2:] != blank), (2, 0))


# ------------------------------------------------------------- segments and bags


def segment_reduce(
    data,
    reduce,
    lengths: Any = None,
    indices=None,
    offsets: Any = None,
    axis=0,
    unsafe=False,
    initial=None,
):
    """Reduce segments of ``axis``, which follows the leading dims of lengths and offsets."""
    if offsets is None:  # then there are lengths
        offsets = torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))
        if not unsafe:
            require(
                ((lengths >= 0).all() & (offsets[..., -1] == data.shape[axis]).all()),
                "segment_reduce: lengths are at least 0, and their sum is the size of the axis",
            )
    place = torch.arange(data.shape[axis], device=data.device).expand(data.shape[: axis + 1])
    inside = (place.unsqueeze(-1) >= offsets[..., None, :-1]) & (
        place.unsqueeze(-1) < offsets[..., None, 1:]
    )  # (*axes before, D, n)
    count = inside.sum(-2)
    rest = data.ndim - axis - 1
    inside = inside.reshape(*inside.shape, *[1] * rest)
    count = count.reshape(*count.shape, *[1] * rest)
    x = data.unsqueeze(axis + 1)
    out = _reduce_segments(x, inside, reduce, axis, initial)
    if reduce == "mean":
        out = out / count.clamp_min(1)
    if initial is None and reduce == "mean":
        out = out.masked_fill(count == 0, torch.nan)
    return out


def _reduce_segments(x, inside, reduce, axis, initial):
    if reduce in ("sum", "mean"):
        out = x.masked_fill(~inside, 0).sum(axis)
        return out if initial is None else out + initial
    if reduce == "prod":
        out = x.masked_fill(~inside, 1).prod(axis)
        return out if initial is None else out * initial
    sign = 1 if reduce == "max" else -1
    out = (sign * x).masked_fill(~inside, -torch.inf).amax(axis)
    return sign * (out if initial is None else out.clamp_min(sign * initial))


def linear_cross_entropy(x, w, target, bias, weight, reduction, ignore_index, label_smoothing=0.0):
    """Compute the loss all at once. Torch's chunked form computes first derivatives only."""
    return torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(x, w, bias),
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


SUM, MEAN, MAX = 0, 1, 2


def reduce_bags(weight, own, indices, offsets, mode, padding_idx, n, largest):
    """Reduce ``n`` bags of rows of ``weight``, each row scaled by its ``own`` weight.

    ``largest`` is the row that each maximum comes from, or -1 in an empty bag.
    """
    if mode == MAX:
        return weight.gather(0, largest.clamp_min(0)) * (largest >= 0)
    bag = torch.searchsorted(offsets, torch.arange(len(indices), device=indices.device), right=True)
    kept = (indices != padding_idx).to(weight.dtype)
    rows = weight[indices] * (kept if own is None else kept * own).unsqueeze(1)
    out = torch.zeros(n, weight.shape[1], dtype=weight.dtype, device=weight.device)
    out = out.index_add(0, bag - 1, rows)
    if mode == SUM:
        return out
    size = torch.zeros(n, dtype=weight.dtype, device=weight.device).index_add(0, bag - 1, kept)
    return out / size.clamp_min(1).unsqueeze(1)


def find_max_rows(size: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the row that each maximum of a bag comes from, or -1 in an empty bag."""
    return rows.masked_fill((size == 0).unsqueeze(1), -1)
