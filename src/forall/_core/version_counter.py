"""Version counters of tensors: detect in-place writes before a derivative is taken."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.autograd.graph import increment_version

from forall._compat.dispatch_state import functions_off
from forall._compat.private_api import get_version
from forall._compat.wrapper_tensor import Wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class VersionCount:
    """The version of a tensor at one time, by which later in-place writes are detected.

    Autograd checks the versions of tensors that it saves itself. It does not know of tensors that a
    level, a tangent program or a factor of a gradient holds.
    """

    __slots__ = ("number", "of")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Tensors held by autograd's nodes must keep no history alive: a cycle is never freed.
        self.of = weakref.ref(tensor) if isinstance(tensor, Wrapper) else lambda: tensor
        with functions_off():  # as `get_version` does; this is called for each argument
            self.number = -1 if tensor.is_inference() else tensor._version

    def current_version(self) -> int:
        tensor = self.of()
        return self.number if tensor is None else get_version(tensor)

    def has_no_writes(self) -> bool:
        return self.current_version() == self.number

    def renew(self) -> None:
        self.number = self.current_version()


class bump_versions:
    """Context that bumps the version of each of these tensors unless its body has bumped it.

    For tensors in lists, torch leaves the bump to the inner kernels. Those write to the stacks
    within our wrappers, not to the wrappers.
    """

    __slots__ = ("before",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.before = [(t, get_version(t)) for t in tensors]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        increment_version(t for t, n in self.before if n == get_version(t) >= 0)
