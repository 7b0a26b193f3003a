"""Guard conditions: snapshots of Python's and torch's state, and their comparison with now."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from forall._compat.ambient_settings import get_allowed_kernels
from forall._compat.private_api import PLAIN
from forall._jit.guards.codegen import (
    GuardChecks,
    GuardTests,
    LibraryState,
    TensorMetadata,
    WatchedState,
    make_guard_checks,
)
from forall._jit.guards.leaves import allows_same_kernels, ask_safely
from forall._jit.guards.state_changes import describe_change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


class GuardConditions:
    """A snapshot of Python's and torch's state, and the test that the state is unchanged."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.why: str | None = None  # the reason if some state cannot be watched
        self._state = WatchedState()
        self._libraries = LibraryState()
        self._looks = TensorMetadata()
        self._holding: GuardChecks | None = None

    def hold(self) -> bool:
        """True if the state is unchanged."""
        now = self._get_checks()
        return now.quickly() or now.certainly()

    def describe_change(self) -> str | None:
        """Describe what of the user's state changed; None if that is of a library, or not found."""
        return describe_change(self._state)

    def get_fast_tests(self) -> GuardTests:
        """Cheaper tests: if they pass, the state is unchanged; if not, it may be."""
        return self._get_checks().at_once

    def _get_checks(self) -> GuardChecks:
        if self._holding is None:
            self._holding = make_guard_checks(self._state, self._libraries, self._looks)
        return self._holding

    def watch_name(self, names: dict[str, Any], name: str, value: Any) -> None:
        """Watch the value that a library's module has under a name."""
        self._libraries.names.append((names, name, value))
        self._holding = None

    def watch_class(self, kind: type) -> None:
        """Watch the attributes of a library's class and of its bases, if they are mutable."""
        self._libraries.watch_class(kind)
        self._holding = None

    def watch_entries(self, container: Any) -> None:
        """Watch the entries of a container."""
        self._state.watch_entries(container)
        self._holding = None

    def watch_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch the metadata of the tensors that a program reads, and of all visited tensors."""
        known = {id(t): t for t in (*self.tensors.values(), *tensors) if type(t) in PLAIN}
        self._looks, self._holding = TensorMetadata(known.values()), None

    def watch_answer(self, question: Callable[[], Any]) -> None:
        """Watch the answer of a function that returns torch's state."""
        self._state.answers[question] = ask_safely(question)
        self._holding = None

    def watch_kernels(self) -> None:
        """Watch the kernels that torch may choose, one of which the program has."""
        self._state.others.append(functools.partial(allows_same_kernels, get_allowed_kernels()))
        self._holding = None
