"""The function mode of `vmap`: every API call, seen before autograd sees its operators.

A captured tensor that requires grad is put in its shared form (`border.Share`). Pointwise calls
without a derivative at stake are answered on the stacks; some calls have a meaning of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from forall._compat.dispatch_state import in_backward, users_tangents
from forall._compat.jagged_layout import Jagged
from forall._compat.private_api import PLAIN, subclass_functions_are_on, subclass_functions_off
from forall._compat.tensor_subclass import (
    ask_anew,
    by_class,
    given_back,
    has_own_meaning,
    has_posed,
    is_said_anew,
    posing,
    unposed,
)
from forall._core import nested_tensor
from forall._core.escaped_values import left_over, meets_ended
from forall._core.levels import Level, complete, innermost, levels_in, stack, top
from forall._vmap import registry
from forall._vmap.batched_tensor import Batched
from forall._vmap.fast_path.api_calls import answer
from forall._vmap.mutation import view_copies
from forall._vmap.mutation.mutation_log import written

_CALLS = registry.CALLS
_IN_PLACE = registry.IN_PLACE
_STRANGERS = registry.STRANGERS
_SEQUENCES = frozenset({list, tuple})


def sharing(level: Any) -> Any:
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
}


# `narrowing.narrowed` and `of_one_part`: their module imports the level, and the level this one.
NARROWED: list[Any] = []

_GRADIENTS = frozenset({torch.autograd.grad, torch.Tensor.grad.__get__})


def _whole(func: Any, args: tuple, out: Any) -> Any:
    """Complete a gradient, which may be of some examples alone, to one of all that run."""
    if func is torch.autograd.grad:
        return tuple(complete(g) for g in out)
    whole = complete(out)
    if whole is not out:
        torch.Tensor.grad.__set__(args[0], whole)
    return whole


_NUMBERS = frozenset({int, float, bool, type(None)})


class Sharing(TorchFunctionMode):
    """The one function mode of all nested levels: it asks at each call which level is innermost."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        odd = posing.used and not subclass_functions_are_on()  # then ``types`` names no class
        for t in types:
            if t is Batched:
                continue
            if t in _STRANGERS:
                return self._by_stranger(t, func, args, kwargs or {})
            if not issubclass(t, torch.Tensor):
                return NotImplemented  # its own meaning comes next; calls that it makes are seen
            if has_own_meaning(t) and subclass_functions_are_on():
                if t is Jagged:  # its operators call those of its rows, seen below
                    args, kwargs = self._share(func, args, kwargs or {})
                    known = nested_tensor.CALLS.get(func)
                    if known is None or not all(type(a) is Jagged for a in args[:3]):
                        return by_class(func, types, args, kwargs)
                    with self:
                        return known(*args, **kwargs)
                args, kwargs = self._given_to_class(func, args, kwargs or {})
                with self:  # calls that it makes in its turn are seen again
                    return by_class(func, types, args, kwargs)
            odd = posing.used
        if odd and has_posed((*args, *kwargs.values()) if kwargs else args):
            return self._of_bare(func, args, kwargs or {})
        with subclass_functions_off():
            if stack.parted and (stack.again or not in_backward()):
                return self._of_those_that_run(func, args, kwargs or {})
            if stack.ever_parted and in_backward():
                args = NARROWED[1](args)
            return self._call(func, args, kwargs)

    def _of_bare(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Make the call on the wrappers that posed tensors hold."""
        args, kwargs, stands = unposed(args, kwargs)
        if is_said_anew(func, args):
            with self:  # as where its user calls the method
                return given_back(ask_anew(func, args, kwargs), stands)
        return given_back(self.__torch_function__(func, (), args, kwargs), stands)

    def _of_those_that_run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Make the call while examples diverge, on tensors restricted to those that run."""
        level = stack.top
        if not kwargs and level is not None and level.parent is None:
            for a in args:
                if type(a) is Batched:
                    if a.level is not level:
                        break
                elif type(a) not in _NUMBERS:
                    break
            else:
                return self._call(func, args, None)
        fit = NARROWED[0](func, args, kwargs)
        out = self._call(func, fit.args, fit.kwargs)
        return fit.given(out)

    def _call(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        if written.named or (
            view_copies.copies.found is not None and view_copies.copies.seen != written.times
        ):
            view_copies.settle()  # writes by calls that nobody saw
        out = answer(func, args, kwargs, stack.top)
        if out is not None:
            return out
        if meets_ended(args, kwargs):
            args, kwargs = left_over(args, kwargs or {})
        if (
            (torch.is_grad_enabled() or users_tangents())
            and _carries(args, kwargs, stack.top)
            and func not in ITSELF
        ):
            args, kwargs = self._share(func, args, kwargs or {})
        call = _CALLS.get(func)
        if kwargs and kwargs.get("out") is not None:
            call = registry.OUTS.get(func, call)
        out = NotImplemented if call is None else call(*args, **(kwargs or {}))
        if out is NotImplemented:
            for a in args if not kwargs else (*args, *kwargs.values()):
                if type(a) in _STRANGERS:
                    return self._by_stranger(type(a), func, args, kwargs or {})
            out = func(*args, **kwargs) if kwargs else func(*args)
        if func in _GRADIENTS and not in_backward():
            out = _whole(func, args, out)
        if written.named or (
            view_copies.copies.found is not None and view_copies.copies.seen != written.times
        ):
            view_copies.settle()
        return out

    def _given_to_class(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Share the captured tensors of a call to a class, which may switch all functions off."""
        level = sharing(top())
        if level is None or not torch.is_grad_enabled() or func in ITSELF:
            return args, kwargs
        first = 1 if func in _IN_PLACE else 0
        shared, more = level.share_captured(args[first:], kwargs)
        pairs = zip(args[first:], shared, strict=True)
        return (
            args[:first] + tuple(s if type(a) in PLAIN else a for a, s in pairs),
            {k: more[k] if type(a) in PLAIN else a for k, a in kwargs.items()},
        )

    def _by_stranger(self, kind: type, func: Any, args: tuple, kwargs: dict) -> Any:
        """Make the call as a class that is no tensor defines it."""
        with self:  # calls that it makes in its turn are seen again
            return kind.__torch_function__(func, (kind,), args, kwargs)

    def _share(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        levels = levels_in(args, kwargs)
        running = top()
        if running is not None:
            levels.append(running)
        level = sharing(innermost(levels) if levels else None)
        if level is None:
            return args, kwargs
        written = 1 if func in _IN_PLACE else 0  # the target itself, so that its history tells
        rest, kwargs = level.share_captured(args[written:], kwargs)
        return args[:written] + rest, kwargs


SHARING = Sharing()  # it has no state, so one does for all


def _carries(args: Any, kwargs: dict | None, level: Level | None) -> bool:
    """True if any argument might need sharing: a cheap look before the careful one."""
    for a in args if not kwargs else (*args, *kwargs.values()):
        if type(a) is Batched and a.level is level:
            continue
        if isinstance(a, torch.Tensor):
            if a.requires_grad or users_tangents():
                return True
        elif type(a) in _SEQUENCES and _carries(a, None, level):
            return True
    return False
