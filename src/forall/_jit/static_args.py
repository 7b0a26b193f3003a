"""Static arguments of `jit`: part of the cache key by their value, whatever their class."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._core.errors import TransformCall, format_columns, format_short, type_name_of
from forall._core.python_state import read_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_KINDS = inspect.Parameter
_PLACED = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
_NAMED = (_KINDS.KEYWORD_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)


class StaticBox:
    """A box around a static argument, which makes it a leaf of the arguments."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = _make_value_key(value)


def unbox_static(leaf: Any) -> Any:
    """Return a leaf without its `StaticBox` box."""
    return leaf.value if type(leaf) is StaticBox else leaf


def _make_value_key(x: Any) -> Any:
    """A key with hash and equality of ``x`` that tells 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    if isinstance(x, tuple):
        return type(x), x, *map(_make_value_key, x)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x), x, *[_make_value_key(getattr(x, f.name)) for f in fields(x) if f.compare]
    return type(x), x


class StaticArguments:
    """The static arguments of a function, by position and by name."""

    def __init__(
        self,
        func: Callable,
        argnums: int | Sequence[int] | None,
        argnames: str | Iterable[str] | None,
    ) -> None:
        given = {"static_argnums": argnums, "static_argnames": argnames}
        self.call = TransformCall("jit", func, **{k: v for k, v in given.items() if v is not None})
        self.places = _collect_all(int, argnums, self.call, "static_argnums", "an int")
        self.names = _collect_all(str, argnames, self.call, "static_argnames", "a str")
        parameters = _read_parameters(func)
        if parameters is not None and (self.places or self.names):
            self._complete_names(parameters)

    def __bool__(self) -> bool:
        return bool(self.places or self.names)

    def _complete_names(self, parameters: Sequence[inspect.Parameter]) -> None:
        """Find each static argument by position and by name, as a call may pass it either way."""
        placed = [p.name for p in parameters if p.kind in _PLACED]
        named = {p.name for p in parameters if p.kind in _NAMED}
        kinds = {p.kind for p in parameters}
        if _KINDS.VAR_POSITIONAL not in kinds:
            for n in self.places:
                if not -len(placed) <= n < len(placed):
                    raise self._make_error("static_argnums", n, placed, "Count from 0.")
            self.places = {n % len(placed) for n in self.places}
        if _KINDS.VAR_KEYWORD not in kinds:
            for name in self.names:
                if name not in named and name not in placed:
                    every = [*placed, *sorted(named.difference(placed))]
                    raise self._make_error("static_argnames", name, every, "Give names of these.")
        found = {placed[n] for n in self.places if 0 <= n < len(placed)} & named
        self.places |= {placed.index(name) for name in self.names if name in placed}
        self.names |= found

    def _make_error(self, option: str, given: Any, known: Sequence[str], cure: str) -> ValueError:
        rows = [(option, repr(given)), ("arguments", ", ".join(known) or "none")]
        return documented_error(ValueError, "static-names")(
            f"{self.call}: the function has no such argument.\n{format_columns(rows)}\n{cure}"
        )

    def box_arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call, with each static one in a box."""
        given = list(args)
        for n in {n + len(args) if n < 0 else n for n in self.places}:
            if 0 <= n < len(given):
                given[n] = self._box_argument(given[n], f"argument {n}")
        named = {k: self._box_argument(v, k) if k in self.names else v for k, v in kwargs.items()}
        return tuple(given), named

    def _box_argument(self, value: Any, name: str) -> StaticBox:
        row = (name, format_short(value), type_name_of(value))
        if isinstance(value, torch.Tensor):
            raise documented_error(TypeError, "static-values")(
                f"{self.call}: a tensor is no static argument.\n{format_columns([row])}\n"
                "A program is kept for each value of a static argument, and reads tensors anew. "
                "Leave it out, or give its number: x.item()."
            )
        box = StaticBox(value)
        try:
            hash(box.key)
        except TypeError as error:
            raise documented_error(TypeError, "static-values")(
                f"{self.call}: a static argument must hash.\n{format_columns([row])}\n"
                "A program is kept for each value of it. Give it __hash__ and __eq__, or a form "
                "that has them, such as a tuple for a list. Numbers and strings in lists, tuples "
                "and dicts need not be static."
            ) from error
        return box


def _collect_all(of: type, given: Any, call: TransformCall, option: str, one: str) -> set[Any]:
    """The set of one or several values of type ``of``, for an option that allows both."""
    several = () if given is None else (given,) if isinstance(given, (int, str)) else given
    try:
        found = [*several]
    except TypeError:
        found = [given]
    if any(not isinstance(x, of) or isinstance(x, bool) for x in found):
        raise documented_error(TypeError, "static-names")(
            f"{call}: {option} must be {one}, or several.\n"
            f"{format_columns([(option, format_short(given), type_name_of(given))])}\n"
            f"Give {one}, or a tuple of them."
        )
    return set(found)


def _read_parameters(func: Callable) -> list[inspect.Parameter] | None:
    """The parameters of a function, None for one without a signature, such as a builtin."""
    try:
        called = func.forward if isinstance(func, torch.nn.Module) else func
        return [*read_signature(called).parameters.values()]
    except (TypeError, ValueError):
        return None
