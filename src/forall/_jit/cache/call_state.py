"""The states of a cache key: each says how a call with that key is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class CallInfo(NamedTuple):
    """A call, with the leaves of its arguments and the function that makes it eagerly."""

    key: Any
    args: tuple
    kwargs: dict
    instead: Callable[[], Any]
    leaves: Sequence[Any]
    tensors: Sequence[torch.Tensor]
    outline: Any
    nodes: Sequence[Any]


class KeyState(Protocol):
    """The state of a cache key: recorded, refused, waiting, or unfinished."""

    def make_call(self, call: CallInfo, cache: Any) -> Any:
        """Return the result of a call with this key, made by the policy of ``cache``."""
        ...


class UnknownKey:
    """The state of a key that has none yet: the policy decides."""

    def make_call(self, call: CallInfo, cache: Any) -> Any:
        return cache.run_unknown(call)


class EagerKind(NamedTuple):
    """The state of a key whose calls cannot be recorded, so run eagerly."""

    arguments: str
    why: str

    def make_call(self, call: CallInfo, cache: Any) -> Any:
        return cache.run_eagerly(call)


UNKNOWN = UnknownKey()
