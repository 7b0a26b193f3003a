"""DTensors as arguments and results of a call over ranks: the global value of all ranks.

A rank computes with its local tensors. The derivative of a local tensor is that of this rank's
outcome alone, so the derivative of a replicated argument is a `Partial` one, to be summed.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from forall._compat import pytree
from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from forall._core.errors import TransformCall
    from forall._mesh.axis_ranks import AxisRanks


def make_local(call: TransformCall, mesh: DeviceMesh, x: DTensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, which must lie on this mesh."""
    if x.device_mesh != mesh:
        rows = [("mesh", str(mesh)), ("DTensor on", str(x.device_mesh)), ("it is", format_short(x))]
        raise documented_error(ValueError, "mesh")(
            f"{call}: a DTensor lies on another mesh than the examples.\n{format_columns(rows)}\n"
            "Distribute it over the mesh of the call, or pass x.to_local()."
        )
    return x.to_local(grad_placements=[*map(_transpose_placement, x.placements)])


def _transpose_placement(placement: Placement) -> Placement:
    """Return the placement of the derivative by what has this one."""
    if isinstance(placement, Replicate):
        return Partial()
    return Replicate() if isinstance(placement, Partial) else placement


class _CountOnce(torch.autograd.Function):
    """The identity on what ``count`` ranks have alike, whose derivatives are to count once."""

    @staticmethod
    def forward(x, _count):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, _output):
        _, ctx.count = inputs

    @staticmethod
    def backward(ctx, g):
        return g / ctx.count, None

    @staticmethod
    def jvp(_ctx, t, _):
        return t.view_as(t)


def make_global(
    x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of this shape whose part on this rank is ``x``."""
    alike = [n for n, p in zip(mesh.shape, placements, strict=True) if isinstance(p, Replicate)]
    if prod(alike) > 1 and (x.is_floating_point() or x.is_complex()):
        x = _CountOnce.apply(x, prod(alike))
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


class LocalArguments(NamedTuple):
    """The arguments of a mapped function, with this rank's part in the place of each DTensor.

    ``placements`` has for each leaf the placement that it had, or None.
    """

    call: TransformCall
    mesh: DeviceMesh
    args: tuple
    kwargs: dict[str, Any]
    placements: list[Placement | None]

    @classmethod
    def take(
        cls, call: TransformCall, mesh: DeviceMesh, args: tuple, kwargs: dict[str, Any]
    ) -> LocalArguments | None:
        """Return the local arguments; None if no argument is a DTensor."""
        leaves, spec = pytree.flatten((args, kwargs))
        placements: list[Placement | None] = [None] * len(leaves)
        for i, x in enumerate(leaves):
            if isinstance(x, DTensor):
                leaves[i], placements[i] = make_local(call, mesh, x), x.placements[0]
        if all(placement is None for placement in placements):
            return None
        args, kwargs = pytree.unflatten(leaves, spec)
        return cls(call, mesh, args, kwargs, placements)

    def check_dims(self, dims: Sequence[int | None]) -> None:
        """Check that mapped DTensors are sharded along their examples, and others replicated."""
        for placement, dim in zip(self.placements, dims, strict=True):
            wanted = Replicate() if dim is None else Shard(dim)
            if placement is not None and placement != wanted:
                rows = [("placement", str(placement)), ("in_dims", str(dim))]
                raise documented_error(ValueError, "mesh")(
                    f"{self.call}: a DTensor does not lie on the ranks as its examples do.\n"
                    f"{format_columns(rows)}\n"
                    f"Give it the placement {wanted}: x.redistribute(mesh, [{wanted}])."
                )

    def make_results(
        self, leaves: Sequence[Any], places: Sequence[int | None], ranks: AxisRanks
    ) -> list:
        """Return the results as DTensors: sharded along the examples, or replicated."""
        found = []
        for x, place in zip(leaves, places, strict=True):
            if not isinstance(x, torch.Tensor):
                found.append(x)
            elif place is None:
                found.append(make_global(x, self.mesh, [Replicate()], x.shape))
            else:
                dim = place % x.dim()
                shape = [*x.shape[:dim], ranks.total, *x.shape[dim + 1 :]]
                found.append(make_global(x, self.mesh, [Shard(dim)], shape))
        return found


def take_blocks(call: TransformCall, mesh: DeviceMesh, args: tuple, in_placements: Any) -> tuple:
    """Return the arguments with this rank's block in the place of each DTensor."""
    wanted = [None] * len(args) if in_placements is None else _list_placements(in_placements, args)
    if len(wanted) != len(args):
        rows = [("in_placements", str(len(wanted))), ("arguments", str(len(args)))]
        raise documented_error(ValueError, "placements")(
            f"{call}: in_placements has other entries than the call has arguments.\n"
            f"{format_columns(rows)}\n"
            "Give the placements of each argument, or None for one without DTensors."
        )

    def take(x: Any, placements: Sequence[Placement] | None) -> Any:
        if not isinstance(x, DTensor):
            return x
        block = make_local(call, mesh, x)
        if placements is not None and tuple(x.placements) != tuple(placements):
            rows = [("placements", str(x.placements)), ("in_placements", str(tuple(placements)))]
            raise documented_error(ValueError, "placements")(
                f"{call}: a DTensor has other placements than in_placements.\n"
                f"{format_columns(rows)}\nCall x.redistribute(mesh, placements) before."
            )
        return block

    taken = []
    for arg, placements in zip(args, wanted, strict=True):
        leaves, spec = pytree.flatten(arg)
        taken.append(pytree.unflatten([take(x, placements) for x in leaves], spec))
    return tuple(taken)


def _list_placements(given: Any, things: Sequence[Any]) -> list:
    """Return an entry for each argument or result: those given, or the same one for all."""
    if all(isinstance(p, Placement) for p in given):
        return [given] * len(things)
    return [*given]


class GlobalResults(NamedTuple):
    """The results of a rank as blocks of DTensors: tensors with the placements of each."""

    mesh: DeviceMesh
    leaves: list
    spec: Any
    placements: list[Sequence[Placement]]

    def list_sizes(self, names: Sequence[str]) -> list[tuple[list[int], list[tuple[str, ...]]]]:
        """Return for each block its sizes, and for each dim the dims of the mesh that shard it."""
        return [
            (
                [*x.shape],
                [
                    tuple(
                        name
                        for name, p in zip(names, placements, strict=True)
                        if isinstance(p, Shard) and p.dim % x.dim() == d
                    )
                    for d in range(x.dim())
                ],
            )
            for x, placements in zip(self.leaves, self.placements, strict=True)
        ]

    def make_global(self, shapes: Sequence[Sequence[int]]) -> Any:
        """Return the tree of results as DTensors of these shapes."""
        found = zip(self.leaves, self.placements, shapes, strict=True)
        leaves = [make_global(x, self.mesh, placements, shape) for x, placements, shape in found]
        return pytree.unflatten(leaves, self.spec)


def place_blocks(
    call: TransformCall, mesh: DeviceMesh, result: Any, out_placements: Any
) -> GlobalResults:
    """Return the results of a rank with their placements."""
    parts = result if isinstance(result, tuple) else (result,)
    wanted = _list_placements(out_placements, parts)
    fits = len(wanted) == len(parts) and all(len(p) == mesh.ndim for p in wanted)
    leaves, spec = pytree.flatten(result)
    if not fits or not all(isinstance(x, torch.Tensor) for x in leaves):
        rows = [("out_placements", format_short(out_placements)), ("result", format_short(result))]
        raise documented_error(ValueError, "placements")(
            f"{call}: out_placements does not fit the result.\n{format_columns(rows)}\n"
            f"Give {mesh.ndim} placements, one per dim of the mesh, or a tuple of them for a tuple "
            "of results, which are tensors or trees of them."
        )
    counts = [len(pytree.get_leaves(part)) for part in parts]
    placements = [p for p, n in zip(wanted, counts, strict=True) for _ in range(n)]
    return GlobalResults(mesh, leaves, spec, placements)
