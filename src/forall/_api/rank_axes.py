"""Dims of a mesh as named axes along which a rank has one value: a vmap over one example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._api.vmap import vmap
from forall._compat import pytree
from forall._compat.device_mesh import get_mesh_dim
from forall._core.errors import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


def bind_axes(func: Callable, names: Sequence[str], mesh: DeviceMesh) -> Callable:
    """Return ``func`` with these dims of a mesh as axes, along which this rank has one value."""
    for name in reversed(names):
        func = _bind_axis(func, name, get_mesh_dim(mesh, name))
    return func


def _bind_axis(func: Callable, name: str, mesh: DeviceMesh) -> Callable:
    def run_as_example(*args: Any, **kwargs: Any) -> Any:
        count = mesh.size()
        mapped = vmap(func, None, 0, "different", axis_name=name, axis_size=count, mesh=mesh)
        leaves, spec = pytree.flatten(mapped(*args, **kwargs))
        return pytree.unflatten(
            [x.squeeze(0) if isinstance(x, torch.Tensor) else x for x in leaves], spec
        )

    run_as_example.__name__ = name_of(func)  # for messages of a mapped call around this one
    return run_as_example
