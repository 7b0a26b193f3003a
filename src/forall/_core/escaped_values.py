"""Escaped values: wrappers that outlive their level, and the tensors that users get for them.

NOTE [what is left]
    A function may keep values that it has computed: in a cache, in a hook. When its level has
    ended, a user's call on such a value gets a fallback value in its place: an ordinary tensor, or
    a value of an outer level that is still active. `find_fallback` makes one fallback value each.
    So its history leads through one node, and writes and gradients meet one tensor.

    Calls are intercepted above autograd: by the function mode of `vmap` where one is active, by the
    wrapper's class elsewhere, and by `Function.apply`, which passes neither. All other operators
    that reach a wrapper of an ended level come from C++ code, and are intercepted below autograd.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import (
    enable_autograd_below,
    functions_are_off,
    functions_off,
    has_users_tangents,
    in_torch_func,
    is_in_backward,
    outside_torch_func,
)
from forall._compat.documented_error import documented_error
from forall._compat.private_api import subclass_functions_off
from forall._compat.tensor_subclass import (
    PosedTensor,
    posing,
    restore_users_class,
    unwrap_posed,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import format_columns, format_short
from forall._core.levels import (
    alias_for_autograd,
    find_innermost,
    levels_around_current,
    levels_in,
    run_outside,
    stack,
)
from forall._core.recompute import find_level_entered_since

if TYPE_CHECKING:
    from forall._core.levels import Level


def is_escape_from(level: Level) -> bool:
    """True if ``level`` has ended and the running code is the user's, who must not see its values.

    Backward passes and their hooks may use values of ended levels, and so may our own code, which
    runs with function modes off. Recomputed code may use values of the levels that it first ran in.
    """
    if level.active or not level.ends or functions_are_off():
        return False
    if stack.recomputes:
        return level.root not in levels_around_current()
    return not is_in_backward()


def has_escaped_values(args: Any, kwargs: dict | None = None) -> bool:
    """True if any argument is a value of a level that has ended. Each call checks this first."""
    for a in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(a, Wrapper):
            if not a.level.active:
                return True
        elif posing.used and isinstance(a, PosedTensor):
            if not unwrap_posed(a).level.active:
                return True
        elif type(a) in _SEQUENCES and has_escaped_values(a):
            return True
    return False


_SEQUENCES = frozenset({list, tuple})


def dispatch_without_mode(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator that no mode took: of our own code, in a backward pass, or after the call."""
    level = find_innermost(levels_in(args, kwargs))
    if not is_escape_from(level):
        return level.run(func, args, kwargs)
    if torch.is_grad_enabled() and func is not _DETACH:
        for a in (*args, *kwargs.values()):
            _refuse_escaped_history(func, a)
    return level.run_after_exit(func, args, kwargs)


def _refuse_escaped_history(func: Any, a: Any) -> None:
    """Raise if ``a`` is an escaped value with a history.

    Autograd has made the operator's node already, so it would miss the history of the fallback.
    """
    if isinstance(a, Wrapper) and a.requires_grad and replace_escaped(a) is not a:
        raise documented_error(NotImplementedError, "escaped-value")(
            f"{func} takes a value that was kept from a call which has ended, by a way on which "
            f"its history cannot follow.\n{format_columns([('value', format_short(a))])}\n"
            "Give code that is not Python, as TorchScript's, a clone of it (.clone())."
        )


_DETACH = torch.ops.aten.detach.default


def call_without_mode(func: Any, args: tuple, kwargs: dict, override: Any = None) -> Any:
    """Run a call that reaches a wrapper's class because no function mode of ours is active.

    ``override`` is what the call means for a level's values, if torch's own code cannot make it.
    """
    with subclass_functions_off():
        args, kwargs = replace_escaped_args(args, kwargs)
        found = levels_in(args, kwargs)
        level = find_innermost(found) if found else None
        if level is not None and not is_escape_from(level):  # it acts again, in a backward pass
            if torch.is_grad_enabled():
                args, kwargs = level.share_captured(args, kwargs)
            if override is not None:
                out = override(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        return func(*args, **kwargs)


def replace_escaped_args(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a user's call with fallback values for escaped ones."""
    if not has_escaped_values(args, kwargs):
        return args, kwargs
    return tuple(map(replace_escaped, args)), {k: replace_escaped(a) for k, a in kwargs.items()}


def replace_escaped(a: Any) -> Any:
    """Return an argument, or a list or tuple of them, with fallback values for escaped ones.

    A value that has no fallback, as it differs between the examples, stays as it is.
    """
    if type(a) in _SEQUENCES:
        return type(a)(map(replace_escaped, a))
    if posing.used and isinstance(a, PosedTensor):
        found = replace_escaped(unwrap_posed(a))
        return a if found is unwrap_posed(a) else restore_users_class(found, a)
    while isinstance(a, Wrapper) and is_escape_from(a.level):
        found = find_fallback(a)
        if found is a:
            break
        a = found
    return a


def flatten_without_escaped(tree: Any) -> tuple[list, pytree.TreeSpec]:
    """Flatten a tree of a transform's arguments, with fallback values for escaped leaves."""
    leaves, spec = pytree.flatten(tree)
    return ([*map(replace_escaped, leaves)] if has_escaped_values(leaves) else leaves), spec


def find_fallback(a: Wrapper) -> torch.Tensor:
    """Return the fallback value of an escaped value, or the value itself if it has none.

    A value has no fallback if it differs between the examples.
    """
    if a.left is not None and a.left[0] is a.value:
        return a.left[1]
    if in_torch_func():
        with outside_torch_func():
            return find_fallback(a)
    since = find_level_entered_since(a.level)  # a value came from outside of what runs now
    with (
        torch.inference_mode(False),
        nullcontext() if since is None else run_outside(since),
        functions_off(),
        enable_autograd_below(grad=True, forward=True),
    ):
        found = (
            _make_fallback_leaf(a)
            if a.requires_grad and a.is_leaf
            else a.level.fallback_with_history(a)
        )
    if found is not a and not has_users_tangents():  # which end before the value does
        a.left = a.value, found
    return found


def _make_fallback_leaf(a: Wrapper) -> torch.Tensor:
    """Return the fallback of a leaf variable: a leaf that also gets the gradients of ``a``."""
    bare = a.graph_free()
    found = a.level.fallback_with_history(bare)
    if found is bare:
        return a
    variable = alias_for_autograd(found).requires_grad_()
    level = a.level

    def forward_gradient(a: torch.Tensor) -> None:
        with functions_off():
            gradient, a.grad = a.grad, None
            if gradient is not None:
                variable.backward(level.fallback_gradient(gradient))

    forward_gradient(a)
    a.register_post_accumulate_grad_hook(forward_gradient)
    return variable
