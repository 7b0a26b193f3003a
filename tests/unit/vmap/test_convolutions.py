"""Per-example gradients of convolutions: both forms are the loop's, and so is what they share."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from forall import grad, hessian, vmap
from forall._vmap.rules import convolution
from oracle import difference, loop

CASES = {
    "1d": (F.conv1d, (2, 3, 9), (4, 3, 3), {}),
    "1d, strided and padded": (F.conv1d, (2, 3, 9), (4, 3, 3), {"stride": 2, "padding": 2}),
    "2d": (F.conv2d, (2, 3, 7, 6), (4, 3, 3, 2), {}),
    "2d, one place": (F.conv2d, (1, 2, 3, 2), (4, 2, 3, 2), {}),
    "2d, dilated": (F.conv2d, (1, 2, 9, 8), (4, 2, 3, 2), {"dilation": (2, 3), "padding": (1, 2)}),
    "2d, groups": (F.conv2d, (2, 4, 6, 6), (6, 2, 3, 3), {"groups": 2, "stride": (2, 1)}),
    "2d, 1x1": (F.conv2d, (3, 4, 5, 5), (2, 4, 1, 1), {}),
    "2d, depthwise": (F.conv2d, (1, 4, 5, 5), (4, 1, 3, 3), {"groups": 4, "padding": "same"}),
    "2d, no image": (F.conv2d, (0, 2, 5, 5), (3, 2, 3, 3), {}),
    "3d": (F.conv3d, (2, 2, 4, 5, 4), (3, 2, 2, 3, 2), {"stride": (1, 2, 1), "padding": 1}),
    "1d transposed": (F.conv_transpose1d, (2, 3, 5), (3, 4, 3), {"stride": 2}),
    "2d transposed": (
        F.conv_transpose2d,
        (2, 4, 4, 3),
        (4, 3, 3, 2),
        {"groups": 2, "stride": 3, "padding": 1, "dilation": 2, "output_padding": 1},
    ),
    "2d transposed, more output padding than stride": (
        F.conv_transpose2d,
        (1, 2, 3, 3),
        (2, 3, 2, 2),
        {"dilation": 3, "output_padding": 2},
    ),
}


@pytest.fixture(
    params=[
        convolution.weight_grad_by_groups,
        convolution.weight_grad_places_last,
        convolution.weight_grad_channels_last,
    ]
)
def form(request, monkeypatch):
    monkeypatch.setattr(convolution, "choose_weight_grad", lambda *_: request.param)


def _case(name):
    call, image, weight, how = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(3, *image, dtype=torch.float64)
    w = torch.randn(3, *weight, dtype=torch.float64)

    def f(w, x):
        return call(x, w, **how).sin().sum()

    return f, w, x


def _gradient(f):
    def plain(w, x):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(f(w, x), w)[0]

    return plain


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", CASES)
def test_weight_gradients(name):
    f, w, x = _case(name)
    for in_dims in ((None, 0), (0, 0), (0, None), (-1, 1)):
        args = [
            a[0] if d is None else a.movedim(0, d) for a, d in zip((w, x), in_dims, strict=True)
        ]
        truth = loop(_gradient(f), in_dims)(*args)
        assert difference(vmap(grad(f), in_dims)(*args), truth) is None
    for size in (0, 1):
        mine = vmap(grad(f), (None, 0))(w[0], x[:size])
        assert difference(mine, loop(_gradient(f), (None, 0))(w[0], x)[:size]) is None


@pytest.mark.usefixtures("form")
def test_nested_and_second_derivatives():
    f, w, x = _case("2d, groups")
    xs = torch.stack([x, 2 * x], 2)
    mine = vmap(vmap(grad(f), (None, 0)), (None, 2))(w[0], xs)
    truth = loop(loop(_gradient(f), (None, 0)), (None, 2))(w[0], xs)
    assert difference(mine, truth) is None
    f, w, x = _case("2d, one place")
    mine = vmap(hessian(f), (None, 0))(w[0], x)
    truth = torch.stack(
        [torch.autograd.functional.hessian(lambda w, e=e: f(w, e), w[0]) for e in x]
    )
    assert difference(mine, truth) is None


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_of_one_place(rank, dtype):
    """A product of channels in the place of a convolution: values, and all derivatives."""
    call = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    torch.manual_seed(rank)
    given = (
        torch.randn(3, 2, 4, *(5, 6, 7)[:rank], dtype=dtype),
        torch.randn(3, 6, 4, *(1,) * rank, dtype=dtype),
        torch.randn(3, 6, dtype=dtype),
    )

    def f(x, w, b):
        return call(x, w, b).sin().sum()

    def plain(*args):
        args = [a.detach().clone().requires_grad_() for a in args]
        return torch.autograd.grad(f(*args), args)

    for in_dims in ((0, None, None), (0, 0, None), (0, None, 0), (None, 0, 0), (0, 0, 0)):
        args = [a if d == 0 else a[0] for a, d in zip(given, in_dims, strict=True)]
        assert difference(vmap(call, in_dims)(*args), loop(call, in_dims)(*args)) is None
        mine = vmap(grad(f, argnums=(0, 1, 2)), in_dims)(*args)
        assert difference(mine, loop(plain, in_dims)(*args)) is None
    no_image, no_places = given[0][:, :0], given[0][:, :, :, :0]
    truth = loop(call)(no_image, *given[1:])
    assert difference(vmap(call)(no_image, *given[1:]), truth) is None
    for way in (vmap(call), loop(call)):
        with pytest.raises(RuntimeError):
            way(no_places, *given[1:])
    nested = vmap(vmap(call, (0, None, None)), (1, 0, 0))
    xs = torch.stack([given[0], given[0] + 1])
    truth = loop(loop(call, (0, None, None)), (1, 0, 0))
    assert difference(nested(xs, *given[1:]), truth(xs, *given[1:])) is None


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("weight_dim", [None, 0])
@pytest.mark.parametrize(("bias", "bias_dim"), [((2, 1), 0), ((1,), None), ((2, 6, 1), 0)])
def test_a_bias_of_another_size_is_refused(kernel, weight_dim, bias, bias_dim):
    x, w = torch.randn(2, 1, 4, 5, 5), torch.randn(2, 6, 4, kernel, kernel)
    w = w if weight_dim == 0 else w[0]
    with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional with 6 elements"):
        vmap(F.conv2d, (0, weight_dim, bias_dim))(x, w, torch.randn(bias))


@pytest.mark.parametrize(
    ("filters", "image", "form"),
    [
        ((8, 1, 3, 3), 28, convolution.weight_grad_places_last),  # no blocks of channels
        ((10, 64, 3, 3), 8, convolution.weight_grad_channels_last),
        ((64, 64, 1, 1), 8, convolution.weight_grad_places_last),  # nothing is copied
        ((16, 8, 3, 3), 14, convolution.weight_grad_channels_last),  # the copy is short
        ((64, 64, 3, 3), 14, convolution.weight_grad_by_groups),
        ((32, 16, 3, 3), 32, convolution.weight_grad_by_groups),
    ],
)
def test_the_choice_is_by_what_was_measured(filters, image, form):
    x, g = (torch.empty(2, 1, n, image, image) for n in (filters[1], filters[0]))
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert convolution.choose_weight_grad(g, x, filters, *how) is form
    assert (
        convolution.choose_weight_grad(g.double(), x.double(), filters, *how)
        is not convolution.weight_grad_by_groups
    )
    assert (
        convolution.choose_weight_grad(g.half(), x.half(), filters, *how)
        is not convolution.weight_grad_channels_last
    )
