"""Scopes: where torch's own draws take their numbers from keys.

NOTE [draw numbers]
    A scope has a key and counts what is drawn in it; draw number n takes `fold_in(key, n)`. That
    is all its state. Code that runs once more, as checkpoints do in a backward pass, must find the
    count that it found first (`resuming`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat import exception_safety
from forall._compat.dispatch_state import functions_off
from forall._compat.op_schema import facts
from forall._compat.private_api import DispatchMode
from forall._core.errors import columns
from forall._random import keys, torch_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch


class Scope:
    """A key, and how many draws it has served. Made when it is first asked for: many are not.

    ``counts`` are those of a level with a key for each example, which may part: then each example
    has a count of its own.
    """

    __slots__ = ("_key", "_make", "_served", "counts")

    def __init__(
        self, make: Callable[[], torch.Tensor], counts: Callable[[Any], Any] | None = None
    ) -> None:
        self._make = make
        self._key: torch.Tensor | None = None
        self._served: list[Any] = [0]
        self.counts = counts

    def twin(self, make: Callable[[], torch.Tensor]) -> Scope:
        """The same scope with its key in another form: what one serves the other has served."""
        other = Scope(make, self.counts)
        other._served = self._served
        return other

    @property
    def count(self) -> Any:
        """How many draws were served: a number, or what ``counts`` makes of examples' own."""
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
        """The key of the next draw, computed when it is called for."""
        if self.counts is None:
            number, self.count = self.count, self.count + 1
            return lambda: keys.fold_in(self.key, number)
        key, number, self.count = self.counts(self)
        return lambda: keys.fold_in(key(), number)

    def draw(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an operator of torch draws, from the next key."""
        return torch_ops.draw(self.reserve()(), func, args, kwargs)


class _State(exception_safety.Here):
    running: Scope | None = None


_state = _State.made()


def running() -> Scope | None:
    """The innermost scope of this thread."""
    return _state.running


class entered:
    """A scope is the running one, or none is."""

    __slots__ = ("previous", "scope")

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope

    def __enter__(self) -> None:
        self.previous = _state.running
        _state.running = self.scope

    def __exit__(self, *_: object) -> None:
        _state.running = self.previous


class _Drawing(DispatchMode):
    """Operators that draw, drawn by the scope that runs."""

    stays = True  # where a derivative is taken further out, its function draws as it did

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        scope = _state.running
        if scope is None or not facts(func).seeded:
            return func(*args, **kwargs)
        with functions_off():
            if torch_ops.draws(func, args, kwargs):
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
        keys.check("scope(key, example)", key)
        self._key = key if example is None else keys.fold_in(key, example)
        self._entered: list[_resumed] = []

    def __enter__(self) -> None:
        place = _resumed(Scope(lambda: self._key), 0)
        place.__enter__()
        self._entered.append(place)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)


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
    found = _state.running
    if found is None:
        rows = [("running", "no scope"), ("needed", "scope(key), or vmap(f, randomness=key)")]
        raise RuntimeError(
            f"next_key(): there is no key to draw from.\n{columns(rows)}\n"
            "Enter a scope first, or hand a key to the function: split(key, n)."
        )
    return found.reserve()()


def taken_back() -> Callable[[], None]:
    """Call the result to forget the draws since: they were for a way that was given up."""
    scope = _state.running
    if scope is None:
        return lambda: None
    count = scope.count
    return lambda: setattr(scope, "count", count)


class _resumed:
    """A scope runs from a count on; its own count, and what ran before, come back afterwards."""

    __slots__ = ("count", "mode", "place", "scope", "was")

    def __init__(self, scope: Scope | None, count: int) -> None:
        self.scope = scope
        self.count = count

    def __enter__(self) -> None:
        self.place = entered(self.scope)
        self.place.__enter__()
        self.mode = None
        if self.scope is not None:
            self.was, self.scope.count = self.scope.count, self.count
            self.mode = _Drawing()
            self.mode.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.mode is not None:
            self.mode.__exit__(*error)
            self.scope.count = self.was
        self.place.__exit__()


def resuming(function: Callable) -> Callable:
    """``function``, drawing at any later time what it would draw if it were called now."""
    scope = _state.running
    count = 0 if scope is None else scope.count

    def again(*args: Any, **kwargs: Any) -> Any:
        with _resumed(scope, count):
            return function(*args, **kwargs)

    return again
