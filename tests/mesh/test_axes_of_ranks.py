"""Axes along which a rank has one value, by `axes` and `shard_map`; DTensors as arguments."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves

import forall
from forall import vmap
from mesh import rank_programs
from mesh.pool import ask
from mesh.programs import EXAMPLES, PROGRAMS
from mesh.transforms import INSIDE, named
from sampling import take_sample

TRANSFORMS = ("grad", "vjp", "jvp", "linearize", "jacrev", "hessian", "grad of grad", "backward")


def test_each_rank_is_an_example(pool):
    cases = take_sample(itertools.product(PROGRAMS, TRANSFORMS), 4)
    answers = ask(pool, "run_in_axes", cases, size=3)
    wrong = {}
    for name, transform in cases:
        f = INSIDE[transform][0](named(PROGRAMS[name]))
        want = tree_leaves(vmap(f, axis_name="i")(EXAMPLES))
        for rank, answer in enumerate(answers):
            found = answer[name, transform]
            if isinstance(found, str):
                wrong[name, transform] = found
                break
            for one in found:
                same = all(
                    torch.allclose(a, b[rank], rtol=1e-9, atol=1e-11)
                    for a, b in zip(tree_leaves(one), want, strict=True)
                )
                if not same:
                    wrong[name, transform, rank] = one
    assert not wrong, f"{len(wrong)} of {len(answers[0])}: {[*wrong.items()][:2]}"


def test_blocks_of_a_mesh_of_two_dims(pool):
    whole = torch.linspace(-1, 1, 60).double().view(20, 3)[:16]
    scale = torch.tensor([0.5, 1.5, -1.0]).double()

    def mix_all(w):
        blocks = (w * whole).view(2, 2, 4, 3)
        return vmap(vmap(rank_programs.mix, axis_name="b"), axis_name="a")(blocks).reshape(16, 3)

    want = mix_all(scale)
    slope = forall.grad(lambda w: mix_all(w).cos().sum())(scale)
    for (y, total, found), shape in ask(pool, "run_on_two_dims", size=4):
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(total, want.cos().sum())
        torch.testing.assert_close(found, slope)
        assert shape == (10, 3)  # blocks of 1, 2, 3 and 4 rows


def test_calls_of_blocks_are_replayed(pool):
    answers = ask(pool, "replay_blocks", size=4)
    mix, swap = rank_programs.mix, rank_programs.swap_axes

    def map_blocks(f, names=("a", "b")):
        for name in reversed(names):
            f = vmap(f, axis_name=name)
        return lambda x: f(x.view(2, 2, 3)).view(4, 3)

    def lean(f):
        return forall.grad(lambda x: f(x).sin().sum())

    wants = {
        "one dim": vmap(lambda x: x.sin() * forall.psum(x, "a"), axis_name="a"),
        "two dims": map_blocks(mix),
        "a derivative": map_blocks(lean(mix)),
        "inside a derivative": lean(map_blocks(mix)),
        "made anew": map_blocks(mix),
        "swapped": lambda x: map_blocks(swap)(x) - 3 * map_blocks(swap, ("b", "a"))(x),
    }
    for name, f in wants.items():
        for i in range(5):
            found = torch.stack([answer[name][i] for answer, _, _ in answers])
            torch.testing.assert_close(found, f(rank_programs.WIDE[:4] + i), msg=name)
    for rank, (_, hits, told) in enumerate(answers):
        assert [n > 1 for n in hits] == [rank > 0] * 2
        assert ("replayed: the recorded program ran" in told) is (rank > 0)
        assert told.startswith("shard_map(mix)")


@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 2), (2, 2, 1)])
def test_a_dtensor_is_the_examples_of_all_ranks(pool, sizes):
    xs, w = rank_programs.WIDE[: sum(sizes)], rank_programs.W
    f = vmap(rank_programs.normalize, (None, 0), axis_name="b")

    def sum_all(w):
        return f(w, xs).square().sum() + (w * xs).sin().sum(1).mean()

    answers = ask(pool, "map_dtensors", sizes, size=len(sizes))
    for (y, total, slope), placements, wrong in answers:
        torch.testing.assert_close(y, f(w, xs))
        torch.testing.assert_close(total, sum_all(w))
        torch.testing.assert_close(slope, forall.grad(sum_all)(w))
        assert placements == "(Shard(dim=0),)"
        assert wrong[0] == "ValueError"
        assert "a DTensor does not lie on the ranks as its examples do" in wrong[1]
