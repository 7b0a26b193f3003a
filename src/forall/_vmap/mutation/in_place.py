"""In-place and out= operators on examples: into stacks, and into memory from before the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import is_accumulating, no_dispatch
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import (
    find_functional,
    find_written_args,
    find_written_tensors,
    flatten_tensors,
    get_facts,
)
from forall._compat.private_api import DispatchKey, has_kernel
from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import pad_rank
from forall._core.errors import collective_error, format_columns, format_short, shared_write_error
from forall._vmap import registry
from forall._vmap.batched_tensor import BatchedTensor, batch_alias_family, replace_stack
from forall._vmap.mutation.mutation_log import (
    count_write,
    get_memory_key,
    make_conflict_error,
    make_unrecorded_error,
)
from forall._vmap.mutation.pending_updates import (
    AffineUpdate,
    is_pure_sum,
    is_shared_external,
    locate_in_storage,
    require_all_examples,
)
from forall._vmap.rule_makers.basic import (
    is_mapped,
    lower_shared,
    move_to_front,
    reenter_level,
    wrap_results,
)
from forall._vmap.rule_makers.pointwise import OperandConverter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tensor = torch.Tensor


# --- derived from the functional overload --------------------------------------------------------


def make_write_handler(functional: Any, done: tuple = ()) -> Callable:
    """Make a handler of in-place and out= forms: compute what they would write, then write it.

    ``done`` names the arguments that ``functional`` writes to by itself.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        fact = get_facts(func)
        mutates = [m for m in fact.mutates if m not in done]
        targets = [args[m] if isinstance(m, int) else kwargs.get(m) for m in mutates]
        rest = {k: a for k, a in kwargs.items() if k not in fact.out_names}
        with reenter_level(level):
            results = functional(*args, **rest)
        if len(targets) == 1:  # for several, lists among them, the functional lists what it writes
            results = (results,)
        elif not fact.out_names:
            results = results[-len(targets) :]
        put = _write_out if fact.out_names or func in _GROWS else _write_in_place
        for target, result in zip(targets, results, strict=True):
            if isinstance(target, (list, tuple)):
                for t, r in zip(target, result, strict=True):
                    put(level, func, t, r)
            elif target is not None:
                put(level, func, target, result)
        return _pack_targets(targets) if func._schema.returns else None

    return handler


def _write_in_place(level: Any, func: Any, target: Any, result: Tensor) -> None:
    _check_cast(target, result)
    write_to_target(level, func, target, result)


def _check_cast(target: Any, result: Tensor) -> None:
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
        )


def _write_out(level: Any, func: Any, target: Any, result: Tensor) -> None:
    _check_cast(target, result)
    if target.shape != result.shape:
        _resize_and_write(level, func, target, result)
    else:
        write_to_target(level, func, target, result)


def _resize_and_write(level: Any, func: Any, target: Any, result: Tensor) -> None:
    """Give an out= target the size of the result, as long as only this call knows the target."""
    if _is_external(target, level):
        rows = [("written to", format_short(target)), ("result", format_short(result))]
        raise documented_error(RuntimeError, "resized")(
            f"vmap: {func} would resize what it writes to, a tensor from before the call.\n"
            f"{format_columns(rows)}\n"
            "Give it the result's shape, or use the form that returns a new tensor."
        )
    axis = 0 if is_mapped(result, level) else None
    value = lower_shared(result, level) if axis is None else move_to_front(result)
    replace_stack(target, value.to(target.dtype), axis)


def write_all(level: Any, func: Any, targets: list, results: Any) -> Any:
    """Write results into targets, as examples; returns the targets as the operator would."""
    for target, result in zip(targets, results, strict=True):
        write_to_target(level, func, target, result)
    return _pack_targets(targets)


def _pack_targets(targets: list) -> Any:
    return targets[0] if len(targets) == 1 else tuple(targets)


def write_to_target(level: Any, func: Any, target: Any, data: Tensor) -> None:
    """target.copy_(data) for every example, one level down."""
    view_of = get_writable_stack(level, func, target, [data])
    to, align = _align_to_target(level, view_of)
    to.copy_(align(data))


def _align_to_target(level: Any, stack: Tensor) -> tuple[Tensor, Any]:
    """The tensor to write to, and a function that aligns operands to it example by example.

    A single example is written as itself: as a stack of one, its memory can have other strides in a
    view of the same, and torch refuses to write to a tensor from one that it overlaps in part.
    """
    if stack.shape[0] == 1:
        return (
            stack.select(0, 0),
            lambda a: (
                move_to_front(a).select(0, 0) if is_mapped(a, level) else lower_shared(a, level)
            ),
        )
    rank = stack.dim() - 1

    def align(a: Tensor) -> Tensor:
        if is_mapped(a, level):
            return pad_rank(move_to_front(a), rank)
        v = lower_shared(a, level)  # one of more dims must not broadcast over the examples
        return v.unsqueeze(0) if v.dim() > rank else v

    return stack, align


def get_writable_stack(level: Any, func: Any, target: Any, data: list) -> Tensor:
    """The target's stack (B, *S) to write into, with an axis if the examples will differ in it."""
    count_write(target)
    if not (type(target) is BatchedTensor and target.level is level):
        raise shared_write_error(str(func), target, [d for d in data if is_mapped(d, level)])
    if target.axis is None:
        if target.is_external:
            raise shared_write_error(str(func), target, [d for d in data if is_mapped(d, level)])
        batch_alias_family(target, level.size)
    if target.is_external:
        if level.state.logs_writes:
            level.state.mutation_log.log_mapped_write(func, target)
        level.state.mutation_log.keep_value(target.value)
        _bump_source_version(target)
    return move_to_front(target)


def _bump_source_version(target: BatchedTensor) -> None:
    """Bump the version of a caller's tensor, since rules write below autograd's version count.

    A view that was made below has a version of its own.
    """
    value = target.value if target.family is None else target.family.value
    if not isinstance(value, BatchedTensor):
        torch.autograd.graph.increment_version(value)
        if target.source_version is not None:
            target.source_version.renew()


def pointwise_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """x.op_(y, ..): the examples of the others broadcast to x's."""
    target = args[0]
    to, align = _align_to_target(level, get_writable_stack(level, func, target, list(args[1:])))
    operands = OperandConverter(level, func, args, kwargs)

    def operand(a: Any) -> Any:
        return operands.convert(a, align(a)) if isinstance(a, Tensor) else a

    given, named = [operand(a) for a in args[1:]], {k: operand(a) for k, a in kwargs.items()}
    if operands.exact_in is None:
        func(to, *given, **named)
    else:
        functional: Any = find_functional(func)
        to.copy_(functional(to.float(), *given, **named))
    return target


def shared_data_write(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an in-place or out= operator none of whose arguments differs between examples."""
    fact = get_facts(func)
    flat = find_written_tensors(func, args, kwargs)
    for target in flat:
        count_write(target)
    out = func(
        *[lower_shared(a, level) for a in args],
        **{k: lower_shared(a, level) for k, a in kwargs.items()},
    )
    for target in flat:
        ours = type(target) is BatchedTensor and target.level is level and target.axis is None
        if ours and target.shape != target.value.shape:
            replace_stack(target, target.value, None)
    targets = [args[m] if isinstance(m, int) else kwargs[m] for m in fact.mutates]
    if fact.out_names:
        return targets[0] if len(targets) == 1 else tuple(targets)
    if not func._schema.returns:
        return None
    if len(func._schema.returns) == 1:
        return targets[0]
    return wrap_results(out, None, level)


def _is_external(target: Any, level: Any) -> bool:
    return not (type(target) is BatchedTensor and target.level is level and not target.is_external)


# --- memory from before the call -----------------------------------------------------------------


def check_external_access(
    level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool, met: list[Tensor]
) -> Callable | None:
    """Tell the ledger of an operator that meets older memory shared by all examples, in ``met``.

    Returns the handler where it is not the usual one. See NOTE [older memory] in `mutation_log`.
    """
    kind = _KINDS.get(func) or _classify_access(func)
    if kind is _READS and level.state.logs_writes:
        return level.state.mutation_log.log_operand_reads(func, met)
    if kind is _LOOKS_ONLY or is_accumulating():
        return None
    if level.state.calls == 1:
        keep_once_written(
            level, find_written_tensors(func, args, kwargs) if kind is _WRITES else ()
        )
        return None
    if not (level.active and not level.records_on_value):  # no end of a call to apply updates at
        return _check_without_end(level, func, args, kwargs, mapped)
    if level.state.calls is not None:  # the call was made before: what it did to memory is done
        into = () if mapped or kind is not _WRITES else find_written_tensors(func, args, kwargs)
        return _return_target if any(is_shared_external(t, level) for t in into) else None
    if kind is _WRITES:
        return _handle_external_write(level, func, args, kwargs, mapped)
    return level.state.mutation_log.log_operand_reads(func, met)


_LOOKS_ONLY, _READS, _WRITES, _MAY_READ = "looks", "reads", "writes", "reads for the user"
_KINDS: dict[Any, str] = {}
_OF_AUTOGRAD = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.clone.default})


def _classify_access(func: Any) -> str:
    """The kind of access that an operator has to older tensors among its arguments."""
    fact, name = get_facts(func), func.overloadpacket.__name__
    if fact.is_collective:
        raise collective_error("vmap", func)
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


def keep_once_written(level: Any, targets: Iterable[Tensor]) -> None:
    """Keep the targets of writes that run at once, since examples are directions of one call."""
    for t in targets:
        if is_shared_external(t, level):
            level.state.mutation_log.keep_value(lower_shared(t, level))


def _check_without_end(level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool) -> None:
    """Refuse a write to an older tensor where no call will end, unless once is enough."""
    if not mapped and not _is_idempotent(func):
        for t in find_written_tensors(func, args, kwargs):
            if _is_external(t, level):
                raise _make_counter_error(func, t)


def _handle_external_write(
    level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool
) -> Callable | None:
    places = find_written_args(func, args)
    into = [t for t in find_written_tensors(func, args, kwargs) if is_shared_external(t, level)]
    read = [a for i, a in enumerate(args) if i not in places]
    read = flatten_tensors([*read, *(a for k, a in kwargs.items() if k not in places)])
    if (
        into
        and func is _COPY
        and is_shared_external(args[1], level)
        and _are_same_memory(*args[:2])
    ):
        return _return_target  # x[i] += y ends in x[i] = what x[i] is already
    ledger = level.state.mutation_log
    for t in read:
        if is_shared_external(t, level):
            ledger.log_read(func, t)
    if not into:
        return None
    renewed = [get_memory_key(t) in ledger.renewed for t in into]
    if not mapped and all(renewed):
        require_all_examples(level, func, into[0])
        return None
    rule = registry.UPDATES.get(func)
    update = rule and rule(level, lower_shared(args[0], level), *args[1:], **kwargs)
    if any(renewed) or not is_pure_sum(update):
        require_all_examples(level, func, into[0])
    if update is not None:
        _log_addition(level, func, args, kwargs, update)
        return _return_target
    if mapped:
        return None  # its own handler says why it cannot be
    if not _is_idempotent(func):
        raise _make_counter_error(func, into[0])
    _check_overwrite(level, func, into, read)
    return None if level.size else _return_target


def _log_addition(level: Any, func: Any, args: tuple, kwargs: dict, update: Any) -> None:
    """Log an update of the target, once torch would accept it for one example."""
    target = args[0]
    with no_dispatch():
        func(*pytree.map_tensors(_make_meta, args), **pytree.map_tensors(_make_meta, kwargs))
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in flatten_tensors([*args, *kwargs.values()])
    ):
        if target.requires_grad and type(target) is BatchedTensor and target.level is level:
            raise make_unrecorded_error(func, target)
        level.state.mutation_log.get_pending_updates(func, target).recorded = True
    level.state.mutation_log.log_update(
        func, target, lower_shared(target, level), update, level.size
    )


def log_step(level: Any, func: Any, target: Tensor, step: AffineUpdate) -> None:
    """Log a `AffineUpdate` that autograd does not see, for the end of the call."""
    if not (level.active and not level.records_on_value) or level.state.calls is not None:
        raise shared_write_error(str(func), target, [])
    require_all_examples(level, func, target)
    level.state.mutation_log.log_update(func, target, lower_shared(target, level), step, level.size)


def _make_meta(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _check_overwrite(level: Any, func: Any, written: list, read: list) -> None:
    """Write the same data for all examples once, if nothing has seen the memory before."""
    ledger = level.state.mutation_log
    for t in written:
        if torch.is_grad_enabled() and any(r.requires_grad for r in read):
            raise make_unrecorded_error(func, t)
        ledger.keep_value(lower_shared(t, level))
        depends = func.overloadpacket.__name__ in _BY_VALUE
        if depends and get_memory_key(t) in ledger.overwritten:
            raise make_conflict_error(f"{func} writes to", t, "overwritten")
        ledger.log_overwrite(
            func, t, func.overloadpacket.__name__ in _WHOLE and _is_whole_memory(t)
        )
        if depends:
            ledger.log_read(func, t)


def _is_whole_memory(t: Tensor) -> bool:
    """True if a tensor is all of its memory."""
    while isinstance(t, Wrapper):
        if type(t) is BatchedTensor and not t.is_external:
            return t.family is None
        t = t.value
    return t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _are_same_memory(a: Tensor, b: Tensor) -> bool:
    return get_memory_key(a) == get_memory_key(b) and locate_in_storage(a) == locate_in_storage(b)


def _return_target(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
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


def _is_idempotent(func: Any) -> bool:
    """True if doing it once leaves what doing it for every example in turn would leave."""
    fact = get_facts(func)
    return func.overloadpacket.__name__ in _IDEMPOTENT or bool(
        fact.out_names and not fact.statistics
    )


def _make_counter_error(func: Any, target: Tensor) -> RuntimeError:
    return documented_error(RuntimeError, "repeated-write")(
        f"vmap: {func} changes a tensor from before the call, once for every example.\n"
        f"{format_columns([('written to', format_short(target), 'shared by all examples')])}\n"
        "Clone it inside the function (.clone()), or move the write outside vmap."
    )
