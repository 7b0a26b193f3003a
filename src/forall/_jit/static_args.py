"""Static arguments of `jit`: part of the cache key by their value, whatever their class."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import Call, columns, kind, short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_KINDS = inspect.Parameter
_PLACED = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
_NAMED = (_KINDS.KEYWORD_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)


class Static:
    """A box around a static argument, which makes it a leaf of the arguments."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = _by_value(value)


def unboxed(leaf: Any) -> Any:
    """Return a leaf without its `Static` box."""
    return leaf.value if type(leaf) is Static else leaf


def _by_value(x: Any) -> Any:
    """A key with hash and equality of ``x`` that tells 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    if isinstance(x, tuple):
        return type(x), x, *map(_by_value, x)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x), x, *[_by_value(getattr(x, f.name)) for f in fields(x) if f.compare]
    return type(x), x


class Statics:
    """The static arguments of a function, by position and by name."""

    def __init__(
        self,
        func: Callable,
        argnums: int | Sequence[int] | None,
        argnames: str | Iterable[str] | None,
    ) -> None:
        given = {"static_argnums": argnums, "static_argnames": argnames}
        self.call = Call("jit", func, **{k: v for k, v in given.items() if v is not None})
        self.places = _all_of(int, argnums, self.call, "static_argnums", "an int")
        self.names = _all_of(str, argnames, self.call, "static_argnames", "a str")
        parameters = _parameters(func)
        if parameters is not None and (self.places or self.names):
            self._complete(parameters)

    def __bool__(self) -> bool:
        return bool(self.places or self.names)

    def _complete(self, parameters: Sequence[inspect.Parameter]) -> None:
        """Find each static argument by position and by name, as a call may pass it either way."""
        placed = [p.name for p in parameters if p.kind in _PLACED]
        named = {p.name for p in parameters if p.kind in _NAMED}
        kinds = {p.kind for p in parameters}
        if _KINDS.VAR_POSITIONAL not in kinds:
            for n in self.places:
                if not -len(placed) <= n < len(placed):
                    raise self._none_such("static_argnums", n, placed, "Count from 0.")
            self.places = {n % len(placed) for n in self.places}
        if _KINDS.VAR_KEYWORD not in kinds:
            for name in self.names:
                if name not in named and name not in placed:
                    every = [*placed, *sorted(named.difference(placed))]
                    raise self._none_such("static_argnames", name, every, "Give names of these.")
        found = {placed[n] for n in self.places if 0 <= n < len(placed)} & named
        self.places |= {placed.index(name) for name in self.names if name in placed}
        self.names |= found

    def _none_such(self, option: str, given: Any, known: Sequence[str], cure: str) -> ValueError:
        rows = [(option, repr(given)), ("arguments", ", ".join(known) or "none")]
        return ValueError(
            f"{self.call}: the function has no such argument.\n{columns(rows)}\n{cure}"
        )

    def boxed(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call, with each static one in a box."""
        given = list(args)
        for n in {n + len(args) if n < 0 else n for n in self.places}:
            if 0 <= n < len(given):
                given[n] = self._box(given[n], f"argument {n}")
        named = {k: self._box(v, k) if k in self.names else v for k, v in kwargs.items()}
        return tuple(given), named

    def _box(self, value: Any, name: str) -> Static:
        row = (name, short(value), kind(value))
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"{self.call}: a tensor is no static argument.\n{columns([row])}\n"
                "A program is kept for each value of a static argument, and reads tensors anew. "
                "Leave it out, or give its number: x.item()."
            )
        box = Static(value)
        try:
            hash(box.key)
        except TypeError as error:
            raise TypeError(
                f"{self.call}: a static argument must hash.\n{columns([row])}\n"
                "A program is kept for each value of it. Give it __hash__ and __eq__, or a form "
                "that has them, such as a tuple for a list. Numbers and strings in lists, tuples "
                "and dicts need not be static."
            ) from error
        return box


def _all_of(of: type, given: Any, call: Call, option: str, one: str) -> set[Any]:
    """The set of one or several values of type ``of``, for an option that allows both."""
    several = () if given is None else (given,) if isinstance(given, (int, str)) else given
    try:
        found = [*several]
    except TypeError:
        found = [given]
    if any(not isinstance(x, of) or isinstance(x, bool) for x in found):
        raise TypeError(
            f"{call}: {option} must be {one}, or several.\n"
            f"{columns([(option, short(given), kind(given))])}\n"
            f"Give {one}, or a tuple of them."
        )
    return set(found)


def _parameters(func: Callable) -> list[inspect.Parameter] | None:
    """The parameters of a function, None for one without a signature, such as a builtin."""
    try:
        called = func.forward if isinstance(func, torch.nn.Module) else func
        return [*inspect.signature(called).parameters.values()]
    except (TypeError, ValueError):
        return None
