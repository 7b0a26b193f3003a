"""The base of our tensor wrappers: tensors that stand for a value one level down."""

from __future__ import annotations

from typing import Any

import torch

make_wrapper = torch.Tensor._make_wrapper_subclass


class Wrapper(torch.Tensor):
    """A tensor without storage of its own that belongs to a level."""

    level: Any
    value: torch.Tensor

    def graph_free(self) -> Wrapper:
        """A second name for this value that has no autograd history at this level."""
        raise NotImplementedError

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C.DisableTorchFunction():
            return self.describe()

    def describe(self) -> str:
        """What repr shows."""
        raise NotImplementedError
