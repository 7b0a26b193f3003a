"""Divergence and joins in control-flow operators: tests, and the results of diverged examples."""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.tensor_subclass import bare
from forall._compat.wrapper_tensor import Wrapper
from forall._control_flow.loop_carry import (
    NUMBERS,
    alike,
    like,
    ordered,
    paths,
    same,
    told,
)
from forall._core.errors import columns, kind, short
from forall._divergence import aliases
from forall._divergence.join import tensors
from forall._vmap.active_set.active_mask import (
    Apart,
    World,
    asked,
    now,
    running,
)
from forall._vmap.active_set.merge import is_stale, narrow

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._control_flow.loop_carry import Called

Parts = list[tuple[World, Any]]


def truth(call: Called, name: str, test: Any) -> bool | tuple[World, World]:
    """Return a test as a bool, or, if examples differ, as the active sets of True and False.

    ``name`` is the test's name in messages.
    """
    if isinstance(test, torch.Tensor):
        test = bare(test)
        with functions_off():
            count = test.numel()
        if count == 1:
            return _answer(test) if isinstance(test, Wrapper) else bool(test)
    elif isinstance(test, (*NUMBERS, torch.SymBool)):
        return bool(test)
    raise TypeError(
        f"{call}: {name} must be one number, or a tensor that holds one.\n"
        f"{columns([(name, short(test), kind(test))])}\n"
        "Reduce it (.any(), .all()). To choose entry by entry use torch.where; to let each example "
        "choose, vmap the function."
    )


def _answer(test: Wrapper) -> bool | tuple[World, World]:
    try:
        return asked(test)
    except Apart:  # among examples of two levels at once: they run again, in groups that agree
        return bool(test)


def either(call: Called, test: Any, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Run ``then`` for the examples for which ``test`` holds, ``other`` for the rest; join both."""
    answer = truth(call, "pred", test)
    if isinstance(answer, bool):
        return then() if answer else other()
    parts: Parts = []
    for world, run in zip(answer, (then, other), strict=True):
        with running(world):
            parts.append((world, run()))
    return united(call, "result", parts)


class Leaving:
    """A loop's active examples, and the carries of the examples that have left it.

    As a context, it restricts the running examples to those that go on.
    """

    def __init__(self, call: Called) -> None:
        self.call = call
        self.left: list[_Left] = []
        self.inside = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.inside.close()

    def part(self, going: World, leaving: World, val: Any) -> Any:
        """Let the examples ``leaving`` leave; return the carry of those that go on."""
        who = going._one(leaving)
        if not self.left or self.left[-1].who is not who:
            self.left.append(_Left(who, now(), []))
        self.left[-1].parts.append((leaving, _narrowed(leaving, val, goes=False)))
        self.inside.close()
        self.inside.enter_context(running(going))
        return _narrowed(going, val, goes=True)

    def all(self, val: Any) -> Any:
        """Join the carries of all examples, the last of which leave with ``val``."""
        world = now()
        self.inside.close()
        for _, before, parts in reversed(self.left):
            with running(before):
                val = united(self.call, "carry", [(world, val), *parts])
            world = before
        return val


class _Left(NamedTuple):
    """The examples of one level that left a loop one after another, with their carries."""

    who: Any
    before: World
    parts: Parts


def _narrowed(world: World, val: Any, *, goes: bool) -> Any:
    """Restrict a carry to these examples. With ``goes``, they go on, and later writes reach it."""

    def narrowed(t: torch.Tensor) -> torch.Tensor:
        if not is_stale(t):
            return t
        found = narrow(t)
        aliases.remember(found, [(world, t)], follows=goes)
        return found

    with running(world):
        return pytree.map_tensors(narrowed, val)


def united(call: Called, name: str, parts: Parts) -> Any:
    """Join the trees of several active sets into one; raise if the trees are not alike."""
    worlds = [world for world, _ in parts]
    first = parts[0][1]
    rows = []
    for world, tree in parts:
        row, spec = pytree.flatten(ordered(first, tree))
        if rows and not pytree.is_alike(spec, pytree.flatten(first)[1]):
            shown = [(worlds[0], first), (world, tree)]
            raise _differ(call, name, [(w, pytree.text(pytree.flatten(t)[1])) for w, t in shown])
        rows.append(row)
    together = []
    for i, column in enumerate(zip(*rows, strict=True)):
        fitted = _fitted([*column])
        if fitted is NotImplemented:
            raise _odd(call, name + paths(first)[i], worlds, [*column])
        joins = type(fitted) is list  # which no leaf is
        together.append(tensors([*zip(worlds, fitted, strict=True)]) if joins else fitted)
    return pytree.unflatten(together, pytree.flatten(first)[1])


def _fitted(column: list) -> Any:
    """Return the one value of all, or a list of alike tensors; NotImplemented if there is none."""
    first = column[0]
    if all(x is first for x in column):
        return first
    tensor = next((x for x in column if isinstance(x, torch.Tensor)), None)
    if tensor is not None:
        with functions_off():
            column = [like(tensor, x) if isinstance(x, NUMBERS) else x for x in column]
            fits = all(isinstance(x, torch.Tensor) and alike(tensor, x) for x in column)
        return column if fits else NotImplemented
    if all(type(x) is type(first) and same(first, x) for x in column):
        return first
    if not all(isinstance(x, NUMBERS) for x in column):
        return NotImplemented
    column = [torch.tensor(x) for x in column]
    dtype = reduce(torch.promote_types, (x.dtype for x in column))
    return [x.to(dtype) for x in column]


def _odd(call: Called, path: str, worlds: list[World], column: list) -> TypeError:
    at = next((i for i, x in enumerate(column) if isinstance(x, torch.Tensor)), 0)
    one = column[at]
    odd = next(i for i, x in enumerate(column) if _fitted([one, x]) is NotImplemented)
    shown = [(worlds[at], told(one, column[odd])), (worlds[odd], told(column[odd], one))]
    return _differ(call, path, shown)


def _differ(call: Called, path: str, shown: list[tuple[World, str]]) -> TypeError:
    return TypeError(
        f"{call}: {path} is not of one kind for all examples.\n"
        f"{columns([(who(world), path, text) for world, text in shown])}\n"
        "Return the same structure, shapes and dtypes for each."
    )


def who(world: World) -> str:
    """Format the indices of the first few examples of an active set."""
    found = []
    for level in world.parts.values():
        numbers = [] if level.origin is None else level.origin.numbers
        more = ", ..." if len(numbers) > 4 else ""
        found.append(f"example{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}{more}")
    return " of ".join(reversed(found)) or "all examples"
