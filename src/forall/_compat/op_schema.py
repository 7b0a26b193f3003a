"""Facts of an operator's schema and tags: its writes, its views, and its related overloads."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.versions import UNTAGGED_POINTWISE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class StatisticsArgs(NamedTuple):
    """The running statistics of a normalization, which it writes into undeclared."""

    positions: tuple[int, ...]
    flag: int | None  # the position of the flag that enables this; None if it always writes


class OperatorFacts(NamedTuple):
    """The facts of an overload, read once: reading a schema costs more than a call."""

    mutates: tuple[int | str, ...]  # positions or (keyword-only) names, by its schema
    out_names: tuple[str, ...]  # the out= arguments among them
    view: bool  # results alias the first argument without writing it
    pointwise: bool
    seeded: bool
    dynamic: bool  # result shape or Python value depends on data
    names: tuple[str, ...]
    statistics: StatisticsArgs | None  # running statistics that it may write into
    into_lists: bool  # True if it writes into tensors of a list
    foreign: bool  # a library's; forward mode ignores it, and its tangents come out as zeros
    is_collective: bool  # torch.distributed's: all processes of a group take part in one call
    communicates: bool  # as that, or an operator of ours between the ranks of a mesh

    @property
    def writes(self) -> bool:
        """True if the operator may write into any argument."""
        return bool(self.mutates) or self.statistics is not None

    @property
    def has_effect(self) -> bool:
        """True if each call counts, since the operator draws or communicates."""
        return self.seeded or self.communicates


_TORCHS = ("aten", "prims", "prim", "forall")
# Linear in the first argument, entry by entry: each is multiplied by a slope.
LINEAR_IN_FIRST = frozenset(
    {
        torch.ops.aten.tanh_backward.default,
        torch.ops.aten.sigmoid_backward.default,
        torch.ops.aten.threshold_backward.default,
        torch.ops.aten.div.Tensor,
    }
)
_COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
)
_BETWEEN_RANKS = "forall.ranks_"
_RUNNING = ("running_mean", "running_var")
# Operators that write into running statistics if this argument is True (None: always), which
# their schemas do not declare.
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


# Operators that a level or a recorder has seen, and decompositions under vmap.
met: set[Any] = set()


@cache
def get_facts(func: Any) -> OperatorFacts:
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
    flag = None if asked is None else names.index(asked)
    running = tuple(i for i, n in enumerate(names) if n in _RUNNING)
    if not unsaid and set(running).isdisjoint(mutates):
        running = ()
    return OperatorFacts(
        mutates=tuple(mutates),
        out_names=tuple(outs),
        view=returns_alias and not mutates,
        pointwise=torch.Tag.pointwise in tags or func in UNTAGGED_POINTWISE,
        seeded=torch.Tag.nondeterministic_seeded in tags,
        dynamic=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        names=names,
        statistics=StatisticsArgs(running, flag) if running else None,
        into_lists=any(
            a.alias_info is not None and a.alias_info.is_write and str(a.type).startswith("List")
            for a in schema.arguments
        ),
        foreign=func.namespace not in _TORCHS and not mutates,
        is_collective=func.namespace in _COLLECTIVES,
        communicates=func.namespace in _COLLECTIVES or str(func).startswith(_BETWEEN_RANKS),
    )


def find_written_args(func: Any, args: tuple) -> tuple[int | str, ...]:
    """Return positions or names (`OperatorFacts.mutates`) of the arguments that are written into.

    Schemas do not declare writes into running statistics, so all code calls this.
    """
    fact = get_facts(func)
    known = fact.statistics
    if known is not None and (known.flag is None or args[known.flag]):
        return (*fact.mutates, *(i for i in known.positions if i not in fact.mutates))
    return fact.mutates


def find_written_tensors(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operator writes into, those in lists too."""
    return flatten_tensors(
        args[m] if isinstance(m, int) else kwargs.get(m) for m in find_written_args(func, args)
    )


def flatten_tensors(found: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among these, and in lists among them."""
    flat = [t for f in found for t in (f if isinstance(f, (list, tuple)) else [f])]
    return [t for t in flat if isinstance(t, torch.Tensor)]


def map_in_lists(f: Callable[[Any], Any], a: Any) -> Any:
    """Return ``f`` of an argument, or a list with ``f`` of each entry.

    NOTE [functions that call themselves]
        A recursive function that is nested in another refers to itself, and so to all that it
        captures. The garbage collector alone would free that, and with it the results of a call. So
        recursive functions are not nested, as here.
    """
    return [map_in_lists(f, b) for b in a] if isinstance(a, (list, tuple)) else f(a)


def map_arguments(f: Callable[[Any], Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return an operator's arguments with ``f`` applied to each, also in lists."""
    return tuple(map_in_lists(f, a) for a in args), {
        k: map_in_lists(f, a) for k, a in kwargs.items()
    }


@cache
def find_functional(func: Any) -> Any | None:
    """Return the overload that computes the result of an in-place or out= overload, or None.

    If an out= form also writes into other arguments, so does the overload returned.
    """
    return next((op for op, more in _find_similar_overloads(func) if not more), None)


@cache
def find_factory(func: Any) -> Any | None:
    """Return the overload that makes a new tensor of the result of an out= overload, or None.

    It takes the dtype and the device that out= has.
    """
    if not get_facts(func).out_names:
        return None
    return next(
        (op for op, more in _find_similar_overloads(func) if {"dtype", "device"} <= more <= _NEW),
        None,
    )


_NEW = {"dtype", "layout", "device", "pin_memory"}


def _find_similar_overloads(func: Any) -> list[tuple[Any, set[str]]]:
    """Return the overloads that take this one's arguments but for out=, and their further ones."""
    fact = get_facts(func)
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
            if op is not func and same and get_facts(op).mutates in {writes, ()}:
                found.append((op, {argument for argument, _ in more}))
    return found
