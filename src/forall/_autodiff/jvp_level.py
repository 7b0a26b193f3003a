"""Forward mode: dual tensors, a wrapper per `jvp` over PyTorch's single forward-mode level.

The value of a dual tensor is a tensor one level down that carries the tangent as PyTorch's own
forward mode does. Every operator runs there, so views and in-place writes carry tangents as they do
in torch. Values of one level are reached only through their wrapper, so the one forward-mode level
of the process serves any nesting without perturbation confusion.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.dual_tensor import (
    DualLevel,
    DualTensor,
    KeepPrimal,
    LiftToDual,
    find_halves,
    loses_tangent,
    unpack_dual,
    wrap_dual,
)
from forall._autodiff.jvp_by_double_vjp import (
    push_by_transposing,
    push_through_levels,
    push_without_formula,
)
from forall._autodiff.jvp_fixes import (
    FILLED,
    SUSPECT_OPS,
    find_functional_fill,
    has_valid_formula,
    prevent_overwrites,
)
from forall._autodiff.jvp_rules import push_by_rule
from forall._autodiff.one_tangent_jvp import BINARY_OPS, push_binary_op
from forall._compat import pytree
from forall._compat.dispatch_state import (
    ACCUMULATION,
    AUTOGRAD,
    apply_own_function,
    enable_autograd_below,
    functions_off,
    get_accumulating_leaf,
    is_excluded,
    is_forward_enabled,
)
from forall._compat.documented_error import documented_error
from forall._compat.jagged_layout import Jagged, replace_raw_rows
from forall._compat.lazy_bits import materialize_tangent
from forall._compat.op_schema import find_functional, find_written_tensors, get_facts
from forall._compat.private_api import DispatchMode
from forall._compat.symbolic_zeros import LINEAR, make_plain_zeros, simplify_linear
from forall._compat.tensor_subclass import has_posed_class, posing, run_on_wrappers
from forall._core import nested_tensor
from forall._core.errors import format_columns, format_short, make_collective_error
from forall._core.escaped_values import replace_escaped_args
from forall._core.host_reads import notify_host_read
from forall._core.levels import (
    Level,
    activate_level,
    alias_for_autograd,
    graph_free,
    level_of,
    levels_in,
    lift,
    run_outside,
)
from forall._core.sparse_operands import alias_constant, is_sparse
from forall._random.key_scope import make_count_reset

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # by its schema a view, but of a new constant
_FILL = aten.fill_.Tensor
_DETACH = aten.detach.default
_LAZY_ZEROS = aten._efficientzerotensor.default
_TO_COPY = aten._to_copy.default
# The inner forward mode must not see these: at this level they are aliases of the same value.
_ALIASES = frozenset({aten._make_dual.default, aten._fw_primal.default})


def _is_value(a: Any) -> bool:
    """True for a value of a level, and for a nested tensor whose rows are one."""
    return level_of(a) is not None if isinstance(a, torch.Tensor) else False


class OuterArguments:
    """Arguments of a jvp level's function that come from outside, without a tangent.

    ``tensors`` has them by identity, with copies that the host reads. ``stand_ins`` are the values
    of the level that replace those that were used: a value with a tangent may be written into one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = {id(t): t for t in tensors}
        self.stand_ins: dict[int, DualTensor] = {}
        self.are_written = False

    def restore_identity(self, out: Any) -> Any:
        """Return a result with stand-ins replaced by the arguments themselves."""
        own = {id(d): self.tensors[n] for n, d in self.stand_ins.items()}
        return pytree.map_tensors(lambda t: own.get(id(t), t), out)


class JvpLevel(DualLevel, DispatchMode):
    """The level, and dispatch mode, that is active while `jvp` calls the user's function."""

    def __init__(
        self, parent: Level | None, outer_grad: bool, beside: Sequence[torch.Tensor] = ()
    ) -> None:
        DispatchMode.__init__(self)
        DualLevel.__init__(self, parent, outer_grad)
        self.left_on: list[torch.Tensor] = []  # leaves that got a gradient of this level
        self.outer_args = OuterArguments(beside)

    def __enter__(self):
        self.place = activate_level(self)
        self.place.__enter__()
        return DispatchMode.__enter__(self)

    def __exit__(self, *error):
        try:
            return DispatchMode.__exit__(self, *error)
        finally:
            place, self.place = self.place, None  # they refer to each other
            place.__exit__()
            while self.left_on:  # by a backward pass inside
                leaf = self.left_on.pop()
                with functions_off():
                    leaf.grad = unpack_dual(leaf.grad, self)[0]

    records_on_value = True

    @property
    def shares(self) -> bool:
        return self.outer_args.are_written

    def carries_tangent(self, tensor: Any) -> bool:
        if type(tensor) is DualTensor and tensor.level is self and find_halves(tensor) is not None:
            return True
        return self._unpack(tensor)[1] is not None

    def call_numpy(self, func: Any, args: tuple, kwargs: dict, /) -> Any:
        """Call a numpy function on the primals, one level further out, if nothing has a tangent."""
        flat, spec = pytree.flatten((args, kwargs))
        own = [type(a) is DualTensor and a.level is self for a in flat]
        if any(mine and self.carries_tangent(a) for a, mine in zip(flat, own, strict=True)):
            return super().call_numpy(func, args, kwargs)
        notify_host_read()
        for a, mine in zip(flat, own, strict=True):
            if mine:
                a.refuse_history("numpy")
        with run_outside(self), functions_off():
            pairs = zip(flat, own, strict=True)
            given = [graph_free(self.fallback_value(a)) if mine else a for a, mine in pairs]
            args, kwargs = pytree.unflatten(given, spec)
            return func(*args, **kwargs)

    def fallback_value(self, tensor: DualTensor) -> torch.Tensor:
        """Return the primal: tangents end with their level."""
        return self._unpack(tensor)[0]

    def fallback_with_history(self, tensor: DualTensor) -> torch.Tensor:
        """Return the primal with its autograd history.

        The history of a captured tensor is on both the value and the wrapper, and must count once.
        That of a variable which the function has made is on the wrapper alone.
        """
        primal = self.fallback_value(tensor)
        if primal.requires_grad or not tensor.requires_grad:
            return primal
        return apply_own_function(KeepPrimal, tensor, primal)

    def _unpack(self, tensor: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the primal and the tangent, even while a handler has autograd switched off."""
        with enable_autograd_below(grad=torch.is_grad_enabled(), forward=True):
            return unpack_dual(tensor, self)

    def run_after_exit(self, func: Any, args: tuple, kwargs: dict) -> Any:
        args, kwargs = replace_escaped_args(args, kwargs)
        with enable_autograd_below(
            torch.is_grad_enabled(), is_forward_enabled()
        ):  # as in the user's code
            return func(*args, **kwargs)

    def apply_further_out(self, h: Any, args: tuple) -> tuple:
        return push_through_levels(h, args, self)

    def apply_to_inner(self, tensors: list, f: Any) -> DualTensor:
        grad = torch.is_grad_enabled()
        with run_outside(self), enable_autograd_below(grad=grad and self.outer_grad, forward=grad):
            return wrap_dual(f(*map(self.lower_value, tensors)), self)

    def lift_one_level(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            return apply_own_function(LiftToDual, tensor, self)
        return wrap_dual(self.lower_tensor(tensor), self)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Share captured arguments; one that was written into has a history at this level."""
        args, kwargs = pytree.map_tensors(self._share_if_written, (args, kwargs))
        return super().share_captured(args, kwargs)

    def _share_if_written(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            id(tensor) not in self.outer_args.stand_ins or not tensor.requires_grad
        ):  # at first none does
            return tensor
        with functions_off():
            shared: Any = self.lift_one_level(tensor)
        shared.is_of_outside = True  # writes by a view of it would not reach the tensor itself
        return shared

    def lower_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor from outside as it is one level down, an argument with its tangent."""
        found = self.replace_outer_arg(tensor)
        return tensor if found is tensor else found.value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Jagged in types:
            return self._run_jagged(func, args, kwargs or {})
        if posing.used and has_posed_class(types):
            return run_on_wrappers(self, func, args, kwargs or {})
        for level in levels_in(args, kwargs or {}):
            if level is not self and not level.is_outside(self):
                return NotImplemented
        if func is _DETACH and type(args[0]) is torch.Tensor and is_excluded(AUTOGRAD):
            if self.carries_tangent(self.outer_args.stand_ins.get(id(args[0]))):
                raise loses_tangent("numpy")
            return func(*args)  # numpy reads the memory of this tensor
        if func is _TO_COPY and self._is_for_the_host(args[0], kwargs or {}):
            copy = func(*args, **(kwargs or {}))
            self.outer_args.tensors[id(copy)] = copy
            return copy
        try:
            if self.outer_args.tensors:
                return self._run_on_outer_args(func, args, kwargs or {})
            return self.run(func, args, kwargs or {})
        except Exception as error:
            self.raise_explained(error, func, args, kwargs or {})
            raise

    def _run_jagged(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on nested tensors.

        One from outside has its history on itself, not on its rows. The history of its tangents is
        further out, so the rows are read there, with the history that autograd gives them.
        """
        found = nested_tensor.run_on_nested(func, args)
        if found is not NotImplemented or not self.outer_grad or not any(map(_is_value, args)):
            return found
        known = pytree.map_tensors(self._attach_rows, (args, kwargs))
        if all(map(operator.is_, pytree.get_leaves(known), pytree.get_leaves((args, kwargs)))):
            return found
        return func(*known[0], **known[1])

    def _attach_rows(self, a: torch.Tensor) -> torch.Tensor:
        if type(a) is not Jagged or not a.requires_grad or _is_value(a):
            return a
        with run_outside(self), enable_autograd_below(grad=True, forward=True):
            rows = a.values()
        return replace_raw_rows(a, wrap_dual(rows, self))

    def _is_for_the_host(self, a: Any, kwargs: dict) -> bool:
        """Return True if torch may copy a tensor from outside to read its memory, as for `tolist`.

        A value of this level has no memory.
        """
        device = kwargs.get("device")
        return (
            device is not None
            and device.type == "cpu"
            and type(a) is torch.Tensor
            and not (a.is_cpu or a.is_meta or a.requires_grad or id(a) in self.outer_args.tensors)
        )

    def replace_outer_arg(self, a: Any) -> Any:
        """Return the value of this level for an argument from outside; anything else as it is."""
        if id(a) not in self.outer_args.tensors:
            return a
        stand_ins = self.outer_args.stand_ins
        found = stand_ins.get(id(a))
        if found is None:
            if a.requires_grad:  # it is shared with its history, above autograd
                return a
            with functions_off():
                value = lift(a, self.entry.parent)
                # Torch's copy_ would take the tangent from the argument itself, which it also sees.
                found = stand_ins[id(a)] = wrap_dual(a.data if value is a else value, self)
        return found

    def _run_on_outer_args(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator with arguments from outside replaced by values of this level.

        One that writes into an argument returns the argument itself.
        """
        if not get_facts(func).mutates:
            return self.run(func, *pytree.map_tensors(self.replace_outer_arg, (args, kwargs)))
        self.outer_args.are_written = True
        out = self.run(func, *pytree.map_tensors(self.replace_outer_arg, (args, kwargs)))
        return self.outer_args.restore_identity(out)

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator on primals and tangents together, in torch's forward mode."""
        made = push_by_rule(self, func, args, kwargs)
        if made is not None:
            return made
        fact = get_facts(func)
        if fact.is_collective:
            raise make_collective_error("jvp", func)
        if func is _DETACH and not is_excluded(AUTOGRAD):
            return alias_for_autograd(args[0])
        leaf = get_accumulating_leaf() if func in ACCUMULATION else None
        if leaf is not None:
            if not any(type(a) is DualTensor and a.level is self for a in args):
                return func(*args, **kwargs)  # the gradient of a tensor from outside
            if func is _DETACH and not self.active:
                return self.fallback_value(args[0])
            self.left_on.append(leaf)
        if func is _LAZY_ZEROS:
            return make_plain_zeros(*args, **kwargs)
        if func in LINEAR:
            with functions_off():
                known = simplify_linear(func, args, kwargs)
                if isinstance(known, torch.Tensor):
                    return wrap_dual(known, self)
            func, args, kwargs = known or (func, args, kwargs)
        if func in _ALIASES:
            if is_sparse(args[0]) and type(args[0]) is not DualTensor:
                return alias_constant(args[0])
            func, args = aten.alias.default, args[:1]
        if (
            func is _FILL
            and self.carries_tangent(args[1])
            and not (self.carries_tangent(args[0]) or args[1].dim())
        ):
            # Torch would fill a plain tensor of zeros with the tangent, which may be a tape.
            func, fact = aten.copy_.default, get_facts(aten.copy_.default)
        grad = torch.is_grad_enabled()
        if fact.mutates:
            self._check_writes(func, args, kwargs)
            functional = find_functional(func)
            if functional is not None and (fact.out_names or functional in SUSPECT_OPS):
                return self._run_then_copy(functional, fact, args, kwargs)
        if (
            (func in SUSPECT_OPS or fact.foreign)
            and grad
            and self._lacks_formula(func, args, kwargs)
        ):
            return push_without_formula(func, args, kwargs, self)
        if func in BINARY_OPS and grad:
            with functions_off():
                value = push_binary_op(self, func, args, kwargs)
                if value is not None:
                    return wrap_dual(value, self)
        return self._run_formula(func, fact, args, kwargs)

    def _run_formula(self, func: Any, fact: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator in torch's forward mode, or by its backward if it has no formula."""
        grad = torch.is_grad_enabled()
        with (
            functions_off(),
            enable_autograd_below(grad=grad and self.outer_grad, forward=grad),
        ):
            draws = make_count_reset() if fact.seeded else None
            try:
                values = [self.lower_value(a) for a in args]
                if func in FILLED and any(map(self.carries_tangent, args)):
                    values[: FILLED[func]] = map(materialize_tangent, values[: FILLED[func]])
                if fact.mutates and self.tapes is not None:
                    self.tapes.copy_constants(find_written_tensors(func, args, kwargs))
                mine = fact.mutates and type(args[0]) is DualTensor and args[0].level is self
                anew = find_functional_fill(func, values[0]) if mine else None
                with prevent_overwrites(func, values):
                    out = (anew or func)(
                        *values, **{k: self.lower_value(a) for k, a in kwargs.items()}
                    )
                if anew is not None:
                    args[0].value = out
            except NotImplementedError as error:
                if func is nested_tensor.OF_COMPONENTS:
                    raise nested_tensor.make_no_tangent_error() from error
                if not grad or fact.mutates:
                    raise
                if draws is not None:
                    draws()
                return push_by_transposing(func, args, kwargs, self)
            if fact.mutates:
                return self._return_targets(func, args, kwargs, out)
            if is_sparse(out) and not any(map(self._has_derivative, args)):
                return alias_constant(out)  # a sparse tensor, which no wrapper can represent
            made = self._wrap_results(out)
            if fact.view and func is not _LIFT_FRESH and self._is_outside(args[0]):
                for view in made if isinstance(made, (list, tuple)) else (made,):
                    view.is_of_outside = True
            return made

    def _is_outside(self, a: Any) -> bool:
        """True if the memory belongs to a tensor from outside that no value replaces."""
        if type(a) is DualTensor and a.level is self:
            return getattr(a, "is_of_outside", False)
        return isinstance(a, torch.Tensor)

    def _has_derivative(self, a: Any) -> bool:
        return type(a) is DualTensor and (a.requires_grad or self.carries_tangent(a))

    def _lacks_formula(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """True if an argument has a tangent and torch's formula is not correct for it."""
        given = pytree.get_leaves((args, kwargs))  # arguments may be lists of tensors
        return any(map(self.carries_tangent, given)) and not has_valid_formula(
            func, map(self.lower_value, given)
        )

    def _run_then_copy(self, functional: Any, fact: Any, args: tuple, kwargs: dict) -> Any:
        """Run the functional form, then copy into the targets.

        Forward mode has no ``out=`` forms, and wrong in-place forms for some operators.
        """
        targets = [kwargs[n] for n in fact.out_names] or [args[0]]
        rest = {k: a for k, a in kwargs.items() if k not in fact.out_names}
        results = self.run(functional, args, rest)
        if isinstance(results, torch.Tensor):
            results = (results,)
        for target, result in zip(targets, results, strict=True):
            self.run(aten.copy_.default, (target, result), {})
        return targets[0] if len(targets) == 1 else tuple(targets)

    def _wrap_results(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return wrap_dual(out, self)
        if isinstance(out, (list, tuple)):
            return type(out)(self._wrap_results(o) for o in out)
        return out

    def _check_writes(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise if a value with a tangent is written into a tensor from outside."""
        # Running statistics have no derivative.
        known = get_facts(func).statistics
        aside = {id(args[i]) for i in known.positions} if known is not None else set()
        targets = [t for t in find_written_tensors(func, args, kwargs) if id(t) not in aside]
        foreign = [t for t in targets if self._is_outside(t)]
        if foreign and any(self.carries_tangent(a) for a in (*args, *kwargs.values())):
            rows = [("written to", format_short(foreign[0]), "from before the call")]
            raise documented_error(RuntimeError, "tangent-lost")(
                f"jvp: {func} writes a value that has a tangent into a tensor from outside.\n"
                f"{format_columns(rows)}\n"
                "Clone it inside the function (.clone()), or pass it as a primal."
            )

    def _return_targets(self, func: Any, args: tuple, kwargs: dict, out: Any) -> Any:
        """Return the results of an in-place write, the very tensors that were given to it."""
        known = {id(self.lower_value(t)): t for t in find_written_tensors(func, args, kwargs)}
        for target in known.values():
            if isinstance(target, DualTensor):
                target.look_like_value()
                if get_facts(
                    func
                ).into_lists:  # torch counts versions of the values, in inner kernels
                    torch.autograd.graph.increment_version(target)
        if isinstance(out, (list, tuple)):
            return type(out)(known[id(o)] if id(o) in known else self._wrap_results(o) for o in out)
        return known[id(out)] if id(out) in known else self._wrap_results(out)
