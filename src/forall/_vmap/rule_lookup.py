"""The search for a handler of an operator without a row: tag, schema, decomposition, loop.

NOTE [decompositions]
    A composite kernel, or torch's own decomposition in Python, runs on the examples with the level
    on, so that each of its operators is handled in turn. It may fail where a plain tensor would
    not: it asks for a value, or leads back to the operator that it decomposes. Then the operator
    runs once per example, which is right by construction.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from forall._compat import custom_op, exception_safety, pytree
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import (
    find_factory,
    find_functional,
    find_written_args,
    find_written_tensors,
    get_facts,
)
from forall._compat.private_api import DispatchKey, get_decompositions, has_kernel
from forall._core.errors import DataDependentError, make_collective_error
from forall._core.levels import run_outside
from forall._core.looped_operators import note_looped_operator
from forall._core.version_counter import bump_versions
from forall._vmap import custom_rules, registry
from forall._vmap.mutation import in_place
from forall._vmap.mutation.mutation_log import write_counts
from forall._vmap.rule_makers import basic, pointwise


def resolve_handler(func: Any) -> Any:
    """The handler for ``func``: its row, or one that is found once and kept."""
    handler = registry.HANDLERS.get(func)
    if handler is None:
        handler, way = _find_handler(func)
        if get_facts(func).into_lists:
            handler = _make_counting_handler(handler)
        registry.HANDLERS[func] = handler
        registry.WAYS[func] = way
    return handler


def _make_counting_handler(write: Any) -> Any:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        with bump_versions(find_written_tensors(func, args, kwargs)):
            return write(level, func, args, kwargs)

    return handler


def _find_handler(func: Any) -> tuple[Any, str]:
    fact = get_facts(func)
    if fact.is_collective:
        raise make_collective_error("vmap", func)
    if fact.mutates:
        if torch.Tag.inplace_view in func.tags:
            return _refuse_operator, "error"
        if fact.pointwise and fact.mutates == (0,) and not fact.out_names:
            return in_place.pointwise_in_place, "derived"
        if func.overloadpacket.__name__.startswith("_foreach_"):
            decomposition = _find_decomposition(func)  # tensor by tensor, each in place
            if decomposition is not None:
                return _make_decomposed_handler(decomposition), "decomposed"
        functional = find_functional(func)
        if functional is not None:
            return in_place.make_write_handler(functional, get_facts(functional).mutates), "derived"
        factory = find_factory(func)
        if factory is not None:
            return _make_factory_handler(factory), "derived"
        if fact.out_names and len(fact.out_names) == len(fact.mutates):
            return _loop_into_out, "loop"
        if has_kernel(func.name(), DispatchKey.CompositeImplicitAutograd):
            return _make_decomposed_handler(_find_decomposition(func)), "decomposed"
        return _loop_and_write, "loop"
    if func.namespace == "prims" and func.overloadpacket.__name__ in _PRIMS:
        return _make_prim_handler(_PRIMS[func.overloadpacket.__name__]), "derived"
    op = custom_op.find_custom_op(func)
    if op is not None:
        return custom_rules.make_torch_handler(op, _loop_and_warn), "custom"
    if fact.dynamic:
        return registry.HANDLERS[_BY_SHAPE], "loop"
    if fact.pointwise:
        return pointwise.handle_pointwise, "pointwise"
    view = _find_copied_view(func)
    if view is not None:
        return _make_view_copy_handler(view), "derived"
    decomposition = _find_decomposition(func)
    if decomposition is not None:
        return _make_decomposed_handler(decomposition), "decomposed"
    return (_loop_and_write if fact.writes else _loop_and_warn), "loop"


def _make_factory_handler(factory: Any) -> Any:
    """Make a handler of a factory with out=: a new tensor in its dtype, written as to any out=."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        out = kwargs[get_facts(func).out_names[0]]
        made = functools.partial(factory, dtype=out.dtype, device=out.device)
        return in_place.make_write_handler(made)(level, func, args, kwargs)

    return handler


# The handler of this operator serves all that give each example a shape of its own.
_BY_SHAPE = torch.ops.aten.unique_dim.default
# Torch adds its zeros without memory to our values by these prims, once a level has ended.
_PRIMS = {name: getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")}


def _make_prim_handler(op: Any) -> Any:
    """Make a handler that runs the usual operator in the place of a prim, which takes less."""
    return lambda level, func, args, kwargs: resolve_handler(op)(level, op, args, kwargs)


def _refuse_operator(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    raise documented_error(NotImplementedError, "resized")(
        f"vmap: {func} gives a tensor other memory or another shape in place, and has no rule.\n"
        "Use the form that returns a new tensor."
    )


# --- copies of views ---------------------------------------------------------------------------


def _find_copied_view(func: Any) -> Any | None:
    """The view ``f`` that ``f_copy`` copies; None for any other operator."""
    name = func.overloadpacket.__name__
    if not name.endswith("_copy"):
        return None
    packet = getattr(getattr(torch.ops, func.namespace), name.removesuffix("_copy"), None)
    view = getattr(packet, func._overloadname, None)
    return view if view in registry.HANDLERS else None


def _make_view_copy_handler(view: Any) -> Any:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        copy = torch.ops.aten.clone.default
        with basic.reenter_level(level):
            try:
                out = view(*args, **kwargs)
            except RuntimeError:  # a copy asks less of the memory than a view
                dense = copy(args[0], memory_format=torch.contiguous_format)
                out = view(dense, *args[1:], **kwargs)
            return pytree.map_tensors(lambda t: copy(t, memory_format=torch.contiguous_format), out)

    return handler


# --- decompositions ----------------------------------------------------------------------------


class _RunningDecompositions(threading.local):
    """The decompositions that this thread runs now, each at its level."""

    def __init__(self) -> None:
        self.now: set[tuple[Any, int]] = set()


_running = _RunningDecompositions()
exception_safety.PUT_BACK.append(lambda *_: _running.now.clear())


def _find_decomposition(func: Any) -> Any | None:
    """``run(*args, **kwargs)`` in terms of other operators, or None."""
    keys = [DispatchKey.CompositeImplicitAutograd]
    if func.namespace in {"aten", "prims"}:
        # Elsewhere this is any code for any device, not operators that we would see.
        keys.append(DispatchKey.CompositeExplicitAutograd)
    for key in keys:
        if has_kernel(func.name(), key):
            return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)
    return get_decompositions().get(func)


def _make_decomposed_handler(run: Any) -> Any:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        one_by_one = _loop_and_write if get_facts(func).writes else _loop_and_warn
        entry = (func, level.entry.number)
        if entry in _running.now:
            return one_by_one(level, func, args, kwargs)
        _running.now.add(entry)
        before = write_counts.times
        try:
            with basic.reenter_level(level):
                return run(*args, **kwargs)
        except RuntimeError as error:
            half_done = get_facts(func).writes and write_counts.times != before
            if half_done or not _needs_plain_tensor(error):
                raise
        finally:
            _running.now.discard(entry)
        return one_by_one(level, func, args, kwargs)

    return handler


def _needs_plain_tensor(error: RuntimeError) -> bool:
    """True if one plain example could succeed where the stacks have failed."""
    if isinstance(error, (NotImplementedError, DataDependentError)):
        return True
    return any(words in str(error) for words in _NO_MEMORY)


# Torch's errors where a kernel reads a wrapper's memory.
_NO_MEMORY = ("its data is not allocated yet", "doesn't have storage")


# --- loops -------------------------------------------------------------------------------------


def _loop_and_warn(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    _warn_of_slow_loop(func)
    return basic.loop_and_stack(level, func, args, kwargs)


def _loop_and_write(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Loop over an operator that only exists in place, and write into the examples' targets."""
    arguments = func._schema.arguments
    given = [*args, *(kwargs.get(a.name) for a in arguments[len(args) :])]
    names, places = [a.name for a in arguments], find_written_args(func, args)
    known = {}
    for i, value in enumerate(given):
        if i in places or names[i] in places:
            alias = arguments[i].alias_info
            if alias is not None:
                known[frozenset(alias.before_set)] = value
            for target in value if isinstance(value, (list, tuple)) else [value]:
                if target is not None:
                    in_place.get_writable_stack(
                        level, func, target, [v for v in given if v is not value]
                    )
    _warn_of_slow_loop(func)
    out = basic.loop_and_stack(level, func, args, kwargs)
    returns = func._schema.returns
    if len(returns) < 2:
        return known.get(_get_alias_set(returns[0]), out) if returns else None
    return tuple(known.get(_get_alias_set(r), o) for r, o in zip(returns, out, strict=True))


def _loop_into_out(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Loop over an operator that only exists with out=, with a new tensor for each example."""
    dtypes = {name: kwargs[name].dtype for name in get_facts(func).out_names}

    def one(*a: Any, **k: Any) -> Any:
        fresh = {n: torch.empty(0, dtype=d, device=kwargs[n].device) for n, d in dtypes.items()}
        return func(*a, **k, **fresh)

    def functional(*a: Any, **k: Any) -> Any:
        with run_outside(level):
            return basic.loop_and_stack(level, one, a, k)

    _warn_of_slow_loop(func)
    return in_place.make_write_handler(functional)(level, func, args, kwargs)


def _get_alias_set(returned: Any) -> frozenset:
    return frozenset() if returned.alias_info is None else frozenset(returned.alias_info.before_set)


def _warn_of_slow_loop(func: Any) -> None:
    note_looped_operator(
        str(func),
        f"vmap: {func} has no rule and runs once per example.\n"
        "Add a rule with forall.extend.batching_rule to make it fast.",
    )
