"""`jit`: a pure function recorded once for each kind of arguments, and replayed."""

from __future__ import annotations

import functools
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import Call, slow
from forall._core.levels import top
from forall._programs.guards import Unwatched
from forall._programs.recording import record
from forall._programs.signature import Unfit, ambient, of_leaf, shared
from forall._torch import handover, trees
from forall._torch.dispatch import dispatch_modes, function_modes, users_tangents
from forall._transforms import checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._programs.replayed import Recorded
    from forall._transforms.types import P, R

_NEW: Any = object()
_MOST = 64  # kinds of calls that are kept, the last used ones


def jit(func: Callable[P, R]) -> Callable[P, R]:
    """``func`` without its Python: recorded once for each kind of arguments, then replayed.

    The law: ``jit(f)(x)`` equals ``f(x)`` for a pure function ``f`` of trees of tensors: results,
    derivatives taken outside, random draws, and what is written into arguments. Transforms inside
    are recorded as what they come down to: a straight line of operators without a level or a tape.

    Cost: the first call of a kind runs ``func`` as it is, and besides cleans and compiles what it
    saw, about a millisecond for each operator. A later call runs the operators. A kind is made of
    the tree of the arguments, the shape, strides, dtype, device and ``requires_grad`` of each
    tensor, the value of everything else, and torch's state: grad mode, autocast, default dtype. The
    last 64 kinds are kept. Where something outside requires grad, the backward pass is replayed as
    well; a derivative of that pass runs ``func``.

    Captured tensors are read anew with each call. What ``func`` can be seen to reach (closure,
    globals, defaults, attributes, modules) is compared with each call by identity, and a change
    records anew. What no program can stand for runs as it is, with one `PerformanceWarning` that
    says why: a branch or a loop on a tensor's values, ``.item()``, results whose shape depends on
    values, numpy, a list or an attribute that ``func`` changes. Inside another transform, and for
    arguments of a class of their own, ``func`` runs as it is without a word.

    Args:
        func: a function of trees of tensors, or a module. What it does besides (print, files,
            Python's own random numbers, the clock) happens while it is recorded, and not again.

    Raises:
        TypeError: where ``func`` cannot be called.
        Exception: what ``func`` raises while it is recorded.

    Source: the idea is that of Frostig, Johnson and Leary, "Compiling machine learning programs via
    high-level tracing" (2018).

    Example:
        >>> from forall import grad, vmap
        >>> def loss(w, x):                            # (2,), (2,) -> ()
        ...     return (x @ w).sin()
        >>> slopes = jit(vmap(grad(loss), in_dims=(None, 0)))
        >>> w, xs = torch.tensor([1.0, 2.0]), torch.eye(2)
        >>> slopes(w, xs)                              # recorded
        tensor([[ 0.5403,  0.0000],
                [-0.0000, -0.4161]])
        >>> slopes(2 * w, xs)                          # replayed
        tensor([[-0.4161, -0.0000],
                [-0.0000, -0.6536]])
    """
    checks.callable_("jit", func)
    kinds = Kinds(func)

    @functools.wraps(func, updated=())
    def jitted(*args: Any, **kwargs: Any) -> Any:
        return kinds.run(args, kwargs)

    jitted.cache_clear = kinds.clear
    return jitted


class Kinds(Unwatched):
    """The kinds of calls that were recorded of one function."""

    def __init__(self, func: Callable) -> None:
        self.func = func
        self.known: OrderedDict[Any, Recorded | None] = OrderedDict()
        self.newest: Recorded | None = None

    def clear(self) -> None:
        self.known.clear()
        self.newest = None

    def run(self, args: tuple, kwargs: dict) -> Any:
        if (
            top() is not None
            or dispatch_modes()
            or function_modes()
            or users_tangents()
            or handover.needed()
        ):
            return self.func(*args, **kwargs)  # part of what records it, or of what takes it apart
        leaves, outline = trees.outlined((args, kwargs))
        try:
            kind = (outline, *map(of_leaf, leaves), *ambient())
        except Unfit as unfit:
            return self._as_it_is(args, kwargs, str(unfit))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if len(tensors) > 1:
            kind = (kind, shared(tensors))
        recorded = self.known.get(kind, _NEW)
        if recorded is None:
            return self.func(*args, **kwargs)
        if recorded is _NEW or not recorded.guards.hold():
            return self._first(kind, leaves, trees.flatten((args, kwargs))[1])
        if recorded is not self.newest:
            self.newest = recorded
            with suppress(KeyError):  # another thread's calls may have pushed it out
                self.known.move_to_end(kind)
        return recorded(tensors)

    def _first(self, kind: Any, leaves: list, spec: Any) -> Any:
        made = record(self.func, leaves, spec)
        if made.why is not None:
            self._tell(made.why)
        self.known[kind] = made.recorded
        if len(self.known) > _MOST:
            self.known.popitem(last=False)
        return made.result

    def _as_it_is(self, args: tuple, kwargs: dict, why: str) -> Any:
        self._tell(why)
        return self.func(*args, **kwargs)

    def _tell(self, why: str) -> None:
        slow(f"{Call('jit', self.func)}: not recorded, so run as it is: {why}.")
