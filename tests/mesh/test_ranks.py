"""Calls over the ranks of a mesh are those of one process on all examples.

Each test sends a function of `rank_programs` to a pool of processes. The programs of one test run
there one after another, since a message of several processes takes long on few cores.
"""

import functools
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils._pytree import tree_leaves

import forall
from forall import vmap
from mesh import rank_programs
from mesh.pool import Pool, ask, join
from sampling import take_sample

SIZES = {1: (3,), 2: (2, 1), 3: (1, 1, 1), 4: (1, 0, 2, 0)}
WHOLE = {1: (8,), 2: (5, 3), 3: (3, 1, 4), 4: (2, 0, 2, 4)}


@functools.cache
def run_in_one_process(case):
    return tree_leaves(rank_programs.run_case(case))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_together_are_one_process(pool, size):
    cases = take_sample(rank_programs.list_cases(), 4, size)
    answers = ask(pool, "run_cases", cases, SIZES[size], size=size)
    wrong = {}
    for case in cases:
        want, found = run_in_one_process(case), [answer[case] for answer in answers]
        if any(isinstance(x, str) for x in found):
            wrong[case] = found
            continue
        for whole, expected in zip(join(found), want, strict=True):
            if not torch.allclose(whole, expected, rtol=1e-9, atol=1e-11):
                wrong[case] = whole - expected
    assert not wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_draws_do_not_depend_on_the_number_of_ranks(pool, size):
    key = forall.random.key(7)

    def f(x):
        return x + torch.rand(2), torch.randn(()), forall.axis_index("b")

    want = vmap(f, randomness=key, axis_name="b")(torch.zeros(8, 2))
    found = join(ask(pool, "draw", WHOLE[size], 7, size=size))
    for one, expected in zip(found, [*want, *want, want[0]], strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_examples_that_part_on_one_rank_communicate_once(pool, size):
    answers = ask(pool, "run_control_flow", WHOLE[size], 12, size=size)
    for name, f in rank_programs.CONTROL.items():
        want = vmap(f, axis_name="b")(torch.arange(8.0))
        for outcomes in zip(*[answer[name] for answer in answers], strict=True):
            torch.testing.assert_close(torch.cat(outcomes), want)


def test_a_run_that_is_undone_further_out_communicates_once(pool):
    for answer in ask(pool, "part_around_a_call", WHOLE[2], size=2):
        assert answer.tolist() in ([28.0, 56.0], [28.0, 57.0])


def test_a_collective_that_some_examples_reach_is_an_error_on_all_ranks(pool):
    answers = ask(pool, "reduce_in_a_branch", WHOLE[2], size=2)
    kinds = sorted(kind for kind, _, _ in answers)
    assert kinds == ["AxisError", "RankError"]  # the examples of one rank part
    assert any("examples of axis 'b' come here" in text for _, text, _ in answers)


def test_sizes(pool):
    found = ask(pool, "use_sizes", size=3)
    assert torch.cat([x for x, _ in found]).tolist() == [0, 5, 10, 15, 20]
    for _, (kind, text, _) in found:
        assert kind == "ValueError"
        assert "the ranks have 6 examples together, not axis_size" in text
        assert "2 + 2 + 2" in text


@pytest.mark.parametrize("how", ["each", "call", "never"])
def test_results_do_not_depend_on_how_often_ranks_agree(pool, how):
    xs = torch.arange(8.0)
    found = torch.cat(ask(pool, "run_with_agreement", how, WHOLE[3], size=3))
    assert torch.equal(found, 28 * xs + 7)


SAID = {  # what a failure's message says on the ranks that did not fail
    "fails before a message": "rank 2   failed: BadDataError: bad data (rank_programs.py:",
    "fails between messages": "rank 2   failed: BadDataError: bad data (rank_programs.py:",
    "fails after the last message": "rank 2   failed: BadDataError: bad data (rank_programs.py:",
    "has another shape": "rank 2   came to a sum of float64[6]",
    "has another dtype": "rank 2   came to a sum of float32[3]",
    "calls another collective": "rank 2   came to a maximum of float64",
    "swaps two messages": "the ranks came to different places",
    "sends one message more": "rank 0   came to the end",
    "takes another branch": "the ranks came to different places",
    "is called wrongly": "rank 2   failed: ValueError",
}


def test_a_failure_is_an_error_on_every_rank(pool):
    answers = ask(pool, "run_failures", [*rank_programs.FAILURES], size=3)
    for name, said in SAID.items():
        for rank, answer in enumerate(answers):
            (kind, text, failed), seconds, after = answer[name]
            assert after == 6, (name, "the group cannot be used after it")
            assert seconds < 2, (name, seconds)
            if rank == 2 and "fails" in name:
                assert (kind, text) == ("BadDataError", "bad data")
            elif rank == 2 and "wrongly" in name:
                assert kind == "ValueError"
            else:
                assert kind == "RankError", (name, text)
                assert said in text, (name, text)
                assert failed == (2 if "failed" in said else None)


def test_a_call_that_one_rank_makes_alone_is_an_error_on_every_rank(pool):
    for (kind, text, _), seconds, after in ask(pool, "make_one_call_more", size=3):
        assert kind == "RankError"
        assert "the ranks came to different places" in text
        assert seconds < 2
        assert after == 6


@pytest.mark.parametrize("name", ["that_stays_away", "that_never_comes"])
def test_a_rank_that_stays_away_is_named(name):
    pool = Pool(3)
    try:
        first, second, _ = ask(pool, f"wait_for_one_{name}", 6.0, size=3)
    finally:
        pool.close()
    for (kind, text, rank), seconds in (first, second):
        assert kind == "RankError"
        assert "rank 2 has ended, or has not come to this place" in text
        assert rank == 2
        assert seconds < 6


def test_a_rank_that_ends_is_named():
    pool = Pool(3)
    try:
        ask(pool, "use_sizes", size=3)  # all have begun
        threading.Timer(2.0, pool.kill, [2]).start()
        first, second, third = pool.call("wait_for_one_that_is_killed")
    finally:
        pool.close()
    assert third.kind == "Ended"
    for (kind, text, rank), _ in (first, second):
        assert kind == "RankError"
        assert "rank 2 has ended" in text
        assert rank == 2


def test_the_group_of_agreements_ends_with_the_group_of_the_data(pool):
    assert all(ask(pool, "destroy_group", size=4))


PROGRAM_WITHOUT_AN_END = """
import atexit, weakref
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

atexit.register(lambda: print("ended" if control() is None else "runs"))  # runs after forall's own

from forall import psum, vmap
from forall._mesh.rank_group import get_rank_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("b",))
vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh)(torch.ones(2))
control = weakref.ref(get_rank_group(mesh).control)
"""


def test_threads_of_agreements_end_before_python_does():
    """A thread that needs Python while that ends would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITHOUT_AN_END],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-3000:]
