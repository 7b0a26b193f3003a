"""The function mode of `vmap`: every API call, seen before autograd sees its operators.

A captured tensor that requires grad is put in its shared form (`boundary.Broadcast`). Pointwise
calls without a derivative at stake are answered on the stacks; some calls have a meaning of their
own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from forall._compat.dispatch_state import functions_off, has_users_tangents, is_in_backward
from forall._compat.jagged_layout import Jagged
from forall._compat.private_api import (
    PLAIN,
    find_innermost_function_mode,
    pop_functions,
    push_functions,
    subclass_functions_are_on,
    subclass_functions_off,
)
from forall._compat.tensor_subclass import (
    call_override,
    call_torch_functions,
    has_own_torch_function,
    has_posed,
    is_overridden,
    posing,
    restore_posed_results,
    unwrap_posed_args,
)
from forall._compat.versions import GRAD_DTYPE_CALLS
from forall._compat.wrapper_tensor import Wrapper
from forall._core import nested_tensor
from forall._core.escaped_values import has_escaped_values, replace_escaped_args
from forall._core.levels import Level, complete_gradient, find_innermost, levels_in, stack, top
from forall._vmap import registry
from forall._vmap.active_set.restrict_args import restrict_args, restrict_to_one_part
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.fast_path.api_calls import answer_call
from forall._vmap.mutation import view_copies
from forall._vmap.mutation.mutation_log import write_counts

_CALLS = registry.CALLS
_UNSHARED = registry.UNSHARED
_IN_PLACE = registry.IN_PLACE
_STRANGERS = registry.STRANGERS
_SEQUENCES = frozenset({list, tuple})


def find_sharing_level(level: Any) -> Any:
    """The innermost level, from this one outward, whose function mode shares captured tensors."""
    while level is not None and not level.shares:
        level = level.parent
    return level


# Getters and setters that read or change the tensor itself: sharing would answer for another.
ITSELF = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "shape", "grad", "is_leaf", "dtype", "device", "ndim")
) | {
    torch.Tensor.grad.__set__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.requires_grad_,
    torch.Tensor.detach,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.backward,
    torch.autograd.backward,
    *GRAD_DTYPE_CALLS,
}


# What a value shows by itself. It is the same for each of its examples, and once its level ended.
_SHOWN = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")
) | {torch.Tensor.size, torch.Tensor.dim}

_GRADIENTS = frozenset({torch.autograd.grad, torch.Tensor.grad.__get__})


def _complete_gradients(func: Any, args: tuple, out: Any) -> Any:
    """Complete a gradient, which may be of some examples alone, to one of all that run."""
    if func is torch.autograd.grad:
        return tuple(complete_gradient(g) for g in out)
    whole = complete_gradient(out)
    if whole is not out:
        torch.Tensor.grad.__set__(args[0], whole)
    return whole


_NUMBERS = frozenset({int, float, bool, type(None)})


class VmapFunctionMode(TorchFunctionMode):
    """The one function mode of all nested levels: it asks at each call which level is innermost."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _SHOWN and not kwargs and isinstance(args[0], Wrapper):
            with subclass_functions_off():
                return _call_past_outer_levels(func, args, {})
        odd = posing.used and not subclass_functions_are_on()  # then ``types`` names no class
        for t in types:
            if t is BatchedTensor:
                continue
            if t in _STRANGERS:
                return self._call_by_class(t, func, args, kwargs or {})
            if not issubclass(t, torch.Tensor):
                return NotImplemented  # its own meaning comes next; calls that it makes are seen
            if has_own_torch_function(t) and subclass_functions_are_on():
                if t is Jagged:  # its operators call those of its rows, seen below
                    args, kwargs = self._share(func, args, kwargs or {})
                    known = nested_tensor.CALLS.get(func)
                    if known is None or not all(type(a) is Jagged for a in args[:3]):
                        return call_torch_functions(func, types, args, kwargs)
                    with self:
                        return known(*args, **kwargs)
                args, kwargs = self._share_for_class(func, args, kwargs or {})
                with self:  # calls that it makes in its turn are seen again
                    return call_torch_functions(func, types, args, kwargs)
            odd = posing.used
        if odd and has_posed((*args, *kwargs.values()) if kwargs else args):
            return self._call_on_wrappers(func, args, kwargs or {})
        with subclass_functions_off():
            if stack.diverged and (stack.again or not is_in_backward()):
                return self._call_restricted(func, args, kwargs or {})
            if stack.ever_parted and is_in_backward():
                args = restrict_to_one_part(args)
            return self._call(func, args, kwargs)

    def _call_on_wrappers(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Make the call on the wrappers that posed tensors hold."""
        args, kwargs, stands = unwrap_posed_args(args, kwargs)
        if is_overridden(func, args):
            with self:  # as where its user calls the method
                return restore_posed_results(call_override(func, args, kwargs), stands)
        return restore_posed_results(self.__torch_function__(func, (), args, kwargs), stands)

    def _call_restricted(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Make the call while examples diverge, on tensors restricted to those that run."""
        level = stack.top
        if not kwargs and level is not None and level.parent is None:
            for a in args:
                if type(a) is BatchedTensor:
                    if a.level is not level:
                        break
                elif type(a) not in _NUMBERS:
                    break
            else:
                return self._call(func, args, None)
        fit = restrict_args(func, args, kwargs)
        out = self._call(func, fit.args, fit.kwargs)
        return fit.restore_identity(out)

    def _call(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        if write_counts.named or (
            view_copies.view_copies.found is not None
            and view_copies.view_copies.seen != write_counts.times
        ):
            view_copies.sync_aliases()  # writes by calls that nobody saw
        level, records = stack.top, torch.is_grad_enabled()
        recorded = False
        is_usual = not kwargs  # its operands are values of the active level, and numbers
        with functions_off():  # levels further out have pushed the mode too
            for a in args:
                if type(a) is BatchedTensor and a.level is level:
                    recorded = recorded or (records and a.requires_grad)
                elif type(a) not in _NUMBERS:
                    is_usual = False
                    break
        if not recorded:
            out = answer_call(func, args, kwargs, level)
            if out is not None:
                return out
        if not is_usual and has_escaped_values(args, kwargs):
            args, kwargs = replace_escaped_args(args, kwargs or {})
        if (
            not is_usual
            and (records or has_users_tangents())
            and _may_need_sharing(args, kwargs, level)
            and func not in ITSELF
        ):
            early = _UNSHARED.get(func)
            if early is not None:
                out = early(*args, **(kwargs or {}))
                if out is not NotImplemented:
                    return out
            args, kwargs = self._share(func, args, kwargs or {})
        call = _CALLS.get(func)
        if kwargs and kwargs.get("out") is not None:
            call = registry.OUTS.get(func, call)
        out = NotImplemented if call is None else call(*args, **(kwargs or {}))
        if out is NotImplemented:
            for a in args if not kwargs else (*args, *kwargs.values()):
                if type(a) in _STRANGERS:
                    return self._call_by_class(type(a), func, args, kwargs or {})
            out = _call_past_outer_levels(func, args, kwargs or {})
        if func in _GRADIENTS and not is_in_backward():
            out = _complete_gradients(func, args, out)
        if write_counts.named or (
            view_copies.view_copies.found is not None
            and view_copies.view_copies.seen != write_counts.times
        ):
            view_copies.sync_aliases()
        return out

    def _share_for_class(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Share the captured tensors of a call to a class, which may switch all functions off."""
        level = find_sharing_level(top())
        if level is None or not torch.is_grad_enabled() or func in ITSELF:
            return args, kwargs
        first = 1 if func in _IN_PLACE else 0
        shared, more = level.share_captured(args[first:], kwargs)
        pairs = zip(args[first:], shared, strict=True)
        return (
            args[:first] + tuple(s if type(a) in PLAIN else a for a, s in pairs),
            {k: more[k] if type(a) in PLAIN else a for k, a in kwargs.items()},
        )

    def _call_by_class(self, kind: type, func: Any, args: tuple, kwargs: dict) -> Any:
        """Make the call as a class that is no tensor defines it."""
        with self:  # calls that it makes in its turn are seen again
            return kind.__torch_function__(func, (kind,), args, kwargs)

    def _share(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        levels = levels_in(args, kwargs)
        running = top()
        if running is not None:
            levels.append(running)
        level = find_sharing_level(find_innermost(levels) if levels else None)
        if level is None:
            return args, kwargs
        written = 1 if func in _IN_PLACE else 0  # the target itself, so that its history tells
        rest, kwargs = level.share_captured(args[written:], kwargs)
        return args[:written] + rest, kwargs


VMAP_FUNCTIONS = VmapFunctionMode()  # it has no state, so one does for all


def _call_past_outer_levels(func: Any, args: tuple, kwargs: dict) -> Any:
    """Make a call that the mode has looked at, without a second look for each level further out.

    Each level has pushed the one mode, which asks for the innermost level every time.
    """
    if find_innermost_function_mode() is not VMAP_FUNCTIONS:
        return func(*args, **kwargs)
    passed = 0
    try:
        while find_innermost_function_mode() is VMAP_FUNCTIONS:
            pop_functions()
            passed += 1
        return func(*args, **kwargs)
    finally:
        for _ in range(passed):
            push_functions(VMAP_FUNCTIONS)


def _may_need_sharing(args: Any, kwargs: dict | None, level: Level | None) -> bool:
    """True if any argument might need sharing: a cheap look before the careful one."""
    with functions_off():
        for a in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(a, Wrapper) and a.level is level:
                continue
            if isinstance(a, torch.Tensor):
                if a.requires_grad or has_users_tangents():
                    return True
            elif type(a) in _SEQUENCES and _may_need_sharing(a, None, level):
                return True
    return False
