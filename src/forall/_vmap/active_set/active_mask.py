"""The active set: which examples run now, for code that lets them diverge and reconverge."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import (
    functions_off,
    is_forward_mode_on,
    no_dispatch,
)
from forall._compat.private_api import count_dispatch_modes
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import CannotMerge
from forall._core.errors import make_data_dependent_error
from forall._core.levels import set_acting_level, stack, top
from forall._vmap.active_set.merge import (
    UndefinedForExamples,
    is_stale,
    iter_layers,
    merge_parts,
    restrict_to_running,
    scatter_parts,
    select_examples,
    unite_parts,
    unite_two_parts,
)
from forall._vmap.active_set.restrict_args import (
    restore_cached_copies,
    restrict_for_reading,
    restriction_cache,
)
from forall._vmap.active_set.sub_level import (
    covers_examples,
    intersect_examples,
    split_by_test,
    subtract_examples,
    unite_examples,
)
from forall._vmap.batched_tensor import AliasFamily, BatchedTensor, wrap_stack
from forall._vmap.concretize import concretize_number, make_truth_reader, read_answers
from forall._vmap.concretize_listeners import notify_listeners
from forall._vmap.function_mode import VMAP_FUNCTIONS
from forall._vmap.mutation.mutation_log import log_plain_read

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
_SEVERAL = "a test on which the examples of several vmaps, one inside another, part at once"
__all__ = [
    "CannotMerge",
    "UndefinedForExamples",
    "ActiveSet",
    "evaluate_test",
    "differs_between_examples",
    "join_tensors",
    "get_active_set",
    "read_number",
    "write_examples",
    "make_new_name",
    "run_active_set",
    "join_numbers",
]


class ActiveSet:
    """The active set: of each level whose examples have diverged, the sub-level that runs."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[Any, Any]) -> None:
        self.parts = {root: level for root, level in parts.items() if level is not root}

    @classmethod
    def from_level(cls, level: Any) -> ActiveSet:
        """The active set of a level that has no other level around it."""
        made = object.__new__(cls)
        root = level.root
        made.parts = {} if level is root else {root: level}
        return made

    @property
    def size(self) -> int:
        """The number of examples that run, of the levels that have diverged."""
        size = 1
        for level in self.parts.values():
            size *= level.size
        return size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActiveSet) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(frozenset(self.parts.values()))

    def _find_differing_root(self, other: ActiveSet) -> Any:
        """The one root in whose examples two active sets differ; None if they are equal."""
        roots = [
            r for r in {**self.parts, **other.parts} if self.get_level(r) is not other.get_level(r)
        ]
        if len(roots) > 1:
            raise CannotMerge(_SEVERAL)
        return roots[0] if roots else None

    def get_level(self, root: Any) -> Any:
        return self.parts.get(root, root)

    def __or__(self, other: ActiveSet) -> ActiveSet:
        root = self._find_differing_root(other)
        if root is None:
            return self
        return ActiveSet(
            {**self.parts, root: unite_examples(self.get_level(root), other.get_level(root))}
        )

    def unite_all(self, others: list[ActiveSet]) -> ActiveSet:
        """The examples of all of these active sets."""
        parts = [world.parts for world in others]
        if len(self.parts) == 1 and all(p.keys() == self.parts.keys() for p in parts):
            ((root, mine),) = self.parts.items()
            return ActiveSet.from_level(unite_examples(mine, *[p[root] for p in parts]))
        return functools.reduce(operator.or_, others, self)

    def __and__(self, other: ActiveSet) -> ActiveSet | None:
        """The examples of both; None where there are none."""
        root = self._find_differing_root(other)
        if root is None:
            return self
        both = intersect_examples(self.get_level(root), other.get_level(root))
        return None if both is None else ActiveSet({**self.parts, root: both})

    def __sub__(self, other: ActiveSet) -> ActiveSet | None:
        """The examples that are not in the other; None where there are none."""
        root = self._find_differing_root(other)
        if root is None:
            return None
        mine, theirs = self.get_level(root), other.get_level(root)
        both = intersect_examples(mine, theirs)
        if both is None:
            return self
        left = subtract_examples(mine, both)
        return None if left is None else ActiveSet({**self.parts, root: left})

    def __repr__(self) -> str:
        return f"World({self.size} examples)" if self.parts else "World(all)"


def _iter_roots() -> Iterator[Any]:
    level: Any = top()
    while level is not None:
        yield level.root
        level = level.parent


def get_active_set() -> ActiveSet:
    """The active set of this thread."""
    level: Any = top()
    if not stack.diverged:
        return ActiveSet({})
    if level is not None and level.parent is None:
        return ActiveSet.from_level(level)
    return ActiveSet({root: root.acting_level for root in _iter_roots()})


def evaluate_test(test: Any) -> bool | tuple[ActiveSet, ActiveSet]:
    """Return bool(test), or the active sets of yes and no where the examples that run differ."""
    if not isinstance(test, Tensor):
        test = getattr(test, "tensor", test)  # of the Python numbers of all examples
    if not isinstance(test, Wrapper):
        return bool(test)
    with functions_off():
        if type(test) is BatchedTensor:
            sides = _evaluate_one_level(test)
            if sides is not None:
                return _make_active_sets(*sides) if type(sides) is tuple else sides
        found = _evaluate_any(test) if test.numel() == 1 else None
    return bool(test) if found is None else found


def _evaluate_one_level(test: BatchedTensor) -> Any:
    """Evaluate a test of one level whose examples answer each for itself, a short way.

    Return the two sub-levels, or the one answer of all; None where it is another case.
    """
    level: Any = top()
    if level is None or level.parent is not None or not level.config.diverges or test.axis is None:
        return None
    with no_dispatch():
        values = test.value if test.level is level else restrict_for_reading(test, level)
        if type(values) is not Tensor or not values.numel() == level.size > 0:
            return None
        if values.requires_grad:
            values = values.detach()
        if level.size == 1:
            return bool(values)
        if values.dim() != 1:
            values = values.reshape(-1)
        yes, no = split_by_test(level, values if values.dtype is torch.bool else values != 0)
    return no is None if yes is None or no is None else (yes, no)


def _make_active_sets(yes: Any, no: Any) -> tuple[ActiveSet, ActiveSet]:
    """The active sets of yes and no, of the one level whose examples run."""
    return ActiveSet.from_level(yes), ActiveSet.from_level(no)


def _evaluate_any(test: Any) -> bool | tuple[ActiveSet, ActiveSet] | None:
    """Evaluate a test of any tensor; None where the tensor itself has to answer, or to raise."""
    if stack.diverged and is_stale(test):
        test = restrict_to_running(test)
    if test.dtype is not torch.bool:
        test = test.detach() != 0
    values, levels = read_answers(test)
    if not values.numel():
        return None
    with no_dispatch():
        values = values.reshape([level.size for level in levels])
        for axis in reversed(range(len(levels))):
            first = values.select(axis, 0)
            if levels[axis].size == 1 or torch.equal(
                values, first.unsqueeze(axis).expand_as(values)
            ):
                values = first
                del levels[axis]
        if not levels:
            return bool(values)
    if not all(level.config.diverges for level in levels):
        return None
    if len(levels) > 1:
        raise CannotMerge(_SEVERAL)
    world, root = get_active_set().parts, levels[0].root
    yes, no = split_by_test(levels[0], values)
    return ActiveSet({**world, root: yes}), ActiveSet({**world, root: no})


def evaluate_users_test(test: Any) -> bool | tuple[ActiveSet, ActiveSet]:
    """Evaluate a test of user code, and tell the listeners."""
    stack.asked = True
    if stack.listening:
        numbers = test if isinstance(test, Tensor) else getattr(test, "tensor", test)
        if isinstance(numbers, Wrapper):
            notify_listeners(make_truth_reader(numbers))
    return evaluate_test(test)


class run_active_set:
    """Run the body for the examples of an active set alone."""

    __slots__ = ("kept", "was", "world")

    def __init__(self, world: ActiveSet) -> None:
        self.world = world

    def __enter__(self) -> None:
        was = self.was = []
        level: Any = top()
        while level is not None:
            root, level = level.root, level.parent
            some, acting = self.world.parts.get(root, root), root.acting_level
            if some is not acting:
                was.append((root, acting))
        for root, _ in was:
            set_acting_level(root, self.world.get_level(root))
        if was:
            self.kept, restriction_cache.found = restriction_cache.found, {}

    def __exit__(self, *_: object) -> None:
        for root, level in self.was:
            set_acting_level(root, level)
        if self.was:
            found, restriction_cache.found = restriction_cache.found, self.kept
            restore_cached_copies(found or {})


def write_examples(target: Tensor, value: Tensor, world: ActiveSet) -> None:
    """Write the values that an active set has in one tensor into another, as the user would."""
    with run_active_set(world), VMAP_FUNCTIONS:
        target.copy_(value)


def make_new_name(kind: type, memory: AliasFamily) -> Tensor:
    """A new tensor over all of this memory, where the former one is gone."""
    level = next((b.level for b in (known() for known in memory.members) if b is not None), None)
    if kind is not BatchedTensor or level is None:
        raise CannotMerge("a tensor with other names was written to, and is no more")
    name = wrap_stack(memory.value, memory.axis, level)
    name.family, name.is_external = memory, memory.is_external
    memory.add(name)
    return name


def join_tensors(parts: list[tuple[ActiveSet, Tensor]]) -> Tensor:
    """Join the tensors of some active sets, one each, into one tensor of their union."""
    with functions_off():
        found = _join_one_level(parts)
    if found is not None:
        return found
    for _, t in parts:
        _log_joined_read(t)
    while len(parts) > 1:
        alike = _find_joinable(parts)
        root = alike[0][0]._find_differing_root(alike[1][0])
        whole = alike[0][0].unite_all([world for world, _ in alike[1:]])
        with run_active_set(whole):
            tensors = [(world.get_level(root), _restrict_to_set(world, t)) for world, t in alike]
            tensor = merge_parts(tensors, whole.get_level(root))
        done = {id(world) for world, _ in alike}
        parts = [(whole, tensor), *(p for p in parts if id(p[0]) not in done)]
    return parts[0][1]


def _join_one_level(parts: list[tuple[ActiveSet, Tensor]]) -> Tensor | None:
    """Join values of one level's examples that have no derivative at stake; None in other cases."""
    level: Any = top()
    if (
        level is None
        or level.parent is not None
        or count_dispatch_modes() != 1
        or is_forward_mode_on()
    ):
        return None
    root, found = level.root, []
    for world, t in parts:
        own = world.parts.get(root)
        if own is None or len(world.parts) > 1 or type(t) is not BatchedTensor or t.requires_grad:
            return None
        if t.axis is None or type(t.value) is not Tensor or t.value.requires_grad:
            return None
        if t.level.root is not root or not covers_examples(t.level, own):
            return None
        found.append((own, t))
    whole = unite_examples(*(own for own, _ in found))
    with no_dispatch():
        values = [(own, t if t.level is own else select_examples(t, own)) for own, t in found]
        a, b = values[0][1], values[-1][1]
        dense = a.layout is b.layout is torch.strided
        if len(values) == 2 and dense and a.dtype is b.dtype and a.shape == b.shape:
            return unite_two_parts(values, whole)
        return unite_parts(values, whole)


def _log_joined_read(t: Tensor) -> None:
    """Log a read of a tensor from before the call, since the joined copy holds its values."""
    if not isinstance(t, Wrapper):
        log_plain_read("the end of a branch", t)
    for b in iter_layers(t):
        if (
            type(b) is BatchedTensor
            and b.axis is None
            and b.is_external
            and b.level.state.logs_writes
        ):
            b.level.state.mutation_log.log_read("the end of a branch", b)


def join_numbers(parts: list[tuple[ActiveSet, Any]], dtype: torch.dtype) -> Tensor:
    """Join the Python numbers of some active sets into one tensor (0-d)."""
    with functions_off():
        level: Any = top()
        alone = level is not None and level.parent is None
        if not alone or any(len(world.parts) != 1 for world, _ in parts):
            with no_dispatch():
                tensors = [torch.tensor(n, dtype=dtype) for _, n in parts]
            return join_tensors([(w, t) for (w, _), t in zip(parts, tensors, strict=True)])
        owners = [world.parts[level.root] for world, _ in parts]
        with no_dispatch():
            numbers = torch.tensor([n for _, n in parts], dtype=dtype)
            counts = torch.tensor([some.size for some in owners])
            return scatter_parts(owners, numbers.repeat_interleave(counts), unite_examples(*owners))


def _find_joinable(parts: list[tuple[ActiveSet, Tensor]]) -> list[tuple[ActiveSet, Tensor]]:
    """Find at least two active sets that differ in the examples of one level alone."""
    for root in dict.fromkeys(root for world, _ in parts for root in world.parts):
        found: dict[ActiveSet, list] = {}
        for world, t in parts:
            rest = ActiveSet({**world.parts, root: root})
            found.setdefault(rest, []).append((world, t))
        for alike in found.values():
            if len(alike) > 1:
                return alike
    raise CannotMerge(_SEVERAL)


def _restrict_to_set(world: ActiveSet, t: Tensor) -> Tensor:
    """Restrict a tensor, perhaps of more examples, to an active set."""
    with run_active_set(world):
        return restrict_to_running(t) if is_stale(t) else t


def read_number(t: Tensor) -> Any:
    """The Python number of all examples that run; where they differ, they run again in groups."""
    return concretize_number(
        t, lambda: make_data_dependent_error("a number", "Use a tensor instead of the number.")
    )


def differs_between_examples(value: Any) -> bool:
    """True if a tensor has a value for each of the examples that run."""
    return isinstance(value, Tensor) and bool(read_answers(value)[1])
