"""The base of our tensor wrappers: tensors that stand for a value one level down."""

from __future__ import annotations

from typing import Any

import torch
from torch import is_inference_mode_enabled

from forall._torch import numpys
from forall._torch.dispatch import (
    PYTHON,
    functions_off,
    is_excluded,
    no_dispatch,
    set_excluded,
)
from forall._torch.lazy import lazy_bits_off, put_lazy_bits

make_wrapper = torch.Tensor._make_wrapper_subclass

_known: dict[type, bool] = {}


def _function(kind: type) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def has_own_meaning(kind: type) -> bool:
    """Whether a subclass of Tensor takes part, by __torch_function__, in the calls on it."""
    known = _known.get(kind)
    if known is None:
        known = kind is not torch.Tensor and not issubclass(kind, Wrapper)
        known = _known[kind] = known and _function(kind) not in _SILENT
    return known


_SILENT = {torch._C._disabled_torch_function_impl}  # as a Parameter is


def only_keeps_class(kind: type) -> bool:
    """Whether all that a subclass makes of calls is that the results are of its class."""
    return _function(kind) is _function(torch.Tensor)


class _Kinds:
    """Whether any wrapper stands for a tensor of a class with a meaning of its own."""

    used = False


kinds = _Kinds()


class Wrapper(torch.Tensor):
    """A tensor without storage of its own that belongs to a level."""

    # What who asks is told, unless they ask `type`.
    __class__ = torch.Tensor  # pyright: ignore[reportAssignmentType]
    level: Any
    value: torch.Tensor
    left: Any = None  # what its ended level leaves of a value, and of which, see `_core.ended`
    narrowed: Any = None  # what it is for the examples that run, see `_batching.narrowing`
    read: Any = None  # the same, of what is only read

    def graph_free(self) -> Wrapper:
        """A second name for this value that has no autograd history at this level."""
        raise NotImplementedError

    def alone(self, gaps: bool = False) -> bool:
        """Let the numbers of one example lie as in the loop; whether they lay otherwise.

        ``gaps``: also where nothing lies between them.
        """
        return False

    def look_like_value(self) -> None:
        """Show the shape and strides that the value has by now, after squeeze_, t_ or resize_."""
        value = self.value
        with functions_off(), no_dispatch():
            if (self.shape, self.stride()) != (value.shape, value.stride()):
                look_like(self, shell(type(self), value))

    # The class of the tensor that this stands for, if that class has a meaning of its own.
    kind: type | None = None

    def of_kind(self, kind: type | None) -> Wrapper:
        """Stand for a tensor of this class."""
        if kind is not None and has_own_meaning(kind):
            self.kind, kinds.used = kind, True
        return self

    def as_subclass(self, cls: type) -> Wrapper:
        """Another name that stands for a tensor of this class."""
        return self.view_as(self).of_kind(cls) if has_own_meaning(cls) else self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch._C.DisableTorchFunction():
            return self.describe()

    def describe(self) -> str:
        """What repr shows."""
        raise NotImplementedError

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        """What a method answers that reads the memory of a tensor."""
        raise NotImplementedError

    def refuse_history(self, name: str) -> None:
        """In torch's words: who reads numbers gives up their history, and is to say so."""
        t: Any = self
        while isinstance(t, Wrapper) and name != "tolist" and torch.is_grad_enabled():
            t.loses(name)
            t = t.value

    def loses(self, name: str) -> None:
        """An error where a derivative hangs on this wrapper."""
        if self.requires_grad:
            raise RuntimeError(
                f"Can't call {name}() on Tensor that requires grad. Use tensor.detach().{name}()."
            )

    def __format__(self, spec: str) -> str:
        if self.dim():
            return object.__format__(self, spec) if spec else repr(self)
        return format(self.item(), spec)  # its number, as of any tensor with one

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


def kind_of(tensor: torch.Tensor) -> type:
    """The class of a tensor, or of the one that a wrapper stands for."""
    return (isinstance(tensor, Wrapper) and tensor.kind) or type(tensor)


def _of_memory(name: str) -> Any:
    """A method that reads memory: some crash if let through."""

    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return self.memory(name, args, kwargs)

    method.__name__ = name
    return method


READS = ("numpy", "tolist", "__array__")
_READS_TOO = ("data_ptr", "storage", "share_memory_", "__dlpack__", "__reduce_ex__")
ENTRYWISE = ("apply_", "map_", "map2_")  # functions of Python's, which are handed numbers
for _name in (*READS, *_READS_TOO, *ENTRYWISE):
    setattr(Wrapper, _name, _of_memory(_name))


def _number(name: str) -> Any:
    """``float(x)`` and its like, which torch.tensor asks in C++ of each x in a list.

    It does so with the key excluded by which levels are asked, and a wrapper has no memory.
    """
    plain = getattr(torch.Tensor, name)

    def method(self: Wrapper) -> Any:
        if not is_excluded(PYTHON):
            return plain(self)
        set_excluded(PYTHON, False)
        try:
            return plain(self)
        finally:
            set_excluded(PYTHON, True)

    method.__name__ = name
    return method


for _name in ("__float__", "__int__", "__index__", "__bool__", "__complex__"):
    setattr(Wrapper, _name, _number(_name))


def strides(value: torch.Tensor) -> tuple[int, ...]:
    try:
        if isinstance(value, Wrapper):
            with functions_off():  # no question of the user's, for whom they would be made anew
                return value.stride()
        return value.stride()
    except RuntimeError as error:
        raise NotImplementedError(
            f"A tensor of layout {value.layout} has no strides, so nothing can stand for it here.\n"
            "Make it dense (.to_dense()) or of coordinates (.to_sparse_coo())."
        ) from error


def shell(kind: type[Wrapper], value: torch.Tensor) -> Any:
    """A wrapper of this kind that looks like ``value`` itself."""
    made = wrapper_of(kind, value, value.shape, strides(value))
    put_lazy_bits(made, value)
    return made


def look_like(wrapper: torch.Tensor, other: torch.Tensor) -> None:
    """Show the shape, the strides and the lazy bits of another wrapper."""
    with functions_off(), no_dispatch(), lazy_bits_off():  # or kernels would look for its memory
        torch.Tensor.data.__set__(wrapper, other)


def wrapper_of(kind: type[Wrapper], value: torch.Tensor, shape: Any, strides: Any) -> Any:
    """A wrapper of this kind for ``value``.

    In inference mode a view of a tensor from before is an ordinary tensor, and so is its wrapper:
    torch gives it the count of writes of its base.
    """
    offset, dtype, layout, device = (
        value.storage_offset(),
        value.dtype,
        value.layout,
        value.device,
    )
    if is_inference_mode_enabled() and not value.is_inference():
        with torch.inference_mode(False):
            return make_wrapper(kind, shape, strides, offset, None, dtype, layout, device)
    return make_wrapper(kind, shape, strides, offset, None, dtype, layout, device)
