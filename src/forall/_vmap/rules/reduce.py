"""Rules of reductions: (B, *S) -> (B, *S without dims)."""

from __future__ import annotations

import torch

from forall._core.axes import stacked_dim
from forall._vmap.batched_tensor import wrap
from forall._vmap.registry import DIRECT, HANDLERS, register
from forall._vmap.rule_makers.along_dims import along, whole
from forall._vmap.rule_makers.basic import by_front

aten = torch.ops.aten

register(
    {
        op: along(op)
        for op in (
            aten.sum.dim_IntList,
            aten.mean.dim,
            aten.nansum.default,
            aten.amax.default,
            aten.amin.default,
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
    | {op: along(op, empty_is_all=False) for op in (aten.any.dims, aten.all.dims)}
)


def over_list(op):
    """Return a full reduction made of ``op(x, *args, dims)``, which takes a list of dims."""

    def rule(x, *args, **kwargs):
        return op(x, *args, [*range(1, x.dim())], **kwargs)

    return whole(rule, flat=False)


def over_one(op):
    """Return a full reduction made of ``op(x, dim, *args)``, which takes one dim."""
    return whole(lambda x, *args, **kwargs: op(x, 1, *args, **kwargs))


def values(op):
    """Return a full reduction made of ``op(x, dim)``, which returns (values, indices)."""
    return whole(lambda x: op(x, 1)[0])


register(
    {
        aten.sum.default: over_list(aten.sum.dim_IntList),
        aten.mean.default: over_list(aten.mean.dim),
        aten.max.default: over_list(aten.amax.default),
        aten.min.default: over_list(aten.amin.default),
        aten.norm.Scalar: whole(lambda x, p=2: aten.norm.ScalarOpt_dim(x, p, [1])),
        aten.norm.ScalarOpt_dtype: whole(
            lambda x, p, *, dtype: aten.norm.ScalarOpt_dim_dtype(x, p, [1], False, dtype=dtype)
        ),
        aten.prod.default: over_one(aten.prod.dim_int),
        aten.any.default: over_one(aten.any.dim),
        aten.all.default: over_one(aten.all.dim),
        aten._aminmax.default: over_one(aten._aminmax.dim),
        aten.median.default: values(aten.median.dim),
        aten.nanmedian.default: values(aten.nanmedian.dim),
    }
)


def _dense_numbers(rule):
    """Return a handler whose results of rank 0 are dense, as torch's sum of a sparse tensor is."""

    def handler(level, func, args, kwargs):
        out = rule(level, func, args, kwargs)
        if args[0].layout is torch.sparse_coo and not out.dim():
            return wrap(out.value.to_dense(), out.axis, level)
        return out

    return handler


for _op in (aten.sum.default, aten.sum.dim_IntList):
    HANDLERS[_op] = _dense_numbers(HANDLERS[_op])


_DIMS = [[*range(1, rank)] for rank in range(65)]  # an example's dims in the batched tensor


def one_of(whole_op, op):
    """Return the direct rule of ``x.op()`` and ``x.op(dim, keepdim)``, with or without a dtype."""

    def rule(level, func, args, kwargs):
        if len(args) == 1 and not kwargs:
            x = args[0]
            v = x.value
            if x.axis == 0 and v.layout is torch.strided and v.dim() > 1:
                return wrap(func(v, _DIMS[v.dim()]), 0, level)
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
        DIRECT[getattr(_home, _name)] = one_of(*_ops)


def extreme(op):
    """Return the direct rule of ``x.op(dim, keepdim)``; its operator takes a list of dims."""

    def rule(level, func, args, kwargs):
        if len(args) not in (2, 3) or kwargs or type(args[1]) is not int:
            return NotImplemented
        return HANDLERS[op](level, op, (args[0], [args[1]], *args[2:]), {})

    return rule, {op}


for _name, _op in {"amax": aten.amax.default, "amin": aten.amin.default}.items():
    for _home in (torch, torch.Tensor):
        DIRECT[getattr(_home, _name)] = extreme(_op)


def all_or_one(op):
    """Return the handler of ``op(x, dim=None, keepdim=False)``: no dim reduces all entries."""
    one = along(op)

    @by_front
    def every(size, x, dim=None, keepdim=False):
        rank = x.v.dim() - 1
        out = op(x.v.flatten(1) if rank else x.v.unsqueeze(1), dim=1)
        shape = (size, *(1,) * rank) if keepdim else (size,)
        return tuple(o.view(shape) for o in out) if isinstance(out, tuple) else out.view(shape)

    def handler(level, func, args, kwargs):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return (every if dim is None else one)(level, func, args, kwargs)

    return handler


@by_front
def _count_nonzero(size, x, dim=None):
    rank = x.v.dim() - 1
    dims = list(range(1, rank + 1)) if dim is None else [stacked_dim(dim, rank)]
    if not rank:
        return (x.v != 0).to(torch.int64)
    return aten.count_nonzero.dim_IntList(x.v, dims)


@by_front
def _trace(size, x):
    return x.v.diagonal(0, 1, 2).sum(1)


register(
    {
        aten.argmax.default: all_or_one(aten.argmax.default),
        aten.argmin.default: all_or_one(aten.argmin.default),
        aten.aminmax.default: all_or_one(aten.aminmax.default),
        aten.count_nonzero.default: _count_nonzero,
        aten.trace.default: _trace,
    }
)
