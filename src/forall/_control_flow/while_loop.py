"""`while_loop` and `fori_loop`: a body runs until a test fails, or so many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._control_flow.loop_carry import OperatorCall, check_carry
from forall._control_flow.merge_branches import LoopExits, describe_examples, evaluate_predicate
from forall._core.errors import format_columns, format_short, type_name_of
from forall._core.levels import stack
from forall._vmap.active_set.active_mask import get_active_set
from forall._vmap.concretize_listeners import notify_listeners

if TYPE_CHECKING:
    from collections.abc import Callable


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    checkpoint_every: int | None = None,
) -> Any:
    """``body_fun`` of its own result, for as long as ``cond_fun`` of it holds.

    The law, under every transform, is that of

        val = init_val
        while cond_fun(val):
            val = body_fun(val)
        return val

    but that ``val`` keeps its structure, and its shapes, dtypes and devices. A Python number in
    ``init_val`` may become a tensor of shape (), which then keeps its dtype.

    Cost: what each step costs. Reverse mode keeps what each step needs for its derivative.

    Args:
        cond_fun: gives one number, or a tensor that holds one; anything but zero is true.
        body_fun: takes and returns a tree of tensors and numbers.
        max_steps: how often the body may run before the loop is taken for endless.
        checkpoint_every: keep for reverse mode only what the loop carries, at every so many steps,
            and run the steps between once more in the backward pass: memory for ``steps / k``
            carries and for ``k`` steps, for the time of one more forward pass. Changes no value.
            From where examples of `vmap` part everything is kept.

    Raises:
        TypeError: where a step returns another structure, shape, dtype or device than it was given,
            and for a test that holds several numbers.
        RuntimeError: after ``max_steps`` steps.
        ValueError: for a ``max_steps`` below 0 and a ``checkpoint_every`` below 1.

    Source: ``jax.lax.while_loop``, which has no reverse mode. Checkpoints: Griewank, "Achieving
    logarithmic growth of temporal and spatial complexity in reverse automatic differentiation"
    (1992), at one level.

    Example:
        >>> def root(a):                                 # Newton's method
        ...     far = lambda x: (x * x - a).abs() > 1e-5
        ...     return while_loop(far, lambda x: (x + a / x) / 2, torch.ones_like(a))
        >>> forall.grad_and_value(root)(torch.tensor(9.0))
        (tensor(0.1667), tensor(3.))
    """
    call = OperatorCall("while_loop(*)", cond_fun, body_fun)
    _check_at_least(call, "max_steps", max_steps, 0)
    _check_at_least(call, "checkpoint_every", checkpoint_every, 1)
    loop = LoopRunner(call, lambda _, val: cond_fun(val), lambda _, val: body_fun(val), max_steps)
    val, steps, going = init_val, 0, True
    while going and checkpoint_every is not None and not get_active_set().parts:
        stop = steps + checkpoint_every
        val, steps, going = checkpoint(loop.run, val, steps, stop, use_reentrant=False)
        if going and steps < stop:  # examples diverge, and a backward pass runs for all of them
            break
    return loop.run(val, steps)[0] if going else val


class LoopRunner:
    """The steps of a loop. Its test and body take the number of steps so far."""

    __slots__ = ("body", "call", "max_steps", "test")

    def __init__(
        self, call: OperatorCall, test: Callable, body: Callable, max_steps: int | None = None
    ) -> None:
        self.call = call
        self.test = test
        self.body = body
        self.max_steps = max_steps

    def run(self, val: Any, steps: int, stop: int | None = None) -> tuple[Any, int, bool]:
        """Run from this step on; return the carry, the step, and True if more steps may follow.

        With a ``stop``, run at most to that step, or until examples diverge.
        """
        with LoopExits(self.call) as leaving:
            while steps != stop:
                test = self.test(steps, val)
                if stack.listening:
                    notify_listeners()
                answer = evaluate_predicate(self.call, "the test", test)
                if answer is False:
                    return leaving.join_all(val), steps, False
                if answer is not True:
                    if stop is not None:
                        break
                    val = leaving.let_leave(*answer, val)
                if steps == self.max_steps:
                    raise self._endless(val)
                val = check_carry(self.call, "carry", val, self.body(steps, val), steps)
                steps += 1
            return leaving.join_all(val), steps, True

    def _endless(self, val: Any) -> RuntimeError:
        rows = [(describe_examples(get_active_set()), "carry", format_short(val))]
        return documented_error(RuntimeError, "max-steps")(
            f"{self.call}: the loop goes on after max_steps={self.max_steps} steps.\n"
            f"{format_columns(rows)}\n"
            "Allow more steps, or let the test end the loop sooner."
        )


def _check_at_least(call: OperatorCall, name: str, value: Any, least: int) -> None:
    if value is not None and (not isinstance(value, int) or value < least):
        raise documented_error(ValueError, "count-of-steps")(
            f"{call}: {name} counts steps.\n"
            f"{format_columns([(name, format_short(value), type_name_of(value))])}\n"
            f"Pass an int of at least {least}, or None."
        )


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """``body_fun`` of each number from ``lower`` to below ``upper``, and of its own result.

    The law, under every transform, is that of

        i, val = lower, init_val
        while i < upper:
            i, val = i + 1, body_fun(i, val)
        return val

    so ``i`` is an int where ``lower`` is one, and a tensor where ``lower`` is one. What ``val``
    keeps, and what a Python number in it may become, is as in `while_loop`.

    Cost: ``upper - lower`` steps.

    Args:
        lower: an int, or an integer tensor that holds one number.
        upper: the same. It may differ between the examples of `vmap`, as ``lower`` may.
        body_fun: takes ``i`` and a tree of tensors and numbers, and returns a tree like it.
        unroll: accepted as ``jax.lax`` has it. Nothing is compiled here, so it changes nothing.

    Raises:
        TypeError: for bounds that are not whole numbers, and as `while_loop`.

    Source: ``jax.lax.fori_loop``.

    Example:
        >>> powers = lambda x: fori_loop(0, 3, lambda i, y: y * x + i, torch.ones(()))
        >>> powers(torch.tensor(2.0))                    # ((1 * 2 + 0) * 2 + 1) * 2 + 2
        tensor(12.)
    """
    call = OperatorCall("fori_loop(lower, upper, *)", body_fun)
    for name, bound in (("lower", lower), ("upper", upper)):
        _check_bound(call, name, bound)
    test, body = lambda n, _: lower + n < upper, lambda n, val: body_fun(lower + n, val)
    return LoopRunner(call, test, body).run(init_val, 0)[0]


def _check_bound(call: OperatorCall, name: str, bound: Any) -> None:
    if isinstance(bound, torch.Tensor):
        with functions_off():
            whole = not (bound.is_floating_point() or bound.is_complex())
            if whole and bound.numel() == 1:
                return
    elif isinstance(bound, int):
        return
    raise documented_error(TypeError, "one-number")(
        f"{call}: {name} must be one whole number.\n"
        f"{format_columns([(name, format_short(bound), type_name_of(bound))])}\n"
        "Pass an int, or a tensor of shape () with a dtype of integers."
    )
