"""Running a function once for every group of examples that agree, if they diverge.

This handles any Python and needs no source. A run ends at a test that its examples answer
differently, and its other effects are undone. Each group then runs by itself, and the results are
put together in the order of the examples. If a group would see writes of another one into memory
from before the call, those are undone too, and the examples run one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._api import mapped_inputs
from forall._api.execution.mapped_call import make_index
from forall._api.execution.single_run import (
    DivergedGroups,
    StateSnapshot,
    must_retry,
    run_once,
)
from forall._api.memory_budget import suspend_memory_limit
from forall._api.nested_components import NestedExamples
from forall._api.ragged import RaggedResult, merge_ragged
from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._core.levels import has_any_tangent
from forall._vmap.failing_example import name_example
from forall._vmap.mutation.mutation_log import get_memory_key
from forall._vmap.mutation.pending_updates import find_logging_level, is_shared_external
from forall._vmap.mutation.rollback import GroupEffects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._api.execution.mapped_call import MappedCall
    from forall._api.mapped_inputs import OutDims

    Tensor = torch.Tensor
    Part = tuple[Sequence[int], list, Any]  # numbers of examples, the results' leaves, their tree


def run_in_groups(call: MappedCall) -> tuple[list, Any]:
    """Return the results of all examples; an error is that of the first example to fail."""
    groups = call.groups or [[*range(call.arguments.size)]]
    before = StateSnapshot(call)
    with before.record_generators():
        return _run_in_groups_or_turn(call, groups, before)


def _run_in_groups_or_turn(
    call: MappedCall, groups: list[list[int]], before: StateSnapshot
) -> tuple[list, Any]:
    run = GroupedRun(call, before)
    try:
        if not run.all(groups):
            with suspend_memory_limit():
                run.touched.undo()
                before.restore()
            run = GroupedRun(call, before)
            run.in_turn()
        elif run.failed is not None:
            raise run.failed[1]
        else:
            run.put_back()
    except BaseException as error:
        with suspend_memory_limit():
            run.touched.undo()
            (before.restore if must_retry(call, error) else before.forget)()
        raise
    for ledger in run.touched.ledgers:
        ledger.drop_undo_state()
    return join_groups(call.places, sorted(run.parts, key=lambda p: p[0][0]))


class GroupedRun:
    """The runs of one call's groups, one after another."""

    def __init__(self, call: MappedCall, before: StateSnapshot) -> None:
        self.call = call
        self.before = before
        self.touched = GroupEffects()
        self.parts: list[Part] = []
        self.failed: tuple[int, Exception] | None = None  # the first example to fail, of all so far
        self.written: list[tuple[Tensor | NestedExamples, int, list[int], Tensor, bool]] = []

    def all(self, groups: list[list[int]]) -> bool:
        """Run all groups; return False at once if one sees writes of another into older memory."""
        todo = sorted(groups)
        if self.call.options.report is not None:
            self.call.options.report.begin_groups()
        while todo:
            numbers = todo.pop(0)
            if self.failed is not None and numbers[0] > self.failed[0]:
                continue
            part = self.call.some(numbers)
            nodes = [x.grad_fn for x in _find_mapped_leaves(part)]
            try:
                self._run_group(numbers, part)
            except DivergedGroups as again:
                told = self.call.options.report
                if told is not None:
                    told.note_group_undone(again.why, tuple(map(len, again.groups)))
                todo = sorted([*todo, *([numbers[n] for n in g] for g in again.groups)])
                continue
            except Exception as error:  # noqa: BLE001 - the user's error, whatever it is
                name_example(error, part.origin, 0)
                self.failed = numbers[0], error
            if not self._is_independent(numbers, part, nodes):
                return False
        return True

    def in_turn(self) -> None:
        """Run one example after another, on views of the caller's tensors, as the loop does."""
        if self.call.options.report is not None:
            self.call.options.report.note_one_by_one()
        for n in range(self.call.arguments.size):
            numbers = range(n, n + 1)
            part = self.call.some(numbers)
            try:
                self._run_group(numbers, part)
            except Exception as error:
                name_example(error, part.origin, 0)
                raise

    def _run_group(self, numbers: Sequence[int], part: MappedCall) -> None:
        if self.call.draws.flag == "same":
            self.before.draw_again()
        if part.options.report is not None:
            part.options.report.note_group(len(numbers))
        part = part._replace(options=part.options._replace(logs=self.touched.ledgers))
        self.parts.append((numbers, *run_once(part)))

    def _is_independent(self, numbers: list[int], part: MappedCall, nodes: list) -> bool:
        """Return True if no other group sees the group's writes into older memory and its rows."""
        ledger = self.touched.ledgers[-1]
        wholes, rows = _find_mapped_leaves(self.call), []
        places = [x.examples[0] if isinstance(x, NestedExamples) else x for x in wholes]
        dims = [d for d in self.call.arguments.dims if d is not None]
        columns = zip(wholes, places, dims, _find_mapped_leaves(part), nodes, strict=True)
        for whole, place, dim, some, node in columns:
            if get_memory_key(some) in ledger.mapped_written:
                if _is_shared_further_out(place):
                    return False
                rows.append(get_memory_key(place))
                recorded = some.grad_fn is not node or has_any_tangent(some)
                self.written.append((whole, dim, numbers, some, recorded))
        known = [get_memory_key(p) for p in places] if rows else []
        return all(known.count(r) == 1 for r in rows) and self.touched.add_group(ledger, rows)

    def put_back(self) -> None:
        """Copy the rows of mapped arguments that the groups wrote into the caller's own tensors."""
        for whole, dim, numbers, some, recorded in self.written:
            with functions_off(), torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
                if isinstance(whole, NestedExamples):
                    whole.write_rows(numbers, some)
                else:
                    whole.index_copy_(dim, make_index(numbers, whole.device), some)


def _is_shared_further_out(whole: Tensor) -> bool:
    """Return True if examples of a level further out share a tensor, so must see each write."""
    level = find_logging_level()
    return level is not None and is_shared_external(whole, level)


def _find_mapped_leaves(call: MappedCall) -> list[Any]:
    arguments = call.arguments
    return [x for x, d in zip(arguments.leaves, arguments.dims, strict=True) if d is not None]


def join_groups(places: OutDims, parts: list[Part]) -> tuple[list, Any]:
    """Return the results of all groups, with the examples in order."""
    numbers, _, spec = parts[0]
    for other, _, its_spec in parts:
        if not pytree.has_same_structure(its_spec, spec):
            raise mapped_inputs.make_trees_error(places.call, numbers[0], spec, other[0], its_spec)
    order = [n for part in parts for n in part[0]]
    firsts = [part[0][0] for part in parts]
    columns = zip(*(flat for _, flat, _ in parts), strict=True)
    joined = []
    for n, (column, place) in enumerate(zip(columns, places.expand_to_leaves(spec), strict=True)):
        if any(type(x) is RaggedResult for x in column):
            if all(isinstance(x, (torch.Tensor, RaggedResult)) for x in column):
                joined.append(merge_ragged(column, order))
                continue
            column = tuple(x.stack_first() if type(x) is RaggedResult else x for x in column)
        leaf = mapped_inputs.LeafPlace(spec, n)
        whole = mapped_inputs.join_column(places.call, column, place, firsts, leaf)
        joined.append(_put_in_order(whole, place, order))
    return joined, spec


def _put_in_order(result: Any, place: int | None, order: list[int]) -> Any:
    if order == [*range(len(order))] or place is None or not isinstance(result, torch.Tensor):
        return result
    at = make_index(order, result.device)
    back = torch.empty_like(at).scatter_(0, at, torch.arange(len(order), device=at.device))
    return result.index_select(place % result.dim(), back)
