"""Many images with one filter for all go through torch's convolution a piece at a time."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import forall
from draws import make_generator
from forall import grad, jvp, vmap
from forall._vmap import convolution_tiles
from oracle import loop, same

B, N, C, FILTERS = 6, 5, 16, 32  # examples, images, channels


class Counting(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def few_bytes(monkeypatch):
    """Pieces of about four images."""
    monkeypatch.setattr(convolution_tiles, "_ALL", 1 << 14)
    monkeypatch.setattr(convolution_tiles, "_PIECE", 1 << 14)


def given(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=make_generator(seed))


CALLS = {
    "1d": (partial(F.conv1d, padding=1), (C, 40), (FILTERS, C, 3)),
    "2d": (partial(F.conv2d, padding=1), (C, 8, 9), (FILTERS, C, 3, 3)),
    "3d": (F.conv3d, (C, 4, 5, 6), (FILTERS, C, 2, 2, 2)),
    "strided": (partial(F.conv2d, stride=2, dilation=2), (C, 12, 12), (FILTERS, C, 3, 3)),
    "stride of one number": (partial(torch.conv2d, stride=[2]), (C, 12, 12), (FILTERS, C, 3, 3)),
    "grouped": (partial(F.conv2d, groups=4), (C, 8, 8), (FILTERS, C // 4, 3, 3)),
    "transposed": (
        partial(F.conv_transpose2d, stride=2, output_padding=1),
        (C, 6, 6),
        (C, FILTERS, 3, 3),
    ),
    "transposed, grouped": (partial(F.conv_transpose2d, groups=2), (C, 6, 6), (C, FILTERS, 3, 3)),
    "more edge than inside": (partial(F.conv2d, padding=1), (C, 4, 4), (FILTERS, C, 4, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_equals_the_loop(name, few_bytes):
    call, image, filters = CALLS[name]
    x, w = given(B, N, *image), given(*filters, seed=1)

    def slope(x, w):
        return grad(lambda x: call(x, w).sin().sum())(x)

    for f, most in ((call, 1), (slope, 2)):
        with Counting() as seen:
            ours = vmap(f, in_dims=(0, None))(x, w)
        assert same(ours, loop(f, in_dims=(0, None))(x, w))
        assert seen.calls["convolution"] + seen.calls["convolution_backward"] > most


@pytest.mark.parametrize("bias", ["shared", "of each example"])
def test_a_bias(bias, few_bytes):
    x, w = given(B, N, C, 8, 8), given(FILTERS, C, 3, 3, seed=1)
    b, dims = (
        (given(FILTERS), (0, None, None)) if bias == "shared" else (given(B, FILTERS), (0, None, 0))
    )
    assert same(vmap(F.conv2d, dims)(x, w, b), loop(F.conv2d, dims)(x, w, b))


@pytest.mark.parametrize("channels_last", [False, True])
def test_layouts_are_as_of_one_call(channels_last, few_bytes, monkeypatch):
    x, w = given(B * N, C, 8, 8), given(FILTERS, C, 3, 3, seed=1)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x = x.unflatten(0, (B, N))
    in_pieces = vmap(F.conv2d, (0, None))(x, w)
    monkeypatch.setattr(convolution_tiles, "_ALL", 1 << 40)
    whole = vmap(F.conv2d, (0, None))(x, w)
    assert in_pieces.stride() == whole.stride()
    assert same(in_pieces, whole)


def test_an_image_for_each_piece(few_bytes, monkeypatch):
    monkeypatch.setattr(convolution_tiles, "_PIECE", 1)
    x, w = given(B, N, C, 8, 8), given(FILTERS, C, 3, 3, seed=1)
    with Counting() as seen:
        ours = vmap(F.conv2d, (0, None))(x, w)
    assert same(ours, loop(F.conv2d, (0, None))(x, w))
    assert seen.calls["convolution"] == B * N


@pytest.mark.parametrize(("examples", "images"), [(0, N), (B, 0)])
def test_no_images(examples, images, few_bytes):
    x, w = given(examples, images, C, 8, 8), given(FILTERS, C, 3, 3, seed=1)
    assert vmap(F.conv2d, (0, None))(x, w).shape == (examples, images, FILTERS, 6, 6)


def test_a_derivative_outside(few_bytes):
    """Its graph has one node for all pieces."""
    x = given(B, N, C, 8, 8).requires_grad_()
    w = given(FILTERS, C, 3, 3, seed=1).requires_grad_()
    with Counting() as seen:
        ours = torch.autograd.grad(vmap(F.conv2d, (0, None))(x, w).sin().sum(), (x, w))
    assert same(ours, torch.autograd.grad(F.conv2d(x.flatten(0, 1), w).sin().sum(), (x, w)))
    assert seen.calls["convolution"] > 1
    assert 1 < seen.calls["convolution_backward"] <= seen.calls["convolution"] + 1


@pytest.mark.parametrize("outer", [grad, vmap])
def test_inside_other_transforms(outer, few_bytes):
    x, w = given(3, B, N, C, 8, 8), given(FILTERS, C, 3, 3, seed=1)
    inner = vmap(lambda x: F.conv2d(x, w).sin().sum())
    if outer is grad:
        assert same(
            grad(lambda x: inner(x).sum())(x[0]),
            loop(grad(lambda x: F.conv2d(x, w).sin().sum()))(x[0]),
        )
    else:
        assert same(vmap(inner)(x), loop(loop(lambda x: F.conv2d(x, w).sin().sum()))(x))


def test_tangents(few_bytes):
    x, t, w = given(B, N, C, 8, 8), given(B, N, C, 8, 8, seed=2), given(FILTERS, C, 3, 3, seed=1)

    def push(x, t):
        return jvp(lambda x: F.conv2d(x, w).sin(), (x,), (t,))

    assert same(vmap(push)(x, t), loop(push)(x, t))
    mapped = vmap(lambda x: F.conv2d(x, w).sin())
    assert same(jvp(mapped, (x,), (t,)), loop(push)(x, t))


def test_at_its_own_size():
    x, w = given(16, 4, 16, 32, 32), given(32, 16, 3, 3, seed=1)
    call = partial(F.conv2d, padding=1)
    with Counting() as seen:
        ours = vmap(call, (0, None))(x, w)
    assert seen.calls["convolution"] == 3
    assert same(ours, call(x.flatten(0, 1), w).unflatten(0, (16, 4)))


def test_recorded(few_bytes):
    x, w = given(B, N, C, 8, 8), given(FILTERS, C, 3, 3, seed=1)
    run = forall.jit(vmap(F.conv2d, (0, None)))
    for seed in range(4):
        x = given(B, N, C, 8, 8, seed=seed)
        assert same(run(x, w), loop(F.conv2d, (0, None))(x, w))
