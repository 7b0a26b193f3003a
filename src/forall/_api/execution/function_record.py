"""The record that forall keeps with a user's function or module, in one of its attributes."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from torch.nn import Module

    from forall._api.execution.side_effect_free import Bindings

RECORD = "__forall_further__"  # the attribute
_LOOKED_AT_AGAIN = 256  # calls after which a function with side effects is read again


class FunctionRecord:
    """The calls of all transforms of a user's function or module, and its pure bindings."""

    __slots__ = ("bindings", "calls", "doubts", "of")

    def __init__(self, owner: FunctionType | Module) -> None:
        self.of = ref(owner)  # attributes are copied to others (functools.wraps, copy.copy)
        self.calls: dict[Any, Any] = {}  # of automatic replay, by transform
        self.bindings: Bindings | None = None  # if it only computes
        self.doubts = 0  # calls until it is read again, if it had side effects

    def __reduce__(self) -> tuple:
        return type(None), ()  # copied or pickled with its owner; a reader may not have forall


def get_record(owner: FunctionType | Module) -> FunctionRecord:
    """Return the record of a function or module, a new one if it has none."""
    kept = vars(owner).get(RECORD)
    if type(kept) is not FunctionRecord or kept.of() is not owner:
        kept = vars(owner)[RECORD] = FunctionRecord(owner)
    return kept


def find_bindings(func: Any) -> Bindings | None:
    """Return the bindings of a function that only computes; None for any other.

    The function is read once, and again if one of its names is bound to something else.
    """
    if type(func) is not FunctionType:
        return None
    kept = get_record(func)
    if kept.bindings is not None:
        if kept.bindings.hold(func):
            return kept.bindings
        kept.bindings = None
    elif kept.doubts > 0:
        kept.doubts -= 1
        return None
    # Its tables take time to import, and in most programs no examples diverge.
    from forall._api.execution.side_effect_free import find_pure_bindings

    kept.bindings = find_pure_bindings(func)
    if kept.bindings is None:
        kept.doubts = _LOOKED_AT_AGAIN
    return kept.bindings
