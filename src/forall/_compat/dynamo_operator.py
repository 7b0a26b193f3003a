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

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator

from forall._compat.dynamo_trees import answer_forward_mode, find_tensors, thaw
from forall._compat.functorch_interop import run_eagerly

if TYPE_CHECKING:
    from collections.abc import Callable


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
            with run_eagerly():
                return self.run(verb, options, func, args, kwargs)

        def call_graph(*args: Any, **kwargs: Any) -> Any:
            return func(*find_tensors((args, kwargs)), *rest)

        options, args, kwargs = thaw((options, args, kwargs))
        with answer_forward_mode():
            return self.run(verb, options, call_graph, args, kwargs)


def _register() -> None:
    """Register the operator with Dynamo, once that is loaded."""
    from torch._dynamo.variables import higher_order_ops

    known = higher_order_ops._hop_name_to_variable_class
    if "forall_transform" not in known:
        from forall._compat.dynamo_variables import TransformVariable

        known["forall_transform"] = TransformVariable
