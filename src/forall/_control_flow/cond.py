"""`cond` and `switch`: one of several functions runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._control_flow.loop_carry import OperatorCall
from forall._control_flow.merge_branches import run_either
from forall._core.errors import format_columns, format_short, type_name_of
from forall._core.levels import stack
from forall._vmap.concretize_listeners import notify_listeners

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def cond(
    pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any
) -> Any:
    """``true_fun`` or ``false_fun`` of the operands, as ``pred`` says.

    The law: ``cond(pred, f, g, *xs)`` equals ``f(*xs) if pred else g(*xs)``, under every transform.

    Cost: that of the function that is taken. The other one does not run, so it may hold what would
    fail, never end or have no derivative there.

    Args:
        pred: one number, or a tensor that holds one; anything but zero is true.
        true_fun: takes the operands, which may be trees, and what it captures.
        false_fun: the same.

    Raises:
        TypeError: for a ``pred`` that holds several numbers, and a branch that cannot be called.

    Source: ``jax.lax.cond``. There both branches run where examples differ.

    Example:
        >>> def root(x):
        ...     return cond(x > 0, torch.sqrt, torch.zeros_like, x)
        >>> forall.grad(root)(torch.tensor(-4.0))        # of sqrt it would be nan
        tensor(0.)
    """
    call = OperatorCall("cond(pred, *)", true_fun, false_fun)
    if stack.listening:
        notify_listeners()
    return run_either(call, pred, partial(true_fun, *operands), partial(false_fun, *operands))


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """The branch of this index, of the operands.

    The law: ``switch(i, fs, *xs)`` equals ``fs[min(max(i, 0), len(fs) - 1)](*xs)``, under every
    transform: an index outside takes the nearest branch.

    Cost: that of the branch that is taken. The others do not run.

    Args:
        index: an int, or an integer tensor that holds one number.
        branches: at least one function. They take the operands, which may be trees.

    Raises:
        TypeError: for an ``index`` that is not one whole number, and for a branch that cannot be
            called.
        ValueError: for no branches.

    Source: ``jax.lax.switch``. There all branches run where examples differ.

    Example:
        >>> x = torch.tensor([1.0, 4.0])
        >>> [switch(i, [torch.neg, torch.sqrt], x).tolist() for i in (0, 1, 7)]
        [[-1.0, -4.0], [1.0, 2.0], [1.0, 2.0]]
    """
    branches = tuple(branches)
    call = OperatorCall("switch(index, [*])", *branches)
    if not branches:
        raise documented_error(ValueError, "not-callable")(
            f"{call}: there is no branch.\nPass at least one function."
        )
    _check_branch_index(call, index)
    if stack.listening:
        notify_listeners()
    if isinstance(index, int):
        return branches[min(max(index, 0), len(branches) - 1)](*operands)

    return _search_branch(call, index, [partial(branch, *operands) for branch in branches])


def _search_branch(
    call: OperatorCall, index: torch.Tensor, branches: list[Callable], first: int = 0
) -> Any:
    """Run the branch of this index by a binary search; the first branch has index ``first``."""
    if len(branches) == 1:
        return branches[0]()
    half = (len(branches) + 1) // 2
    low = partial(_search_branch, call, index, branches[:half], first)
    high = partial(_search_branch, call, index, branches[half:], first + half)
    return run_either(call, index < first + half, low, high)


def _check_branch_index(call: OperatorCall, index: Any) -> None:
    if isinstance(index, int):
        return
    if isinstance(index, torch.Tensor):
        with functions_off():
            whole = not (index.is_floating_point() or index.is_complex())
            if whole and index.numel() == 1 and index.dtype != torch.bool:
                return
    raise documented_error(TypeError, "one-number")(
        f"{call}: the index must be one whole number.\n"
        f"{format_columns([('index', format_short(index), type_name_of(index))])}\n"
        "Pass an int, or a tensor of shape () with a dtype of integers: index.long()."
    )
