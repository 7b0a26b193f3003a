"""The base of our tensor wrappers: tensors that stand for a value one level down."""

from __future__ import annotations

from typing import Any

import torch

from forall._torch import numpys

make_wrapper = torch.Tensor._make_wrapper_subclass


class Wrapper(torch.Tensor):
    """A tensor without storage of its own that belongs to a level."""

    level: Any
    value: torch.Tensor
    stands: Any = None  # where the loop has a view and we a copy, see `_batching.standing`

    def graph_free(self) -> Wrapper:
        """A second name for this value that has no autograd history at this level."""
        raise NotImplementedError

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C.DisableTorchFunction():
            return self.describe()

    def describe(self) -> str:
        """What repr shows."""
        raise NotImplementedError

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        """What a method answers that reads the memory of a tensor."""
        raise NotImplementedError

    def __format__(self, spec: str) -> str:
        if not spec or self.dim():
            return object.__format__(self, spec) if spec else repr(self)
        return format(self.item(), spec)

    def __copy__(self) -> Wrapper:
        """Another tensor of the same memory; as in torch it has no history."""
        return self.detach().requires_grad_(self.requires_grad)  # pyright: ignore[reportReturnType]

    def __deepcopy__(self, memo: dict) -> Wrapper:
        if self.grad_fn is not None:
            raise RuntimeError(
                "deepcopy: this tensor was computed, and its copy would have no history.\n"
                "Use x.clone(), or x.detach().clone()."
            )
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy  # pyright: ignore[reportReturnType]

    def __array_ufunc__(self, func: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return numpys.ufunc(func, method, inputs, kwargs, self.level)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return numpys.function(func, args, kwargs, self.level)


def _of_memory(name: str) -> Any:
    """A method that reads memory: some crash if let through."""

    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return self.memory(name, args, kwargs)

    method.__name__ = name
    return method


READS = ("numpy", "tolist", "__array__")
for _name in (*READS, "data_ptr", "storage", "share_memory_", "__dlpack__", "__reduce_ex__"):
    setattr(Wrapper, _name, _of_memory(_name))


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
