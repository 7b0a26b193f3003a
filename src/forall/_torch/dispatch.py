"""Torch's thread-local dispatch state, and its one forward-mode level per process."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C import DispatchKey

if TYPE_CHECKING:
    from collections.abc import Iterator

is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
is_forward_enabled = torch._C._is_fwd_grad_enabled
set_forward_enabled = torch._C._set_fwd_grad_enabled

AUTOGRAD = DispatchKey.AutogradFunctionality
CONJUGATE = DispatchKey.Conjugate
# What the dispatcher switches off on its way into a Python handler and autograd's kernels need.
_ABOVE_PYTHON = (
    AUTOGRAD,
    DispatchKey.ADInplaceOrView,
    DispatchKey.Conjugate,
    DispatchKey.Negative,
    DispatchKey.ZeroTensor,
)


_LAZY = (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor)


def set_lazy_bits(on: bool) -> None:
    """Whether kernels look at the conj, neg and zero bits of their tensors.

    Inside a Python handler they do not: for its own tensors that is settled. But many a kernel
    (``pinv``, complex ``lstsq``) calls others with a lazy conjugate it made itself.
    """
    for key in _LAZY:
        set_excluded(key, not on)


class autograd_below:
    """Inside a Python handler, let autograd (and forward mode) act on the values one level down.

    A handler is entered with autograd switched off in thread-local state. A level whose values
    carry derivatives of their own switches it on for the operators it runs on them, in the grad
    mode given, and puts everything back as it was.
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


class _ForwardLevel:
    """PyTorch has one forward-mode level per process: entered by the first jvp, left by the last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                if forward_ad._current_level >= 0:
                    raise NotImplementedError(
                        "jvp: called inside torch.autograd.forward_ad.dual_level().\n"
                        "PyTorch has one forward-mode level in a process, and it is taken.\n"
                        "Use forall.jvp for the outer derivative too."
                    )
                forward_ad.enter_dual_level()
            self.users += 1

    def exit(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                forward_ad.exit_dual_level()


_forward_level = _ForwardLevel()


@contextmanager
def forward_level() -> Iterator[None]:
    """Hold the process's forward-mode level while a jvp runs."""
    _forward_level.enter()
    try:
        yield
    finally:
        _forward_level.exit()


def users_tangents() -> bool:
    """Whether tensors may carry tangents that torch.autograd.forward_ad gave them, not we."""
    return forward_ad._current_level >= 0 and _forward_level.users == 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether PyTorch's own forward mode gave this tensor a tangent."""
    return forward_ad.unpack_dual(tensor).tangent is not None


dispatch_modes = torch._C._len_torch_dispatch_stack
no_dispatch = torch._C._DisableTorchDispatch


def run_backward(
    outputs: tuple[torch.Tensor, ...],
    cotangents: tuple[Any, ...],
    inputs: tuple[torch.Tensor, ...],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad without its argument checks and its trip through function modes."""
    return torch.autograd.Variable._execution_engine.run_backward(
        outputs,
        cotangents,
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=False,
    )


def is_accumulating() -> bool:
    """Whether autograd is leaving a gradient on a leaf right now."""
    return isinstance(torch._C._current_autograd_node(), torch._C._functions.AccumulateGrad)


def in_torch_func() -> bool:
    """Whether a transform of torch.func is running around us."""
    return torch._C._are_functorch_transforms_active()


# Whether a transform of torch.func made this tensor.
torch_funcs = torch._C._functorch.is_functorch_wrapped_tensor


class outside_torch_func:
    """Act as code outside every transform of torch.func that is running does."""

    __slots__ = ("layers",)

    def __enter__(self) -> None:
        self.layers = []
        while torch._C._functorch.peek_interpreter_stack() is not None:
            self.layers.append(torch._C._functorch.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self.layers:
            torch._C._functorch.push_dynamic_layer_stack(self.layers.pop())


def dynamo_loaded() -> bool:
    """Whether torch.compile can have been used at all; importing it to ask would cost seconds."""
    return "torch._dynamo" in sys.modules


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor under a second name without history; a user's own tangent stays."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        alias = tensor.detach()
        if users_tangents():
            tangent = forward_ad.unpack_dual(tensor).tangent
            if tangent is not None:
                alias = forward_ad.make_dual(alias, tangent)
        return alias


def plain_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Ordinary zeros for aten._efficientzerotensor, whatever levels are active.

    Zeros without memory rely on a dispatch key that is off inside handlers. Forward formulas ask
    for them and may mark them a Python number, which torch then reads: a wrapper has no data.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.zeros(*args, **kwargs)


_apply = torch.autograd.Function.__dict__["apply"].__func__


def apply_function(function: type, *args: Any) -> Any:
    """torch.autograd.Function.apply as torch has it, without the sharing we add to it."""
    with torch._C.DisableTorchFunction():
        return _apply(function, *args)
