"""Rules of embedding and embedding_bag: the examples' tables are concatenated to one table.

The kernels check an index against all rows of that table. An index that is out of range for its
example's own table may be a row of another example's table, so it is checked here.
"""

from __future__ import annotations

import torch

from forall._compat.assertions import require
from forall._vmap.batched_indices import flatten_examples, make_example_index
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    make_stack_handler,
    unsqueeze_shared,
)

aten = torch.ops.aten
Tensor = torch.Tensor


def offset_indices(
    indices: MappedStack | Tensor, size: int, each: int, rows: int | None = None
) -> Tensor:
    """Return indices (B, *I) into the B concatenated tables, which begin every ``each`` rows.

    An index outside of the ``rows`` of its example's table is an error. `gather`, which looks up
    the example of each index, raises it.
    """
    v = unsqueeze_shared(indices).long()
    v = v.expand(size, *v.shape[1:])
    examples = make_example_index(size, v.device, 1).expand(size, each if rows is None else rows)
    whose = examples.gather(1, flatten_examples(v)).view(v.shape)
    return torch.add(v, whose, alpha=each)


def add_example_offset(numbers: Tensor, each: int) -> Tensor:
    """Add ``each`` times the example's number to each example's numbers (B, *I)."""
    examples = make_example_index(len(numbers), numbers.device, numbers.dim() - 1)
    return torch.add(numbers, examples.to(numbers.dtype), alpha=each)


@make_stack_handler
def _embedding(size, weight, indices, *_):
    if not isinstance(weight, MappedStack):
        return aten.embedding.default(weight, indices.v)
    rows = weight.v.shape[1]
    return aten.embedding.default(weight.v.flatten(0, 1), offset_indices(indices, size, rows))


@make_stack_handler
def _embedding_dense_backward(size, g, indices, rows, padding, scale):
    i = _offset_valid_indices(indices, size, rows)
    g = expand_stack(g, size)
    out = aten.embedding_dense_backward.default(g, i, size * rows, -1, scale)
    out = out.view(size, rows, out.shape[-1])
    if padding >= 0:  # each table has a padding row; the operator knows one in all
        out.select(1, padding).zero_()
    return out


def _offset_valid_indices(indices: MappedStack | Tensor, size: int, rows: int) -> Tensor:
    """Return indices into the concatenated tables, with -1 for those out of range.

    The backward kernel ignores -1.
    """
    try:
        return offset_indices(indices, size, rows)
    except (IndexError, RuntimeError):
        v = expand_stack(indices, size).long()
        return torch.where((v >= 0) & (v < rows), add_example_offset(v, rows), -1)


@make_stack_handler
def _renorm(size, weight, indices, max_norm, norm_type):
    """Scale the rows that are indexed down to the norm ``max_norm``."""
    w, i = expand_stack(weight, size), expand_stack(indices, size).reshape(size, -1).long()
    i = torch.where(i < 0, i + w.shape[1], i)  # the operator counts from the end too
    used = torch.zeros(w.shape[:2], dtype=torch.bool, device=w.device).scatter(1, i, True)
    norm = torch.linalg.vector_norm(w, norm_type, -1)
    cut = torch.where(used & (norm > max_norm), max_norm / (norm + 1e-7), 1)
    return w * cut.unsqueeze(-1)


register_rows(
    {
        aten.embedding.default: _embedding,
        aten.embedding_dense_backward.default: _embedding_dense_backward,
        aten.embedding_renorm.default: _renorm,
    }
)


# --- bags: indices (L,), divided into bags by their offsets (N,) ----------------------------------

SUM, MEAN, MAX = range(3)


def _make_bag_handler(func):
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
        i, begin = expand_stack(indices, size), expand_stack(offsets, size)
        if include_last and not _is_last_bag_full(begin, i.shape[1]):
            given = (weight, indices, offsets, scale, mode, sparse, own, include_last, padding)
            return _loop_over_bags(func, size, given)
        begin = begin[:, :-1] if include_last else begin
        kind = torch.promote_types(i.dtype, begin.dtype)
        shift = 0
        if isinstance(weight, MappedStack):
            shift = weight.v.shape[1]
            i, weight, padding = _join_tables(weight.v, i, padding)
        begin = _offset_bag_starts(begin, i.shape[1], isinstance(offsets, MappedStack))
        own = None if own is None else expand_stack(own, size).flatten()
        out, bag, count, best = func(
            weight, i.flatten(), begin, scale, mode, False, own, False, padding
        )
        best = best.view(size, -1, *best.shape[1:])
        best = add_example_offset(best, -shift) if shift and mode == MAX else best
        # The bag of each index, counted within its example. The operator may omit it.
        bag = bag.view(size, -1)
        bag = add_example_offset(bag, -(begin.numel() // size)) if bag.numel() else bag
        out = out.unflatten(0, (size, -1))
        return out, bag.to(kind), count.view(size, -1).to(kind), best.to(kind)

    return make_stack_handler(rule)


def _offset_bag_starts(begin: Tensor, length: int, differ: bool) -> Tensor:
    """Return the offsets (B * N,) of the bags of all examples, and check them.

    A bag that began outside of its example's indices would take those of another example. The
    kernel checks the first offset of the first example alone.
    """
    if differ and begin.shape[1]:
        require((begin[:, 0] == 0).all(), "embedding_bag: offsets[0] has to be 0 in each example")
    return offset_indices(MappedStack(begin), len(begin), length, length + 1).flatten()


def _is_last_bag_full(begin: Tensor, length: int) -> bool:
    """True if the last offset of each example, with ``include_last``, is the number of indices."""
    try:
        require((begin[:, -1] == length).all(), "embedding_bag: what follows a bag")
    except RuntimeError:
        return False
    return True


def _loop_over_bags(func, size, given):
    """Run one example after another, as kernels differ about indices after the last bag."""
    outs = [
        func(*(a.v[n] if isinstance(a, MappedStack) else a for a in given)) for n in range(size)
    ]
    return tuple(map(torch.stack, zip(*outs, strict=True)))


def _join_tables(tables: Tensor, indices: Tensor, padding: int) -> tuple[Tensor, Tensor, int]:
    """Return (indices, table, padding) for one table of all rows, with a padding row at its end."""
    size, rows, width = tables.shape
    found = offset_indices(MappedStack(indices), size, rows)
    tables = tables.flatten(0, 1)
    if padding < 0:
        return found, tables, -1
    tables = torch.cat([tables, tables.new_zeros(1, width)])
    return torch.where(indices == padding, size * rows, found), tables, size * rows


def _find_bags(indices: Tensor, offsets: Tensor, bags: int) -> Tensor:
    """Return the bag of each index (B, L): the last bag that begins at or before the index."""
    offsets = offsets[:, :bags]  # there may be one more, the end of the last bag
    places = torch.arange(indices.shape[1], device=indices.device, dtype=offsets.dtype)
    places = places.expand(indices.shape).contiguous()
    return torch.searchsorted(offsets.contiguous(), places, right=True) - 1


def _gather_rows(rows: Tensor, at: Tensor) -> Tensor:
    """Gather rows: (B, N, D), (B, L) -> (B, L, D)."""
    return rows.gather(1, at.unsqueeze(-1).expand(*at.shape, rows.shape[-1]))


def compute_row_grads(
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
    bag = _find_bags(i, offsets, g.shape[1])
    g = _gather_rows(g, bag)
    g = g / count.gather(1, bag).unsqueeze(-1) if mode == MEAN else g
    g = g if own is None else g * own.unsqueeze(-1)
    return i, torch.where((i == padding).unsqueeze(-1), 0, g) if padding >= 0 else g


@make_stack_handler
def _bags_backward(
    size, g, indices, offsets, _bag, count, best, rows, scale, mode, sparse, own, padding=-1
):
    given = (expand_stack(a, size) for a in (g, indices, offsets, count, best))
    own = None if own is None else expand_stack(own, size)
    at, g = compute_row_grads(*given, mode, own, padding)
    if mode == MAX:
        return g.new_zeros(size, rows, g.shape[-1]).scatter_add(1, at, g)
    out = aten.embedding_dense_backward.default(
        g, add_example_offset(at, rows), size * rows, -1, scale
    )
    out = out.view(size, rows, -1)
    return out.to_sparse(2) if sparse else out


@make_stack_handler
def _sample_weights_backward(size, g, weight, indices, offsets, _bag, mode, padding=-1):
    g, i = expand_stack(g, size), expand_stack(indices, size)
    found = (
        _gather_rows(g, _find_bags(i, expand_stack(offsets, size), g.shape[1]))
        * _gather_rows(expand_stack(weight, size), i)
    ).sum(-1)
    return torch.where(i == padding, 0, found) if padding >= 0 else found


register_rows(
    {
        aten._embedding_bag.default: _make_bag_handler(aten._embedding_bag.default),
        aten._embedding_bag_forward_only.default: _make_bag_handler(
            aten._embedding_bag_forward_only.default
        ),
        aten._embedding_bag_backward.default: _bags_backward,
        aten._embedding_bag_per_sample_weights_backward.default: _sample_weights_backward,
    }
)
