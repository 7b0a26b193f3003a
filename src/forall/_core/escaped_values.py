"""Values of levels that have ended: who may still act on them, and what is left for the user.

NOTE [what is left]
    A function keeps what it has computed: in a cache, in a hook. When its call is over, each call
    of the user's that meets such a value is given an ordinary tensor in its place, or one of the
    level outside that still runs. It is made once for each value (`left`), for its history is to
    lead through one node, and it is one tensor to whoever writes into it or asks for its gradient.
    Every way that calls take asks for it, above autograd: the function mode of `vmap` where one
    runs, the class of the wrapper elsewhere, and `Function.apply`, which passes neither. The other
    operators that reach a wrapper of an ended level are of C++ code, and asked below autograd.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import (
    autograd_below,
    functions_are_off,
    functions_off,
    in_backward,
    in_torch_func,
    outside_torch_func,
    users_tangents,
)
from forall._compat.private_api import subclass_functions_off
from forall._compat.tensor_subclass import (
    Posed,
    bare,
    carried,
    posing,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import columns, short
from forall._core.levels import (
    around_what_runs,
    innermost,
    levels_in,
    outside,
    second_name,
    stack,
)
from forall._core.recompute import entered_since

if TYPE_CHECKING:
    from forall._core.levels import Level


def is_over(level: Level) -> bool:
    """Whether a user's own code meets a value of this level after the level has ended.

    A backward pass, with its hooks, acts under ended levels by right; so does our own code, which
    no function mode is to see. What is computed again acts under those that it first ran in.
    """
    if level.active or not level.ends or functions_are_off():
        return False
    if stack.recomputes:
        return level.root not in around_what_runs()
    return not in_backward()


def meets_ended(args: Any, kwargs: dict | None = None) -> bool:
    """Whether any argument is a value of a level that has ended: a cheap look, at each call."""
    for a in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(a, Wrapper):
            if not a.level.active:
                return True
        elif posing.used and isinstance(a, Posed):
            if not bare(a).level.active:
                return True
        elif type(a) in _SEQUENCES and meets_ended(a):
            return True
    return False


_SEQUENCES = frozenset({list, tuple})


def dispatched(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that no mode took: of our own code, in a backward pass, or after the call."""
    level = innermost(levels_in(args, kwargs))
    if not is_over(level):
        return level.run(func, args, kwargs)
    if torch.is_grad_enabled() and func is not _DETACH:
        for a in (*args, *kwargs.values()):
            _refuse_recorded(func, a)
    return level.run_afterwards(func, args, kwargs)


def _refuse_recorded(func: Any, a: Any) -> None:
    """Autograd, which has made its node already, would not see the history of what is left."""
    if isinstance(a, Wrapper) and a.requires_grad and what_is_left(a) is not a:
        raise NotImplementedError(
            f"{func} takes a value that was kept from a call which has ended, by a way on which "
            f"its history cannot follow.\n{columns([('value', short(a))])}\n"
            "Give code that is not Python, as TorchScript's, a clone of it (.clone())."
        )


_DETACH = torch.ops.aten.detach.default


def called(func: Any, args: tuple, kwargs: dict) -> Any:
    """A call that the class of a wrapper is asked for, since no function mode of ours runs."""
    with subclass_functions_off():
        args, kwargs = left_over(args, kwargs)
        found = levels_in(args, kwargs)
        level = innermost(found) if found and torch.is_grad_enabled() else None
        if level is not None and not is_over(level):  # it acts again, in a backward pass
            args, kwargs = level.share_captured(args, kwargs)
        return func(*args, **kwargs)


def left_over(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a user's call, ordinary tensors for what ended levels leave of them."""
    if not meets_ended(args, kwargs):
        return args, kwargs
    return tuple(map(what_is_left, args)), {k: what_is_left(a) for k, a in kwargs.items()}


def what_is_left(a: Any) -> Any:
    """An argument, or list of some, without ended levels; one value per example stays as it is."""
    if type(a) in _SEQUENCES:
        return type(a)(map(what_is_left, a))
    if posing.used and isinstance(a, Posed):
        found = what_is_left(bare(a))
        return a if found is bare(a) else carried(found, a)
    while isinstance(a, Wrapper) and is_over(a.level):
        found = left(a)
        if found is a:
            break
        a = found
    return a


def flatten(tree: Any) -> tuple[list, pytree.TreeSpec]:
    """Leaves and shape of what a transform is given, without what ended levels hold."""
    leaves, spec = pytree.flatten(tree)
    return ([*map(what_is_left, leaves)] if meets_ended(leaves) else leaves), spec


def left(a: Wrapper) -> torch.Tensor:
    """What an ended level leaves of one of its values, or the value itself where it is of many."""
    if a.left is not None and a.left[0] is a.value:
        return a.left[1]
    if in_torch_func():
        with outside_torch_func():
            return left(a)
    since = entered_since(a.level)  # a value came from outside of what runs now
    with (
        torch.inference_mode(False),
        nullcontext() if since is None else outside(since),
        functions_off(),
        autograd_below(grad=True, forward=True),
    ):
        found = _leaf(a) if a.requires_grad and a.is_leaf else a.level.kept(a)
    if found is not a and not users_tangents():  # which end before the value does
        a.left = a.value, found
    return found


def _leaf(a: Wrapper) -> torch.Tensor:
    """Of a variable a variable is left, which has the gradients of what the call made of it too."""
    bare = a.graph_free()
    found = a.level.kept(bare)
    if found is bare:
        return a
    variable = second_name(found).requires_grad_()
    level = a.level

    def hand_on(a: torch.Tensor) -> None:
        with functions_off():
            gradient, a.grad = a.grad, None
            if gradient is not None:
                variable.backward(level.gathered(gradient))

    hand_on(a)
    a.register_post_accumulate_grad_hook(hand_on)
    return variable
