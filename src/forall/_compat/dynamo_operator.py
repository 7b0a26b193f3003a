"""The capture of a transform's call by torch.compile, as one node of its graph.

NOTE [transforms in a compiled function]
    Dynamo, which traces a function's Python for torch.compile, cannot trace forall's engine, and
    its graphs hold tensors alone. So a call of a transform is a higher-order operator. Dynamo
    traces the transformed function once, for one example, into a subgraph: each tensor that the
    function captures becomes an input of the subgraph.

    The node runs the transform itself on the subgraph. AOTAutograd then runs the engine under its
    tracers, as make_fx does, and sees plain operators.

    The result of a transform is taken apart by item nodes, so it may be any pytree. A function
    that a transform returns, as `vjp` does, is an object in the graph, and each call of it is a
    node. Python that cannot be traced for one example, such as a test of a tensor's value, breaks
    the graph at the call. The transform then runs as it does without a compiler.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import SUPPORTED_NODES

from forall._compat.functorch_interop import eagerly

if TYPE_CHECKING:
    from collections.abc import Callable

_SEQUENCES = (tuple, list)
_DICTS = (dict, OrderedDict)


# --- trees: read by Dynamo as well as by Python --------------------------------------------------


def is_named(tree: Any) -> bool:
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
    if is_named(tree):
        return type(tree)(*[map_leaves(f, x, ordered) for x in tree])
    return f(tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    found = []

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)

    map_leaves(look, tree)
    return found


def with_tensors(tree: Any, tensors: Any) -> Any:
    """Return the tree with these tensors, in order, in the place of its own."""
    left = list(tensors)

    def put(leaf: Any) -> Any:
        return left.pop(0) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(put, tree)


class Ordered(NamedTuple):
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


def operand(leaf: Any) -> Any:
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


# --- the operator --------------------------------------------------------------------------------


class TransformInGraph(HigherOrderOperator):
    """The operator ``transform(func, **options)(*args, **kwargs)``, with ``func`` as a graph.

    It is never dispatched: running a graph runs the transform.
    """

    def __init__(self, run: Callable, example_dims: Callable) -> None:
        super().__init__("forall_transform")
        self.run = run
        self.example_dims = example_dims

    # Dynamo reads an operator's name to find how to trace it. To register that at import would
    # import Dynamo, which takes a second.
    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        _register()
        return "forall_transform"

    @__name__.setter  # noqa: A003
    def __name__(self, name: str) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    def __call__(
        self, func: Callable, verb: str, options: dict, args: tuple, kwargs: dict, *rest: Any
    ) -> Any:
        """Run the transform of a graph, or of a function if Dynamo has broken the graph.

        A graph takes the tensors of the arguments, then those that the function captures.
        """
        if not isinstance(func, torch.fx.GraphModule):
            with eagerly():
                return self.run(verb, options, func, args, kwargs)

        def as_given(*args: Any, **kwargs: Any) -> Any:
            return func(*tensors_of((args, kwargs)), *rest)

        options, args, kwargs = _thaw((options, args, kwargs))
        with _answer_forward_mode():
            return self.run(verb, options, as_given, args, kwargs)


def call_in_graph(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Return ``func(*args, **kwargs)``, for a function that a transform has returned."""
    args, kwargs = _thaw((args, kwargs))
    with _answer_forward_mode():
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


def _answer_forward_mode() -> Any:
    """Return a context in which forward mode can query functional and fake tensors.

    torch caches the answer for a fake tensor under a key that does not identify its memory.
    """
    from forall._compat.export_tracer import Recorded

    if not any(torch._C._get_dispatch_mode(kind) for kind in _KINDS):
        return nullcontext()
    around = any(type(mode) is Recorded for mode in _get_current_dispatch_mode_stack())
    return nullcontext() if around else Recorded()


def _thaw(tree: Any) -> Any:
    """Return a tree of a node with ordinary lists and dicts; nodes keep immutable ones."""
    if isinstance(tree, list):
        return [_thaw(x) for x in tree]
    if isinstance(tree, dict):
        return {key: _thaw(x) for key, x in tree.items()}
    if type(tree) is Ordered:
        return OrderedDict(_thaw(tree.items_of))
    if is_named(tree):
        return type(tree)(*map(_thaw, tree))
    return tuple(map(_thaw, tree)) if type(tree) is tuple else tree


def _register() -> None:
    """Register the operator with Dynamo, once that is loaded."""
    from torch._dynamo.variables import higher_order_ops

    known = higher_order_ops._hop_name_to_variable_class
    if "forall_transform" not in known:
        from forall._compat.dynamo_variables import TransformVariable

        known["forall_transform"] = TransformVariable
