"""Rules of convolution and its backward: unbatched operands stay unbatched.

NOTE [where the examples go]
    Shapes of one example: x (N, g*I, *), y (N, g*O, *), w (g*O, I, *), or (g*I, O, *) transposed.

    images    x is batched             B is folded into N            x (B*N, g*I)   y (B*N, g*O)
    filters   w is batched             B is folded into each O       w (g*B*O, I)   y (N, g*B*O)
    groups    both are batched         each example has own groups   x (N, B*g*I)   y (N, B*g*O)

    The derivative with respect to w uses the same folds: batched images and cotangents give
    per-example weight gradients by groups. The gradient may also be one matrix product per example,
    of the cotangents and the unfolded images: NOTE [products or groups].
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.private_api import PLAIN
from forall._core.axes import fold_axis, unfold_axis
from forall._vmap.convolution_tiles import can_run_in_pieces, run_in_pieces
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    get_example_shape,
    get_value,
    make_stack_handler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten
Tensor = torch.Tensor


class BatchFold:
    """Fold the batch axis into N. Batched operands come as (B, *S), unbatched ones as they are."""

    def __init__(self, size: int, groups: int, transposed: bool) -> None:
        self.size, self.groups, self.transposed = size, groups, transposed

    def x(self, v: Tensor) -> Tensor:
        return v.flatten(0, 1)

    def x_back(self, v: Tensor) -> Tensor:
        return v.unflatten(0, (self.size, -1))

    def w(self, v: Tensor) -> Tensor:
        return v

    y, y_back = x, x_back


class FilterFold(BatchFold):
    """Fold the batch axis into the output channels of each group."""

    def x(self, v: Tensor) -> Tensor:
        return v

    def y(self, v: Tensor) -> Tensor:
        v = v.unflatten(2, (self.groups, -1))  # (B, N, g, O, *)
        return v.movedim(0, 2).flatten(1, 3)

    def y_back(self, v: Tensor) -> Tensor:
        v = v.unflatten(1, (self.groups, self.size, -1))  # (N, g, B, O, *)
        return v.movedim(2, 0).flatten(2, 3)

    def w(self, v: Tensor) -> Tensor:
        if self.transposed:
            return fold_axis(v, 1)
        return v.unflatten(1, (self.groups, -1)).movedim(0, 1).flatten(0, 2)

    def w_back(self, v: Tensor) -> Tensor:
        if self.transposed:
            return unfold_axis(v, 1, self.size)
        return v.unflatten(0, (self.groups, self.size, -1)).movedim(1, 0).flatten(1, 2)


class GroupFold(BatchFold):
    """Fold the batch axis into the groups: each example gets groups of its own."""

    def __init__(self, size: int, groups: int, transposed: bool) -> None:
        super().__init__(size, size * groups, transposed)

    def x(self, v: Tensor) -> Tensor:
        return fold_axis(v, 1)

    def x_back(self, v: Tensor) -> Tensor:
        return unfold_axis(v, 1, self.size)

    def w(self, v: Tensor) -> Tensor:
        return v.flatten(0, 1)

    def w_back(self, v: Tensor) -> Tensor:
        return v.unflatten(0, (self.size, -1))

    y, y_back = x, x_back


def _count_entries(x: Tensor, w: Tensor, how: Sequence[Any]) -> float:
    """Estimate how many entries the result has for each of the images (N, *), ignoring edges."""
    stride, transposed, groups = how[0], how[3], how[5]
    steps = prod(_repeat_to_rank(stride, x.dim() - 2))
    here, there = w.shape[1] * groups, w.shape[0]
    return prod(x.shape[1:]) * (here / there * steps if transposed else there / here / steps)


def convolution(size, x, w, bias, *how):
    """Return the batched convolution (B, N, O, *).

    ``how`` is (stride, padding, dilation, transposed, output_padding, groups[, *flags]).
    """
    geometry, groups = how[:5], how[5]
    if not (isinstance(x, MappedStack) or isinstance(w, MappedStack)):
        y = torch.convolution(x, w, None, *geometry, groups).unsqueeze(0)
        return y + _per_channel(bias.v, y)
    place = (
        (GroupFold if isinstance(w, MappedStack) else BatchFold)
        if isinstance(x, MappedStack)
        else FilterFold
    )
    within = bias if place is BatchFold and not isinstance(bias, MappedStack) else None
    if isinstance(x, MappedStack) and _is_product(x.v, w, *how):
        y = _multiply_channels(x.v, w, within)
    else:
        p = place(size, groups, transposed=geometry[3])
        x, w = p.x(get_value(x)), p.w(get_value(w))

        def run_kernel(v: Tensor) -> Tensor:
            return torch.convolution(v, w, within, *geometry, p.groups)

        in_pieces = place is BatchFold and can_run_in_pieces(x, w)
        y = p.y_back(
            run_in_pieces(run_kernel, x, _count_entries(x, w, how)) if in_pieces else run_kernel(x)
        )
    if bias is not None and get_example_shape(bias) != y.shape[2:3]:  # here it would be broadcast
        raise RuntimeError(
            f"a bias of shape {tuple(get_example_shape(bias))} for {y.shape[2]} filters"
        )
    if bias is None or within is not None:
        return y
    return y + _per_channel(expand_stack(bias, size), y)


def _per_channel(bias: Tensor, y: Tensor) -> Tensor:
    """Reshape a bias (B, O) to (B, 1, O, 1..), so that it broadcasts to y: (B, N, O, *)."""
    return bias.reshape(bias.shape[0], 1, -1, *(1,) * (y.dim() - 3))


def _convolution_backward(size, g, x, w, _bias_sizes, *how):
    for_x, for_w, for_bias = how[6]
    g, how = expand_stack(g, size), how[:6]
    gx = gw = None
    if for_x and _is_product(g, w, *how):
        gx = _multiply_channels(g, w, None, back=True)
    elif for_x:
        place = GroupFold if isinstance(w, MappedStack) else BatchFold
        # Kernels use the shape alone of this operand. An expanded one would be copied.
        gx = _convolve_backward(
            place, g, g.new_empty((size, *get_example_shape(x))), get_value(w), 0, how
        )
    if for_w and isinstance(x, MappedStack):
        gw = choose_weight_grad(g, x.v, get_example_shape(w), *how)(
            g, x.v, get_example_shape(w), *how
        )
    elif for_w:
        gw = _convolve_backward(
            FilterFold, g, x, g.new_empty((size, *get_example_shape(w))), 1, how
        )
    return gx, gw, g.sum([1, *range(3, g.dim())]) if for_bias else None


def _convolve_backward(place, g, x, w, which, how):
    """Return the derivative with respect to x (``which=0``) or w (1); only its shape is used."""
    p = place(len(g), how[5], transposed=how[3])
    x, w = p.x(x), p.w(w)

    def run_kernel(g):
        given = (g, x if which else x[: len(g)], w, None, *how[:5], p.groups)
        return aten.convolution_backward.default(*given, [which == 0, which == 1, False])[which]

    if which:
        return p.w_back(run_kernel(p.y(g)))
    g = p.y(g)
    in_pieces = place is BatchFold and can_run_in_pieces(g, w)
    return p.x_back(run_in_pieces(run_kernel, g, prod(x.shape[1:])) if in_pieces else run_kernel(g))


# --- filters of one entry -------------------------------------------------------------------------

# NOTE [1x1]
#     A filter with one spatial entry reads each pixel once: the convolution is a matrix product
#     over channels. Torch's convolution packs channels in blocks, and back. On CPU the product
#     takes 0.36 of its time in float32, in the mean over 500 shapes; its derivative in x 0.33, and
#     with weights of each example 0.27. In float64, which has no fast convolution, it is 0.93,
#     0.52 and 0.35.


def _is_product(v: Tensor, w: MappedStack | Tensor, *how: Any) -> bool:
    """True if the convolution of images or cotangents (B, N, ..) is a product with the filters."""
    if prod(get_example_shape(w)[2:]) != 1:
        return False
    (stride, padding, _, transposed, _, groups), w = how[:6], get_value(w)
    if transposed or groups != 1 or any(padding) or any(s != 1 for s in stride):
        return False
    # An outer level runs its own rule, and might have to copy operands that are expanded here.
    plain = type(v) is Tensor and type(w) in PLAIN and v.is_cpu
    return plain and v.dtype == w.dtype and v.dtype in _MEASURED and bool(v.numel() and w.numel())


_MEASURED = (torch.float32, torch.float64)


def _multiply_channels(
    v: Tensor, w: MappedStack | Tensor, bias: Tensor | None, back: bool = False
) -> Tensor:
    """Multiply channels: (B, N, I, *) -> (B, N, O, *), or from O to I with ``back``.

    ``bias`` is (O,) and unbatched.
    """
    m = w.v.flatten(2).unsqueeze(1) if isinstance(w, MappedStack) else w.flatten(1)  # (.., O, I)
    m = m.mT if back else m
    m = m.expand(*v.shape[:2], *m.shape[-2:]).flatten(0, 1)
    x = v.flatten(0, 1).flatten(2)
    y = torch.bmm(m, x) if bias is None else torch.baddbmm(bias.unsqueeze(1), m, x)
    return y.view(*v.shape[:2], -1, *v.shape[3:])


# --- per-example weights --------------------------------------------------------------------------

# NOTE [products or groups]
#     A grouped convolution is fast if its kernel finds blocks of channels and the images are
#     large. A product needs a copy of the images (im2col), of each entry once per filter entry.
#     The copy is fast if its runs are long: a row of the result, places last, or a row of the
#     filter with all channels, channels last. With channels last the product itself is faster too,
#     but each weight gradient then has to be copied to be contiguous (`g.view(B, -1)` takes their
#     norms), which is slow if a weight is larger than the cotangents. The choice was measured on
#     CPU (benchmarks/weight_gradients.py): it costs 21 % more than the best of the three, in the
#     mean over 421 shapes; groups alone 61 %, places last 50 %, channels last 76 %. Float64 has no
#     fast convolution. On other devices than CPU nothing was measured, and groups are used.
_BLOCK = 8  # channels
_LONG = 100_000  # entries of one example's copy


def choose_weight_grad(
    g: Tensor, x: Tensor, filters: Sequence[int], *how: Any
) -> Callable[..., Tensor]:
    """Return the function of the three below that is expected to be the fastest.

    ``filters`` (g*O, I, *) is the shape of one example's weight, ``how`` is as in `convolution`.
    """
    places, groups = (x if how[3] else g).shape[3:], how[5]
    blocks = x.dtype is not torch.float64 and not (
        filters[0] // groups % _BLOCK or filters[1] % _BLOCK
    )
    copied = x.shape[1] * prod(places) * groups * prod(filters[1:])
    if not x.is_cpu or (blocks and copied >= _LONG):
        return weight_grad_by_groups
    # 1x1 needs no copy at all, and float16 has no fast product of matrices that lie in rows.
    if prod(filters[2:]) == 1 or x.dtype is torch.float16:
        return weight_grad_places_last
    is_run_long = filters[-1] * filters[1] >= places[-1]
    is_weight_small = filters[0] // groups <= x.shape[1] * prod(places)
    return weight_grad_channels_last if is_run_long and is_weight_small else weight_grad_places_last


def weight_grad_by_groups(g, x, filters, *how):
    """Compute weight gradients with a grouped convolution, each example in groups of its own.

    (B, N, g*O, *), (B, N, g*I, *) -> (B, g*O, I, *).
    """
    return _convolve_backward(GroupFold, g, x, x.new_empty((len(x), *filters)), 1, how)


def weight_grad_places_last(g, x, filters, *how):
    """Compute weight gradients as one product per example of cotangents and unfolded images."""
    g, x, r = _prepare_operands(
        g, x, 4, filters, *how
    )  # (B*g, O, N*places), (B, N, g, I, *, *kernel)
    met = x.permute(0, 2, 3, *range(4 + r, 4 + 2 * r), 1, *range(4, 4 + r))
    met = met.reshape(len(g), prod(filters[1:]), -1)
    return torch.bmm(g, met.mT).view(len(x), *filters)


def weight_grad_channels_last(g, x, filters, *how):
    """Compute weight gradients as products, with the unfolded images in channels-last order."""
    g, x, r = _prepare_operands(
        g, x, 3, filters, *how
    )  # (B*g, O, N*places), (B, N, g, *, I, *kernel)
    met = x.permute(0, 2, 1, *range(3, 3 + r), *range(4 + r, 4 + 2 * r), 3 + r)
    met = met.reshape(len(g), -1, prod(filters[1:]))  # (B*g, N*places, kernel*I)
    out = torch.bmm(g, met).view(len(x), filters[0], -1, filters[1])
    return out.mT.contiguous().view(len(x), *filters)


def _prepare_operands(g, x, dim, filters, stride, padding, dilation, transposed, _, groups):
    """Return cotangents as rows, the unfolded images, and the number of spatial dims.

    The windows' positions begin at ``dim`` of the unfolded images. If the convolution is
    transposed, cotangents and images are swapped.
    """
    if transposed:
        g, x = x, g
    r = g.dim() - 3
    if any(padding):  # to pad by nothing would be a copy
        x = torch.constant_pad_nd(
            x, [p for p in reversed(_repeat_to_rank(padding, r)) for _ in range(2)]
        )
    x = x.unflatten(2, (groups, -1))
    if dim == 3:
        x = x.movedim(3, -1).contiguous()
    met = _unfold_windows(
        x, dim, g.shape[3:], filters[2:], _repeat_to_rank(stride, r), _repeat_to_rank(dilation, r)
    )
    g = g.movedim(1, 2).reshape(len(g) * groups, filters[0] // groups, -1)
    return g, met, r


def _unfold_windows(x, dim, places, kernel, stride, dilation):
    """Unfold the spatial dims from ``dim`` on into window positions, then dims of the filter."""
    for i, (n, k, s, d) in enumerate(zip(places, kernel, stride, dilation, strict=True), dim):
        x = x.unfold(i, d * (k - 1) + 1, s)
        if d > 1:
            x = x[..., ::d]
        if x.shape[i] > n:
            x = x.narrow(i, 0, n)
    return x


def _repeat_to_rank(numbers: Sequence[int], rank: int) -> Sequence[int]:
    """Return one number per dim: torch also takes one number for all dims."""
    return numbers if len(numbers) == rank else [*numbers] * rank


@make_stack_handler
def _mkldnn(size, x, w, bias, padding, stride, dilation, groups):
    return convolution(
        size, x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups
    )


register_rows(
    {
        aten.convolution.default: make_stack_handler(convolution),
        aten._convolution.default: make_stack_handler(convolution),
        aten.convolution_backward.default: make_stack_handler(_convolution_backward),
        aten.mkldnn_convolution.default: _mkldnn,
    }
)


# --- kernels by name, each a convolution with some of its arguments -------------------------------


def _make_conv_handler(*extra: str, depthwise: bool = False):
    """Return the rule of a kernel ``(x, w, kernel_size, bias, stride, padding, *extra)``."""

    def rule(size, x, w, kernel, bias=None, stride=None, padding=None, *rest):
        ones, zeros = [1] * len(kernel), [0] * len(kernel)
        more = dict(zip(extra, rest, strict=False))
        dilation, output_padding = more.get("dilation", ones), more.get("output_padding", zeros)
        groups = (x.v.shape[2] if isinstance(x, MappedStack) else x.shape[1]) if depthwise else 1
        how = (stride or ones, padding or zeros, dilation, "output_padding" in extra)
        return convolution(size, x, w, bias, *how, output_padding, groups)

    return make_stack_handler(rule)


@make_stack_handler
def _slow_backward(size, g, x, w, _kernel, stride, padding, mask):
    how = (stride, padding, [1, 1], False, [0, 0], 1, mask)
    return _convolution_backward(size, g, x, w, None, *how)


register_rows(
    {
        aten._slow_conv2d_backward.output_mask: _slow_backward,
        aten._slow_conv2d_forward.default: _make_conv_handler(),
        aten.slow_conv3d_forward.default: _make_conv_handler(),
        aten.slow_conv_dilated2d.default: _make_conv_handler("dilation"),
        aten.slow_conv_dilated3d.default: _make_conv_handler("dilation"),
        aten._conv_depthwise2d.default: _make_conv_handler("dilation", depthwise=True),
        aten.conv_depthwise3d.default: _make_conv_handler("dilation", depthwise=True),
        aten.slow_conv_transpose2d.default: _make_conv_handler("output_padding", "dilation"),
        aten.slow_conv_transpose3d.default: _make_conv_handler("output_padding", "dilation"),
    }
)


@make_stack_handler
def _conv_tbc(size, x, w, bias, pad=0):
    """Convolve (T, N, C) with filters (K, C, O) to (T', N, O)."""
    x = MappedStack(x.v.permute(0, 2, 3, 1)) if isinstance(x, MappedStack) else x.permute(1, 2, 0)
    w = MappedStack(w.v.permute(0, 3, 2, 1)) if isinstance(w, MappedStack) else w.permute(2, 1, 0)
    y = convolution(size, x, w, bias, [1], [pad], [1], False, [0], 1)
    return y.permute(0, 3, 1, 2)


register_rows({aten.conv_tbc.default: _conv_tbc})
