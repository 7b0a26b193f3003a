"""The transforms under test, and how vmap found the meaning of what it was given."""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

WAYS = ("row", "pointwise", "custom", "derived", "decomposed", "loop", "error")

# torch.func says this where it calls a kernel once per example.
_PEER_LOOPS = re.compile("performance drop because we have not yet implemented the batching rule")


class Engine:
    def __init__(self, name: str):
        self.name = name
        module = importlib.import_module(name)
        self.vmap: Callable = module.vmap
        self.vjp: Callable = module.vjp
        self.jvp: Callable = module.jvp
        self.jacrev: Callable = module.jacrev
        self.jacfwd: Callable = module.jacfwd
        self.linearize: Callable = module.linearize
        self._warning = getattr(module, "PerformanceWarning", None)

    def ways(self, fn: Callable[[], Any]) -> tuple[Any, set[str]]:
        """``fn()``, and the ways in which the overloads that it called were handled."""
        with warnings.catch_warnings(record=True) as caught, self._recorded() as found:
            warnings.simplefilter("always")
            result = fn()
        if any(self._means_loop(w) for w in caught):
            found.add("loop")
        return result, found

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[set[str]]:
        """The ways of the overloads that forall handles in the body; a peer does not tell."""
        found: set[str] = set()
        if self.name != "forall":
            yield found
            return
        from forall._vmap import dispatch, function_mode, registry, vmap_level

        run = vmap_level.VmapLevel._run

        def recorded(
            self: Any, func: Any, args: tuple, kwargs: dict, handler: Any, meets: str, met: list
        ) -> Any:
            try:
                return run(self, func, args, kwargs, handler, meets, met)
            finally:
                # One without mapped arguments runs once, as it would outside: no way to note.
                if meets == "mapped":
                    found.add(registry.WAYS.get(func, "row"))

        def short(way: Callable) -> Callable:
            def quick(*args: Any) -> Any:
                out = way(*args)
                if out is not None:
                    found.add("pointwise")
                return out

            return quick

        with (
            mock.patch.object(vmap_level.VmapLevel, "_run", recorded),
            mock.patch.object(
                dispatch, "try_aligned_pointwise", short(dispatch.try_aligned_pointwise)
            ),
            mock.patch.object(function_mode, "answer_call", short(function_mode.answer_call)),
        ):
            yield found

    def _means_loop(self, warning: warnings.WarningMessage) -> bool:
        if self._warning is not None:
            return issubclass(warning.category, self._warning)
        return bool(_PEER_LOOPS.search(str(warning.message)))


def worst(ways: set[str]) -> str:
    return max(ways, key=WAYS.index) if ways else ""
