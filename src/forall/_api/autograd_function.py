"""Custom autograd.Functions under levels: the user's backward decides every derivative.

Function modes do not see Function.apply, so it is wrapped once. The wrapper lifts captured
arguments to the level too, and under a jvp it derives the tangent from the user's backward.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from forall._api.function_vmap import by_own_rule
from forall._autodiff.double_backward import hooked
from forall._autodiff.jvp_by_double_vjp import push_by_rule
from forall._autodiff.once_differentiable import is_once, remember
from forall._autodiff.phase_errors import may_have_phases
from forall._compat import checkpoint, pytree, tensor_subclass
from forall._compat.devices import function_modes
from forall._compat.dispatch_state import (
    dispatch_modes,
    functions_are_off,
    functions_off,
    in_backward,
    in_torch_func,
    install_forward_level,
)
from forall._compat.private_api import BACKWARD_HOOK
from forall._compat.tensor_subclass import (
    Posed,
    bare,
    carried,
    posing,
    undressed,
)
from forall._compat.versions import apply_users
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import slow
from forall._core.escaped_values import left_over
from forall._core.levels import (
    Level,
    around_what_runs,
    at,
    deepest,
    is_from_outside,
    lift,
    outside,
    peels,
    stack,
    top,
)
from forall._core.recompute import as_made_by, may_carry_tangents, where_it_first_ran
from forall._random.key_scope import resuming
from forall._vmap.active_set.merge import for_those_asked
from forall._vmap.active_set.restrict_args import narrowed
from forall._vmap.function_mode import ITSELF, SHARING, sharing
from forall._vmap.mutation.view_copies import settle
from forall._vmap.registry import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    out = apply_users(by_own_rule(cls, args), *args, **kwargs)
    if is_once(cls) and torch.is_grad_enabled():
        remember(args, out)
    if stack.parted and (stack.again or not in_backward()):
        settle()  # writes inside the Function have their history only now
    return out


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch.autograd.Function.apply; under a level, captured tensors are lifted to it first."""
    out = _apply(cls, args, kwargs)
    return _with_history(out, args) if posing.used else out


def _with_history(out: Any, args: tuple) -> Any:
    """Return results with the history that autograd has given them, in the user's own classes."""
    if type(out) is tuple:
        return tuple([_with_history(o, args) for o in out])
    if not isinstance(out, Posed) or any(out is a for a in args):
        return out
    with functions_off():
        return carried(out.view_as(out), out)  # pyright: ignore[reportAttributeAccessIssue]


def _apply(cls: Any, args: tuple, kwargs: dict) -> Any:
    args, kwargs = left_over(args, kwargs)
    if stack.parted:
        args, kwargs, _ = narrowed(None, args, kwargs)
    running = top()
    level = deepest(tuple(map(bare, args)))
    if level is None or (running is not None and level.is_outside(running)):
        level = running
    if level is None:
        return _applied(cls, *args, **kwargs)
    if stack.parted and (stack.again or not in_backward()) and not functions_are_off():
        fit = narrowed(cls.apply, args, kwargs)
        if fit.stands:
            return fit.given(_apply(cls, fit.args, fit.kwargs))
    if torch.is_grad_enabled() and not getattr(level, "records_values", False):
        args = tuple(
            carried(lift(bare(a), level), a)
            if isinstance(a, torch.Tensor)
            and bare(a).requires_grad
            and is_from_outside(bare(a), level)
            else a
            for a in args
        )
    if in_torch_func() or not any(isinstance(a, torch.Tensor) and peels(bare(a)) for a in args):
        # Under a transform of torch.func, apply is called again with the values below it.
        with outside(level) if level.peels else nullcontext():
            return _applied(cls, *args, **kwargs)
    if cls is BACKWARD_HOOK:
        return _through(cls, args)
    return _with_tangents(cls, level, args, kwargs)


def _through(cls: Any, args: tuple) -> tuple:
    """Apply the node that modules register backward hooks on, at the innermost level."""
    outs = apply_users(cls, *args)
    for a, out in zip(args, outs, strict=True):
        if isinstance(a, Wrapper):  # torch makes new tensors of the values, without their tangents
            vars(out).update({k: v for k, v in vars(a.graph_free()).items() if k != "family"})
    return outs


def _with_tangents(cls: Any, level: Level, args: tuple, kwargs: dict) -> Any:
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    single: list[bool] = []
    others: list[Any] = []
    written: list[int | None] = []  # where an argument is the result, by mark_dirty
    known: list[torch.Tensor] = []  # the results as the user knows them

    def h(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(args)
        for i, t in zip(places, tensors, strict=True):
            made = t.clone() if t.requires_grad else t  # a leaf with grad cannot be written to
            filled[i] = carried(made, args[i])
        out = _applied(cls, *filled, **kwargs)
        single[:] = [isinstance(out, torch.Tensor)]
        outs = (out,) if single[0] else out
        others[:] = [None if isinstance(o, torch.Tensor) else o for o in outs]
        tensors = tuple(o for o in outs if isinstance(o, torch.Tensor))
        written[:] = [next((i for i in places if filled[i] is o), None) for o in tensors]
        known[:] = tensors
        return tuple(undressed(_with_history(o, ())) for o in tensors)

    if cls.jvp is not torch.autograd.Function.jvp:
        h = functools.partial(h)  # a reference cycle would wait for Python's collector
        vars(h)["rule"] = functools.partial(push_by_rule, h.func)
    # Values that are saved for a derivative must not change when an argument is written to.
    given = [undressed(args[i]) for i in places]
    found = at(level, h, tuple([x.clone() if x.requires_grad else x for x in given]))
    tensors = iter(
        [
            carried(y, o) if i is None else args[i].copy_(y)
            for i, y, o in zip(written, found, known, strict=True)
        ]
    )
    outs = tuple(next(tensors) if o is None else o for o in others)
    return outs[0] if single[0] else outs


def _function_mode() -> AbstractContextManager:
    """Return forall's function mode if a call of torch's, which ran without it, runs user code."""
    if sharing(top()) is None or function_modes() or functions_are_off():
        return nullcontext()
    return SHARING


def _hooks(outputs: Any, create_graph: bool) -> AbstractContextManager:
    """Return a context with forall's hooks for a backward pass of the user's, if any are needed."""
    under = bool(dispatch_modes())
    if not under and not may_have_phases():
        return nullcontext()
    with functions_off():
        return hooked(outputs, create_graph and under)


def _making(gradients: Any) -> AbstractContextManager | None:
    """Return a context for a user's backward whose level has exited; None if there is none."""
    level = deepest(pytree.leaves(gradients))
    if level is None or level.active:
        return None
    place = as_made_by(level)
    place.enter_context(_Captures(level))
    return place


class _Captures(TorchFunctionMode):
    """A function mode that lifts tensors captured by a user's backward to a level that has exited.

    A captured tensor is lifted before anything is computed from it. Otherwise its stand-in that the
    forward saved would not be among the inputs of a derivative.
    """

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asks = func is torch.autograd.grad
        if (asks or torch.is_grad_enabled()) and func not in ITSELF:
            written = 1 if func in IN_PLACE else 0  # the target itself, which gets the history
            with torch.enable_grad():
                rest, kwargs = self.level.share_captured(args[written:], kwargs)
            args = args[:written] + rest
        return func(*args, **kwargs)


def _theirs(gradients: tuple, found: Any) -> Any:
    """Restrict the result of a user's backward to the examples that the gradients are of."""
    return for_those_asked(gradients, found) if stack.ever_parted else found


def _within() -> Callable[[torch.Tensor], bool]:
    """Return a test for values of levels that are entered from now on.

    A recomputation enters other levels, whose values could not be mixed with these.
    """
    around = around_what_runs()

    def told(tensor: torch.Tensor) -> bool:
        while isinstance(tensor, Wrapper):
            root = tensor.level.root
            if root not in around and root.around >= around:
                slow(_KEPT)
                return True
            tensor = tensor.value
        return False

    return told


_KEPT = (
    "torch.utils.checkpoint: what a transform inside it saves is kept, not computed again.\n"
    "Put the checkpoint inside, as in vmap(lambda x: checkpoint(f, x, use_reentrant=False))."
)


def install() -> None:
    """Replace torch's Function.apply, once."""
    install_forward_level()
    checkpoint.install(
        where_it_first_ran,
        resuming,
        may_carry_tangents,
        _function_mode,
        _making,
        _theirs,
        _within,
        _hooks,
    )
    tensor_subclass.install()
    torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
