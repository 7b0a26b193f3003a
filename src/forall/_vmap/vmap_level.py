"""The vmap level, which is active while the user's function sees one example.

The level is two modes. The dispatch mode sees every ATen call below autograd, also factories and
the buffers that torch's own code makes. The function mode is in `sharing`.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakValueDictionary

import torch

from forall._compat import functorch_interop
from forall._compat.dispatch_state import (
    ACCUMULATION,
    AUTOGRAD,
    CONJUGATE,
    autograd_below,
    functions_off,
    has_tangent,
    in_backward,
    is_accumulating,
    is_excluded,
    users_tangents,
)
from forall._compat.jagged_layout import Jagged
from forall._compat.lazy_bits import put_lazy_bits, set_lazy_bits, with_lazy_bits
from forall._compat.op_schema import facts, written_by
from forall._compat.private_api import DispatchMode, pop_functions, push_functions
from forall._compat.symbolic_zeros import LINEAR, simpler
from forall._compat.tensor_subclass import (
    has_posed_class,
    is_posed,
    posing,
    taken_out,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core import nested_tensor
from forall._core.errors import collective, note_missing_axis
from forall._core.levels import (
    Level,
    at,
    entered,
    innermost,
    is_from_outside,
    levels_in,
    lift,
    made_of,
    outside,
    second_name,
    stack,
    top,
)
from forall._core.version_counter import counted
from forall._random import key_scope
from forall._vmap import (
    boundary,
    failing_example,
    registry,
    sparse_stack,
)
from forall._vmap.batched_cotangents import around_of, undress
from forall._vmap.batched_tensor import (
    Batched,
    check_unwritten,
    named,
    without_ended,
    wrap,
)
from forall._vmap.concretize import one_answer
from forall._vmap.function_mode import SHARING
from forall._vmap.lazy_grad.sources import unmade
from forall._vmap.mutation import in_place
from forall._vmap.mutation.mutation_log import Ledger
from forall._vmap.numpy_fallback import by_numpy
from forall._vmap.rule_lookup import resolve
from forall._vmap.rule_makers import basic
from forall._vmap.rule_makers.basic import (
    VIEWERS,
    alike,
    is_bare,
    lower,
    wrapped,
)

aten = torch.ops.aten
_Tensor = torch.Tensor
_HANDLERS = registry.HANDLERS
_SHARED = registry.SHARED
_DETACH = aten.detach.default
_LIFT_FRESH = aten.lift_fresh.default  # by its schema a view, of the constant
_pointwise = basic.pointwise
_INNER, _MAPPED, _SHARED_BY_ALL = "inner", "mapped", "shared"


class VmapLevel(Level, DispatchMode):
    """A level of ``size`` examples that run as one; ``randomness`` is the flag of `vmap`.

    With ``records_values`` autograd acts on the stacks, not on the examples, in the grad mode in
    which the level was made. A pull-back through a graph that was recorded further out needs this.
    """

    draws = True

    def __init__(
        self,
        size: int,
        randomness: str = "error",
        parent: Level | None = None,
        *,
        records_values: bool = False,
    ) -> None:
        Level.__init__(self, parent)  # not the mode's: its entry makes what it needs
        self.size = size
        self.randomness = randomness
        self.records_values = self.peels = records_values
        self.shares = not records_values
        self.outer_grad = torch.is_grad_enabled()
        self.scope = key_scope.running()  # vmap gives each of its examples one of its own
        self.ledger = Ledger()
        self.met: list[torch.Tensor] = []  # shared tensors from outside, of one operator

    calls: int | None = None  # calls of the function, where these are not the examples
    notes, settles = False, True  # log its writes to older memory; apply them at the end
    members: int | None = None
    rows: torch.Tensor | None = None
    parts = False  # whether its call runs examples that diverge in groups
    parted: list[list[int]] | None = None  # the groups, once they are known
    parted_at: Any = None  # the user's line at which they diverged
    limit: Any = None  # how many steps its loops may take, see `questions`
    crosses: Any = None  # a mark, once its pull-back leads through an ended call
    counted: torch.Tensor | None = None  # by a BatchNorm that averages over all calls

    @functools.cached_property
    def made(self) -> WeakValueDictionary[int, Any]:
        """Sub-levels of its examples by their bit sets, for as long as values use them."""
        return WeakValueDictionary()

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.records_values:
            shared = named(tensor, None, self)
            shared.older = True
            return shared
        return boundary.share(tensor, self)

    def afterwards(self, tensor: Batched) -> torch.Tensor:
        return boundary.keep(tensor) if tensor.axis is None else tensor

    def gathered(self, gradient: Any) -> torch.Tensor:
        return boundary.summed(gradient, self)

    def run_afterwards(self, func: Any, args: tuple, kwargs: dict) -> Any:
        args, kwargs = without_ended(func, args, kwargs)
        return func(*args, **kwargs)

    by_numpy = by_numpy
    one_answer = staticmethod(one_answer)
    told = failing_example.told

    def push(self, h: Any, args: tuple) -> tuple:
        """``h`` as a function of stacks, one level further out."""
        around = around_of(self, args) if self.records_values else self
        with outside(around):
            stacked = made_of(h, self._of_stacks)
            return tuple(map(self._taken, at(around.parent, stacked, (*map(self._given, args),))))

    def _of_stacks(self, h: Any) -> Any:
        """Return ``h`` as a function of stacks; their examples are of another level like this."""

        def stacked(*stacks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            again = VmapLevel(self.size, self.randomness, top())
            again.origin = self.origin
            if self.active:  # one call, one ledger
                again.ledger, again.settles = self.ledger, False
            again.scope = self._scope_at(again)
            examples = [boundary.enter(s, 0, again) for s in stacks]
            with running(again):
                outs = h(*examples)
            return tuple(boundary.leave(y, 0, again) for y in outs)

        vars(stacked)["enters"] = True  # a level of its own; for `reversed`
        return stacked

    def _scope_at(self, again: VmapLevel) -> key_scope.Scope | None:
        """The random scope of this level's examples, as those of another level."""
        scope = key_scope.running() if self.active else self.scope
        if scope is None or not (type(scope.key) is Batched and scope.key.level is self):
            return scope
        key = scope.key
        return scope.twin(lambda: wrap(key.value, key.axis, again))

    def _taken(self, stack_: torch.Tensor) -> torch.Tensor:
        """A stack (B, *S) as one example, by the way that this level records."""
        return wrap(stack_, 0, self) if self.records_values else boundary.enter(stack_, 0, self)

    def _given(self, example: torch.Tensor) -> torch.Tensor:
        """One example as its stack (B, *S)."""
        if self.records_values:
            return undress(example, ((self, 0),))
        return boundary.leave(lift(example, self), 0, self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Jagged in types:
            return nested_tensor.answer(func, args)
        if posing.used and has_posed_class(types):
            return taken_out(self, func, args, kwargs or {})
        level: Any = self.part or self
        try:
            with functions_off():
                handler = _HANDLERS.get(func)
                if handler is _pointwise and not kwargs and not level.records_values:
                    out = alike(level, func, args)
                    if out is not None:
                        return out
                elif handler in VIEWERS and not level.records_values and is_bare(args[0], level):
                    if func is _DETACH and not is_excluded(AUTOGRAD):
                        return args[0].graph_free()
                    return handler(level, func, args, kwargs or {})  # pyright: ignore[reportOptionalCall]
                found = level._meets(args, kwargs.values()) if kwargs else level._meets(args)
                if found is _INNER:
                    inner = innermost(levels_in(args, kwargs or {}))
                    if inner.root is not self.root:
                        return NotImplemented  # an inner value: its level acts first
                    return level.meet(func, args, kwargs or {})
                return level._run(func, args, kwargs or {}, handler, found)
        except Exception as error:
            if sparse_stack.can_run_apart(func, args, kwargs or {}):
                return level._run_apart(func, args, kwargs or {})
            level.raise_told(error, func, args, kwargs or {})
            raise

    def _run_apart(self, func: Any, args: tuple, kwargs: dict) -> Any:
        try:
            with functions_off():
                return sparse_stack.apart(self, func, args, kwargs)
        except Exception as error:
            self.raise_told(error, func, args, kwargs)
            raise

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operator on values of this level, with this level's modes off."""
        with functions_off():
            if not self.active and in_backward():
                check_unwritten(args, self)
                found = unmade(self, func, args, kwargs)
                if found is not None:
                    return found
            return self.as_it_is(func, args, kwargs)

    def as_it_is(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator without the lazy gradients that `run` may return."""
        found = self._meets(args, kwargs.values())
        if found is _INNER:
            return self.meet(func, args, kwargs)
        return self._run(func, args, kwargs, _HANDLERS.get(func), found)

    def completed(self, t: Batched, level: Any) -> torch.Tensor:
        """A gradient of this level as one of ``level``, where both have examples of one root."""
        from forall._vmap.active_set.merge import fitted  # imports this module

        return fitted(t, level)

    def meet(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on values of different examples of one root."""
        from forall._vmap.active_set.backward import meet  # imports this module

        return with_lazy_bits(meet, (func, args, kwargs), {})

    def under(self, tensors: list, f: Any) -> Batched:
        with outside(self):
            if len(tensors) == 1:
                return wrap(f(tensors[0].value), tensors[0].axis, self)
            if all(t.axis is None for t in tensors):
                return wrap(f(*(t.value for t in tensors)), None, self)
            return wrap(f(*map(self._stack, tensors)), 0, self)

    def _stack(self, t: Batched) -> torch.Tensor:
        """(B, *S)."""
        if t.axis is None:
            return t.value.unsqueeze(0).expand(self.size, *t.value.shape)
        return t.value.movedim(t.axis, 0)

    def examples_are_of_one_call(self, first: bool) -> None:
        """Count the examples as directions of one call, whose writes the ``first`` chunk does."""
        self.calls, self.notes = int(first), False

    def _meets(self, args: Any, more: Any = ()) -> str:
        """Say if the arguments hold values of an inner level, or else mapped ones of this."""
        found = _SHARED_BY_ALL
        for a in (*args, *more) if more else args:
            if type(a) in _WORDS:
                continue
            if isinstance(a, Wrapper):
                level = a.level
                if level is self:
                    if a.axis is not None:
                        found = _MAPPED
                    elif a.older:
                        self.met.append(a)
                elif not level.is_outside(self):
                    self.met.clear()
                    return _INNER
                else:
                    self.met.append(a)
            elif type(a) in _SEQUENCES:
                inside = self._meets(a)
                if inside is _INNER:
                    return _INNER
                if inside is _MAPPED:
                    found = _MAPPED
            elif isinstance(a, _Tensor):
                self.met.append(a)
        return found

    def _run(self, func: Any, args: tuple, kwargs: dict, handler: Any, found: str) -> Any:
        if stack.late is not None:
            stack.late()
        if func is _DETACH and not is_excluded(AUTOGRAD):
            self.met.clear()
            return second_name(args[0])
        if func in LINEAR and (known := simpler(func, args, kwargs)) is not None:
            if isinstance(known, _Tensor):
                self.met.clear()
                return wrap(known, None, self)
            (func, args, kwargs), handler = known, None
        if self.met:
            boundary.all_shared(self, func, self.met)
            known = in_place.older(self, func, args, kwargs, found is _MAPPED)
            if known is not None:
                return known(self, func, args, kwargs)
        if found is not _MAPPED:
            handler = run_shared
        elif handler is None:
            handler = resolve(func)
        if self.records_values:
            with autograd_below(grad=self.outer_grad, forward=self.outer_grad):
                return handler(self, func, args, kwargs)
        if not is_excluded(CONJUGATE):
            return handler(self, func, args, kwargs)
        set_lazy_bits(True)  # as `with_lazy_bits` does, at less for each operator
        try:
            return handler(self, func, args, kwargs)
        finally:
            set_lazy_bits(False)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with tensors from outside that carry a derivative in their shared form."""
        return tuple(map(self._shared, args)), {k: self._shared(a) for k, a in kwargs.items()}

    def _lifted(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor from outside, for the examples that run."""
        if not stack.parted or (in_backward() and not stack.again):
            return lift(t, self)
        from forall._vmap.active_set.restrict_args import for_those_that_run  # imports this module

        return for_those_that_run(lift(t, self.root))

    def _shared(self, a: Any) -> Any:
        if posing.used and is_posed(a):
            return a  # the wrapper that it holds is shared when it is taken out
        if self.shares and isinstance(a, torch.Tensor):  # else autograd knows it as it is
            if (a.requires_grad or (users_tangents() and has_tangent(a))) and is_from_outside(
                a, self
            ):
                return self._lifted(a)
        elif type(a) in _SEQUENCES and a:
            return type(a)([self._shared(b) for b in a])
        return a


_SEQUENCES = frozenset({list, tuple})
_WORDS = frozenset({int, float, bool, type(None)})


def run_shared(level: VmapLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose arguments are the same for all examples runs once."""
    if func in ACCUMULATION and is_accumulating() and is_from_outside(args[0], level):
        # It adds to the .grad of a tensor from outside, which is no value of this level.
        return func(*(lower(a, level) for a in args), **kwargs)
    special = _SHARED.get(func)
    if special is not None:
        return special(level, func, args, kwargs)
    fact = facts(func)
    if fact.is_collective:
        raise collective("vmap", func)
    if fact.seeded or (fact.writes and not fact.mutates):
        return resolve(func)(level, func, args, kwargs)
    if fact.into_lists:
        with counted(written_by(func, args, kwargs)):
            return in_place.shared_data_write(level, func, args, kwargs)
    if fact.writes:
        return in_place.shared_data_write(level, func, args, kwargs)
    if fact.view and func not in registry.VIEWS and func is not _LIFT_FRESH:
        handler = resolve(func)
        if registry.WAYS[func] == "decomposed":  # into views that can be derived again
            return handler(level, func, args, kwargs)
    plain = [lower(a, level) for a in args]
    out = func(*plain, **{k: lower(a, level) for k, a in kwargs.items()})
    if sparse_stack.stands_for_itself(out, args):
        return sparse_stack.constant(out)
    if fact.view and isinstance(args[0], Batched) and args[0].level is level:
        return basic.views_of(args[0], func, args[1:], kwargs, out)
    out = wrapped(out, None, level)
    if fact.view and func is not _LIFT_FRESH:
        for view in out if isinstance(out, (list, tuple)) else (out,):
            view.older = True  # of a tensor from outside: a write would reach it
            put_lazy_bits(view, view.value)
    return out


class running:
    """Push a level with its modes, and take all of it back however the body ends."""

    __slots__ = ("level", "place", "told")

    def __init__(self, level: VmapLevel) -> None:
        self.level = level
        self.place = entered(level)

    def __enter__(self) -> VmapLevel:
        level = self.level
        self.place.__enter__()
        self.told = functorch_interop.push(level)
        if not level.records_values:
            level.notes = True
            push_functions(SHARING)
        return level

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        level = self.level
        try:
            if not level.records_values:
                pop_functions()
            functorch_interop.pop(level, self.told)
        finally:
            self.place.__exit__()
            level.notes = False
        if error is not None:
            note_missing_axis(error)
        elif level.settles:
            level.ledger.settle(level.size)
