"""Scopes: contexts in which torch's own draws take their numbers from keys.

NOTE [draw numbers]
    A scope has a key and counts its draws; draw number n uses `fold_in(key, n)`. There is no other
    state. Code that is recomputed, as checkpoints do in a backward pass, must start from the same
    count as in its first run (`resume_draws`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat import exception_safety
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import get_facts
from forall._compat.private_api import DispatchMode
from forall._core.errors import format_columns
from forall._core.levels import stack
from forall._random import keys, torch_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch


class RandomScope:
    """A key and the number of its draws. The key is made lazily, as many scopes draw nothing.

    ``counts`` is for a scope within a vmap. If its examples diverge, each has a count of its own.
    """

    __slots__ = ("_key", "_make", "_served", "counts")

    def __init__(
        self, make: Callable[[], torch.Tensor], counts: Callable[[Any], Any] | None = None
    ) -> None:
        self._make = make
        self._key: torch.Tensor | None = None
        self._served: list[Any] = [0]
        self.counts = counts

    def share_count(self, make: Callable[[], torch.Tensor]) -> RandomScope:
        """Return a scope with another form of the key that shares its count with this one."""
        other = RandomScope(make, self.counts)
        other._served = self._served
        return other

    @property
    def count(self) -> Any:
        """The number of draws so far, or an object of ``counts`` with each example's number."""
        return self._served[0]

    @count.setter
    def count(self, number: Any) -> None:
        self._served[0] = number

    @property
    def key(self) -> torch.Tensor:
        if self._key is None:
            self._key = self._make()
        return self._key

    def reserve(self) -> Callable[[], torch.Tensor]:
        """Count a draw, and return a function that computes its key."""
        if self.counts is None:
            number, self.count = self.count, self.count + 1
            return lambda: keys.fold_in(self.key, number)
        key, number, self.count = self.counts(self)
        return lambda: keys.fold_in(key(), number)

    def draw(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator of torch that draws, with the next key."""
        return torch_ops.run_with_key(self.reserve()(), func, args, kwargs)


class _ScopeState(exception_safety.RestoredState):
    running: RandomScope | None = None  # the innermost scope of this thread


scopes = _ScopeState.make_instance()


class enter_scope:
    """Context in which a scope is the running one, or none is."""

    __slots__ = ("previous", "scope")

    def __init__(self, scope: RandomScope | None) -> None:
        self.scope = scope

    def __enter__(self) -> None:
        self.previous = scopes.running
        scopes.running = self.scope

    def __exit__(self, *_: object) -> None:
        scopes.running = self.previous


class _DrawMode(DispatchMode):
    """A mode that runs operators that draw with keys of the running scope."""

    stays = True  # a derivative that is taken further out must see the same draws

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        scope = scopes.running
        if scope is None or not get_facts(func).seeded:
            return func(*args, **kwargs)
        with functions_off():
            if torch_ops.has_draws(func, args, kwargs):
                return scope.draw(func, args, kwargs)
            return func(*args, **kwargs)


class scope:
    """Inside, every draw of torch is a function of ``key``, ``example`` and how many came before.

    Draws are ``torch.rand`` and its like, dropout, draws in place (``x.normal_()``), those of
    ``torch.distributions`` and ``torch.nn.init``; torch's generators are neither asked nor changed,
    also where one is passed. Draw number n (from 0) is what `forall.random` draws from
    ``fold_in(k, n)``, where ``k`` is ``fold_in(key, example)``, or ``key`` without an example.

    It is what `forall.vmap` does with a key, for one example alone:

        vmap(f, randomness=key)(xs)[i]   equals   f(xs[i]) under scope(key, i).

    A `vmap` inside, of randomness ``"error"`` or ``"different"``, gives each of its examples a
    scope by `next_key`; of ``"same"``, it draws for all of them at once. A checkpoint that
    preserves the state of the generator repeats its draws.

    Args:
        key: as `key` makes it.
        example: the number of the example.

    Raises:
        TypeError, ValueError: for a key that is none.
        NotImplementedError: inside, for a draw that has no keyed form (a fused attention kernel
            with dropout).

    Example:
        >>> key = forall.random.key(0)
        >>> with forall.random.scope(key, 3):
        ...     x = torch.rand(2)
        >>> y = forall.vmap(lambda _: torch.rand(2), randomness=key)(torch.zeros(5))[3]
        >>> torch.equal(x, y)
        True
    """

    def __init__(self, key: torch.Tensor, example: int | torch.Tensor | None = None) -> None:
        keys.check_key("scope(key, example)", key)
        self._key = key if example is None else keys.fold_in(key, example)
        self._entered: list[_ResumedScope] = []

    def __enter__(self) -> None:
        place = _ResumedScope(RandomScope(lambda: self._key, _find_counts()), 0)
        place.__enter__()
        self._entered.append(place)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


def _find_counts() -> Callable[[Any], Any] | None:
    """Return how a scope that is entered now counts draws: for each example of a vmap around."""
    level = stack.top
    while level is not None and not level.draws:
        level = level.parent
    return None if level is None else level.root.take_next_draw


def next_key() -> torch.Tensor:
    """The key that the next draw would have, which goes to the caller instead: (2,).

    For drawing with `forall.random` inside a scope, and for loops that do what an inner `vmap`
    does: ``vmap(g)`` inside a scope is ``vmap(g, randomness=next_key())``.

    Raises:
        RuntimeError: outside every scope and every ``vmap(..., randomness=key)``.

    Example:
        >>> with forall.random.scope(forall.random.key(0)):
        ...     k = forall.random.next_key()
        >>> torch.equal(k, forall.random.fold_in(forall.random.key(0), 0))
        True
    """
    found = scopes.running
    if found is None:
        rows = [("running", "no scope"), ("needed", "scope(key), or vmap(f, randomness=key)")]
        raise documented_error(RuntimeError, "no-key-in-scope")(
            f"next_key(): there is no key to draw from.\n{format_columns(rows)}\n"
            "Enter a scope first, or hand a key to the function: split(key, n)."
        )
    return found.reserve()()


def make_count_reset() -> Callable[[], None]:
    """Return a function that resets the count to its present value, for a run that is given up."""
    scope = scopes.running
    if scope is None:
        return lambda: None
    count = scope.count
    return lambda: setattr(scope, "count", count)


class _ResumedScope:
    """Context in which a scope runs from a count on; its exit restores the count and the scope."""

    __slots__ = ("count", "mode", "place", "scope", "was")

    def __init__(self, scope: RandomScope | None, count: int) -> None:
        self.scope = scope
        self.count = count

    def __enter__(self) -> None:
        self.place = enter_scope(self.scope)
        self.place.__enter__()
        self.mode = None
        if self.scope is not None:
            self.was, self.scope.count = self.scope.count, self.count
            self.mode = _DrawMode()
            self.mode.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.mode is not None:
            self.mode.__exit__(*error)
            self.scope.count = self.was
        self.place.__exit__()


def resume_draws(function: Callable) -> Callable:
    """Wrap ``function`` so that any later call draws the same numbers as a call now."""
    scope = scopes.running
    count = 0 if scope is None else scope.count

    def run_resumed(*args: Any, **kwargs: Any) -> Any:
        with _ResumedScope(scope, count):
            return function(*args, **kwargs)

    return run_resumed
