"""Dispatch of operators under vmap: from an ATen call on wrappers to a handler on stacks.

An operator on values of a level arrives at ``__torch_dispatch__``. It is classified by its operands
(of an inner level, mapped, or shared by all examples) and run by its handler, which the registry
has or `rule_lookup` finds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from forall._compat import functorch_interop
from forall._compat.call_site import OURS, TORCH, find_users_frame
from forall._compat.dispatch_state import (
    ACCUMULATION,
    AUTOGRAD,
    CONJUGATE,
    enable_autograd_below,
    functions_off,
    has_tangent,
    has_users_tangents,
    is_accumulating,
    is_excluded,
    is_in_backward,
    set_excluded,
)
from forall._compat.jagged_layout import Jagged
from forall._compat.lazy_bits import LAZY_KEYS, call_with_lazy_bits, copy_lazy_bits
from forall._compat.op_schema import find_written_tensors, get_facts
from forall._compat.private_api import (
    find_innermost_function_mode,
    pop_functions,
    push_functions,
)
from forall._compat.storage import is_saving_storage
from forall._compat.symbolic_zeros import LINEAR, marking, simplify_linear
from forall._compat.tensor_subclass import (
    has_posed_class,
    is_posed,
    posing,
    run_on_wrappers,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core import nested_tensor
from forall._core.errors import make_collective_error, note_missing_axis
from forall._core.levels import (
    activate_level,
    alias_for_autograd,
    apply_at_level,
    find_innermost,
    is_from_outside,
    levels_in,
    lift,
    map_with_rule,
    run_outside,
    stack,
    top,
)
from forall._core.version_counter import bump_versions
from forall._random import key_scope
from forall._vmap import (
    boundary,
    failing_example,
    randomness,
    registry,
    sparse_stack,
)
from forall._vmap.active_set.backward import run_mixed_operands
from forall._vmap.active_set.merge import fit_gradient
from forall._vmap.active_set.restrict_args import restrict_tensor
from forall._vmap.batched_cotangents import find_enclosing_level, unwrap_cotangents
from forall._vmap.batched_tensor import (
    BatchedTensor,
    alias_call,
    check_unwritten,
    derive_view,
    replace_ended_args,
    wrap_existing,
    wrap_stack,
)
from forall._vmap.concretize import concretize
from forall._vmap.function_mode import VMAP_FUNCTIONS
from forall._vmap.lazy_grad.sources import make_lazy_result
from forall._vmap.mutation import in_place
from forall._vmap.mutation.mutation_log import check_external_access
from forall._vmap.numpy_fallback import run_numpy_per_example
from forall._vmap.rule_lookup import resolve_handler
from forall._vmap.rule_makers import basic
from forall._vmap.rule_makers.basic import (
    ONCE,
    VIEW_ONCE,
    VIEWERS,
    find_shared_use,
    has_plain_stack,
    is_own_shared,
    lower_shared,
    wrap_results,
)
from forall._vmap.rule_makers.pointwise import handle_pointwise, try_aligned_pointwise
from forall._vmap.vmap_level import VmapConfig, VmapLevel

aten = torch.ops.aten
_Tensor = torch.Tensor
_HANDLERS = registry.HANDLERS
_SHARED = registry.SHARED
_ALIAS = aten.alias.default
_DETACH = aten.detach.default
# What torch's forward mode asks for each tangent. The answer is on the wrappers.
_SAME_SIZE, _SAME_STORAGE = aten.is_same_size.default, aten._has_same_storage_numel.default
_TO_COPY = aten._to_copy.default
_HANDED_ON = OURS, f"{TORCH}_ops.py"  # by the levels further in
_LIFT_FRESH = aten.lift_fresh.default  # by its schema a view, of the constant
_INNER, _MAPPED, _SHARED_BY_ALL = "inner", "mapped", "shared"


class Operations(VmapLevel):
    """The operations of `VmapLevel`. They are set on that class at the end of this module."""

    def lift_one_level(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.records_on_value:
            shared = wrap_existing(tensor, None, self)
            shared.is_external = True
            return shared
        return boundary.broadcast_to_examples(tensor, self)

    def take_next_draw(self, scope: key_scope.RandomScope) -> tuple:
        return randomness.take_next_draw(scope, self)

    def fallback_value(self, tensor: BatchedTensor) -> torch.Tensor:
        return boundary.keep_shared(tensor) if tensor.axis is None else tensor

    def fallback_gradient(self, gradient: Any) -> torch.Tensor:
        return boundary.sum_over_examples(gradient, self)

    def run_after_exit(self, func: Any, args: tuple, kwargs: dict) -> Any:
        args, kwargs = replace_ended_args(func, args, kwargs)
        return func(*args, **kwargs)

    call_numpy = run_numpy_per_example
    concretize = staticmethod(concretize)
    explain_error = failing_example.find_example_error

    def apply_further_out(self, h: Any, args: tuple) -> tuple:
        """``h`` as a function of stacks, one level further out."""
        around = find_enclosing_level(self, args) if self.records_on_value else self
        with run_outside(around):
            stacked = map_with_rule(h, self._lift_to_stacks)
            return tuple(
                map(
                    self._example_from_stack,
                    apply_at_level(around.parent, stacked, (*map(self._stack_from_example, args),)),
                )
            )

    def _lift_to_stacks(self, h: Any) -> Any:
        """Return ``h`` as a function of stacks; their examples are of another level like this."""

        def run_on_stacks(*stacks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            again = VmapLevel(self.size, VmapConfig(self.config.randomness), top())
            again.origin, again.axis = self.origin, self.axis
            if self.active:  # one call, one ledger
                again.state.mutation_log = self.state.mutation_log
                again.state.applies_updates = False
            again.state.scope = self._rewrap_scope(again)
            examples = [boundary.stack_to_example(s, 0, again) for s in stacks]
            with run_vmap_level(again):
                outs = h(*examples)
            return tuple(boundary.example_to_stack(y, 0, again) for y in outs)

        vars(run_on_stacks)["enters"] = True  # a level of its own; for `jvp_by_double_vjp`
        return run_on_stacks

    def _rewrap_scope(self, again: VmapLevel) -> key_scope.RandomScope | None:
        """The random scope of this level's examples, as those of another level."""
        scope = key_scope.scopes.running if self.active else self.state.scope
        if scope is None or not (type(scope.key) is BatchedTensor and scope.key.level is self):
            return scope
        key = scope.key
        return scope.share_count(lambda: wrap_stack(key.value, key.axis, again))

    def _example_from_stack(self, stack_: torch.Tensor) -> torch.Tensor:
        """A stack (B, *S) as one example, by the way that this level records."""
        return (
            wrap_stack(stack_, 0, self)
            if self.records_on_value
            else boundary.stack_to_example(stack_, 0, self)
        )

    def _stack_from_example(self, example: torch.Tensor) -> torch.Tensor:
        """One example as its stack (B, *S)."""
        if self.records_on_value:
            return unwrap_cotangents(example, ((self, 0),))
        return boundary.example_to_stack(lift(example, self), 0, self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Jagged in types:
            return nested_tensor.run_on_nested(func, args)
        if posing.used and has_posed_class(types):
            return run_on_wrappers(self, func, args, kwargs or {})
        level: Any = self.sub_level or self
        try:
            with functions_off():
                handler = _HANDLERS.get(func)
                if (func is _SAME_SIZE or func is _SAME_STORAGE) and _is_tangent_pair(level, *args):
                    return handler(level, func, args, {})  # pyright: ignore[reportOptionalCall]
                records = level.records_on_value and level.outer_grad is not None
                if handler is handle_pointwise and not kwargs and not records:
                    out = try_aligned_pointwise(level, func, args)
                    if out is not None:
                        return out
                elif handler in VIEWERS and not records and has_plain_stack(args[0], level):
                    if func is _DETACH and not is_excluded(AUTOGRAD):
                        return args[0].graph_free()
                    return handler(level, func, args, kwargs or {})  # pyright: ignore[reportOptionalCall]
                elif (
                    not (kwargs or level.records_on_value)
                    and args
                    and is_own_shared(args[0], level)
                ):
                    out = _try_own_shared(level, func, args)
                    if out is not None:
                        return out
                met: list[_Tensor] = []
                found = (
                    level._classify_operands(args, met, kwargs.values())
                    if kwargs
                    else level._classify_operands(args, met)
                )
                if found is _INNER:
                    inner = find_innermost(levels_in(args, kwargs or {}))
                    if inner.root is not self.root:
                        return NotImplemented  # an inner value: its level acts first
                    return level.mix_operands(func, args, kwargs or {})
                return level._run(func, args, kwargs or {}, handler, found, met)
        except Exception as error:
            if sparse_stack.can_run_per_example(func, args, kwargs or {}):
                return level._run_per_example(func, args, kwargs or {})
            level.raise_explained(error, func, args, kwargs or {})
            raise

    def _run_per_example(self, func: Any, args: tuple, kwargs: dict) -> Any:
        try:
            with functions_off():
                return sparse_stack.run_per_example(self, func, args, kwargs)
        except Exception as error:
            self.raise_explained(error, func, args, kwargs)
            raise

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operator on values of this level, with this level's modes off."""
        with functions_off():
            if not self.active and is_in_backward():
                check_unwritten(args, self)
                found = make_lazy_result(self, func, args, kwargs)
                if found is not None:
                    return found
            return self.run_now(func, args, kwargs)

    def run_now(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator without the lazy gradients that `run` may return."""
        met: list[_Tensor] = []
        found = self._classify_operands(args, met, kwargs.values())
        if found is _INNER:
            return self.mix_operands(func, args, kwargs)
        return self._run(func, args, kwargs, _HANDLERS.get(func), found, met)

    def complete_gradient_for(self, t: BatchedTensor, level: Any) -> torch.Tensor:
        """A gradient of this level as one of ``level``, where both have examples of one root."""
        return fit_gradient(t, level)

    def mix_operands(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on values of different examples of one root."""
        return call_with_lazy_bits(run_mixed_operands, (func, args, kwargs), {})

    def apply_to_inner(self, tensors: list, f: Any) -> BatchedTensor:
        with run_outside(self):
            if len(tensors) == 1:
                return wrap_stack(f(tensors[0].value), tensors[0].axis, self)
            if all(t.axis is None for t in tensors):
                return wrap_stack(f(*(t.value for t in tensors)), None, self)
            return wrap_stack(f(*(basic.expand_to_stack(t, self) for t in tensors)), 0, self)

    def _classify_operands(self, args: Any, met: list[_Tensor], more: Any = ()) -> str:
        """Say if the arguments hold values of an inner level, or else mapped ones of this.

        Tensors from outside, which all examples share, are added to ``met``.
        """
        found = _SHARED_BY_ALL
        for a in (*args, *more) if more else args:
            if type(a) in _WORDS:
                continue
            if isinstance(a, Wrapper):
                level = a.level
                if level is self:
                    if a.axis is not None:
                        found = _MAPPED
                    elif a.is_external:
                        met.append(a)
                elif not level.is_outside(self):
                    return _INNER
                else:
                    met.append(a)
            elif type(a) in _SEQUENCES:
                inside = self._classify_operands(a, met)
                if inside is _INNER:
                    return _INNER
                if inside is _MAPPED:
                    found = _MAPPED
            elif isinstance(a, _Tensor):
                met.append(a)
        return found

    def _run(
        self, func: Any, args: tuple, kwargs: dict, handler: Any, found: str, met: list[_Tensor]
    ) -> Any:
        if stack.late is not None:
            stack.late()
        if func is _DETACH and not is_excluded(AUTOGRAD):
            return alias_for_autograd(args[0])
        is_linear = marking.used and func in LINEAR
        if is_linear and (known := simplify_linear(func, args, kwargs)) is not None:
            if isinstance(known, _Tensor):
                return wrap_stack(known, None, self)
            (func, args, kwargs), handler = known, None
        is_outside = bool(met) and found is not _MAPPED and boundary.is_at_outer_node(self, met)
        if met and not is_outside:
            boundary.check_all_shared(self, func, met)
            known = check_external_access(self, func, args, kwargs, found is _MAPPED, met)
            if known is not None:
                return known(self, func, args, kwargs)
        if is_outside:
            handler = run_outside_operator
        elif found is not _MAPPED:
            handler = run_shared_operator
        elif handler is None:
            handler = resolve_handler(func)
        if self.records_on_value and (self.outer_grad is not None or get_facts(func).writes):
            grad = bool(self.outer_grad)
            with enable_autograd_below(grad=grad, forward=grad):
                return handler(self, func, args, kwargs)
        if not is_excluded(CONJUGATE):
            return handler(self, func, args, kwargs)
        for key in LAZY_KEYS:  # as `call_with_lazy_bits` does, at less for each operator
            set_excluded(key, False)
        try:
            return handler(self, func, args, kwargs)
        finally:
            for key in LAZY_KEYS:
                set_excluded(key, True)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with tensors from outside that carry a derivative in their shared form."""
        return tuple(map(self._share_argument, args)), {
            k: self._share_argument(a) for k, a in kwargs.items()
        }

    def _lift_restricted(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor from outside, for the examples that run."""
        if not stack.diverged or (is_in_backward() and not stack.again):
            return lift(t, self)
        return restrict_tensor(lift(t, self.root))

    def _share_argument(self, a: Any) -> Any:
        if posing.used and is_posed(a):
            return a  # the wrapper that it holds is shared when it is taken out
        if self.shares and isinstance(a, torch.Tensor):  # else autograd knows it as it is
            if (a.requires_grad or (has_users_tangents() and has_tangent(a))) and is_from_outside(
                a, self
            ):
                return self._lift_restricted(a)
        elif type(a) in _SEQUENCES and a:
            return type(a)([self._share_argument(b) for b in a])
        return a


def _is_tangent_pair(level: VmapLevel, a: Any, b: Any) -> bool:
    """True for values of this level, of which one differs between the examples."""
    return (
        type(a) is BatchedTensor is type(b)
        and a.level is level is b.level
        and not (a.axis is None is b.axis)
    )


def _try_own_shared(level: VmapLevel, func: Any, args: tuple) -> Any:
    """Run an operator once on values made under this level that all its examples share; else None.

    Its first argument is such a value. This is `run_shared_operator` for operators that only read,
    and for views with a rule, without what others need.
    """
    x = args[0]
    if func is _ALIAS:
        return derive_view(x, x.value, None, alias_call)
    use = find_shared_use(func)
    if (use is not ONCE and use is not VIEW_ONCE) or func is _TO_COPY or func is _DETACH:
        return None
    values = []
    for a in args:
        if type(a) is BatchedTensor:
            v = a.value
            if a.axis is not None or a.level is not level or a.is_external:
                return None
            if v.is_complex() or v.is_neg() or v.layout is not torch.strided:
                return None  # a kernel could meet a lazy bit, or all examples be one sparse tensor
            values.append(v)
        elif type(a) in _WORDS or not (isinstance(a, _Tensor) or _has_tensors(a)):
            values.append(a)
        else:
            return None
    if use is VIEW_ONCE:
        return basic.derive_views(x, func, args[1:], {}, func._op(*values))
    out = call_with_lazy_bits(func, tuple(values), {})  # a kernel may make some inside
    if sparse_stack.can_stay_unwrapped(out, args):
        return sparse_stack.alias_constant(out)
    return wrap_results(out, None, level)


def _has_tensors(a: Any) -> bool:
    return type(a) in _SEQUENCES and any(isinstance(b, _Tensor) for b in a)


_SEQUENCES = frozenset({list, tuple})
_WORDS = frozenset({int, float, bool, type(None)})


def run_outside_operator(level: VmapLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on what all examples share, as outside the level: its results stay there."""
    plain = {k: lower_shared(a, level) for k, a in kwargs.items()}
    return func(*[lower_shared(a, level) for a in args], **plain)


def run_shared_operator(level: VmapLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose arguments are the same for all examples runs once."""
    if func in ACCUMULATION and is_accumulating() and is_from_outside(args[0], level):
        # It adds to the .grad of a tensor from outside, which is no value of this level.
        return run_outside_operator(level, func, args, kwargs)
    special = _SHARED.get(func)
    if special is not None:
        return special(level, func, args, kwargs)
    fact = get_facts(func)
    if fact.is_collective:
        raise make_collective_error("vmap", func)
    if fact.seeded or (fact.writes and not fact.mutates):
        return resolve_handler(func)(level, func, args, kwargs)
    if fact.into_lists:
        with bump_versions(find_written_tensors(func, args, kwargs)):
            return in_place.shared_data_write(level, func, args, kwargs)
    if fact.writes:
        return in_place.shared_data_write(level, func, args, kwargs)
    if fact.view and func not in registry.VIEWS and func is not _LIFT_FRESH:
        handler = resolve_handler(func)
        if registry.WAYS[func] == "decomposed":  # into views that can be derived again
            return handler(level, func, args, kwargs)
    plain = [lower_shared(a, level) for a in args]
    out = func(*plain, **{k: lower_shared(a, level) for k, a in kwargs.items()})
    if sparse_stack.can_stay_unwrapped(out, args):
        return sparse_stack.alias_constant(out)
    if (
        func is _TO_COPY
        and isinstance(plain[0], torch.Tensor)  # a number may stand in its place
        and not plain[0].is_cpu
        and is_saving_storage(find_users_frame(sys._getframe(), _HANDED_ON))
    ):
        return out  # a copy of the host's, of which the memory is read next
    if fact.view and isinstance(args[0], BatchedTensor) and args[0].level is level:
        return basic.derive_views(args[0], func, args[1:], kwargs, out)
    out = wrap_results(out, None, level)
    if fact.view and func is not _LIFT_FRESH:
        for view in out if isinstance(out, (list, tuple)) else (out,):
            view.is_external = True  # of a tensor from outside: a write would reach it
            copy_lazy_bits(view, view.value)
    return out


class run_vmap_level:
    """Push a level with its modes, and take all of it back however the body ends."""

    __slots__ = ("level", "place", "told")

    def __init__(self, level: VmapLevel) -> None:
        self.level = level
        self.place = activate_level(level)

    def __enter__(self) -> VmapLevel:
        level = self.level
        self.place.__enter__()
        self.told = functorch_interop.push_mode_for_compiler(level)
        if not level.records_on_value:
            level.state.logs_writes = True
            push_functions(VMAP_FUNCTIONS)
        return level

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        level = self.level
        try:
            # An interrupt may have come while a call had taken the mode off:
            # see NOTE [an exception between two instructions].
            if not level.records_on_value and (
                error is None or find_innermost_function_mode() is VMAP_FUNCTIONS
            ):
                pop_functions()
            functorch_interop.pop_mode_for_compiler(level, self.told)
        finally:
            self.place.__exit__()
            level.state.logs_writes = False
        if error is not None:
            note_missing_axis(error)
        elif level.state.applies_updates:
            level.state.mutation_log.apply_updates(level.size)


for _name, _operation in vars(Operations).items():
    if _name not in {"__module__", "__qualname__", "__doc__"} and (
        callable(_operation) or isinstance(_operation, staticmethod)
    ):
        setattr(VmapLevel, _name, _operation)
