"""Trees and calls in a compiled function's graph; see NOTE [transforms in a compiled function].

Dynamo reads the functions on trees, as Python does; the other two are nodes of its graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import SUPPORTED_NODES

if TYPE_CHECKING:
    from collections.abc import Callable

_SEQUENCES = (tuple, list)
_DICTS = (dict, OrderedDict)


def is_namedtuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def map_leaves(f: Callable, tree: Any, ordered: Callable = OrderedDict) -> Any:
    """Return the tree with ``f`` applied to each leaf; a graph may hold its nodes.

    ``ordered`` converts a dict to the stand-in for an OrderedDict.
    """
    if type(tree) in _SEQUENCES:
        return type(tree)([map_leaves(f, x, ordered) for x in tree])
    if type(tree) in _DICTS:
        found = {key: map_leaves(f, x, ordered) for key, x in tree.items()}
        return found if type(tree) is dict else ordered(found)
    if is_namedtuple(tree):
        return type(tree)(*[map_leaves(f, x, ordered) for x in tree])
    return f(tree)


def find_tensors(tree: Any) -> list[torch.Tensor]:
    found = []

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)

    map_leaves(look, tree)
    return found


def replace_tensors(tree: Any, tensors: Any) -> Any:
    """Return the tree with these tensors, in order, in the place of its own."""
    left = list(tensors)

    def take_next(leaf: Any) -> Any:
        return left.pop(0) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(take_next, tree)


class OrderedDictItems(NamedTuple):
    """A stand-in for an OrderedDict in a graph, whose dicts are all of one class."""

    items_of: dict


_CONSTANTS = (bool, int, float, complex, str, type(None))


def check_names(options: dict, kwargs: dict) -> None:
    """Break the graph if an argument that was passed by position is named.

    Dynamo gives the transform a graph, whose inputs have no names.
    """
    dims, names = options.get("in_dims"), options.get("argnames")
    if isinstance(dims, dict):
        if not all(name in kwargs for name in dims):
            torch._dynamo.graph_break(
                msg="in_dims names an argument that is passed by position. In a compiled function "
                "pass it by keyword: vmap(f, in_dims={'x': 0})(x=x)."
            )
    elif names is not None:
        for name in names if isinstance(names, tuple) else (names,):
            if name not in kwargs:
                torch._dynamo.graph_break(
                    msg="argnames names an argument that is passed by position. In a compiled "
                    "function pass it by keyword, or give argnums."
                )


def make_operand(leaf: Any) -> Any:
    """Return a graph's operand for an argument; non-tensors are captured by the function itself."""
    if isinstance(leaf, torch.Tensor) or type(leaf) in _CONSTANTS:
        return leaf
    if _is_tree(type(leaf)):
        torch._dynamo.graph_break(
            msg="A transform of forall in a compiled function takes trees of tuples, lists and "
            "dicts. Pass the tensors of this object, or call the transform outside."
        )
    return None


def _is_tree(kind: type) -> bool:
    """Return True for a class whose objects have leaves of their own. Dynamo runs this function."""
    return kind in SUPPORTED_NODES


_is_tree._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def call_in_graph(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Return ``func(*args, **kwargs)``, for a function that a transform has returned."""
    args, kwargs = thaw((args, kwargs))
    with answer_forward_mode():
        return func(*args, **kwargs)


def one_example(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return an example tensor to trace a function for: an index of ``dim``, or all of ``x``.

    It requires grad and is no leaf. Dynamo leaves the backward of a custom Function out of a graph
    if nothing in it requires grad. A function may write to its arguments, and so not to leaves.
    """
    if dim is not None:
        shape = x.shape[:dim] + x.shape[dim + 1 :]
        x = x.select(dim, 0) if x.shape[dim] else x.new_empty(shape)
    x = x.detach()
    with torch.enable_grad():
        return x.requires_grad_().clone() if x.is_floating_point() or x.is_complex() else x


_KINDS = torch._C._TorchDispatchModeKey.FUNCTIONAL, torch._C._TorchDispatchModeKey.FAKE


def answer_forward_mode() -> Any:
    """Return a context in which forward mode can query functional and fake tensors.

    torch caches the answer for a fake tensor under a key that does not identify its memory.
    """
    from forall._compat.export_tracer import PlainOperatorMode

    if not any(torch._C._get_dispatch_mode(kind) for kind in _KINDS):
        return nullcontext()
    around = any(type(mode) is PlainOperatorMode for mode in _get_current_dispatch_mode_stack())
    return nullcontext() if around else PlainOperatorMode()


def thaw(tree: Any) -> Any:
    """Return a tree of a node with ordinary lists and dicts; nodes keep immutable ones."""
    if isinstance(tree, list):
        return [thaw(x) for x in tree]
    if isinstance(tree, dict):
        return {key: thaw(x) for key, x in tree.items()}
    if type(tree) is OrderedDictItems:
        return OrderedDict(thaw(tree.items_of))
    if is_namedtuple(tree):
        return type(tree)(*map(thaw, tree))
    return tuple(map(thaw, tree)) if type(tree) is tuple else tree
