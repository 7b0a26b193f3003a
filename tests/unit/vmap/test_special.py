"""Bins, segments, quantisation and checks of values: vmap equals the loop."""

from __future__ import annotations

import pytest
import torch

from forall import grad, vmap
from forall._core.errors import DataDependentError
from oracle import check_vmap, difference, loop

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("limits", [(0, 0), (-1, 1)])
def test_histc(dim, limits):
    check_vmap(lambda x: torch.histc(x, 4, *limits), (X,), dim)
    check_vmap(lambda x: torch.histc(x.round(), 4, *limits), (X,), dim)  # entries on the edges


@pytest.mark.parametrize("density", [False, True])
def test_histogram(density):
    weight, edges = torch.rand(3, 4, 5), torch.randn(3, 6).sort(1)[0]
    check_vmap(lambda x: torch.histogram(x, 4, density=density), (X,), 1)
    check_vmap(lambda x: torch.histogram(x, 4, range=(-1.0, 1.0), density=density), (X,), 1)
    for in_dims in ((0, 0), (0, None), (None, 0)):
        args = [x if d == 0 else x[0] for x, d in zip((X, weight), in_dims, strict=True)]
        check_vmap(
            lambda x, w: torch.histogram(x, 4, weight=w, density=density), tuple(args), in_dims
        )
        args = [x if d == 0 else x[0] for x, d in zip((X, edges), in_dims, strict=True)]
        check_vmap(lambda x, e: torch.histogram(x, e, density=density), tuple(args), in_dims)


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("limits", [None, (0.0, 0.0), (2.0, 2.0)])
def test_histograms_of_nothing_and_of_an_empty_range(size, limits):
    x, points = X[:, :size, :1], X[:, :size, :2]
    check_vmap(lambda x: torch.histogram(x, 3, range=limits), (x,))
    limits = limits and limits * 2
    check_vmap(lambda x: torch.histogramdd(x, [3, 2], range=limits)[0], (points,))
    check_vmap(lambda x: tuple(torch.histogramdd(x, [3, 2], range=limits)[1]), (points,))


def test_histc_of_nothing():
    for limits in (0, 0), (1, 1), (0, 2):
        check_vmap(lambda x, limits=limits: torch.histc(x, 3, *limits), (X[:, :0],))


def test_bincount_of_one_length():
    i = torch.tensor([[0, 2, 1], [2, 2, 2], [1, 1, 2]])
    check_vmap(torch.bincount, (i,))
    check_vmap(lambda i: torch.bincount(i, minlength=5), (i[:, :2],), 1)
    check_vmap(torch.bincount, (i[0], torch.rand(3, 3)), (None, 0))
    check_vmap(torch.bincount, (i, torch.rand(3)), (0, None))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_bincount_of_more_than_fits_the_dtype(dtype):
    i = torch.arange(300).remainder(8).expand(300, 300).tril().to(dtype)
    check_vmap(lambda i: torch.bincount(i, minlength=8), (i,))
    most = torch.full((2, 3), torch.iinfo(dtype).max, dtype=dtype)
    check_vmap(torch.bincount, (most,))


def test_bincount_of_several_lengths_has_no_stack():
    x = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(DataDependentError, match="minlength"):
        vmap(torch.bincount, divergence="error")(x)
    with pytest.raises(ValueError, match="differ in shape"):
        vmap(torch.bincount)(x)
    check_vmap(lambda x: torch.bincount(x).max(), (x,))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segment_reduce_and_its_derivative(reduce):
    data = torch.rand(3, 5, 2, dtype=torch.float64)
    lengths = torch.tensor([[2, 3], [4, 1], [0, 5]])

    def f(data, lengths):
        return torch.segment_reduce(data, reduce, lengths=lengths, axis=0, initial=1)

    check_vmap(f, (data, lengths))
    check_vmap(f, (data[0], lengths), (None, 0))
    check_vmap(f, (data, lengths[0]), (0, None))

    def g(data):
        return f(data, lengths[0]).sin().sum()

    def plain(data):
        x = data.detach().requires_grad_()
        return torch.autograd.grad(g(x), x)[0]

    assert difference(vmap(grad(g))(data), loop(plain)(data)) is None


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, 0, 0), (None, 0, None), (0, 0, 0)])
def test_fake_quantize(in_dims):
    zero = torch.tensor([-2, 0, 2], dtype=torch.int32)
    scale = torch.tensor([0.1, 0.2, 0.3])
    args = (X, scale, zero)
    one = [a[0] if d is None else a.movedim(0, d) for a, d in zip(args, in_dims, strict=True)]
    check_vmap(
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, -8, 8), tuple(one), in_dims
    )
    many = [X, scale.unsqueeze(1).expand(3, 5) + 0.1, zero.unsqueeze(1).expand(3, 5)]
    many = [a[0] if d is None else a.movedim(0, d) for a, d in zip(many, in_dims, strict=True)]
    check_vmap(
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 1, -8, 8),
        tuple(many),
        in_dims,
    )


def test_one_answer_where_the_examples_agree():
    assert vmap(lambda x: x + torch.equal(x, x))(X).shape == X.shape
    assert vmap(lambda x: x + torch.allclose(x, x + 1))(X).equal(X)
    check_vmap(lambda x: x + torch.equal(x, X[0]), (X,))
    with pytest.raises(DataDependentError):
        vmap(lambda x: x + torch.equal(x, X[0]), divergence="error")(X)


def test_python_operators_in_place():
    def f(x, y):
        x = x.clone()
        x |= y
        x &= 3
        x ^= y
        x <<= 1
        x >>= y
        return x

    check_vmap(f, (torch.arange(12).reshape(3, 4), torch.arange(3)))


def test_in_place_views():
    def f(x):
        y = x.clone()
        z = y[1:]
        y.transpose_(0, 1).unsqueeze_(0)
        y.mul_(2)
        y.squeeze_(0).t_()
        z.add_(1)
        return y, z

    for dim in (0, 1, 2):
        check_vmap(f, (X,), dim)
    check_vmap(lambda x: (x.t_() + 1, torch.rot90(x)), (X,))
    check_vmap(lambda x: x.clone().resize_(2, 3), (X,))


def test_out_takes_the_size_of_the_result():
    def f(x):
        values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.max(x, 0, out=(values, places))
        return values, places, torch.sin(x, out=torch.empty(0))

    check_vmap(f, (X,))
    check_vmap(lambda x: torch.sin(torch.ones(2), out=torch.empty(0)) + x[0, 0], (X,))
    with pytest.raises(RuntimeError, match="would resize"):
        vmap(lambda x, out: torch.sin(x, out=out))(X, torch.empty(3, 0))
