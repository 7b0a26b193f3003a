"""Values of a level in the user's own tensor classes, and the ways such classes are made.

NOTE [posed tensors]
    ``x.as_subclass(Sub)`` of a wrapper is a *posed* tensor: an instance of Sub that holds the
    wrapper. It has the attributes and methods that the user gives it, and nothing else of
    forall's. Its class is created once for each Sub. To Sub's ``__torch_function__`` a call on it
    is a call on any Sub; the calls that this makes in turn run on the wrapper.

    So torch and the levels meet posed tensors only if a user has disabled all of
    ``__torch_function__``. For this case a posed tensor is recorded as an alias of its wrapper,
    and a level takes the wrapper out itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from forall._compat import numpy_interop
from forall._compat.dispatch_state import (
    functions_off,
    has_own_dispatch,
    no_dispatch,
)
from forall._compat.documented_error import documented_error
from forall._compat.private_api import (
    PLAIN,
    DispatchMode,
    count_dispatch_modes,
    pop_mode,
    push_mode,
    subclass_functions_are_on,
)
from forall._compat.wrapper_tensor import (
    OURS,
    OVERRIDDEN,
    Wrapper,
    copy_metadata,
    make_shell,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_Tensor = torch.Tensor
_alias = torch.ops.aten.alias.default
_torchs_as_subclass = torch.Tensor.as_subclass
_torchs_make = torch.Tensor._make_subclass
_torchs_new = torch.Tensor.__new__
_torchs_parameter = torch.nn.Parameter.__new__


class _PosingState:
    """A flag: True once any tensor has been posed in this process; checks cost nothing before."""

    used = False


posing = _PosingState()
_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_SILENT = {torch._C._disabled_torch_function_impl}  # as a Parameter is


def _get_torch_function(kind: type) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def has_own_torch_function(kind: type) -> bool:
    """True if a subclass of Tensor takes part in calls by its own __torch_function__."""
    if kind is _Tensor:
        return False
    kind = users_class(kind)
    known = _known.get(kind)
    if known is None:
        known = not issubclass(kind, Wrapper) and _get_torch_function(kind) not in _SILENT
        _known[kind] = known
    return known


def only_preserves_class(kind: type) -> bool:
    """True if a subclass changes nothing about calls but the class of their results."""
    return _get_torch_function(kind) is _get_torch_function(_Tensor)


def can_be_posed(kind: type) -> bool:
    """True if a value of a level can be posed as an instance of this class.

    A class with its own dispatch holds tensors that a wrapper does not have.
    """
    return kind not in PLAIN and not issubclass(kind, Wrapper) and not has_own_dispatch(kind)


class PosedTensor:
    """The base before the user's class in the class of a posed tensor."""

    __slots__ = ()
    kind: type  # the user's class
    _forall_bare: Wrapper

    def __init_subclass__(cls, **_: Any) -> None:
        """Do not call ``__init_subclass__`` of the user's class."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return call_users_classes(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return run_on_wrappers(None, func, args, kwargs or {})


class _TensorProtocols(torch.Tensor):
    """The base between the user's class and Tensor: protocols that Tensor leaves out."""

    _forall_bare: Wrapper

    def __copy__(self) -> _Tensor:
        return restore_users_class(self._forall_bare.__copy__(), self)

    def __deepcopy__(self, memo: dict) -> _Tensor:
        copy = memo[id(self)] = restore_users_class(self._forall_bare.__deepcopy__(memo), self)
        return copy

    def __array_ufunc__(self, func: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs, _ = unwrap_posed_args(inputs, kwargs)
        out = numpy_interop.call_ufunc(func, method, inputs, kwargs, self._forall_bare.level)
        return convert_to_class(out, get_users_class(self)) if isinstance(out, Wrapper) else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs, _ = unwrap_posed_args(args, kwargs)
        return numpy_interop.call_array_function(func, args, kwargs, self._forall_bare.level)


class _PosedMeta(type):
    """The metaclass of posed tensors: their classes equal the user's, and create its objects."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.kind(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and users_class(cls) is users_class(other)

    def __hash__(cls) -> int:
        return hash(users_class(cls))


_metas: WeakKeyDictionary[type, type] = WeakKeyDictionary()
_classes: WeakKeyDictionary[type, ref[type]] = WeakKeyDictionary()


def users_class(kind: type) -> type:
    """Return the user's class for the class of a posed tensor; any other class as it is."""
    return kind.kind if issubclass(kind, PosedTensor) else kind


def _get_posed_class(kind: type) -> type:
    """Return the class of posed tensors of a user's class, created at the first use.

    Neither a metaclass of the user's nor ``__init_subclass__`` is called. Both tables are weak: the
    class holds the user's as its base, and is freed with the last tensor of it.
    """
    known = _classes.get(kind)
    made = None if known is None else known()
    if made is None:
        meta = _metas.get(type(kind))
        if meta is None:
            meta = _metas[type(kind)] = type(type(kind).__name__, (_PosedMeta, type(kind)), {})
        bases = (PosedTensor, kind, _TensorProtocols)
        names = {
            "__slots__": ("_forall_bare",),
            "__class__": kind,  # for isinstance and `x.__class__`; `type(x)` is the class itself
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "kind": kind,
        }
        made: Any = type.__new__(meta, kind.__name__, bases, names)
        torch._C._TensorMeta.__init__(made, kind.__name__, bases, names)
        _classes[kind] = ref(made)
    return made


class _PoseMode(DispatchMode):
    """A mode that makes autograd's alias of a wrapper a posed tensor, which gets the history."""

    def __init__(self, kind: type, of: Wrapper) -> None:  # instead of the mode's own
        self.kind, self.of = kind, of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is _alias and args[0] is self.of:
            return make_shell(_get_posed_class(self.kind), self.of)  # pyright: ignore[reportArgumentType]
        return func(*args, **(kwargs or {}))


def pose(wrapper: Wrapper, kind: type) -> Any:
    """Return a posed tensor of a class of the user's that holds this very wrapper."""
    posing.used = True
    # torch 2.10 crashes if a mode that is popped has no reference but the stack of modes.
    mode = _PoseMode(kind, wrapper)
    with functions_off():
        push_mode(mode)
        try:
            made = _alias(wrapper)
        finally:
            pop_mode(None)
    made._forall_bare = wrapper
    return made


def unwrap_posed(x: Any) -> Any:
    """Return the wrapper that a posed tensor holds; anything else as it is."""
    return x._forall_bare if posing.used and isinstance(x, PosedTensor) else x


def is_posed(x: Any) -> bool:
    """True if this is a posed tensor."""
    return posing.used and isinstance(x, PosedTensor)


def get_users_class(tensor: torch.Tensor) -> type:
    """Return the class of a tensor as its user knows it."""
    kind = users_class(type(tensor))
    return _Tensor if issubclass(kind, Wrapper) else kind


def get_users_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the user has set on a tensor."""
    own = vars(tensor)
    if own and isinstance(tensor, Wrapper):
        return {k: v for k, v in own.items() if k not in OURS}
    return own


def restore_users_class(new: torch.Tensor, old: torch.Tensor) -> Any:
    """Return ``new`` in the class, and with the attributes, that the user knows ``old`` by."""
    kind = type(old)
    if kind is _Tensor:
        if old.__dict__ and new is not old:
            new.__dict__.update(old.__dict__)
        return new
    if new is old:
        return new
    if not issubclass(kind, Wrapper):
        if not issubclass(kind, PosedTensor) and has_own_dispatch(kind):
            return new  # its class's own operators have set its attributes
        kind = users_class(kind)
        if can_be_posed(kind):
            new = convert_to_class(new, kind)
    own = get_users_attributes(old)
    if own:
        new.__dict__.update(own)
    return new


def convert_to_class(tensor: torch.Tensor, kind: type) -> Any:
    """Convert a fresh tensor, which has no other reference, to a class of the user's."""
    if isinstance(tensor, Wrapper):
        return pose(tensor, kind)
    with functions_off():
        return tensor if type(tensor) is kind else _torchs_as_subclass(tensor, kind)


def is_of_users_class(x: Any) -> bool:
    """True if an argument or a result is a tensor of a class of the user's."""
    return isinstance(x, PosedTensor) or (isinstance(x, _Tensor) and can_be_posed(type(x)))


def strip_users_class(x: Any) -> Any:
    """Return the tensor without its class, in the same memory and with its history."""
    if isinstance(x, PosedTensor):
        return unwrap_posed(x)
    with functions_off():
        return convert_to_class(x, _Tensor) if is_of_users_class(x) else x


# --- calls ---------------------------------------------------------------------------------------


def unwrap_posed_args(args: tuple, kwargs: dict) -> tuple[tuple, dict, dict[int, Any]]:
    """Return a call's arguments with the wrappers of posed tensors, and these by wrapper id."""
    stands: dict[int, Any] = {}
    args = tuple([_unwrap_posed_arg(a, stands) for a in args])
    return args, {k: _unwrap_posed_arg(a, stands) for k, a in kwargs.items()}, stands


def _unwrap_posed_arg(a: Any, stands: dict[int, Any]) -> Any:
    if isinstance(a, PosedTensor):
        found = a._forall_bare
        stands[id(found)] = a
        return found
    kind = type(a)
    if kind is tuple or kind is list:
        inner = [_unwrap_posed_arg(b, stands) for b in a]
        return kind(inner) if any(x is not y for x, y in zip(a, inner, strict=True)) else a
    return a


def restore_posed_results(out: Any, stands: dict[int, Any]) -> Any:
    """Return a call's results, with posed tensors where it returned their wrappers."""
    for posed in stands.values():
        _update_shape(posed)
    if isinstance(out, _Tensor):
        return stands.get(id(out), out)
    if type(out) is tuple or type(out) is list:
        return type(out)([stands.get(id(o), o) for o in out])
    return out


def _update_shape(posed: Any) -> None:
    """Show the shape and strides that the wrapper has by now, after squeeze_, t_ or resize_."""
    of = posed._forall_bare
    with functions_off(), no_dispatch():
        if (posed.shape, posed.stride()) != (of.shape, of.stride()):
            copy_metadata(posed, make_shell(type(of), of))


def has_posed(args: Iterable[Any]) -> bool:
    """True if any argument, or any entry of a list among them, is posed."""
    return any(
        has_posed(a) if type(a) is tuple or type(a) is list else isinstance(a, PosedTensor)
        for a in args
    )


def is_overridden(func: Any, args: tuple) -> bool:
    """True if a function of torch's is a method that a wrapper overrides."""
    name = OVERRIDDEN.get(func)
    return (
        name is not None
        and bool(args)
        and isinstance(args[0], Wrapper)
        and getattr(type(args[0]), name.strip("=")) is not func
    )


def call_override(func: Any, args: tuple, kwargs: dict) -> Any:
    """Call the wrapper's own method, or read or set its own property."""
    wrapper, *rest = args
    name = OVERRIDDEN[func]
    if name.startswith("="):
        return setattr(wrapper, name[1:], *rest)
    found = getattr(wrapper, name)
    return found(*rest, **kwargs) if callable(found) else found


def has_posed_class(types: Iterable[type]) -> bool:
    """True if any of these classes is that of a posed tensor."""
    return any(issubclass(t, PosedTensor) for t in types)


def run_on_wrappers(mode: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on wrappers, if it met posed tensors with __torch_function__ disabled.

    The mode that sees this operator sees the operator on wrappers next.
    """
    args, kwargs, stands = unwrap_posed_args(args, kwargs)
    for wrapper in (p._forall_bare for p in stands.values()):
        if wrapper.requires_grad and not stands[id(wrapper)].requires_grad:
            raise documented_error(NotImplementedError, "tensor-subclass")(
                f"{func} takes a tensor of class {stands[id(wrapper)].kind.__name__} with "
                "__torch_function__ off, and the tensor has got its history since it was made.\n"
                "Leave __torch_function__ on, or use x.as_subclass(torch.Tensor)."
            )
    if mode is not None:
        push_mode(mode)
    try:
        return restore_posed_results(func(*args, **kwargs), stands)
    finally:
        if mode is not None:
            pop_mode(None)


def call_torch_functions(func: Any, types: Iterable[type], args: tuple, kwargs: dict) -> Any:
    """Call the __torch_function__ of the user's classes, one after another as torch does."""
    asked: list[Any] = []
    for t in types:
        kind = users_class(t)
        if not issubclass(kind, Wrapper) and kind not in asked:
            asked.append(kind)
    for kind in asked:
        if issubclass(kind, _Tensor) and has_own_torch_function(kind):
            out = kind.__torch_function__(func, tuple(asked), args, kwargs)
            if out is not NotImplemented:
                return out
    return NotImplemented


def has_torch_function_class(types: Iterable[type]) -> bool:
    """True if any of these classes is a user's with its own __torch_function__."""
    return any(issubclass(t, _Tensor) and has_own_torch_function(t) for t in types)


class _UsersClassMode(TorchFunctionMode):
    """A mode for calls that a user's class makes, if no function mode of a level sees them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if subclass_functions_are_on() and has_torch_function_class(types):
            with self:
                return call_torch_functions(func, types, args, kwargs or {})
        return _call_on_wrappers(func, args, kwargs or {})


_TAKING = _UsersClassMode()  # it has no state, so one does for all


def _call_on_wrappers(func: Any, args: tuple, kwargs: dict) -> Any:
    args, kwargs, stands = unwrap_posed_args(args, kwargs)
    if is_overridden(func, args):
        return restore_posed_results(call_override(func, args, kwargs), stands)
    for a in _flat((*args, *kwargs.values())):
        if isinstance(a, Wrapper):  # its call may have ended
            return restore_posed_results(
                type(a).__torch_function__(func, (type(a),), args, kwargs), stands
            )
    return func(*args, **kwargs)


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for a in args:
        if type(a) is tuple or type(a) is list:
            yield from _flat(a)
        else:
            yield a


def call_users_classes(func: Any, types: Iterable[type], args: tuple, kwargs: dict) -> Any:
    """Run a call that no function mode of a level has seen, by the user's classes."""
    if not has_torch_function_class(types):
        return _call_on_wrappers(func, args, kwargs)
    with _TAKING:
        return call_torch_functions(func, types, args, kwargs)


# --- how a class is made -------------------------------------------------------------------------


@functools.wraps(_torchs_as_subclass)
def _as_subclass(self: torch.Tensor, cls: type) -> Any:
    """Replace torch.Tensor.as_subclass; of a wrapper the result is a posed tensor."""
    if is_dynamo_compiling() or not isinstance(self, (Wrapper, PosedTensor)):
        return _torchs_as_subclass(self, cls)
    return _make_of_class(_make_alias(unwrap_posed(self)), users_class(cls))


def _make_alias(wrapper: Wrapper) -> torch.Tensor:
    """Return an alias with its history, without a call of the user's __torch_function__."""
    name = torch.Tensor.view_as
    if subclass_functions_are_on():
        return name(wrapper, wrapper)
    return type(wrapper).__torch_function__(name, (type(wrapper),), (wrapper, wrapper), {})


def _make_of_class(made: torch.Tensor, kind: type) -> Any:
    """Convert a tensor that has no other reference yet to a class that the user asks for."""
    if not isinstance(made, Wrapper):
        return made if kind is _Tensor else _torchs_as_subclass(made, kind)
    return made if kind is _Tensor or not can_be_posed(kind) else pose(made, kind)


# torch's compiler compares signatures, and accepts these for any.
@functools.wraps(_torchs_make)
def _make_subclass(*args: Any, **kwargs: Any) -> Any:
    """Replace torch.Tensor._make_subclass; of a wrapper the result is a posed tensor."""
    if is_dynamo_compiling():
        return _torchs_make(*args, **kwargs)
    cls, data, *rest = args
    kind = users_class(cls)
    if not isinstance(data, (Wrapper, PosedTensor)) or not can_be_posed(kind):
        return _torchs_make(kind, unwrap_posed(data), *rest, **kwargs)
    requires_grad = rest[0] if rest else kwargs.get("require_grad", False)
    made = torch.Tensor.detach(unwrap_posed(data)).requires_grad_(bool(requires_grad))
    return _make_of_class(made, kind)


@functools.wraps(_torchs_new)
def _new_subclass(*args: Any, **kwargs: Any) -> Any:
    """Replace torch.Tensor.__new__, which makes a subclass of a tensor, numbers or sizes."""
    if args[0] is _Tensor or is_dynamo_compiling():
        return _torchs_new(*args, **kwargs)
    cls, *given = args
    kind = users_class(cls)
    if kind is _Tensor or not can_be_posed(kind):
        return _torchs_new(kind, *map(unwrap_posed, given), **kwargs)
    if len(given) == 1 and not kwargs and isinstance(given[0], (Wrapper, PosedTensor)):
        return _as_subclass(given[0], kind)
    if not count_dispatch_modes():
        return _torchs_new(kind, *given, **kwargs)
    return _make_of_class(_torchs_new(_Tensor, *given, **kwargs), kind)  # a level may have made it


CALLS_ON = _new_subclass.__code__  # a frame that only passes a call on


@functools.wraps(_torchs_parameter)
def _new_parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
    """Replace torch.nn.Parameter.__new__; a subclass of it is made as any other class."""
    if cls is not torch.nn.Parameter and isinstance(data, Wrapper):
        return _make_subclass(cls, data, requires_grad)
    return _torchs_parameter(users_class(cls), data, requires_grad)


def install_posed_tensors() -> None:
    """Replace torch's ways to make a subclass of Tensor, once."""
    torch.Tensor.as_subclass = _as_subclass  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor._make_subclass = staticmethod(_make_subclass)  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Parameter.__new__ = _new_parameter  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.__new__ = _new_subclass  # pyright: ignore[reportAttributeAccessIssue]
