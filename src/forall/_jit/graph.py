"""Graphs: straight lines of operators on numbered values, of a recorded call or of a tangent."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.op_schema import find_written_args, get_facts
from forall._compat.value_errors import may_raise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Ref:
    """A reference to a value, by its number, among the arguments of an operator."""

    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"v{self.n}"

    def __eq__(self, other: object) -> bool:
        return type(other) is Ref and self.n == other.n

    def __hash__(self) -> int:
        return hash((Ref, self.n))


class Layout(NamedTuple):
    """The metadata of a tensor: everything except its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool  # yet to be conjugated
    neg: bool  # yet to be negated

    @classmethod
    def from_tensor(cls, t: torch.Tensor) -> Layout:
        where = tuple(t.shape), t.stride(), t.storage_offset()
        return cls(*where, t.dtype, t.device, t.is_conj(), t.is_neg())

    @property
    def is_dense(self) -> bool:
        """True if the tensor is contiguous."""
        return self.strides == make_contiguous_strides(self.shape)

    @property
    def storage_entries(self) -> int:
        """The number of entries in memory; an expanded dim counts once."""
        return prod(n for n, step in zip(self.shape, self.strides, strict=True) if step or not n)


def make_contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Value(NamedTuple):
    """A tensor of the program. Values of one ``root`` share memory; the root is the first."""

    layout: Layout
    root: int
    zeros: bool = False  # a ZeroTensor of torch's, without memory


@dataclass(slots=True)
class OpNode:
    """One operator. ``outs`` has the numbers of the results, nested as the operator returns them.

    None stands for a result that is no tensor.
    """

    op: Any
    args: tuple
    kwargs: dict[str, Any]
    outs: Any

    def reads(self) -> Iterator[int]:
        yield from find_refs((self.args, self.kwargs))

    def makes(self) -> Iterator[int]:
        yield from _flatten_outs(self.outs)

    def writes(self) -> list[int]:
        """The values that the operator writes into."""
        found = []
        for place in find_written_args(self.op, self.args):
            if isinstance(place, int):
                a = self.args[place] if place < len(self.args) else None
            else:
                a = self.kwargs.get(place)
            found += find_refs(a)
        return found

    @property
    def has_effect(self) -> bool:
        """True if the operator draws random numbers, or communicates."""
        return get_facts(self.op).has_effect

    def run(self, env: dict[int, Any]) -> None:
        """Run the operator on the values in ``env``, and enter its results there."""
        args = [_fill_refs(a, env) for a in self.args]
        made = self.op(*args, **{k: _fill_refs(a, env) for k, a in self.kwargs.items()})
        bind_outs(self.outs, made, env)

    def replace_inputs(self, other: dict[int, int]) -> None:
        """Replace values among the arguments: ``other`` maps old numbers to new ones."""
        if not other or other.keys().isdisjoint(self.reads()):
            return
        self.args, self.kwargs = (
            map_refs(a, lambda r: Ref(other.get(r.n, r.n))) for a in (self.args, self.kwargs)
        )


@dataclass(slots=True)
class FusedNode(OpNode):
    """A subgraph: several operators as one function, which writes into the values ``written``."""

    written: list[int]

    def writes(self) -> list[int]:
        return self.written

    @property
    def has_effect(self) -> bool:
        return False


@dataclass(slots=True)
class Graph:
    """A straight line of operators.

    ``inputs`` are the arguments of a call. ``captured`` are tensors that the function reaches by
    other ways, read anew in each call. ``constants`` are kept with the graph.
    """

    inputs: list[int]
    captured: dict[int, torch.Tensor]
    constants: dict[int, torch.Tensor]
    nodes: list[OpNode]
    outputs: list[int]

    def find_roots(self) -> list[int]:
        """The root of each value, where values of one root may share memory."""
        raise NotImplementedError

    def may_raise(self, node: OpNode) -> bool:
        """True if an operator may raise for other data, see NOTE [errors of numbers]."""
        raise NotImplementedError

    def eliminate_dead_code(self) -> None:
        """Eliminate dead code: operators that neither lead to a result nor have a side effect.

        An error that depends on the data is a side effect too.
        """
        roots = self.find_roots()
        lasting = {roots[n] for n in (*self.inputs, *self.captured)}
        needed = set(self.outputs)
        read = {roots[n] for n in needed} | lasting
        nodes = []
        for node in reversed(self.nodes):
            used = not needed.isdisjoint(node.makes())
            used = used or any(roots[n] in read for n in node.writes())
            called = node.outs is None or self.may_raise(node)  # for its error
            if used or called or node.has_effect:
                nodes.append(node)
                needed.update(node.reads())
                read.update(roots[n] for n in node.reads())
        self.nodes[:] = reversed(nodes)
        for given in (self.constants, self.captured):
            for n in given.keys() - needed:
                del given[n]


@dataclass(slots=True)
class Program(Graph):
    """The graph of a recorded call."""

    values: list[Value]
    # The functions that call operators, by the id of the node, as far as they were chosen.
    calls: dict[int, tuple[OpNode, Callable]] = field(default_factory=dict)

    @property
    def given_values(self) -> list[int]:
        """The values that a call of the program is given: arguments, then captured tensors."""
        return [*self.inputs, *self.captured]

    def find_roots(self) -> list[int]:
        return [v.root for v in self.values]

    def may_raise(self, node: OpNode) -> bool:
        if node.outs is None and not node.writes():
            return True  # without a result and a write, it is there to raise
        return may_raise(node.op, node.args, node.kwargs, self._read_dtypes)

    def is_on_cpu(self, node: OpNode) -> bool:
        """True if an operator reads a tensor on the CPU."""
        return any(self.values[n].layout.device.type == "cpu" for n in node.reads())

    def _read_dtypes(self, a: Any) -> Iterator[torch.dtype]:
        return (self.values[n].layout.dtype for n in find_refs(a))

    def find_written_roots(self) -> set[int]:
        """The roots of all memory that an operator writes into."""
        return {self.values[n].root for node in self.nodes for n in node.writes()}


class Subgraph(NamedTuple):
    """Some nodes of a program, the values that they are given, and those that are wanted of them.

    A backend is a function from a subgraph to a function of the values ``given``, which returns the
    values ``results``.
    """

    program: Program
    nodes: Sequence[OpNode]
    given: Sequence[int]
    results: Sequence[int]

    def find_changing_constants(self) -> set[int]:
        """The constants that are written into after all: by a node, or by who gets results."""
        roots = self.program.find_roots()
        written = {roots[n] for node in self.nodes for n in node.writes()}
        written |= {roots[n] for n in self.results}
        return {n for n in self.program.constants if roots[n] in written}


def find_refs(a: Any) -> Iterator[int]:
    """The numbers of the values in a tree of arguments."""
    if type(a) is Ref:
        yield a.n
    elif isinstance(a, (tuple, list)):
        for b in a:
            yield from find_refs(b)
    elif isinstance(a, dict):
        yield from find_refs([*a.values()])


def map_refs(a: Any, f: Callable[[Ref], Any]) -> Any:
    """Return a tree of arguments with ``f`` of each reference in its place."""
    if type(a) is Ref:
        return f(a)
    if type(a) is tuple or type(a) is list:
        return type(a)([map_refs(b, f) for b in a])
    if type(a) is dict:
        return {k: map_refs(b, f) for k, b in a.items()}
    return a


def _fill_refs(a: Any, env: dict[int, Any]) -> Any:
    """An argument with values in the place of references."""
    # `map_refs` would take longer. For why it is no function inside another, see
    # NOTE [functions that call themselves].
    if type(a) is Ref:
        return env[a.n]
    return [_fill_refs(b, env) for b in a] if type(a) is list or type(a) is tuple else a


def bind_outs(outs: Any, made: Any, env: dict[int, Any]) -> None:
    """Enter the results of an operator in ``env``."""
    if isinstance(outs, int):
        env[outs] = made
    elif isinstance(outs, (tuple, list)):
        for o, m in zip(outs, made, strict=True):
            bind_outs(o, m, env)


def _flatten_outs(outs: Any) -> Iterator[int]:
    if isinstance(outs, int):
        yield outs
    elif isinstance(outs, (tuple, list)):
        for o in outs:
            yield from _flatten_outs(o)
