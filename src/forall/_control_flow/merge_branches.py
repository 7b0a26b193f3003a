"""Divergence and joins in control-flow operators: tests, and the results of diverged examples."""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.tensor_subclass import unwrap_posed
from forall._compat.wrapper_tensor import Wrapper
from forall._control_flow.loop_carry import (
    NUMBERS,
    describe_leaf,
    find_leaf_paths,
    has_same_meta,
    is_same_object,
    number_as_tensor,
    order_keys,
)
from forall._core.errors import format_columns, format_short, type_name_of
from forall._divergence import aliases
from forall._divergence.join import merge_tensors
from forall._vmap.active_set.active_mask import (
    ActiveSet,
    CannotMerge,
    evaluate_test,
    get_active_set,
    run_active_set,
)
from forall._vmap.active_set.merge import is_stale, restrict_to_running

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._control_flow.loop_carry import OperatorCall

Parts = list[tuple[ActiveSet, Any]]


def evaluate_predicate(
    call: OperatorCall, name: str, test: Any
) -> bool | tuple[ActiveSet, ActiveSet]:
    """Return a test as a bool, or, if examples differ, as the active sets of True and False.

    ``name`` is the test's name in messages.
    """
    if isinstance(test, torch.Tensor):
        test = unwrap_posed(test)
        with functions_off():
            count = test.numel()
        if count == 1:
            return _ask_examples(test) if isinstance(test, Wrapper) else bool(test)
    elif isinstance(test, (*NUMBERS, torch.SymBool)):
        return bool(test)
    raise documented_error(TypeError, "one-number")(
        f"{call}: {name} must be one number, or a tensor that holds one.\n"
        f"{format_columns([(name, format_short(test), type_name_of(test))])}\n"
        "Reduce it (.any(), .all()). To choose entry by entry use torch.where; to let each example "
        "choose, vmap the function."
    )


def _ask_examples(test: Wrapper) -> bool | tuple[ActiveSet, ActiveSet]:
    try:
        return evaluate_test(test)
    except (
        CannotMerge
    ):  # among examples of two levels at once: they run again, in groups that agree
        return bool(test)


def run_either(
    call: OperatorCall, test: Any, then: Callable[[], Any], other: Callable[[], Any]
) -> Any:
    """Run ``then`` for the examples for which ``test`` holds, ``other`` for the rest; join both."""
    answer = evaluate_predicate(call, "pred", test)
    if isinstance(answer, bool):
        return then() if answer else other()
    parts: Parts = []
    for world, run in zip(answer, (then, other), strict=True):
        with run_active_set(world):
            parts.append((world, run()))
    return join_trees(call, "result", parts)


class LoopExits:
    """A loop's active examples, and the carries of the examples that have left it.

    As a context, it restricts the running examples to those that go on.
    """

    def __init__(self, call: OperatorCall) -> None:
        self.call = call
        self.left: list[_ExitedParts] = []
        self.inside = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.inside.close()

    def let_leave(self, going: ActiveSet, leaving: ActiveSet, val: Any) -> Any:
        """Let the examples ``leaving`` leave; return the carry of those that go on."""
        who = going._find_differing_root(leaving)
        if not self.left or self.left[-1].who is not who:
            self.left.append(_ExitedParts(who, get_active_set(), []))
        self.left[-1].parts.append((leaving, _restrict_carry(leaving, val, goes=False)))
        self.inside.close()
        self.inside.enter_context(run_active_set(going))
        return _restrict_carry(going, val, goes=True)

    def join_all(self, val: Any) -> Any:
        """Join the carries of all examples, the last of which leave with ``val``."""
        world = get_active_set()
        self.inside.close()
        for _, before, parts in reversed(self.left):
            with run_active_set(before):
                val = join_trees(self.call, "carry", [(world, val), *parts])
            world = before
        return val


class _ExitedParts(NamedTuple):
    """The examples of one level that left a loop one after another, with their carries."""

    who: Any
    before: ActiveSet
    parts: Parts


def _restrict_carry(world: ActiveSet, val: Any, *, goes: bool) -> Any:
    """Restrict a carry to these examples. With ``goes``, they go on, and later writes reach it."""

    def restrict_leaf(t: torch.Tensor) -> torch.Tensor:
        if not is_stale(t):
            return t
        found = restrict_to_running(t)
        aliases.note_join(found, [(world, t)], follows=goes)
        return found

    with run_active_set(world):
        return pytree.map_tensors(restrict_leaf, val)


def join_trees(call: OperatorCall, name: str, parts: Parts) -> Any:
    """Join the trees of several active sets into one; raise if the trees are not alike."""
    worlds = [world for world, _ in parts]
    first = parts[0][1]
    rows = []
    for world, tree in parts:
        row, spec = pytree.flatten(order_keys(first, tree))
        if rows and not pytree.has_same_structure(spec, pytree.flatten(first)[1]):
            shown = [(worlds[0], first), (world, tree)]
            raise _make_difference_error(
                call, name, [(w, pytree.format_tree(pytree.flatten(t)[1])) for w, t in shown]
            )
        rows.append(row)
    together = []
    for i, column in enumerate(zip(*rows, strict=True)):
        fitted = _fit_column([*column])
        if fitted is NotImplemented:
            raise _make_mismatch_error(call, name + find_leaf_paths(first)[i], worlds, [*column])
        joins = type(fitted) is list  # which no leaf is
        together.append(merge_tensors([*zip(worlds, fitted, strict=True)]) if joins else fitted)
    return pytree.unflatten(together, pytree.flatten(first)[1])


def _fit_column(column: list) -> Any:
    """Return the one value of all, or a list of alike tensors; NotImplemented if there is none."""
    first = column[0]
    if all(x is first for x in column):
        return first
    tensor = next((x for x in column if isinstance(x, torch.Tensor)), None)
    if tensor is not None:
        with functions_off():
            column = [number_as_tensor(tensor, x) if isinstance(x, NUMBERS) else x for x in column]
            fits = all(isinstance(x, torch.Tensor) and has_same_meta(tensor, x) for x in column)
        return column if fits else NotImplemented
    if all(type(x) is type(first) and is_same_object(first, x) for x in column):
        return first
    if not all(isinstance(x, NUMBERS) for x in column):
        return NotImplemented
    column = [torch.tensor(x) for x in column]
    dtype = reduce(torch.promote_types, (x.dtype for x in column))
    return [x.to(dtype) for x in column]


def _make_mismatch_error(
    call: OperatorCall, path: str, worlds: list[ActiveSet], column: list
) -> TypeError:
    at = next((i for i, x in enumerate(column) if isinstance(x, torch.Tensor)), 0)
    one = column[at]
    odd = next(i for i, x in enumerate(column) if _fit_column([one, x]) is NotImplemented)
    shown = [
        (worlds[at], describe_leaf(one, column[odd])),
        (worlds[odd], describe_leaf(column[odd], one)),
    ]
    return _make_difference_error(call, path, shown)


def _make_difference_error(
    call: OperatorCall, path: str, shown: list[tuple[ActiveSet, str]]
) -> TypeError:
    return documented_error(TypeError, "branches-differ")(
        f"{call}: {path} is not of one kind for all examples.\n"
        f"{format_columns([(describe_examples(world), path, text) for world, text in shown])}\n"
        "Return the same structure, shapes and dtypes for each."
    )


def describe_examples(world: ActiveSet) -> str:
    """Format the indices of the first few examples of an active set."""
    found = []
    for level in world.parts.values():
        numbers = [] if level.origin is None else level.origin.numbers
        more = ", ..." if len(numbers) > 4 else ""
        found.append(f"example{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}{more}")
    return " of ".join(reversed(found)) or "all examples"
