"""Makers of handlers: one rule per kind of operator."""

from __future__ import annotations

import functools
from functools import cmp_to_key
from typing import TYPE_CHECKING, Any

import torch

from forall._batching import table
from forall._batching.batched import Batched, promote, refit, wrap
from forall._core.errors import columns, shared_write, short
from forall._torch.names import pop_mode, push_mode
from forall._torch.schema import facts
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def is_mapped(a: Any, level: Any) -> bool:
    """Whether ``a`` differs between the examples of ``level``."""
    return type(a) is Batched and a.axis is not None and a.level is level


def front(a: Batched) -> Tensor:
    """(.., B, ..) -> (B, *S)."""
    return a.value if a.axis == 0 else a.value.movedim(a.axis, 0)


def lower(a: Any, level: Any) -> Any:
    """What a shared argument is one level down; lists element by element."""
    if type(a) is Batched:
        return a.value if a.level is level else a
    if isinstance(a, (list, tuple)):
        return [lower(b, level) for b in a]
    return a


def rank_of(a: Tensor, level: Any) -> int:
    """The rank of one example."""
    if type(a) is Batched and a.level is level:
        return a.value.dim() - (a.axis is not None)
    return a.dim()


def stacked(a: Any, level: Any) -> Tensor:
    """(B, *S), expanded where all examples share ``a``."""
    if is_mapped(a, level):
        return front(a)
    a = lower(a, level)
    return a.unsqueeze(0).expand(level.size, *a.shape)


def wrapped(out: Any, axis: int | None, level: Any) -> Any:
    """Results of an operator on stacks, as examples."""
    if isinstance(out, Tensor):
        return wrap(out, axis, level)
    if isinstance(out, (list, tuple)):
        return type(out)(wrapped(o, axis, level) for o in out)
    return out


# --- pointwise ---------------------------------------------------------------------------------


def alike(level: Any, func: Any, args: tuple) -> Any:
    """The short way for the common case: mapped operands laid out alike, and numbers."""
    x = args[0]
    if type(x) is not Batched or x.level is not level or x.axis is None:
        return None
    v, axis = x.value, x.axis
    if v.is_complex() or v.is_neg():  # kernels do not see a lazy conj or neg bit here
        return None
    if len(args) == 1:
        out = func._op(v)
    else:
        values = [v]
        for y in args[1:]:
            if type(y) is Batched:
                w = y.value
                if (
                    y.level is not level
                    or y.axis != axis
                    or w.dim() != v.dim()
                    or w.dtype != v.dtype
                    or w.is_neg()
                ):
                    return None
                values.append(w)
            elif isinstance(y, (Tensor, list, tuple)):
                return None
            else:
                values.append(y)
        out = func._op(*values)
    return wrap(out, axis, level) if isinstance(out, Tensor) else wrapped(out, axis, level)


def pointwise(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """f(x, y, ..) entry by entry: broadcasting aligns examples, not stacks."""
    axis = rank = dtype = None
    values = []
    for a in args:
        if type(a) is Batched and a.level is level:
            value = a.value
            if a.axis is not None:
                r = value.dim() - 1
                if axis is None:
                    axis, rank, dtype = a.axis, r, value.dtype
                elif axis != a.axis or rank != r:
                    break
            values.append(value)
        else:
            values.append(a)
    else:
        if not kwargs or not any(isinstance(a, Tensor) for a in kwargs.values()):
            for v in values:
                if isinstance(v, Tensor):
                    if v.dtype != dtype and rank == 0:
                        break
                elif isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor):
                    break
            else:
                if _aligned(args, values, axis, rank, level):
                    out = func(*values, **kwargs) if kwargs else func(*values)
                    return (
                        wrap(out, axis, level) if type(out) is Tensor else wrapped(out, axis, level)
                    )
    return _pointwise_with_care(level, func, args, kwargs)


def _aligned(args: tuple, values: list, axis: int, rank: int, level: Any) -> bool:
    """Whether every shared operand broadcasts within the dims right of the examples' axis."""
    for a, v in zip(args, values, strict=True):
        if isinstance(v, Tensor) and not is_mapped(a, level) and v.dim() > rank - axis:
            return False
    return True


def _pointwise_with_care(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    rank = max(rank_of(a, level) for a in tensors)
    # The condition of where takes no part in promotion.
    condition = args[0] if func is _WHERE else None
    common = _common_dtype([t for t in tensors if t is not condition], level)

    def align(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if is_mapped(a, level):
            v = front(a)
            r = v.dim() - 1
            if r < rank:
                v = v.reshape(v.shape[0], *(1,) * (rank - r), *v.shape[1:])
        else:
            v = lower(a, level)
        if common is None or v.dtype in (common, torch.bool) or a is condition:
            return v
        return v.to(common)

    out = func(*map(align, args), **{k: align(a) for k, a in kwargs.items()})
    return wrapped(out, 0, level)


_WHERE = torch.ops.aten.where.self


def _common_dtype(tensors: list[Tensor], level: Any) -> torch.dtype | None:
    """The dtype the examples promote to, where the stacks' ranks would promote otherwise.

    A rank-0 example does not promote a rank-1 tensor, though its stack has rank 1.
    """
    if not any(is_mapped(t, level) and rank_of(t, level) == 0 for t in tensors):
        return None
    ranked = {t.dtype for t in tensors if rank_of(t, level)}
    numbers = {t.dtype for t in tensors if not rank_of(t, level)}
    if len(ranked | numbers) < 2:
        return None
    best = [functools.reduce(torch.promote_types, dtypes) for dtypes in (ranked, numbers) if dtypes]
    return _promoted(best[0], best[-1])


@functools.cache
def _promoted(ranked: torch.dtype, number: torch.dtype) -> torch.dtype:
    """What a tensor of one dtype and a number of another make."""
    return torch.result_type(
        torch.empty(1, dtype=ranked, device="meta"), torch.empty((), dtype=number, device="meta")
    )


# --- views -------------------------------------------------------------------------------------


def view(rule: Callable) -> Callable:
    """A handler from ``rule(value, axis, *args) -> (value, axis)``, results in x's family."""
    from forall._batching.batched import derive

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0]
        value, axis = rule(x.value, x.axis, *args[1:], **kwargs)
        if isinstance(value, Tensor):
            call = table.view_call(func, args[1:], kwargs, None, x)
            return derive(x, value, axis, call)
        return [
            derive(x, v, axis, table.view_call(func, args[1:], kwargs, i, x))
            for i, v in enumerate(value)
        ]

    return handler


# --- written by hand ---------------------------------------------------------------------------


def by_front(rule: Callable) -> Callable:
    """A handler from ``rule(size, *args)``: mapped tensors come as a `Stack`, shared ones plain.

    Without examples a rule gets one blank example, so that no operator has to bear B = 0.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        size = level.size or 1
        given = [_taken(a, level) for a in args]
        if kwargs:
            out = rule(size, *given, **{k: _taken(a, level) for k, a in kwargs.items()})
        else:
            out = rule(size, *given)
        if type(out) is Tensor and level.size:
            return wrap(out, 0, level)
        return wrapped(out if level.size else without_examples(out), 0, level)

    return handler


def _taken(a: Any, level: Any) -> Any:
    if type(a) is Batched and a.level is level:
        if a.axis is None:
            return a.value
        return Stack(front(a) if level.size else blank(a))
    if isinstance(a, (list, tuple)):
        return [_taken(b, level) for b in a]
    return a


def blank(a: Batched) -> Tensor:
    """(1, *S): the one example that stands in where there is none."""
    return a.value.new_zeros((1, *a.shape))


def without_examples(out: Any) -> Any:
    """(1, *S) -> (0, *S), for results of any structure."""
    if isinstance(out, Tensor):
        return out[:0]
    return type(out)(map(without_examples, out)) if isinstance(out, (list, tuple)) else out


class Stack:
    """A mapped argument as a rule gets it: ``v`` is (B, *S)."""

    __slots__ = ("v",)

    def __init__(self, v: Tensor) -> None:
        self.v = v


# --- derived from the functional overload --------------------------------------------------------


def derived(functional: Any) -> Callable:
    """In-place and out= forms: compute what they would write, then write it."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        fact = facts(func)
        targets = [args[m] if isinstance(m, int) else kwargs.get(m) for m in fact.mutates]
        rest = {k: a for k, a in kwargs.items() if k not in fact.out_names}
        with level_on(level):
            results = functional(*args, **rest)
        if len(targets) == 1:  # for several, lists among them, the functional lists what it writes
            results = (results,)
        elif not fact.out_names:
            results = results[-len(targets) :]
        for target, result in zip(targets, results, strict=True):
            if isinstance(target, (list, tuple)):
                level_write(level, func, target, result)
            elif fact.out_names and not torch.can_cast(result.dtype, target.dtype):
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast to the desired output type "
                    f"{target.dtype}"
                )
            elif fact.out_names and target.shape != result.shape:
                _resize_out(level, func, target, result)
            elif target is not None:
                write(level, func, target, result)
        return _named(targets) if func._schema.returns else None

    return handler


class level_on:
    """Let operators inside a handler reach this level once more, above its own values.

    What they make anew is then of this level, and of the levels that the values ``args`` belong to
    further out. Those that have ended are on no stack, so they are put there too.
    """

    __slots__ = ("levels",)

    def __init__(self, level: Any, args: tuple = ()) -> None:
        self.levels = [*_ended(args), level]

    def __enter__(self) -> None:
        for level in self.levels:
            push_mode(level)

    def __exit__(self, *_: object) -> None:
        for _level in self.levels:
            pop_mode(None)


def _ended(args: tuple) -> list:
    """The levels below the first one of ``args`` that run no more, the outermost first."""
    found: set = set()
    for a in args:
        for b in a if isinstance(a, (list, tuple)) else (a,):
            value = b.value if isinstance(b, Wrapper) else None
            while isinstance(value, Wrapper):
                if not value.level.active:
                    found.add(value.level)
                value = value.value
    return sorted(found, key=cmp_to_key(lambda a, b: -1 if a.is_outside(b) else 1))


def _resize_out(level: Any, func: Any, target: Any, result: Tensor) -> None:
    """out= takes the size of what is written to it, as long as only this call knows it."""
    if _is_older(target, level):
        raise RuntimeError(
            f"vmap: {func} would resize out=, a tensor from before the call.\n"
            f"{columns([('out', short(target)), ('result', short(result))])}\n"
            "Give it the result's shape, or leave out= away."
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
    rank = view_of.dim() - 1
    if is_mapped(data, level):
        v = front(data)
        if v.dim() - 1 < rank:
            v = v.reshape(v.shape[0], *(1,) * (rank - v.dim() + 1), *v.shape[1:])
    else:
        v = lower(data, level)
    view_of.copy_(v)


def writable(level: Any, func: Any, target: Any, data: list) -> Tensor:
    """The target's stack (B, *S) to write into, promoted if the examples will differ in it."""
    if not (type(target) is Batched and target.level is level):
        raise shared_write(str(func), target, [d for d in data if is_mapped(d, level)])
    if target.axis is None:
        if target.older:
            raise shared_write(str(func), target, [d for d in data if is_mapped(d, level)])
        promote(target, level.size)
    if target.older:
        _note_write(target)
    if target.family is not None and target.family.put_back is not None:
        raise NotImplementedError(
            f"vmap: {func} writes into x[i], where i differs between the examples.\n"
            "That is a copy here, so x would not change. Write x[i] = value instead."
        )
    return front(target)


def _note_write(target: Batched) -> None:
    """Rules run below the version count; a caller's tensor must still show that it changed."""
    if not isinstance(target.value, Batched):
        torch.autograd.graph.increment_version(target.value)


def pointwise_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """x.op_(y, ..): the examples of the others broadcast to x's."""
    target = args[0]
    stack = writable(level, func, target, list(args[1:]))
    rank = stack.dim() - 1
    common = _common_dtype([a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)], level)

    def align(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if not is_mapped(a, level):
            return lower(a, level)
        v = front(a)
        if v.dim() - 1 < rank:
            v = v.reshape(v.shape[0], *(1,) * (rank - v.dim() + 1), *v.shape[1:])
        return v if common is None or v.dtype in (common, torch.bool) else v.to(common)

    func(stack, *map(align, args[1:]), **{k: align(a) for k, a in kwargs.items()})
    return target


def shared_data_write(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """An in-place or out= operator none of whose arguments differs between the examples."""
    fact = facts(func)
    targets = [args[m] if isinstance(m, int) else kwargs[m] for m in fact.mutates]
    flat = [
        t for target in targets for t in (target if isinstance(target, (list, tuple)) else [target])
    ]
    for target in flat:
        if target is not None and _is_older(target, level) and not _once_is_enough(func):
            raise _counter(func, target)
    out = func(*[lower(a, level) for a in args], **{k: lower(a, level) for k, a in kwargs.items()})
    for target in flat:
        ours = type(target) is Batched and target.level is level and target.axis is None
        if ours and target.shape != target.value.shape:
            refit(target, target.value, None)
    if fact.out_names:
        return targets[0] if len(targets) == 1 else tuple(targets)
    if not func._schema.returns:
        return None
    if len(func._schema.returns) == 1:
        return targets[0]
    return wrapped(out, None, level)


def _is_older(target: Any, level: Any) -> bool:
    return not (type(target) is Batched and target.level is level and not target.older)


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
    """Whether doing it once leaves what doing it for every example in turn would leave."""
    return func.overloadpacket.__name__ in _IDEMPOTENT or bool(facts(func).out_names)


def _counter(func: Any, target: Tensor) -> RuntimeError:
    return RuntimeError(
        f"vmap: {func} changes a tensor from before the call, once for every example.\n"
        f"{columns([('written to', short(target), 'shared by all examples')])}\n"
        "Clone it inside the function (.clone()), or move the write outside vmap."
    )


table.register({"shared write": shared_data_write}, way="derived")


# --- the last resort ---------------------------------------------------------------------------


def loop(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """One example after another, then stacked: right by construction."""

    def pick(a: Any, i: int) -> Any:
        if is_mapped(a, level):
            return a.value.select(a.axis, i) if level.size else blank(a)[0]
        if type(a) is Batched and a.level is level:
            return a.value
        if isinstance(a, (list, tuple)):
            return [pick(b, i) for b in a]
        return a

    outs = [
        func(*[pick(a, i) for a in args], **{k: pick(a, i) for k, a in kwargs.items()})
        for i in range(level.size or 1)
    ]
    out = _restacked(outs)
    return wrapped(out if level.size else without_examples(out), 0, level)


def _restacked(outs: list) -> Any:
    head = outs[0]
    if isinstance(head, Tensor):
        return torch.stack(outs)
    if isinstance(head, (list, tuple)):
        return type(head)(_restacked(list(c)) for c in zip(*outs, strict=True))
    return head
