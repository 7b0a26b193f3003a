"""`shard_map` and `axes`: named axes with one value per rank, without a vmap."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from forall._api import argument_checks
from forall._api.collectives import psum
from forall._api.define_transform import define_transform
from forall._api.rank_axes import bind_axes
from forall._core.bound_meshes import bound
from forall._core.errors import TransformCall, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def axes(mesh: DeviceMesh) -> Iterator[None]:
    """Context in which each dim of a mesh is a named axis with one value per rank.

    The law: a collective of a tensor there is that of ``vmap`` over the values of all ranks, as if
    each rank were one example. So ``psum(x, "dp")`` is the sum over the ranks of ``mesh["dp"]``,
    `all_gather` is the stack of their tensors, and `axis_index` is the number of this rank. An axis
    of a `vmap` inside hides a dim of the same name.

    Derivatives are those of `psum` and its kin: those of the program over all ranks.

    Args:
        mesh: a `torch.distributed` DeviceMesh with ``mesh_dim_names``.

    Raises:
        TypeError: for something else than a mesh.
        ValueError: for a mesh without names.
        RankError: from a collective, on all ranks, where one fails or they come to other places.

    Cost: a call of `vmap` over ranks for each collective, which all ranks begin and end together.
    Calls in the context are not replayed. For code with many collectives take `shard_map`.

    Source: the body of a ``jax.shard_map``, where the dims of a mesh are axes.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with forall.axes(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))):
        ...     forall.pmean(torch.tensor(3.0), "dp")             # of one rank
        tensor(3.)
        >>> dist.destroy_process_group()
    """
    argument_checks.check_named_mesh("axes", mesh)
    before = bound.meshes
    bound.meshes = (*before, mesh)
    try:
        yield
    finally:
        bound.meshes = before


@define_transform()
def shard_map(
    func: Callable, mesh: DeviceMesh, in_placements: Any = None, out_placements: Any = None
) -> Callable:
    """Return ``func`` of this rank's blocks as a function of DTensors, or of blocks.

    The law: in ``func`` each dim of the mesh is a named axis, along which this rank has one value.
    Collectives combine the blocks of all ranks. With ``out_placements`` the results are DTensors
    whose blocks ``func`` returns; derivatives are those of the whole program of all ranks.

    A plain tensor is this rank's own block. The derivative of a replicated DTensor is the sum over
    ranks of what each of them contributes: its placement is ``Partial``.

    Args:
        func: takes blocks, as tensors or trees of them, and returns blocks.
        mesh: a `torch.distributed` DeviceMesh with ``mesh_dim_names``, of any number of dims.
        in_placements: for each argument the placements of its DTensors, one per dim of the mesh,
            which are checked: ``([Shard(0)], [Replicate()])``. None takes them as they come.
        out_placements: the placements of the results, or a tuple with one entry per result of a
            tuple; None returns this rank's blocks.

    Keyword arguments are taken as they come.

    Cost: a call of `vmap` over one example per rank, for each dim of the mesh, and one message per
    collective. With ``out_placements``, one more per sharded dim of a result, for its size.
    Calls of blocks are replayed, those with DTensors run as they are.

    Raises:
        TypeError, ValueError: for something else than a mesh with names, for a DTensor with other
            placements or on another mesh.
        RankError: on all ranks, where one fails or they come to different places.

    Source: ``jax.shard_map``; the placements are those of
    ``torch.distributed.tensor.experimental.local_map``.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> normalize = forall.shard_map(lambda x: x / forall.psum(x.sum(), "dp"), mesh)
        >>> normalize(torch.tensor([1.0, 3.0]))                   # this rank's block
        tensor([0.2500, 0.7500])
        >>> dist.destroy_process_group()
    """
    argument_checks.check_named_mesh("shard_map", mesh)

    def run_on_blocks(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        from forall._mesh import dtensors  # imports torch.distributed

        call = TransformCall("shard_map", func)
        args = dtensors.take_blocks(call, mesh, args, in_placements)
        kwargs = {
            name: dtensors.take_blocks(call, mesh, (a,), None)[0] for name, a in kwargs.items()
        }

        names = mesh.mesh_dim_names or ()

        def call_with_shapes(*args: Any, **kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            if out_placements is None:
                return result, None
            blocks = dtensors.place_blocks(call, mesh, result, out_placements)
            # Blocks may have unlike sizes, so the sizes of all are summed over the ranks.
            shapes = [
                [
                    psum(torch.tensor(n), along) if along else n
                    for n, along in zip(*block, strict=True)
                ]
                for block in blocks.list_sizes(names)
            ]
            return result, shapes

        call_with_shapes.__name__ = name_of(func)
        result, shapes = bind_axes(call_with_shapes, names, mesh)(*args, **kwargs)
        if out_placements is None:
            return result
        blocks = dtensors.place_blocks(call, mesh, result, out_placements)
        return blocks.make_global([[int(n) for n in shape] for shape in shapes])

    return run_on_blocks
