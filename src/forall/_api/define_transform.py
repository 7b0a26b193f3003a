"""The decorators that make a public transform of a function that does its own work alone.

NOTE [the key of a transform]
    Replay tells the calls of one function by the transform and its options. The options are read
    from the transform's signature once, when it is defined, and their values are bound when it is
    called. So a new keyword is part of the key as soon as it is in the signature. A tensor among
    the options, such as a key of random numbers, is an argument of the replayed calls instead.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from forall._api import argument_checks, dynamo_call
from forall._api.execution.transform_decorator import (
    find_point_calls,
    is_tensor_option,
    replay_transform,
)
from forall._compat import functorch_interop, profiler
from forall._core.errors import TransformCall
from forall._core.python_state import UnguardedState, read_signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.execution.transform_decorator import ReplayableCalls

F = TypeVar("F", bound="Callable")
_AT_POINT: dict[Callable, _Definition] = {}


def define_transform(
    **makers: Callable[[Callable, dict[str, Any]], Any],
) -> Callable[[F], F]:
    """Return a decorator for a transform that returns the transformed function.

    The decorated function checks its options, which are all parameters but the first, and returns
    a function that runs one call of the function that is its first argument. Each of ``makers``
    makes an argument of `replay_transform` from the user's function and the options.
    """

    def decorate(make_eager: F) -> F:
        own = _Definition(make_eager, makers, has_point=False)

        @functools.wraps(make_eager)
        def transform(func: Callable, *args: Any, **kwargs: Any) -> Callable:
            argument_checks.check_callable(own.verb, func)
            if (args or kwargs) and not is_dynamo_compiling():
                args, kwargs = argument_checks.fix_options(args, kwargs)
            if args and isinstance(args[0], torch.Tensor) and own.names[:1] == ["argnums"]:
                call = TransformCall(own.verb, func, argnums=args[0])
                raise argument_checks.make_argnums_error(call, args[0])
            eager = own.function(func, *args, **kwargs)
            options, shortcuts = own.bind_options(args, kwargs), {}
            if any(map(is_tensor_option, options.values())):
                eager = own.make_eager_with_tensors(options)
            if own.makers and not is_dynamo_compiling():
                shortcuts = {name: make(func, options) for name, make in own.makers.items()}
            return replay_transform(func, (own.verb, *options.items()), **shortcuts)(eager)

        return cast("F", transform)

    return decorate


def define_transform_at_point(by_torch: Callable | None = None) -> Callable[[F], F]:
    """Return a decorator for a transform that is given the point too, and runs at once.

    ``by_torch`` is the same by torch.func, with the transform's own parameters.
    """

    def decorate(run: F) -> F:
        own = _Definition(run, has_point=True)
        run_by_torch = by_torch or functools.partial(functorch_interop.call_torch_func, own.verb)

        def run_or_hand_over(func: Callable, *args: Any, **kwargs: Any) -> Any:
            run = run_by_torch if functorch_interop.must_hand_over() else own.function
            return run(func, *args, **kwargs)

        @functools.wraps(run)
        def transform(func: Callable, *args: Any, **kwargs: Any) -> Any:
            argument_checks.check_callable(own.verb, func)
            if is_dynamo_compiling():
                if functorch_interop.must_hand_over():
                    return run_by_torch(func, *args, **kwargs)
                point = (*args, *[x for name, x in kwargs.items() if name not in own.defaults])
                options = own.bind_keywords(kwargs)
                return dynamo_call.call_transform(own.verb, options, func, point, {})
            if functorch_interop.is_dynamo_listening():
                with functorch_interop.run_eagerly():
                    return transform(func, *args, **kwargs)
            if profiler.is_profiling():
                with profiler.make_span(str(TransformCall(own.verb, func))):
                    return run_or_hand_over(func, *args, **kwargs)
            return run_or_hand_over(func, *args, **kwargs)

        _AT_POINT[transform] = own
        return cast("F", transform)

    return decorate


def is_transform_at_point(x: Any) -> bool:
    """Return True for `vjp`, `jvp` and `linearize`."""
    return type(x) is FunctionType and x in _AT_POINT


def find_calls_at_point(
    transform: Callable, func: Callable, kwargs: dict
) -> ReplayableCalls | None:
    """Return the calls that are counted with a call of ``transform`` with these keywords."""
    own = _AT_POINT[transform]
    return find_point_calls(own.verb, func, own.bind_keywords(kwargs))


class _Definition(UnguardedState):
    """A transform as it was defined, with its name and its options.

    The options are the parameters after the function. Where the point is passed too, they are
    those with a default. See NOTE [the key of a transform].
    """

    def __init__(
        self, function: Callable, makers: dict[str, Callable] | None = None, *, has_point: bool
    ) -> None:
        self.function, self.makers = function, makers or {}
        self.verb = function.__name__
        _, *parameters = read_signature(function).parameters.values()
        options = [p for p in parameters if p.default is not p.empty or not has_point]
        self.defaults = {p.name: p.default for p in options if p.default is not p.empty}
        self.names = [p.name for p in options if p.kind is p.POSITIONAL_OR_KEYWORD]

    def bind_options(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Return all options of a call that passes nothing else, however it passes them."""
        if not args and not kwargs:
            return self.defaults
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def make_eager_with_tensors(self, options: dict[str, Any]) -> Callable:
        """Return a function like the decorated one, whose first arguments are options' tensors.

        Replay takes them for arguments of the call, so that other tensors replay it as well.
        """
        names = [name for name, x in options.items() if is_tensor_option(x)]
        at = len(names)

        def eager(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
            tensors = dict(zip(names, args[:at], strict=True))
            return self.function(func, **{**options, **tensors})(func, *args[at:], **kwargs)

        return eager

    def bind_keywords(self, kwargs: dict) -> dict[str, Any]:
        """Return all options of a call at a point, which are passed by keyword alone."""
        return {name: kwargs.get(name, default) for name, default in self.defaults.items()}
