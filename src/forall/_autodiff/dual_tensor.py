"""Dual tensors, the values of a jvp level, and the autograd nodes that convert to and from them."""

from __future__ import annotations

from typing import Any

import torch

from forall._autodiff.sparse_errors import make_tangent_error
from forall._compat.dispatch_state import (
    enable_autograd_below,
    enable_forward_mode,
    functions_off,
    get_forward_session,
    no_dispatch,
)
from forall._compat.documented_error import documented_error
from forall._compat.inference_mode import copy_if_inference
from forall._compat.jagged_layout import Jagged
from forall._compat.lazy_bits import attach_tangent
from forall._compat.private_api import split_tangent, subclass_functions_off
from forall._compat.tensor_subclass import (
    call_users_classes,
    has_own_torch_function,
    has_posed_class,
    posing,
    run_on_wrappers,
)
from forall._compat.value_errors import has_unknown_class
from forall._compat.wrapper_tensor import (
    READS,
    Wrapper,
    copy_metadata,
    make_shell,
    unwrap_all,
)
from forall._core import nested_tensor
from forall._core.errors import format_repr_marks, format_short
from forall._core.escaped_values import (
    call_without_mode,
    dispatch_without_mode,
    find_fallback,
    has_escaped_values,
    is_escape_from,
    replace_escaped,
)
from forall._core.host_reads import format_numbers, notify_host_read
from forall._core.levels import (
    Level,
    alias_for_autograd,
    complete_gradient,
    graph_free,
    run_outside,
    run_outside_all,
)
from forall._core.sparse_operands import is_sparse


class DualLevel(Level):
    """The state of a level whose values are duals."""

    def __init__(self, parent: Level | None, outer_grad: bool) -> None:
        super().__init__(parent)
        self.outer_grad = outer_grad
        self.tapes: Any = None  # what writes down the tangents, where `linearize` asks for it

    def lower_value(self, a: Any) -> Any:
        """Return an argument as it is one level down; lists element by element."""
        if type(a) is DualTensor:
            return a.value if a.level is self else a
        if isinstance(a, (list, tuple)):
            return [self.lower_value(b) for b in a]
        return a

    def split_dual(self, a: Any) -> tuple[Any, torch.Tensor | None]:
        """Return an argument's primal and tangent; call it inside `enable_autograd_below`."""
        if type(a) is not DualTensor or a.level is not self:
            return a, None
        if (halves := find_halves(a)) is not None:
            return halves.primal, complete_gradient(halves.tangent)
        if a.value.is_inference():  # it has no tangent, and torch fails where it is asked for one
            return a.value, None
        primal, tangent = split_tangent(a.value, level=0)
        return primal, complete_gradient(tangent)

    def split_value(self, a: Any) -> tuple[Any, torch.Tensor | None]:
        """Return what carries an argument's primal and its tangent, and the tangent."""
        if type(a) is not DualTensor or a.level is not self:
            return a, None
        if (halves := find_halves(a)) is not None:
            return halves.primal, complete_gradient(halves.tangent)
        return a.value, complete_gradient(read_tangent(a.value))


class Halves:
    """A primal and a tangent that no operator has needed in one tensor so far.

    Torch's forward mode asks Python three questions to put a tangent on a wrapper. An operator that
    forall has a rule for does not need it there. ``value`` has both once they are joined.
    """

    __slots__ = ("primal", "session", "tangent", "value")

    def __init__(self, primal: torch.Tensor, tangent: torch.Tensor) -> None:
        self.primal: Any = primal
        self.tangent: Any = tangent
        self.session = get_forward_session()  # tangents end with it
        self.value: Any = None

    def join(self, level: DualLevel) -> torch.Tensor:
        """Return the primal with its tangent, as a tensor one level further out than ``level``."""
        if self.value is None:
            if self.session != get_forward_session():
                self.value = self.primal
            else:
                outside = run_outside(level) if level.active else run_outside_all()
                with (
                    outside,
                    functions_off(),
                    enable_autograd_below(grad=level.outer_grad, forward=True),
                ):
                    self.value = attach_own_tangent(self.primal, self.tangent)
            self.primal = self.tangent = None
        return self.value


class _JoinedValue:
    """The attribute ``value`` of a dual tensor while its halves are apart: reading joins them."""

    def __get__(self, dual: Any, kind: type | None = None) -> Any:
        if dual is None:
            return self
        own = dual.__dict__
        if "unjoined" not in own:
            raise AttributeError("value")
        own["value"] = value = own["unjoined"].join(own["level"])
        del own["unjoined"]
        return value


class DualTensor(Wrapper):
    """A dual tensor: a primal and its tangent under one jvp level, both carried by ``value``."""

    value: Any = _JoinedValue()

    def graph_free(self) -> DualTensor:
        halves = self.__dict__.get("unjoined")
        if halves is None or halves.value is not None:
            return wrap_dual(self.value, self.level)
        return _wrap_halves(halves, self.level)

    def describe(self) -> str:
        marks = format_repr_marks(self)
        return f"Dual({format_short(self)}, with a tangent{marks}:\n{format_numbers(self.value)})"

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        rest = replace_escaped(self)
        if rest is not self:
            return getattr(rest, name)(*args, **kwargs)
        if name not in READS:
            raise documented_error(RuntimeError, "memory-of-one-example")(
                f"jvp: x.{name}() asks for the memory of a tensor that has a tangent.\n"
                "Use torch's operators on it, or do this outside jvp."
            )
        self.refuse_history(name)
        notify_host_read()
        with run_outside(self.level), functions_off():
            return getattr(graph_free(self.level.fallback_value(self)), name)(*args, **kwargs)

    def loses(self, name: str) -> None:
        super().loses(name)
        with run_outside(self.level), functions_off():
            if unpack_dual(self, self.level)[1] is not None:
                raise loses_tangent(name)

    def lay_out_alone(self, gaps: bool = False) -> bool:
        halves = find_halves(self)
        primal = self.value if halves is None else halves.primal
        if not isinstance(primal, Wrapper):
            return False
        with run_outside(self.level), functions_off():
            moved = primal.lay_out_alone(gaps)
            tangent: Any = None
            if moved:  # halves that are joined later have to have the same strides
                tangent = self.level._unpack(self)[1] if halves is None else halves.tangent
            # Torch gave the tangent the strides of the primal, with gaps if that had any.
            if isinstance(tangent, Wrapper) and not tangent.lay_out_alone(gaps=True):
                raise NotImplementedError(
                    "jvp: a view by strides of a tensor whose tangent is laid out otherwise.\n"
                    "Use reshape or an index, or vmap with the examples in front (in_dims=0)."
                )
        if moved or halves is None:
            self.look_like_value()
        return moved

    def detach_(self) -> DualTensor:
        """Detach the value too: autograd's own kernel detaches the wrapper alone."""
        if is_escape_from(self.level):
            return find_fallback(self).detach_()  # pyright: ignore[reportReturnType]
        self.value = torch.Tensor.detach(self).value
        torch.Tensor.detach_(self)
        return self

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """An alias of this tensor without history, and without the tangent of its value."""
        with run_outside(self.level), functions_off():
            return wrap_dual(self.value.data, self.level)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        """Make this tensor an alias of new's memory, with its own tangent and history unchanged."""
        level = self.level
        with run_outside(level), enable_autograd_below(grad=True, forward=True):
            value = self.value.view_as(self.value)
            value.data = unpack_dual(new, level)[0].detach()
        copy_metadata(self, wrap_dual(value, level))
        self.value = value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if len(types) > 1:
            for t in types:
                if not issubclass(t, torch.Tensor):
                    return NotImplemented
                if has_own_torch_function(t):
                    return call_users_classes(func, types, args, kwargs or {})
        if has_escaped_values(args, kwargs):
            return call_without_mode(func, args, kwargs or {})
        if func is _ONE_HOT:
            _check_classes(*args, **(kwargs or {}))
        with subclass_functions_off():
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if Jagged in types:
            return nested_tensor.run_on_nested(func, args)
        if posing.used and has_posed_class(types):
            return run_on_wrappers(None, func, args, kwargs or {})
        return dispatch_without_mode(func, args, kwargs or {})


_ONE_HOT = torch.nn.functional.one_hot


def _check_classes(tensor: Any, num_classes: Any = -1) -> None:
    """Raise torch's error for a class out of range: torch omits this check for wrappers."""
    tensor = unwrap_all(tensor)
    if isinstance(num_classes, torch.Tensor) or not tensor.numel():
        return
    with run_outside_all():  # a program that is being recorded includes the check
        fails = has_unknown_class(tensor, num_classes)
    if fails:
        with functions_off(), no_dispatch():
            _ONE_HOT(tensor.detach(), num_classes)


def read_tangent(value: Any) -> torch.Tensor | None:
    """Return the tangent that torch's forward mode gave a value, None if it has none.

    Torch makes an alias of the primal too, for which no handler has to run: it is dropped here. But
    the tangent of a view may have to be made of its base's, and by the handlers.
    """
    if not isinstance(value, torch.Tensor) or value.is_inference():  # torch fails if asked for one
        return None
    if not isinstance(value, Wrapper):
        return split_tangent(value, level=0)[1]
    with no_dispatch():
        is_own = value.__dict__.get(_ATTACHED) or not value._is_view()
        if is_own or split_tangent(value._base, level=0)[1] is None:
            return split_tangent(value, level=0)[1]
    return split_tangent(value, level=0)[1]


_ATTACHED = "has_attached_tangent"


def attach_own_tangent(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Return a value of which `read_tangent` knows that it is no view of a base with a tangent."""
    value = attach_tangent(primal, tangent)
    if isinstance(value, Wrapper):
        vars(value)[_ATTACHED] = True
    return value


def wrap_dual(value: torch.Tensor, level: DualLevel) -> DualTensor:
    d = make_shell(DualTensor, value)
    own = d.__dict__
    own["value"], own["level"] = value, level
    return d


def find_halves(dual: DualTensor) -> Halves | None:
    """Return the halves of a value of an active level, None if they are joined."""
    halves = dual.__dict__.get("unjoined")
    if halves is None or halves.value is not None or not dual.level.active:
        return None
    return halves


def is_split(dual: DualTensor) -> bool:
    """True if the halves of a value have not been joined."""
    return "unjoined" in dual.__dict__


def wrap_split(primal: torch.Tensor, tangent: torch.Tensor, level: DualLevel) -> DualTensor:
    """Return a new primal and its new tangent as a value, joined only if they have to be.

    Torch copies a tangent that is laid out otherwise than its primal.
    """
    shape, strides, dtype = primal.shape, primal.stride(), primal.dtype
    if (
        not isinstance(primal, Wrapper)
        or tangent.shape != shape
        or tangent.stride() != strides
        or tangent.dtype != dtype
        or dtype.is_complex
        or primal.is_neg()
        or tangent.is_neg()
    ):
        return wrap_dual(attach_own_tangent(primal, tangent), level)
    return _wrap_halves(Halves(primal, tangent), level)


def _wrap_halves(halves: Halves, level: DualLevel) -> DualTensor:
    d = make_shell(DualTensor, halves.primal)
    own = d.__dict__
    own["unjoined"], own["level"] = halves, level
    return d


class LiftToDual(torch.autograd.Function):
    """The node that lifts an outer tensor which requires grad to a jvp level, without a tangent."""

    @staticmethod
    def forward(tensor, level):
        return wrap_dual(level.lower_tensor(tensor), level)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g, None


class KeepPrimal(torch.autograd.Function):
    """The node that replaces a dual tensor by its primal after the call, with its history."""

    @staticmethod
    def forward(dual, primal):
        return alias_for_autograd(primal)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g, None

    @staticmethod
    def jvp(ctx, t, _):
        return t


def loses_tangent(name: str) -> RuntimeError:
    return documented_error(RuntimeError, "tangent-lost")(
        f"jvp: x.{name}() would lose the tangent that x has.\n"
        f"Use x.detach().{name}() if that is meant, or operators of torch."
    )


def unpack_dual(y: torch.Tensor, level: DualLevel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the primal and the tangent (None for zero) as tensors of the next outer level."""
    if not isinstance(y, DualTensor) or y.level is not level:
        return y, None
    with functions_off(), enable_forward_mode():
        primal, tangent = split_tangent(y.value, level=0)
    return primal, complete_gradient(tangent)


def make_dual(primal: torch.Tensor, tangent: torch.Tensor, level: DualLevel) -> DualTensor:
    """Make a value of ``level`` from a primal and a tangent of the next outer level."""
    if is_sparse(primal):
        raise make_tangent_error(primal)
    primal, tangent = copy_if_inference(primal), copy_if_inference(tangent)
    with functions_off(), torch.enable_grad(), enable_forward_mode():
        return wrap_split(primal, tangent, level)
