"""Jacobians whose rows or columns are computed by the ranks of a mesh, each a part."""

import itertools

import pytest
import torch

import forall
from mesh import rank_programs
from mesh.pool import ask

DIMS = (2, 0, 1)  # of each output of `curve`


def join(how, number, parts):
    """Put the parts of one block together, of all ranks."""
    if how in ("jacrev", "jacobian"):
        return parts[0] if DIMS[number] == 0 else torch.cat(parts)
    return torch.cat(parts, DIMS[number] + (how == "hessian"))


def pull_back_scalar(how):
    """Return the gradient that comes from the output without dims."""
    jacobian_of = rank_programs.JACOBIANS[how][0](lambda x: x.square().sum())
    return forall.grad(lambda x: jacobian_of(x).sin().sum())(rank_programs.POINT)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_all_ranks_are_the_whole(pool, size):
    answers = ask(pool, "take_jacobians", size=size)
    for case in itertools.product(rank_programs.JACOBIANS, rank_programs.AROUND):
        how, around = case
        parts = [answer[case] for answer in answers]
        assert not any(isinstance(part, str) for part in parts), (case, parts)
        for number, want in enumerate(rank_programs.take_jacobian(*case)):
            found = [part[number] for part in parts]
            if around == "grad":  # the block of the output without dims is whole on each rank
                whole = sum(found)
                if how in ("jacrev", "jacobian"):
                    whole = whole - (size - 1) * pull_back_scalar(how)
            else:
                whole = join(how, number, found)
            assert torch.allclose(whole, want), (case, number, whole - want)


def test_a_function_with_other_outputs_on_one_rank(pool):
    for rank, ((kind, text, _), seconds) in enumerate(ask(pool, "differ_in_outputs", size=3)):
        assert kind == "RankError"
        assert (
            "rank 2   came to the start of jacrev(<lambda>, argnums=0) with outputs float64[3]"
            in text
        ), rank
        assert seconds < 2


def test_norms_of_gradients(pool):
    parts = ask(pool, "take_norms", (5, 1, 2), size=3)
    want = forall.per_example_grad_norm(lambda w, x: (w * x).sin().sum())
    torch.testing.assert_close(torch.cat(parts), want(rank_programs.W, rank_programs.WIDE))
