"""`linearize`: value and tangent program, with the function run once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forall._api import argument_checks
from forall._api.define_transform import define_transform_at_point
from forall._api.execution.transform_decorator import call_or_replay, can_replay, find_calls
from forall._api.jvp import detach_results, run_on_duals
from forall._autodiff import jvp_level, reverse_mode
from forall._autodiff.dual_tensor import make_dual
from forall._autodiff.linear_tape import (
    LinearProgram,
    TapeLevel,
    extract_program,
    make_tape,
)
from forall._compat import functorch_interop, pytree
from forall._compat.dispatch_state import hold_forward_level
from forall._compat.documented_error import documented_error
from forall._compat.tensor_subclass import restore_users_class, unwrap_posed
from forall._compat.transform_call import call_transform
from forall._core.errors import TransformCall, format_columns, format_short
from forall._core.escaped_values import flatten_without_escaped
from forall._core.levels import lift, top
from forall._core.version_counter import VersionCount

if TYPE_CHECKING:
    from collections.abc import Callable


@define_transform_at_point(functorch_interop.linearize_by_jvp)
def linearize(func: Callable, *primals: Any) -> tuple[Any, Callable]:
    """The value of a function at a point, and its derivative there as a linear function.

    For ``f: (*I) -> (*O)`` and the Jacobian J ``(*O, *I)`` at ``x``, ``linearize(f, x)`` is
    ``(f(x), push)`` with

        push(t)[o] = sum over i of J[o, i] * t[i],   of shape (*O),

    so that ``push(t)`` equals ``jvp(f, (x,), (t,))[1]`` for every ``t``.

    Cost: ``func`` runs once. What forward mode did to the tangent is kept as a straight-line
    program, and ``push`` runs only that: cheaper than `jvp` from the second direction on. The
    program's constants (values at ``x``) stay in memory as long as ``push`` does. They keep their
    own derivatives, so the result can be differentiated in ``x`` too.

    Trees: all leaves of the primals are tensors; tangents are shaped like the primals, results
    like the output.

    Raises:
        RuntimeError: where primals hold or ``func`` returns anything but tensors, where tangents
            do not fit the primals in tree, shape, dtype or device, and where a tensor that the
            derivative is made of has been written to since.
        ValueError: for a primal that is neither floating-point nor complex.

    Source: Radul, Paszke, Frostig, Johnson and Maclaurin, "You only linearize once: tangents
    transpose to gradients" (2023).

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> y, push = linearize(f, torch.tensor([2.0, 3.0]))
        >>> push(torch.tensor([1.0, 0.0]))             # (2,) -> (3,)
        tensor([3., 1., 4.])
        >>> push(torch.tensor([0.0, 1.0]))
        tensor([2., 1., 0.])
    """
    call = TransformCall("linearize", func)
    flat, spec = argument_checks.check_primals(call, primals)
    argument_checks.refuse_nested_primals(call, flat)
    if torch.is_inference_mode_enabled():  # it makes other tensors
        value, found = call_transform(_linearize_eagerly, func, *primals)
    else:
        value, found = call_or_replay("linearize", func, _linearize_eagerly, primals, {})
    if type(found) is tuple:
        linear, out_spec, constants = found
        return value, _make_jvp_fn(
            call, flat, spec, _check_constants(call, linear.play, constants), out_spec
        )
    ((own, constants),) = found.items()
    return value, _make_jvp_fn(
        call, flat, spec, _check_constants(call, own.run, constants), own.out_spec
    )


def _check_constants(call: TransformCall, play: Callable, constants: list) -> Callable:
    """Return the tangent program, which raises if its constants have been written to."""
    counts = [VersionCount(c) for c in constants if isinstance(c, torch.Tensor)]

    def play_checked(seeds: list) -> list:
        for count in counts:
            if not count.has_no_writes():
                raise documented_error(RuntimeError, "modified-since")(
                    f"{call}: a tensor that the derivative is made of has been modified by an "
                    "inplace operation since.\n"
                    f"{format_columns([('the tensor', format_short(count.of()))])}\n"
                    "Push before it is written to, or write into a copy (.clone())."
                )
        return play(constants, seeds)

    return play_checked


class _TangentProgram:
    """The tangent program that all calls of a kind share.

    Two programs are equal if they do the same. Guards need not inspect what never changes.
    """

    __slots__ = ("found", "linear", "out_spec")

    def __init__(self, linear: LinearProgram, out_spec: Any) -> None:
        self.linear, self.out_spec = linear, out_spec
        self.found = find_calls(self, None)

    def run(self, constants: list, seeds: list) -> list:
        if self.found is not None and can_replay():
            return self.found.calls.run(self, None, _TangentProgram.play, (constants, seeds), {})
        return self.linear.play(constants, seeds)

    def play(self, constants: list, seeds: list) -> list:
        return self.linear.play(constants, seeds)

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is _TangentProgram
            and self.linear == other.linear
            and self.out_spec == other.out_spec
        )

    def __hash__(self) -> int:
        return hash((*self.linear.outputs,))


def _linearize_eagerly(func: Callable, *primals: Any) -> tuple:
    """Return the value, and the tangent program with its constants.

    The program is the key of a dict, so it is part of the result's tree, which is the same for all
    calls of a kind. A program that refers to objects of a single call is a leaf of the result
    instead, and such calls are not recorded.
    """
    given = flatten_without_escaped(primals)
    value, linear, out_spec, constants, _ = _record_tangents(
        TransformCall("linearize", func), func, *given, False
    )
    if linear.is_plain():
        return value, {_TangentProgram(linear, out_spec): constants}
    return value, (linear, out_spec, constants)


def linearize_with_aux(
    call: TransformCall, func: Callable, primals: tuple, *, has_aux: bool
) -> tuple[Any, Callable, Any]:
    """Return the value, tangent program and aux of ``func``, which is run once."""
    flat, spec = argument_checks.check_primals(call, primals)
    value, linear, out_spec, constants, aux = _record_tangents(call, func, flat, spec, has_aux)
    return value, _make_jvp_fn(call, flat, spec, partial(linear.play, constants), out_spec), aux


def _record_tangents(
    call: TransformCall, func: Callable, flat: list, spec: Any, has_aux: bool
) -> tuple[Any, LinearProgram, Any, list, Any]:
    below, outer = top(), torch.is_grad_enabled()
    with (
        functorch_interop.run_eagerly(),
        hold_forward_level(),
        torch.enable_grad(),
        reverse_mode.VariableScope() as own,
    ):
        level = jvp_level.JvpLevel(below, outer)
        here = [lift(unwrap_posed(p), below) for p in flat]
        seeds = [torch.zeros_like(p) for p in here]
        level.tapes = tapes = TapeLevel(below, seeds)
        duals = [
            restore_users_class(make_dual(p, make_tape(seed, slot, tapes), level), given)
            for slot, (p, seed, given) in enumerate(zip(here, seeds, flat, strict=True))
        ]
        try:
            pairs, out_spec, aux = run_on_duals(
                call, func, pytree.unflatten(duals, spec), level, has_aux
            )
        finally:
            level.tapes = None  # a reference cycle through torch's graph would never be freed
        tapes.drop_tangents()
    value = pytree.unflatten([p for p, _ in pairs], out_spec)
    pairs = [(unwrap_posed(p), t) for p, t in pairs]
    linear, constants = extract_program(tapes, pairs)
    found = value, aux, constants
    value, aux, constants = (
        reverse_mode.detach_from_run(found, own, outer) if outer else detach_results(found)
    )
    return value, linear, out_spec, constants, aux


def _make_jvp_fn(
    call: TransformCall, flat: list, spec: Any, play: Callable, out_spec: Any
) -> Callable:
    @functorch_interop.exclude_from_dynamo
    def jvp_fn(*tangents: Any) -> Any:
        """Return the derivative at the point, in the direction of ``tangents``."""
        seeds = argument_checks.check_tangents(call, flat, spec, tangents)
        argument_checks.check_same_dtype_device(call, flat, seeds)
        return pytree.unflatten(call_transform(play, seeds), out_spec)

    return jvp_fn
