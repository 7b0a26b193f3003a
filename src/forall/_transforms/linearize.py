"""`linearize`: value and tangent program, with the function run once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import name_of
from forall._core.levels import lift, top
from forall._derivatives import forward
from forall._derivatives.tape import Tape, TapeLevel, play, tape
from forall._torch import handover, trees
from forall._torch.dispatch import forward_level
from forall._transforms import checks

if TYPE_CHECKING:
    from collections.abc import Callable


def linearize(func: Callable, *primals: Any) -> tuple[Any, Callable]:
    """Value and derivative at a point, as a linear function."""
    checks.callable_("linearize", func)
    if handover.needed():
        return handover.call("linearize", func, *primals)
    call = f"linearize({name_of(func)})"
    flat, spec = checks.primals(call, primals)
    below, outer = top(), torch.is_grad_enabled()
    with forward_level(), torch.enable_grad():
        tapes = TapeLevel(below)
        level = forward.JvpLevel(below, outer)
        duals = []
        for p in flat:
            checks.differentiable(call, p)
            here = lift(p, below)
            duals.append(forward.make_dual(here, tape(torch.zeros_like(here), tapes.count, tapes), level))
            tapes.count += 1
        with level:
            out = func(*trees.unflatten(duals, spec))
        leaves, out_spec = checks.outputs(call, out)
        pairs = [forward.unpack(y, level) for y in leaves]
    value = trees.unflatten([p for p, _ in pairs], out_spec)
    if not outer:
        value = trees.map_tensors(torch.Tensor.detach, value)
    ends = [t.slot if isinstance(t, Tape) else None for _, t in pairs]

    def jvp_fn(*tangents: Any) -> Any:
        """The derivative at the point, in the direction of ``tangents``."""
        seeds = checks.tangents(call, flat, spec, tangents)
        slots = play(tapes, seeds)
        results = [
            torch.zeros_like(p) if end is None else slots[end]
            for end, (p, _) in zip(ends, pairs, strict=True)
        ]
        return trees.unflatten(results, out_spec)

    return value, jvp_fn
