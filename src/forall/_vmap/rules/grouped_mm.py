"""Rule of grouped_mm, the matrix product of mixtures of experts: one call for all examples.

Rows (R, K) are divided into G groups. Each group is multiplied with its own matrix of (G, K, N),
and ``offs`` (G,) holds the end of each group. Rows after the last end are in no group: the kernel
leaves the result uninitialised there, the rule writes zeros.

If all examples share the matrices, the rows of all examples are sorted by group, and there are G
groups. Batched matrices make B * G groups. Offsets are never read on the host: all sizes depend on
shapes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from forall._core.axes import unfold_axis
from forall._vmap.registry import HANDLERS, answer_directly, register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    get_example_rank,
    get_value,
    loop_and_stack,
    make_stack_handler,
    unsqueeze_shared,
)

aten = torch.ops.aten
Tensor = torch.Tensor
_BMM = aten.bmm.default

_GROUPS = 1023  # at most in one call: the CUDA kernel has a thread for each group
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _grouped_mm(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    if _is_refused(*args, **kwargs):
        return loop_and_stack(level, func, args, kwargs)  # the kernel raises the error
    if args[0].dim() == args[1].dim() == 3:
        return HANDLERS[_BMM](level, _BMM, args[:2], {})
    return _MAPPED(level, func, args, kwargs)


def _is_refused(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> bool:
    """True if the kernel refuses such an example, or has no group to multiply."""
    ranks = (x.dim(), w.dim())
    if not {*ranks} <= {2, 3} or (offs is None) != (ranks == (3, 3)) or bias is not None:
        return True
    if offs is not None and (offs.dim() != 1 or offs.dtype is not torch.int32):
        return True
    groups = {a.shape[0] for a in (x, w) if a.dim() == 3}
    groups |= set() if offs is None else {offs.shape[0]}
    return (
        len(groups) > 1
        or 0 in groups
        or x.shape[-1] != w.shape[-2]
        or x.dtype not in _DTYPES
        or x.dtype != w.dtype
        or out_dtype not in (None, x.dtype)
        or _is_misaligned(x)
        or _is_misaligned(w)
    )


def _is_misaligned(x: Tensor) -> bool:
    """True if rows or columns begin at an address that the kernel cannot read.

    The kernel refuses any other layout as well, but the rule copies it. An example may have such a
    layout because of the batch axis, and would be dense in a loop over examples.
    """
    step = _find_stride(x)
    return step is not None and not _is_aligned(x, step)


def _is_aligned(x: Tensor, step: int) -> bool:
    return step * x.element_size() % 16 == 0


def _find_stride(x: Tensor) -> int | None:
    """The stride of rows or columns as the kernel sees it, None for another layout."""
    rows, columns = x.shape[-2:]
    down, right = x.stride()[-2:]
    if down == 1 and right >= max(1, rows):
        return right
    return down if right == 1 and down >= max(1, columns) else None


def _multiply_groups(
    size: int, x: MappedStack | Tensor, w: MappedStack | Tensor, offs: Any, *_, **__
) -> Tensor:
    """Multiply all examples in one call, or in several if there are too many groups for one."""
    ranks = (get_example_rank(x), get_example_rank(w))
    most = max(1, _GROUPS // (get_value(offs).shape[-1] + 1))
    if size > most and (ranks == (2, 2) or isinstance(w if ranks == (2, 3) else x, MappedStack)):
        outs = []
        for n in range(0, size, most):
            some = (
                MappedStack(a.v[n : n + most]) if isinstance(a, MappedStack) else a
                for a in (x, w, offs)
            )
            outs.append(_multiply_groups(min(most, size - n), *some))
        return torch.cat(outs)
    if ranks == (2, 2):
        return _multiply_inner(size, x, w, offs)
    if ranks == (2, 3):
        return _multiply_rows(size, x, w, offs)
    return _align_rows(_multiply_rows(size, _transpose(w), _transpose(x), offs).mT)


_MAPPED = make_stack_handler(_multiply_groups)


def _transpose(x: MappedStack | Tensor) -> MappedStack | Tensor:
    return MappedStack(x.v.mT) if isinstance(x, MappedStack) else x.mT


def _multiply_rows(
    size: int, x: MappedStack | Tensor, w: MappedStack | Tensor, offs: MappedStack | Tensor
) -> Tensor:
    """Multiply rows by their group's matrix: (B, R, K), (B, G, K, N), (B, G) -> (B, R, N)."""
    n = get_value(x).shape[-2]
    ends = _find_ends(offs, n)
    if isinstance(w, MappedStack):  # rows after an example's last end are put into its last group
        rows = _align_rows(expand_stack(x, size).flatten(0, 1))
        ends_of_all = torch.cat([ends[:, :-1].expand(size, -1), ends.new_full((size, 1), n)], 1)
        out = _run_kernel(rows, _flatten_matrices(w.v), _concat_ends(ends_of_all, n))
        out = out.unflatten(0, (size, n))
    elif isinstance(offs, MappedStack):
        order, ends = _sort_rows(ends, n)
        rows = x.v.flatten(0, 1) if isinstance(x, MappedStack) else x
        rows = rows.index_select(0, order if isinstance(x, MappedStack) else order % max(1, n))
        out = _run_kernel(_align_rows(rows), _align_matrix(w), ends.sum(0))
        back = torch.zeros_like(order).scatter(0, order, torch.arange(size * n, device=out.device))
        out = _align_rows(out.index_select(0, back)).unflatten(0, (size, n))
    else:  # a row of each example, then the next
        rows = _align_rows(x.v.movedim(0, 1).flatten(0, 1))
        out = _run_kernel(rows, _align_matrix(w), ends[0] * size)
        out = out.unflatten(0, (n, size)).movedim(1, 0)
    behind = torch.arange(n, device=out.device) >= ends.amax(1, keepdim=True)
    return out.masked_fill_(behind.unsqueeze(-1), 0)


def _multiply_inner(
    size: int, x: MappedStack | Tensor, w: MappedStack | Tensor, offs: MappedStack | Tensor
) -> Tensor:
    """Multiply with the summed dim K in groups: (B, M, K), (B, K, N), (B, G) -> (B, G, M, N)."""
    n = get_value(w).shape[-2]
    ends = _find_ends(offs, n)
    if not isinstance(offs, MappedStack) and not isinstance(w, MappedStack):
        columns = _align_rows(x.v.mT.movedim(0, 1).flatten(1))
        out = _run_kernel(columns.mT, _align_rows(w), ends[0])
        return unfold_axis(out, 1, size)
    if not isinstance(offs, MappedStack) and not isinstance(x, MappedStack):
        columns = _align_rows(w.v.movedim(0, 1).flatten(1))
        out = _run_kernel(_align_rows(x.mT).mT, columns, ends[0])
        return unfold_axis(out, 2, size)
    x, w = (_align_rows(expand_stack(a, size).flatten(0, 1)) for a in (_transpose(x), w))
    groups = ends.shape[1]  # of an example; one more for the rows after the last end
    ends = torch.cat([ends.expand(size, -1), ends.new_full((size, 1), n)], 1)
    out = _run_kernel(x.mT, w, _concat_ends(ends, n))
    return out.unflatten(0, (size, groups + 1)).narrow(1, 0, groups)


def sum_grouped_products(x: Tensor, w: Tensor, offs: MappedStack | Tensor) -> Tensor:
    """Return the sum over the examples: (B, M, K), (B, K, N), (B, G) -> (G, M, N)."""
    size, n = w.shape[:2]
    ends = _find_ends(offs, n)
    if isinstance(offs, MappedStack):
        order, ends = _sort_rows(ends, n)
        x, w = (a.flatten(0, 1).index_select(0, order) for a in (x.mT, w))
        return _run_kernel(_align_rows(x).mT, _align_rows(w), ends.sum(0))
    x, w = (_align_rows(a.movedim(0, 1).flatten(0, 1)) for a in (x.mT, w))
    return _run_kernel(x.mT, w, ends[0] * size)


# --- the ends of groups --------------------------------------------------------------------------


def _find_ends(offs: MappedStack | Tensor, n: int) -> Tensor:
    """Return the ends of the groups of n rows: (B, G), or (1, G) if all examples share them."""
    return unsqueeze_shared(offs).long().clamp(0, n)


def _concat_ends(ends: Tensor, n: int) -> Tensor:
    """Return the ends (B * G,) of the same groups, for the concatenated rows, n of each example."""
    return (ends + torch.arange(len(ends), device=ends.device).unsqueeze(1) * n).flatten()


def _sort_rows(ends: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the order of all examples' rows by group, those of none last, and ascending ends."""
    ends = ends.cummax(1).values
    rows = torch.arange(n, device=ends.device).expand(len(ends), n)
    group = torch.searchsorted(ends.contiguous(), rows.contiguous(), right=True)
    return group.flatten().argsort(stable=True), ends


# --- layouts that the kernel takes ---------------------------------------------------------------


def _run_kernel(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return aten._grouped_mm.default(x, w, ends.to(torch.int32))


def _flatten_matrices(w: Tensor) -> Tensor:
    """Flatten matrices (B, G, K, N) to (B * G, K, N), keeping a column-major layout."""
    if w.stride(-2) == 1 != w.stride(-1):
        return _align_rows(w.mT.flatten(0, 1)).mT
    return _align_matrix(w.flatten(0, 1))


def _align_matrix(w: Tensor) -> Tensor:
    """Return w in a layout that the kernel takes: as it is, or else row-major."""
    step = _find_stride(w)
    return w if step is not None and _is_aligned(w, step) else _align_rows(w)


def _align_rows(x: Tensor) -> Tensor:
    """Return x in row-major layout, with each row at an address that the kernel can read.

    The strides of leading dims may be anything.
    """
    down, right = x.stride()[-2:]
    columns = x.shape[-1]
    if right == 1 and down >= max(1, columns) and _is_aligned(x, down):
        return x
    missing = -columns % (16 // x.element_size())
    if missing:
        return F.pad(x, (0, missing)).narrow(-1, 0, columns)
    return x.clone(memory_format=torch.contiguous_format)


register_rows({aten._grouped_mm.default: _grouped_mm})
answer_directly(aten._grouped_mm.default, F.grouped_mm)
