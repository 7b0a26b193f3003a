"""`jvp`: value and directional derivative, by forward mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._api import argument_checks
from forall._api.define_transform import define_transform_at_point
from forall._api.execution.transform_decorator import call_or_replay
from forall._autodiff import jvp_level
from forall._autodiff.dual_tensor import make_dual, unpack_dual
from forall._compat import functorch_interop, pytree
from forall._compat.dispatch_state import functions_off, hold_forward_level
from forall._compat.jagged_layout import Jagged, replace_rows
from forall._compat.tensor_subclass import restore_users_class, unwrap_posed
from forall._core.errors import TransformCall
from forall._core.escaped_values import replace_escaped
from forall._core.levels import lift, top
from forall._core.version_counter import VersionCount
from forall._divergence import convert_if_running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@define_transform_at_point()
def jvp(
    func: Callable, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False
) -> Any:
    """The value of a function and its derivative in one direction, by forward mode.

    For ``f: (*I) -> (*O)`` and the Jacobian J ``(*O, *I)``, ``jvp(f, (x,), (t,))`` is
    ``(f(x), u)`` with

        u[o] = sum over i of J[o, i] * t[i],   of shape (*O).

    Cost: one pass, about two to three times that of ``f``, and no graph in memory: derivatives are
    computed beside the values. For all directions at once see `jacfwd`; for many directions at one
    point, `linearize`.

    Trees: ``primals`` and ``tangents`` are tuples of the same tree, one entry per argument, all
    leaves tensors; ``u`` is shaped like the output. To keep an argument fixed, close over it.

    Args:
        strict: an output that does not depend on the primals is an error, not zeros.
        has_aux: ``func`` returns ``(output, aux)``; the result is then ``(output, u, aux)``.

    Raises:
        RuntimeError: where primals are no tuple, empty or hold anything but tensors, where
            tangents do not fit them, and where ``func`` returns anything but tensors.
        ValueError: for a primal or tangent that is neither floating-point nor complex.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.1.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> jvp(f, (torch.tensor([2.0, 3.0]),), (torch.tensor([1.0, 10.0]),))
        (tensor([6., 5., 4.]), tensor([23., 11.,  4.]))
    """
    options = {"strict": strict, "has_aux": has_aux}
    return call_or_replay("jvp", func, _jvp_eagerly, (primals, tangents), options)


def _jvp_eagerly(
    func: Callable, primals: Any, tangents: Any, *, strict: bool, has_aux: bool
) -> Any:
    call = TransformCall("jvp", func)
    argument_checks.check_primals_tuple(call, primals)
    return push_forward(call, func, primals, tangents, strict=strict, has_aux=has_aux)


def push_forward(
    call: TransformCall,
    func: Callable,
    primals: Any,
    tangents: Any,
    *,
    strict: bool,
    has_aux: bool,
    beside: Sequence[torch.Tensor] = (),
    written: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Any:
    """Push tangents forward, for `jvp` and `jacfwd`; ``beside`` are further arguments of ``func``.

    ``written`` collects the arguments that were written to while they have history, each with the
    value that it has now.
    """
    flat, spec = argument_checks.check_primals(call, primals)
    flat_t = argument_checks.check_tangents(call, flat, spec, tangents)
    outer = torch.is_grad_enabled()
    below = top()
    with functorch_interop.run_eagerly(), hold_forward_level(), torch.enable_grad():
        level = jvp_level.JvpLevel(below, outer, beside)
        duals = [
            restore_users_class(_wrap_dual(p, t, level), p)
            for p, t in zip(flat, flat_t, strict=True)
        ]
        counts = [VersionCount(d) for d in duals] if written is not None else []
        pairs, out_spec, aux = run_on_duals(
            call, func, pytree.unflatten(duals, spec), level, has_aux
        )
        primal_out, tangent_out = [], []
        for p, t in pairs:
            if t is None and strict:
                raise argument_checks.make_independence_error(call, p)
            primal_out.append(p)
            tangent_out.append(torch.zeros_like(p) if t is None else t)
        if outer and written is not None:
            found = [(t, level.outer_args.stand_ins.get(id(t))) for t in beside]
            taken = [(t, d) for t, d in found if d is not None]
            taken += [
                (p, d) for p, d, c in zip(flat, duals, counts, strict=True) if not c.has_no_writes()
            ]
            written += [(t, unpack_result(d, level)[0]) for t, d in taken if d.requires_grad]
    result = pytree.unflatten(primal_out, out_spec), pytree.unflatten(tangent_out, out_spec), aux
    if not outer:
        result = detach_results(result)
    return result if has_aux else result[:2]


def run_on_duals(
    call: TransformCall, func: Callable, duals: tuple, level: jvp_level.JvpLevel, has_aux: bool
) -> tuple[list, Any, Any]:
    """Return the outputs at values of ``level``, each as primal and tangent, their tree and aux."""
    with level:
        out = convert_if_running(func)(*duals)
    aux = None
    if has_aux:
        out, aux = argument_checks.split_aux(call, out)
        aux = pytree.map_tensors(lambda a: unpack_result(a, level)[0], aux)
    leaves, spec = argument_checks.check_outputs(call, out)
    return [unpack_result(y, level) for y in leaves], spec, aux


def _wrap_dual(p: torch.Tensor, t: torch.Tensor, level: jvp_level.JvpLevel) -> torch.Tensor:
    """Return a primal and its tangent as a value of the level."""
    if type(p) is Jagged:
        rows = _wrap_dual(p.values(), t.values(), level)
        with level:
            return replace_rows(p, rows)
    below = level.entry.parent
    return make_dual(lift(unwrap_posed(p), below), lift(unwrap_posed(t), below), level)


def unpack_result(
    y: torch.Tensor, level: jvp_level.JvpLevel
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the primal of a result, in the class that the user gave it, and its tangent."""
    if type(y) is Jagged:
        with level:  # the class of nested tensors does not enter it to read the rows' tangents
            rows = y.values()
        primal, tangent = unpack_result(rows, level)
        return replace_rows(y, primal), None if tangent is None else replace_rows(y, tangent)
    primal, tangent = unpack_dual(unwrap_posed(level.replace_outer_arg(y)), level)
    return restore_users_class(replace_escaped(primal), y), tangent


def detach_results(results: Any) -> Any:
    """Return results without history, in the classes that the user gave them."""

    def cut(t: torch.Tensor) -> torch.Tensor:
        with functions_off():
            found = unwrap_posed(t).detach()
        return restore_users_class(found, t)

    return pytree.map_tensors(cut, results)
