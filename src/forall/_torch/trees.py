"""Trees: torch's own registry, so that what other libraries registered counts here too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    _broadcast_to_and_flatten,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "TreeSpec",
    "flatten",
    "keystr",
    "leaves",
    "map_tensors",
    "outlined",
    "prefix",
    "text",
    "tree_flatten_with_path",
    "tree_map",
    "unflatten",
]


class _Unusual(Exception):  # noqa: N818 - no error: another way is taken
    """A tree with nodes that only torch's registry can take apart."""


_specs: dict[Any, TreeSpec] = {}
_MANY = 1000


def is_registered(kind: type) -> bool:
    """Whether somebody takes apart what is of this class."""
    return kind in SUPPORTED_NODES


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and shape of a tree; shapes of tuples, lists and dicts are made once and kept."""
    found: list[Any] = []
    try:
        outline = _walk(tree, found)
    except _Unusual:
        return tree_flatten(tree)
    spec = _specs.get(outline)
    if spec is None:
        if len(_specs) >= _MANY:
            _specs.clear()
        spec = _specs[outline] = tree_flatten(tree)[1]
    return found, spec


def outlined(args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Leaves of a call, and what hashes and says how they hang together, at less than a spec."""
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        return [*args], len(args)
    found: list[Any] = []
    tree = (args, kwargs)
    try:
        return found, _walk(tree, found)
    except _Unusual:
        return tree_flatten(tree)


_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float})  # that most leaves are of


def _walk(node: Any, found: list[Any]) -> Any:
    """Add the leaves and say how they hang together, in a form that hashes: None for a leaf."""
    kind = type(node)
    if kind in _LEAVES:
        found.append(node)
        return None
    if kind is dict:
        for key in node:
            if type(key) is not str:  # True and 1 are one key, but not one name
                raise _Unusual
        return (dict, *node, *[_walk(child, found) for child in node.values()])
    if kind is tuple or kind is list:
        return (kind, *[_walk(child, found) for child in node])
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):
        raise _Unusual
    found.append(node)
    return None


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """The tree of this shape with these leaves."""
    given = list(leaves)
    if len(given) != spec.num_leaves:
        raise ValueError(f"unflatten: {len(given)} leaves for a tree of {spec.num_leaves}")
    if spec.type is None:
        return given[0]
    return _built(spec, iter(given))


def _built(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    kind = spec.type
    if kind is None:
        return next(leaves)
    children = [_built(child, leaves) for child in spec._children]
    if kind is tuple:
        return tuple(children)
    if kind is list:
        return children
    if kind is dict:
        return dict(zip(spec._context, children, strict=True))
    return SUPPORTED_NODES[kind].unflatten_fn(children, spec._context)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    found: list[Any] = []
    try:
        _walk(tree, found)
    except _Unusual:
        return tree_leaves(tree)
    return found


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
    shown = repr(unflatten([_Star()] * spec.num_leaves, spec))
    return shown if len(shown) <= 60 else shown[:57] + "..."


def map_tensors(f: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply ``f`` to the tensors of a tree and leave the rest."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([map_tensors(f, child) for child in tree])
    if kind is dict:
        return {key: map_tensors(f, child) for key, child in tree.items()}
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):
        return tree_map(lambda a: f(a) if isinstance(a, torch.Tensor) else a, tree)
    return f(tree) if isinstance(tree, torch.Tensor) else tree
