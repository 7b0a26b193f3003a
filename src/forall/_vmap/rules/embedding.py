"""Rules of embedding and embedding_bag: the examples' tables are concatenated to one table.

The kernels check an index against all rows of that table. An index that is out of range for its
example's own table may be a row of another example's table, so it is checked here.
"""

from __future__ import annotations

import torch

from forall._vmap.batched_indices import examples_of, flat
from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import Stack, by_front

aten = torch.ops.aten
Tensor = torch.Tensor


def in_tables(indices: Stack | Tensor, size: int, each: int, rows: int | None = None) -> Tensor:
    """Return indices (B, *I) into the B concatenated tables, which begin every ``each`` rows.

    An index outside of the ``rows`` of its example's table is an error. `gather`, which looks up
    the example of each index, raises it.
    """
    v = (indices.v if isinstance(indices, Stack) else indices.unsqueeze(0)).long()
    v = v.expand(size, *v.shape[1:])
    examples = examples_of(size, v.device, 1).expand(size, each if rows is None else rows)
    whose = examples.gather(1, flat(v)).view(v.shape)
    return torch.add(v, whose, alpha=each)


def moved(numbers: Tensor, each: int) -> Tensor:
    """Add ``each`` times the example's number to each example's numbers (B, *I)."""
    examples = examples_of(len(numbers), numbers.device, numbers.dim() - 1)
    return torch.add(numbers, examples.to(numbers.dtype), alpha=each)


@by_front
def _embedding(size, weight, indices, *_):
    if not isinstance(weight, Stack):
        return aten.embedding.default(weight, indices.v)
    rows = weight.v.shape[1]
    return aten.embedding.default(weight.v.flatten(0, 1), in_tables(indices, size, rows))


@by_front
def _embedding_dense_backward(size, g, indices, rows, padding, scale):
    i = _in_use(indices, size, rows)
    g = g.v if isinstance(g, Stack) else g.expand(size, *g.shape)
    out = aten.embedding_dense_backward.default(g, i, size * rows, -1, scale)
    out = out.view(size, rows, out.shape[-1])
    if padding >= 0:  # each table has a padding row; the operator knows one in all
        out.select(1, padding).zero_()
    return out


def _in_use(indices: Stack | Tensor, size: int, rows: int) -> Tensor:
    """Return indices into the concatenated tables, with -1 for those out of range.

    The backward kernel ignores -1.
    """
    try:
        return in_tables(indices, size, rows)
    except (IndexError, RuntimeError):
        v = _all(indices, size).long()
        return torch.where((v >= 0) & (v < rows), moved(v, rows), -1)


@by_front
def _renorm(size, weight, indices, max_norm, norm_type):
    """Scale the rows that are indexed down to the norm ``max_norm``."""
    w, i = _all(weight, size), _all(indices, size).reshape(size, -1).long()
    i = torch.where(i < 0, i + w.shape[1], i)  # the operator counts from the end too
    used = torch.zeros(w.shape[:2], dtype=torch.bool, device=w.device).scatter(1, i, True)
    norm = torch.linalg.vector_norm(w, norm_type, -1)
    cut = torch.where(used & (norm > max_norm), max_norm / (norm + 1e-7), 1)
    return w * cut.unsqueeze(-1)


def _all(a: Stack | Tensor, size: int) -> Tensor:
    return a.v if isinstance(a, Stack) else a.expand(size, *a.shape)


register(
    {
        aten.embedding.default: _embedding,
        aten.embedding_dense_backward.default: _embedding_dense_backward,
        aten.embedding_renorm.default: _renorm,
    }
)


# --- bags: indices (L,), divided into bags by their offsets (N,) ----------------------------------

SUM, MEAN, MAX = range(3)


def _bags(func):
    def rule(
        size,
        weight,
        indices,
        offsets,
        scale=False,
        mode=SUM,
        sparse=False,
        own=None,
        include_last=False,
        padding=-1,
    ):
        i, begin = _all(indices, size), _all(offsets, size)
        if include_last and not _ends_with(begin, i.shape[1]):
            given = (weight, indices, offsets, scale, mode, sparse, own, include_last, padding)
            return _one_by_one(func, size, given)
        begin = begin[:, :-1] if include_last else begin
        kind = torch.promote_types(i.dtype, begin.dtype)
        shift = 0
        if isinstance(weight, Stack):
            shift = weight.v.shape[1]
            i, weight, padding = _joined_tables(weight.v, i, padding)
        begin = _starts(begin, i.shape[1], isinstance(offsets, Stack))
        own = None if own is None else _all(own, size).flatten()
        out, bag, count, best = func(
            weight, i.flatten(), begin, scale, mode, False, own, False, padding
        )
        best = best.view(size, -1, *best.shape[1:])
        best = moved(best, -shift) if shift and mode == MAX else best
        # The bag of each index, counted within its example. The operator may omit it.
        bag = bag.view(size, -1)
        bag = moved(bag, -(begin.numel() // size)) if bag.numel() else bag
        out = out.unflatten(0, (size, -1))
        return out, bag.to(kind), count.view(size, -1).to(kind), best.to(kind)

    return by_front(rule)


def _starts(begin: Tensor, length: int, differ: bool) -> Tensor:
    """Return the offsets (B * N,) of the bags of all examples, and check them.

    A bag that began outside of its example's indices would take those of another example. The
    kernel checks the first offset of the first example alone.
    """
    if differ and begin.shape[1]:
        aten._assert_async.msg(
            (begin[:, 0] == 0).all(), "embedding_bag: offsets[0] has to be 0 in each example"
        )
    return in_tables(Stack(begin), len(begin), length, length + 1).flatten()


def _ends_with(begin: Tensor, length: int) -> bool:
    """True if the last offset of each example, with ``include_last``, is the number of indices."""
    try:
        aten._assert_async.msg((begin[:, -1] == length).all(), "embedding_bag: what follows a bag")
    except RuntimeError:
        return False
    return True


def _one_by_one(func, size, given):
    """Run one example after another, as kernels differ about indices after the last bag."""
    outs = [func(*(a.v[n] if isinstance(a, Stack) else a for a in given)) for n in range(size)]
    return tuple(map(torch.stack, zip(*outs, strict=True)))


def _joined_tables(tables: Tensor, indices: Tensor, padding: int) -> tuple[Tensor, Tensor, int]:
    """Return (indices, table, padding) for one table of all rows, with a padding row at its end."""
    size, rows, width = tables.shape
    found = in_tables(Stack(indices), size, rows)
    tables = tables.flatten(0, 1)
    if padding < 0:
        return found, tables, -1
    tables = torch.cat([tables, tables.new_zeros(1, width)])
    return torch.where(indices == padding, size * rows, found), tables, size * rows


def _bag_of(indices: Tensor, offsets: Tensor, bags: int) -> Tensor:
    """Return the bag of each index (B, L): the last bag that begins at or before the index."""
    offsets = offsets[:, :bags]  # there may be one more, the end of the last bag
    places = torch.arange(indices.shape[1], device=indices.device, dtype=offsets.dtype)
    places = places.expand(indices.shape).contiguous()
    return torch.searchsorted(offsets.contiguous(), places, right=True) - 1


def _picked(rows: Tensor, at: Tensor) -> Tensor:
    """Gather rows: (B, N, D), (B, L) -> (B, L, D)."""
    return rows.gather(1, at.unsqueeze(-1).expand(*at.shape, rows.shape[-1]))


def rows_of_bags(
    g: Tensor,
    i: Tensor,
    offsets: Tensor,
    count: Tensor,
    best: Tensor,
    mode: int,
    own: Tensor | None,
    padding: int,
) -> tuple[Tensor, Tensor]:
    """Return (indices, gradients) of the table's rows: (B, L) and (B, L, D).

    In the mode ``MAX`` both are (B, N, D).
    """
    if mode == MAX:
        some = (count > 0).unsqueeze(-1)
        return torch.where(some, best, 0), torch.where(some, g, 0)
    bag = _bag_of(i, offsets, g.shape[1])
    g = _picked(g, bag)
    g = g / count.gather(1, bag).unsqueeze(-1) if mode == MEAN else g
    g = g if own is None else g * own.unsqueeze(-1)
    return i, torch.where((i == padding).unsqueeze(-1), 0, g) if padding >= 0 else g


@by_front
def _bags_backward(
    size, g, indices, offsets, _bag, count, best, rows, scale, mode, sparse, own, padding=-1
):
    given = (_all(a, size) for a in (g, indices, offsets, count, best))
    own = None if own is None else _all(own, size)
    at, g = rows_of_bags(*given, mode, own, padding)
    if mode == MAX:
        return g.new_zeros(size, rows, g.shape[-1]).scatter_add(1, at, g)
    out = aten.embedding_dense_backward.default(g, moved(at, rows), size * rows, -1, scale)
    out = out.view(size, rows, -1)
    return out.to_sparse(2) if sparse else out


@by_front
def _own_backward(size, g, weight, indices, offsets, _bag, mode, padding=-1):
    g, i = _all(g, size), _all(indices, size)
    found = (
        _picked(g, _bag_of(i, _all(offsets, size), g.shape[1])) * _picked(_all(weight, size), i)
    ).sum(-1)
    return torch.where(i == padding, 0, found) if padding >= 0 else found


register(
    {
        aten._embedding_bag.default: _bags(aten._embedding_bag.default),
        aten._embedding_bag_forward_only.default: _bags(aten._embedding_bag_forward_only.default),
        aten._embedding_bag_backward.default: _bags_backward,
        aten._embedding_bag_per_sample_weights_backward.default: _own_backward,
    }
)
