"""Detection of side effects while a call is recorded: what no operator shows to the tracer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from forall._compat import pytree
from forall._compat.dispatch_state import (
    aside,
    functions_off,
    in_torch_func,
    no_dispatch,
)
from forall._compat.exception_safety import contextmanager
from forall._compat.private_api import OpOverload, OpOverloadPacket
from forall._compat.pure_functions import TELLS, is_python_composite
from forall._core.levels import run_outside_all, stack
from forall._jit.tracing.tracer import TELLING, TORCHS, holds_integers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forall._jit.tracing.tracer import Tracer


@contextmanager
def activate_tracer(recorder: Tracer) -> Iterator[None]:
    before = stack.listening, aside.told
    stack.listening = (*stack.listening, _HostReadListener(recorder))
    aside.told = (*aside.told, recorder.add_hidden_constant)
    try:
        with recorder:
            yield
    finally:
        stack.listening, aside.told = before


class _HostReadListener:
    """A listener to each read of an example's data by Python, which ends the recording.

    A test with the same answer for all examples is recorded instead.
    """

    writes = True

    def __init__(self, recorder: Tracer) -> None:
        self.recorder = recorder

    @property
    def is_idle(self) -> bool:
        """True once the recording has ended, so that nothing need be listened to."""
        return self.recorder.why is not None

    def give_up(self, why: str) -> None:
        """End the recording: the call runs better eagerly, for the reason ``why``."""
        self.recorder.stop_recording(why)

    def on_concretize(self, frame: Any, truths: Callable[[], torch.Tensor] | None = None) -> None:
        if truths is None or not self._is_unanimous(truths()):
            self.recorder.stop_recording(
                f"line {frame.f_lineno} of {frame.f_code.co_name} asks for an example's numbers"
            )

    def _is_unanimous(self, values: torch.Tensor) -> bool:
        """True if all examples have one answer, which is then read under the recorder."""
        if not values.numel():
            return False
        with no_dispatch(), functions_off():
            every, none = bool(values.all()), not bool(values.any())
        if every or none:
            with run_outside_all():  # the recorder sees this read and asserts it
                bool(values.all() if every else values.any())
        return every or none

    def split(self, place: Any, sizes: Any) -> None: ...

    def take_snapshot(self) -> None: ...

    def restore_snapshot(self, mark: Any) -> None: ...


# Calls that read memory or change tensors without an operator.
_UNSEEN_CALLS = {
    getattr(torch.Tensor, name)
    for name in [
        "numpy",
        "__array__",
        "__repr__",
        "tolist",
        "apply_",
        "map_",
        "map2_",
        "data_ptr",
        "__dlpack__",
        "untyped_storage",
        "backward",
    ]
} | {
    torch.autograd.backward,
    torch.from_numpy,
    torch.frombuffer,
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "data")),
    torch.Tensor.data.__get__,  # pyright: ignore[reportAttributeAccessIssue]
}

# Calls that change the tensor itself, which do no harm where the function has made it.
_METADATA_WRITES = {
    torch.Tensor.register_hook,
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # pyright: ignore[reportAttributeAccessIssue]
}

_HOOK_CALLS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


# Calls for which torch chooses one of several kernels, among those that the user allows.
_KERNEL_CHOOSERS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "batch_norm",
    "instance_norm",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
}


# Functions that read sizes or positions from a tensor's memory, for views and shapes.
_SIZE_READERS = {
    "tensor_split",
    "_pack_padded_sequence",
    "_pad_packed_sequence",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
}


_OPERATORS = (OpOverload, OpOverloadPacket)


class SideEffectMode(TorchFunctionMode):
    """A function mode that sees the calls which no operator shows."""

    def __init__(self, recorder: Tracer) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        changes = func in _METADATA_WRITES
        if in_torch_func():
            self.recorder.stop_recording(TORCHS)
        elif isinstance(func, _OPERATORS) and is_python_composite(func):
            self.recorder.stop_recording(f"{func} is a function in Python that nothing leads to")
        elif func in TELLS and self.recorder.traced.is_from_outside(args[0]):
            self.recorder.stop_recording(TELLING)
        elif func in _UNSEEN_CALLS or (changes and self.recorder.traced.is_from_outside(args[0])):
            named = getattr(func, "__self__", func)  # the descriptor of an attribute
            self.recorder.stop_recording(
                f"{getattr(named, '__name__', func)} is seen by no operator"
            )
        elif "numpy" in sys.modules:
            arrays = sys.modules["numpy"].ndarray
            if any(isinstance(a, arrays) for a in pytree.get_leaves((args, kwargs))):
                self.recorder.stop_recording("the numbers of an array of numpy's may change")
        self.recorder.notes.tells |= func in TELLS
        self.recorder.notes.makes_leaves |= changes
        self.recorder.notes.makes_hooks |= func in _HOOK_CALLS
        name = getattr(func, "__name__", "")
        self.recorder.notes.chooses |= name in _KERNEL_CHOOSERS
        given = pytree.get_leaves((args, kwargs)) if name in _SIZE_READERS else []
        if any(isinstance(x, torch.Tensor) and holds_integers(x) for x in given):
            self.recorder.stop_recording(f"{name} reads numbers of which no operator tells")
        before, self.recorder.given = self.recorder.given, (func, args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.recorder.given = before
