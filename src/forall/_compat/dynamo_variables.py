"""Dynamo's variables for a transform, and for a function that a transform returned.

See NOTE [transforms in a compiled function]. Only Dynamo loads this module.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.exc import unimplemented
from torch._dynamo.utils import get_fake_value
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import (
    TorchHigherOrderOperatorVariable,
    make_attr,
    speculate_subgraph,
)
from torch._ops import HigherOrderOperator
from torch.utils import _pytree

from forall._compat.dynamo_trees import call_in_graph, one_example


class TransformVariable(TorchHigherOrderOperatorVariable):
    """Dynamo's variable for the operator `TransformInGraph`."""

    _HOP_NAME = "forall_transform"
    _ALLOW_FALLBACK_TO_EAGER = True

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        """Ask no function mode: a default device is to be on where the function is traced."""
        return self._call_function(tx, args, kwargs)

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        """Trace the function for one example, and put the call into the graph."""
        _, verb, options, _, _, body, operands, tensors = args
        verb = verb.as_python_constant()
        options = _pytree.tree_map_only(torch.fx.Proxy, _fix_number, options.as_proxy())
        operands = operands.as_proxy()
        whole = tensors.items
        fakes = _pytree.tree_map_only(torch.fx.Proxy, _get_example_value, operands)
        try:
            dims = self.value.example_dims(verb, options, *fakes) or [None] * len(whole)
        except Exception as error:  # noqa: BLE001 - the call raises it where it runs as it is
            unimplemented(
                gb_type="A transform of forall refuses its arguments",
                context=verb,
                explanation=str(error),
                hints=[],
            )
        examples = [_make_example_variable(tx, x, d) for x, d in zip(whole, dims, strict=True)]
        with _trace_autograd():
            _, graph, captured = speculate_subgraph(
                tx,
                body,
                examples,
                {},
                verb,
                source_target=self.value,
                enable_grad=None if verb == "vmap" else True,
                set_subgraph_inputs="flatten_manual",  # so none of them counts as captured
                supports_input_mutation=True,
                supports_aliasing=True,
            )
        _refuse_operators(verb, graph, self.value)
        for x in examples:  # the graph runs on what is given
            example = x.as_proxy().node
            example.graph.erase_node(example)
        module = torch.fx.GraphModule(tx.output.nn_modules, graph)
        node = make_attr(tx, tx.output.install_subgraph(f"{verb}_body", module))
        return _emit(tx, self.value, (node, verb, options, *operands, *captured))


def _refuse_operators(verb: str, graph: torch.fx.Graph, ours: HigherOrderOperator) -> None:
    """Break the graph if a function calls another operator that takes functions.

    Of a custom Function Dynamo keeps a derivative of first order alone. A checkpoint's operator
    does not know forall's levels.
    """
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target is not ours:
            unimplemented(
                gb_type="A function that forall transforms calls a higher-order operator",
                context=f"{verb}: {node.target}",
                explanation="A custom autograd.Function, a checkpoint or torch.cond in a function "
                "that forall transforms is not captured in a graph.",
                hints=["Leave fullgraph=True out: the call then runs as it does uncompiled."],
            )


def _trace_autograd() -> Any:
    """Return a context in which Dynamo traces torch.autograd.grad into the graph as a call."""
    if hasattr(config, "trace_autograd_ops"):
        return config.patch(trace_autograd_ops=True)
    return nullcontext()


class FunctionVariable(VariableTracker):
    """A function that a transform has returned, as an object in the graph."""

    def __init__(self, proxy: torch.fx.Proxy, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.proxy = proxy

    def as_proxy(self) -> torch.fx.Proxy:
        return self.proxy

    def python_type(self) -> type:
        return type(_get_example_value(self.proxy))

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        given = tuple(x.as_proxy() for x in args)
        by_name = {name: x.as_proxy() for name, x in kwargs.items()}
        return _emit(tx, call_in_graph, (self.proxy, given, by_name))


def _get_example_value(proxy: torch.fx.Proxy) -> Any:
    return proxy.node.meta["example_value"]


def _fix_number(proxy: torch.fx.Proxy) -> Any:
    """Return an option that is a number unknown to Dynamo as the number of this call.

    Dynamo takes a number that differs from call to call for a symbol. Options decide how a
    transform runs, so the code is compiled for each of their values.
    """
    value = _get_example_value(proxy)
    return int(value) if isinstance(value, torch.SymInt) else proxy


def _make_example_variable(tx: Any, x: VariableTracker, dim: int | None) -> VariableTracker:
    proxy = tx.output.create_proxy("call_function", one_example, (x.as_proxy(), dim), {})
    return wrap_fx_proxy(tx, proxy)


def _emit(tx: Any, target: Any, args: tuple) -> VariableTracker:
    """Add a node to the graph, and return its result as variables of Dynamo's."""
    proxy = tx.output.create_proxy("call_function", target, args, {})
    return _make_variable(tx, get_fake_value(proxy.node, tx), proxy)


def _make_variable(tx: Any, value: Any, proxy: torch.fx.Proxy) -> VariableTracker:
    """Return a variable for ``value``, which is the result of ``proxy`` for an example."""
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return wrap_fx_proxy(tx, proxy, example_value=value)
    proxy.node.meta["example_value"] = value
    if isinstance(value, (tuple, list, dict)):
        pairs = [*value.items()] if isinstance(value, dict) else [*enumerate(value)]
        items = [_make_variable(tx, x, _make_item_node(tx, proxy, key)) for key, x in pairs]
        if isinstance(value, dict):
            items.insert(0, VariableTracker.build(tx, tuple(value)))
        kinds = {
            tuple: _make_tuple,
            list: _make_list,
            dict: _make_dict,
            OrderedDict: _make_ordered_dict,
        }
        make = kinds.get(type(value), type(value))
        return VariableTracker.build(tx, make).call_function(tx, items, {})
    if callable(value):
        function = VariableTracker.build(tx, _wrap_function)
        return function.call_function(tx, [FunctionVariable(proxy)], {})
    return VariableTracker.build(tx, value)


def _make_item_node(tx: Any, proxy: torch.fx.Proxy, key: Any) -> torch.fx.Proxy:
    return tx.output.create_proxy("call_function", operator.getitem, (proxy, key), {})


# --- run by Dynamo -------------------------------------------------------------------------------


def _wrap_function(variable: Any) -> Any:
    """Wrap a variable as a function of Python's, which Dynamo knows better than forall's class."""
    return lambda *args, **kwargs: variable(*args, **kwargs)  # noqa: PLW0108


def _make_tuple(*items: Any) -> tuple:
    return items


def _make_list(*items: Any) -> list:
    return list(items)


def _make_dict(keys: tuple, *items: Any) -> dict:
    return dict(zip(keys, items, strict=True))


def _make_ordered_dict(keys: tuple, *items: Any) -> OrderedDict:
    return OrderedDict(zip(keys, items, strict=True))
