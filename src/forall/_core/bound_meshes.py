"""The meshes whose dims are axes outside of any vmap, in this thread: those of `forall.axes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat.device_mesh import get_mesh_dim
from forall._compat.exception_safety import RestoredState

if TYPE_CHECKING:
    from collections.abc import Hashable


class _BoundMeshes(RestoredState):
    meshes: tuple[Any, ...] = ()  # the innermost last


bound = _BoundMeshes.make_instance()


def find_bound_dim(name: Hashable) -> Any:
    """Return the mesh of one dim that has this name; None if no bound mesh has it."""
    for mesh in reversed(bound.meshes):
        if name in mesh.mesh_dim_names:
            return get_mesh_dim(mesh, name)
    return None
