"""Operators that torch.library.custom_op defined, and the vmap rules that torch.library keeps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._library.autograd
from torch._C import DispatchKey, DispatchKeySet
from torch._library.custom_ops import OPDEFS, CustomOpDef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class OpVmapInfo(NamedTuple):
    """The first argument of rules that torch.library.register_vmap registers."""

    batch_size: int
    randomness: str


def find_overloads(op: Any) -> list | None:
    """Return the overloads of an operator; None if ``op`` is no operator."""
    if isinstance(op, CustomOpDef):
        return [op._opoverload]
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return None


def find_custom_op(func: Any) -> CustomOpDef | None:
    """Return the custom_op of an overload, if there is one."""
    return OPDEFS.get(f"{func.namespace}::{func.overloadpacket.__name__}")


_TORCHS = frozenset({"aten", "prims", "prim", "quantized", "mkldnn"})


def get_vmap_rule(op: CustomOpDef) -> Callable | None:
    """Return the rule that torch.library.register_vmap registered for this operator."""
    return op._vmap_fn


_FUNCTIONS = torch._library.autograd.__name__  # where register_autograd makes a Function
_PYTHON = DispatchKeySet(DispatchKey.Python)
_SNAPSHOT = DispatchKeySet(DispatchKey.PythonTLSSnapshot)


class _KeysWithSnapshot:
    """Dispatch keys that keep the snapshot of torch's state, whatever they are restricted to.

    Before 2.13 torch's kernel for Python handlers asserts that there is a snapshot, and torch takes
    it only where an operator is called.
    """

    def __init__(self, keys: DispatchKeySet) -> None:
        self.keys = keys

    def __and__(self, others: DispatchKeySet) -> DispatchKeySet:
        return (self.keys & others) | _SNAPSHOT


def renew_dispatch_keys(args: Sequence) -> Sequence:
    """Return the arguments of a Function such that it can run after the operator's call.

    `register_autograd` of torch.library makes a Function that gets the dispatch keys of the call
    as an argument. When it runs again, its tensors are of other levels.
    """
    for i, a in enumerate(args):
        if type(a).__module__ == _FUNCTIONS and hasattr(a, "keyset"):
            keys: Any = _renew_keys(a.keyset, args)
            return [*args[:i], dataclasses.replace(a, keyset=keys), *args[i + 1 :]]
    return args


def _renew_keys(earlier: DispatchKeySet | _KeysWithSnapshot, args: Sequence) -> Any:
    if isinstance(earlier, _KeysWithSnapshot):
        earlier = earlier.keys
    now = torch._C._dispatch_tls_local_include_set()  # those of dispatch modes
    for a in args:
        if isinstance(a, torch.Tensor):
            now = now | torch._C._dispatch_keys(a)
    if now.has(DispatchKey.Python):
        return _KeysWithSnapshot(earlier | _PYTHON)
    return earlier - _PYTHON
