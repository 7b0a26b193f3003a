"""Calls over the ranks of a mesh are recorded and replayed, one rank by itself or all of them."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import forall
from mesh import rank_programs
from mesh.pool import ask

SIZES = {1: (8,), 2: (5, 3), 3: (3, 1, 4)}


def check(answers, wants):
    """Check the results of each call: rows of all ranks together, or the same on each rank."""
    for i, want in enumerate(wants):
        for one, expected in zip(
            zip(*[tree_leaves(found[i]) for found in answers], strict=True),
            tree_leaves(want),
            strict=True,
        ):
            whole = sum(one) if expected.dim() == 1 and len(expected) == 3 else None
            if whole is None:
                dim = 0 if expected.dim() == 2 else 1
                whole = torch.cat(one, dim)
            torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize(("size", "eager_ranks"), [(2, (0,)), (2, (1,)), (3, ())])
@pytest.mark.parametrize("how", [*rank_programs.RECORDED])
def test_recorded_calls_are_those_of_one_process(pool, how, size, eager_ranks):
    call, _ = rank_programs.record_call(how)
    wants = [call(*rank_programs.give(i)) for i in range(16)]
    answers = ask(pool, "call_recorded", how, SIZES[size], 16, eager_ranks, size=size)
    check([found for found, _ in answers], wants)
    for rank, (_, hits) in enumerate(answers):
        assert (hits > 0) == (rank not in eager_ranks)


@pytest.mark.parametrize("how", ["replay", "replay of a derivative", "replay of a push-forward"])
def test_replayed_calls_are_those_that_run(pool, how):
    call, _ = rank_programs.record_call(how)
    wants = [call(*rank_programs.give(i)) for i in range(6)]
    answers = ask(pool, "call_recorded", how, SIZES[2], 6, (), "check", size=2)
    check([found for found, _ in answers], wants)
    assert all(hits > 1 for _, hits in answers)


@pytest.mark.parametrize("how", ["jit", "replay"])
def test_an_answer_that_is_another_on_one_rank(pool, how):
    answers = ask(pool, "ask_of_data", SIZES[2], how, size=2)
    for i in range(8):
        xs = torch.arange(8.0) + (torch.tensor([20.0] * 5 + [0.0] * 3) if i == 3 else 0)
        half = torch.where(xs > 10, xs / 2, xs)
        want = half + xs.sum() * half.sum()
        torch.testing.assert_close(torch.cat([found[i] for found in answers]), want)


@pytest.mark.parametrize("how", ["jit", "replay"])
def test_an_error_within_a_recorded_call_is_one_on_every_rank(pool, how):
    for rank, ((error, seconds), after, hits) in enumerate(
        ask(pool, "fail_in_a_program", how, size=3)
    ):
        assert hits > 1
        assert error[0] == ("IndexError" if rank == 2 else "RankError")
        assert seconds < 2
        assert torch.equal(after, torch.full((2,), 108.0))


def end(sign, slope):
    """Return what `root_of_gradient` does with a gradient that is a multiple of the identity."""
    return 2 * sign * slope if sign > 5 else 2 * (sign * slope).sqrt()


@pytest.mark.parametrize("how", ["jit", "replay"])
@pytest.mark.parametrize("failing", [(0,), (2,), (0, 1, 2)])
def test_an_error_after_the_messages_is_one_of_its_rank(pool, how, failing):
    for rank, (found, hits) in enumerate(ask(pool, "fail_past_the_messages", how, failing, size=3)):
        assert (hits > 1) == (rank > 0)
        for i, outcome in enumerate(found):
            sign = rank_programs.SIGNS[i] if rank in failing else 2.0
            slope = 36.0 * (5 + 2 * i) ** 2  # on the diagonal
            if sign < 0:
                assert outcome[0] == "_LinAlgError"
                continue
            want = end if how == "jit" else forall.grad(end)
            torch.testing.assert_close(outcome, want(torch.tensor(sign), slope))


@pytest.mark.parametrize("how", ["recorded", "within", "parted"])
def test_a_call_that_failed_is_not_made_again_once_other_ranks_have_been_told(pool, how):
    answers = ask(pool, "fail_where_a_call_runs_again", how, size=3)
    for rank, (errors, _) in enumerate(answers):
        for error, seconds in errors:
            assert error[0] == ("IndexError" if rank == 2 else "RankError")
            assert seconds < 2
    assert all(torch.equal(after, answers[0][1]) for _, after in answers)


def test_an_interrupt_within_a_recorded_call_is_an_error_on_every_rank(pool):
    for rank, (error, seconds, change, hits) in enumerate(ask(pool, "interrupt_a_program", size=3)):
        assert hits > 1
        assert error[0] == ("KeyboardInterrupt" if rank == 2 else "RankError")
        assert seconds < 2
        assert change.abs().max() == 0


def test_calls_with_a_derivative_at_stake_outside_run_as_they_are(pool):
    f = rank_programs.vmap(rank_programs.normalize, (None, 0), axis_name="b")
    answers = ask(pool, "pull_back_outside", SIZES[2], size=2)
    for i in range(4):
        w, xs = rank_programs.give(i)
        want = forall.grad(lambda w, xs=xs: (f(w, xs).square() * rank_programs.W).sum())(w)
        torch.testing.assert_close(sum(found[i] for found, _ in answers), want)
    for _, whys in answers:
        assert whys == ["ranks communicate in it, with a derivative at stake outside"]


def test_draws_of_recorded_calls_do_not_depend_on_the_number_of_ranks(pool):
    one, two = (ask(pool, "draw_recorded", SIZES[n], size=n) for n in (1, 2))
    assert all(hits > 1 for _, hits in (*one, *two))
    for i in range(4):
        torch.testing.assert_close(torch.cat([found[i] for found, _ in two]), one[0][0][i])


def test_a_derivative_recorded_at_another_line_sends_the_same_messages(pool):
    for found in ask(pool, "call_from_two_lines", size=3):
        # Each of six examples depends on the sum over all examples of three ranks.
        assert [x.item() for x in found] == [6.0] * 4
