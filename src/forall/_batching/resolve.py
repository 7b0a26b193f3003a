"""How an operator without a row finds its meaning: by tag, by schema, by decomposition, by loop."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from forall._batching import families, table
from forall._core.errors import PerformanceWarning, data_dependent
from forall._torch.schema import facts, functional_of


def resolve(func: Any) -> Any:
    """The handler for ``func``, found once and kept."""
    handler, way = _find(func)
    table.HANDLERS[func] = handler
    table.WAYS[func] = way
    return handler


def _find(func: Any) -> tuple[Any, str]:
    fact = facts(func)
    if fact.mutates:
        if fact.pointwise and fact.mutates == (0,) and not fact.out_names:
            return families.pointwise_in_place, "derived"
        functional = functional_of(func)
        if functional is not None:
            return families.derived(functional), "derived"
    if fact.dynamic:
        return _refuse, "error"
    if fact.pointwise and not fact.mutates:
        return families.pointwise, "pointwise"
    decomposition = _decomposition(func)
    if decomposition is not None:
        return decomposition, "decomposed"
    if fact.mutates:
        return _no_rule, "error"
    return _looped(func), "loop"


def _refuse(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    raise data_dependent(
        str(func), "Use torch.where or masks of fixed shape, or compute it outside vmap."
    )


def _no_rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    raise NotImplementedError(
        f"vmap: {func} writes in place and has no rule yet.\n"
        "Use the form that returns a new tensor, or add a rule: forall.extend.batching_rule."
    )


def _looped(_func: Any) -> Any:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        warnings.warn(
            f"vmap: {func} has no rule and runs once per example.\n"
            "Add a rule with forall.extend.batching_rule to make it fast.",
            PerformanceWarning,
            stacklevel=3,
        )
        return families.loop(level, func, args, kwargs)

    return handler


def _decomposition(func: Any) -> Any | None:
    name = func.name()
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    explicit = torch._C.DispatchKey.CompositeExplicitAutograd
    for key in (composite, explicit):
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            return _composite(key)
    from torch._decomp import decomposition_table

    found = decomposition_table.get(func)
    return None if found is None else _decomposed(found)


def _composite(key: Any) -> Any:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        with families.level_on(level):
            return func._op_dk(key, *args, **kwargs)

    return handler


def _decomposed(decomposition: Any) -> Any:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        with families.level_on(level):
            return decomposition(*args, **kwargs)

    return handler
