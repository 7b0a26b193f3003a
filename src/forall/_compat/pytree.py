"""Pytrees by torch's own registry, so that node types which other libraries register count too."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import fields, is_dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import (
    BUILTIN_TYPES,
    SUPPORTED_NODES,
    TreeSpec,
    _broadcast_to_and_flatten,
    is_namedtuple_class,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "TreeOutline",
    "TreeSpec",
    "are_leaves",
    "find_classes",
    "flatten",
    "copy_contexts",
    "keystr",
    "get_leaves",
    "map_tensors",
    "broadcast_prefix",
    "format_tree",
    "tree_flatten_with_path",
    "tree_map",
    "unflatten",
]


class _UnknownNode(Exception):  # noqa: N818 - no error: another way is taken
    """A signal that a tree has nodes which only torch's registry can flatten."""


_specs: dict[Any, TreeSpec] = {}
_MANY = 1000


def is_registered(kind: type) -> bool:
    """Return True if a flatten function is registered for this class."""
    return kind in SUPPORTED_NODES


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return leaves and spec of a tree; specs of tuples, lists and dicts are cached."""
    found: list[Any] = []
    try:
        outline = _walk(tree, found)
    except _UnknownNode:
        return tree_flatten(tree)
    spec = _specs.get(outline)
    if spec is None:
        if is_dynamo_compiling():  # a function that Dynamo traces must not write to globals
            return tree_flatten(tree)
        if len(_specs) >= _MANY:
            _specs.clear()
        spec = _specs[outline] = tree_flatten(tree)[1]
    return found, spec


class TreeOutline:
    """The structure of trees, at less cost than specs, with their leaves and containers.

    The outline of a tree (`outline_node`) is hashable, and None for a leaf. It leaves out the
    identity of the containers, which are ``nodes``. Of ``odd`` nodes the outline has the class
    alone: each is listed with its children and its context.
    """

    __slots__ = ("leaves", "nodes", "odd")

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.nodes: list[Any] = []
        self.odd: list[tuple[Any, list[Any], Any]] = []

    def outline_node(self, node: Any) -> Any:
        kind = type(node)
        if kind in _LEAVES:
            return self.leaves.append(node)
        if kind is dict or (kind is OrderedDict and not node.__dict__):
            self.nodes.append(node)
            for key in node:
                if type(key) is not str:  # True and 1 are one key, but not one name
                    self.odd.append((node, [*node.values()], [*node]))
                    return (_ODD, kind, *self.all(node.values()))
            return (kind, *node, *self.all(node.values()))
        if kind is tuple or kind is list:
            self.nodes.append(node)
            return (kind, *self.all(node))
        is_named = issubclass(kind, tuple) and is_namedtuple_class(kind)
        if not is_named and kind not in SUPPORTED_NODES:
            return self.leaves.append(node)
        self.nodes.append(node)
        children, context = SUPPORTED_NODES[_NAMED if is_named else kind].flatten_fn(node)
        children = [*children]
        if not is_named or kind.__dictoffset__ or kind.__basicsize__ > tuple.__basicsize__:
            self.odd.append((node, children, context))
        return (_ODD, kind, *self.all(children))

    def all(self, nodes: Iterable[Any]) -> list[Any]:
        add, of = self.leaves.append, self.outline_node
        return [add(node) if type(node) in _LEAVES else of(node) for node in nodes]


_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float})  # the classes of most leaves
are_leaves = _LEAVES.issuperset  # of classes
_ODD = object()
_NAMED: Any = next(kind for kind in BUILTIN_TYPES if not isinstance(kind, type))  # `namedtuple`


def find_classes(spec: TreeSpec) -> set[type]:
    """Return the classes of a tree's containers, but for those of Python's own."""
    kind = spec._context if spec.type is _NAMED else spec.type
    own = set() if kind is None or kind in _PYTHONS else {kind}
    return own.union(*map(find_classes, spec._children))


_PYTHONS = frozenset({tuple, list, dict, OrderedDict, defaultdict, deque})


def find_contexts(spec: TreeSpec) -> list[Any]:
    """Return the contexts of a tree's containers, but for those of Python's own."""
    own = [] if spec.type is None or spec.type in BUILTIN_TYPES else [spec._context]
    return [*own, *(c for child in spec._children for c in find_contexts(child))]


def find_odd_keys(spec: TreeSpec) -> list[Any]:
    """Return the keys of a tree's dicts that are no strings."""
    own: list[Any] = []
    if spec.type in (dict, OrderedDict, defaultdict):
        keys = spec._context[1] if spec.type is defaultdict else spec._context
        own = [key for key in keys if type(key) is not str]
    return [*own, *(key for child in spec._children for key in find_odd_keys(child))]


def _walk(node: Any, found: list[Any]) -> Any:
    """Append the leaves, and return the structure in a hashable form: None for a leaf."""
    kind = type(node)
    if kind in _LEAVES:
        found.append(node)
        return None
    if kind is dict:
        for key in node:
            if type(key) is not str:  # True and 1 are one key, but not one name
                raise _UnknownNode
        return (dict, *node, *[_walk(child, found) for child in node.values()])
    if kind is tuple or kind is list:
        return (kind, *[_walk(child, found) for child in node])
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):
        raise _UnknownNode
    found.append(node)
    return None


LEAF = flatten(0)[1]  # the spec of a tree that is a leaf


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """Return the tree of this spec with these leaves."""
    given = list(leaves)
    if len(given) != spec.num_leaves:
        raise ValueError(f"unflatten: {len(given)} leaves for a tree of {spec.num_leaves}")
    if spec.type is None:
        return given[0]
    return _build_tree(spec, iter(given))


def copy_contexts(spec: TreeSpec) -> TreeSpec:
    """Return a spec whose contexts have containers of their own."""
    if type(spec) is not TreeSpec or spec.type is None:
        return spec
    children = [*map(copy_contexts, spec._children)]
    kept = spec._context if spec.type in BUILTIN_TYPES else _copy_containers(spec._context)
    if kept is spec._context and all(map(is_, children, spec._children)):
        return spec
    return TreeSpec(spec.type, kept, children)


def has_same_structure(spec: TreeSpec, other: TreeSpec) -> bool:
    """True if specs are equal, or differ only in contexts that hold the same.

    A context of a class without an equality equals itself alone. So a context that a function
    creates in each run would differ between its runs.
    """
    if spec == other:
        return True
    return (
        spec.type is other.type
        and len(spec._children) == len(other._children)
        and holds_same(spec._context, other._context)
        and all(map(has_same_structure, spec._children, other._children))
    )


def holds_same(a: Any, b: Any, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """True if two objects are equal, or of one class without an equality and hold the same."""
    if a is b or (id(a), id(b)) in within:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    within |= {(id(a), id(b))}
    kind = type(a)
    if kind in (tuple, list):
        return len(a) == len(b) and all(holds_same(x, y, within) for x, y in zip(a, b, strict=True))
    if kind is dict:
        return [*a] == [*b] and all(holds_same(a[k], b[k], within) for k in a)
    if kind.__eq__ is object.__eq__:
        # An object that is larger than its attributes may hold more than they show.
        is_plain = hasattr(a, "__dict__") and kind.__basicsize__ == _Plain.__basicsize__
        return is_plain and holds_same(vars(a), vars(b), within)
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - an object may answer with anything, and then is not equal
        return False


class _Plain:
    """An object whose attributes are all that it holds."""


def _copy_containers(x: Any) -> Any:
    kind = type(x)
    if kind is tuple:
        found = tuple(map(_copy_containers, x))
        return x if all(map(is_, found, x)) else found
    if kind is dict or kind is OrderedDict:
        return kind((k, _copy_containers(v)) for k, v in x.items())
    if kind is list or kind is set or kind is deque:
        return deque(x, x.maxlen) if kind is deque else kind(map(_copy_containers, x))
    return x


def _build_tree(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    kind = spec.type
    if kind is None:
        return next(leaves)
    children = [_build_tree(child, leaves) for child in spec._children]
    if kind is tuple:
        return tuple(children)
    if kind is list:
        return children
    if kind is dict:
        return dict(zip(spec._context, children, strict=True))
    try:
        return SUPPORTED_NODES[kind].unflatten_fn(children, spec._context)
    except Exception:
        # Where there is no derivative a leaf is None, which a class may not expect (PackedSequence)
        if kind is not _NAMED or not any(child is None for child in children):
            raise
        return spec._context._make(children)


def get_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    found: list[Any] = []
    try:
        _walk(tree, found)
    except _UnknownNode:
        return tree_leaves(tree)
    return found


def broadcast_prefix(tree: Any, spec: TreeSpec) -> list[Any] | None:
    """Return ``tree`` broadcast to a leaf for every leaf of ``spec``; None if it does not fit."""
    if tree is None or type(tree) is int:  # one for all, without a walk
        return [tree] * spec.num_leaves
    if type(tree) is tuple and spec.type is tuple and len(tree) == spec.num_children:
        found: list[Any] = []
        for i, branch in enumerate(tree):
            part = broadcast_prefix(branch, spec.child(i))
            if part is None:
                return None
            found += part
        return found
    if any(map(is_dataclass, find_classes(spec))):
        return _broadcast_by_fields(tree, spec)
    return _broadcast_to_and_flatten(tree, spec)


def _broadcast_by_fields(tree: Any, spec: TreeSpec) -> list[Any] | None:
    """Broadcast a tree with dataclasses, for which torch drops children that are None."""
    kind = spec.type
    own = _NAMED if is_namedtuple_class(type(tree)) else type(tree)
    if own not in SUPPORTED_NODES:
        return [tree] * spec.num_leaves
    if kind is None or own is not kind:
        return None
    if is_dataclass(kind):
        names = _find_child_fields(kind, spec)
        if None in names:
            return _broadcast_to_and_flatten(tree, spec)
        branches = [getattr(tree, name, None) for name in names]
    else:
        branches, context = SUPPORTED_NODES[kind].flatten_fn(tree)
        if context != spec._context or len(branches) != spec.num_children:
            return None
    found: list[Any] = []
    for branch, child in zip(branches, spec.children(), strict=True):
        part = broadcast_prefix(branch, child)
        if part is None:
            return None
        found += part
    return found


def _find_child_fields(kind: type, spec: TreeSpec) -> list[str | None]:
    """Return the names of the fields that hold a dataclass's children; None if unknown."""
    marks = [_Star() for _ in range(spec.num_children)]
    try:
        whole = SUPPORTED_NODES[kind].unflatten_fn(marks, spec._context)
    except Exception:  # noqa: BLE001 - a class may ask more of what its fields hold
        return [None]
    held = {id(getattr(whole, f.name, None)): f.name for f in fields(kind)}
    return [held.get(id(mark)) for mark in marks]


class _Star:
    def __repr__(self) -> str:
        return "*"


def format_tree(spec: TreeSpec) -> str:
    """Return a tree's structure as its user would write it, with a star for every leaf."""
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
