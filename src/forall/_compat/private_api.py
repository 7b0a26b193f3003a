"""torch's private functions that other packages need, each under one name, without a wrapper."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BACKWARD_HOOK",
    "BATCH_NORM",
    "BEFORE_AUTOGRAD",
    "DispatchKey",
    "DispatchMode",
    "OpOverload",
    "OpOverloadPacket",
    "PLAIN",
    "SET_HOOKS",
    "SPARSE_SUM",
    "StorageWeakRef",
    "find_innermost_function_mode",
    "get_decompositions",
    "get_fast_operator",
    "function_homes",
    "functions_pass",
    "has_global_hooks",
    "has_kernel",
    "is_key_included",
    "module_of",
    "pop_functions",
    "count_all_function_modes",
    "count_dispatch_modes",
    "pop_mode",
    "push_functions",
    "push_mode",
    "set_version",
    "split_tangent",
    "subclass_functions_are_on",
    "subclass_functions_off",
    "get_version",
]

DispatchKey = torch._C.DispatchKey
BEFORE_AUTOGRAD = DispatchKey.PreDispatch  # while a tracer is on before autograd
is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

PLAIN = (torch.Tensor, torch.nn.Parameter)  # the classes without a behaviour of their own


class DispatchMode(TorchDispatchMode):
    """The base of forall's dispatch modes, which torch runs without importing its compiler.

    An interrupt between two instructions, in the middle of entering `run_outside`, leaves no mode
    to pop. That must not end in an error of torch's, which would take the interrupt's place. The
    outermost call restores the modes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __exit__(self, *error: object) -> None:
        if not count_dispatch_modes():
            push_mode(self)
        super().__exit__(*error)


# As the __torch_function__ of a tensor subclass, this disables it at no cost.
functions_pass = torch._C._disabled_torch_function_impl
# A context: __torch_function__ of subclasses is off, function modes stay on.
subclass_functions_off = torch._C.DisableTorchFunctionSubclass
subclass_functions_are_on = torch._C._is_torch_function_enabled

push_mode = torch._C._push_on_torch_dispatch_stack
pop_mode = torch._C._pop_torch_dispatch_stack
count_dispatch_modes = torch._C._len_torch_dispatch_stack
push_functions = torch._C._push_on_torch_function_stack
pop_functions = torch._C._pop_torch_function_stack
count_all_function_modes = torch._C._len_torch_function_stack


def find_innermost_function_mode() -> object | None:
    """Return the function mode that sees a call first, None where none is on."""
    count = count_all_function_modes()
    return torch._C._get_function_stack_at(count - 1) if count else None


# torch sets hooks on a tensor: also while it regenerates the history of a view.
SET_HOOKS = torch.Tensor._backward_hooks.__set__  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

# Forward mode without the checks of torch.autograd.forward_ad, which require a dual level.
split_tangent = torch._VF._unpack_dual

# The homes of torch's own functions for operators, the ones that are cheaper to call first.
function_homes = (
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C._linalg,
    torch._C._special,
    torch._C._fft,
    torch._C.TensorBase,
)


def get_fast_operator(op: Any) -> Callable:
    """Return an operator without the checks in Python that precede it."""
    return op._op


# Packing and padding of sequences of several lengths; both read the lengths from memory.
pack_padded = torch._VF._pack_padded_sequence
pad_packed = torch._VF._pad_packed_sequence

# The node that full backward hooks of modules are registered on.
BACKWARD_HOOK = torch.nn.modules._functions.BackwardHookFunction
SPARSE_SUM = torch._sparse_sum

# The code of the common base of BatchNorm1d, 2d and 3d.
BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm.forward.__code__


def module_of(thing: Any) -> str:
    """The name of the module that a class or function says it is from; "" where it says no name.

    An extension, or a class of the user's, may have put anything there.
    """
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else ""


def get_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to; -1 if torch does not count."""
    with torch._C.DisableTorchFunction():  # a level would return the version of its own value
        return -1 if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Reset the version of a tensor that holds the same values as it held at that version."""
    if number >= 0:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


# The hooks on saved tensors, if any (torch.autograd.graph.saved_tensors_hooks).
hooks_on_saved = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
# True if hooks are registered that all modules of the process run.
has_global_hooks = torch.nn.modules.module._has_any_global_hook
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def get_decompositions() -> dict[Any, Callable]:
    """Return torch's operators in terms of others, in Python. Importing them takes a while."""
    from torch._decomp import decomposition_table

    return decomposition_table
