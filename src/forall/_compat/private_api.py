"""What torch keeps private and others here need, each under one name: a call costs nothing more."""

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
    "DispatchKey",
    "DispatchMode",
    "OpOverload",
    "OpOverloadPacket",
    "PLAIN",
    "SET_HOOKS",
    "SPARSE_SUM",
    "StorageWeakRef",
    "decompositions",
    "fast_operator",
    "function_homes",
    "functions_pass",
    "has_global_hooks",
    "has_kernel",
    "pop_functions",
    "pop_mode",
    "push_functions",
    "push_mode",
    "set_version",
    "split_tangent",
    "subclass_functions_are_on",
    "subclass_functions_off",
    "version",
]

DispatchKey = torch._C.DispatchKey
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

PLAIN = (torch.Tensor, torch.nn.Parameter)  # the classes that mean what torch itself means


class DispatchMode(TorchDispatchMode):
    """A mode of ours: torch need not import its compiler to leave the handler alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# A tensor subclass whose __torch_function__ this is has none, at no cost.
functions_pass = torch._C._disabled_torch_function_impl
# A context: __torch_function__ of subclasses is off, function modes stay on.
subclass_functions_off = torch._C.DisableTorchFunctionSubclass
subclass_functions_are_on = torch._C._is_torch_function_enabled

push_mode = torch._C._push_on_torch_dispatch_stack
pop_mode = torch._C._pop_torch_dispatch_stack
push_functions = torch._C._push_on_torch_function_stack
pop_functions = torch._C._pop_torch_function_stack

# Torch hangs hooks on a tensor: also while it makes the history of a view anew.
SET_HOOKS = torch.Tensor._backward_hooks.__set__  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

# Forward mode without the checks of torch.autograd.forward_ad, which ask for a level of its own.
split_tangent = torch._VF._unpack_dual

# Where torch's own functions of operators are, the cheaper ones to call first.
function_homes = (
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C._linalg,
    torch._C._special,
    torch._C._fft,
    torch._C.TensorBase,
)


def fast_operator(op: Any) -> Callable:
    """An operator without the checks in Python that stand before it."""
    return op._op


# What packs sequences of several lengths, and pads them again; both read lengths from memory.
pack_padded = torch._VF._pack_padded_sequence
pad_packed = torch._VF._pad_packed_sequence

# The node that full backward hooks of modules hang on.
BACKWARD_HOOK = torch.nn.modules._functions.BackwardHookFunction
SPARSE_SUM = torch._sparse_sum

# The code of the module that all of BatchNorm1d, 2d and 3d are.
BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm.forward.__code__


def version(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to; -1 where torch does not count."""
    with torch._C.DisableTorchFunction():  # a level would answer for its own part in the tensor
        return -1 if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, number: int) -> None:
    """Say that a tensor which holds what it held then has not been written to since."""
    if number >= 0:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (number,))


# The hooks that are set on what autograd saves, if any (torch.autograd.graph.saved_tensors_hooks).
hooks_on_saved = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
# Whether hooks are set that all modules of the process run.
has_global_hooks = torch.nn.modules.module._has_any_global_hook
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def decompositions() -> dict[Any, Callable]:
    """Torch's operators in terms of others, in Python. Importing them takes a while."""
    from torch._decomp import decomposition_table

    return decomposition_table
