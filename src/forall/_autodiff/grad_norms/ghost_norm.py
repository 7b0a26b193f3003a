"""Ghost norms: a backward pass that keeps weight gradients as unmultiplied factors.

It is autograd's ordinary backward pass, for callers that need the gradients' norms alone. Under a
dispatch mode, each operator that multiplies two factors to a larger product returns a lazy tensor.
That tensor computes the product when any operator needs it. Operators that are unknown here cost
what they always do, and the numbers do not change.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import torch
from torch import Tensor

from forall._autodiff import reverse_mode
from forall._autodiff.grad_norms import outer_products
from forall._compat.dispatch_state import AUTOGRAD, functions_off, is_excluded
from forall._compat.op_schema import in_arguments
from forall._compat.private_api import DispatchMode, functions_pass
from forall._compat.wrapper_tensor import Wrapper, make_wrapper
from forall._core.host_reads import shown
from forall._core.levels import Level, complete, second_name, stack, top

aten = torch.ops.aten


def squared_norms(value: Tensor, inputs: list[Tensor], *, create_graph: bool) -> list[Tensor]:
    """Return the squared norm of the gradient of each input, in its dtype or a wider one."""
    ones = reverse_mode.ones(value)
    with Factoring(top()):
        found = reverse_mode.pulled(
            (value,), (ones,), inputs, retain_graph=create_graph, create_graph=create_graph
        )
    with functions_off():
        return [_squared(g, x) for g, x in zip(found, inputs, strict=True)]


def _squared(g: Tensor | None, x: Tensor) -> Tensor:
    if g is None:
        return torch.zeros((), dtype=x.dtype.to_real(), device=x.device)
    if type(g) is Factored and g.whole.terms:
        first = g.whole.terms[0]
        return first.squared() if type(first) is Joined else outer_products.squared(g.whole.terms)
    g = complete(g)
    assert g is not None  # noqa: S101 - it was not
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return outer_products.wide(g).square().sum()


class Whole:
    """The base of a group of lazy views: a sum of terms, replaced by its value once computed."""

    __slots__ = ("made", "terms")

    def __init__(self, terms: list[outer_products.Term]) -> None:
        self.terms = terms
        self.made: Any = None

    @property
    def pays(self) -> bool:
        """True if the factors hold fewer numbers than their product."""
        return sum(t.size for t in self.terms) < prod(self.terms[0].frame)

    def value(self) -> Tensor:
        if self.terms:
            first, *others = self.terms
            self.made = first.value()
            for term in others:
                self.made = self.made + term.value()
            self.terms = []
        return self.made


class Factored(Wrapper):
    """A lazy product of two factors, or its view through ``chain``, a list of view operators."""

    level: FactoredLevel
    whole: Whole
    chain: list[tuple[Any, tuple]]

    @property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        found = self.whole.value()
        for func, args in self.chain:
            found = func(found, *args)
        return found

    def graph_free(self) -> Factored:
        return self.seen(self.shape, self.stride())

    def describe(self) -> str:
        return f"Factored({shown(self.value)})"

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        return getattr(self.value, name)(*args, **kwargs)

    def seen(self, shape: Any, strides: Any, *step: Any) -> Factored:
        """Return a view of this tensor."""
        chain = [*self.chain, step] if step else self.chain
        return factored(self.level, self.whole, chain, shape, strides, self)

    def terms(self) -> list | None:
        """Return the terms, if this tensor is a sum of terms or its transpose, or else None."""
        if any(func is not aten.t.default for func, _ in self.chain):
            return None
        if len(self.chain) % 2 == 0:
            return self.whole.terms
        turned = [t.transposed() for t in self.whole.terms if isinstance(t, outer_products.Product)]
        return turned if len(turned) == len(self.whole.terms) else None

    __torch_function__ = functions_pass  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _factored_in((*args, *(kwargs or {}).values()))[0].level.run(
            func, args, kwargs or {}
        )


def factored(
    level: FactoredLevel, whole: Whole, chain: list, shape: Any, strides: Any, like: Tensor
) -> Factored:
    new = make_wrapper(Factored, shape, strides, 0, None, like.dtype, like.layout, like.device)
    new.level, new.whole, new.chain = level, whole, chain
    return new


class Joined(outer_products.Term):
    """A concatenation of the gradients of parts of a tensor, always the only term of a sum."""

    __slots__ = ()

    def squared(self) -> Tensor:
        return functools.reduce(torch.add, [_squared(part, part) for part in self.args[0]])


def _factored_in(args: tuple | list) -> list[Factored]:
    found = []
    for a in args:
        if type(a) is Factored:
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += _factored_in(a)
    return found


class FactoredLevel(Level):
    """The level of lazy products. It is never on the stack, so it counts as inside all levels."""

    ends = False

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator: on the factors if it can keep them, or else on the products."""
        with functions_off():
            keeps = _KEEPS.get(func)
            kept = keeps(func, *args, **kwargs) if keeps else None
            if kept is not None:
                return kept
            was: dict[int, Tensor] = {}

            def made(a: Any) -> Any:
                if type(a) is not Factored:
                    return a
                value = a.value
                was[id(value)] = a
                return value

            values, named = in_arguments(made, args, kwargs)
            out = func(*values, **named)
            if isinstance(out, (list, tuple)):
                return type(out)(was.get(id(o), o) for o in out)
            return was.get(id(out), out)  # a target that was written in place is returned itself


class Factoring(DispatchMode):
    """A dispatch mode under which products of two factors, values of ``own``, are lazy."""

    def __init__(self, own: Level | None) -> None:
        super().__init__()
        self.own = own
        self.level = FactoredLevel(own)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.detach.default and not is_excluded(AUTOGRAD):
            with functions_off():  # a detach of autograd's own, which must keep tangents
                return second_name(args[0])
        if Factored in types:
            return self.level.run(func, args, kwargs or {})
        make = _MAKES.get(func)
        if make is None or kwargs or stack.parted:
            return func(*args, **(kwargs or {}))
        with functions_off():
            term = make(func, args) if self._takes(args) else None
            if term is None or not (whole := Whole([term])).pays:
                return func(*args)
            if isinstance(term, outer_products.Windows):
                return self._convolution(func, args, whole)
            return self._whole(whole, term.frame, args[0])

    def _takes(self, args: tuple) -> bool:
        """True if all arguments are of one real dtype, and values of this level."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        dtypes = {a.dtype for a in tensors if a.is_floating_point() or a.is_complex()}
        levels = {a.level for a in tensors if isinstance(a, Wrapper)}
        return len(dtypes) == 1 and not dtypes.pop().is_complex and levels == {self.own}

    def _whole(self, whole: Whole, shape: Any, like: Tensor) -> Factored:
        return factored(self.level, whole, [], shape, _contiguous(shape), like)

    def _convolution(self, func: Any, args: tuple, whole: Whole) -> tuple:
        """Compute the other two gradients of a convolution, and return its weight's lazily."""
        *most, (of_input, of_weight, of_bias) = args
        if not of_weight:
            return func(*args)
        others = [None, None, None]
        if of_input or of_bias:
            others = func(*most, [of_input, False, of_bias])
        return others[0], self._whole(whole, args[2].shape, args[0]), others[2]


def _contiguous(shape: Any) -> list[int]:
    return [max(prod(shape[i + 1 :]), 1) for i in range(len(shape))]


# Operators that make a product of two factors.
_MAKES = {
    aten.mm.default: outer_products.product,
    aten.bmm.default: outer_products.product,
    aten.mul.Tensor: outer_products.outer,
    aten.embedding_dense_backward.default: outer_products.rows,
    aten.convolution_backward.default: outer_products.windows,
}


# --- operators that keep the factors -----------------------------------------------------------


def _sum(func: Any, a: Any, b: Any, alpha: float = 1) -> Any:
    if type(a) is not Factored or type(b) is not Factored or alpha != 1 or a.shape != b.shape:
        return None
    if a.chain == b.chain:
        mine, others, chain = a.whole.terms, b.whole.terms, a.chain
    else:
        mine, others, chain = a.terms(), b.terms(), []
    if not mine or not others or mine[0].frame != others[0].frame:
        return None
    if Joined in (type(mine[0]), type(others[0])):
        return None
    whole = Whole([*mine, *others])
    return factored(a.level, whole, chain, a.shape, a.stride(), a) if whole.pays else None


def _joined(func: Any, parts: Any, dim: int = 0) -> Any:
    if not all(type(part) is Factored and part.whole.terms for part in parts):
        return None
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    size = sum(t.size for part in parts for t in part.whole.terms)
    whole = Whole([Joined(func, (parts, dim), tuple(shape), size)])
    return factored(parts[0].level, whole, [], shape, _contiguous(shape), parts[0])


def _permuted(func: Any, a: Factored, dims: Any) -> Factored:
    dims = tuple(d % a.dim() for d in dims)
    shape, strides = [a.shape[d] for d in dims], [a.stride(d) for d in dims]
    step = (aten.t.default, ()) if dims == (1, 0) else (aten.permute.default, (dims,))
    return a.seen(shape, strides, *step)


def _transposed(func: Any, a: Factored, first: int, second: int) -> Factored:
    order = [*range(a.dim())]
    order[first], order[second] = order[second], order[first]
    return _permuted(func, a, order)


def _viewed(func: Any, a: Factored, shape: Any) -> Factored | None:
    if a.stride() != tuple(_contiguous(a.shape)):
        return None
    known = -prod(shape) if -1 in shape else 1
    shape = [a.numel() // known if n == -1 else n for n in shape]
    return a.seen(shape, _contiguous(shape), func, (shape,))


def _squeezed(func: Any, a: Factored, dim: int) -> Factored | None:
    if a.shape[dim] != 1:
        return None
    rest = [d for d in range(a.dim()) if d != dim % a.dim()]
    return a.seen([a.shape[d] for d in rest], [a.stride(d) for d in rest], func, (dim,))


# All of them return a view of the same sum, or add sums.
_KEEPS = {
    aten.add.Tensor: _sum,
    aten.cat.default: _joined,
    aten.detach.default: lambda func, a: a.graph_free(),
    aten.alias.default: lambda func, a: a.graph_free(),
    aten.t.default: lambda func, a: _permuted(func, a, (1, 0)) if a.dim() == 2 else None,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.squeeze.dim: _squeezed,
}
