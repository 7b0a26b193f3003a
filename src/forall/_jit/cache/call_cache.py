"""The cache of one function's calls, for `jit` and for automatic replay.

NOTE [the states of a key]
    A call is told from others by its cache key. Each key has a state, an object whose ``make_call``
    makes a call: recorded (`CacheEntry`), refused (`EagerKind`), and those of automatic replay,
    waiting and unfinished. What a miss leads to is the policy of a subclass: `jit` records at once,
    automatic replay when that pays.

    Tables are shared by threads without a lock. Each of their methods leaves them valid, whatever
    another thread has put in or dropped meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from forall._core.python_state import UnguardedState
from forall._jit.cache.call_key import make_call_key
from forall._jit.cache.call_state import UNKNOWN, CallInfo, KeyState
from forall._jit.guards.identity import UnfitArgument, outline_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.entry import CacheEntry

MOST_ENTRIES = 64
S = TypeVar("S")


class BoundedTable(OrderedDict[Any, S]):
    """A dict that keeps the ``most`` entries that were put in or used last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep_last(self, key: Any, value: S) -> None:
        """Enter a value as the last one, and drop the first one if there are too many."""
        self[key] = value
        self.mark_used(key)
        if len(self) > self.most:
            with suppress(KeyError):
                self.popitem(last=False)

    def mark_used(self, key: Any) -> None:
        """Make an entry the last one."""
        with suppress(KeyError):  # another thread's calls may have pushed it out
            self.move_to_end(key)

    def list_items(self) -> list[tuple[Any, S]]:
        """Return all entries, although another thread may put in others meanwhile."""
        while True:
            with suppress(RuntimeError):
                return [*self.items()]


class CallCache(UnguardedState):
    """The cache of one function's recorded calls, by cache key.

    ``known`` has the keys with an entry. ``waiting`` has keys that may get one.
    """

    def __init__(self, most_waiting: int) -> None:
        self.known: BoundedTable[Any] = BoundedTable(MOST_ENTRIES)
        self.waiting: BoundedTable[Any] = BoundedTable(most_waiting)
        self.newest: CacheEntry | None = None  # the entry that served last
        self.hits = self.misses = 0

    def clear(self) -> None:
        """Drop all entries, and count from 0."""
        self.known.clear()
        self.waiting.clear()
        self.newest = None
        self.hits = self.misses = 0

    def run_by_key(self, args: tuple, kwargs: dict, instead: Callable[[], Any]) -> Any:
        """Make a call that the newest entry does not serve at first glance."""
        newest = self.newest
        try:
            leaves, outline, nodes = outline_call(args, kwargs)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)] if leaves else leaves
            if newest is not None and newest.serves_at_a_glance(outline, leaves, tensors, nodes):
                return self.replay_entry(newest, tensors, instead)
            if not self.may_look():
                return instead()
            key = make_call_key(outline, leaves, tensors)
        except UnfitArgument as unfit:
            return self.run_unfit(args, kwargs, str(unfit), instead)
        call = CallInfo(key, args, kwargs, instead, leaves, tensors, outline, nodes)
        state: KeyState = self.known.get(key, UNKNOWN)
        return state.make_call(call, self)

    def run_eagerly(self, call: CallInfo) -> Any:
        """Make a call by the function."""
        self.misses += 1
        return call.instead()

    def may_look(self) -> bool:
        """True if the key of a call is to be computed."""
        return True

    def note_use(self, key: Any, entry: CacheEntry) -> None:
        """Note that an entry serves a call."""
        self.known.mark_used(key)

    def replay_entry(
        self, entry: CacheEntry, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        """Make a call by the program of an entry."""
        raise NotImplementedError

    def run_unknown(self, call: CallInfo) -> Any:
        """Make a call whose key has no state."""
        raise NotImplementedError

    def run_unfit(self, args: tuple, kwargs: dict, why: str, instead: Callable[[], Any]) -> Any:
        """Make a call that has no key."""
        raise NotImplementedError

    def run_stale(self, call: CallInfo, entry: CacheEntry) -> Any:
        """Make a call that the entry of its key does not serve."""
        raise NotImplementedError
