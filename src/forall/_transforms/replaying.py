"""Transformed functions that are called often become programs; see `_programs.replay`."""

from __future__ import annotations

import functools
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forall._core import config
from forall._core.levels import top

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._programs.replay import Replays

_CALLS = 2  # of a function before it is looked at, however long they take


class Calls:
    """The calls of a transformed function so far."""

    __slots__ = ("count", "eager", "replays", "spent")

    def __init__(self, eager: Callable) -> None:
        self.eager = eager
        self.count = 0
        self.spent = 0.0
        self.replays: Replays | None = None

    def run(self, args: tuple, kwargs: dict) -> Any:
        if self.replays is not None:
            return self.replays.run(args, kwargs)
        if config.now.replay == "check":
            return self._looked_at().run(args, kwargs)
        start = perf_counter()
        result = self.eager(*args, **kwargs)
        self.spent += perf_counter() - start
        self.count += 1
        if self.count >= _CALLS and self.spent >= config.now.patience:
            self._looked_at()
        return result

    def _looked_at(self) -> Replays:
        from forall._programs.replay import Replays  # with all that records, which is much

        self.replays = Replays(self.eager)
        return self.replays


def replaying(func: Callable) -> Callable[[Callable], Callable]:
    """A transform of ``func``, under the name of ``func``, and replayed where it can be."""

    def decorated(eager: Callable) -> Callable:
        calls = Calls(eager)

        @functools.wraps(func, updated=())
        def transformed(*args: Any, **kwargs: Any) -> Any:
            if config.now.replay and top() is None:
                return calls.run(args, kwargs)
            return eager(*args, **kwargs)

        return transformed

    return decorated
