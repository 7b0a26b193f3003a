"""Guard conditions: snapshots of Python's and torch's state, and their comparison with now."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from forall._compat.ambient_settings import get_allowed_kernels
from forall._compat.private_api import PLAIN
from forall._core.raw_containers import view_raw_container
from forall._core.reachable import is_ndarray
from forall._jit.guards.codegen import (
    GuardChecks,
    GuardTests,
    TensorMetadata,
    check_if_any,
    make_guard_checks,
)
from forall._jit.guards.leaves import HEAP_TYPE_FLAG, allows_same_kernels, ask_safely, read_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from forall._core.python_state import WeakBox

_MOST_BYTES = 4096  # of an array that each call compares


class GuardConditions:
    """A snapshot of Python's and torch's state, and the test that the state is unchanged."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.why: str | None = None  # the reason if some state cannot be watched
        self._attributes: list[tuple[Any, str, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._missing: list[tuple[dict[str, Any], frozenset[str]]] = []
        # Libraries' state, which is hardly ever written into and therefore compared separately.
        self._of_libraries: list[tuple[dict[str, Any], str, Any]] = []
        self._classes_of_libraries: list[tuple[Any, tuple, tuple]] = []
        self._classes: dict[int, type] = {}  # the classes whose state that is
        self._of_weakly: list[tuple[WeakBox, str, Any]] = []  # entries of an object's `__dict__`
        self._dicts: list[tuple[Any, tuple, tuple]] = []
        self._lists: list[tuple[Any, tuple]] = []
        self._answers: dict[Callable[[], Any], Any] = {}
        self._data: list[tuple[Any, tuple]] = []
        self._others: list[Callable[[], bool]] = []
        self._looks = TensorMetadata()
        self._holding: GuardChecks | None = None

    def hold(self) -> bool:
        """True if the state is unchanged."""
        now = self._get_checks()
        return now.quickly() or now.certainly()

    def get_fast_tests(self) -> GuardTests:
        """Cheaper tests: if they pass, the state is unchanged; if not, it may be."""
        return self._get_checks().at_once

    def _get_checks(self) -> GuardChecks:
        if self._holding is None:
            data, answers = self._data, self._answers.items()
            self._holding = make_guard_checks(
                self._attributes,
                self._names,
                self._missing,
                self._dicts,
                self._lists,
                self._looks,
                self._of_weakly,
                (self._of_libraries, self._classes_of_libraries),
                check_if_any(data, lambda: all(read_buffer(known) == copy for known, copy in data))
                + check_if_any(
                    answers, lambda: all(ask_safely(ask) == known for ask, known in answers)
                )
                + self._others,
            )
        return self._holding

    def watch_name(self, names: dict[str, Any], name: str, value: Any) -> None:
        """Watch the value that a library's module has under a name."""
        self._of_libraries.append((names, name, value))
        self._holding = None

    def watch_class(self, kind: type) -> None:
        """Watch the attributes of a library's class and of its bases, if they are mutable."""
        for base in kind.__mro__:
            if base.__flags__ & HEAP_TYPE_FLAG and id(base) not in self._classes:
                self._classes[id(base)] = base
                names = vars(base)
                self._classes_of_libraries.append((names, tuple(names), tuple(names.values())))
        self._holding = None

    def watch_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch the metadata of the tensors that a program reads, and of all visited tensors."""
        known = {id(t): t for t in (*self.tensors.values(), *tensors) if type(t) in PLAIN}
        self._looks, self._holding = TensorMetadata(known.values()), None

    def watch_answer(self, question: Callable[[], Any]) -> None:
        """Watch the answer of a function that returns torch's state."""
        self._answers[question] = ask_safely(question)
        self._holding = None

    def watch_kernels(self) -> None:
        """Watch the kernels that torch may choose, one of which the program has."""
        self._others.append(functools.partial(allows_same_kernels, get_allowed_kernels()))
        self._holding = None

    def _watch_entries(self, names: Mapping[Any, Any]) -> None:
        names = view_raw_container(names)
        self._dicts.append((names, tuple(names), tuple(names.values())))

    def _watch_buffer(self, value: Any) -> None:
        """Watch the data of a numpy array or a Python buffer."""
        data = read_buffer(value)
        self._data.append((value, data))
        if len(data[0]) > _MOST_BYTES or (is_ndarray(value) and value.dtype.hasobject):
            self.why = "the function reaches an array whose numbers may change, too large to watch"
