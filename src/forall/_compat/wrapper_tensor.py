"""The base of forall's wrapper subclasses: tensors that stand for a value one level down."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import is_inference_mode_enabled

from forall._compat import numpy_interop
from forall._compat.dispatch_state import (
    PYTHON,
    SNAPSHOT,
    functions_are_off,
    functions_off,
    is_excluded,
    no_dispatch,
    set_excluded,
)
from forall._compat.documented_error import documented_error
from forall._compat.lazy_bits import copy_lazy_bits, disable_lazy_bits

make_wrapper = torch.Tensor._make_wrapper_subclass
_STRIDE: Any = torch._C.TensorBase.stride


# Attributes of wrappers that belong to forall.
OURS = frozenset(
    {
        "axis",
        "chain",
        "deferred",
        "family",
        "left",
        "level",
        "is_external",
        "narrowed",
        "read",
        "records_on_value",
        "slot",
        "source_version",
        "unjoined",
        "value",
    }
)


class Wrapper(torch.Tensor):
    """A tensor without storage of its own that belongs to a level."""

    # For isinstance and `x.__class__`; `type(x)` is the class itself.
    __class__ = torch.Tensor  # pyright: ignore[reportAssignmentType]
    level: Any
    value: torch.Tensor
    left: Any = (
        None  # the value after its level has exited, and its source, see `_core.escaped_values`
    )
    narrowed: Any = None  # the value for the active examples, see `_vmap.active_set.restrict_args`
    read: Any = None  # the same for values that are only read

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a user's attribute with the name of one of forall's.

        Code that makes many wrappers writes to their ``__dict__``, at no cost.
        """
        if name in OURS and not sys._getframe(1).f_globals["__name__"].startswith("forall."):
            raise documented_error(AttributeError, "tensor-subclass")(
                f"x.{name} = ...: a tensor inside a transform of forall has a .{name} already.\n"
                f"Take another name, or x.as_subclass(Sub), which keeps a .{name} of its own."
            )
        object.__setattr__(self, name, value)

    def graph_free(self) -> Wrapper:
        """Return an alias of this value that has no autograd history at this level."""
        raise NotImplementedError

    def lay_out_alone(self, gaps: bool = False) -> bool:
        """Lay out the numbers of one example as in the loop; return True if their layout changed.

        With ``gaps``, also if there are no gaps between them.
        """
        return False

    def look_like_value(self) -> None:
        """Show the shape and strides that the value has by now, after squeeze_, t_ or resize_."""
        value = self.value
        with functions_off(), no_dispatch():
            if (self.shape, self.stride()) != (value.shape, value.stride()):
                copy_metadata(self, make_shell(type(self), value))

    def __repr__(self, *, tensor_contents: None = None) -> str:
        with torch._C.DisableTorchFunction():
            return self.describe()

    def describe(self) -> str:
        """Return the text for repr."""
        raise NotImplementedError

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        """Run a method that reads the memory of a tensor."""
        raise NotImplementedError

    def refuse_history(self, name: str) -> None:
        """Raise in torch's words if reading numbers would lose a history."""
        t: Any = self
        while isinstance(t, Wrapper) and name != "tolist" and torch.is_grad_enabled():
            t.loses(name)
            t = t.value

    def loses(self, name: str) -> None:
        """Raise if a derivative depends on this wrapper."""
        if self.requires_grad:
            raise RuntimeError(
                f"Can't call {name}() on Tensor that requires grad. Use tensor.detach().{name}()."
            )

    def __format__(self, spec: str) -> str:
        if self.dim():
            return object.__format__(self, spec) if spec else repr(self)
        return format(self.item(), spec)  # its number, as of any tensor with one

    def __copy__(self) -> Wrapper:
        """Return another tensor of the same memory; as in torch it has no history."""
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
        return numpy_interop.call_ufunc(func, method, inputs, kwargs, self.level)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return numpy_interop.call_array_function(func, args, kwargs, self.level)


def unwrap_all(t: Any) -> Any:
    """Return the tensor below all wrappers, which has the numbers of all examples."""
    while isinstance(t, Wrapper):
        t = t.value
    return t


def has_history(t: torch.Tensor) -> bool:
    """True if a tensor requires grad, or a tensor that it wraps."""
    while not t.requires_grad and isinstance(t, Wrapper):
        t = t.value
    return t.requires_grad


def _make_memory_method(name: str) -> Any:
    """Return a method that reads memory: torch's own would crash for some of these."""

    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return self.memory(name, args, kwargs)

    method.__name__ = name
    return method


READS = ("numpy", "tolist", "__array__")
_READS_TOO = ("data_ptr", "storage", "share_memory_", "__dlpack__", "__reduce_ex__")
ENTRYWISE = ("apply_", "map_", "map2_")  # these call Python functions of numbers
for _name in (*READS, *_READS_TOO, *ENTRYWISE):
    setattr(Wrapper, _name, _make_memory_method(_name))


def _refuse_wrappers(torchs: Any) -> Any:
    """Return the call of a jiterator kernel, which bypasses the dispatcher, for plain tensors only.

    The kernel would read memory that a wrapper does not have, and end the process.
    """

    @functools.wraps(torchs)
    def call(self: Any, *tensors: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Wrapper) for x in tensors):
            raise documented_error(TypeError, "memory-of-one-example")(
                f"{self.kernel_name}(...): a kernel of torch.cuda.jiterator cannot run inside a "
                "transform of forall, as it reads the memory of its arguments.\n"
                "Call it in a torch.library.custom_op: that runs once per example, and takes a "
                "derivative from register_autograd."
            )
        return torchs(self, *tensors, **kwargs)

    return call


def _skip_wrapped_weights(torchs: Any) -> Any:
    """Return `RNNBase.flatten_parameters`, which moves weights in memory, for wrappers too.

    The layer calls it for the weights that `functional_call` gives it. Wrappers have no memory to
    move: levels run their operators.
    """

    @functools.wraps(torchs)
    def flatten_parameters(self: torch.nn.RNNBase) -> None:
        if not any(isinstance(weight, Wrapper) for weight in self._flat_weights):
            torchs(self)

    return flatten_parameters


torch.nn.RNNBase.flatten_parameters = _skip_wrapped_weights(torch.nn.RNNBase.flatten_parameters)
_kernel = torch.cuda.jiterator._JittedFunction
_kernel.__call__ = _refuse_wrappers(_kernel.__call__)


def _make_number_method(name: str) -> Any:
    """Return ``float(x)`` or its like, which torch.tensor calls in C++ for each x in a list.

    torch excludes the dispatch keys of levels for this call, and a wrapper has no memory.
    """
    plain = getattr(torch.Tensor, name)

    def method(self: Wrapper) -> Any:
        excluded = [key for key in (PYTHON, SNAPSHOT) if is_excluded(key)]
        for key in excluded:
            set_excluded(key, False)
        try:
            return plain(self)
        finally:
            for key in excluded:
                set_excluded(key, True)

    method.__name__ = name
    return method


for _name in ("__float__", "__int__", "__index__", "__bool__", "__complex__"):
    setattr(Wrapper, _name, _make_number_method(_name))


# Functions of torch's that methods of wrappers override, with the method's name; setters of a
# property have an equals sign before it.
OVERRIDDEN: dict[Any, str] = {
    getattr(torch.Tensor, name): name
    for name in (
        *READS,
        *_READS_TOO,
        *ENTRYWISE,
        *("__float__", "__int__", "__index__", "__bool__", "__complex__"),
        *("__repr__", "__format__", "__deepcopy__", "detach_"),
    )
}
OVERRIDDEN |= {torch.Tensor.data.__get__: "data", torch.Tensor.data.__set__: "=data"}


def get_strides(value: torch.Tensor) -> tuple[int, ...]:
    try:
        if not isinstance(value, Wrapper):
            return value.stride()
        if functions_are_off():
            return _STRIDE(value)
        with functions_off():  # for a user's call the value would be laid out anew
            return value.stride()
    except RuntimeError as error:
        raise documented_error(NotImplementedError, "sparse-layout")(
            f"A tensor of layout {value.layout} has no strides, so nothing can stand for it here.\n"
            "Make it dense (.to_dense()) or of coordinates (.to_sparse_coo())."
        ) from error


def make_shell(kind: type[Wrapper], value: torch.Tensor) -> Any:
    """Return a wrapper of this class with the metadata of ``value`` itself."""
    made = make_wrapper_for(kind, value, value.shape, get_strides(value))
    copy_lazy_bits(made, value)
    return made


def copy_metadata(wrapper: torch.Tensor, other: torch.Tensor) -> None:
    """Copy the shape, the strides and the lazy bits of another wrapper."""
    with (
        functions_off(),
        no_dispatch(),
        disable_lazy_bits(),
    ):  # or kernels would look for its memory
        torch.Tensor.data.__set__(wrapper, other)


def make_wrapper_for(kind: type[Wrapper], value: torch.Tensor, shape: Any, strides: Any) -> Any:
    """Return a wrapper of this class for ``value``.

    In inference mode a view of a tensor from before is an ordinary tensor, and so is its wrapper:
    torch gives it the version counter of its base.
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
