"""Rules of linear algebra: the kernels take leading batch dims, so most rules only align them.

In (B, *batch, *core), ``core`` are the dims that the operator works on, 2 of a matrix or 1 of a
vector of pivots. ``batch`` are the batch dims of one example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import get_facts, met
from forall._compat.versions import find_existing
from forall._core.axes import pad_rank
from forall._vmap import concretize
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.failing_example import AllFailAlikeError
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    wrap_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten
Tensor = torch.Tensor


def _stack_operands(operands: Sequence[Tensor], cores: Sequence[int], level: Any) -> list[Tensor]:
    """Return each operand as (B, *batch, *core), with ones to the same number of batch dims."""
    pairs = [*zip(operands, cores, strict=True)]
    most = max(x.dim() - core for x, core in pairs)
    return [pad_rank(expand_to_stack(x, level), core + most) for x, core in pairs]


def _match_layout(x: Tensor, v: Tensor) -> Tensor:
    """Return the batched tensor ``v`` of ``x``, contiguous if one example is.

    Kernels factor the transpose of a contiguous matrix, and formulas check that of an example.
    """
    return v.contiguous() if x.is_contiguous() else v


def _determinant(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    (x,) = args
    return wrap_results(func(_match_layout(x, move_to_front(x))), 0, level)


def make_linalg_handler(
    *cores: int, absent: Sequence[int] = (), columns: int | None = None
) -> Callable:
    """Return the handler of an operator whose first arguments have these core ranks.

    ``absent`` are the results that are an empty (0,) if they were not requested. ``columns`` is
    the argument whose columns are right-hand sides: if it alone is batched, the examples become
    more columns of one system, which is factored once.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        met.add(func)  # its backward, decomposed, checks properties of one example
        others = [a for i, a in enumerate(args[: len(cores)]) if i != columns]
        if columns is not None and not any(is_mapped(a, level) for a in others):
            out = _solve_columns(level, func, columns, args, kwargs)
            return wrap_stack(out, 0, level)
        operands = _stack_operands(args[: len(cores)], cores, level)
        out = func(*operands, *args[len(cores) :], **kwargs)
        if not absent:
            return wrap_results(out, 0, level)
        return type(out)(
            wrap_stack(o, None if i in absent and o.dim() == 1 else 0, level)
            for i, o in enumerate(out)
        )

    return handler


def _solve_columns(level: Any, func: Any, columns: int, args: tuple, kwargs: dict) -> Any:
    """Call func with (*batch, n, B * k) for (B, *batch, n, k); with rows if not ``left``."""
    names = get_facts(func).names
    left = kwargs.get("left", True)
    if "left" in names and names.index("left") < len(args):
        left = args[names.index("left")]
    below = [lower_shared(a, level) for a in args]
    v = move_to_front(args[columns])
    below[columns] = _join_columns(v, left)
    return _split_columns(func(*below, **kwargs), v, left)


def _join_columns(v: Tensor, left: bool) -> Tensor:
    *batch, n, k = v.shape[1:]
    if left:
        return v.movedim(0, -2).reshape(*batch, n, v.shape[0] * k)
    return v.movedim(0, -3).reshape(*batch, v.shape[0] * n, k)


def _split_columns(joined: Tensor, like: Tensor, left: bool) -> Tensor:
    *batch, n, k = joined.shape
    if left:
        return joined.reshape(*batch, n, like.shape[0], like.shape[-1]).movedim(-2, 0)
    return joined.reshape(*batch, like.shape[0], like.shape[-2], k).movedim(-3, 0)


register_rows(
    {
        **dict.fromkeys(
            (
                *find_existing(["cholesky.default", "linalg_matrix_sqrth.default"]),
                *find_existing(["linalg_polar.default"]),
                aten.cholesky_inverse.default,
                aten.geqrf.default,
                aten.linalg_cholesky_ex.default,
                aten.linalg_eig.default,
                aten.linalg_eigvals.default,
                aten._linalg_eigvals.default,
                aten.linalg_inv_ex.default,
                aten.linalg_ldl_factor_ex.default,
                aten.linalg_lu_factor_ex.default,
            ),
            make_linalg_handler(2),
        ),
        aten._linalg_det.default: _determinant,
        aten._linalg_slogdet.default: _determinant,
        aten._linalg_eigh.default: make_linalg_handler(2, absent=(1,)),
        aten._linalg_svd.default: make_linalg_handler(2, absent=(0, 2)),
        aten.linalg_lu.default: make_linalg_handler(2, absent=(0,)),
        aten.linalg_qr.default: make_linalg_handler(2, absent=(0,)),
        aten.lu_unpack.default: make_linalg_handler(2, 1, absent=(0, 1, 2)),
        aten.linalg_householder_product.default: make_linalg_handler(2, 1),
        aten.triangular_solve.default: make_linalg_handler(2, 2),
        aten.linalg_solve_triangular.default: make_linalg_handler(2, 2, columns=1),
        aten.cholesky_solve.default: make_linalg_handler(2, 2, columns=0),
        aten._cholesky_solve_helper.default: make_linalg_handler(2, 2, columns=0),
        aten.linalg_lu_solve.default: make_linalg_handler(2, 1, 2, columns=2),
        aten.linalg_ldl_solve.default: make_linalg_handler(2, 1, 2, columns=2),
        aten.ormqr.default: make_linalg_handler(2, 1, 2, columns=2),
    }
)


def _is_vector(a: Tensor, b: Tensor) -> bool:
    """True if torch takes the right-hand side ``b`` of a linear system for a vector."""
    return b.dim() == 1 or b.shape == a.shape[:-1]


def _stack_system(a: Tensor, b: Tensor, level: Any) -> tuple[Tensor, Tensor]:
    """Return both sides of a linear system, batched, such that a vector is still one to torch."""
    vector = _is_vector(a, b)
    a, b = _stack_operands((a, b), (2, 1 if vector else 2), level)
    return a, b.expand(a.shape[:-1]) if vector else b


def _solve_ex(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return (result, LU, pivots, info). The last three have the batch dims of a alone."""
    a, b = args
    left = kwargs.get("left", True)
    if is_mapped(a, level) or (_is_vector(a, b) and not left):
        v, w = _stack_system(a, b, level)
        result, *of_a = func(_match_layout(a, v), w, **kwargs)
        ones = v.dim() - 1 - a.dim()
        of_a = [wrap_stack(o.reshape(o.shape[0], *o.shape[1 + ones :]), 0, level) for o in of_a]
        return wrap_stack(result, 0, level), *of_a
    v = move_to_front(b)
    v = v.unsqueeze(-1) if _is_vector(a, b) else v
    result, *of_a = func(lower_shared(a, level), _join_columns(v, left), **kwargs)
    result = _split_columns(result, v, left)
    result = result.squeeze(-1) if _is_vector(a, b) else result
    return wrap_stack(result, 0, level), *(wrap_stack(o, None, level) for o in of_a)


def _lstsq(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return (solution, residuals, rank, singular values); those that the driver omits are (0,)."""
    a, b = _stack_system(args[0], args[1], level)
    out = func(a, b, *args[2:], **kwargs)
    ranked = (kwargs.get("driver") or ("gels" if a.is_cuda else "gelsy")) != "gels"
    there = (True, out[1].dim() > 1, ranked, out[3].dim() > 1)
    return type(out)(
        wrap_stack(o, 0 if t else None, level) for o, t in zip(out, there, strict=True)
    )


def _pinv(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    names = [n for n in ("atol", "rtol") if isinstance(kwargs.get(n), Tensor)]
    x, *tolerances = _stack_operands(
        (args[0], *(kwargs[n] for n in names)), (2, *(0 for _ in names)), level
    )
    return wrap_stack(func(x, **{**kwargs, **dict(zip(names, tolerances, strict=True))}), 0, level)


def _matrix_exp(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    return wrap_stack(
        func(move_to_front(args[0]).contiguous()), 0, level
    )  # the kernel views its argument


def _linear_combination(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return linear combinations of each example's N terms: (B, N, *S), (B, M, N) -> (B, M, *S)."""
    terms, coefficients = (expand_to_stack(a, level) for a in args)
    out = torch.bmm(coefficients, terms.flatten(2))
    return wrap_stack(out.unflatten(2, terms.shape[2:]), 0, level)


def _check_errors(level: Any, func: Any, args: tuple, kwargs: dict) -> None:
    """Raise if all examples fail in the same way. Otherwise they diverge: each may catch its error.

    The error of the batched call names the first example that fails as a batch element.
    """
    info, name = args[:2]
    found = move_to_front(info)
    try:
        func(found, name, is_matrix=False)
    except RuntimeError as error:
        if found.dim() > 1:  # several matrices in each example
            raise
        cause = error
        concretize.concretize_number(wrap_stack(found, 0, level), lambda: cause)
        raise AllFailAlikeError(*error.args) from None


register_rows(
    {
        aten._linalg_solve_ex.default: _solve_ex,
        aten.linalg_lstsq.default: _lstsq,
        aten.linalg_pinv.atol_rtol_tensor: _pinv,
        aten.linalg_matrix_exp.default: _matrix_exp,
        aten._compute_linear_combination.default: _linear_combination,
        aten._linalg_check_errors.default: _check_errors,
    }
)
