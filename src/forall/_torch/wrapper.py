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

    def __deepcopy__(self, memo: dict) -> Wrapper:
        with torch._C.DisableTorchFunction():
            if self.grad_fn is not None:
                raise RuntimeError(
                    "deepcopy: this tensor was computed, and its copy would have no history.\n"
                    "Use x.clone(), or x.detach().clone()."
                )
            copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy  # pyright: ignore[reportReturnType]


def _without_memory(name: str) -> Any:
    """A method that would read the memory of one example; some crash if let through."""

    def method(self: Wrapper, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}: inside a transform a tensor stands for many, with no memory of its own.\n"
            "Use torch's operators on it, or do this outside the transform."
        )

    method.__name__ = name
    return method


for _name in ("numpy", "tolist", "share_memory_", "__array__", "__dlpack__", "__reduce_ex__"):
    setattr(Wrapper, _name, _without_memory(_name))


def shell(kind: type[Wrapper], value: torch.Tensor) -> Any:
    """A wrapper of this kind that looks like ``value`` itself."""
    return make_wrapper(
        kind,
        value.shape,
        value.stride(),
        value.storage_offset(),
        None,
        value.dtype,
        value.layout,
        value.device,
    )
