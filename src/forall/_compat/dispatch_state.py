"""torch's thread-local dispatch state, and its one forward-mode level per process."""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.func
from torch._C import DispatchKey
from torch.autograd import forward_ad

from forall._compat import exception_safety, inference_mode
from forall._compat.device_threads import has_device_threads, one_thread
from forall._compat.documented_error import documented_error
from forall._compat.exception_safety import contextmanager
from forall._compat.private_api import count_dispatch_modes
from forall._compat.trace_modes import hide_own_tensors, suspend_own_modes
from forall._compat.versions import apply_without_binding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
is_forward_enabled = torch._C._is_fwd_grad_enabled
set_forward_enabled = torch._C._set_fwd_grad_enabled
set_grad_enabled = torch._C._set_grad_enabled
ACCUMULATE = torch._C._functions.AccumulateGrad  # the node that sets the gradient of a leaf
# The node of a tensor that AOTAutograd wraps: it stands for the history of the wrapped tensor.
MIRRORED = torch._C._functions.Error

AUTOGRAD = DispatchKey.AutogradFunctionality
CONJUGATE = DispatchKey.Conjugate
NEGATIVE = DispatchKey.Negative
ZEROS = DispatchKey.ZeroTensor
VIEWS = DispatchKey.ADInplaceOrView
PYTHON = DispatchKey.Python
SNAPSHOT = DispatchKey.PythonTLSSnapshot  # the dispatch state that one level hands to the next
# Keys that the dispatcher excludes when it calls a Python handler, and autograd's kernels need.
_ABOVE_PYTHON = (
    AUTOGRAD,
    VIEWS,
    CONJUGATE,
    NEGATIVE,
    ZEROS,
)


class enable_autograd_below:
    """Enable autograd (and forward mode) on the values one level down, inside a Python handler.

    A handler is entered with autograd disabled in thread-local state. A level whose values carry
    derivatives enables it for the operators that it runs on them, in the given grad mode. The state
    is restored afterwards.
    """

    __slots__ = ("forward", "grad", "was_excluded", "was_forward", "was_grad")

    def __init__(self, grad: bool, forward: bool) -> None:
        self.grad = grad
        self.forward = forward

    def __enter__(self) -> None:
        self.was_excluded = [key for key in _ABOVE_PYTHON if is_excluded(key)]
        self.was_grad = torch.is_grad_enabled()
        self.was_forward = is_forward_enabled()
        for key in self.was_excluded:
            set_excluded(key, False)
        torch._C._set_grad_enabled(self.grad)
        set_forward_enabled(self.forward)

    def __exit__(self, *_: object) -> None:
        for key in self.was_excluded:
            set_excluded(key, True)
        torch._C._set_grad_enabled(self.was_grad)
        set_forward_enabled(self.was_forward)


class enable_forward_mode:
    """Let operators compute tangents, whatever the grad mode is."""

    __slots__ = ("was",)

    def __enter__(self) -> None:
        self.was = is_forward_enabled()
        set_forward_enabled(True)

    def __exit__(self, *_: object) -> None:
        set_forward_enabled(self.was)


class _ForwardModeUse(exception_safety.RestoredState):
    """This thread's use of the forward-mode level."""

    ours = 0  # jvps of forall that are running
    users = 0  # the user's own level inside them


class _ForwardLevel:
    """PyTorch's one forward-mode level per process: entered by the first jvp, left by the last.

    The user's own ``dual_level`` (also that of torch.func.jvp) inside a jvp of forall shares the
    level. Forall keeps its tangents one level further down, where operators on the user's do not
    look.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.threads: set[int] = set()  # in which jvps run
        self.sessions = 0  # how often the level was left, which ends all tangents
        self.held = _ForwardModeUse.make_instance(idle=True)
        self.torchs_enter = forward_ad.enter_dual_level
        self.torchs_exit = forward_ad.exit_dual_level

    def enter(self) -> None:
        with self.lock:
            if self.held.users or (not self.threads and forward_ad._current_level >= 0):
                raise documented_error(NotImplementedError, "dual-level")(
                    "jvp: called inside torch.autograd.forward_ad.dual_level().\n"
                    "PyTorch has one forward-mode level in a process, and it is taken.\n"
                    "Use forall.jvp for the outer derivative too."
                )
            self.held.ours += 1
            if not self.threads:
                self.torchs_enter()
            self.threads.add(threading.get_ident())

    def exit(self) -> None:
        if self.held.ours == 1:
            with self.lock:
                self.threads.discard(threading.get_ident())
                if not self.threads:
                    self.sessions += 1
                    self.torchs_exit()
        self.held.ours -= 1

    def put_back(self, _: list, level: int) -> None:
        """Leave the level if an exception between two instructions has left it entered."""
        if not self.held.ours:
            return
        with suppress(RuntimeError):  # that this thread does not hold it
            self.lock.release()
        with self.lock:
            self.threads.discard(threading.get_ident())
            if not self.threads and level < 0:  # torch has one level, and a separate count
                self.sessions += 1
                with suppress(RuntimeError):  # that it was not entered
                    torch._C._exit_dual_level(level=0)
                forward_ad._current_level = level

    def enter_users(self) -> int:
        """Enter the user's level, as torch.autograd.forward_ad.enter_dual_level does."""
        _refuse_linearize()
        if not self.held.ours or self.held.users:
            return self.torchs_enter()
        self.held.users += 1
        return forward_ad._current_level

    def exit_users(self, *, level: int | None = None) -> None:
        """Exit the user's level, as torch.autograd.forward_ad.exit_dual_level does."""
        if not self.held.users:
            self.torchs_exit(level=level)
        else:
            self.held.users -= 1


_forward_level = _ForwardLevel()
exception_safety.PUT_BACK.append(_forward_level.put_back)


def install_forward_level() -> None:
    """Make the user's own forward-mode level share forall's, once."""
    if forward_ad.enter_dual_level is not _enter_dual_level:
        forward_ad.enter_dual_level = _enter_dual_level
        forward_ad.exit_dual_level = _exit_dual_level


@functools.wraps(forward_ad.enter_dual_level)
def _enter_dual_level() -> int:
    return _forward_level.enter_users()


@functools.wraps(forward_ad.exit_dual_level)
def _exit_dual_level(*, level: int | None = None) -> None:
    _forward_level.exit_users(level=level)


@contextmanager
def hold_forward_level() -> Iterator[None]:
    """Hold the process's forward-mode level while a jvp runs."""
    off = inference_mode.leave_inference_mode()
    _forward_level.enter()
    try:
        yield
    finally:
        _forward_level.exit()
        inference_mode.reenter_inference_mode(off)


def get_forward_session() -> int:
    """Return a number that changes when forward mode ends, and with it all tangents."""
    return _forward_level.sessions


def is_forward_mode_on() -> bool:
    """Return True if tensors may carry tangents at all."""
    return forward_ad._current_level >= 0


def has_users_tangents() -> bool:
    """Return True if tensors may carry tangents from the user's own torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0 and (
        not _forward_level.threads or _forward_level.held.users > 0
    )


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return True if PyTorch's own forward mode gave this tensor a tangent."""
    if is_functorch_wrapped(tensor):
        return False
    if in_torch_func():
        with outside_torch_func():
            return has_tangent(tensor)
    with torch._C.DisableTorchFunction():
        return forward_ad.unpack_dual(tensor).tangent is not None


def get_users_tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tangent that the user's own forward mode gave this tensor, if it did."""
    if not has_users_tangents() or not has_tangent(tensor):
        return None
    with torch._C.DisableTorchFunction():
        return forward_ad.unpack_dual(tensor).tangent


_LINEARIZE = torch.func.linearize.__code__
_API = f"{Path(__file__).parents[1] / '_api'}{os.sep}"


def _is_tracing_linearize(frame: Any) -> bool:
    code = frame.f_code
    return code is _LINEARIZE or (
        code.co_filename == _LINEARIZE.co_filename
        and code.co_qualname.startswith("linearize.<locals>")
    )


def refuse_inside_linearize() -> None:
    """Raise inside torch.func.linearize, whose trace would keep values of levels as constants."""
    if has_users_tangents() and _called_by(_is_tracing_linearize):
        raise documented_error(NotImplementedError, "mixed-with-torch-func")(
            "torch.func.linearize: its function calls a transform of forall.\n"
            "It traces the function and takes what the transform computes for constant.\n"
            "Use forall.linearize instead."
        )


def _refuse_linearize() -> None:
    if _called_by(_is_tracing_linearize) and _called_by(
        lambda frame: frame.f_code.co_filename.startswith(_API)
    ):
        raise documented_error(NotImplementedError, "mixed-with-torch-func")(
            "torch.func.linearize: called inside a transform of forall.\n"
            "Its program is constant in the point, so outer derivatives would be wrong.\n"
            "Use forall.linearize instead."
        )


def _called_by(wanted: Callable[[Any], bool]) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if wanted(frame):
            return True
        frame = frame.f_back
    return False


def is_mode_on(mode: object) -> bool:
    return mode in map(torch._C._get_dispatch_stack_at, range(count_dispatch_modes()))


# As in a handler: autograd neither records nor counts versions.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
# Nothing is recorded, but writes are counted and views know their base: for users' tensors.
without_history = torch._C._AutoDispatchBelowAutograd
no_dispatch = torch._C._DisableTorchDispatch
# For forall's own code: no function mode may see what it does with tensors.
functions_off = torch._C.DisableTorchFunction
functions_on = torch._C._EnableTorchFunction
functions_are_off = torch._C._is_torch_function_all_disabled
graph_task = torch._C._current_graph_task_id
is_autocast = torch._C._is_any_autocast_enabled


_Keys = torch._C.DispatchKeySet
# A key for each kind of device that autocast knows, and the names of these kinds.
CAST_KEYS = tuple(name for name in vars(torch._C.DispatchKey) if name.startswith("Autocast"))
_CASTS = functools.reduce(
    operator.or_, (_Keys(getattr(torch._C.DispatchKey, name)) for name in CAST_KEYS)
)
_CAST_DEVICES = ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "mps")


def disable_autocast() -> Any:
    """Return a context for operators that have been cast already."""
    return torch._C._ExcludeDispatchKeyGuard(_CASTS)


def get_autocast_state() -> tuple:
    """Return the state of autocast for each kind of device that it is on for."""
    own = torch._C._get_privateuse1_backend_name()  # of a backend that is no part of torch
    return tuple(
        (d, torch.get_autocast_dtype(d))
        for d in (*_CAST_DEVICES, own)
        if torch.is_autocast_enabled(d)
    )


def run_backward(
    outputs: tuple[torch.Tensor, ...],
    cotangents: tuple[Any, ...],
    inputs: tuple[torch.Tensor, ...],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Run torch.autograd.grad without its argument checks and its trip through function modes."""
    with one_thread() if has_device_threads() else nullcontext():
        return torch.autograd.Variable._execution_engine.run_backward(
            outputs,
            cotangents,
            retain_graph,
            create_graph,
            inputs,
            allow_unreachable=True,
            accumulate_grad=False,
        )


def is_in_backward() -> bool:
    """Return True if autograd is running a backward pass in this thread."""
    return graph_task() != -1


# The operators that autograd runs to set the gradient of a leaf.
ACCUMULATION = frozenset(
    {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.clone.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


def is_accumulating() -> bool:
    """Return True if autograd is setting the gradient of a leaf right now."""
    return isinstance(torch._C._current_autograd_node(), torch._C._functions.AccumulateGrad)


def is_at_c_node() -> bool:
    """Return True if a backward pass is at a node in C++ that computes gradients, and sets none."""
    node = torch._C._current_autograd_node()
    others = torch._C._FunctionBase, torch._C._functions.AccumulateGrad
    return node is not None and not isinstance(node, others)


def get_accumulating_leaf() -> torch.Tensor | None:
    """Return the leaf whose gradient autograd is setting right now, or None."""
    return torch._C._current_autograd_node().variable if is_accumulating() else None


# True while a transform of torch.func is running further out.
in_torch_func = torch._C._are_functorch_transforms_active


is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
is_torch_func_value = torch._C._functorch.is_functorch_wrapped_tensor


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return True for a wrapper of torch's own transforms: torch.func's or autograd's vmap."""
    return is_torch_func_value(tensor) or is_legacy_batched(tensor)


class outside_torch_func:
    """Act as code outside every transform of torch.func that is running."""

    __slots__ = ("layers",)

    def __enter__(self) -> None:
        self.layers = []
        while torch._C._functorch.peek_interpreter_stack() is not None:
            self.layers.append(torch._C._functorch.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self.layers:
            torch._C._functorch.push_dynamic_layer_stack(self.layers.pop())


def is_dynamo_loaded() -> bool:
    """Return True if torch.compile can have been used; importing it to ask would take seconds."""
    # Another thread may be importing it: once it can be used, it has this attribute.
    return hasattr(sys.modules.get("torch._dynamo"), "eval_frame")


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """True if a class of tensors defines operators by its own __torch_dispatch__."""
    return kind.__torch_dispatch__ is not _NO_DISPATCH


def make_plain_alias(tensor: torch.Tensor, *, moves: bool = True) -> torch.Tensor:
    """Return an ordinary tensor that shares memory, without history; a user's tangent stays.

    Unless ``moves`` is True, the tangent is dropped too. A tensor whose class has its own dispatch
    (DTensor) is detached by that class. The kernel does not know what such a tensor holds, and
    would return a tensor without memory.
    """
    hidden = suspend_own_modes() if has_own_dispatch(type(tensor)) else hide_own_tensors()
    with functions_off(), hidden:
        alias = tensor.detach()
        if moves and has_users_tangents():
            tangent = forward_ad.unpack_dual(tensor).tangent
            if tangent is not None:
                alias = forward_ad.make_dual(alias, tangent)
        return alias


class _HiddenTensorListeners(exception_safety.RestoredState):
    told: tuple[Callable, ...] = ()  # called with tensors that are made where no mode sees it


aside = _HiddenTensorListeners.make_instance()


def apply_own_function(function: type, *args: Any) -> Any:
    """Run torch.autograd.Function.apply of forall's own, without lifting the arguments."""
    with torch._C.DisableTorchFunction():
        return apply_without_binding(function, *args)
