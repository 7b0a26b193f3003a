"""Rules of reductions: (B, *S) -> (B, *S without dims)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.axes import stacked_dim
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.registry import DIRECT, HANDLERS, register_rows
from forall._vmap.rule_makers.along_dims import make_dim_handler
from forall._vmap.rule_makers.basic import (
    loop_and_stack,
    make_stack_handler,
    move_to_front,
    wrap_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def _sum(x, *args, **kwargs):
    """Sum along dims; an example of rank 0 is dense, as torch's sum of a sparse tensor is."""
    out = torch.sum(x, *args, **kwargs)
    return out.to_dense() if out.dim() == 1 and out.layout is torch.sparse_coo else out


register_rows(
    {
        op: make_dim_handler(op)
        for op in (
            aten.nansum.default,
            aten.logsumexp.default,
            aten.linalg_vector_norm.default,
            aten.norm.ScalarOpt_dim,
            aten.norm.ScalarOpt_dim_dtype,
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.std_mean.correction,
            aten.count_nonzero.dim_IntList,
            aten.hash_tensor.default,
            aten.prod.dim_int,
            aten.any.dim,
            aten.all.dim,
            aten.max.dim,
            aten.min.dim,
            aten._aminmax.dim,
            aten.median.dim,
            aten.nanmedian.dim,
            aten.mode.default,
            aten.kthvalue.default,
        )
    }
    | {op: make_dim_handler(op, empty_is_all=False) for op in (aten.any.dims, aten.all.dims)}
    | {  # torch's functions are called faster than operators, and take one dim as an int
        op: make_dim_handler(op, run=run)
        for op, run in {
            aten.sum.dim_IntList: _sum,
            aten.mean.dim: torch.mean,
            aten.amax.default: torch.amax,
            aten.amin.default: torch.amin,
        }.items()
    }
)


def make_full_handler(rule: Callable, flat: bool = True) -> Callable:
    """Return a handler from ``rule((B, N), *args)``: one result over all N entries of each example.

    With ``flat`` off the rule takes (B, *S), of at least one dim, since flattening may copy. Of
    examples without entries the operator is called for each, and the rule is not.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        v = move_to_front(args[0])
        if v.dim() == 1:
            v = v.unsqueeze(1)
        elif flat or v.layout is not torch.strided:
            v = v.flatten(1)
        if 0 in v.shape[1:]:  # the operator itself answers, or refuses, for no entries
            if level.size:
                return loop_and_stack(level, func, args, kwargs)
            v = v.new_empty((0, 1))
        return wrap_results(rule(v, *args[1:], **kwargs), 0, level)

    return handler


def make_list_dim_handler(op):
    """Return a full reduction: that of the row of ``op``, which takes a list of dims, over all."""

    def rule(x, *args, **kwargs):
        row: Any = HANDLERS[op]
        return row.run(x, *args, [*range(1, x.dim())], **kwargs)

    return make_full_handler(rule, flat=False)


def make_one_dim_handler(op):
    """Return a full reduction made of ``op(x, dim, *args)``, which takes one dim."""
    return make_full_handler(lambda x, *args, **kwargs: op(x, 1, *args, **kwargs))


def make_values_handler(op):
    """Return a full reduction made of ``op(x, dim)``, which returns (values, indices)."""
    return make_full_handler(lambda x: op(x, 1)[0])


register_rows(
    {
        aten.sum.default: make_list_dim_handler(aten.sum.dim_IntList),
        aten.mean.default: make_list_dim_handler(aten.mean.dim),
        aten.max.default: make_list_dim_handler(aten.amax.default),
        aten.min.default: make_list_dim_handler(aten.amin.default),
        aten.norm.Scalar: make_full_handler(lambda x, p=2: aten.norm.ScalarOpt_dim(x, p, [1])),
        aten.norm.ScalarOpt_dtype: make_full_handler(
            lambda x, p, *, dtype: aten.norm.ScalarOpt_dim_dtype(x, p, [1], False, dtype=dtype)
        ),
        aten.prod.default: make_one_dim_handler(aten.prod.dim_int),
        aten.any.default: make_one_dim_handler(aten.any.dim),
        aten.all.default: make_one_dim_handler(aten.all.dim),
        aten._aminmax.default: make_one_dim_handler(aten._aminmax.dim),
        aten.median.default: make_values_handler(aten.median.dim),
        aten.nanmedian.default: make_values_handler(aten.nanmedian.dim),
    }
)


_DIMS = [[*range(1, rank)] for rank in range(65)]  # an example's dims in the batched tensor


def make_reduction_call(whole_op, op):
    """Return the direct rule of ``x.op()`` and ``x.op(dim, keepdim)``, with or without a dtype."""

    def rule(level, func, args, kwargs):
        if len(args) == 1 and not kwargs:
            x = args[0]
            v = x.value
            if x.axis == 0 and v.layout is torch.strided and v.dim() > 1:
                row: Any = HANDLERS[op]
                return wrap_stack(row.run(v, _DIMS[v.dim()]), 0, level)
            return HANDLERS[whole_op](level, whole_op, args, kwargs)
        given = {"dim", "keepdim"}.intersection(kwargs) | set(("dim", "keepdim")[: len(args) - 1])
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if (
            len(args) not in (1, 2, 3)
            or kwargs.keys() - {"dim", "keepdim", "dtype"}
            or given == {"keepdim"}
            or type(keepdim) is not bool
            or type(dim) is bool
        ):
            return NotImplemented
        chosen = op if given else whole_op
        return HANDLERS[chosen](level, chosen, args, kwargs)

    return rule, {whole_op, op}


for _name, _ops in {
    "sum": (aten.sum.default, aten.sum.dim_IntList),
    "mean": (aten.mean.default, aten.mean.dim),
}.items():
    for _home in (torch, torch.Tensor):
        DIRECT[getattr(_home, _name)] = make_reduction_call(*_ops)


def make_extreme_call(op):
    """Return the direct rule of ``x.op(dim, keepdim)``; its operator takes a list of dims."""

    def rule(level, func, args, kwargs):
        if len(args) not in (2, 3) or kwargs or type(args[1]) is not int:
            return NotImplemented
        return HANDLERS[op](level, op, (args[0], [args[1]], *args[2:]), {})

    return rule, {op}


for _name, _op in {"amax": aten.amax.default, "amin": aten.amin.default}.items():
    for _home in (torch, torch.Tensor):
        DIRECT[getattr(_home, _name)] = make_extreme_call(_op)


def make_optional_dim_handler(op):
    """Return the handler of ``op(x, dim=None, keepdim=False)``: no dim reduces all entries."""
    one = make_dim_handler(op)

    @make_stack_handler
    def every(size, x, dim=None, keepdim=False):
        rank = x.v.dim() - 1
        out = op(x.v.flatten(1) if rank else x.v.unsqueeze(1), dim=1)
        shape = (size, *(1,) * rank) if keepdim else (size,)
        return tuple(o.view(shape) for o in out) if isinstance(out, tuple) else out.view(shape)

    def handler(level, func, args, kwargs):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return (every if dim is None else one)(level, func, args, kwargs)

    return handler


@make_stack_handler
def _count_nonzero(size, x, dim=None):
    rank = x.v.dim() - 1
    dims = list(range(1, rank + 1)) if dim is None else [stacked_dim(dim, rank)]
    if not rank:
        return (x.v != 0).to(torch.int64)
    return aten.count_nonzero.dim_IntList(x.v, dims)


@make_stack_handler
def _trace(size, x):
    return x.v.diagonal(0, 1, 2).sum(1)


register_rows(
    {
        aten.argmax.default: make_optional_dim_handler(aten.argmax.default),
        aten.argmin.default: make_optional_dim_handler(aten.argmin.default),
        aten.aminmax.default: make_optional_dim_handler(aten.aminmax.default),
        aten.count_nonzero.default: _count_nonzero,
        aten.trace.default: _trace,
    }
)
