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
from forall._compat.op_schema import map_arguments
from forall._compat.private_api import DispatchMode, functions_pass
from forall._compat.wrapper_tensor import Wrapper, make_wrapper
from forall._core.host_reads import format_numbers
from forall._core.levels import Level, alias_for_autograd, complete_gradient, stack, top

aten = torch.ops.aten


def squared_norms(value: Tensor, inputs: list[Tensor], *, create_graph: bool) -> list[Tensor]:
    """Return the squared norm of the gradient of each input, in its dtype or a wider one."""
    ones = reverse_mode.make_ones(value)
    with GhostNormMode(top()):
        found = reverse_mode.pull_back_incomplete(
            (value,), (ones,), inputs, retain_graph=create_graph, create_graph=create_graph
        )
    with functions_off():
        return [_compute_squared_norm(g, x) for g, x in zip(found, inputs, strict=True)]


def _compute_squared_norm(g: Tensor | None, x: Tensor) -> Tensor:
    if g is None:
        return torch.zeros((), dtype=x.dtype.to_real(), device=x.device)
    if type(g) is LazyProduct and g.whole.terms:
        first = g.whole.terms[0]
        return (
            first.compute_squared_norm()
            if type(first) is ConcatTerm
            else outer_products.compute_squared_norm(g.whole.terms)
        )
    g = complete_gradient(g)
    assert g is not None  # noqa: S101 - it was not
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return outer_products.to_float32(g).square().sum()


class TermSum:
    """The base of a group of lazy views: a sum of terms, replaced by its value once computed."""

    __slots__ = ("made", "terms")

    def __init__(self, terms: list[outer_products.Term]) -> None:
        self.terms = terms
        self.made: Any = None

    @property
    def is_smaller(self) -> bool:
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


class LazyProduct(Wrapper):
    """A lazy product of two factors, or its view through ``chain``, a list of view operators."""

    level: LazyProductLevel
    whole: TermSum
    chain: list[tuple[Any, tuple]]

    @property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        found = self.whole.value()
        for func, args in self.chain:
            found = func(found, *args)
        return found

    def graph_free(self) -> LazyProduct:
        return self.make_view(self.shape, self.stride())

    def describe(self) -> str:
        return f"Factored({format_numbers(self.value)})"

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        return getattr(self.value, name)(*args, **kwargs)

    def make_view(self, shape: Any, strides: Any, *step: Any) -> LazyProduct:
        """Return a view of this tensor."""
        chain = [*self.chain, step] if step else self.chain
        return make_lazy_product(self.level, self.whole, chain, shape, strides, self)

    def terms(self) -> list | None:
        """Return the terms, if this tensor is a sum of terms or its transpose, or else None."""
        if any(func is not aten.t.default for func, _ in self.chain):
            return None
        if len(self.chain) % 2 == 0:
            return self.whole.terms
        turned = [
            t.transpose() for t in self.whole.terms if isinstance(t, outer_products.MatmulTerm)
        ]
        return turned if len(turned) == len(self.whole.terms) else None

    __torch_function__ = functions_pass  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _find_lazy_products((*args, *(kwargs or {}).values()))[0].level.run(
            func, args, kwargs or {}
        )


def make_lazy_product(
    level: LazyProductLevel, whole: TermSum, chain: list, shape: Any, strides: Any, like: Tensor
) -> LazyProduct:
    new = make_wrapper(LazyProduct, shape, strides, 0, None, like.dtype, like.layout, like.device)
    new.level, new.whole, new.chain = level, whole, chain
    return new


class ConcatTerm(outer_products.Term):
    """A concatenation of the gradients of parts of a tensor, always the only term of a sum."""

    __slots__ = ()

    def compute_squared_norm(self) -> Tensor:
        return functools.reduce(
            torch.add, [_compute_squared_norm(part, part) for part in self.args[0]]
        )


def _find_lazy_products(args: tuple | list) -> list[LazyProduct]:
    found = []
    for a in args:
        if type(a) is LazyProduct:
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += _find_lazy_products(a)
    return found


class LazyProductLevel(Level):
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

            def materialize_product(a: Any) -> Any:
                if type(a) is not LazyProduct:
                    return a
                value = a.value
                was[id(value)] = a
                return value

            values, named = map_arguments(materialize_product, args, kwargs)
            out = func(*values, **named)
            if isinstance(out, (list, tuple)):
                return type(out)(was.get(id(o), o) for o in out)
            return was.get(id(out), out)  # a target that was written in place is returned itself


class GhostNormMode(DispatchMode):
    """A dispatch mode under which products of two factors, values of ``own``, are lazy."""

    def __init__(self, own: Level | None) -> None:
        super().__init__()
        self.own = own
        self.level = LazyProductLevel(own)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.detach.default and not is_excluded(AUTOGRAD):
            with functions_off():  # a detach of autograd's own, which must keep tangents
                return alias_for_autograd(args[0])
        if LazyProduct in types:
            return self.level.run(func, args, kwargs or {})
        make = _MAKES.get(func)
        if make is None or kwargs or stack.parted:
            return func(*args, **(kwargs or {}))
        with functions_off():
            term = make(func, args) if self._can_factor(args) else None
            if term is None or not (whole := TermSum([term])).is_smaller:
                return func(*args)
            if isinstance(term, outer_products.ConvolutionTerm):
                return self._factor_convolution(func, args, whole)
            return self._make_lazy_product(whole, term.frame, args[0])

    def _can_factor(self, args: tuple) -> bool:
        """True if all arguments are of one real dtype, and values of this level."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        dtypes = {a.dtype for a in tensors if a.is_floating_point() or a.is_complex()}
        levels = {a.level for a in tensors if isinstance(a, Wrapper)}
        return len(dtypes) == 1 and not dtypes.pop().is_complex and levels == {self.own}

    def _make_lazy_product(self, whole: TermSum, shape: Any, like: Tensor) -> LazyProduct:
        return make_lazy_product(
            self.level, whole, [], shape, _make_contiguous_strides(shape), like
        )

    def _factor_convolution(self, func: Any, args: tuple, whole: TermSum) -> tuple:
        """Compute the other two gradients of a convolution, and return its weight's lazily."""
        *most, (of_input, of_weight, of_bias) = args
        if not of_weight:
            return func(*args)
        others = [None, None, None]
        if of_input or of_bias:
            others = func(*most, [of_input, False, of_bias])
        return others[0], self._make_lazy_product(whole, args[2].shape, args[0]), others[2]


def _make_contiguous_strides(shape: Any) -> list[int]:
    return [max(prod(shape[i + 1 :]), 1) for i in range(len(shape))]


# Operators that make a product of two factors.
_MAKES = {
    aten.mm.default: outer_products.make_matmul_term,
    aten.bmm.default: outer_products.make_matmul_term,
    aten.mul.Tensor: outer_products.make_outer_term,
    aten.embedding_dense_backward.default: outer_products.make_embedding_term,
    aten.convolution_backward.default: outer_products.make_convolution_term,
}


# --- operators that keep the factors -----------------------------------------------------------


def _add_terms(func: Any, a: Any, b: Any, alpha: float = 1) -> Any:
    if type(a) is not LazyProduct or type(b) is not LazyProduct or alpha != 1 or a.shape != b.shape:
        return None
    if a.chain == b.chain:
        mine, others, chain = a.whole.terms, b.whole.terms, a.chain
    else:
        mine, others, chain = a.terms(), b.terms(), []
    if not mine or not others or mine[0].frame != others[0].frame:
        return None
    if ConcatTerm in (type(mine[0]), type(others[0])):
        return None
    whole = TermSum([*mine, *others])
    return (
        make_lazy_product(a.level, whole, chain, a.shape, a.stride(), a)
        if whole.is_smaller
        else None
    )


def _concat_terms(func: Any, parts: Any, dim: int = 0) -> Any:
    if not all(type(part) is LazyProduct and part.whole.terms for part in parts):
        return None
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    size = sum(t.size for part in parts for t in part.whole.terms)
    whole = TermSum([ConcatTerm(func, (parts, dim), tuple(shape), size)])
    return make_lazy_product(
        parts[0].level, whole, [], shape, _make_contiguous_strides(shape), parts[0]
    )


def _permute(func: Any, a: LazyProduct, dims: Any) -> LazyProduct:
    dims = tuple(d % a.dim() for d in dims)
    shape, strides = [a.shape[d] for d in dims], [a.stride(d) for d in dims]
    step = (aten.t.default, ()) if dims == (1, 0) else (aten.permute.default, (dims,))
    return a.make_view(shape, strides, *step)


def _transpose(func: Any, a: LazyProduct, first: int, second: int) -> LazyProduct:
    order = [*range(a.dim())]
    order[first], order[second] = order[second], order[first]
    return _permute(func, a, order)


def _view(func: Any, a: LazyProduct, shape: Any) -> LazyProduct | None:
    if a.stride() != tuple(_make_contiguous_strides(a.shape)):
        return None
    known = -prod(shape) if -1 in shape else 1
    shape = [a.numel() // known if n == -1 else n for n in shape]
    return a.make_view(shape, _make_contiguous_strides(shape), func, (shape,))


def _squeeze(func: Any, a: LazyProduct, dim: int) -> LazyProduct | None:
    if a.shape[dim] != 1:
        return None
    rest = [d for d in range(a.dim()) if d != dim % a.dim()]
    return a.make_view([a.shape[d] for d in rest], [a.stride(d) for d in rest], func, (dim,))


# All of them return a view of the same sum, or add sums.
_KEEPS = {
    aten.add.Tensor: _add_terms,
    aten.cat.default: _concat_terms,
    aten.detach.default: lambda func, a: a.graph_free(),
    aten.alias.default: lambda func, a: a.graph_free(),
    aten.t.default: lambda func, a: _permute(func, a, (1, 0)) if a.dim() == 2 else None,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.squeeze.dim: _squeeze,
}
