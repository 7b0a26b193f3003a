"""A call of a transform in a function that torch.compile compiles.

`call` is read by Dynamo and never run. See NOTE [transforms in a compiled function].
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import Call
from forall._torch import trees
from forall._torch.dynamo import Ordered, TransformInGraph, map_leaves, tensors_of, with_tensors
from forall._transforms import mapping

if TYPE_CHECKING:
    from collections.abc import Callable

# The rest is made of these, and Dynamo reads how.
VERBS = frozenset({"vmap", "grad", "grad_and_value", "vjp", "jvp", "linearize", "jacrev", "jacfwd"})
VERBS |= {"jacobian", "hessian", "hessian_diag", "hvp", "laplacian"}
_CONSTANTS = (bool, int, float, complex, str, type(None))


def call(verb: str, options: dict, func: Callable, args: tuple, kwargs: dict) -> Any:
    """``verb(func, **options)(*args, **kwargs)`` as a node of the graph."""
    _check_names(options, kwargs)
    seen = _seen(verb, args)

    def body(*examples: torch.Tensor) -> Any:
        given, by_name = with_tensors((seen, kwargs), examples)
        return func(*given, **by_name)

    operands = map_leaves(_operand, (args, kwargs), Ordered)
    return _transform(func, verb, options, args, kwargs, body, operands, tensors_of((seen, kwargs)))


def _seen(verb: str, args: tuple) -> tuple:
    """The arguments of a transform that are those of its function."""
    if verb == "jvp":
        return args[0]
    return args[:-1] if verb == "hvp" else args


def _check_names(options: dict, kwargs: dict) -> None:
    """Break the graph where an argument that was passed by position is named.

    What the transform gets from Dynamo is a graph, whose arguments have no names.
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


def _operand(leaf: Any) -> Any:
    """What a graph holds of an argument: the function itself has what is no tensor."""
    if isinstance(leaf, torch.Tensor) or type(leaf) in _CONSTANTS:
        return leaf
    if _is_tree(type(leaf)):
        torch._dynamo.graph_break(
            msg="A transform of forall in a compiled function takes trees of tuples, lists and "
            "dicts. Pass the tensors of this object, or call the transform outside."
        )
    return None


def _is_tree(kind: type) -> bool:
    """Return True for a class whose objects have leaves of their own. Dynamo runs it."""
    return kind in trees.SUPPORTED_NODES


_is_tree._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


# --- where the graph is run ----------------------------------------------------------------------


def _run(verb: str, options: dict, func: Callable, args: tuple, kwargs: dict) -> Any:
    make = getattr(sys.modules["forall"], verb)
    if verb == "vjp":
        return make(func, *args, **options)
    if verb == "linearize":
        return make(func, *args)
    if verb == "jvp":
        return make(func, *args, **options)
    return make(func, **options)(*args, **kwargs)


def _example_dims(verb: str, options: dict, args: tuple, kwargs: dict) -> list[int | None]:
    """For each tensor of the arguments the dim of which the function sees one example, if any."""
    if verb != "vmap":
        return []
    in_dims, by_name = options["in_dims"], None
    if isinstance(in_dims, dict):
        in_dims, by_name = (None,) * len(args), {name: in_dims.get(name) for name in kwargs}
    asked = Call("vmap", _run, in_dims=options["in_dims"])
    leaves, _, dims, _ = mapping.inputs(asked, args, kwargs, in_dims, by_name)
    return [d for x, d in zip(leaves, dims, strict=True) if isinstance(x, torch.Tensor)]


_transform = TransformInGraph(_run, _example_dims)
