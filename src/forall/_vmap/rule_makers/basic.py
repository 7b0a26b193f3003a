"""Makers of handlers: one rule per kind of operator."""

from __future__ import annotations

import functools
from functools import cmp_to_key, partial
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._compat.op_schema import get_facts, map_arguments
from forall._compat.private_api import pop_mode, push_mode
from forall._compat.symbolic_zeros import LINEAR
from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import pad_rank
from forall._core.levels import set_acting_level
from forall._vmap import registry
from forall._vmap.batched_tensor import BatchedTensor, derive_view, wrap_stack

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def is_mapped(a: Any, level: Any) -> bool:
    """True if ``a`` differs between the examples of ``level``."""
    return type(a) is BatchedTensor and a.axis is not None and a.level is level


def has_plain_stack(a: Any, level: Any) -> bool:
    """True if ``a`` is mapped, and its stack has no lazy conj or neg bit."""
    return is_mapped(a, level) and not (a.value.is_complex() or a.value.is_neg())


def is_own_shared(a: Any, level: Any) -> bool:
    """True if ``a`` was made under ``level`` and is the same for all its examples."""
    return type(a) is BatchedTensor and a.axis is None and a.level is level and not a.is_external


def move_to_front(a: BatchedTensor) -> Tensor:
    """(.., B, ..) -> (B, *S)."""
    return a.value.movedim(a.axis, 0) if a.axis else a.value


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
    return a.expand(level.size, *a.shape)


def wrap_results(out: Any, axis: int | None, level: Any) -> Any:
    """Results of an operator on stacks, as examples."""
    if isinstance(out, Tensor):
        return wrap_stack(out, axis, level)
    if isinstance(out, (list, tuple)):
        return type(out)(wrap_results(o, axis, level) for o in out)
    return out


# How an operator runs on what all examples share.
ONCE, LINEAR_ONCE, VIEW_ONCE, BY_HANDLER = "once", "linear", "view", "by a handler of its own"


@functools.cache
def find_shared_use(func: Any) -> str:
    """Return how an operator runs on what all examples share.

    One of `LINEAR` may be simpler for marked zeros. A view here is one with a rule of its own.
    """
    fact = get_facts(func)
    if func in registry.SHARED or fact.seeded or fact.writes or fact.is_collective:
        return BY_HANDLER
    if fact.view:
        return VIEW_ONCE if func in registry.VIEWS and func not in LINEAR else BY_HANDLER
    return LINEAR_ONCE if func in LINEAR else ONCE


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
        return derive_view(base, out, None, make_view_call(func, rest, kwargs, None, base))
    return type(out)(
        derive_view(base, o, None, make_view_call(func, rest, kwargs, i, base))
        for i, o in enumerate(out)
    )


def make_view_call(func: Any, rest: tuple, kwargs: dict, index: int | None, base: Any) -> Callable:
    """The call that derives this view again from its base, with or without a batch axis."""
    maker = registry.VIEW_CALLS.get(func)
    if maker is not None:
        return maker(base, *rest, **kwargs)
    return ViewCall(registry.VIEWS.get(func), func, rest, kwargs, index)


class ViewCall:
    """A view of a base: by its operator where all examples share the base, else by the rule."""

    __slots__ = ("func", "index", "kwargs", "rest", "rule")

    def __init__(self, rule: Any, func: Any, rest: tuple, kwargs: dict, index: int | None) -> None:
        self.rule = rule
        self.func = func
        self.rest = rest
        self.kwargs = kwargs
        self.index = index

    def __call__(self, value: Any, axis: int | None) -> tuple[Any, int | None]:
        if axis is None:
            out = self.func(value, *self.rest, **self.kwargs)
        elif self.rule is None:
            raise NotImplementedError(
                f"vmap: a write needs the view {self.func} of each example, which has no rule yet."
            )
        else:
            out, axis = self.rule(value, axis, *self.rest, **self.kwargs)
        return (out if self.index is None else out[self.index]), axis


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


def expand_stack(a: MappedStack | Tensor, size: int) -> Tensor:
    """(B, *S), expanded where all examples share ``a``."""
    return a.v if isinstance(a, MappedStack) else a.expand(size, *a.shape)


def pad_example_rank(a: Any, rank: int) -> Any:
    """(B, 1, .., *S), examples of at least ``rank`` dims; what all share broadcasts as it is."""
    return pad_rank(a.v, rank) if isinstance(a, MappedStack) else a


def get_value(a: MappedStack | Tensor) -> Tensor:
    """(B, *S), or *S where all examples share ``a``."""
    return a.v if isinstance(a, MappedStack) else a


def get_example_shape(a: MappedStack | Tensor) -> torch.Size:
    """*S."""
    return a.v.shape[1:] if isinstance(a, MappedStack) else a.shape


def get_example_rank(a: MappedStack | Tensor) -> int:
    """The number of dims of one example."""
    return a.v.dim() - 1 if isinstance(a, MappedStack) else a.dim()


def unsqueeze_shared(a: MappedStack | Tensor) -> Tensor:
    """(B, *S), or (1, *S) where all examples share ``a``."""
    return a.v if isinstance(a, MappedStack) else a.unsqueeze(0)


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
    """The results of an operator for one example after another, or for a blank one.

    Kernels may refuse or, silently, ignore strides. So what the function has made is laid out as in
    the loop, where an example has no gaps for the others.
    """
    writes = getattr(getattr(func, "_schema", None), "is_mutable", False)  # into rows of a stack

    def pick(a: Any, i: int) -> Any:
        if is_mapped(a, level):
            if not level.size:
                return make_blank_example(a)[0]
            a.lay_out_alone()
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
            raise documented_error(NotImplementedError, "sparse-layout")(
                f"vmap: each example has a tensor of layout {head.layout}, which cannot be "
                "stacked.\nMake it dense (.to_dense()) or of coordinates (.to_sparse_coo())."
            )
        return torch.stack(outs)
    if isinstance(head, (list, tuple)):
        return type(head)(stack_results(list(c)) for c in zip(*outs, strict=True))
    return head


_STACKABLE = (torch.strided, torch.sparse_coo)
