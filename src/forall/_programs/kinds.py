"""The kinds of calls of one function that were recorded, and which of them a call is."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import Call, slow
from forall._core.levels import top
from forall._programs.guards import Unwatched
from forall._programs.recording import record
from forall._programs.signature import Unfit, ambient, of_leaf, shared
from forall._torch import handover, trees
from forall._torch.dispatch import dispatch_modes, function_modes, users_tangents

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._programs.replayed import Recorded
    from forall._programs.statics import Statics

_NEW: Any = object()
_MOST = 64  # kinds of calls that are kept, the last used ones


class Kinds(Unwatched):
    """The kinds of calls that were recorded of one function."""

    def __init__(self, func: Callable, statics: Statics) -> None:
        self.func = func
        self.boxed = statics.boxed if statics else None
        self.known: OrderedDict[Any, Recorded | None] = OrderedDict()
        self.newest: Recorded | None = None
        self.settling: set[Any] = set()  # whose first call changed what the function can reach

    def clear(self) -> None:
        self.known.clear()
        self.settling.clear()
        self.newest = None

    def run(self, args: tuple, kwargs: dict) -> Any:
        if (
            top() is not None
            or dispatch_modes()
            or function_modes()
            or users_tangents()
            or handover.needed()
        ):
            return self.func(*args, **kwargs)  # part of what records it, or of what takes it apart
        given = self.boxed(args, kwargs) if self.boxed else (args, kwargs)
        leaves, outline = trees.outlined(given)
        try:
            kind = (outline, *map(of_leaf, leaves), *ambient())
        except Unfit as unfit:
            return self._as_it_is(args, kwargs, str(unfit))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if len(tensors) > 1:
            kind = (kind, shared(tensors))
        recorded = self.known.get(kind, _NEW)
        if recorded is None:
            return self.func(*args, **kwargs)
        if recorded is _NEW or not recorded.guards.hold():
            return self._first(kind, leaves, trees.flatten(given)[1])
        if recorded is not self.newest:
            self.newest = recorded
            with suppress(KeyError):  # another thread's calls may have pushed it out
                self.known.move_to_end(kind)
        return recorded(tensors)

    def _first(self, kind: Any, leaves: list, spec: Any) -> Any:
        made = record(self.func, leaves, spec)
        if made.moved and kind not in self.settling:
            # A cache, a mask kept on a module, a wrapper that torch makes late: set up once. Who
            # changes something with each call is found out by the next one.
            if len(self.settling) == _MOST:
                self.settling.clear()
            self.settling.add(kind)
            return made.result
        self.settling.discard(kind)
        if made.why is not None:
            self._tell(made.why)
        self.known[kind] = made.recorded
        if len(self.known) > _MOST:
            self.known.popitem(last=False)
        return made.result

    def _as_it_is(self, args: tuple, kwargs: dict, why: str) -> Any:
        self._tell(why)
        return self.func(*args, **kwargs)

    def _tell(self, why: str) -> None:
        slow(f"{Call('jit', self.func)}: not recorded, so run as it is: {why}.")
