"""`jvp`: value and directional derivative, by forward mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import columns, name_of, short
from forall._core.levels import lift, top
from forall._derivatives import forward
from forall._torch import handover, trees
from forall._torch.dispatch import forward_level
from forall._transforms import checks

if TYPE_CHECKING:
    from collections.abc import Callable


def jvp(
    func: Callable, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False
) -> Any:
    """Value and directional derivative."""
    checks.callable_("jvp", func)
    if handover.needed():
        return handover.call("jvp", func, primals, tangents, strict=strict, has_aux=has_aux)
    call = f"jvp({name_of(func)})"
    return push(call, func, primals, tangents, strict, has_aux)


def push(call: str, func: Callable, primals: Any, tangents: Any, strict: bool, has_aux: bool) -> Any:
    """What `jvp` and `jacfwd` share."""
    flat, spec = checks.primals(call, primals)
    flat_t = checks.tangents(call, flat, spec, tangents)
    outer = torch.is_grad_enabled()
    below = top()
    with forward_level(), torch.enable_grad():
        level = forward.JvpLevel(below, outer)
        duals = [
            forward.make_dual(lift(p, below), lift(t, below), level)
            for p, t in zip(flat, flat_t, strict=True)
        ]
        with level:
            out = func(*trees.unflatten(duals, spec))
        aux = None
        if has_aux:
            out, aux = checks.with_aux(call, out)
            aux = trees.map_tensors(lambda a: forward.unpack(a, level)[0], aux)
        leaves, out_spec = checks.outputs(call, out)
        primal_out, tangent_out = [], []
        for y in leaves:
            p, t = forward.unpack(y, level)
            if t is None:
                if strict:
                    raise checks.independent(call, y)
                t = torch.zeros_like(p)
            primal_out.append(p)
            tangent_out.append(t)
    result = trees.unflatten(primal_out, out_spec), trees.unflatten(tangent_out, out_spec)
    if not outer:
        result = trees.map_tensors(torch.Tensor.detach, result)
    return (*result, aux) if has_aux else result
