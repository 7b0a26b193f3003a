"""Convolution and its derivative: whatever is shared stays unstacked.

NOTE [where the examples go]
    Shapes of one example: x (N, g*I, *), y (N, g*O, *), w (g*O, I, *), or (g*I, O, *) transposed.

    images    x differs, w is shared   the examples join N           x (B*N, g*I)   y (B*N, g*O)
    filters   w differs, x is shared   they join each group's O      w (g*B*O, I)   y (N, g*B*O)
    groups    both differ              each has groups of its own    x (N, B*g*I)   y (N, B*g*O)

    The derivative with respect to w has the same places: per-example images and cotangents give
    per-example weights by groups. They may also be one matrix product per example, of cotangents
    and of what the filter meets in the images: NOTE [products or groups].
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from forall._batching.families import Stack, by_front
from forall._batching.table import register

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten
Tensor = torch.Tensor


class Images:
    """The examples join N."""

    def __init__(self, size: int, groups: int, transposed: bool) -> None:
        self.size, self.groups, self.transposed = size, groups, transposed

    def x(self, v: Tensor) -> Tensor:
        return v.flatten(0, 1)

    def x_back(self, v: Tensor) -> Tensor:
        return v.unflatten(0, (self.size, -1))

    def w(self, v: Tensor) -> Tensor:
        return v[0]

    y, y_back = x, x_back


class Filters(Images):
    """The examples join the output channels of each group."""

    def x(self, v: Tensor) -> Tensor:
        return v[0]

    def y(self, v: Tensor) -> Tensor:
        v = v.unflatten(2, (self.groups, -1))  # (B, N, g, O, *)
        return v.movedim(0, 2).flatten(1, 3)

    def y_back(self, v: Tensor) -> Tensor:
        v = v.unflatten(1, (self.groups, self.size, -1))  # (N, g, B, O, *)
        return v.movedim(2, 0).flatten(2, 3)

    def w(self, v: Tensor) -> Tensor:
        if self.transposed:
            return v.movedim(0, 1).flatten(1, 2)
        return v.unflatten(1, (self.groups, -1)).movedim(0, 1).flatten(0, 2)

    def w_back(self, v: Tensor) -> Tensor:
        if self.transposed:
            return v.unflatten(1, (self.size, -1)).movedim(1, 0)
        return v.unflatten(0, (self.groups, self.size, -1)).movedim(1, 0).flatten(1, 2)


class Groups(Images):
    """Each example gets groups of its own."""

    def __init__(self, size: int, groups: int, transposed: bool) -> None:
        super().__init__(size, size * groups, transposed)

    def x(self, v: Tensor) -> Tensor:
        return v.movedim(0, 1).flatten(1, 2)

    def x_back(self, v: Tensor) -> Tensor:
        return v.unflatten(1, (self.size, -1)).movedim(1, 0)

    def w(self, v: Tensor) -> Tensor:
        return v.flatten(0, 1)

    def w_back(self, v: Tensor) -> Tensor:
        return v.unflatten(0, (self.size, -1))

    y, y_back = x, x_back


def _all(a: Stack | Tensor, size: int) -> Tensor:
    return a.v if isinstance(a, Stack) else a.expand(size, *a.shape)


def _shape_of(a: Stack | Tensor, size: int) -> Tensor:
    """A stand-in of the shape of ``a``'s stack, for kernels that ask for no more."""
    v, shape = (a.v, a.v.shape) if isinstance(a, Stack) else (a, (size, *a.shape))
    return v.new_empty(shape)  # without an entry to copy, as an expanded one would be


def convolution(size, x, w, bias, *how):
    """``how``: stride, padding, dilation, transposed, output_padding, groups[, flags]."""
    geometry, groups = how[:5], how[5]
    if not (isinstance(x, Stack) or isinstance(w, Stack)):
        y = torch.convolution(x, w, None, *geometry, groups).unsqueeze(0)
        return y + _per_channel(bias.v, y)
    place = (Groups if isinstance(w, Stack) else Images) if isinstance(x, Stack) else Filters
    p = place(size, groups, transposed=geometry[3])
    within = bias if place is Images and not isinstance(bias, Stack) else None
    x, w = p.x(_all(x, size)), p.w(_all(w, size))
    y = p.y_back(torch.convolution(x, w, within, *geometry, p.groups))
    if bias is None or within is not None:
        return y
    return y + _per_channel(_all(bias, size), y)


def _per_channel(bias: Tensor, y: Tensor) -> Tensor:
    """(B, O) -> (B, 1, O, 1..) beside y: (B, N, O, *)."""
    return bias.reshape(bias.shape[0], 1, -1, *(1,) * (y.dim() - 3))


def _convolution_backward(size, g, x, w, _bias_sizes, *how):
    geometry, groups, (for_x, for_w, for_bias) = how[:5], how[5], how[6]
    g = _all(g, size)

    def pull(place, x, w, mask):
        p = place(size, groups, transposed=geometry[3])
        gx, gw, _ = aten.convolution_backward.default(
            p.y(g), p.x(x), p.w(w), None, *geometry, p.groups, [*mask, False]
        )
        return p.x_back(gx) if mask[0] else None, p.w_back(gw) if mask[1] else None

    gx = gw = None
    if for_x:
        to = Groups if isinstance(w, Stack) else Images
        gx, _ = pull(to, _shape_of(x, size), _all(w, size), [True, False])
    if for_w and isinstance(x, Stack):
        filters = _shape_of(w, size).shape[1:]
        form = weights_by_product if product_is_faster(g, x.v, filters, how) else weights_by_groups
        gw = form(g, x.v, filters, *geometry, groups)
    elif for_w:
        _, gw = pull(Filters, _all(x, size), _shape_of(w, size), [False, True])
    return gx, gw, g.sum([1, *range(3, g.dim())]) if for_bias else None


# --- per-example weights by products -------------------------------------------------------------

# NOTE [products or groups]
#     A grouped convolution is fast where its kernel finds blocks of channels. A product pays for a
#     copy of the images, of each entry as often as the filter meets it. Which costs less was
#     measured on CPU (benchmarks/weight_gradients.py): this choice costs 5 % more than the better
#     of the two, in the mean over 842 shapes; groups alone 59 %, products alone 18 %. Float64 has
#     no fast convolution; elsewhere than on CPU nothing was measured, and groups stay.
_BLOCK = 8  # channels
_FEW_COPIES = 1.7  # of an entry: copying costs less than what it saves
_SMALL_FILTER = 400  # entries, where channels make no blocks
_MORE_FILTERS = 8  # for each channel of the images: the copy is used often
_MANY_FILTERS, _SMALL_ROW = 128, 15000  # or so many, of a copy that is not long


def product_is_faster(g: Tensor, x: Tensor, filters: Sequence[int], how: Sequence) -> bool:
    """``filters`` (g*O, I, *) is the shape of one example's weight, ``how`` as in `convolution`."""
    if x.dtype is torch.float64 or not x.is_cpu:
        return x.is_cpu
    met, places = (g, x) if how[3] else (x, g)
    copies = prod(filters[2:]) * prod(places.shape[3:]) / max(prod(met.shape[3:]), 1)
    if copies < _FEW_COPIES:
        return True
    outputs, inputs = filters[0] // how[5], filters[1]
    if outputs % _BLOCK or inputs % _BLOCK:
        return prod(filters[1:]) < _SMALL_FILTER
    row = x.shape[1] * prod(places.shape[3:]) * prod(filters[2:])
    return outputs >= _MORE_FILTERS * inputs or (outputs >= _MANY_FILTERS and row < _SMALL_ROW)


def weights_by_groups(g, x, filters, *how):
    """(B, N, g*O, *), (B, N, g*I, *) -> (B, g*O, I, *): each example has groups of its own."""
    p = Groups(len(x), how[5], transposed=how[3])
    w = p.w(x.new_empty((len(x), *filters)))
    _, gw, _ = aten.convolution_backward.default(
        p.y(g), p.x(x), w, None, *how[:5], p.groups, [False, True, False]
    )
    return p.w_back(gw)


def weights_by_product(g, x, filters, stride, padding, dilation, transposed, _, groups):
    """(B, N, g*O, *), (B, N, g*I, *) -> (B, g*O, I, *); where transposed, they change places."""
    if transposed:
        g, x = x, g
    r = g.dim() - 3
    if any(padding):  # to pad by nothing would be a copy
        x = torch.constant_pad_nd(x, [p for p in reversed(_of_rank(padding, r)) for _ in range(2)])
    for i, (s, d) in enumerate(zip(_of_rank(stride, r), _of_rank(dilation, r), strict=True)):
        x = x.unfold(3 + i, d * (filters[2 + i] - 1) + 1, s)[..., ::d]
        x = x.narrow(3 + i, 0, g.shape[3 + i])
    met = x.permute(0, 2, *range(3 + r, 3 + 2 * r), 1, *range(3, 3 + r))
    met = met.reshape(len(x) * groups, prod(filters[1:]), -1)  # (B*g, I*kernel, N*places)
    g = g.movedim(1, 2).reshape(len(g) * groups, filters[0] // groups, -1)
    return torch.bmm(g, met.mT).view(len(x), *filters)


def _of_rank(numbers: Sequence[int], rank: int) -> Sequence[int]:
    """Torch takes one number for all dims."""
    return numbers if len(numbers) == rank else [*numbers] * rank


@by_front
def _mkldnn(size, x, w, bias, padding, stride, dilation, groups):
    return convolution(
        size, x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups
    )


register(
    {
        aten.convolution.default: by_front(convolution),
        aten._convolution.default: by_front(convolution),
        aten.convolution_backward.default: by_front(_convolution_backward),
        aten.mkldnn_convolution.default: _mkldnn,
    }
)


# --- kernels by name, each a convolution with some of its arguments -------------------------------


def _named(*extra: str, depthwise: bool = False):
    """(x, w, kernel_size, bias, stride, padding, *extra)."""

    def rule(size, x, w, kernel, bias=None, stride=None, padding=None, *rest):
        ones, zeros = [1] * len(kernel), [0] * len(kernel)
        more = dict(zip(extra, rest, strict=False))
        dilation, output_padding = more.get("dilation", ones), more.get("output_padding", zeros)
        groups = (x.v.shape[2] if isinstance(x, Stack) else x.shape[1]) if depthwise else 1
        how = (stride or ones, padding or zeros, dilation, "output_padding" in extra)
        return convolution(size, x, w, bias, *how, output_padding, groups)

    return by_front(rule)


@by_front
def _slow_backward(size, g, x, w, _kernel, stride, padding, mask):
    how = (stride, padding, [1, 1], False, [0, 0], 1, mask)
    return _convolution_backward(size, g, x, w, None, *how)


register(
    {
        aten._slow_conv2d_backward.output_mask: _slow_backward,
        aten._slow_conv2d_forward.default: _named(),
        aten.slow_conv3d_forward.default: _named(),
        aten.slow_conv_dilated2d.default: _named("dilation"),
        aten.slow_conv_dilated3d.default: _named("dilation"),
        aten._conv_depthwise2d.default: _named("dilation", depthwise=True),
        aten.conv_depthwise3d.default: _named("dilation", depthwise=True),
        aten.slow_conv_transpose2d.default: _named("output_padding", "dilation"),
        aten.slow_conv_transpose3d.default: _named("output_padding", "dilation"),
    }
)


@by_front
def _conv_tbc(size, x, w, bias, pad=0):
    """(T, N, C) with filters (K, C, O) -> (T', N, O)."""
    x = Stack(x.v.permute(0, 2, 3, 1)) if isinstance(x, Stack) else x.permute(1, 2, 0)
    w = Stack(w.v.permute(0, 3, 2, 1)) if isinstance(w, Stack) else w.permute(2, 1, 0)
    y = convolution(size, x, w, bias, [1], [pad], [1], False, [0], 1)
    return y.permute(0, 3, 1, 2)


register({aten.conv_tbc.default: _conv_tbc})
