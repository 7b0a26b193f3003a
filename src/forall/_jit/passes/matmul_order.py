"""Passes that reorder products of matrices to the cheapest order, and fuse sums into them.

NOTE [what fastmath may do]
    ``jit(fastmath=True)`` treats sums and products as exact arithmetic, so results differ from
    eager's in rounding. They differ in more where an intermediate product overflows or underflows
    its dtype. Shapes, dtypes and layouts of results are those of eager.

    Without ``fastmath`` the operands of a product keep their factors, and only their layouts
    change. Such a change, or a sum fused into a product, is made only where trials give the same
    bits (`bitwise_check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import without_history
from forall._compat.storage import get_storage_id
from forall._jit.graph import (
    Layout,
    OpNode,
    Ref,
    Value,
    map_refs,
)
from forall._jit.passes.bitwise_check import can_try_bits, have_same_bits
from forall._jit.passes.contraction import (
    CONTRACTIONS,
    SLOPE_AT_ONE,
    SUMS,
    Contraction,
    DefUseMap,
    Factor,
    Halves,
)
from forall._jit.passes.cse import RootMerger
from forall._jit.tracing.uninitialized import LAYOUT_ONLY_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forall._jit.graph import Program

aten = torch.ops.aten
_MOST = 8  # factors of a product, of which all splits into two halves are tried
_GAIN = 0.85  # the share of the old cost that a new order may have
# Nanoseconds of one operator, an entry that it makes, one that it copies, a multiply-add, and a
# matrix of a batch (measured on one CPU; the best order is much the same on others).
_CALL, _ENTRY, _COPIED, _PAIR, _MATRIX = 1000, 0.25, 0.7, 0.03, 300


def reorder_products(program: Program, back: list[OpNode], *, fastmath: bool) -> None:
    """Multiply the factors of each product of matrices in the cheapest order."""
    second = set(map(id, back))
    makers, written = DefUseMap(program), program.find_written_roots()
    joining = RootMerger(program)
    instead: dict[int, list[OpNode]] = {}  # new operators, by the id of the one they replace
    for node in reversed(program.nodes):  # an earlier product may be a factor of this one
        if not _is_contraction(program, node) or (node.op in SUMS and not fastmath):
            continue
        product = Contraction(program, node, makers, through_shared=node.op in SUMS)
        if len(product.nodes) + len(product.kept) == 1 or len(product.factors) > _MOST:
            continue
        if len({id(n) in second for n in product.nodes}) > 1 or _is_written(
            program, product, written
        ):
            continue
        found = (
            _find_cheapest_order(program, product) or ProductBuilder.try_sums(program, product)
            if fastmath
            else _find_same_bits_order(program, product, makers)
        )
        if found is not None:
            instead[id(node)] = found.nodes
            back += found.nodes if id(node) in second else []
            first = len(program.values)
            program.values += found.values
            joining.add_values(first)
            old, new = (program.values[n].root for n in (node.outs, found.result))
            joining(old, new)
            if old in written:
                written.add(new)
            makers.replace_node(node, found.nodes, found.result)
    if instead:
        program.nodes[:] = [new for old in program.nodes for new in instead.get(id(old), (old,))]
        program.outputs[:] = makers.outputs


def _is_contraction(program: Program, node: OpNode) -> bool:
    if node.kwargs or not (node.op in CONTRACTIONS or node.op in SUMS):
        return False
    given = [program.values[n].layout for n in node.reads()]
    return all(x.dtype.is_floating_point and all(x.shape) and not x.neg for x in given)


def _is_written(program: Program, product: Contraction, written: set[int]) -> bool:
    """True if an operator writes into a factor, or into a value that would not be made any more."""
    values = program.values
    here = {values[f.value.n].root for f in product.factors if _is_tensor(f)}
    inside = (*product.nodes[1:], *product.kept)
    here |= {values[n].root for node in inside for n in (*node.reads(), *node.makes())}
    return not here.isdisjoint(written)


def _find_cheapest_order(program: Program, product: Contraction) -> ProductBuilder | None:
    """The cheapest order, None if no order is much cheaper."""
    tried = (
        ProductBuilder.try_product(program, product, halves) for halves in _split_factors(product)
    )
    return min(filter(None, tried), key=ProductBuilder.total_cost, default=None)


def _find_same_bits_order(
    program: Program, product: Contraction, makers: DefUseMap
) -> ProductBuilder | None:
    """The same operands with other layouts, if that is cheaper and gives the same bits."""
    old = makers.list_replaced_nodes(product)
    if not can_try_bits(program.values, old):
        return None
    for slopes in (False, True):
        found = ProductBuilder.try_product(program, product, product.halves, "cpu", slopes=slopes)
        if found is not None and have_same_bits(found.all, old, found.nodes):
            return found
    return None


def _split_factors(product: Contraction) -> Iterator[Halves]:
    """Yield all splits of a product's factors into a left and a right half.

    Factors with the same indices stay together; those without an index join the smaller half.
    """
    alike: dict[frozenset[int], list[Factor]] = {}
    for f in product.factors:
        alike.setdefault(frozenset(_collect_atoms([f])), []).append(f)
    loose = alike.pop(frozenset(), [])
    for mask in range(1, 2 ** len(alike) - 1):
        halves: tuple[list[Factor], list[Factor]] = [], []
        for i, several in enumerate(alike.values()):
            halves[mask >> i & 1].extend(several)
        min(halves, key=lambda half: _count_entries(product, half)).extend(loose)
        yield halves


def _split_by_summed(product: Contraction) -> list[list[Factor]]:
    """Return groups of factors of which no two share an index that is summed over.

    Factors without such an index join the smallest group that has all of their indices.
    """
    groups: list[tuple[set[int], list[Factor]]] = []
    loose: list[Factor] = []
    for f in product.factors:
        mine = _collect_atoms([f]) & {*product.summed}
        if not mine:
            loose.append(f)
            continue
        joined, factors = mine, [f]
        rest = []
        for atoms, others in groups:
            if atoms & joined:
                joined, factors = joined | atoms, others + factors
            else:
                rest.append((atoms, others))
        groups = [*rest, (joined, factors)]
    found = [factors for _, factors in groups]
    for f in loose:
        fitting = [g for g in found if _collect_atoms([f]) <= _collect_atoms(g)]
        if not fitting:
            return []
        min(fitting, key=lambda group: _count_entries(product, group)).append(f)
    return found if all(map(_has_first_factor, found)) else []


def _collect_atoms(factors: Iterable[Factor]) -> set[int]:
    return {a for f in factors for dim in f.dims for a in dim}


def _count_entries(product: Contraction, factors: Iterable[Factor]) -> int:
    return product.atoms.count_entries(_collect_atoms(factors))


def _has_first_factor(factors: Sequence[Factor]) -> bool:
    return any(map(_can_be_first, factors))


def _can_be_first(f: Factor) -> bool:
    """True if a product can begin with this factor."""
    return _is_tensor(f) and f.op is aten.mul.Tensor


def _is_tensor(f: Factor) -> bool:
    return type(f.value) is Ref


def _estimate_cost(values: Sequence[Value], node: OpNode) -> float:
    made = prod(values[node.outs].layout.shape)
    if node.op in CONTRACTIONS:
        x = values[next(node.reads())].layout.shape
        return _CALL + made * x[-1] * _PAIR + (x[0] * _MATRIX if len(x) == 3 else 0)
    if values[node.outs].root != node.outs or node.op in LAYOUT_ONLY_OPS:
        return 0  # a view, or a constant
    if node.op in SUMS:
        made = prod(values[next(node.reads())].layout.shape)
    is_copy = node.op in (aten.clone.default, aten.t_copy.default, aten.reshape.default)
    return _CALL + made * (_COPIED if is_copy else _ENTRY)


class _ExtendedValues(Sequence):
    """A list of values that extends another list, without a copy or a change of that one."""

    def __init__(self, first: list[Value]) -> None:
        self.first, self.first_length = first, len(first)
        self.rest: list[Value] = []

    def __len__(self) -> int:
        return self.first_length + len(self.rest)

    def __getitem__(self, n: int) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.first[n] if n < self.first_length else self.rest[n - self.first_length]

    def append(self, value: Value) -> None:
        self.rest.append(value)


class ProductBuilder:
    """New operators that a program may take in, and the values that they make.

    The operators are run on a ``device`` to learn the layouts of their results. On "meta" nothing
    is computed, but the first call of a process takes a second for imports. With ``slopes``, an
    operator that multiplies by a slope becomes the slope at 1 and a product with it.
    """

    def __init__(
        self, program: Program, product: Contraction, device: str, *, slopes: bool
    ) -> None:
        self.product = product
        self.device = device
        self.slopes = slopes
        self.all = _ExtendedValues(program.values)
        self.nodes: list[OpNode] = []
        self.result = -1

    @classmethod
    def try_product(
        cls,
        program: Program,
        product: Contraction,
        halves: Halves,
        device: str = "meta",
        *,
        slopes: bool = False,
    ) -> ProductBuilder | None:
        """Return the product of two halves, None unless it costs less and has the same layout."""
        if not {*product.out} <= _collect_atoms(product.factors):
            return None  # the result is constant along one of its dims
        if not all(
            {*product.summed} <= _collect_atoms(half) and _has_first_factor(half) for half in halves
        ):
            return None
        made = cls(program, product, device, slopes=slopes)
        return made if made.is_cheaper_by(program, made.contract, *halves) else None

    @classmethod
    def try_sums(cls, program: Program, product: Contraction) -> ProductBuilder | None:
        """Return a sum as the product of sums over some factors each; None if that costs more.

        Factors that share no index which is summed over are summed apart.
        """
        apart = _split_by_summed(product)
        if not product.is_sum or len(apart) < 2:
            return None
        if not {*product.out, *product.summed} <= _collect_atoms(product.factors):
            return None
        made = cls(program, product, "meta", slopes=False)
        return made if made.is_cheaper_by(program, made.multiply_sums, apart) else None

    def is_cheaper_by(self, program: Program, append: Callable[..., bool], *factors: Any) -> bool:
        """Append operators; return True if they give the same layout and cost less than before."""
        with without_history(), torch.no_grad():
            fits = append(*factors, program.values[self.product.nodes[0].outs].layout)
        before = sum(_estimate_cost(program.values, node) for node in self.product.nodes)
        return fits and self.total_cost() < _GAIN * before

    def total_cost(self) -> float:
        return sum(_estimate_cost(self.all, node) for node in self.nodes)

    @property
    def values(self) -> list[Value]:
        return self.all.rest

    def add_node(self, op: Any, *args: Any) -> int:
        """Append an operator and the value of its result; return the value's number."""
        given = map_refs(args, self._stand_in)
        made = op(*given)
        n, x = len(self.all), args[0].n
        shares = get_storage_id(made) == get_storage_id(given[0])
        layout = Layout.from_tensor(made)._replace(device=self.all[x].layout.device)
        if not shares:
            layout = layout._replace(offset=0)
        self.all.append(Value(layout, self.all[x].root if shares else n))
        self.nodes.append(OpNode(op, args, {}, n))
        return n

    def _stand_in(self, r: Ref) -> torch.Tensor:
        shape, strides, _, dtype, *_ = self.all[r.n].layout
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def contract(self, left: Sequence[Factor], right: Sequence[Factor], wanted: Layout) -> bool:
        """Append the product of two halves; return False if its layout is not the wanted one."""
        k, out = self.product.summed, self.product.out
        mine, its = _collect_atoms(left) - {*k}, _collect_atoms(right) - {*k}
        both = [a for a in out if a in mine and a in its]
        rows = [a for a in out if a in mine and a not in its]
        columns = [a for a in out if a in its and a not in mine]
        if self.product.is_sum and not (rows and columns):
            return False  # torch's sum rounds less than an inner product
        x = self._build_half(left, both, rows, k)
        y = self._build_half(right, both, columns, k)
        y = self.add_node(aten.transpose.int, Ref(y), -2, -1)
        n = self.add_node(aten.bmm.default if both else aten.mm.default, Ref(x), Ref(y))
        order = both + rows + columns
        n = self._reshape_to(n, [self.product.atoms.sizes[a] for a in order])
        n = self._permute_dims(n, [order.index(a) for a in out])
        return self._finish(n, wanted)

    def multiply_sums(self, groups: Sequence[Sequence[Factor]], wanted: Layout) -> bool:
        """Append a product of sums, one of each group; return False if its layout is another."""
        k, out, sizes = self.product.summed, self.product.out, self.product.atoms.sizes
        sums = []
        for factors in groups:
            mine = _collect_atoms(factors)
            here, over = [a for a in out if a in mine], [a for a in k if a in mine]
            n = self._multiply_factors(factors, here + over)
            if over:
                dims = [*range(len(here), len(here) + len(over))]
                n = self.add_node(aten.sum.dim_IntList, Ref(n), dims)
            sums.append(self._reshape_to(n, [sizes[a] if a in mine else 1 for a in out]))
        n = sums[0]
        for other in sums[1:]:
            n = self.add_node(aten.mul.Tensor, Ref(n), Ref(other))
        return self._finish(n, wanted)

    def _finish(self, n: int, wanted: Layout) -> bool:
        """Give the result its shape; return False if its layout is not the wanted one."""
        self.result = self._reshape_to(n, wanted.shape)
        found = self.all[self.result]
        return found.layout._replace(offset=0) == wanted._replace(offset=0) and not wanted.offset

    def _build_half(self, factors: Sequence[Factor], both: list, free: list, k: list) -> int:
        """Append the product of a half's factors, of shape (rows, k) or (batch, rows, k)."""
        atoms = self.product.atoms
        largest = max(filter(_is_tensor, factors), key=self._count_entries)
        inner = self._sums_innermost(largest, k)
        n = self._multiply_factors(factors, both + (free + k if inner else k + free))
        rows, deep = map(atoms.count_entries, (free, k))
        batch = [atoms.count_entries(both)] if both else []
        if inner:
            return self._reshape_to(n, [*batch, rows, deep])
        n = self._reshape_to(n, [*batch, deep, rows])
        return self.add_node(aten.transpose.int, Ref(n), -2, -1)

    def _count_entries(self, f: Factor) -> int:
        return _count_entries(self.product, [f])

    def _multiply_factors(self, factors: Sequence[Factor], order: Sequence[int]) -> int:
        """Append the product of factors, with a dim for each index in ``order``."""
        ordered = sorted(factors, key=lambda f: (not _can_be_first(f), self._count_entries(f)))
        ordered = ordered[:1] + sorted(ordered[1:], key=self._count_entries)
        n = self._arrange_dims(ordered[0], order)
        for f in ordered[1:]:
            y = Ref(self._arrange_dims(f, order)) if f.dims else f.value
            n = self._multiply_by(n, f, y)
        return n

    def _multiply_by(self, n: int, f: Factor, y: Any) -> int:
        if not (self.slopes and f.op in SLOPE_AT_ONE):
            return self.add_node(f.op, Ref(n), y, *f.rest)
        one = self.add_node(aten.ones_like.default, y)
        slope = self.add_node(f.op, Ref(one), y, *f.rest)
        return self.add_node(aten.mul.Tensor, Ref(n), Ref(slope))

    def _sums_innermost(self, f: Factor, k: list[int]) -> bool:
        """True if the innermost dim of a factor in memory is one that is summed over."""
        strides = self.all[f.value.n].layout.strides
        moving = [(s, d[-1]) for s, d in zip(strides, f.dims, strict=True) if d and s]
        return not moving or min(moving)[1] in k

    def _arrange_dims(self, f: Factor, order: Sequence[int]) -> int:
        """Append a factor with a dim for each index in ``order``, of size 1 where it lacks one."""
        sizes, n = self.product.atoms.sizes, f.value.n
        atoms = [a for dim in f.dims for a in dim]
        n = self._reshape_to(n, [sizes[a] for a in atoms])
        mine = [a for a in order if a in atoms]
        n = self._permute_dims(n, [atoms.index(a) for a in mine])
        return self._reshape_to(n, [sizes[a] if a in atoms else 1 for a in order])

    def _reshape_to(self, n: int, shape: Sequence[int]) -> int:
        if tuple(shape) == self.all[n].layout.shape:
            return n
        return self.add_node(aten.reshape.default, Ref(n), [*shape])

    def _permute_dims(self, n: int, order: Sequence[int]) -> int:
        if [*order] == [*range(len(order))]:
            return n
        return self.add_node(aten.permute.default, Ref(n), [*order])


# Products of matrices, and the operators that add to such a product.
_FUSED_ADDS = {
    aten.mm.default: aten.addmm.default,
    aten.mv.default: aten.addmv.default,
    aten.bmm.default: aten.baddbmm.default,
}


def fuse_bias(program: Program, back: list[OpNode], *, fastmath: bool) -> None:
    """Fuse each sum with a product of matrices into one operator, such as `addmm`."""
    second, written = set(map(id, back)), program.find_written_roots()
    makers = DefUseMap(program)
    roots, layouts = [v.root for v in program.values], [v.layout for v in program.values]
    for node in program.nodes:
        if node.op is not aten.add.Tensor or node.kwargs:
            continue
        for x, bias in (node.args, node.args[::-1]):
            product = makers.of.get(x.n) if type(x) is Ref and type(bias) is Ref else None
            if product is None or product.op not in _FUSED_ADDS or product.kwargs:
                continue
            if x.n == bias.n:
                continue
            apart = makers.readers[x.n] > 1 or (id(product) in second) != (id(node) in second)
            if apart or layouts[x.n] != layouts[node.outs]:
                continue
            if layouts[bias.n].dtype != layouts[x.n].dtype:
                continue
            if not written.isdisjoint(roots[n] for n in product.reads()):
                continue
            both = OpNode(_FUSED_ADDS[product.op], (bias, *product.args), {}, node.outs)
            if fastmath or have_same_bits(program.values, [product, node], [both]):
                node.op, node.args = both.op, both.args
                break
