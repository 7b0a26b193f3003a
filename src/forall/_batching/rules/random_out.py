"""Draws of a size into ``out=``: drawn anew in its dtype, then written as any out= is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._batching.table import overloads, register
from forall._batching.writing import derived
from forall._torch.schema import facts

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def _of(functional: Any) -> Callable:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        out = kwargs["out"]
        drawn = functools.partial(functional, dtype=out.dtype, device=out.device)
        return derived(drawn)(level, func, args, kwargs)

    return handler


register(
    {
        op: _of(
            getattr(packet, op._overloadname.removesuffix("out").removesuffix("_") or "default")
        )
        for packet in (
            aten.rand,
            aten.randn,
            aten.randint,
            aten.randperm,
            aten.rand_like,
            aten.randn_like,
            aten.randint_like,
        )
        for op in overloads(packet)
        if facts(op).out_names
    }
)
register({aten.normal.float_float_out: _of(aten.normal.float_float)})
