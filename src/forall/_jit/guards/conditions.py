"""What a recorded call depends on, each thing with what it was: how that is compared again."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from forall._compat.ambient_settings import kernels_allowed
from forall._compat.private_api import PLAIN
from forall._core.raw_containers import bare
from forall._jit.guards.codegen import (
    Holding,
    Looks,
    Tests,
    holding,
    if_any,
)
from forall._jit.guards.leaves import (
    MUTABLE,
    answer,
    is_array,
    may_take,
    numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from forall._core.python_state import Weakly

_MOST_BYTES = 4096  # that are compared with each call


class Watched:
    """State of Python's and torch's, and whether it is as it was."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.why: str | None = None  # what of it cannot be watched
        self._attributes: list[tuple[Any, str, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._missing: list[tuple[dict[str, Any], frozenset[str]]] = []
        # Of libraries: hardly ever written into, and asked apart from what is.
        self._of_libraries: list[tuple[dict[str, Any], str, Any]] = []
        self._classes_of_libraries: list[tuple[Any, tuple, tuple]] = []
        self._classes: dict[int, type] = {}  # of these
        self._of_weakly: list[tuple[Weakly, str, Any]] = []  # entries of an object's `__dict__`
        self._dicts: list[tuple[Any, tuple, tuple]] = []
        self._lists: list[tuple[Any, tuple]] = []
        self._answers: dict[Callable[[], Any], Any] = {}
        self._data: list[tuple[Any, tuple]] = []
        self._others: list[Callable[[], bool]] = []
        self._looks = Looks()
        self._holding: Holding | None = None

    def hold(self) -> bool:
        """Whether everything is as it was."""
        now = self._held_now()
        return now.quickly() or now.certainly()

    def at_once(self) -> Tests:
        """Tests that make sure of that where they say yes, and are cheaper."""
        return self._held_now().at_once

    def _held_now(self) -> Holding:
        if self._holding is None:
            data, answers = self._data, self._answers.items()
            self._holding = holding(
                self._attributes,
                self._names,
                self._missing,
                self._dicts,
                self._lists,
                self._looks,
                self._of_weakly,
                (self._of_libraries, self._classes_of_libraries),
                if_any(data, lambda: all(numbers(known) == copy for known, copy in data))
                + if_any(answers, lambda: all(answer(ask) == known for ask, known in answers))
                + self._others,
            )
        return self._holding

    def watch_name(self, names: dict[str, Any], name: str, value: Any) -> None:
        """What a module of a library's has under a name, beyond what is watched otherwise."""
        self._of_libraries.append((names, name, value))
        self._holding = None

    def watch_class(self, kind: type) -> None:
        """A class of a library's: what it has, if that can change."""
        for base in kind.__mro__:
            if base.__flags__ & MUTABLE and id(base) not in self._classes:
                self._classes[id(base)] = base
                names = vars(base)
                self._classes_of_libraries.append((names, tuple(names), tuple(names.values())))
        self._holding = None

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are read by the program, and all may be asked what they are: so they stay."""
        known = {id(t): t for t in (*self.tensors.values(), *tensors) if type(t) in PLAIN}
        self._looks, self._holding = Looks(known.values()), None

    def watch_answer(self, question: Callable[[], Any]) -> None:
        """What torch tells of its state when the function asks."""
        self._answers[question] = answer(question)
        self._holding = None

    def watch_kernels(self) -> None:
        """Watch which kernels it may take, of which the program has one."""
        self._others.append(functools.partial(may_take, kernels_allowed()))
        self._holding = None

    def _entries(self, names: Mapping[Any, Any]) -> None:
        names = bare(names)
        self._dicts.append((names, tuple(names), tuple(names.values())))

    def _memory(self, value: Any) -> None:
        """Numbers in memory, of numpy's or of Python's own."""
        data = numbers(value)
        self._data.append((value, data))
        if len(data[0]) > _MOST_BYTES or (is_array(value) and value.dtype.hasobject):
            self.why = "the function reaches an array whose numbers may change, too large to watch"
