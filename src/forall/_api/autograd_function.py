"""Custom autograd.Functions under levels: the user's backward decides every derivative.

Function modes do not see Function.apply, so it is wrapped once. The wrapper lifts captured
arguments to the level too, and under a jvp it derives the tangent from the user's backward.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from forall._api.function_vmap import derive_function, find_batched_form
from forall._autodiff.jvp_by_double_vjp import make_rule_push
from forall._autodiff.once_differentiable import is_once_differentiable, link_inputs
from forall._autodiff.phase_errors import may_have_phases
from forall._autodiff.reverse_mode import hook_backward_nodes
from forall._compat import checkpoint, pytree, tensor_subclass
from forall._compat.custom_op import renew_dispatch_keys
from forall._compat.devices import count_function_modes
from forall._compat.dispatch_state import (
    functions_are_off,
    functions_off,
    in_torch_func,
    install_forward_level,
    is_in_backward,
)
from forall._compat.private_api import BACKWARD_HOOK, count_dispatch_modes
from forall._compat.tensor_subclass import (
    PosedTensor,
    posing,
    restore_users_class,
    strip_users_class,
    unwrap_posed,
)
from forall._compat.versions import apply_users
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import warn_slow_path
from forall._core.escaped_values import replace_escaped_args
from forall._core.levels import (
    Level,
    apply_at_level,
    find_innermost_of,
    is_from_outside,
    is_recorded_on_value,
    levels_around_current,
    lift,
    may_carry_tangents,
    run_outside,
    stack,
    top,
)
from forall._core.recompute import CreateForLevel, bind_original_context, set_entry_point
from forall._random.key_scope import resume_draws
from forall._vmap.active_set.merge import restrict_users_gradients
from forall._vmap.active_set.restrict_args import restrict_args
from forall._vmap.function_mode import ITSELF, VMAP_FUNCTIONS, find_sharing_level
from forall._vmap.mutation.view_copies import sync_aliases
from forall._vmap.registry import IN_PLACE
from forall._vmap.vmap_level import CotangentLevel

if TYPE_CHECKING:
    from collections.abc import Callable


def _apply_users_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    out = apply_users(find_batched_form(cls, args), *args, **kwargs)
    if is_once_differentiable(cls) and torch.is_grad_enabled():
        link_inputs(args, out)
    if stack.diverged and (stack.again or not is_in_backward()):
        sync_aliases()  # writes inside the Function have their history only now
    return out


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch.autograd.Function.apply; under a level, captured tensors are lifted to it first."""
    out = _apply_under_level(cls, args, kwargs)
    return _with_history(out, args) if posing.used else out


def _with_history(out: Any, args: tuple) -> Any:
    """Return results with the history that autograd has given them, in the user's own classes."""
    if type(out) is tuple:
        return tuple([_with_history(o, args) for o in out])
    if not isinstance(out, PosedTensor) or any(out is a for a in args):
        return out
    with functions_off():
        return restore_users_class(out.view_as(out), out)  # pyright: ignore[reportAttributeAccessIssue]


def _apply_under_level(cls: Any, args: tuple, kwargs: dict) -> Any:
    args, kwargs = replace_escaped_args(args, kwargs)
    if stack.diverged:
        args, kwargs, _ = restrict_args(None, args, kwargs)
    running = top()
    level = find_innermost_of(tuple(map(unwrap_posed, args)))
    if level is None or (running is not None and level.is_outside(running)):
        level = running
    if level is None:
        return _apply_users_function(cls, *args, **kwargs)
    if stack.diverged and (stack.again or not is_in_backward()) and not functions_are_off():
        fit = restrict_args(cls.apply, args, kwargs)
        if fit.stands:
            return fit.restore_identity(_apply_under_level(cls, fit.args, fit.kwargs))
    if torch.is_grad_enabled() and not isinstance(level, CotangentLevel):
        args = tuple(
            restore_users_class(lift(unwrap_posed(a), level), a)
            if isinstance(a, torch.Tensor)
            and unwrap_posed(a).requires_grad
            and is_from_outside(unwrap_posed(a), level)
            else a
            for a in args
        )
    if in_torch_func() or not any(
        isinstance(a, torch.Tensor) and is_recorded_on_value(unwrap_posed(a)) for a in args
    ):
        # Under a transform of torch.func, apply is called again with the values below it.
        with run_outside(level) if level.records_on_value else nullcontext():
            return _apply_users_function(cls, *args, **kwargs)
    if cls is BACKWARD_HOOK:
        return _apply_backward_hook(cls, args)
    return _apply_with_tangents(cls, level, args, kwargs)


def _apply_backward_hook(cls: Any, args: tuple) -> tuple:
    """Apply the node that modules register backward hooks on, at the innermost level."""
    outs = apply_users(cls, *args)
    for a, out in zip(args, outs, strict=True):
        if isinstance(a, Wrapper):  # torch makes new tensors of the values, without their tangents
            vars(out).update({k: v for k, v in vars(a.graph_free()).items() if k != "family"})
    return outs


def _find_form_with_views(cls: Any) -> Any:
    """Return ``cls`` with a ``jvp`` that may give tangents on as they are, as in torch.func."""
    found = _forms.get(cls)
    if found is None:
        found = _forms[cls] = derive_function(cls, "jvp", _return_views(cls.jvp))
    return found


def _return_views(jvp: Callable) -> Callable:
    def jvp_with_views(ctx: Any, *tangents: Any) -> Any:
        before = [(t, t._version) for t in tangents if isinstance(t, torch.Tensor)]

        def view(out: Any) -> Any:  # unless it was written to, as for an argument marked dirty
            is_same = any(out is t and out._version == version for t, version in before)
            return out.view_as(out) if is_same else out

        outs = jvp(ctx, *tangents)
        return tuple(map(view, outs)) if type(outs) is tuple else view(outs)

    return jvp_with_views


_forms: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _apply_with_tangents(cls: Any, level: Level, args: tuple, kwargs: dict) -> Any:
    has_jvp = cls.jvp is not torch.autograd.Function.jvp
    applied = _find_form_with_views(cls) if has_jvp else cls
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    single: list[bool] = []
    others: list[Any] = []
    written: list[int | None] = []  # where an argument is the result, by mark_dirty
    known: list[torch.Tensor] = []  # the results as the user knows them

    def h(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(args)
        for i, t in zip(places, tensors, strict=True):
            made = t.clone() if t.requires_grad else t  # a leaf with grad cannot be written to
            filled[i] = restore_users_class(made, args[i])
        out = _apply_users_function(applied, *renew_dispatch_keys(filled), **kwargs)
        single[:] = [isinstance(out, torch.Tensor)]
        outs = (out,) if single[0] else out
        others[:] = [None if isinstance(o, torch.Tensor) else o for o in outs]
        tensors = tuple(o for o in outs if isinstance(o, torch.Tensor))
        written[:] = [next((i for i in places if filled[i] is o), None) for o in tensors]
        known[:] = tensors
        return tuple(strip_users_class(_with_history(o, ())) for o in tensors)

    if has_jvp:
        h = functools.partial(h)  # a reference cycle would wait for Python's collector
        vars(h)["rule"] = functools.partial(make_rule_push, h.func)
    # Values that are saved for a derivative must not change when an argument is written to.
    given = [strip_users_class(args[i]) for i in places]
    found = apply_at_level(level, h, tuple([x.clone() if x.requires_grad else x for x in given]))
    tensors = iter(
        [
            restore_users_class(y, o) if i is None else args[i].copy_(y)
            for i, y, o in zip(written, found, known, strict=True)
        ]
    )
    outs = tuple(next(tensors) if o is None else o for o in others)
    return outs[0] if single[0] else outs


def _reenter_function_mode() -> AbstractContextManager:
    """Return forall's function mode if a call of torch's, which ran without it, runs user code."""
    if find_sharing_level(top()) is None or count_function_modes() or functions_are_off():
        return nullcontext()
    return VMAP_FUNCTIONS


def _hook_users_pass(outputs: Any, create_graph: bool) -> AbstractContextManager:
    """Return a context with forall's hooks for a backward pass of the user's, if any are needed."""
    under = bool(count_dispatch_modes())
    if not under and not may_have_phases():
        return nullcontext()
    with functions_off():
        return hook_backward_nodes(outputs, create_graph and under)


def _enter_exited_level(gradients: Any) -> AbstractContextManager | None:
    """Return a context for a user's backward whose level has exited; None if there is none."""
    level = find_innermost_of(pytree.get_leaves(gradients))
    if level is None or level.active:
        return None
    place = CreateForLevel(level)
    # Transforms that the backward calls are inside of the level, whose values they are given.
    place.enter_context(set_entry_point(level, None, recomputes=False))
    place.enter_context(_CaptureMode(level))
    return place


class _CaptureMode(TorchFunctionMode):
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


def _merge_users_gradients(gradients: tuple, found: Any) -> Any:
    """Restrict the result of a user's backward to the examples that the gradients are of."""
    return restrict_users_gradients(gradients, found) if stack.ever_parted else found


def _make_inner_level_test() -> Callable[[torch.Tensor], bool]:
    """Return a test for values of levels that are entered from now on.

    A recomputation enters other levels, whose values could not be mixed with these.
    """
    around = levels_around_current()

    def is_of_inner_level(tensor: torch.Tensor) -> bool:
        while isinstance(tensor, Wrapper):
            root = tensor.level.root
            if root not in around and root.entry.around >= around:
                warn_slow_path(_KEPT)
                return True
            tensor = tensor.value
        return False

    return is_of_inner_level


_KEPT = (
    "torch.utils.checkpoint: what a transform inside it saves is kept, not computed again.\n"
    "Put the checkpoint inside, as in vmap(lambda x: checkpoint(f, x, use_reentrant=False))."
)


def install_functions() -> None:
    """Replace torch's Function.apply, once."""
    install_forward_level()
    checkpoint.install_checkpoint_hooks(
        bind_original_context,
        resume_draws,
        may_carry_tangents,
        _reenter_function_mode,
        _enter_exited_level,
        _merge_users_gradients,
        _make_inner_level_test,
        _hook_users_pass,
    )
    tensor_subclass.install_posed_tensors()
    torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
