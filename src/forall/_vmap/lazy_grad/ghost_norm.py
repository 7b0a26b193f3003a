"""Ghost norms: a backward pass that keeps weight gradients as unmultiplied factors.

It is autograd's ordinary backward pass, for callers that need the gradients' norms alone. Under a
dispatch mode, each operator that multiplies two factors to a larger product returns a lazy
gradient, which is computed when any operator needs it. Operators that are unknown here cost what
they always do, and the numbers do not change.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forall._compat.dispatch_state import (
    AUTOGRAD,
    functions_off,
    is_excluded,
    no_dispatch,
    without_history,
)
from forall._compat.op_schema import get_facts
from forall._compat.private_api import DispatchMode
from forall._compat.wrapper_tensor import Wrapper
from forall._core.half_precision import to_float32
from forall._core.levels import alias_for_autograd, complete_gradient, stack
from forall._vmap.lazy_grad import outer_products
from forall._vmap.lazy_grad.lazy_tensor import (
    IN_ZEROS,
    REARRANGEMENTS,
    Deferred,
    LazyGrad,
    flatten_args,
    make_lazy_grad,
    make_meta_result,
)
from forall._vmap.vmap_level import VmapLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._core.levels import Level

aten = torch.ops.aten
_KEEP_NORMS = REARRANGEMENTS.union(IN_ZEROS)
_JOINS = frozenset({aten.cat.default, aten.stack.default})


def compute_squared_grad_norm(g: Tensor | None, x: Tensor) -> Tensor:
    """Return the squared norm of the gradient of ``x``, in its dtype or a wider one."""
    if g is None:
        return torch.zeros((), dtype=x.dtype.to_real(), device=x.device)
    product = _find_product(g)
    if product is not None:
        first = product.terms[0]
        if isinstance(first, ConcatTerm):
            return first.compute_squared_norm()
        return outer_products.compute_squared_norm(product.terms)
    g = complete_gradient(g)
    assert g is not None  # noqa: S101 - it was not
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return to_float32(g).square().sum()


class DeferredProduct(Deferred):
    """A sum of products of two factors, seen through ``chain``, a sequence of operators.

    These put each entry in another place: views, and operators that put a tensor into zeros. What
    is made of another lazy gradient has ``view``: that gradient, the operator and its arguments.
    """

    __slots__ = ("chain", "mode", "terms", "view")

    def __init__(
        self, mode: GhostNormMode, terms: Sequence, chain: tuple = (), view: tuple | None = None
    ) -> None:
        # The terms have versions of their own, and a view is to see what is written into its base.
        is_copy = view is not None and not get_facts(view[1]).view
        super().__init__(view[:1] if view is not None and is_copy else ())
        self.mode, self.terms, self.chain, self.view = mode, terms, chain, view

    @property
    def is_smaller(self) -> bool:
        """True if the factors hold fewer numbers than their product."""
        return sum(t.size for t in self.terms) < prod(self.terms[0].frame)

    def make(self) -> Any:
        was, self.mode.computes = self.mode.computes, True
        try:
            with without_history():
                return self._multiply()
        finally:
            self.mode.computes = was

    def _multiply(self) -> Any:
        if self.view is not None:
            base, func, rest = self.view
            if type(base) is LazyGrad:
                base.materialize()
            return func(base, *rest)
        found = functools.reduce(torch.add, (term.compute() for term in self.terms))
        for func, rest in self.chain:
            found = func(found, *rest)
        return found

    def find_sum(self) -> Sequence:
        """Return the terms if they make a sum or the transpose of one; none for another view."""
        if any(func is not aten.t.default for func, _ in self.chain):
            return ()
        if len(self.chain) % 2 == 0:
            return self.terms
        turned = [t.transpose() for t in self.terms if isinstance(t, outer_products.MatmulTerm)]
        return turned if len(turned) == len(self.terms) else ()

    def propagate(self, level: VmapLevel, func: Any, args: tuple) -> LazyGrad | None:
        if func is aten.add.Tensor:
            return _add(level, *args)
        if func in _JOINS:
            return _concat(level, func, *args)
        if func not in _KEEP_NORMS:
            return None
        try:
            like = make_meta_result(func, args)
        except RuntimeError:  # what is shown has no such view
            return None
        a, *rest = args
        chain = (*self.chain, *_normalize_step(func, a.dim(), rest))
        return make_lazy_grad(
            level, like, (a,), DeferredProduct(self.mode, self.terms, chain, (a, func, rest))
        )


def _find_product(a: Any) -> DeferredProduct | None:
    """Return the factors of a lazy gradient; None if it, or what it is a view of, is computed."""
    if type(a) is not LazyGrad or type(a.deferred) is not DeferredProduct:
        return None
    view = a.deferred.view
    return a.deferred if view is None or _find_product(view[0]) is not None else None


def _add(level: VmapLevel, a: Any, b: Any) -> LazyGrad | None:
    x, y = _find_product(a), _find_product(b)
    if x is None or y is None or a.shape != b.shape:
        return None
    alike = x.chain == y.chain
    mine, others = (x.terms, y.terms) if alike else (x.find_sum(), y.find_sum())
    if not mine or not others or mine[0].frame != others[0].frame:
        return None
    if ConcatTerm in (type(mine[0]), type(others[0])):
        return None
    both = DeferredProduct(x.mode, [*mine, *others], x.chain if alike else ())
    return make_lazy_grad(level, a, (a, b), both) if both.is_smaller else None


def _concat(level: VmapLevel, func: Any, parts: Any, dim: int = 0) -> LazyGrad | None:
    found = [_find_product(part) for part in parts]
    terms = [t for f in found if f is not None for t in f.terms]
    if None in found or not terms:
        return None
    like = make_meta_result(func, (parts, dim))
    term = ConcatTerm(func, (parts, dim), tuple(like.shape), sum(t.size for t in terms))
    mode = parts[0].deferred.mode
    return make_lazy_grad(level, like, parts, DeferredProduct(mode, [term]))


def _normalize_step(func: Any, dim: int, rest: list) -> tuple:
    """Return the step of a chain for an operator; each transpose of a matrix has one form."""
    if func is aten.alias.default:
        return ()
    swaps = func is aten.transpose.int and {d % 2 for d in rest} == {0, 1}
    swaps = swaps or (func is aten.permute.default and [d % 2 for d in rest[0]] == [1, 0])
    return ((aten.t.default, []),) if dim == 2 and swaps else ((func, rest),)


class ConcatTerm(outer_products.Term):
    """A concatenation of the gradients of parts of a tensor, always the only term of a sum."""

    __slots__ = ()

    def compute_squared_norm(self) -> Tensor:
        self.check_versions()
        return functools.reduce(torch.add, [compute_squared_grad_norm(a, a) for a in self.args[0]])


class GhostNormMode(DispatchMode):
    """A dispatch mode under which products of two factors, values of ``level``, are lazy."""

    def __init__(self, level: Level | None) -> None:
        super().__init__()
        self.level = level
        self.computes = False  # True while a product is computed after all

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        make = _MAKES.get(func)
        if func is aten.detach.default and not is_excluded(AUTOGRAD):
            with functions_off():  # a detach of autograd's own, which must keep tangents
                return alias_for_autograd(args[0])
        if self.computes or (make is None and LazyGrad not in types):
            return func(*args, **kwargs)
        with functions_off():
            made = self._propagate(func, args, kwargs) if LazyGrad in types else None
            if made is None and make is not None and not kwargs and not stack.diverged:
                made = self._factor(make, func, args)
            return func(*args, **kwargs) if made is None else made

    def _propagate(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Apply an operator to factors, or compute the products among its arguments."""
        given = flatten_args((*args, *kwargs.values()))
        found = [a for a in given if type(a) is LazyGrad and type(a.deferred) is DeferredProduct]
        if found and func is aten.detach.default:
            return found[0].graph_free()
        kept = found[0].deferred.propagate(self.level, func, args) if found and not kwargs else None
        if kept is None:
            for a in found:
                if type(a) is LazyGrad:  # it may be among them twice
                    a.materialize()
        return kept

    def _factor(self, make: Callable, func: Any, args: tuple) -> Any:
        """Return a lazy product, or None for an operator to run as it is."""
        term = make(func, args) if self._can_factor(args) else None
        if term is None or not (product := DeferredProduct(self, [term])).is_smaller:
            return None
        if isinstance(term, outer_products.ConvolutionTerm):
            return self._factor_convolution(func, args, product)
        return self._make_product(product, term.frame, args)

    def _can_factor(self, args: tuple) -> bool:
        """True if all arguments are of one real dtype, and values of this level."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        dtypes = {a.dtype for a in tensors if a.is_floating_point() or a.is_complex()}
        levels = {a.level for a in tensors if isinstance(a, Wrapper)}
        real = len(dtypes) == 1 and not dtypes.pop().is_complex
        return real and levels == {self.level} and isinstance(self.level, VmapLevel)

    def _make_product(self, product: DeferredProduct, shape: Any, args: tuple) -> LazyGrad:
        with no_dispatch():  # the level's mode is on
            like = torch.empty(shape, dtype=args[0].dtype, device="meta")
        operands = [a for a in args if isinstance(a, Tensor)]
        return make_lazy_grad(self.level, like, operands, product)

    def _factor_convolution(self, func: Any, args: tuple, product: DeferredProduct) -> Any:
        """Compute the other two gradients of a convolution, and return its weight's lazily."""
        *most, (of_input, of_weight, of_bias) = args
        if not of_weight:
            return None
        others = [None, None, None]
        if of_input or of_bias:
            others = func(*most, [of_input, False, of_bias])
        return others[0], self._make_product(product, args[2].shape, args), others[2]


# Operators that make a product of two factors.
_MAKES = {
    aten.mm.default: outer_products.make_matmul_term,
    aten.bmm.default: outer_products.make_matmul_term,
    aten.mul.Tensor: outer_products.make_outer_term,
    aten.embedding_dense_backward.default: outer_products.make_embedding_term,
    aten.convolution_backward.default: outer_products.make_convolution_term,
}
