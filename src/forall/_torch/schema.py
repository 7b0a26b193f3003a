"""What an operator's schema and tags say: what it writes, what it views, how it is derived."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class Facts(NamedTuple):
    """Read once per overload; looking into a schema on every call would cost more than the call."""

    mutates: tuple[int | str, ...]  # places (positional) or names (keyword-only) it writes
    out_names: tuple[str, ...]  # the out= arguments among them
    view: bool  # results alias the first argument without writing it
    pointwise: bool
    seeded: bool
    dynamic: bool  # result shape or Python value depends on data
    names: tuple[str, ...]
    foreign: bool  # a library's; forward mode passes these by, and its tangents come out as zeros


_TORCHS = ("aten", "prims", "prim", "forall")


@cache
def facts(func: Any) -> Facts:
    schema = func._schema
    mutates: list[int | str] = []
    outs = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            mutates.append(a.name if a.kwarg_only else i)
            if a.is_out:
                outs.append(a.name)
    returns_alias = any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    tags = func.tags
    return Facts(
        mutates=tuple(mutates),
        out_names=tuple(outs),
        view=returns_alias and not mutates,
        pointwise=torch.Tag.pointwise in tags,
        seeded=torch.Tag.nondeterministic_seeded in tags,
        dynamic=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        names=tuple(a.name for a in schema.arguments),
        foreign=func.namespace not in _TORCHS and not mutates,
    )


@cache
def functional_of(func: Any) -> Any | None:
    """The overload that computes what this in-place or out= one writes, or None."""
    packet = func.overloadpacket
    name = packet.__name__
    fact = facts(func)
    space = getattr(torch.ops, func.namespace)
    names = [name]
    if not fact.out_names and name.endswith("_"):
        names = [name[:-1]]
    wanted = [
        (a.name, str(a.type))
        for a in func._schema.arguments
        if not (a.alias_info is not None and a.alias_info.is_write and a.is_out)
    ]
    for candidate in names:
        other = getattr(space, candidate, None)
        if other is None:
            continue
        for overload in other.overloads():
            op = getattr(other, overload)
            if op is func or facts(op).mutates:
                continue
            have = [(a.name, str(a.type)) for a in op._schema.arguments]
            if have == wanted:
                return op
    return None
