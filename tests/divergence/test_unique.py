"""`unique` of whole numbers: all examples at once, in groups where they have as many values."""

import pytest
import torch
from torch import Tensor

import forall

INTS = [torch.int64, torch.int32, torch.uint8, torch.bool]
OPTIONS = [
    {},
    {"sorted": False},
    {"return_inverse": True},
    {"return_counts": True},
    {"return_inverse": True, "return_counts": True},
]


def told(**options: bool):
    """All that `unique` gives, in one number for each of its results."""

    def func(x: Tensor) -> tuple[Tensor, ...]:
        found = torch.unique(x, **options)
        found = found if isinstance(found, tuple) else (found,)
        weights = [torch.arange(1.0, t.numel() + 1).reshape(t.shape) for t in found]
        return tuple((t * w).sum() + 100 * t.numel() for t, w in zip(found, weights, strict=True))

    return func


def by_loop(func, xs: Tensor) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*map(func, xs), strict=True)]


@pytest.mark.parametrize("dtype", [*INTS, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (0,), ()], ids=str)
def test_as_the_loop(dtype, options, shape):
    xs = torch.randint(0, 2 if dtype is torch.bool else 4, (9, *shape)).to(dtype)
    func = told(**options)
    torch.testing.assert_close([*forall.vmap(func)(xs)], by_loop(func, xs), rtol=0, atol=0)


def test_signs_of_zero_and_nans():
    xs = torch.tensor([[0.0, -0.0, 1.0], [-0.0, 0.0, 1.0], [float("nan"), float("nan"), -0.0]])

    def func(x):
        found = x.unique()
        return torch.copysign(torch.ones(()), found).sum() + 10 * len(found)

    torch.testing.assert_close(forall.vmap(func)(xs), torch.stack([func(x) for x in xs]))


def test_two_levels():
    xs = torch.randint(0, 4, (4, 5, 6))
    func = forall.vmap(lambda row: row.unique().sum() + len(row.unique()))
    expected = torch.stack([torch.stack([row.unique().sum() + len(row.unique()) for row in x])
                            for x in xs])  # fmt: skip
    torch.testing.assert_close(forall.vmap(func)(xs), expected)


def test_one_size_is_a_result():
    assert forall.vmap(torch.unique)(torch.tensor([[1, 2, 2], [5, 5, 4]])).tolist() == [
        [1, 2],
        [4, 5],
    ]
