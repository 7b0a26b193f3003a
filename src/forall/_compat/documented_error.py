"""Errors with a note that names their entry in `errors.md`: cause and cure at length."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch.compiler import is_dynamo_compiling as is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

E = TypeVar("E", bound=Exception)

NOTE = "More: python -m forall explain "


def documented_error(kind: type[E], key: str) -> Callable[[str], E]:
    """Return what makes errors of this kind from a text, with a note that names their entry.

    The text stays next to `raise`: ``raise documented_error(ValueError, "chunk-size")(text)``.
    """

    def make(text: str) -> E:
        error = kind(text)
        if not is_compiling():  # Dynamo knows no notes; it runs the call again and raises there
            error.add_note(f"{NOTE}{key}")
        return error

    return make
