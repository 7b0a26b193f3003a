"""Rules of sparse COO tensors, and of the indices that make them: the batch axis is in front.

The examples may have different numbers of entries. Other sparse layouts are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.assertions import require
from forall._compat.dispatch_state import no_dispatch
from forall._compat.documented_error import documented_error
from forall._compat.private_api import SPARSE_SUM
from forall._core.errors import make_data_dependent_error
from forall._core.sparse_operands import COMPRESSING
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.concretize import concretize_for_user
from forall._vmap.registry import CALLS, register_rows
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    loop_and_stack,
    lower_shared,
    move_to_front,
    reenter_level,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def _make_coo(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Build (B, *sizes) from indices (B, D, N) and values (B, N, *S)."""
    sparse, dense, sizes, indices, values = args
    i, v = (expand_to_stack(a, level) for a in (indices, values))
    which = torch.arange(len(i), device=i.device).view(-1, 1, 1).expand(-1, 1, i.shape[2])
    i = torch.cat([which, i], 1).movedim(0, 1).flatten(1)  # (1 + D, B * N)
    out = func(sparse + 1, dense, [len(v), *sizes], i, v.flatten(0, 1), **kwargs)
    return wrap_stack(out, 0, level)


def _to_sparse(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert to sparse COO, with the batch axis as the first sparse dim."""
    x, how = args[0], {**kwargs}
    dims = args[1] if len(args) > 1 else x.dim() - (how.pop("dense_dim", None) or 0)
    if how.get("layout") not in {None, torch.sparse_coo}:
        raise _make_layout_error(how["layout"])
    return wrap_stack(move_to_front(x).to_sparse(dims + 1), 0, level)


def _spdiags(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Put rows on diagonals, or let the operator itself refuse what it does not take."""
    diagonals, offsets, shape, *rest = args
    layout = rest[0] if rest else kwargs.get("layout")
    if layout in {torch.sparse_csr, torch.sparse_csc}:
        raise _make_layout_error(layout)
    if (
        diagonals.dim() not in {1, 2}
        or offsets.dim() > 1
        or offsets.dtype is not torch.int64
        or diagonals.shape[:-1].numel() != offsets.numel()
        or len(shape) != 2
        or layout not in {None, torch.sparse_coo}
        or not (diagonals.is_cpu and offsets.is_cpu)  # torch has a kernel for these alone
    ):
        return loop_and_stack(level, func, args, kwargs)
    with reenter_level(level):
        return _put_on_diagonals(diagonals, offsets.reshape(-1), *shape)


def _put_on_diagonals(diagonals: Tensor, offsets: Tensor, height: int, width: int) -> Tensor:
    """(K, M), (K,) -> (height, width): entry j of the row with offset o is put at (j - o, j).

    How many entries fit depends on the offsets, of which each example may have its own. So all of
    them go into (height, width, 2): those that fit, in torch's order, at (.., 0), which is kept.

    Where a row lies outside, torch's kernel counts less than no entries for it: it raises an error
    if these are less than none in all, or writes over others. It also keeps entries at places that
    are not there. Only the error is repeated here.
    """
    length = diagonals.shape[-1]
    fits_below, fits_above = (offsets + height).clamp(max=length), min(width, length) - offsets
    require(torch.where(offsets > 0, fits_above, fits_below).sum() >= 0, "negative dimension")
    require((offsets.sort()[0].diff() != 0).all(), "Offset tensor contains duplicate values")
    columns = torch.arange(length, device=offsets.device).expand(len(offsets), length)
    rows = columns - offsets.unsqueeze(1)
    fits = (rows >= 0) & (rows < height) & (columns < width)
    places = torch.stack([rows * fits, columns * fits, (~fits).long()]).flatten(1)
    values = diagonals.resolve_conj().resolve_neg().reshape(-1)
    place = aten._sparse_coo_tensor_with_dims_and_tensors.default
    how = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    return place(3, 0, [height, width, 2], places, values, **how).select(2, 0)


def _run_on_stack(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    return wrap_stack(func(args[0].value, *args[1:], **kwargs), args[0].axis, level)


def _is_coalesced(level: Any, func: Any, args: tuple, kwargs: dict) -> bool:
    return func(lower_shared(args[0], level))


def _sparse_mask(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the entries of dense examples at the indices of sparse ones."""
    x, mask = args
    if not is_mapped(mask, level) or mask.axis:
        raise _make_layout_error("sparse, where the mask is the same for all")
    return wrap_stack(func(expand_to_stack(x, level), mask.value, **kwargs), 0, level)


def _values(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the values (B, N, *S), or raise if the examples have different numbers of them."""
    x = args[0].value
    which = x._indices()[0]
    counts = which.bincount(minlength=level.size)
    if args[0].axis or bool((which.diff() < 0).any() | (counts != counts[:1]).any()):
        raise _make_layout_error("sparse, whose values do not come in equal numbers,")
    return wrap_stack(func(x).unflatten(0, (level.size, -1)), 0, level)


def _addmm(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return beta * x + alpha * (a @ b), without reading x if beta is 0."""
    x, a, b = args
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    with reenter_level(level):
        out = aten.mm.default(a, b)
        out = out if alpha == 1 else aten.mul.Tensor(out, alpha)
        return aten.add.Tensor(out, x, alpha=beta) if beta else out


def _sum(x: Any, dim: Any = None, dtype: Any = None) -> Any:
    """Sum all entries of each example, through a dense tensor."""
    if type(x) is not BatchedTensor or dim is not None or x.layout is not torch.sparse_coo:
        return NotImplemented
    return x.to_dense().sum(dtype=dtype)


def _sparse_coo_tensor(
    indices: Any, values: Any = None, *size: Any, check_invariants: Any = None, **how: Any
) -> Any:
    """Override ``torch.sparse_coo_tensor``, which infers the size from the indices in C++."""
    size = (how.pop("size"),) if "size" in how else size
    checks = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    checks = checks if check_invariants is None else check_invariants
    if values is None or (size and not checks):
        return NotImplemented
    indices, values = (a if isinstance(a, Tensor) else torch.tensor(a) for a in (indices, values))
    if indices.dim() != 2 or not indices.numel():
        return NotImplemented
    size = _infer_size(indices, values.shape[1:], size, checks)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, **how)


def _infer_size(indices: Tensor, dense: Any, size: tuple, checks: bool) -> torch.Size:
    """Return the size that torch infers, or raise torch's error.

    Torch gets entries at the corners of the bounding box of all indices.
    """
    low, high = indices.amin(1).clamp_max(0), indices.amax(1)  # low is checked not to be negative
    box = concretize_for_user(torch.stack([low, high], 1), _make_size_error)
    with no_dispatch():
        zeros = torch.zeros(2, *dense, device=box.device)
        return torch.sparse_coo_tensor(box, zeros, *size, check_invariants=checks).shape


def _make_size_error() -> Exception:
    return make_data_dependent_error("torch.sparse_coo_tensor without a size", "Give it the size.")


def _make_layout_error(layout: Any) -> NotImplementedError:
    return documented_error(NotImplementedError, "sparse-layout")(
        f"vmap: the examples of a tensor of layout {layout} have no stack.\n"
        "Use torch.sparse_coo_tensor or x.to_sparse(), in coordinates, or convert outside vmap."
    )


def _make_refusing_handler(layout: Any = None) -> Callable:
    """Return a handler that refuses a layout, by default that of the call's argument."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        raise _make_layout_error(layout or kwargs["layout"])

    return handler


register_rows(
    {
        **dict.fromkeys(COMPRESSING, _make_refusing_handler()),
        aten.to_mkldnn.default: _make_refusing_handler("torch._mkldnn"),
        aten._to_sparse_csr.default: _make_refusing_handler("torch.sparse_csr"),
        aten._to_sparse_csc.default: _make_refusing_handler("torch.sparse_csc"),
        aten._to_sparse_bsr.default: _make_refusing_handler("torch.sparse_bsr"),
        aten._to_sparse_bsc.default: _make_refusing_handler("torch.sparse_bsc"),
        aten._sparse_coo_tensor_with_dims_and_tensors.default: _make_coo,
        aten._to_sparse.default: _to_sparse,
        aten._to_sparse.sparse_dim: _to_sparse,
        aten._to_dense.default: _run_on_stack,
        aten._coalesce.default: _run_on_stack,
        aten._values.default: _values,
        aten.is_coalesced.default: _is_coalesced,
        aten.sparse_mask.default: _sparse_mask,
        aten._sparse_addmm.default: _addmm,
        aten._spdiags.default: _spdiags,
    }
)
CALLS.update({SPARSE_SUM: _sum, torch.sparse_coo_tensor: _sparse_coo_tensor})
