"""A call of a transform that ends in an exception leaves this thread's state as it found it.

NOTE [an exception between two instructions]
    Each context of ours puts back what it has changed, which serves for errors of the user's. A
    KeyboardInterrupt, or the exception of another signal's handler, may come between any two
    instructions: while a context is entered, or before its ``__exit__`` has done anything. So the
    outermost call keeps what was there before it, in one place, and puts it back where the call
    ends in any exception. What it finds as it was, it leaves alone. A generator that a context is
    made of is closed first: whoever keeps the exception would have it go on later.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from forall._torch.names import pop_functions, pop_mode, push_functions, push_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

P = ParamSpec("P")
T = TypeVar("T")

_PLACES: list[Any] = []
# What else is done, before our own state is put back: told of the modes that were left on, and of
# the level of torch's forward mode that is to be the current one.
PUT_BACK: list[Callable[[list, int], None]] = []

_EXCLUDED = torch._C._dispatch_tls_local_exclude_set
_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        "AutogradFunctionality",
        "ADInplaceOrView",
        "Conjugate",
        "Negative",
        "ZeroTensor",
        "Python",
        "PythonTLSSnapshot",
    )
)


class Here(threading.local):
    """State of a thread that is put back."""

    @classmethod
    def made(cls) -> Any:
        """The one object of its class, which is put back with all others."""
        here = cls()
        _PLACES.append(here)
        return here


class _Now(threading.local):
    before: Any = None  # what the outermost call of this thread has found

    def __init__(self) -> None:
        self.open: list[Any] = []  # generators of contexts that have been entered


_now = _Now()
_guards: list[Any] = []


def _entered(guard: Any) -> None:
    """Enter a context of torch's for good: one that is let go puts back what it has changed."""
    guard.__enter__()
    _guards.append(guard)


class _Context(contextlib._GeneratorContextManager):
    def __enter__(self) -> Any:
        _now.open.append(self.gen)
        return super().__enter__()

    def __exit__(self, *error: object) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            if self.gen.gi_frame is None:  # it has put back what it set
                _now.open.remove(self.gen)


def contextmanager(func: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """`contextlib.contextmanager` for contexts that set state."""

    @functools.wraps(func)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(func, args, kwargs)

    return made


def call(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, after which this thread's state is as before if it fails."""
    if _now.before is not None:
        return func(*args, **kwargs)
    try:
        _now.before = _State()
        result = func(*args, **kwargs)
        _now.before = None
    except BaseException:
        before, _now.before = _now.before, None
        while _now.open:
            with contextlib.suppress(Exception):  # of one that finds what others have left
                _now.open.pop().close()
        if before is not None:
            before.put_back()
        raise
    return result


class _State:
    """What this thread has set of torch's state and of ours."""

    __slots__ = (
        "autocasts",
        "excluded",
        "forward",
        "functions",
        "grad",
        "inference",
        "levels",
        "modes",
        "on",
        "ours",
    )

    def __init__(self) -> None:
        self.on = torch._C._is_torch_function_enabled()
        self.grad = torch.is_grad_enabled()
        self.forward = torch._C._is_fwd_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.levels = forward_ad._current_level
        self.autocasts = torch.is_autocast_cache_enabled()
        self.excluded = _EXCLUDED()
        self.modes = _modes() if torch._C._len_torch_dispatch_stack() else ()
        self.functions = _functions() if torch._C._len_torch_function_stack() else ()
        self.ours = [vars(place).copy() for place in _PLACES]

    def put_back(self) -> None:
        """Put back all that is not as it was."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            left = _back(_modes, self.modes, lambda: pop_mode(None), push_mode)
            _back(_functions, self.functions, pop_functions, push_functions)
            torch.set_autocast_cache_enabled(self.autocasts)
            for key in _KEYS:
                was = self.excluded.has(key)
                if torch._C._dispatch_tls_is_dispatch_key_excluded(key) is not was:
                    torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)
            for tell in PUT_BACK:
                tell(left, self.levels)
            for place, was in zip(_PLACES, self.ours, strict=False):
                now = vars(place)
                if now != was:
                    now.clear()
                    now.update(was)
        if torch.is_inference_mode_enabled() is not self.inference:
            _entered(torch._C._InferenceMode(self.inference))
        if self.on and not torch._C._is_torch_function_enabled():
            _entered(torch._C._EnableTorchFunction())
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward)


def _modes() -> tuple:
    at = torch._C._get_dispatch_stack_at
    return tuple(at(i) for i in range(torch._C._len_torch_dispatch_stack()))


def _functions() -> tuple:
    at = torch._C._get_function_stack_at
    return tuple(at(i) for i in range(torch._C._len_torch_function_stack()))


def _back(found: Callable[[], tuple], was: tuple, pop: Callable, push: Callable) -> list:
    """Have the modes on that were; those that were left on."""
    now = found()
    same = 0
    for a, b in zip(now, was, strict=False):
        if a is not b:
            break
        same += 1
    for _ in now[same:]:
        pop()
    for mode in was[same:]:
        push(mode)
    return [*now[same:]]
