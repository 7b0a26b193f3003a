"""Forward mode by two reverse passes (the double-backward trick), where no forward formula exists.

The pull-back u -> J^T u is linear in u, so its own pull-back is the push-forward t -> J t. A custom
autograd.Function that has a backward but no jvp gets its tangent so: from that backward, never from
the operators of its forward.

Source: Townsend, "A new trick for calculating Jacobian vector products" (2017).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.decompositions.backwards import BACKWARD
from forall._autodiff.decompositions.table import READS_RESULTS, find_decomposition
from forall._autodiff.dual_tensor import DualLevel, DualTensor, make_dual, unpack_dual, wrap_dual
from forall._autodiff.reverse_mode import (
    VariableScope,
    compute_gradients,
    detach_from_run,
    make_leaf,
    make_variable,
    pull_back,
    select_enclosed,
)
from forall._compat import pytree, rng_state
from forall._compat.dispatch_state import (
    enable_autograd_below,
    enable_forward_mode,
    functions_off,
    hold_forward_level,
    no_dispatch,
)
from forall._compat.documented_error import documented_error
from forall._compat.exception_safety import contextmanager
from forall._compat.lazy_bits import attach_tangent
from forall._compat.private_api import split_tangent
from forall._compat.trace_modes import is_compiler_tensor
from forall._compat.versions import apply_users
from forall._compat.wrapper_tensor import unwrap_all
from forall._core.levels import (
    apply_at_level,
    find_innermost_of,
    graph_free,
    lift,
    map_with_rule,
    run_outside,
    stack,
    top,
)
from forall._random.key_scope import resume_draws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Function = Callable[..., tuple[torch.Tensor, ...]]


def lower_function(h: Function, args: tuple, level: DualLevel) -> tuple:
    """Run ``h``, a function of tensors of the next outer level, on values of ``level``."""
    args = tuple(lift(a, level) for a in args)
    if torch.is_grad_enabled() and any(a.requires_grad for a in args):
        return apply_users(_LoweredFunction, h, level, *args)
    return _push_or_record(h, args, level)[0]


def push_through_levels(h: Function, args: tuple, level: DualLevel) -> tuple:
    """Run ``h`` on values of ``level``; outer levels that are differentiated push it likewise."""

    def further_out(h: Function) -> Function:
        def run_there(*values: torch.Tensor) -> tuple:
            return apply_at_level(level.parent, h, values)

        return run_there

    return lower_function(map_with_rule(h, further_out), args, level)


def make_rule_push(h: Function, moving: Sequence[int], counts: list[int]) -> Function:
    """Return the push-forward of ``h`` in torch's forward mode.

    It takes the arguments, then tangents of the arguments ``moving``. It returns the results of
    ``h``, whose number it stores in ``counts``, then tangents of those that can have one. It calls
    a custom Function's own ``jvp``.
    """

    def push(*both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(both[: len(both) - len(moving)])
        with enable_forward_mode():
            for i, t in zip(moving, both[len(given) :], strict=True):
                given[i] = attach_tangent(given[i], t)
            halves = [split_tangent(y, level=0) for y in h(*given)]
        counts[:] = [len(halves)]
        tangents = (
            torch.zeros_like(y) if t is None else t for y, t in halves if _can_have_tangent(y)
        )
        return (*(y for y, _ in halves), *tangents)

    return push


def _push_or_record(
    h: Function, args: tuple, level: DualLevel, asked: Sequence[int] = ()
) -> tuple[tuple, list]:
    """Return values and tangents of ``h``, also if the tangents are recorded on a tape."""
    if level.tapes is not None and level.outer_grad and getattr(h, "enters", False):
        return _record_step(repeat_draws(h, args), args, level, asked)
    return _push_forward(h, args, level, asked)


def _record_step(
    h: Function, args: tuple, level: DualLevel, asked: Sequence[int]
) -> tuple[tuple, list]:
    """Record ``h`` as one step of the tangent program, which differentiates it with each push.

    If ``h`` lifts its values to a level of its own, a tape inside it would have no history, which
    is on that level's wrappers.
    """
    with run_outside(level), enable_autograd_below(grad=True, forward=False):
        pairs = [unpack_dual(a, level) for a in args]
        n = len(pairs)
        moving = [i for i, (_, t) in enumerate(pairs) if t is not None]
        values: list[tuple[torch.Tensor | None, bool]] = []  # each with True if it is constant

        def step(*both: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = list(both[:n])
            with hold_forward_level(), torch.enable_grad():
                here: DualLevel = type(level)(top(), outer_grad=True)
                for i, t in zip(moving, both[n:], strict=True):
                    given[i] = make_dual(given[i], t, here)
                outs, constant = _push_forward(h, tuple(given), here, asked)
                halves = [(y, None) if y is None else unpack_dual(y, here) for y in outs]
            still = set(map(id, constant))
            values[:] = [(y, id(o) in still) for o, (y, _) in zip(outs, halves, strict=True)]
            return tuple(
                torch.zeros_like(y) if t is None else t for y, t in halves if _can_have_tangent(y)
            )

        tangents = (t for _, t in pairs if t is not None)
        noted = iter(level.tapes.record_step(step, (*(x for x, _ in pairs), *tangents)))
        out, constant = [], []
        for y, is_constant in values:
            if y is not None:
                y = (
                    make_dual(y, next(noted), level)
                    if _can_have_tangent(y)
                    else wrap_dual(y, level)
                )
            out.append(y)
            if is_constant:
                constant.append(y)
    return tuple(out), constant


def _can_have_tangent(y: torch.Tensor | None) -> bool:
    return y is not None and (y.is_floating_point() or y.is_complex())


def push_by_transposing(func: Any, args: tuple, kwargs: dict, level: DualLevel) -> Any:
    """Run an operator on values of ``level``, with tangents from torch's backward of it."""
    flat, spec = pytree.flatten((args, kwargs))
    places = [i for i, a in enumerate(flat) if type(a) is DualTensor]
    shape: list[Any] = []

    def h(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(flat)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        a, k = pytree.unflatten(filled, spec)
        outs, out_spec = pytree.flatten(func(*a, **k))
        shape[:] = [out_spec]
        return tuple(outs)

    vars(h)["is_of_torch"] = func.namespace == "aten"
    outs = lower_function(h, tuple(graph_free(flat[i]) for i in places), level)
    return pytree.unflatten(list(outs), shape[0])


def push_without_formula(func: Any, args: tuple, kwargs: dict, level: DualLevel) -> Any:
    """Run an operator on values of ``level`` for which torch has no correct forward formula.

    It is decomposed if it has a decomposition, or else differentiated by transposing its backward.
    """
    with functions_off():
        if (small := find_decomposition(func)) is not None:
            return _push_decomposed(func, small, args, kwargs, level)
        if func not in BACKWARD:
            return push_by_transposing(func, args, kwargs, level)
        with _make_innermost(level), enable_autograd_below(grad=True, forward=True):
            found = BACKWARD[func](*args, **kwargs)
        return pytree.map_tensors(graph_free, found)


@contextmanager
def _make_innermost(level: DualLevel) -> Iterator[None]:
    """Make ``level`` the innermost one, at which variables are made.

    A level further in may have passed its operator on to this one.
    """
    was = stack.top
    if level.active:
        stack.top = level
    try:
        yield
    finally:
        stack.top = was


def _push_decomposed(
    func: Any, small: Callable, args: tuple, kwargs: dict, level: DualLevel
) -> Any:
    """Compute results that have tangents by the decomposition, and others by the kernel.

    Steps without tangents run at this level too: autograd is off here, and on further out.
    """
    args, kwargs = pytree.map_tensors(lambda a: _wrap_at_level(a, level), (args, kwargs))
    if len(func._schema.returns) == 1:
        return small(*args, **kwargs)
    with run_outside(level), enable_autograd_below(grad=False, forward=False):
        primals, named = pytree.map_tensors(lambda a: unpack_dual(a, level)[0], (args, kwargs))
        found = func(*primals, **named)
    kernel = pytree.map_tensors(lambda t: wrap_dual(t, level), found)
    given = (kernel, *args) if func in READS_RESULTS else args
    moving = small(*given, **kwargs)
    moving = moving if isinstance(moving, tuple) else (moving,)
    return (*moving, *kernel[len(moving) :])


def _wrap_at_level(a: torch.Tensor, level: DualLevel) -> torch.Tensor:
    """Return a tensor that an outer level may differentiate as a value of the level."""
    if (type(a) is DualTensor and a.level is level) or not _can_have_tangent(a):
        return a
    return wrap_dual(a, level)


class _LoweredFunction(torch.autograd.Function):
    """The node of ``h`` at a jvp level. Its backward is the pull-back of ``h``, lowered too."""

    @staticmethod
    def forward(ctx, h, level, *args):
        # Zeros for an unused output would be made without the batch axes of outer levels.
        ctx.set_materialize_grads(False)
        ctx.h, ctx.level = repeat_draws(h, args), level
        ctx.save_for_backward(*args)
        asked = [i for i in range(len(args)) if ctx.needs_input_grad[i + 2]]
        with torch.enable_grad():
            outs, constant = _push_or_record(h, args, level, asked)
        ctx.mark_non_differentiable(*constant)
        return outs

    @staticmethod
    def backward(ctx, *cotangents):
        args = ctx.saved_tensors
        n = len(args)
        asked = [i for i in range(n) if ctx.needs_input_grad[i + 2]]
        given = [i for i, c in enumerate(cotangents) if c is not None]

        def pull(*both: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with VariableScope() as run:
                xs = [make_variable(x) if i in asked else x for i, x in enumerate(both[:n])]
                ys = ctx.h(*xs)
                own = [xs[i] for i in asked]
                found = compute_gradients(tuple(ys[i] for i in given), both[n:], own)
            return tuple(detach_from_run(found, run, torch.is_grad_enabled()))

        vars(pull)["is_of_torch"] = _is_of_torch(ctx.h)
        both = (*args, *(cotangents[i] for i in given))
        found = iter(apply_at_level(find_innermost_of(both), pull, both))
        return None, None, *[next(found) if i in asked else None for i in range(n)]


def repeat_draws(h: Function, args: Sequence) -> Function:
    """Return ``h`` such that it always draws the random numbers that it would draw now."""
    again, states = resume_draws(operator.call), rng_state.save_states(args)

    def wrap_function(h: Function) -> Function:
        def run_with_states(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            now = rng_state.save_states(tensors)
            rng_state.restore_states(states)
            try:
                return again(h, *tensors)
            finally:
                rng_state.restore_states(now)

        return run_with_states

    return map_with_rule(h, wrap_function)


def _push_forward(
    h: Function, args: tuple, level: DualLevel, asked: Sequence[int] = ()
) -> tuple[tuple, list]:
    """Return the values of ``h`` with tangents, computed by transposing its pull-back.

    The second result lists the values that depend neither on arguments with tangents nor on the
    arguments ``asked``.
    """
    with (
        run_outside(level),
        enable_autograd_below(grad=True, forward=False),
        VariableScope() as run,
    ):
        pairs = [unpack_dual(a, level) for a in args]
        moving = [i for i, (_, t) in enumerate(pairs) if t is not None]
        xs = [p for p, _ in pairs]
        own = {i: make_variable(xs[i]) for i in {*moving, *asked}}
        given = [own.get(i, x) for i, x in enumerate(xs)]
        ts = [t for _, t in pairs if t is not None]
        by = _push_by_rule if moving and hasattr(h, "rule") else _push_by_transposing
        ys, found = by(h, given, moving, ts)
        varying = [y for y in ys if y is not None and y.requires_grad]
        # A tangent may lead outside by other ways than the arguments: a backward may capture.
        tangents = [t for t in found if t is not None and t.requires_grad]
        both = [*varying, *tangents]
        free = {*map(id, select_enclosed(both, run) if level.outer_grad else both)}
        pushed = iter(found)
        out, constant = [], []
        for y in ys:
            if y is None:  # a gradient that was not requested of a backward operator
                out.append(None)
                continue
            varies = y.requires_grad
            tangent = next(pushed) if moving and varies else None
            y = graph_free(y) if id(y) in free else y
            tangent = graph_free(tangent) if id(tangent) in free else tangent
            out.append(wrap_dual(y, level) if tangent is None else make_dual(y, tangent, level))
            if not varies:
                constant.append(out[-1])
        return tuple(out), constant


def _push_by_rule(h: Any, args: list, moving: list[int], ts: list) -> tuple[Sequence, list]:
    """Return the results, and the tangents of those that vary, by the rule of ``h``."""
    counts: list[int] = []
    both = h.rule(moving, counts)(*args, *ts)
    ys, tangents = both[: counts[0]], iter(both[counts[0] :])
    pairs = [(y, next(tangents) if _can_have_tangent(y) else None) for y in ys]
    return ys, [t for y, t in pairs if y.requires_grad]


def _push_by_transposing(
    h: Function, args: list, moving: list[int], ts: list
) -> tuple[Sequence, list]:
    """Return the results, and the tangents of those that vary, by transposing the pull-back."""
    ys = h(*args)
    live = [y for y in ys if y is not None and y.requires_grad] if moving else []
    make_cotangent = torch.zeros_like if _is_of_torch(h) else _make_cotangent
    us = [make_leaf(make_cotangent(y)) for y in live]
    return ys, _transpose_pullback(live, us, [args[i] for i in moving], ts)


def _is_of_torch(h: Function) -> bool:
    """True for a function that runs one of torch's own operators, or the backward of one."""
    return getattr(h, "is_of_torch", False)


def _make_cotangent(y: torch.Tensor) -> torch.Tensor:
    """Return a cotangent for ``y`` at which a pull-back is as it is anywhere.

    A pull-back is linear, but a user's code may ask about the cotangent: an iterative solver has
    nothing to do for zeros, and few steps for equal numbers. Sines of 1, 2, 3, ... are neither.

    Torch's own operators get zeros instead. Their backwards do not ask, but some take no other
    made-up cotangent: that of complex eigenvectors must not depend on their phases.
    """
    if y.is_nested:
        return torch.ones_like(y)
    if y.layout is not torch.strided:
        return torch.zeros_like(y)
    return torch.ones_like(y).flatten().cumsum(0).sin().view_as(y)


def _transpose_pullback(ys: list, us: list, xs: list, ts: list) -> list:
    """Return J t for outputs ``ys`` of variables ``xs``, with None for zeros.

    ``us`` are variables like the outputs, ``ts`` the tangents of ``xs``.
    """
    if not ys:
        return []
    pulled = _pull_back_by_kind(ys, us, xs)
    _refuse_unrecorded(pulled)
    live = [(p, t) for p, t in zip(pulled, ts, strict=True) if p is not None]
    return pull_back(tuple(p for p, _ in live), tuple(t for _, t in live), us)


def _pull_back_by_kind(ys: list, us: list, xs: list) -> list:
    """Pull the cotangents ``us`` back, real outputs and complex ones in separate passes.

    Torch's backward of a decomposition adds a real cotangent to a complex one, and the derivative
    of that would be complex.
    """
    found: list = [None] * len(xs)
    for kind in {y.is_complex() for y in ys}:
        mine = [(y, u) for y, u in zip(ys, us, strict=True) if y.is_complex() is kind]
        pulled = pull_back(*map(tuple, zip(*mine, strict=True)), xs)
        pairs = zip(found, pulled, strict=True)
        found = [a if b is None else b if a is None else a + b for a, b in pairs]
    return found


def _refuse_unrecorded(pulled: list) -> None:
    """Raise if a gradient has no history and is not zero: its backward has hidden operators."""
    if any(p is not None and not p.requires_grad and _is_nonzero(p) for p in pulled):
        raise documented_error(RuntimeError, "no-second-derivative")(
            "jvp: the backward of a custom Function or operator computes what autograd does not "
            "record: on detached tensors, in numpy or in an extension.\n"
            "Forward mode differentiates that backward, and would take its gradient for zero.\n"
            "Write the backward in operators of torch, or as a Function that has a backward too."
        )


def _is_nonzero(t: torch.Tensor) -> bool:
    """True if any entry of any example is not zero, or for a tracer's tensor, which has none."""
    if is_compiler_tensor(unwrap_all(t)):
        return True
    with no_dispatch(), functions_off():
        return bool(unwrap_all(t).any())
