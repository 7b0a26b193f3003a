"""Acceptance functions: masks, and results whose shape depends on the data."""

from __future__ import annotations

import torch

from divergence.cases import array, between, case, digits, integers, scalars


@case(array(6))
def mask_read(v):
    chosen = v[v > 0.1]
    return chosen.square().sum(), len(chosen)


@case(array(6))
def mask_read_then_test(v):
    chosen = v[v > 0.8]
    if chosen.numel() == 0:
        return v.sum()
    if chosen.shape[0] > 2:
        return chosen.mean() * 3
    return chosen.max()


@case(array(6))
def mask_written(v):
    y = v.clone()
    y[y > 0.4] = 0.0
    y[v < -1] = v.mean()
    return y * v


@case(array(6))
def mask_written_with_as_many(v):
    y = v * 2
    mask = v > 0.1
    y[mask] = v[mask].exp()
    y[~mask] += 1
    return y


@case(array(3, 4))
def mask_over_rows(a):
    rows = a[a.sum(1) > 0]
    return rows.sum(0) + (rows * rows).sum() + a[:, a[0] > 0].sum()


@case(array(5))
def nonzero(v):
    places = (v > 0.2).nonzero()
    first = places[0, 0] if len(places) else torch.tensor(0)
    return v[places[:, 0]].sum() + v[first], places.sum()


@case(array(5))
def where_of_one_argument(v):
    (places,) = torch.where(v > 0)
    return v[places].prod(), places.sum()


@case(array(3, 3))
def argwhere(a):
    total = a[0, 0] * 0
    for place in torch.argwhere(a > 0.7):
        total = total + a[place[0], place[1]] * (place[0] + 1)
    return total


@case(array(6))
def masked_select(v):
    return torch.masked_select(v, v > 0).sum() + v.masked_select(v < -1).square().sum()


@case(digits(6, high=4), scalars)
def unique(n, x):
    values, counts = torch.unique(n, return_counts=True)
    if len(values) == 4:
        return x * counts.max()
    return x + (values * counts).sum() + len(n.unique())


@case(digits(3, high=3), array(3))
def repeat_interleave(n, v):
    return torch.repeat_interleave(v, n).sum() + v.repeat_interleave(n + 1).square().sum()


@case(array(5), integers(1, 5))
def top_of_n(v, n):
    return v.topk(int(n)).values.prod(), v.sort().values[:n].sum()


@case(array(5), integers(1, 5))
def split_at_n(v, n):
    head, tail = v.split([int(n), 5 - int(n)])
    return head.sum() * 2 + tail.square().sum(), torch.cat([tail, head])


@case(array(6))
def pieces_joined_again(v):
    return torch.cat([v[v > 0] * 2, v[v <= 0].exp()])


@case(array(4))
def python_loop_over_chosen(v):
    total = v[0] * 0
    for i, e in enumerate(v[v > -0.4]):
        total = total + e * (i + 1)
    return total


@case(array(6))
def shrinking_until_empty(v):
    total = v[0] * 0
    while v.numel():
        total = total + v.sum()
        v = v[v > 0.3] - 0.4
    return total


@case(digits(6, high=5))
def bincount(n):
    counts = torch.bincount(n)
    return counts.max(), len(counts)


@case(between(0.2, 3.0))
def arange_up_to_x(x):
    steps = torch.arange(0, x.item(), 0.45, dtype=x.dtype)
    return (steps * x).sum(), len(steps)


@case(array(4), integers(0, 3))
def chosen_by_both(v, n):
    y = v[v > 0]
    if int(n) < y.numel():
        return y[n] * 2
    return v[n]


@case(array(4))
def argmax_as_an_index(v):
    best = int(v.argmax())
    return v[best] * [1.0, 2.0, 3.0, 4.0][v.argmin()] + best
