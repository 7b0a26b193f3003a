"""Recognition of meshes without an import of `torch.distributed`, which takes long."""

from __future__ import annotations


def is_mesh_class(kind: type) -> bool:
    """Return True for the class of `torch.distributed` meshes, whose objects never change."""
    return kind.__name__ == "DeviceMesh" and kind.__module__ == "torch.distributed.device_mesh"
