"""Rules of matrix products: an unbatched operand stays unbatched, and its product is one matmul.

All rules rest on one product: if one side is unbatched, the batch axis of the other is folded into
its rows or columns. Every other operator reshapes its operands around that product.
"""

from __future__ import annotations

import torch

from forall._compat.symbolic_diagonal import Diagonal, find_diagonal
from forall._core.axes import unfold_axis
from forall._vmap.registry import (
    DIRECT,
    HANDLERS,
    answer_directly,
    register_rows,
)
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    get_example_rank,
    get_example_shape,
    make_stack_handler,
    pad_example_rank,
    unsqueeze_shared,
)

aten = torch.ops.aten
Tensor = torch.Tensor


# From _ROWS rows on, one product is faster than one for each example, unless an example has _OWN
# rows and columns itself. Later operators are also faster on results that are contiguous by example
# (measured on CPU).
_ROWS, _OWN = 16, 64


def multiply_stacks(
    x: MappedStack | Tensor, w: MappedStack | Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply (B, *b, N, K) @ (B, *b, K, M) -> (B, *b, N, M). One side may be unbatched."""
    if isinstance(x, MappedStack):
        if isinstance(w, MappedStack):
            return _multiply_both(x.v, w.v, dtype)
        v = x.v
        if v.dim() == 3:
            b, n, _ = v.shape
            if n > 1 and w.shape[1] > 1 and v.stride(0) != n * v.stride(1):
                return _multiply(v, w.expand(b, *w.shape), dtype)  # to fold it would be a copy
            return _multiply(v.flatten(0, 1), w, dtype).view(b, n, w.shape[1])
        rows = v.movedim(0, -3)
        out = _multiply(rows.flatten(-3, -2), w, dtype)
        return out.unflatten(-2, rows.shape[-3:-1]).movedim(-3, 0)
    if w.v.dim() == 3 and not _is_foldable(x, w.v):
        return _multiply(x.expand(w.v.shape[0], *x.shape), w.v, dtype)
    columns = w.v.movedim(0, -2)
    out = _multiply(x, columns.flatten(-2), dtype)
    return out.unflatten(-1, columns.shape[-2:]).movedim(-2, 0)


def _is_foldable(x: Tensor, w: Tensor) -> bool:
    """True if it is fastest to multiply x (N, K) once with all columns of w (B, K, M)."""
    if x.layout is not torch.strided:
        return True  # it has no expanded form
    if w.shape[2] == 1 and find_diagonal(w) is not None:
        return True
    if w.is_cpu and min(x.shape[0], w.shape[2]) >= _OWN:
        return False
    return x.shape[0] >= _ROWS and w.stride(0) == w.shape[2] * w.stride(2)  # else folding copies


def _multiply_both(x: Tensor, w: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None and x.shape[-1] == w.shape[-2] == 1 and _is_mul_faster(x, w):
        return x * w
    if x.dim() == 3:
        return _multiply(x, w, dtype)
    return _multiply(x.flatten(0, 1), w.flatten(0, 1), dtype).unflatten(0, x.shape[:2])


def _is_mul_faster(x: Tensor, w: Tensor) -> bool:
    """True if outer products are faster as one broadcast multiplication (measured on CPU).

    A multiplication is limited by memory, with a cost per row. bmm has no cost per row, but goes
    through small matrices entry by entry.
    """
    columns = w.shape[-1]
    return x.dtype == w.dtype != torch.bool and (columns >= 32 or x.shape[-2] * columns < 400)


def _multiply(x: Tensor, w: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None:
        return (aten.mm if x.dim() == 2 else aten.bmm).dtype(x, w, dtype)
    if x.dim() != 2:  # torch.bmm takes half the time of its operator
        return torch.bmm(x, w)
    if x.dtype == w.dtype and x.shape[1] == w.shape[0]:
        known = find_diagonal(x) if _is_copy_exact(w) else None
        if known is not None and x.shape == known.shape:
            return _scale_along(known, w, 0)
        known = find_diagonal(w) if _is_copy_exact(x) else None
        if known is not None and w.shape == known.shape[::-1]:
            return _scale_along(known, x, 1)
    return torch.mm(x, w)


def _is_copy_exact(x: Tensor) -> bool:
    """True if the product of x with an identity matrix is a plain copy of x."""
    return x.layout is torch.strided and not x.is_neg()


def _scale_along(known: Diagonal, x: Tensor, dim: int) -> Tensor:
    """Return the product of a diagonal matrix and x: by x's rows for dim 0, else by its columns.

    It is in new memory, row-major as a product is.
    """
    part = known.select(x, dim)
    if known.entries is not None:
        entries = known.select(known.entries, 0)
        part = part * (entries.unsqueeze(1) if dim == 0 else entries)
        if part.is_contiguous():
            return part
    return _copy_by_row(part)


def _copy_by_row(x: Tensor) -> Tensor:
    """Copy a matrix into new memory, row-major as a product is."""
    if x.stride(0) == 1 != x.stride(1):
        return torch.t_copy(x.t())  # takes two thirds of the time of a clone
    return x.clone(memory_format=torch.contiguous_format)  # `jit` removes this copy


def apply_to_value(x: MappedStack | Tensor, f) -> MappedStack | Tensor:
    """Apply ``f``, which counts dims from the end, to a batched or an unbatched value."""
    return MappedStack(f(x.v)) if isinstance(x, MappedStack) else f(x)


def unsqueeze_row(x: MappedStack | Tensor) -> MappedStack | Tensor:
    return apply_to_value(x, lambda v: v.unsqueeze(-2))


def unsqueeze_column(x: MappedStack | Tensor) -> MappedStack | Tensor:
    return apply_to_value(x, lambda v: v.unsqueeze(-1))


@make_stack_handler
def _mm(size, x, w, out_dtype=None):
    return multiply_stacks(x, w, out_dtype)


@make_stack_handler
def _mv(size, w, x):
    if isinstance(w, MappedStack):
        return multiply_stacks(w, unsqueeze_column(x)).squeeze(-1)
    return _multiply(x.v, w.t(), None)


def _inner_product(x: MappedStack | Tensor, y: MappedStack | Tensor) -> Tensor:
    if not isinstance(x, MappedStack):
        x, y = y, x
    return (
        multiply_stacks(unsqueeze_row(x), unsqueeze_column(y)).flatten(0)
        if isinstance(y, MappedStack)
        else x.v.mv(y)
    )


@make_stack_handler
def _dot(size, x, y):
    return _inner_product(x, y)


@make_stack_handler
def _vdot(size, x, y):
    return _inner_product(apply_to_value(x, torch.conj_physical), y)


register_rows(
    {
        aten.mm.default: _mm,
        aten.mm.dtype: _mm,
        aten.bmm.default: _mm,
        aten.bmm.dtype: _mm,
        aten.mv.default: _mv,
        aten.dot.default: _dot,
        aten.vdot.default: _vdot,
    }
)


def affine(size, bias, x, w, *, beta=1, alpha=1) -> Tensor:
    """Return beta * bias + alpha * x @ w of each example: x (N, K), w (K, M), bias up to (N, M)."""
    mapped = isinstance(bias, MappedStack)
    if (bias.v.dim() - 1 if mapped else bias.dim()) < 2:  # the same for all rows
        if not isinstance(w, MappedStack) and not mapped:
            rows = torch.addmm(bias, x.v.flatten(0, 1), w, beta=beta, alpha=alpha)
            return rows.view(size, x.v.shape[1], w.shape[1])
        if not isinstance(x, MappedStack) and isinstance(w, MappedStack) and _is_foldable(x, w.v):
            n, m = w.v.shape[0], w.v.shape[2]
            bias = bias.v if mapped else bias
            if bias.shape != (n, m):
                bias = (bias.unsqueeze(1) if mapped and bias.dim() == 1 else bias).expand(n, m)
            columns = w.v.transpose(1, 2).flatten(0, 1).t()
            out = torch.addmm(bias.flatten(), x, columns, beta=beta, alpha=alpha)
            return out.view(x.shape[0], n, m).transpose(0, 1)
    x, w = (expand_stack(a, size) for a in (x, w))
    return torch.baddbmm(pad_example_rank(bias, 2), x, w, beta=beta, alpha=alpha)


_addmm = make_stack_handler(affine)


@make_stack_handler
def _addmv(size, bias, w, x, *, beta=1, alpha=1):
    if isinstance(w, MappedStack):
        return affine(
            size, unsqueeze_column(bias), w, unsqueeze_column(x), beta=beta, alpha=alpha
        ).squeeze(-1)
    return affine(size, bias, unsqueeze_row(x), w.t(), beta=beta, alpha=alpha).squeeze(-2)


@make_stack_handler
def _addbmm(size, bias, x, w, *, beta=1, alpha=1):
    x = apply_to_value(
        x, lambda v: v.movedim(-3, -2).flatten(-2)
    )  # the sum over the batch is one over K
    return affine(
        size, bias, x, apply_to_value(w, lambda v: v.flatten(-3, -2)), beta=beta, alpha=alpha
    )


@make_stack_handler
def _baddbmm(size, bias, x, w, *, beta=1, alpha=1):
    mapped = isinstance(x, MappedStack) or isinstance(w, MappedStack)
    out = multiply_stacks(x, w) if mapped else torch.bmm(x, w)
    if not (out.is_floating_point() or out.is_complex()):
        alpha, beta = int(alpha), int(beta)  # torch's kernel takes them in the tensors' dtype
    out = out if alpha == 1 else out * alpha
    if beta == 0:
        return out if mapped else out.expand(size, *out.shape)
    return torch.add(out, pad_example_rank(bias, 3), alpha=beta)


register_rows(
    {
        aten.addmm.default: _addmm,
        aten.addmv.default: _addmv,
        aten.addbmm.default: _addbmm,
        aten.baddbmm.default: _baddbmm,
    }
)


@make_stack_handler
def _linear(size, input, weight, bias=None):
    """Apply a linear layer: (*, K), (M, K), (M) -> (*, M). An example's rows * form one matrix."""
    if (
        get_example_rank(input) < 1
        or get_example_rank(weight) != 2
        or (bias is not None and get_example_rank(bias) != 1)
    ):
        return NotImplemented
    w = apply_to_value(weight, lambda v: v.transpose(-2, -1))
    if get_example_rank(input) == 2:
        return multiply_stacks(input, w) if bias is None else affine(size, bias, input, w)
    mapped = isinstance(input, MappedStack)
    shape = (input.v if mapped else input).shape[mapped:-1]
    x = apply_to_value(input, lambda v: v.reshape(*v.shape[:mapped], shape.numel(), v.shape[-1]))
    out = multiply_stacks(x, w) if bias is None else affine(size, bias, x, w)
    return out.view(out.shape[0], *shape, out.shape[-1])


def _matmul(level, func, args, kwargs):
    x, w = args
    op = _BY_RANKS.get((x.dim(), w.dim()))
    return NotImplemented if op is None else HANDLERS[op](level, op, args, kwargs)


_BY_RANKS = {
    (2, 2): aten.mm.default,
    (2, 1): aten.mv.default,
    (1, 1): aten.dot.default,
}
answer_directly(aten.mm.default, torch.mm, Tensor.mm)
answer_directly(aten.mv.default, torch.mv, Tensor.mv)
answer_directly(aten.dot.default, torch.dot, Tensor.dot)
answer_directly(aten.bmm.default, torch.bmm, Tensor.bmm)
answer_directly(aten.addmm.default, torch.addmm, Tensor.addmm)
_OPS = {*_BY_RANKS.values(), aten.addmm.default, aten.t.default, aten.transpose.int}
DIRECT[torch.nn.functional.linear] = (_linear, _OPS)
for _call in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
    DIRECT[_call] = (_matmul, _OPS)


# --- integers -----------------------------------------------------------------------------------


@make_stack_handler
def _int_mm(size, x, w):
    """Multiply int8 (N, K) @ (K, M) to int32. Batches use doubles, which hold the sums exactly."""
    if not isinstance(w, MappedStack):
        return aten._int_mm.default(x.v.flatten(0, 1), w).unflatten(0, x.v.shape[:2])
    if not isinstance(x, MappedStack):
        out = aten._int_mm.default(x, w.v.movedim(0, 1).flatten(1))
        return unfold_axis(out, 1, size)
    return torch.bmm(x.v.double(), w.v.double()).to(torch.int32)


register_rows({aten._int_mm.default: _int_mm})


# --- relatives ---------------------------------------------------------------------------------


@make_stack_handler
def _cross(size, x, y, *, dim=-1):
    dim = dim if dim < 0 else dim + 1
    return aten.linalg_cross.default(unsqueeze_shared(x), unsqueeze_shared(y), dim=dim)


@make_stack_handler
def _trilinear(size, x, y, z, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """Return an einsum: each operand lacks the dims that it expands, the result those of sumdim."""
    rank = len(expand1) + get_example_rank(x)
    operands = []
    for a, without in ((x, expand1), (y, expand2), (z, expand3)):
        dims = [d for d in range(rank) if d not in without]
        operands += (a.v, [rank, *dims]) if isinstance(a, MappedStack) else (a, dims)
    kept = [d for d in range(rank) if d not in sumdim]
    return torch.einsum(*operands, [rank, *kept])


@make_stack_handler
def _cdist(size, x, y, p, compute_mode):
    rank = max(map(get_example_rank, (x, y)))
    return aten._cdist_forward.default(
        pad_example_rank(x, rank), pad_example_rank(y, rank), p, compute_mode
    )


@make_stack_handler
def _cdist_backward(size, g, x, y, p, dist):
    """Expand every operand to its full shape, as the kernel reads rows from memory."""
    batch = get_example_shape(dist)[:-2]
    g, x, y, dist = (
        v.expand(size, *batch, *v.shape[-2:]).contiguous()
        for v in (pad_example_rank(a, len(batch) + 2) for a in (g, x, y, dist))
    )
    return aten._cdist_backward.default(g, x, y, p, dist)


def _subtract_row_pairs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the differences (B, P, K) of all pairs of rows of x (B, N, K), and the row indices."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device).unbind()
    return x.index_select(1, i) - x.index_select(1, j), i, j


@make_stack_handler
def _pdist(size, x, p=2.0):
    return torch.linalg.vector_norm(_subtract_row_pairs(x.v)[0], p, -1)


@make_stack_handler
def _pdist_backward(size, g, x, p, dist):
    g, x, dist = (
        unsqueeze_shared(g).unsqueeze(-1),
        unsqueeze_shared(x),
        unsqueeze_shared(dist).unsqueeze(-1),
    )
    difference, i, j = _subtract_row_pairs(x)
    if p == 0:
        pull = torch.zeros_like(g * difference)
    elif p == float("inf"):
        pull = difference.sign() * (difference.abs() == dist) * g
    else:
        # |d|^(p-1) / dist^(p-1), kept finite where rows coincide.
        ratio = torch.where(dist == 0, 0, difference.abs() / dist).pow(p - 1)
        pull = torch.where(dist == 0, 0, difference.sign() * ratio * g)
    zero = pull.new_zeros(pull.shape[0], *x.shape[1:])
    return zero.index_add(1, i, pull).index_add(1, j, -pull)


register_rows(
    {
        aten.linalg_cross.default: _cross,
        aten._trilinear.default: _trilinear,
        aten._cdist_forward.default: _cdist,
        aten._cdist_backward.default: _cdist_backward,
        aten._pdist_forward.default: _pdist,
        aten._pdist_backward.default: _pdist_backward,
    }
)
