"""Forward mode: dual tensors, a wrapper per `jvp` over PyTorch's single forward-mode level.

The value of a dual tensor is a tensor one level down that carries the tangent as PyTorch's own
forward mode does. Every operator runs there, so views and in-place writes carry tangents as they do
in torch. Values of one level are reached only through their wrapper, so the one forward-mode level
of the process serves any nesting without perturbation confusion.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from forall._autodiff.dual_tensor import (
    Dual,
    DualLevel,
    Keep,
    Share,
    unpack,
    wrap,
)
from forall._autodiff.jvp_by_double_vjp import handed_on, transposed, without_formula
from forall._autodiff.jvp_fixes import (
    FILLED,
    ODD,
    is_trusted,
    made_anew,
    out_of_place,
)
from forall._autodiff.product_jvp import PRODUCTS, of_one_factor
from forall._compat import pytree
from forall._compat.dispatch_state import (
    ACCUMULATION,
    AUTOGRAD,
    accumulating_on,
    apply_function,
    autograd_below,
    functions_off,
    is_excluded,
    is_forward_enabled,
)
from forall._compat.jagged_layout import Jagged, with_held_rows
from forall._compat.lazy_bits import moving
from forall._compat.op_schema import facts, functional_of, written_by
from forall._compat.private_api import DispatchMode
from forall._compat.symbolic_zeros import LINEAR, plain_zeros, simpler
from forall._compat.tensor_subclass import has_posed_class, posing, taken_out
from forall._core import nested_tensor
from forall._core.errors import collective, columns, short
from forall._core.escaped_values import left_over
from forall._core.host_reads import numbers_told
from forall._core.levels import (
    Level,
    entered,
    graph_free,
    level_of,
    levels_in,
    lift,
    outside,
    second_name,
)
from forall._core.sparse_operands import constant, is_sparse
from forall._random.key_scope import taken_back

aten = torch.ops.aten
_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # by its schema a view, but of a new constant
_FILL = aten.fill_.Tensor
_DETACH = aten.detach.default
_LAZY_ZEROS = aten._efficientzerotensor.default
# The inner forward mode must not see these: at this level they are aliases of the same value.
_ALIASES = frozenset({aten._make_dual.default, aten._fw_primal.default})


def _is_value(a: Any) -> bool:
    """True for a value of a level, and for a nested tensor whose rows are one."""
    return level_of(a) is not None if isinstance(a, torch.Tensor) else False


class JvpLevel(DualLevel, DispatchMode):
    """The level, and dispatch mode, that is active while `jvp` calls the user's function."""

    def __init__(self, parent: Level | None, outer_grad: bool) -> None:
        DispatchMode.__init__(self)
        DualLevel.__init__(self, parent, outer_grad)
        self.left_on: list[torch.Tensor] = []  # leaves that got a gradient of this level
        # Arguments from outside, by identity, and the values of this level that replace those that
        # were used: a value with a tangent may be written into an argument.
        self.beside: dict[int, torch.Tensor] = {}
        self.stand_ins: dict[int, Dual] = {}

    def __enter__(self):
        self.place = entered(self)
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
                    leaf.grad = unpack(leaf.grad, self)[0]

    peels = True

    def moves(self, tensor: Any) -> bool:
        return self._unpacked(tensor)[1] is not None

    def by_numpy(self, func: Any, args: tuple, kwargs: dict, /) -> Any:
        """Call a numpy function on the primals, one level further out, if nothing has a tangent."""
        flat, spec = pytree.flatten((args, kwargs))
        own = [type(a) is Dual and a.level is self for a in flat]
        if any(mine and self.moves(a) for a, mine in zip(flat, own, strict=True)):
            return super().by_numpy(func, args, kwargs)
        numbers_told()
        for a, mine in zip(flat, own, strict=True):
            if mine:
                a.refuse_history("numpy")
        with outside(self), functions_off():
            pairs = zip(flat, own, strict=True)
            given = [graph_free(self.afterwards(a)) if mine else a for a, mine in pairs]
            args, kwargs = pytree.unflatten(given, spec)
            return func(*args, **kwargs)

    def afterwards(self, tensor: Dual) -> torch.Tensor:
        """Return the primal: tangents end with their level."""
        return self._unpacked(tensor)[0]

    def kept(self, tensor: Dual) -> torch.Tensor:
        """Return the primal with its autograd history.

        The history of a captured tensor is on both the value and the wrapper, and must count once.
        That of a variable which the function has made is on the wrapper alone.
        """
        primal = self.afterwards(tensor)
        if primal.requires_grad or not tensor.requires_grad:
            return primal
        return apply_function(Keep, tensor, primal)

    def _unpacked(self, tensor: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the primal and the tangent, even while a handler has autograd switched off."""
        with autograd_below(grad=torch.is_grad_enabled(), forward=True):
            return unpack(tensor, self)

    def run_afterwards(self, func: Any, args: tuple, kwargs: dict) -> Any:
        args, kwargs = left_over(args, kwargs)
        with autograd_below(torch.is_grad_enabled(), is_forward_enabled()):  # as in the user's code
            return func(*args, **kwargs)

    def push(self, h: Any, args: tuple) -> tuple:
        return handed_on(h, args, self)

    def under(self, tensors: list, f: Any) -> Dual:
        grad = torch.is_grad_enabled()
        with outside(self), autograd_below(grad=grad and self.outer_grad, forward=grad):
            return wrap(f(*map(self._below, tensors)), self)

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            return apply_function(Share, tensor, self)
        return wrap(self.within(tensor), self)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Share captured arguments; one that was written into has a history at this level."""
        args, kwargs = pytree.map_tensors(self._shared_if_written, (args, kwargs))
        return super().share_captured(args, kwargs)

    def _shared_if_written(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.stand_ins or not tensor.requires_grad:  # at first none does
            return tensor
        with functions_off():
            shared: Any = self.share(tensor)
        shared.is_of_outside = True  # writes by a view of it would not reach the tensor itself
        return shared

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor from outside as it is one level down, an argument with its tangent."""
        found = self.stand_in(tensor)
        return tensor if found is tensor else found.value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Jagged in types:
            return self._of_jagged(func, args, kwargs or {})
        if posing.used and has_posed_class(types):
            return taken_out(self, func, args, kwargs or {})
        for level in levels_in(args, kwargs or {}):
            if level is not self and not level.is_outside(self):
                return NotImplemented
        if func is _DETACH and type(args[0]) is torch.Tensor and is_excluded(AUTOGRAD):
            return func(*args)  # numpy reads the memory of this tensor
        try:
            if self.beside:
                return self._run_beside(func, args, kwargs or {})
            return self.run(func, args, kwargs or {})
        except Exception as error:
            self.raise_told(error, func, args, kwargs or {})
            raise

    def _of_jagged(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on nested tensors.

        One from outside has its history on itself, not on its rows. The history of its tangents is
        further out, so the rows are read there, with the history that autograd gives them.
        """
        found = nested_tensor.answer(func, args)
        if found is not NotImplemented or not self.outer_grad or not any(map(_is_value, args)):
            return found
        known = pytree.map_tensors(self._with_known_rows, (args, kwargs))
        if all(map(operator.is_, pytree.leaves(known), pytree.leaves((args, kwargs)))):
            return found
        return func(*known[0], **known[1])

    def _with_known_rows(self, a: torch.Tensor) -> torch.Tensor:
        if type(a) is not Jagged or not a.requires_grad or _is_value(a):
            return a
        with outside(self), autograd_below(grad=True, forward=True):
            rows = a.values()
        return with_held_rows(a, wrap(rows, self))

    def stand_in(self, a: Any) -> Any:
        """Return the value of this level for an argument from outside; anything else as it is."""
        if id(a) not in self.beside:
            return a
        found = self.stand_ins.get(id(a))
        if found is None:
            if a.requires_grad:  # it is shared with its history, above autograd
                return a
            with functions_off():
                found = self.stand_ins[id(a)] = wrap(lift(a, self.born_in), self)
        return found

    def _run_beside(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator with arguments from outside replaced by values of this level.

        One that writes into an argument returns the argument itself.
        """
        if not facts(func).mutates:
            return self.run(func, *pytree.map_tensors(self.stand_in, (args, kwargs)))
        self.shares = True
        out = self.run(func, *pytree.map_tensors(self.stand_in, (args, kwargs)))
        own = {id(d): self.beside[n] for n, d in self.stand_ins.items()}
        return pytree.map_tensors(lambda t: own.get(id(t), t), out)

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator on primals and tangents together, in torch's forward mode."""
        fact = facts(func)
        if fact.is_collective:
            raise collective("jvp", func)
        if func is _DETACH and not is_excluded(AUTOGRAD):
            return second_name(args[0])
        leaf = accumulating_on() if func in ACCUMULATION else None
        if leaf is not None:
            if not any(type(a) is Dual and a.level is self for a in args):
                return func(*args, **kwargs)  # the gradient of a tensor from outside
            if func is _DETACH and not self.active:
                return self.afterwards(args[0])
            self.left_on.append(leaf)
        if func is _LAZY_ZEROS:
            return plain_zeros(*args, **kwargs)
        if func in LINEAR:
            with functions_off():
                known = simpler(func, args, kwargs)
                if isinstance(known, torch.Tensor):
                    return wrap(known, self)
            func, args, kwargs = known or (func, args, kwargs)
        if func in _ALIASES:
            if is_sparse(args[0]) and type(args[0]) is not Dual:
                return constant(args[0])
            func, args = aten.alias.default, args[:1]
        if func is _FILL and self.moves(args[1]) and not (self.moves(args[0]) or args[1].dim()):
            # Torch would fill a plain tensor of zeros with the tangent, which may be a tape.
            func, fact = aten.copy_.default, facts(aten.copy_.default)
        grad = torch.is_grad_enabled()
        if fact.mutates:
            self._check_writes(func, args, kwargs)
            functional = functional_of(func)
            if functional is not None and (fact.out_names or functional in ODD):
                return self._out(functional, fact, args, kwargs)
        if (func in ODD or fact.foreign) and grad and self._lacks_formula(func, args, kwargs):
            return without_formula(func, args, kwargs, self)
        if func in PRODUCTS and grad:
            with functions_off():
                value = of_one_factor(self, func, args, kwargs)
                if value is not None:
                    return wrap(value, self)
        return self._by_formula(func, fact, args, kwargs)

    def _by_formula(self, func: Any, fact: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator in torch's forward mode, or by its backward if it has no formula."""
        grad = torch.is_grad_enabled()
        with (
            functions_off(),
            autograd_below(grad=grad and self.outer_grad, forward=grad),
        ):
            draws = taken_back() if fact.seeded else None
            try:
                values = [self._below(a) for a in args]
                if func in FILLED and any(map(self.moves, args)):
                    values[: FILLED[func]] = map(moving, values[: FILLED[func]])
                if fact.mutates and self.tapes is not None:
                    self.tapes.keep(written_by(func, args, kwargs))
                mine = fact.mutates and type(args[0]) is Dual and args[0].level is self
                anew = made_anew(func, values[0]) if mine else None
                with out_of_place(func, values):
                    out = (anew or func)(*values, **{k: self._below(a) for k, a in kwargs.items()})
                if anew is not None:
                    args[0].value = out
            except NotImplementedError as error:
                if func is nested_tensor.OF_COMPONENTS:
                    raise nested_tensor.has_no_tangent() from error
                if not grad or fact.mutates:
                    raise
                if draws is not None:
                    draws()
                return transposed(func, args, kwargs, self)
            if fact.mutates:
                return self._written(func, args, kwargs, out)
            if is_sparse(out) and not any(map(self._is_at_stake, args)):
                return constant(out)  # a sparse tensor, which no wrapper can represent
            made = self._above(out)
            if fact.view and func is not _LIFT_FRESH and self._is_outside(args[0]):
                for view in made if isinstance(made, (list, tuple)) else (made,):
                    view.is_of_outside = True
            return made

    def _is_outside(self, a: Any) -> bool:
        """True if the memory belongs to a tensor from outside that no value replaces."""
        if type(a) is Dual and a.level is self:
            return getattr(a, "is_of_outside", False)
        return isinstance(a, torch.Tensor)

    def _is_at_stake(self, a: Any) -> bool:
        return type(a) is Dual and (a.requires_grad or self.moves(a))

    def _lacks_formula(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """True if an argument has a tangent and torch's formula is not correct for it."""
        given = pytree.leaves((args, kwargs))  # arguments may be lists of tensors
        return any(map(self.moves, given)) and not is_trusted(func, map(self._below, given))

    def _out(self, functional: Any, fact: Any, args: tuple, kwargs: dict) -> Any:
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

    def _below(self, a: Any) -> Any:
        if type(a) is Dual:
            return a.value if a.level is self else a
        if isinstance(a, (list, tuple)):
            return [self._below(b) for b in a]
        return a

    def _above(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return wrap(out, self)
        if isinstance(out, (list, tuple)):
            return type(out)(self._above(o) for o in out)
        return out

    def _check_writes(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise if a value with a tangent is written into a tensor from outside."""
        # Running statistics have no derivative.
        aside = {id(args[i]) for i in facts(func).statistics}
        targets = [t for t in written_by(func, args, kwargs) if id(t) not in aside]
        foreign = [t for t in targets if self._is_outside(t)]
        if foreign and any(self.moves(a) for a in (*args, *kwargs.values())):
            raise RuntimeError(
                f"jvp: {func} writes a value that has a tangent into a tensor from outside.\n"
                f"{columns([('written to', short(foreign[0]), 'from before the call')])}\n"
                "Clone it inside the function (.clone()), or pass it as a primal."
            )

    def _written(self, func: Any, args: tuple, kwargs: dict, out: Any) -> Any:
        """Return the results of an in-place write, the very tensors that were given to it."""
        known = {id(self._below(t)): t for t in written_by(func, args, kwargs)}
        for target in known.values():
            if isinstance(target, Dual):
                target.look_like_value()
                if facts(func).into_lists:  # torch counts versions of the values, in inner kernels
                    torch.autograd.graph.increment_version(target)
        if isinstance(out, (list, tuple)):
            return type(out)(known[id(o)] if id(o) in known else self._above(o) for o in out)
        return known[id(out)] if id(out) in known else self._above(out)
