"""Recording of transforms by torch.export, whose tracer is on before autograd.

NOTE [tracing before autograd]
    Operators dispatch to such a tracer at a key of its own. Wrappers of levels never get past it,
    and it does not see the operators of a backward pass. While a transform runs, the tracer is
    moved to where make_fx has it, after autograd. It then records the plain operators on batched
    values that the transform runs.

    The derivative of these operators need not be that of the call: a custom Function, or a
    statistic that a kernel saves for its backward pass, would be lost silently. So results are
    recorded as detached, with one warning if a derivative could have been asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch

from forall._compat import pytree, trace_modes
from forall._compat.call_site import warn_users_line
from forall._compat.dispatch_state import functions_off
from forall._compat.private_api import (
    BEFORE_AUTOGRAD,
    count_all_function_modes,
    pop_functions,
    pop_mode,
    push_functions,
    push_mode,
)
from forall._compat.symbolic_zeros import LINEAR, make_plain_zeros, simplify_linear
from forall._compat.wrapper_tensor import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def call_after_autograd(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)``, recorded after autograd, with detached results."""
    with _after_autograd():
        result = func(*args, **kwargs)
        with functions_off():
            if any(
                isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.get_leaves(result)
            ):
                _warn()
            return pytree.map_tensors(torch.Tensor.detach, result)


def _warn() -> None:
    warn_users_line(
        "torch.export records a transform of forall as the operators that compute its values. "
        "Derivatives of the exported program do not go through it: there its results are "
        "detached.\nExport under torch.no_grad() if no derivative is to be taken.",
        UserWarning,
    )


class PlainOperatorMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode that replaces operators which such a tracer cannot record."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, Wrapper) for kind in types):
            return NotImplemented  # the wrapper's level runs the operator
        kwargs = kwargs or {}
        if func is aten._has_same_storage_numel.default:
            return True  # forward mode asks; the bases of the caller's views would be compared
        if func is aten.is_same_size.default:
            return args[0].shape == args[1].shape
        if func is aten._efficientzerotensor.default:  # its kernels take no symbolic sizes
            return make_plain_zeros(*args, **kwargs)
        if func in LINEAR:
            known = simplify_linear(func, args, kwargs)
            if isinstance(known, torch.Tensor):
                return known
            func, args, kwargs = known or (func, args, kwargs)
        return func(*args, **kwargs)


_PLAIN = PlainOperatorMode()  # torch 2.10 crashes where it pops a mode that nothing else holds


class _after_autograd:
    """A block in which the tracer works after autograd; see NOTE [tracing before autograd].

    Its function mode, which records changes of grad mode, is off.
    """

    __slots__ = ("functions", "modes")

    def __enter__(self) -> None:
        from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

        self.modes = []
        while trace_modes.is_pre_dispatch_tracing():
            self.modes.append(_python_dispatch._pop_mode(BEFORE_AUTOGRAD))
        for mode in reversed(self.modes):
            mode.pre_dispatch, mode._dispatch_key = False, None
            push_mode(mode)
        push_mode(_PLAIN)
        self.functions = [pop_functions() for _ in range(count_all_function_modes())]
        for mode in reversed(self.functions):
            if not isinstance(mode, PreDispatchTorchFunctionMode):
                push_functions(mode)

    def __exit__(self, *_: object) -> None:
        for _function in range(count_all_function_modes()):
            pop_functions()
        while self.functions:
            push_functions(self.functions.pop())
        pop_mode(None)
        for _mode in self.modes:
            pop_mode(None)
        while self.modes:
            mode = self.modes.pop()
            mode.pre_dispatch, mode._dispatch_key = True, BEFORE_AUTOGRAD
            _python_dispatch._push_mode(mode)
