"""The mutation log of a call: its reads of memory that was there before it, and its writes.

NOTE [older memory]
    In the loop every example sees what the examples before it left in a tensor from outside. Under
    vmap all run as one, so a write into such memory is right only if the order of the examples
    cannot show: the function adds to it and reads none of it, before or after. The ledger of a
    level logs which memory operators have read, and which they have written to. Additions are
    logged and applied at the end of the call, all examples at once; an overwrite runs once. A mix
    of both, or a read of what others wrote, is an error. A call that fails has added nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import exception_safety, pytree, symbolic_diagonal
from forall._compat.dispatch_state import (
    below_autograd,
    functions_off,
    is_accumulating,
    no_dispatch,
)
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import (
    find_written_args,
    find_written_tensors,
    flatten_tensors,
    get_facts,
)
from forall._compat.private_api import DispatchKey, has_kernel
from forall._compat.storage import get_storage_id
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import (
    format_columns,
    format_short,
    make_collective_error,
    make_shared_write_error,
)
from forall._core.levels import top
from forall._vmap import registry
from forall._vmap.batched_tensor import AliasFamily, BatchedTensor
from forall._vmap.mutation.pending_updates import (
    AffineUpdate,
    PendingUpdates,
    is_external,
    is_pure_sum,
    is_shared_external,
    locate_in_storage,
    require_all_examples,
)
from forall._vmap.mutation.rollback import UndoState, find_logs, get_grad_key
from forall._vmap.rule_makers.basic import lower_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tensor = torch.Tensor


def get_memory_key(t: Tensor) -> int:
    """A key of the memory that a tensor lies in; two names of the same memory have the same key."""
    while isinstance(t, Wrapper):
        if (
            type(t) is BatchedTensor and not t.is_external
        ):  # made under an outer level: it may yet get an axis
            if t.family is None:
                t.family = AliasFamily(t.value, t.axis, t.is_external)
                t.family.add(t)
            return id(t.family)
        t = t.value
    try:
        return get_storage_id(t)
    except NotImplementedError:  # sparse: no memory that another tensor could view
        return id(t)


def make_summed_grad_error(leaf: Tensor) -> RuntimeError:
    rows = [("the leaf", format_short(leaf), "from before the call, one for all examples")]
    return documented_error(RuntimeError, "read-and-written")(
        "vmap: .grad is read where backward() has left the sum over all examples in it.\n"
        f"{format_columns(rows)}\n"
        "In the loop an example would meet the sum over those before it.\n"
        "torch.autograd.grad(loss, tensor) gives each example its own gradient."
    )


def log_plain_read(call: str, t: Tensor) -> None:
    """Log a read that is no operator, of the memory of an ordinary tensor."""
    for level, log in find_logs(top()):
        if level.state.logs_writes:
            log.log_read(call, t)


class _WriteCounts(threading.local):
    """Counts of this thread's writes into examples, draws for them, and logged additions."""

    times = 0

    def __init__(self) -> None:
        self.named: list[AliasFamily] = []  # written to, of those with several names


write_counts = _WriteCounts()
exception_safety.PUT_BACK.append(lambda *_: write_counts.named.clear())


def count_write(target: Any) -> None:
    """Count a write and remember its target, for code that later asks what was written."""
    write_counts.times += 1
    symbolic_diagonal.invalidate_marks()
    family = target.family if type(target) is BatchedTensor else None
    if family is not None:
        family.times += 1
        if family.names:
            write_counts.named.append(family)


def take_written_families() -> list[AliasFamily]:
    """The families of several names that were written into since the last call of this function."""
    found = [*dict.fromkeys(write_counts.named)]
    write_counts.named.clear()
    return found


_FEW = 100
_SETS = ("read", "mapped_written", "overwritten", "renewed", "leaves")


class MutationLog:
    """The log of one call's reads and writes of memory from before it. See NOTE [older memory]."""

    __slots__ = (
        "_undo_state",
        "accounts",
        "arguments",
        "leaves",
        "mapped_written",
        "overwritten",
        "read",
        "renewed",
        "seen",
        "undoable",
    )

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.seen: dict[int, Tensor] = {}  # some whose memory was read, kept so that ids hold
        self.arguments: list[Tensor] = []  # the mapped ones
        self.mapped_written: set[int] = set()
        self.overwritten: set[int] = set()
        self.renewed: set[int] = set()  # overwritten as a whole, before anything read it
        self.accounts: dict[int, PendingUpdates] = {}
        self._undo_state: UndoState | None = None
        self.undoable = False  # whether the call may have to be made again
        self.leaves: set[int] = set()  # ids of those that a backward pass of the call added to

    @property
    def undo_state(self) -> UndoState:
        """The values and histories from before the call; there are none in most calls."""
        if self._undo_state is None:
            self._undo_state = UndoState()
        return self._undo_state

    def is_mapped_memory(self, key: int) -> bool:
        """True if ``key`` is the memory of a mapped argument."""
        return any(get_memory_key(a) == key for a in self.arguments)

    def log_operand_reads(self, func: Any, met: list[Tensor]) -> None:
        """Log the reads of an operator's operands, in little time: every operator asks for it."""
        seen = self.seen
        for t in met:
            v = t.value if type(t) is BatchedTensor else t
            if id(v) not in seen:
                self.log_read(func, t)
                if len(seen) < _FEW:
                    seen[id(v)] = v

    def log_read(self, func: Any, t: Tensor) -> None:
        key = get_memory_key(t)
        if key in self.accounts or key in self.mapped_written:
            raise make_conflict_error(f"{func} reads", t, "written to")
        self.read.add(key)

    def log_mapped_write(self, func: Any, target: Tensor) -> None:
        """Log a write into a mapped argument: each example its own part, if none reads others."""
        key = get_memory_key(target)
        if key in self.read:
            raise make_conflict_error(f"{func} writes to", target, "captured and read")
        self.mapped_written.add(key)

    def log_overwrite(self, func: Any, target: Tensor, whole: bool) -> None:
        """Log a write of the same data for all examples, which runs once."""
        key = get_memory_key(target)
        if key in self.renewed:
            return
        if key in self.accounts or self.is_mapped_memory(key):
            raise make_conflict_error(f"{func} overwrites", target, "written to")
        if key in self.read:
            raise make_conflict_error(f"{func} overwrites", target, "read")
        self.overwritten.add(key)
        if whole:
            self.renewed.add(key)

    def log_update(self, func: Any, target: Tensor, below: Tensor, update: Any, size: int) -> None:
        """Log an update of the target that adds up; ``below`` is the target one level down."""
        if not self.get_pending_updates(func, target).add(below, update, size):
            raise make_conflict_error(f"{func} writes to", target, "written to otherwise")

    def get_pending_updates(self, func: Any, target: Tensor) -> PendingUpdates:
        """The pending updates of a target's memory, which nothing else may read or overwrite."""
        write_counts.times += 1
        key = get_memory_key(target)
        if key in self.read or self.is_mapped_memory(key):
            raise make_conflict_error(f"{func} adds to", target, "read")
        if key in self.overwritten:
            raise make_conflict_error(f"{func} adds to", target, "overwritten")
        self.keep_history(target)
        return self.accounts.setdefault(key, PendingUpdates())

    def keep_value(self, value: Tensor) -> None:
        """Remember what an older tensor, from just outside the level, holds before a write."""
        if self.undoable:
            self.undo_state.keep_value((get_memory_key(value), locate_in_storage(value)), value)

    def keep_history(self, target: Tensor) -> None:
        """Remember the history of an older tensor before autograd records a write on it."""
        if self.undoable:
            self.undo_state.keep_history(target)

    def keep_grads(self, node: Any) -> None:
        """Remember the .grad of leaves that a backward pass which goes on from ``node`` adds to."""
        if self.undoable:
            self.undo_state.keep_grads(node)

    def log_grad_write(self, leaf: Tensor) -> None:
        self.undo_state.keep_grad(leaf)
        self.leaves.discard(id(leaf))
        self.overwritten.add(get_grad_key(leaf))

    def find_grad_keys(self) -> list[int]:
        """The memory of gradients that backward passes of the call added to."""
        leaves = [leaf for leaf, *_ in self.undo_state.grads.values()]
        with functions_off():
            known = [x.grad for x in leaves if x.grad is not None]
        return [*map(get_grad_key, leaves), *map(get_memory_key, known)]

    def drop_undo_state(self) -> None:
        """Drop what was kept to undo the call, which will not be made again."""
        self.undoable, self._undo_state = False, None

    def unwrap_shared_grads(self) -> None:
        """Make a .grad that all examples share an ordinary tensor, at the end of the call."""
        if self._undo_state is not None:
            self._undo_state.unwrap_shared_grads()

    def take_snapshot(self) -> tuple:
        """A snapshot of the log, for `restore_snapshot`."""
        sets = [set(getattr(self, name)) for name in _SETS]
        return sets, {key: account.copy() for key, account in self.accounts.items()}

    def restore_snapshot(self, mark: tuple) -> None:
        """Reset the log to a snapshot, since what followed it was undone."""
        sets, accounts = mark
        self.accounts = {key: account.copy() for key, account in accounts.items()}
        for name, known in zip(_SETS, sets, strict=True):
            setattr(self, name, set(known))

    def apply_updates(self, size: int) -> None:
        """Apply the pending updates at the end of the call, just outside its level."""
        if self.accounts and size:
            with functions_off(), below_autograd():
                for account in self.accounts.values():
                    for target in account.targets():
                        self.keep_value(target)
                    account.apply_updates()


def take_log_snapshots(level: Any) -> list[tuple[MutationLog, tuple]]:
    """The ledgers of a level and of those further out, each with a snapshot."""
    if level is None:
        return []
    return [(ledger, ledger.take_snapshot()) for _, ledger in find_logs(level)]


# --- the accesses of operators ------------------------------------------------------------------


def check_external_access(
    level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool, met: list[Tensor]
) -> Callable | None:
    """Tell the ledger of an operator that meets older memory shared by all examples, in ``met``.

    Returns the handler where it is not the usual one. See NOTE [older memory].
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
        raise make_collective_error("vmap", func)
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
            if is_external(t, level):
                raise _make_counter_error(func, t)


def _handle_external_write(
    level: Any, func: Any, args: tuple, kwargs: dict, mapped: bool
) -> Callable | None:
    places = find_written_args(func, args)
    into = [t for t in find_written_tensors(func, args, kwargs) if is_shared_external(t, level)]
    for t in into:
        _refuse_leaf(level, t)
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


def _refuse_leaf(level: Any, target: Tensor) -> None:
    """Raise as torch does for a write into a captured leaf that requires grad, or a view of one.

    Autograd does not raise: the leaf's stand-in is no leaf.
    """
    if not (torch.is_grad_enabled() and target.requires_grad and type(target) is BatchedTensor):
        return
    base = target if target._base is None else target._base
    for t, stand_in in level.lift_cache.values():
        if stand_in is base and t.is_leaf and t.requires_grad:
            raise RuntimeError(
                f"a {'' if base is target else 'view of a '}leaf Variable that requires grad is "
                "being used in an in-place operation."
            )


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
        raise make_shared_write_error(str(func), target, [])
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


# --- errors --------------------------------------------------------------------------------------


def make_unrecorded_error(func: Any, t: Tensor) -> RuntimeError:
    return documented_error(RuntimeError, "write-with-derivative")(
        f"vmap: {func} writes to a tensor from before the call, with a derivative at stake.\n"
        f"{format_columns([('written to', format_short(t), 'shared by all examples')])}\n"
        "Autograd would count this write once, or not at all, where the loop makes one for each "
        "example.\n"
        "Write what is detached (.detach()), or return it and do the write outside vmap."
    )


def make_conflict_error(does: str, t: Tensor, done: str) -> RuntimeError:
    return documented_error(RuntimeError, "read-and-written")(
        f"vmap: {does} a tensor from before the call that the function has {done}.\n"
        f"{format_columns([('the tensor', format_short(t), 'shared by all examples')])}\n"
        "In the loop an example would meet what those before it wrote; here all run as one.\n"
        "Return what each example adds, and add it up outside vmap. To give every example its own, "
        "map the tensor (in_dims) or clone it inside the function (.clone())."
    )
