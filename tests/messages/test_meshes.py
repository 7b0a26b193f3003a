"""What is said of meshes, in a group of one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forall import RankError, jacrev, psum, shard_map, vmap
from forall._core.errors import format_short
from golden import refused

X = torch.ones(2, 3)


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh():
    return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp",))


def first(x):
    return psum(x, "b")


def test_one_process_is_a_mesh_of_one_rank(mesh):
    assert torch.equal(vmap(first, axis_name="b", mesh=mesh)(X), vmap(first, axis_name="b")(X))


def test_what_is_no_mesh():
    with refused(
        TypeError,
        """
        vmap: mesh must be a torch.distributed DeviceMesh.
            mesh   4   int
        Make one: init_device_mesh("cuda", (8,), mesh_dim_names=("dp",)).
        """,
    ):
        vmap(first, mesh=4)


def test_a_mesh_of_two_dims():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with refused(
        ValueError,
        f"""
        vmap: the examples lie along one dim of a mesh.
            mesh   {mesh}   2 dims
        Choose one: mesh["dp"].
        """,
    ):
        vmap(first, mesh=mesh)


def test_draws_that_would_be_the_same_on_all_ranks(mesh):
    with refused(
        ValueError,
        """
        vmap: the generators of the ranks need not agree, so no draw is the same for all examples of a mesh.
            randomness   'same'
        Pass a key of forall.random, or draw before the call and share the numbers.
        """,
    ):
        vmap(first, randomness="same", mesh=mesh)


def test_another_number_of_examples(mesh):
    with refused(
        ValueError,
        """
        vmap(first, in_dims=0): the ranks have 2 examples together, not axis_size.
            axis_size      7
            on the ranks   2
        Give no axis_size, or each rank its part of so many.
        """,
    ):
        vmap(first, axis_name="b", axis_size=7, mesh=mesh)(X)


@pytest.mark.counted  # a recorded call has another name
def test_a_thread_that_makes_a_call_beside_another(mesh):
    from forall._mesh.rank_group import get_rank_group

    vmap(first, axis_name="b", mesh=mesh)(X)
    ranks = get_rank_group(mesh)
    ranks.thread = -1
    try:
        with refused(
            RuntimeError,
            """
            vmap(first, in_dims=0): another thread makes a call over axis 'dp' of this mesh.
            Ranks would take the messages of one for those of the other. Make one call after the other, or give each thread a mesh of its own.
            """,
        ):
            vmap(first, axis_name="b", mesh=mesh)(X)
    finally:
        ranks.thread = None
    assert vmap(first, axis_name="b", mesh=mesh)(X)[0, 0] == 2


def test_a_mesh_without_names():
    mesh = init_device_mesh("cpu", (1,))
    with refused(
        ValueError,
        f"""
        shard_map: the dims of the mesh have no names, by which collectives could know them.
            mesh   {mesh}
        Name them: init_device_mesh("cuda", (8,), mesh_dim_names=("dp",)).
        """,
    ):
        shard_map(first, mesh)


def test_a_dtensor_along_another_dim(mesh):
    x = distribute_tensor(X, mesh, [Shard(1)])
    with refused(
        ValueError,
        """
        vmap(first, in_dims=0): a DTensor does not lie on the ranks as its examples do.
            placement   S(1)
            in_dims     0
        Give it the placement S(0): x.redistribute(mesh, [S(0)]).
        """,
    ):
        vmap(first, axis_name="b", mesh=mesh)(x)


def test_a_dtensor_on_another_mesh(mesh):
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(X, grid, [Shard(0), Replicate()])
    with refused(
        ValueError,
        f"""
        vmap(first, in_dims=0): a DTensor lies on another mesh than the examples.
            mesh         {mesh}
            DTensor on   {grid}
            it is        {format_short(x)}
        Distribute it over the mesh of the call, or pass x.to_local().
        """,
    ):
        vmap(first, axis_name="b", mesh=mesh)(x)


def test_placements_for_other_arguments(mesh):
    with refused(
        ValueError,
        """
        shard_map(first): in_placements has other entries than the call has arguments.
            in_placements   2
            arguments       1
        Give the placements of each argument, or None for one without DTensors.
        """,
    ):
        shard_map(first, mesh, ([Shard(0)], None))(X)


def test_a_dtensor_with_other_placements(mesh):
    x = distribute_tensor(X, mesh, [Shard(0)])
    with refused(
        ValueError,
        """
        shard_map(first): a DTensor has other placements than in_placements.
            placements      (Shard(dim=0),)
            in_placements   (Replicate(),)
        Call x.redistribute(mesh, placements) before.
        """,
    ):
        shard_map(first, mesh, [Replicate()])(x)


def test_placements_that_do_not_fit_the_result(mesh):
    with refused(
        ValueError,
        """
        shard_map(<lambda>): out_placements does not fit the result.
            out_placements   [Shard(dim=0), Shard(dim=0)]
            result           float32[2, 3]
        Give 1 placements, one per dim of the mesh, or a tuple of them for a tuple of results, which are tensors or trees of them.
        """,
    ):
        shard_map(lambda x: x, mesh, out_placements=[Shard(0), Shard(0)])(X)


def test_a_jacobian_over_ranks_that_is_compiled(mesh):
    with refused(
        NotImplementedError,
        f"""
        jacrev: torch.compile and the transforms of torch.func know no mesh.
            mesh   {mesh}
        Use forall's transforms around it, and forall.jit in the place of torch.compile.
        """,
    ):
        torch.func.vmap(jacrev(torch.sin, mesh=mesh))(X)


def test_a_derivative_over_a_group_that_was_destroyed():
    from forall._mesh.rank_group import find_rank_group

    with refused(
        RuntimeError,
        """
        The process group of this call was destroyed.
        Make the call again, over a mesh of the present group.
        """,
    ):
        find_rank_group("0/of a group that was")


def test_a_run_that_sends_something_else_when_it_is_made_again(mesh):
    log = _Growing()

    def step(x):
        y = psum(x * len(log), "b")
        return y + 1 if x > 0 else y

    with pytest.raises(RankError, match="A part of a function ran once more"):
        vmap(step, axis_name="b", mesh=mesh)(torch.tensor([1.0, -3.0]))


class _Growing:
    """A thing whose length is another each time, by state that nothing can restore."""

    def __init__(self):
        self.lengths = iter(range(1, 100))

    def __len__(self):
        return next(self.lengths)


def test_ranks_that_came_to_different_places():
    from forall._mesh.agreement import _make_rank_error

    ranks = SimpleNamespace(id="0", size=2)
    with refused(
        RankError,
        """
        the ranks came to different places.
            rank 0   came to the end
            rank 1   came to a sum of float32[3] at train.py:31
        All ranks must make the same calls, and in them the same collectives.
        """,
    ):
        raise _make_rank_error(
            ranks, [[0, 1], [0, 1]], ["the end", "a sum of float32[3] at train.py:31"], None
        )
    with refused(
        RankError,
        """
        a rank failed, so no rank has a result.
            rank 0   came to the end
            rank 1   failed: ValueError: bad data (train.py:27)
        """,
    ):
        raise _make_rank_error(
            ranks, [[0, 1], [1, 1]], ["the end", "ValueError: bad data (train.py:27)"], None
        )


def test_a_rank_that_is_lost(monkeypatch):
    from forall._compat import process_groups
    from forall._mesh.agreement import _make_lost_error

    monkeypatch.setattr(process_groups, "find_absent_ranks", lambda *_: [1])
    ranks = SimpleNamespace(id="0", size=2, rank=0, calls=1, note_lost=lambda: None)
    with refused(
        RankError,
        """
        rank 1 has ended, or has not come to this place.
            rank 0   came to the end
            torch    Operation timed out!
        The process group is lost. Start the processes again, for example by torchrun --max-restarts.
        """,
    ):
        raise _make_lost_error(ranks, "the end", RuntimeError("Operation timed out!"))
