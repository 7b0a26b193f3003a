"""Meshes and placements of `torch.distributed`, without an import of it, which takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat.dispatch_state import functions_off, no_dispatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_mesh_class(kind: type) -> bool:
    """Return True for the class of meshes, whose objects never change."""
    return kind.__name__ == "DeviceMesh" and kind.__module__ == "torch.distributed.device_mesh"


def is_placement_class(kind: type) -> bool:
    """Return True for a class of placements, whose objects never change and are equal by value."""
    return (
        kind.__name__ in ("Shard", "Replicate", "Partial")
        and kind.__module__ == "torch.distributed.tensor.placement_types"
    )


def get_mesh_dim(mesh: DeviceMesh, name: Any) -> DeviceMesh:
    """Return the mesh of one dim that has this name, with which a recorder has nothing to do."""
    if mesh.ndim == 1:
        return mesh
    with functions_off(), no_dispatch():  # torch finds it by operators on numbers of ranks
        return mesh[name]
