"""Matrices that cannot be factored: who fails is told from the others at once, and may catch it."""

import pytest
import torch

import forall


def shifted(a):
    return a @ a.mT - 0.5 * torch.eye(3)


def factored(a):
    try:
        return torch.linalg.cholesky(shifted(a))
    except RuntimeError:
        return a * 0


def solved(a):
    try:
        return torch.linalg.solve(a * (a[0, 0] > 1.5), a)
    except torch.linalg.LinAlgError as error:
        return a + len(str(error))


def told(a):
    try:
        return torch.linalg.cholesky(shifted(a)).sum()
    except RuntimeError as error:
        return a[0, 0] * len(str(error)) + float("order 1" in str(error))


def inverted(a):
    try:
        return torch.linalg.inv(a * (a[0, 0] > 1.5).float())
    except RuntimeError:
        return a.mT


FUNCTIONS = [factored, solved, told, inverted]


@pytest.fixture
def matrices():
    torch.manual_seed(0)
    return torch.randn(12, 3, 3) + 2 * torch.eye(3)


@pytest.mark.parametrize("func", FUNCTIONS)
def test_as_the_loop(func, matrices):
    expected = torch.stack([func(a) for a in matrices])
    torch.testing.assert_close(forall.vmap(func)(matrices), expected)


@pytest.mark.parametrize("func", FUNCTIONS)
def test_derivatives(func, matrices):
    matrices = matrices.double()  # of nearly singular ones few digits are left
    slope = forall.grad(lambda a: func(a).sum())
    expected = torch.stack([slope(a) for a in matrices])
    torch.testing.assert_close(forall.vmap(slope)(matrices), expected)


def test_two_levels(matrices):
    stacks = matrices.reshape(3, 4, 3, 3)
    expected = torch.stack([torch.stack([factored(a) for a in stack]) for stack in stacks])
    torch.testing.assert_close(forall.vmap(forall.vmap(factored))(stacks), expected)


def test_several_matrices_in_each_example(matrices):
    stacks = matrices.reshape(3, 4, 3, 3)
    expected = torch.stack([factored(stack) for stack in stacks])
    torch.testing.assert_close(forall.vmap(factored)(stacks), expected)


def test_who_fails_is_named(matrices):
    good = matrices + 5 * torch.eye(3)
    stack = torch.cat([good[:2], 0 * good[:1], good[2:4]])
    with pytest.raises(torch.linalg.LinAlgError, match="leading minor of order 1") as caught:
        forall.vmap(lambda a: torch.linalg.cholesky(shifted(a)))(stack)
    assert "example 2 of 5" in caught.value.__notes__[0]
    assert "atch element" not in str(caught.value)
