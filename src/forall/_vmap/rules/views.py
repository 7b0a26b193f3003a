"""Rules of views: (.., B, ..) -> (.., B, ..), where the batch axis stays or moves with the dims.

A rule is ``rule(value, axis, *args) -> (value, axis)``. It also derives a view again after its base
got a batch axis, so it must depend on its arguments alone.
"""

from __future__ import annotations

import torch

from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import (
    axis_after_removal,
    is_axis_inside,
    move_axis_to_front,
    pad_rank,
    shift_past_axis,
    wrap_dim,
)
from forall._vmap.batched_tensor import alias_call, derive_view, lay_out_separately
from forall._vmap.registry import VIEW_CALLS, VIEWS, register_rows
from forall._vmap.rule_makers.basic import VIEWERS, make_view_handler

aten = torch.ops.aten


def _alias(v, axis, *_):
    return v, axis


def _detach(v, axis):
    """Detach the value too if an outer `jvp` or a backward pass differentiates it."""
    return (v.detach() if isinstance(v, Wrapper) or v.requires_grad else v), axis


def _select(v, axis, dim, index):
    dim = shift_past_axis(wrap_dim(dim, v.dim() - 1), axis)
    return v.select(dim, index), axis_after_removal(axis, dim)


def _slice(v, axis, dim=0, start=None, end=None, step=1):
    return aten.slice.Tensor(
        v, shift_past_axis(wrap_dim(dim, v.dim() - 1), axis), start, end, step
    ), axis


def _transpose(v, axis, dim0, dim1):
    r = v.dim() - 1
    if r == 0:
        return v, axis
    return v.transpose(
        shift_past_axis(wrap_dim(dim0, r), axis), shift_past_axis(wrap_dim(dim1, r), axis)
    ), axis


def _t(v, axis):
    return (v, axis) if v.dim() < 3 else _transpose(v, axis, 0, 1)


def _permute(v, axis, dims):
    r = v.dim() - 1
    order = [shift_past_axis(wrap_dim(d, r), axis) for d in dims]
    return (v.permute([*order, axis]), r) if axis else (v.permute([0, *order]), 0)


def _movedim(v, axis, source, destination):
    r = v.dim() - 1
    source, destination = (
        [wrap_dim(d, r) for d in ([dims] if isinstance(dims, int) else dims)]
        for dims in (source, destination)
    )
    order = iter(d for d in range(r) if d not in source)
    moved = dict(zip(destination, source, strict=True))
    return _permute(v, axis, [moved[d] if d in moved else next(order) for d in range(r)])


def _narrow(v, axis, dim, start, length):
    return v.narrow(shift_past_axis(wrap_dim(dim, v.dim() - 1), axis), start, length), axis


def _unsqueeze(v, axis, dim):
    dim = wrap_dim(dim, v.dim())
    return v.unsqueeze(dim if dim < axis else dim + 1), axis + (dim < axis)


def _squeeze(v, axis):
    return _squeeze_dims(v, axis, range(v.dim() - 1))


def _squeeze_dims(v, axis, dims):
    r = v.dim() - 1
    if isinstance(dims, int):
        dims = [dims]
    gone = [
        d for d in (shift_past_axis(wrap_dim(d, r), axis) for d in dims) if r and v.shape[d] == 1
    ]
    return v.squeeze(gone), axis - sum(d < axis for d in gone)


def _expand(v, axis, size, *, implicit=False):
    v = move_axis_to_front(v, axis)
    size = list(size)
    if len(size) < v.dim() - 1:
        raise RuntimeError(
            f"expand: {v.dim() - 1} dims of the tensor do not fit the {len(size)} sizes {size}"
        )
    return _move_axis_inside(pad_rank(v, len(size)).expand(v.shape[0], *size))


def _move_axis_inside(v):
    """Move the batch axis last if it is not the outermost in memory: see `memory_layout`."""
    return (v.movedim(0, -1), v.dim() - 1) if is_axis_inside(v, 0) else (v, 0)


def _view(v, axis, size):
    v = move_axis_to_front(v, axis)
    out = aten.view.default(v, [v.shape[0], *_infer_sizes(size, v)])
    return _move_axis_inside(out) if axis else (out, 0)


def _infer_sizes(size, v):
    """Replace -1 in the sizes, computed from one example, as B may be 0."""
    size = list(size)
    if -1 in size:
        known = numel = 1
        for s in size:
            known *= s if s != -1 else 1
        for s in v.shape[1:]:
            numel *= s
        if known:
            size[size.index(-1)] = numel // known
    return size


def _reshape_alias(v, axis, size, stride):
    return _view(v, axis, size)


def _diagonal(v, axis, offset=0, dim1=0, dim2=1):
    r = v.dim() - 1
    v = v.movedim(axis, 0)
    out = v.diagonal(offset, wrap_dim(dim1, r) + 1, wrap_dim(dim2, r) + 1)
    return _move_axis_inside(out) if axis else (out, 0)


def _unfold(v, axis, dim, size, step):
    r = v.dim() - 1
    if r == 0:  # a number unfolds into one window of one entry
        return v.unsqueeze(-1).unfold(-1, size, step).squeeze(-2), axis
    return v.unfold(shift_past_axis(wrap_dim(dim, r), axis), size, step), axis


def _split(v, axis, size, dim=0):
    return v.split(size, shift_past_axis(wrap_dim(dim, v.dim() - 1), axis)), axis


def _unbind(v, axis, dim=0):
    dim = shift_past_axis(wrap_dim(dim, v.dim() - 1), axis)
    return v.unbind(dim), axis_after_removal(axis, dim)


def _conj(v, axis):
    return aten._conj.default(v), axis


def _neg_view(v, axis):
    return aten._neg_view.default(v), axis


def _view_as_real(v, axis):
    return torch.view_as_real(v.resolve_conj()), axis  # wrappers do not show the conj bit


def _view_as_complex(v, axis):
    return _move_axis_inside(torch.view_as_complex(v.movedim(axis, 0)))


def _view_dtype(v, axis, dtype):
    return v.movedim(axis, 0).view(dtype), 0


_IN_MEMORY = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._reshape_alias.default: _reshape_alias,
    aten.view_as_complex.default: _view_as_complex,
    aten.view.dtype: _view_dtype,
}
ROWS = {
    aten.alias.default: _alias,
    aten.detach.default: _detach,
    aten._fw_primal.default: _alias,
    aten._make_dual.default: _alias,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.movedim.int: _movedim,
    aten.movedim.intlist: _movedim,
    aten.narrow.default: _narrow,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze_dims,
    aten.squeeze.dims: _squeeze_dims,
    aten.expand.default: _expand,
    aten.diagonal.default: _diagonal,
    aten.unfold.default: _unfold,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten._conj.default: _conj,
    aten._neg_view.default: _neg_view,
    aten.view_as_real.default: _view_as_real,
    **_IN_MEMORY,
}
VIEWS.update(ROWS)


def _make_retrying_handler(rule):
    """Return a handler that retries a failed view after making each example contiguous."""
    handler = make_view_handler(rule)

    def handle(level, func, args, kwargs):
        try:
            return handler(level, func, args, kwargs)
        except RuntimeError:
            x = args[0]
            if not x.is_external:
                lay_out_separately(x)
            elif level.active:  # an example alone cannot be viewed so either
                raise
            else:  # a cotangent, which nothing else refers to
                x = derive_view(x, x.value.movedim(x.axis, 0).contiguous(), 0, alias_call)
            return handler(level, func, (x, *args[1:]), kwargs)

    VIEWERS.add(handle)
    return handle


register_rows(
    {
        op: _make_retrying_handler(rule) if op in _IN_MEMORY else make_view_handler(rule)
        for op, rule in ROWS.items()
    }
)


def make_strided_view(x, size, stride, storage_offset=None):
    """Return the view function of as_strided, whose offset is counted in one example's memory."""
    delta = 0 if storage_offset is None else storage_offset - x.storage_offset()

    def call(v, axis):
        if axis is None:
            return v.as_strided(size, stride, v.storage_offset() + delta), None
        v = v.movedim(axis, 0)
        return (
            v.as_strided([v.shape[0], *size], [v.stride(0), *stride], v.storage_offset() + delta),
            0,
        )

    return call


def _as_strided(level, func, args, kwargs):
    x = args[0]
    call = make_strided_view(x, *args[1:], **kwargs)
    return derive_view(x, *call(x.value, x.axis), call)


register_rows({aten.as_strided.default: _as_strided})
VIEW_CALLS[aten.as_strided.default] = make_strided_view
