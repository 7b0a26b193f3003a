"""In-place and out= operators on examples: into stacks, and into memory from before the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import is_accumulating, no_dispatch
from forall._compat.op_schema import (
    facts,
    tensors_in,
    writes,
    written_by,
)
from forall._compat.private_api import DispatchKey, has_kernel
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import collective, columns, shared_write, short
from forall._vmap import registry
from forall._vmap.batched_tensor import Batched, promote, refit
from forall._vmap.mutation.mutation_log import (
    conflict,
    memory,
    note_write,
    unrecorded,
)
from forall._vmap.mutation.pending_updates import (
    Step,
    by_all,
    is_shared_older,
    only_adds,
    place,
)
from forall._vmap.rule_makers.basic import (
    common_dtype,
    front,
    is_mapped,
    level_on,
    lower,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tensor = torch.Tensor


# --- derived from the functional overload --------------------------------------------------------


def derived(functional: Any, done: tuple = ()) -> Callable:
    """Make a handler of in-place and out= forms: compute what they would write, then write it.

    ``done`` names the arguments that ``functional`` writes to by itself.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        fact = facts(func)
        mutates = [m for m in fact.mutates if m not in done]
        targets = [args[m] if isinstance(m, int) else kwargs.get(m) for m in mutates]
        rest = {k: a for k, a in kwargs.items() if k not in fact.out_names}
        with level_on(level):
            results = functional(*args, **rest)
        if len(targets) == 1:  # for several, lists among them, the functional lists what it writes
            results = (results,)
        elif not fact.out_names:
            results = results[-len(targets) :]
        put = _write_out if fact.out_names or func in _GROWS else write
        for target, result in zip(targets, results, strict=True):
            if isinstance(target, (list, tuple)):
                for t, r in zip(target, result, strict=True):
                    put(level, func, t, r)
            elif target is not None:
                put(level, func, target, result)
        return _named(targets) if func._schema.returns else None

    return handler


def _write_out(level: Any, func: Any, target: Any, result: Tensor) -> None:
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if target.shape != result.shape:
        _resize_out(level, func, target, result)
    else:
        write(level, func, target, result)


def _resize_out(level: Any, func: Any, target: Any, result: Tensor) -> None:
    """Give an out= target the size of the result, as long as only this call knows the target."""
    if _is_older(target, level):
        raise RuntimeError(
            f"vmap: {func} would resize what it writes to, a tensor from before the call.\n"
            f"{columns([('written to', short(target)), ('result', short(result))])}\n"
            "Give it the result's shape, or use the form that returns a new tensor."
        )
    axis = 0 if is_mapped(result, level) else None
    value = lower(result, level) if axis is None else front(result)
    refit(target, value.to(target.dtype), axis)


def level_write(level: Any, func: Any, targets: list, results: Any) -> Any:
    """Write results into targets, as examples; returns the targets as the operator would."""
    for target, result in zip(targets, results, strict=True):
        write(level, func, target, result)
    return _named(targets)


def _named(targets: list) -> Any:
    return targets[0] if len(targets) == 1 else tuple(targets)


def write(level: Any, func: Any, target: Any, data: Tensor) -> None:
    """target.copy_(data) for every example, one level down."""
    view_of = writable(level, func, target, [data])
    to, align = _aligned(level, view_of)
    to.copy_(align(data))


def _aligned(level: Any, stack: Tensor) -> tuple[Tensor, Any]:
    """The tensor to write to, and a function that aligns operands to it example by example.

    A single example is written as itself: as a stack of one, its memory can have other strides in a
    view of the same, and torch refuses to write to a tensor from one that it overlaps in part.
    """
    if stack.shape[0] == 1:
        return stack.select(
            0, 0
        ), lambda a: front(a).select(0, 0) if is_mapped(a, level) else lower(a, level)
    rank = stack.dim() - 1

    def align(a: Tensor) -> Tensor:
        if not is_mapped(a, level):
            return lower(a, level)
        v = front(a)
        missing = rank - v.dim() + 1
        return v.reshape(v.shape[0], *(1,) * missing, *v.shape[1:]) if missing > 0 else v

    return stack, align


def writable(level: Any, func: Any, target: Any, data: list) -> Tensor:
    """The target's stack (B, *S) to write into, with an axis if the examples will differ in it."""
    note_write(target)
    if not (type(target) is Batched and target.level is level):
        raise shared_write(str(func), target, [d for d in data if is_mapped(d, level)])
    if target.axis is None:
        if target.older:
            raise shared_write(str(func), target, [d for d in data if is_mapped(d, level)])
        promote(target, level.size)
    if target.older:
        if level.notes:
            level.ledger.writes_mapped(func, target)
        level.ledger.keep(target.value)
        _note_write(target)
    return front(target)


def _note_write(target: Batched) -> None:
    """Bump the version of a caller's tensor, since rules write below autograd's version count.

    A view that was made below has a version of its own.
    """
    value = target.value if target.family is None else target.family.value
    if not isinstance(value, Batched):
        torch.autograd.graph.increment_version(value)
        if target.came is not None:
            target.came.renew()


def pointwise_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """x.op_(y, ..): the examples of the others broadcast to x's."""
    target = args[0]
    to, align = _aligned(level, writable(level, func, target, list(args[1:])))
    common = common_dtype([a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)], level)

    def operand(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        v = align(a)
        if v.device != to.device and is_mapped(a, level) and not a.dim() and v.is_cpu:
            v = v.to(to.device)  # a CPU tensor of rank 0 goes with any device
        plain = common is None or not is_mapped(a, level) or v.dtype in (common, torch.bool)
        return v if plain else v.to(common)

    func(to, *map(operand, args[1:]), **{k: operand(a) for k, a in kwargs.items()})
    return target


def shared_data_write(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an in-place or out= operator none of whose arguments differs between examples."""
    fact = facts(func)
    flat = written_by(func, args, kwargs)
    for target in flat:
        note_write(target)
    out = func(*[lower(a, level) for a in args], **{k: lower(a, level) for k, a in kwargs.items()})
    for target in flat:
        ours = type(target) is Batched and target.level is level and target.axis is None
        if ours and target.shape != target.value.shape:
            refit(target, target.value, None)
    targets = [args[m] if isinstance(m, int) else kwargs[m] for m in fact.mutates]
    if fact.out_names:
        return targets[0] if len(targets) == 1 else tuple(targets)
    if not func._schema.returns:
        return None
    if len(func._schema.returns) == 1:
        return targets[0]
    return wrapped(out, None, level)


def _is_older(target: Any, level: Any) -> bool:
    return not (type(target) is Batched and target.level is level and not target.older)


# --- memory from before the call -----------------------------------------------------------------


def older(level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool) -> Callable | None:
    """Tell the ledger of an operator that meets older memory shared by all examples.

    Returns the handler where it is not the usual one. See NOTE [older memory] in `ledger`.
    """
    met, level.met = level.met, []
    kind = _KINDS.get(func) or _kind(func)
    if kind is _READS and level.notes:
        return level.ledger.read_by(func, met)
    if kind is _LOOKS_ONLY or is_accumulating():
        return None
    if level.calls == 1:
        done_once(level, written_by(func, args, kwargs) if kind is _WRITES else ())
        return None
    if not (level.active and not level.records_values):  # no end of a call to apply updates at
        return _unsettled(level, func, args, kwargs, mapped)
    if level.calls is not None:  # the call was made before: what it did to older memory is done
        into = () if mapped or kind is not _WRITES else written_by(func, args, kwargs)
        return _nothing if any(is_shared_older(t, level) for t in into) else None
    if kind is _WRITES:
        return _older_written(level, func, args, kwargs, mapped)
    return level.ledger.read_by(func, met)


_LOOKS_ONLY, _READS, _WRITES, _MAY_READ = "looks", "reads", "writes", "reads for the user"
_KINDS: dict[Any, str] = {}
_OF_AUTOGRAD = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.clone.default})


def _kind(func: Any) -> str:
    """The kind of access that an operator has to older tensors among its arguments."""
    fact, name = facts(func), func.overloadpacket.__name__
    if fact.is_collective:
        raise collective("vmap", func)
    kind = _WRITES if fact.writes else _READS
    if (
        fact.view
        or func in registry.BLIND
        or (fact.statistics and has_kernel(func.name(), _COMPOSITE))  # its parts are seen
        or (name.startswith("new_") or name.endswith("_like"))
        or name in _LOOKS
    ):
        kind = _LOOKS_ONLY
    elif func in _OF_AUTOGRAD:
        kind = _MAY_READ
    _KINDS[func] = kind
    return kind


def done_once(level: Any, targets: Iterable[Tensor]) -> None:
    """Keep the targets of writes that run at once, since examples are directions of one call."""
    for t in targets:
        if is_shared_older(t, level):
            level.ledger.keep(lower(t, level))


def _unsettled(level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool) -> None:
    """Refuse a write to an older tensor where no call will end, unless once is enough."""
    if not mapped and not _once_is_enough(func):
        for t in written_by(func, args, kwargs):
            if _is_older(t, level):
                raise _counter(func, t)


def _older_written(
    level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool
) -> Callable | None:
    places = writes(func, args)
    into = [t for t in written_by(func, args, kwargs) if is_shared_older(t, level)]
    read = [a for i, a in enumerate(args) if i not in places]
    read = tensors_in([*read, *(a for k, a in kwargs.items() if k not in places)])
    if into and func is _COPY and is_shared_older(args[1], level) and _coincide(*args[:2]):
        return _nothing  # x[i] += y ends in x[i] = what x[i] is already
    ledger = level.ledger
    for t in read:
        if is_shared_older(t, level):
            ledger.reads(func, t)
    if not into:
        return None
    renewed = [memory(t) in ledger.renewed for t in into]
    if not mapped and all(renewed):
        by_all(level, func, into[0])
        return None
    rule = registry.UPDATES.get(func)
    update = rule and rule(level, lower(args[0], level), *args[1:], **kwargs)
    if any(renewed) or not only_adds(update):
        by_all(level, func, into[0])
    if update is not None:
        _add_up(level, func, args, kwargs, update)
        return _nothing
    if mapped:
        return None  # its own handler says why it cannot be
    if not _once_is_enough(func):
        raise _counter(func, into[0])
    _overwrite(level, func, into, read)
    return None if level.size else _nothing


def _add_up(level: Any, func: Any, args: tuple, kwargs: dict, update: Any) -> None:
    """Log an update of the target, once torch would accept it for one example."""
    target = args[0]
    with no_dispatch():
        func(*pytree.map_tensors(_blank, args), **pytree.map_tensors(_blank, kwargs))
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in tensors_in([*args, *kwargs.values()])
    ):
        if target.requires_grad and type(target) is Batched and target.level is level:
            raise unrecorded(func, target)
        level.ledger.account(func, target).recorded = True
    level.ledger.note(func, target, lower(target, level), update, level.size)


def step_later(level: Any, func: Any, target: Tensor, step: Step) -> None:
    """Log a `Step` that autograd does not see, for the end of the call."""
    if not (level.active and not level.records_values) or level.calls is not None:
        raise shared_write(str(func), target, [])
    by_all(level, func, target)
    level.ledger.note(func, target, lower(target, level), step, level.size)


def _blank(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _overwrite(level: Any, func: Any, written: list, read: list) -> None:
    """Write the same data for all examples once, if nothing has seen the memory before."""
    ledger = level.ledger
    for t in written:
        if torch.is_grad_enabled() and any(r.requires_grad for r in read):
            raise unrecorded(func, t)
        ledger.keep(lower(t, level))
        depends = func.overloadpacket.__name__ in _BY_VALUE
        if depends and memory(t) in ledger.overwritten:
            raise conflict(f"{func} writes to", t, "overwritten")
        ledger.overwrites(func, t, func.overloadpacket.__name__ in _WHOLE and _is_all(t))
        if depends:
            ledger.reads(func, t)


def _is_all(t: Tensor) -> bool:
    """True if a tensor is all of its memory."""
    while isinstance(t, Wrapper):
        if type(t) is Batched and not t.older:
            return t.family is None
        t = t.value
    return t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _coincide(a: Tensor, b: Tensor) -> bool:
    return memory(a) == memory(b) and place(a) == place(b)


def _nothing(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Do nothing; return what an operator in place returns."""
    return args[0] if func._schema.returns else None


_COMPOSITE = DispatchKey.CompositeImplicitAutograd  # whole, in inference mode
_COPY = torch.ops.aten.copy_.default
_GROWS = frozenset({torch.ops.aten.addbmm_.default})  # in place, but grows to the result's shape
# Queries of how a tensor lies. Autograd asks fake tensors by operators; an error ends the process.
_LOOKS = frozenset(
    {
        *("is_same_size", "_has_same_storage_numel", "_new_zeros_with_same_feature_meta"),
        *("device", "layout", "is_contiguous", "is_strides_like_format"),
        *("size", "stride", "storage_offset", "numel", "dim", "is_non_overlapping_and_dense"),
        *("sym_size", "sym_stride", "sym_storage_offset", "sym_numel", "sym_is_contiguous"),
    }
)
_WHOLE = frozenset({"copy_", "fill_", "zero_"})
# Operators that may be done once, though what they leave depends on what they find.
_BY_VALUE = frozenset({"clamp_", "clamp_min_", "clamp_max_", "relu_", "abs_"})
_IDEMPOTENT = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "masked_fill_",
        "index_fill_",
        "index_copy_",
        "index_put_",
        "scatter_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "relu_",
        "abs_",
        "set_",
        "resize_",
    }
)


def _once_is_enough(func: Any) -> bool:
    """True if doing it once leaves what doing it for every example in turn would leave."""
    fact = facts(func)
    return func.overloadpacket.__name__ in _IDEMPOTENT or bool(
        fact.out_names and not fact.statistics
    )


def _counter(func: Any, target: Tensor) -> RuntimeError:
    return RuntimeError(
        f"vmap: {func} changes a tensor from before the call, once for every example.\n"
        f"{columns([('written to', short(target), 'shared by all examples')])}\n"
        "Clone it inside the function (.clone()), or move the write outside vmap."
    )
