"""FSDP2's bookkeeping of parameters, which runs in hooks of the modules that it shards.

Gathering parameters before a module runs, and freeing them afterwards, is no part of the function
that a user transforms. Levels that saw it would refuse its collectives and its storage changes.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_METHODS = ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward")


class _PatchState:
    """A flag: True once the methods are wrapped. The user imports FSDP2, which takes long."""

    is_patched = False


_state = _PatchState()


def needs_patch() -> bool:
    """True if FSDP2 has been imported, and still runs its bookkeeping under levels."""
    return MODULE in sys.modules and not _state.is_patched


def patch(hidden: Callable[[], AbstractContextManager[None]]) -> None:
    """Run FSDP2's bookkeeping within ``hidden()`` from now on."""
    group = sys.modules[MODULE].FSDPParamGroup
    for name in _METHODS:
        setattr(group, name, _hide(getattr(group, name), hidden))
    _state.is_patched = True


def _hide(method: Callable[..., Any], hidden: Callable[[], AbstractContextManager[None]]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with hidden():
            return method(*args, **kwargs)

    return call
