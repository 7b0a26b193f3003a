"""Axis arithmetic against plain torch: every rank up to 4, every axis, every dim."""

from itertools import combinations, product

import pytest
import torch

from forall._core import axes

RANKS = range(5)
B = 7


def example(rank: int) -> torch.Tensor:
    """Sizes that are all different, so that a wrong dim shows."""
    return torch.zeros(tuple(range(2, 2 + rank)))


def stack(rank: int, axis: int) -> torch.Tensor:
    """(.., B, ..) of examples of this rank."""
    x = example(rank)
    return x.unsqueeze(axis).expand(*x.shape[:axis], B, *x.shape[axis:])


def answered(rank: int) -> range:
    """The dims that torch takes for a tensor of this rank; rank 0 answers to 0 and -1."""
    span = max(rank, 1)
    return range(-span, span)


@pytest.mark.parametrize("rank", RANKS)
def test_wrap_dim_takes_what_torch_takes(rank):
    x = example(rank)
    for dim in range(-7, 8):
        if dim not in answered(rank):
            with pytest.raises(IndexError) as ours:
                axes.wrap_dim(dim, rank)
            with pytest.raises(IndexError) as torchs:
                x.sum(dim)
            assert str(ours.value) == str(torchs.value)
            continue
        wrapped = axes.wrap_dim(dim, rank)
        assert 0 <= wrapped < max(rank, 1)
        assert x.sum(wrapped).shape == x.sum(dim).shape


@pytest.mark.parametrize("rank", range(1, 5))
def test_stacked_dim_is_the_same_dim_of_every_example(rank):
    xs = stack(rank, 0)
    for dim in answered(rank):
        assert xs.sum(axes.stacked_dim(dim, rank)).shape[1:] == example(rank).sum(dim).shape


@pytest.mark.parametrize("rank", range(1, 5))
def test_stacked_dims_are_the_same_dims_of_every_example(rank):
    xs, x = stack(rank, 0), example(rank)
    for n in range(1, rank + 1):
        for dims in combinations(range(rank), n):
            for signs in product((0, rank), repeat=n):
                named = [d - s for d, s in zip(dims, signs, strict=True)]
                found = axes.stacked_dims(named, rank)
                assert xs.sum(found).shape[1:] == x.sum(named).shape
                assert xs.sum(found, keepdim=True).shape[1:] == x.sum(named, keepdim=True).shape


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("every", [None, (), []])
def test_stacked_dims_without_dims_names_every_dim(rank, every):
    assert axes.stacked_dims(every, rank) == list(range(1, rank + 1))


@pytest.mark.parametrize("rank", range(1, 5))
def test_stacked_dims_of_one_dim_is_stacked_dim(rank):
    for dim in answered(rank):
        assert axes.stacked_dims(dim, rank) == [axes.stacked_dim(dim, rank)]


@pytest.mark.parametrize("rank", range(1, 5))
def test_past_names_the_same_dim_in_a_stack_with_its_axis_anywhere(rank):
    for axis, dim in product(range(rank + 1), range(rank)):
        xs = stack(rank, axis)
        there = axes.shift_past_axis(dim, axis)
        assert there != axis
        assert xs.shape[there] == example(rank).shape[dim]


@pytest.mark.parametrize("rank", range(1, 5))
def test_axis_without_is_where_the_examples_lie_afterwards(rank):
    for axis, dim in product(range(rank + 1), range(rank)):
        removed = axes.shift_past_axis(dim, axis)
        left = stack(rank, axis).select(removed, 0)
        assert left.shape[axes.axis_after_removal(axis, removed)] == B


def test_the_only_dim_of_rank_0_is_an_axis_that_a_rule_must_lend():
    assert axes.stacked_dim(0, 0) == axes.stacked_dim(-1, 0) == 1
