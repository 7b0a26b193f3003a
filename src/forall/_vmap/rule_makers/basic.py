"""Makers of handlers: one rule per kind of operator."""

from __future__ import annotations

import functools
from functools import cmp_to_key, partial
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import map_arguments
from forall._compat.private_api import pop_mode, push_mode
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import set_acting_level
from forall._vmap import registry
from forall._vmap.batched_tensor import BatchedTensor, derive_view, wrap_stack
from forall._vmap.memory_layout import is_axis_inside, is_layout_open, match_example_layout
from forall._vmap.registry import ViewCall

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def is_mapped(a: Any, level: Any) -> bool:
    """True if ``a`` differs between the examples of ``level``."""
    return type(a) is BatchedTensor and a.axis is not None and a.level is level


def has_plain_stack(a: Any, level: Any) -> bool:
    """True if ``a`` is mapped, and its stack has no lazy conj or neg bit."""
    return is_mapped(a, level) and not (a.value.is_complex() or a.value.is_neg())


def move_to_front(a: BatchedTensor) -> Tensor:
    """(.., B, ..) -> (B, *S)."""
    return a.value if a.axis == 0 else a.value.movedim(a.axis, 0)


def lower_shared(a: Any, level: Any) -> Any:
    """The value of a shared argument one level down; lists element by element."""
    if type(a) is BatchedTensor:
        return a.value if a.level is level else a
    if isinstance(a, (list, tuple)):
        return [lower_shared(b, level) for b in a]
    return a


def count_example_dims(a: Tensor, level: Any) -> int:
    """The rank of one example."""
    if type(a) is BatchedTensor and a.level is level:
        return a.value.dim() - (a.axis is not None)
    return a.dim()


def expand_to_stack(a: Any, level: Any) -> Tensor:
    """(B, *S), expanded where all examples share ``a``."""
    if is_mapped(a, level):
        return move_to_front(a)
    a = lower_shared(a, level)
    return a.unsqueeze(0).expand(level.size, *a.shape)


def wrap_results(out: Any, axis: int | None, level: Any) -> Any:
    """Results of an operator on stacks, as examples."""
    if isinstance(out, Tensor):
        return wrap_stack(out, axis, level)
    if isinstance(out, (list, tuple)):
        return type(out)(wrap_results(o, axis, level) for o in out)
    return out


# --- pointwise ---------------------------------------------------------------------------------


def try_aligned_pointwise(level: Any, func: Any, args: tuple) -> Any:
    """Apply a pointwise operator to mapped operands laid out alike, and numbers; else None."""
    x = args[0]
    if type(x) is not BatchedTensor or x.level is not level or x.axis is None:
        return None
    v, axis = x.value, x.axis
    if v.is_complex() or v.is_neg():  # kernels do not see a lazy conj or neg bit here
        return None
    values = [v]
    for y in args[1:]:
        kind = type(y)
        if kind is BatchedTensor:
            w = y.value
            if y.level is not level or y.axis != axis or w.dim() != v.dim() or w.dtype != v.dtype:
                return None
            if w.is_neg() or (w.dim() == 1 and w.device != v.device):
                return None
            values.append(w)
        elif kind is float or kind is int or not isinstance(y, (Tensor, list, tuple)):
            values.append(y)
        else:
            return None
    out = func._op(*values)
    if axis and is_layout_open(out, values):
        return match_example_layout(level, func, args, {}, wrap_results(out, axis, level))
    return (
        wrap_stack(out, axis, level) if isinstance(out, Tensor) else wrap_results(out, axis, level)
    )


def handle_pointwise(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """f(x, y, ..) entry by entry: broadcasting aligns examples, not stacks."""
    axis = rank = dtype = device = None
    values = []
    for a in args:
        if type(a) is BatchedTensor and a.level is level:
            value = a.value
            if a.axis is not None:
                r = value.dim() - 1
                if axis is None:
                    axis, rank, dtype, device = a.axis, r, value.dtype, value.device
                elif axis != a.axis or rank != r:
                    break
            values.append(value)
        else:
            values.append(a)
    else:
        if not kwargs or not any(isinstance(a, Tensor) for a in kwargs.values()):
            for v in values:
                if isinstance(v, Tensor):
                    if rank == 0 and (v.dtype != dtype or v.device != device):
                        break
                elif isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor):
                    break
            else:
                if _are_aligned(args, values, axis, rank, level):
                    out = func(*values, **kwargs) if kwargs else func(*values)
                    if axis and is_layout_open(out, values):
                        return match_example_layout(
                            level, func, args, kwargs, wrap_results(out, axis, level)
                        )
                    return (
                        wrap_stack(out, axis, level)
                        if type(out) is Tensor
                        else wrap_results(out, axis, level)
                    )
    return _align_and_call(level, func, args, kwargs)


def _are_aligned(args: tuple, values: list, axis: int, rank: int, level: Any) -> bool:
    """True if every shared operand broadcasts within the dims right of the batch axis."""
    for a, v in zip(args, values, strict=True):
        if isinstance(v, Tensor) and not is_mapped(a, level) and v.dim() > rank - axis:
            return False
    return True


def _align_and_call(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    rank = max(count_example_dims(a, level) for a in tensors)
    # The condition of where takes no part in promotion.
    condition = args[0] if func is _WHERE else None
    common = promote_example_dtypes([t for t in tensors if t is not condition], level)
    # A CPU tensor of rank 0 goes with tensors of another device, but a stack of such does not.
    device = next((t.device for t in tensors if t.device != _CPU), _CPU)

    def align(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if is_mapped(a, level):
            v = move_to_front(a)
            r = v.dim() - 1
            if r == 0 and device is not _CPU and v.device == _CPU:
                v = v.to(device)
            if r < rank:
                v = v.reshape(v.shape[0], *(1,) * (rank - r), *v.shape[1:])
        else:
            v = lower_shared(a, level)
        if common is None or v.dtype in (common, torch.bool) or a is condition:
            return v
        return v.to(common)

    values = [*map(align, args)]
    out = func(*values, **{k: align(a) for k, a in kwargs.items()})
    inside = [a for a in tensors if is_mapped(a, level) and is_axis_inside(a.value, a.axis)]
    if inside and is_layout_open(out, values):
        return match_example_layout(level, func, args, kwargs, wrap_results(out, 0, level))
    return wrap_results(out, 0, level)


_WHERE = torch.ops.aten.where.self
_CPU = torch.device("cpu")


def promote_example_dtypes(tensors: list[Tensor], level: Any) -> torch.dtype | None:
    """The dtype the examples promote to, where the stacks' ranks would promote otherwise.

    A rank-0 example does not promote a rank-1 tensor, though its stack has rank 1.
    """
    if not any(is_mapped(t, level) and count_example_dims(t, level) == 0 for t in tensors):
        return None
    ranked = {t.dtype for t in tensors if count_example_dims(t, level)}
    numbers = {t.dtype for t in tensors if not count_example_dims(t, level)}
    if len(ranked | numbers) < 2:
        return None
    best = [functools.reduce(torch.promote_types, dtypes) for dtypes in (ranked, numbers) if dtypes]
    return _promote_with_number(best[0], best[-1])


@functools.cache
def _promote_with_number(ranked: torch.dtype, number: torch.dtype) -> torch.dtype:
    """The dtype that a tensor of one dtype and a number of another promote to."""
    return torch.result_type(
        torch.empty(1, dtype=ranked, device="meta"), torch.empty((), dtype=number, device="meta")
    )


# --- views -------------------------------------------------------------------------------------


def make_view_handler(rule: Callable) -> Callable:
    """A handler from ``rule(value, axis, *args) -> (value, axis)``, results in x's family."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0]
        value, axis = rule(x.value, x.axis, *args[1:], **kwargs)
        if isinstance(value, Tensor):
            return derive_view(x, value, axis, ViewCall(rule, func, args[1:], kwargs, None))
        return [
            derive_view(x, v, axis, ViewCall(rule, func, args[1:], kwargs, i))
            for i, v in enumerate(value)
        ]

    VIEWERS.add(handler)
    return handler


VIEWERS: set[Callable] = set()  # the handlers of views


def derive_views(base: BatchedTensor, func: Any, rest: tuple, kwargs: dict, out: Any) -> Any:
    """Views of a shared tensor, each with the call that re-derives it should the base change."""
    if isinstance(out, Tensor):
        return derive_view(base, out, None, registry.make_view_call(func, rest, kwargs, None, base))
    return type(out)(
        derive_view(base, o, None, registry.make_view_call(func, rest, kwargs, i, base))
        for i, o in enumerate(out)
    )


# --- written by hand ---------------------------------------------------------------------------


def make_stack_handler(rule: Callable) -> Callable:
    """A handler from ``rule(size, *args)``: mapped tensors are a `MappedStack`, shared ones plain.

    Without examples a rule gets one blank example, so that no operator has to bear B = 0.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        size = level.size or 1
        given = [_to_rule_argument(a, level) for a in args]
        if kwargs:
            out = rule(size, *given, **{k: _to_rule_argument(a, level) for k, a in kwargs.items()})
        else:
            out = rule(size, *given)
        if type(out) is Tensor and level.size:
            return wrap_stack(out, 0, level)
        return wrap_results(out if level.size else drop_examples(out), 0, level)

    return handler


def _to_rule_argument(a: Any, level: Any) -> Any:
    if type(a) is BatchedTensor and a.level is level:
        if a.axis is None:
            return a.value
        return MappedStack(move_to_front(a) if level.size else make_blank_example(a))
    if isinstance(a, (list, tuple)):
        return [_to_rule_argument(b, level) for b in a]
    return a


def make_blank_example(a: BatchedTensor) -> Tensor:
    """(1, *S): the one example that stands in where there is none."""
    return a.value.new_zeros((1, *a.shape))


def drop_examples(out: Any) -> Any:
    """(1, *S) -> (0, *S), for results of any structure."""
    if isinstance(out, Tensor):
        return out[:0]
    return type(out)(map(drop_examples, out)) if isinstance(out, (list, tuple)) else out


class MappedStack:
    """A mapped argument as a rule gets it: ``v`` is (B, *S)."""

    __slots__ = ("v",)

    def __init__(self, v: Tensor) -> None:
        self.v = v


# --- reaching the level from inside a handler ---------------------------------------------------


class reenter_level:
    """Let operators inside a handler reach this level once more, above its own values.

    New tensors then belong to this level, and to the levels further out that the values ``args``
    belong to. Levels that have ended are on no stack, so they are pushed too. In the body ``level``
    itself acts for its root, so that new tensors are for the examples of the values.
    """

    __slots__ = ("levels", "were")

    def __init__(self, level: Any, args: tuple = ()) -> None:
        self.levels = [*_find_ended_levels(args), level]

    def __enter__(self) -> None:
        self.were = []
        for level in self.levels:
            root = level.root
            push_mode(root)
            self.were.append(root.acting_level)
            set_acting_level(root, level)

    def __exit__(self, *_: object) -> None:
        for level, was in zip(self.levels, self.were, strict=True):
            pop_mode(None)
            set_acting_level(level.root, was)


def _find_ended_levels(args: tuple) -> list:
    """The levels below the values of ``args`` that have ended, the outermost first."""
    found: set = set()
    for a in args:
        for b in a if isinstance(a, (list, tuple)) else (a,):
            value = b.value if isinstance(b, Wrapper) else None
            while isinstance(value, Wrapper):
                if not value.level.active:
                    found.add(value.level)
                value = value.value
    return sorted(found, key=cmp_to_key(lambda a, b: -1 if a.is_outside(b) else 1))


# --- the last resort ---------------------------------------------------------------------------


def loop_and_stack(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on one example after another and stack the results: right by construction."""
    out = stack_results(call_per_example(level, func, args, kwargs))
    return wrap_results(out if level.size else drop_examples(out), 0, level)


def call_per_example(level: Any, func: Any, args: tuple, kwargs: dict) -> list:
    """The results of an operator for one example after another, or for a blank one."""
    writes = getattr(getattr(func, "_schema", None), "is_mutable", False)  # into rows of a stack

    def pick(a: Any, i: int) -> Any:
        if is_mapped(a, level):
            if not level.size:
                return make_blank_example(a)[0]
            example = a.value.select(a.axis, i)
            return example if writes else _as_allocated(example)
        if type(a) is BatchedTensor and a.level is level:
            return a.value
        return a

    def call_on_example(i: int) -> Any:
        given, named = map_arguments(partial(pick, i=i), args, kwargs)
        return func(*given, **named)

    return [*map(call_on_example, range(level.size or 1))]


def _as_allocated(example: Tensor) -> Tensor:
    """Return a buffer of bytes at an address that memory of its own could have.

    Kernels rely on it: cuDNN's backward pass of an RNN gives other numbers, and no error, for what
    its forward pass has put aside when that lies at a multiple of 64 bytes and not of 256.
    """
    if example.dtype is not torch.uint8 or type(example) is not Tensor or example.is_cpu:
        return example
    return example.clone() if example.data_ptr() % _ALLOCATED else example


_ALLOCATED = 256  # bytes, of which addresses of allocated memory are multiples on accelerators


def stack_results(outs: list) -> Any:
    """The results of all examples as stacks."""
    head = outs[0]
    if isinstance(head, Tensor):
        if head.layout not in _STACKABLE:
            raise NotImplementedError(
                f"vmap: each example has a tensor of layout {head.layout}, which cannot be "
                "stacked.\nMake it dense (.to_dense()) or of coordinates (.to_sparse_coo())."
            )
        return torch.stack(outs)
    if isinstance(head, (list, tuple)):
        return type(head)(stack_results(list(c)) for c in zip(*outs, strict=True))
    return head


_STACKABLE = (torch.strided, torch.sparse_coo)
