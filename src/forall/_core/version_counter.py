"""How often tensors were written to, for derivatives that are taken later."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.autograd.graph import increment_version

from forall._compat.private_api import version
from forall._compat.wrapper_tensor import Wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class Count:
    """Whether a tensor is as it was: nobody has written into it since it was counted.

    Autograd counts the writes into what it saves itself. What a level, a tangent program or a
    factor of a gradient holds is out of its sight.
    """

    __slots__ = ("number", "of")

    def __init__(self, tensor: torch.Tensor) -> None:
        # No history may hang on what autograd's own nodes hold, or it would never be free.
        self.of = weakref.ref(tensor) if isinstance(tensor, Wrapper) else lambda: tensor
        self.number = version(tensor)

    def now(self) -> int:
        tensor = self.of()
        return self.number if tensor is None else version(tensor)

    def holds(self) -> bool:
        return self.now() == self.number

    def renew(self) -> None:
        self.number = self.now()


class counted:
    """Count a write into each of these tensors, where what writes has not done so.

    Of tensors in lists torch leaves that to the kernels within; within ours the stacks are written.
    """

    __slots__ = ("before",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.before = [(t, version(t)) for t in tensors]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        increment_version(t for t, n in self.before if n == version(t) >= 0)
