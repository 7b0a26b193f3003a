"""What an operator's schema and tags say: what it writes, what it views, how it is derived."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Facts(NamedTuple):
    """Read once per overload; looking into a schema on every call would cost more than the call."""

    mutates: tuple[int | str, ...]  # places (positional) or names (keyword-only), by its schema
    out_names: tuple[str, ...]  # the out= arguments among them
    view: bool  # results alias the first argument without writing it
    pointwise: bool
    seeded: bool
    dynamic: bool  # result shape or Python value depends on data
    names: tuple[str, ...]
    statistics: tuple[int, ...]  # places of running statistics that it may write into
    asks: int | None  # the place of what says whether it does; None where it always does
    writes: bool  # whether it may write into anything
    into_lists: bool  # whether into tensors of a list
    foreign: bool  # a library's; forward mode passes these by, and its tangents come out as zeros
    is_collective: bool  # torch.distributed's: all processes of a group take part in one call


_TORCHS = ("aten", "prims", "prim", "forall")
_COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
)
_RUNNING = ("running_mean", "running_var")
# What writes into running statistics where this argument says so (None: always), and in whose
# schema no word of it is.
_STATISTICS = {
    "native_batch_norm": "training",
    "cudnn_batch_norm": "training",
    "miopen_batch_norm": "training",
    "batch_norm": "training",
    "_batch_norm_impl_index": "training",
    "instance_norm": "use_input_stats",
    "batch_norm_update_stats": None,
    "batch_norm_gather_stats": None,
    "batch_norm_gather_stats_with_counts": None,
}


# Operators that a level or a recorder has met: those looked at, and decompositions under vmap.
met: set[Any] = set()


@cache
def facts(func: Any) -> Facts:
    met.add(func)
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
    names = tuple(a.name for a in schema.arguments)
    tags = func.tags
    name = func.overloadpacket.__name__
    unsaid = func.namespace == "aten" and name in _STATISTICS
    asked = _STATISTICS[name] if unsaid else None
    running = tuple(i for i, n in enumerate(names) if n in _RUNNING)
    if not unsaid and set(running).isdisjoint(mutates):
        running = ()
    return Facts(
        mutates=tuple(mutates),
        out_names=tuple(outs),
        view=returns_alias and not mutates,
        pointwise=torch.Tag.pointwise in tags,
        seeded=torch.Tag.nondeterministic_seeded in tags,
        dynamic=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        names=names,
        statistics=running,
        writes=bool(mutates or running),
        into_lists=any(
            a.alias_info is not None and a.alias_info.is_write and str(a.type).startswith("List")
            for a in schema.arguments
        ),
        asks=None if asked is None else names.index(asked),
        foreign=func.namespace not in _TORCHS and not mutates,
        is_collective=func.namespace in _COLLECTIVES,
    )


def writes(func: Any, args: tuple) -> tuple[int | str, ...]:
    """The places (or names, see `Facts.mutates`) of the arguments that an operator writes into.

    Everybody asks here: schemas say nothing of running statistics.
    """
    fact = facts(func)
    if fact.statistics and (fact.asks is None or args[fact.asks]):
        return (*fact.mutates, *(i for i in fact.statistics if i not in fact.mutates))
    return fact.mutates


def written_by(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operator writes into, those in lists too."""
    return tensors_in(args[m] if isinstance(m, int) else kwargs.get(m) for m in writes(func, args))


def tensors_in(found: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among these, and in lists among them."""
    flat = [t for f in found for t in (f if isinstance(f, (list, tuple)) else [f])]
    return [t for t in flat if isinstance(t, torch.Tensor)]


def in_lists(f: Callable[[Any], Any], a: Any) -> Any:
    """An argument with ``f`` of it in its place, or of each in a list of them.

    NOTE [functions that call themselves]
        One that is written inside another holds itself, and so all that it has of the other's: the
        garbage collector alone would free that, and with it what a call has computed. So they
        stand on their own, as here.
    """
    return [in_lists(f, b) for b in a] if isinstance(a, (list, tuple)) else f(a)


def in_arguments(f: Callable[[Any], Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """An operator's arguments with ``f`` of each in its place, also of those in lists."""
    return tuple(in_lists(f, a) for a in args), {k: in_lists(f, a) for k, a in kwargs.items()}


@cache
def functional_of(func: Any) -> Any | None:
    """The overload that computes what this in-place or out= one writes, or None.

    Where an out= form also writes into arguments of its own, so does that overload.
    """
    return next((op for op, more in _alike(func) if not more), None)


@cache
def factory_of(func: Any) -> Any | None:
    """The overload that makes a new tensor of what this out= one writes, or None.

    It has to be told the dtype and the device, which out= has.
    """
    if not facts(func).out_names:
        return None
    return next((op for op, more in _alike(func) if {"dtype", "device"} <= more <= _NEW), None)


_NEW = {"dtype", "layout", "device", "pin_memory"}


def _alike(func: Any) -> list[tuple[Any, set[str]]]:
    """The overloads that take what this one is given besides out=, and what else they take."""
    fact = facts(func)
    name = func.overloadpacket.__name__
    space = getattr(torch.ops, func.namespace)
    if fact.out_names:
        names = [name, f"_{name}"]
        writes = tuple(m for m in fact.mutates if m not in fact.out_names)
    else:
        names, writes = [name.removesuffix("_")], ()
    given = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in fact.out_names]
    found = []
    for packet in filter(None, (getattr(space, n, None) for n in names)):
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            takes = [(a.name, str(a.type)) for a in op._schema.arguments]
            more = [a for a in takes if a not in given]
            same = given == [a for a in takes if a not in more]
            if op is not func and same and facts(op).mutates in {writes, ()}:
                found.append((op, {argument for argument, _ in more}))
    return found
