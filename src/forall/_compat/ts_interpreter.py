"""TorchScript's interpreter for straight-line programs, a third faster per operator than Python."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.dispatch_state import without_history

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_C = torch._C
_TENSOR = _C.TensorType.get()
_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_NUMBERS = (bool, int, float, complex)
_CONSTANTS = (*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout)


class CannotScript(Exception):  # noqa: N818 - no error: Python runs it
    """A signal that a program has a value or operator that cannot be written in TorchScript."""


class _OperatorSchema(NamedTuple):
    """The arguments and results of an operator, by its schema."""

    operator: str
    names: list[str]
    types: list[Any]
    defaults: list[Any]
    returns: list[Any]
    text: str


@cache
def _read_schema(op: Any) -> _OperatorSchema:
    schema = op._schema
    names, types, defaults = [], [], []
    for a in schema.arguments:
        names.append(a.name)
        types.append(a.type)
        defaults.append(a.default_value)
    returns = [r.type for r in schema.returns]
    return _OperatorSchema(schema.name, names, types, defaults, returns, str(schema))


class ScriptBuilder:
    """A TorchScript graph that is being built; each operator is the very overload given."""

    def __init__(self) -> None:
        self.graph = _C.Graph()

    def argument(self) -> Any:
        """Add an input, and return its value."""
        return self.graph.addInput()

    def constant(self, value: Any) -> Any:
        """Add an existing tensor, or a non-tensor argument of an operator."""
        if isinstance(value, torch.memory_format):
            value = _FORMATS[value]
        elif not isinstance(value, (torch.Tensor, *_CONSTANTS)):
            raise CannotScript
        return self.graph.insertConstant(value)

    def call(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Add a call of an operator, and return its results; a list for a list."""
        told = _read_schema(op)
        given = [*args, *map(kwargs.get, told.names[len(args) :], told.defaults[len(args) :])]
        given = [*map(self._convert_argument, given, told.types)]
        node = self._add_node(told.operator, given, told.returns)
        if node.schema() != told.text:
            raise CannotScript  # the overload for numbers: in half precision it rounds them first
        return [*map(node.outputsAt, range(len(told.returns)))]

    def unpack_list(self, values: Any, count: int) -> list[Any]:
        """Return the tensors of a list value."""
        node = self._add_node("prim::ListUnpack", [values], [_TENSOR] * count)
        return [*map(node.outputsAt, range(count))]

    def function(self, results: Sequence[Any]) -> Callable[..., tuple]:
        """Return the graph as a function, which runs below autograd and without optimisation."""
        types = _C.TupleType([_TENSOR] * len(results))
        made = self._add_node("prim::TupleConstruct", [*results], [types])
        self.graph.registerOutput(made.output())
        run = _C._create_function_from_graph("program", self.graph)

        def line(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before = _C._get_graph_executor_optimize()
            _C._set_graph_executor_optimize(False)  # this thread's
            try:
                with without_history():
                    return run(*tensors)
            finally:
                _C._set_graph_executor_optimize(before)

        return line

    def _convert_argument(self, x: Any, kind: Any) -> Any:
        while kind.kind() == "OptionalType":
            if x is None:
                return self.constant(None)
            kind = kind.getElementType()
        if isinstance(x, _C.Value):
            return x
        if isinstance(x, (list, tuple)) and kind.kind() == "ListType":
            inner = kind.getElementType()
            if x and all(type(b) in _NUMBERS for b in x):
                return self.graph.insertConstant([_convert_number(b, inner) for b in x])
            values = [self._convert_argument(b, inner) for b in x]
            return self._add_node("prim::ListConstruct", values, [kind]).output()
        return self.constant(_convert_number(x, kind))

    def _add_node(self, name: str, given: list[Any], types: Sequence[Any]) -> Any:
        node = self.graph.insertNode(self.graph.create(name, given, len(types)))
        for i, kind in enumerate(types):
            if kind != _TENSOR:  # as values are
                node.outputsAt(i).setType(kind)
        return node


def _convert_number(x: Any, kind: Any) -> Any:
    return float(x) if kind.kind() == "FloatType" and type(x) in (int, bool) else x
