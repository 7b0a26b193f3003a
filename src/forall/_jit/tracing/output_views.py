"""Results that are views, of an input or of another result.

NOTE [views in the open]
    To autograd, what a custom node returns has memory of its own. So where a derivative is taken
    and a result shares memory with an input, a captured tensor or another result, the node returns
    the base of the view. The views are made of the node's results afterwards, as the function made
    them, so that they have the history of views, and a write into one is seen in all. This is for
    views alone: a call is not recorded if such a result has other history, or lies in memory that
    the function has written into.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from forall._compat.autograd_graph import get_base, is_view_of
from forall._compat.op_schema import get_facts
from forall._jit.backends.python_source import compile_view_function
from forall._jit.graph import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.graph import OpNode
    from forall._jit.tracing.tracer import Tracer

    Tensor = torch.Tensor

_DETACH = torch.ops.aten.detach.default


class OutputBases(NamedTuple):
    """The bases (``ends``) that a node returns in place of results, and how to make the views."""

    ends: list[Tensor]
    numbers: list[int]  # of the ends
    places: list[tuple[int, bool]]  # for each end a result, and True if it is a view of the end
    given: list[int]  # inputs and captured values that are results, or bases of results
    run: Callable[..., tuple[Tensor, ...]]  # makes the results of ``given`` and the ends

    def find_bases(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The bases (ends) of the results of another run of the function."""
        return [get_base(results[i]) if views else results[i] for i, views in self.places]


def find_output_bases(recorder: Tracer, results: Sequence[Tensor]) -> OutputBases | None:
    """The bases of results that are views; None where no result is one, or one is not certain."""
    numbers = [recorder.add_result(t) for t in results]
    if recorder.why is not None or recorder.notes.makes_hooks:
        return None
    opening = _OutputBaseFinder(recorder, [n for n in numbers if n is not None])
    if not all(opening.add_result(i, t) for i, t in enumerate(results)):
        return None
    return opening.build_bases()


class _OutputBaseFinder:
    def __init__(self, recorder: Tracer, numbers: list[int]) -> None:
        self.recorder, self.numbers, self.results = recorder, numbers, {*numbers}
        self.roots = [v.root for v in recorder.traced.values]
        self.makers = {n: node for node in recorder.nodes for n in node.makes()}
        self.written = {self.roots[n] for node in recorder.nodes for n in node.writes()}
        self.sharing = Counter(self.roots[n] for n in self.results)
        self.outside = {*recorder.traced.inputs, *recorder.traced.captured}
        self.given: list[int] = []
        self.ends: dict[int, tuple[Tensor, tuple[int, bool]]] = {}
        self.nodes: dict[int, OpNode] = {}
        self.cut: set[int] = set()  # views without a history of what has one

    def add_result(self, i: int, t: Tensor) -> bool:
        """Add a result; return False if it is neither an end, nor given, nor a view of these."""
        n = self.numbers[i]
        root = self.roots[n]
        if n in self.outside:
            self.given.append(n)
        elif n == root or (root not in self.outside and self.sharing[root] == 1):
            self.ends[n] = t, (i, False)
        else:
            return self._add_view(i, t)
        return True

    def _add_view(self, i: int, t: Tensor) -> bool:
        n = self.numbers[i]
        root, nodes = self.roots[n], self._find_view_chain(n)
        of = self.recorder.traced.get_tensor(root)
        if of is None or nodes is None or root in self.written:
            return False
        if t.requires_grad and (_has_detach(nodes) or not is_view_of(t, of)):
            return False
        if root in self.outside:
            self.given.append(root)
        elif root not in self.results:
            if not t.requires_grad:
                self.ends.setdefault(root, (of.detach(), (i, True)))
            elif get_base(t) is of:
                self.ends[root] = of, (i, True)
            else:
                return False
        if of.requires_grad and not t.requires_grad:
            self.cut.add(n)
        self.nodes.update((id(node), node) for node in nodes)
        return True

    def _find_view_chain(self, n: int) -> list[OpNode] | None:
        """The chain of views that leads from a root to a value, None if there is another node."""
        nodes = []
        while n != self.roots[n]:
            node = self.makers.get(n)
            reads = [*node.reads()] if node is not None else []
            if node is None or len(reads) != 1 or not get_facts(node.op).view:
                return None
            nodes.append(node)
            n = reads[0]
        return nodes[::-1]

    def build_bases(self) -> OutputBases | None:
        if not self.nodes and not self.given:
            return None
        given = [*dict.fromkeys(self.given)]
        values = self.recorder.traced.values
        views = Program([], {}, {}, [*self.nodes.values()], self.numbers, values)
        run = compile_view_function(views, [*given, *self.ends], self.cut)
        ends = [t for t, _ in self.ends.values()]
        return OutputBases(
            ends, [*self.ends], [place for _, place in self.ends.values()], given, run
        )


def _has_detach(nodes: Sequence[OpNode]) -> bool:
    return any(node.op is _DETACH for node in nodes)
