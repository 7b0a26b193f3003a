"""An index that an example's own tensor does not have is an error, as it is in the loop.

In a stack the place behind an example's last entry belongs to the next example, so an unchecked
index reads, or writes, what is another example's.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import forall

B, N = 3, 4
aten = torch.ops.aten


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 7 + 0.1


class Case(NamedTuple):
    """A function of a tensor and of indices, each of an example's shape; indices are below n."""

    shape: tuple[int, ...]
    places: tuple[int, ...]
    call: Callable[[Tensor, Tensor], Any]
    n: int = N
    moves: bool = True  # whether there is a derivative in the first argument


FIRST = torch.tensor([0])
BEGIN = torch.tensor([0, 1])
ROWS, COLUMNS = numbers(3, 2), numbers(2, 3)


def in_place(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def call(x: Tensor, i: Tensor) -> Tensor:
        x = x.clone()
        write(x, i)
        return x

    return call


def bags(mode: str, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, i: F.embedding_bag(i, x, BEGIN, mode=mode, **options)


CASES = {
    "embedding": Case((N, 2), (3,), lambda x, i: F.embedding(i, x)),
    "embedding of one": Case((N, 2), (), lambda x, i: F.embedding(i, x)),
    "embedding of rank 2": Case((N, 2), (2, 2), lambda x, i: F.embedding(i, x)),
    "embedding, int32": Case((N, 2), (3,), lambda x, i: F.embedding(i.int(), x)),
    "embedding, padding": Case((N, 2), (3,), lambda x, i: F.embedding(i, x, padding_idx=1)),
    "embedding, last is padding": Case((N, 2), (3,), lambda x, i: F.embedding(i, x, -1)),
    "embedding, by frequency": Case(
        (N, 2), (3,), lambda x, i: F.embedding(i, x, scale_grad_by_freq=True)
    ),
    "embedding, norm": Case(
        (N, 2), (3,), lambda x, i: F.embedding(i, x.clone(), max_norm=1.0), N, False
    ),
    "embedding_dense_backward": Case(
        (3, 2), (3,), lambda g, i: aten.embedding_dense_backward(g, i, N, -1, False), N, False
    ),
    "embedding_renorm": Case(
        (N, 2), (2,), lambda x, i: aten.embedding_renorm(x, i % N - 2, 0.5, 2.0), N, False
    ),
    "sum of bags": Case((N, 2), (3,), bags("sum")),
    "mean of bags": Case((N, 2), (3,), bags("mean")),
    "max of bags": Case((N, 2), (3,), bags("max")),
    "sum of bags, padding": Case((N, 2), (3,), bags("sum", padding_idx=1)),
    "mean of bags, padding": Case((N, 2), (3,), bags("mean", padding_idx=1)),
    "max of bags, padding": Case((N, 2), (3,), bags("max", padding_idx=1)),
    "bags of rank 2": Case((N, 2), (2, 3), lambda x, i: F.embedding_bag(i, x)),
    "bags, int32": Case((N, 2), (3,), lambda x, i: F.embedding_bag(i.int(), x, BEGIN.int())),
    "bags, weights": Case(
        (N, 2),
        (3,),
        lambda x, i: F.embedding_bag(i, x, BEGIN, mode="sum", per_sample_weights=x.flatten()[:3]),
        N,
        False,
    ),
    "first offset": Case((N, 2), (2,), lambda x, i: F.embedding_bag(torch.arange(3), x, i), 3),
    "offset": Case(
        (N, 2), (1,), lambda x, i: F.embedding_bag(torch.arange(3), x, torch.cat([FIRST, i]))
    ),
    "last offset": Case(
        (N, 2),
        (1,),
        lambda x, i: F.embedding_bag(
            torch.arange(3), x, torch.cat([FIRST, i]), include_last_offset=True
        ),
    ),
    "index_select": Case((N, 2), (3,), lambda x, i: x.index_select(0, i)),
    "index_select of columns": Case((2, N), (3,), lambda x, i: x.index_select(1, i)),
    "index_select, int32": Case((N, 2), (3,), lambda x, i: x.index_select(0, i.int())),
    "gather": Case((N, 2), (3, 2), lambda x, i: x.gather(0, i)),
    "gather in rows": Case((2, N), (2, 3), lambda x, i: x.gather(1, i)),
    "gather of a number": Case((), (), lambda x, i: x.gather(0, i), 1),
    "take": Case((2, 2), (3,), lambda x, i: x.take(i)),
    "take_along_dim": Case((N, 2), (3, 2), lambda x, i: x.take_along_dim(i, 0)),
    "take_along_dim of all": Case((2, 2), (3,), lambda x, i: x.take_along_dim(i)),
    "x[i]": Case((N, 2), (3,), lambda x, i: x[i]),
    "x[number]": Case((N, 2), (), lambda x, i: x[i]),
    "x[:, i]": Case((2, N), (3,), lambda x, i: x[:, i]),
    "x[i, i]": Case((N, N), (3,), lambda x, i: x[i, i]),
    "x[i, :, i]": Case((N, 2, N), (3,), lambda x, i: x[i, :, i]),
    "x[-i - 1]": Case((N, 2), (3,), lambda x, i: x[-i - 1]),
    "x[i.item()]": Case((N, 2), (), lambda x, i: x[i.item()]),
    "x[i, mask]": Case((N, 3), (2,), lambda x, i: x[i, torch.tensor([True, False, True])]),
    "narrow": Case((N, 2), (), lambda x, i: x.narrow(0, i, 2)),
    "index_fill": Case((N, 2), (2,), lambda x, i: x.index_fill(0, i, 5.0)),
    "index_fill_": Case((2, N), (2,), in_place(lambda x, i: x.index_fill_(1, i, 5.0))),
    "index_add": Case((N, 2), (3,), lambda x, i: x.index_add(0, i, ROWS)),
    "index_add of columns": Case((2, N), (3,), lambda x, i: x.index_add(1, i, COLUMNS, alpha=2)),
    "index_add_": Case((N, 2), (3,), in_place(lambda x, i: x.index_add_(0, i, ROWS))),
    "index_add of rows": Case((3, 2), (3,), lambda x, i: torch.zeros(N, 2).index_add(0, i, x)),
    "index_copy": Case((N, 2), (3,), lambda x, i: x.index_copy(0, i, ROWS)),
    "index_copy_": Case((N, 2), (3,), in_place(lambda x, i: x.index_copy_(0, i, ROWS))),
    "index_reduce": Case((N, 2), (3,), lambda x, i: x.index_reduce(0, i, ROWS, "amax"), N, False),
    "index_put": Case((N, 2), (3,), lambda x, i: x.index_put((i,), torch.tensor(1.0))),
    "index_put that adds": Case((N, 2), (3,), lambda x, i: x.index_put((i,), ROWS, True)),
    "x[i] = number": Case((N, 2), (2,), in_place(lambda x, i: x.__setitem__(i, 7.0))),
    "x[number] = number": Case((N, 2), (), in_place(lambda x, i: x.__setitem__(i, 7.0))),
    "x[:, i] = number": Case(
        (2, N), (2,), in_place(lambda x, i: x.__setitem__((slice(None), i), 7.0))
    ),
    "put": Case((2, 2), (3,), lambda x, i: x.put(i, numbers(3))),
    "put that adds": Case((2, 2), (3,), lambda x, i: x.put(i, numbers(3), accumulate=True)),
    "put_": Case((2, 2), (3,), in_place(lambda x, i: x.put_(i, numbers(3)))),
    "scatter": Case((N, 2), (3, 2), lambda x, i: x.scatter(0, i, ROWS)),
    "scatter of a number": Case((N, 2), (3, 2), lambda x, i: x.scatter(0, i, 1.0)),
    "scatter_": Case((N, 2), (3, 2), in_place(lambda x, i: x.scatter_(0, i, ROWS))),
    "scatter that multiplies": Case(
        (N, 2), (3, 2), lambda x, i: x.scatter(0, i, ROWS, reduce="multiply"), N, False
    ),
    "scatter_add": Case((2, N), (2, 3), lambda x, i: x.scatter_add(1, i, COLUMNS)),
    "scatter_reduce": Case((N, 2), (3, 2), lambda x, i: x.scatter_reduce(0, i, ROWS, "mean")),
    "repeat_interleave": Case(
        (2, 2), (2,), lambda x, i: torch.cat([x, x]).repeat_interleave(torch.cat([i, 6 - i]), 0), 7
    ),
    "repeat_interleave of a size": Case(
        (3, 2), (2,), lambda x, i: x.repeat_interleave(torch.cat([FIRST, i]), 0, output_size=1), 1
    ),
    "bincount": Case((3,), (3,), lambda x, i: torch.bincount(i.clamp(max=3), x, 4), N, False),
    "nll_loss": Case((3, N), (3,), lambda x, i: F.nll_loss(x, i)),
    "nll_loss of one": Case((N,), (), lambda x, i: F.nll_loss(x, i)),
    "nll_loss, not reduced": Case((3, N), (3,), lambda x, i: F.nll_loss(x, i, reduction="none")),
    "nll_loss, weights": Case((3, N), (3,), lambda x, i: F.nll_loss(x, i, torch.ones(N))),
    "nll_loss, one is ignored": Case((3, N), (3,), lambda x, i: F.nll_loss(x, i, ignore_index=-1)),
    "nll_loss of images": Case((1, N, 2, 2), (1, 2, 2), lambda x, i: F.nll_loss(x, i)),
    "cross_entropy": Case((3, N), (3,), lambda x, i: F.cross_entropy(x, i)),
    "cross_entropy, smoothed": Case(
        (3, N), (3,), lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1)
    ),
    "multi_margin_loss": Case((3, N), (3,), lambda x, i: F.multi_margin_loss(x, i)),
    "multilabel_margin_loss": Case((N,), (N,), lambda x, i: F.multilabel_margin_loss(x, i)),
    "one_hot": Case((2,), (3,), lambda x, i: F.one_hot(i, N) + 0 * x.sum().long(), N, False),
    "one_hot of a shared tail": Case(
        (2,), (3,), lambda x, i: F.one_hot(torch.cat([i.clamp(max=2), 3 + FIRST])), N, False
    ),
    "segment_reduce": Case((4, 2), (2,), lambda x, i: torch.segment_reduce(x, "sum", lengths=i), 3),
    "max_unpool1d": Case((1, 3), (1, 3), lambda x, i: F.max_unpool1d(x, i, 2), 6),
    "max_unpool2d": Case((1, 2, 2), (1, 2, 2), lambda x, i: F.max_unpool2d(x, i, 2), 16),
    "max_unpool3d": Case((1, 1, 2, 2), (1, 1, 2, 2), lambda x, i: F.max_unpool3d(x, i, 2), 32),
    "searchsorted": Case(
        (N,), (N,), lambda x, i: torch.searchsorted(x, torch.tensor([0.2, 0.4]), sorter=i), N, False
    ),
    "quantile": Case((3,), (), lambda x, i: torch.quantile(x, i / 3.0)),
}


def settled(f: Callable, *args: Any) -> Any:
    """What f gives, or the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # of what torch deprecates
            return f(*args)
    except Exception as error:
        return error


def stacks(name: str, *in_dims: tuple) -> Iterator[tuple[Tensor, Tensor, tuple]]:
    """Arguments with indices of which one is out of range, or counted from the end."""
    rng, case = random.Random(name), CASES[name]
    n = case.n
    for dims in in_dims:
        for bad in (None, n, n + 1, 2 * n, -1, -n, -n - 1):
            x = numbers(*(() if dims[0] is None else (B,)), *case.shape)
            count = torch.Size(case.places).numel()
            i = (torch.arange(B * count) % n).reshape(B, *case.places)
            i = i[0] if dims[1] is None else i
            if bad is not None:
                i.view(-1)[rng.randrange(i.numel())] = bad
            yield x, i, dims


def failing(name: str, *in_dims: tuple) -> list[tuple[Tensor, Tensor, tuple]]:
    """Two of those with which the loop raises an error."""
    found = []
    for x, i, dims in stacks(name, *in_dims):
        want = settled(loop(CASES[name].call, dims), x, i)
        if isinstance(want, Exception) and "equal size" not in str(want):
            found.append((x, i, dims))
    return random.Random(name).sample(found, min(2, len(found)))


def loop(f: Callable, in_dims: tuple) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def of_all(*given: Tensor) -> list[Tensor]:
        outs = []
        for n in range(B):
            args = (t if d is None else t[n] for t, d in zip(given, in_dims, strict=True))
            outs.append(tree_leaves(f(*(t.clone() for t in args))))
        return [torch.stack(column) for column in zip(*outs, strict=True)]

    return of_all


def assert_same(got: Any, want: Any, *what: Any) -> None:
    if isinstance(want, Exception):
        assert isinstance(got, type(want)), (what, want, got)
        return
    assert not isinstance(got, Exception), (what, got)
    for a, b in zip(tree_leaves(got), want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{what}: {m}")


def gradient(f: Callable) -> Callable:
    def of_one(x: Tensor, i: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(f(x, i).square().sum(), x)[0]

    return of_one


MOVING = [name for name, case in CASES.items() if case.moves]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_vmap_of_an_index_out_of_range_raises_what_the_loop_raises(name):
    call = CASES[name].call
    for x, i, in_dims in stacks(name, (0, 0), (0, None), (None, 0)):
        want = settled(loop(call, in_dims), x, i)
        got = settled(forall.vmap(call, in_dims), x.clone(), i.clone())
        if isinstance(got, ValueError) and "differ in shape" in str(got):
            assert "equal size" in str(want)  # what torch.stack says of the loop's results
        else:
            assert_same(got, want, in_dims, i)


@pytest.mark.parametrize("name", MOVING)
def test_gradient_with_an_index_out_of_range_raises_what_the_loop_raises(name):
    call = CASES[name].call
    grad = forall.grad(lambda x, i: call(x, i).square().sum())
    for x, i, in_dims in failing(name, (0, 0)):
        want = settled(loop(gradient(call), in_dims), x, i)
        assert_same(settled(forall.vmap(grad, in_dims), x, i), want, in_dims, i)


@pytest.mark.parametrize("name", MOVING)
def test_tangent_with_an_index_out_of_range_raises_what_the_loop_raises(name):
    call = CASES[name].call

    def tangent(x: Tensor, i: Tensor) -> Any:
        return forall.jvp(lambda x: call(x, i), (x,), (torch.ones_like(x),))

    for x, i, in_dims in failing(name, (0, 0)):
        want = settled(loop(call, in_dims), x, i)
        assert_same(settled(forall.vmap(tangent, in_dims), x, i), want, in_dims, i)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_nested_vmap_of_an_index_out_of_range_raises_what_the_loop_raises(name):
    call = CASES[name].call
    for x, i, _ in failing(name, (0, 0)):
        want = settled(loop(call, (0, 0)), x, i)
        for inner, outer in (((None, 0), (0, None)), ((0, None), (None, 0))):
            # The tensors are the examples of one level, and the indices those of the other.
            f = forall.vmap(forall.vmap(call, inner), outer)
            assert_same(settled(f, x.clone(), i.clone()), want, inner, i)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_recorded_call_with_an_index_out_of_range_raises_what_the_loop_raises(name):
    call = CASES[name].call
    x, good, _ = next(stacks(name, (0, 0)))
    if isinstance(settled(forall.vmap(call), x, good), Exception):
        pytest.skip("an index of 0 is no good one")
    jitted = forall.jit(forall.vmap(call))
    settled(jitted, x, good)
    for _, i, _ in failing(name, (0, 0)):
        assert_same(settled(jitted, x, i), settled(loop(call, (0, 0)), x, i), i)
