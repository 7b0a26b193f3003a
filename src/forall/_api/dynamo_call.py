"""A call of a transform in a function that torch.compile compiles.

Dynamo traces `call_transform` and never runs it. See NOTE [transforms in a compiled function].
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from forall._api import mapped_inputs
from forall._compat.dynamo_operator import TransformInGraph
from forall._compat.dynamo_trees import (
    OrderedDictItems,
    check_names,
    find_tensors,
    make_operand,
    map_leaves,
    replace_tensors,
)
from forall._core.errors import TransformCall

if TYPE_CHECKING:
    from collections.abc import Callable

# Other transforms are made of these, and Dynamo traces through their code.
VERBS = frozenset({"vmap", "grad", "grad_and_value", "vjp", "jvp", "linearize", "jacrev", "jacfwd"})
VERBS |= {"jacobian", "hessian", "hessian_diag", "hvp", "laplacian"}


def call_transform(verb: str, options: dict, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Return ``verb(func, **options)(*args, **kwargs)``, computed by a node of the graph."""
    check_names(options, kwargs)
    seen = _get_function_args(verb, args)

    def body(*examples: torch.Tensor) -> Any:
        given, by_name = replace_tensors((seen, kwargs), examples)
        return func(*given, **by_name)

    operands = map_leaves(make_operand, (args, kwargs), OrderedDictItems)
    return _transform(
        func, verb, options, args, kwargs, body, operands, find_tensors((seen, kwargs))
    )


def _get_function_args(verb: str, args: tuple) -> tuple:
    """Return the arguments of a transform that its function is called with."""
    if verb == "jvp":
        return args[0]
    return args[:-1] if verb == "hvp" else args


# --- where the graph is run ----------------------------------------------------------------------


def _run_transform(verb: str, options: dict, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Return ``verb(func, **options)(*args, **kwargs)``, for each transform's own signature."""
    transform = getattr(sys.modules["forall"], verb)
    if verb in ("jvp", "linearize", "vjp"):
        return transform(func, *args, **options)
    return transform(func, **options)(*args, **kwargs)


def _find_example_dims(verb: str, options: dict, args: tuple, kwargs: dict) -> list[int | None]:
    """Return the dims along which the function sees one example; none but for `vmap`."""
    if verb != "vmap":
        return []
    in_dims, by_name = options["in_dims"], None
    if isinstance(in_dims, dict):
        in_dims, by_name = (None,) * len(args), {name: in_dims.get(name) for name in kwargs}
    asked = TransformCall("vmap", _run_transform, in_dims=options["in_dims"])
    leaves, _, dims, *_ = mapped_inputs.check_inputs(
        asked, args, kwargs, in_dims, by_name, options["axis_size"]
    )
    return [d for x, d in zip(leaves, dims, strict=True) if isinstance(x, torch.Tensor)]


_transform = TransformInGraph(_run_transform, _find_example_dims)
