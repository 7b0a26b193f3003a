"""Trees: torch's own registry, so that what other libraries registered counts here too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    _broadcast_to_and_flatten,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "TreeSpec",
    "flatten",
    "keystr",
    "leaves",
    "map_tensors",
    "prefix",
    "text",
    "tree_flatten_with_path",
    "tree_map",
    "unflatten",
]


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and shape of a tree."""
    return tree_flatten(tree)


unflatten = tree_unflatten
leaves = tree_leaves


def prefix(tree: Any, spec: TreeSpec) -> list[Any] | None:
    """``tree`` broadcast to a leaf for every leaf of ``spec``; None if it does not fit."""
    if tree is None or type(tree) is int:  # one for all, without a walk
        return [tree] * spec.num_leaves
    if type(tree) is tuple and spec.type is tuple and len(tree) == spec.num_children:
        found: list[Any] = []
        for i, branch in enumerate(tree):
            part = prefix(branch, spec.child(i))
            if part is None:
                return None
            found += part
        return found
    return _broadcast_to_and_flatten(tree, spec)


class _Star:
    def __repr__(self) -> str:
        return "*"


def text(spec: TreeSpec) -> str:
    """A tree's shape as its user would write it, a star for every leaf."""
    shown = repr(tree_unflatten([_Star()] * spec.num_leaves, spec))
    return shown if len(shown) <= 60 else shown[:57] + "..."


def map_tensors(f: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply ``f`` to the tensors of a tree and leave the rest."""
    return tree_map(lambda a: f(a) if isinstance(a, torch.Tensor) else a, tree)
