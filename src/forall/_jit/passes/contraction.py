"""Contractions: the factors of a product of matrices, and the indices that their dims share.

NOTE [atoms]
    Atoms are the indices of a contraction. A dim of a value is a product of atoms, outermost first.
    A dim of size 1, or of stride 0, has none. Dims that are multiplied with each other, or summed
    together, share atoms. Read backwards from a product, views of a program regroup atoms, and
    split them where a dim is a part of another.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.op_schema import LINEAR_IN_FIRST
from forall._jit.graph import Layout, OpNode, Ref
from forall._jit.passes.view_chains import is_pure_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forall._jit.graph import Program

aten = torch.ops.aten
_STEPS = 64  # values that are looked at, back from a product
Dims = list[list[int]]  # the atoms of each dim of a value
Halves = tuple[list["Factor"], list["Factor"]]

# The dims of what is multiplied, and of the result: b(atch), r(ow), k (summed over), c(olumn).
CONTRACTIONS = {
    aten.mm.default: ("rk", "kc", "rc"),
    aten.bmm.default: ("brk", "bkc", "brc"),
    aten.mv.default: ("rk", "k", "r"),
}
SUMS = {aten.sum.default, aten.sum.dim_IntList}
# Operators that compute the product with their slope at 1, so that product has the same bits.
SLOPE_AT_ONE = {aten.tanh_backward.default}
_POWER = aten.pow.Tensor_Scalar
_COPIES = {
    aten.clone.default: 1,
    aten.contiguous.default: 1,
    aten.t_copy.default: -1,  # with its dims in reverse order
}


class Factor(NamedTuple):
    """A tensor (`Ref`) with its dims, or a number, and the operator that multiplies by it."""

    value: Any
    dims: Dims
    op: Any = aten.mul.Tensor
    rest: tuple = ()  # the operator's other arguments


class Atoms:
    """The atoms of a contraction by number: their sizes, and the parts of those that were split."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: dict[int, list[int]] = {}

    def add_atom(self, size: int) -> list[int]:
        """Add an atom of this size, and return it in a list, which is empty for size 1."""
        self.sizes.append(size)
        return [len(self.sizes) - 1] if size > 1 else []

    def expand(self, atoms: Sequence[int]) -> list[int]:
        """Return the atoms of a dim, with atoms that were split replaced by their parts."""
        return [b for a in atoms for b in (self.expand(self.parts[a]) if a in self.parts else [a])]

    def count_entries(self, atoms: Iterable[int]) -> int:
        """Return the number of entries of a tensor with these atoms."""
        return prod(self.sizes[a] for a in atoms)

    def split(self, atoms: list[int], sizes: list[int]) -> list[list[int]] | None:
        """Split atoms, outermost first, into parts of these sizes, innermost part first.

        None where a size is not a product of atoms and of parts of one.
        """
        atoms, parts = atoms[:], []
        for size in sizes:
            part: list[int] = []
            while size > 1:
                a = atoms.pop()
                have = self.sizes[a]
                if size % have == 0:
                    part.insert(0, a)
                    size //= have
                elif have % size == 0:
                    outer, inner = self.add_atom(have // size), self.add_atom(size)
                    self.parts[a] = outer + inner
                    part[:0] = inner
                    atoms += outer
                    size = 1
                else:
                    return None
            parts.append(part)
        return parts

    def join_parts(self, given: Layout, found: dict) -> Dims | None:
        """Return the dims of a base, or None if its parts do not make up each of them.

        ``found`` has the parts of each dim, with the number of entries that lie inside each.
        """
        dims: Dims = []
        for i, size in enumerate(given.shape):
            parts, reach = sorted(found.get(i, [])), 1
            for f, part in parts:
                if f != reach:
                    return None
                reach *= self.count_entries(part)
            if reach != size:
                return None
            dims.append([a for _, part in reversed(parts) for a in part])
        return dims


class Contraction:
    """One product of matrices or sum as a contraction of factors, and the operators it replaces.

    ``nodes`` are these operators. With ``through_shared`` the factors of an outer product are taken
    in its place although others read it too: then it is among the ``kept``. A square is a product.
    """

    def __init__(
        self, program: Program, node: OpNode, makers: DefUseMap, *, through_shared: bool = False
    ) -> None:
        self.program, self.makers, self.through_shared = program, makers, through_shared
        self.kept: list[OpNode] = []
        self.atoms = Atoms()
        self.factors: list[Factor] = []
        self.steps = 0
        self.nodes = [node]
        shapes = [program.values[n].layout.shape for n in node.reads()]
        *given, out, summed = _name_dims(node, len(shapes[0]))
        dims: dict[Any, list[int]] = {}
        for names, shape in zip(given, shapes, strict=True):
            dims |= {d: self.atoms.add_atom(size) for d, size in zip(names, shape, strict=True)}
        ends = []
        for names, n in zip(given, node.reads(), strict=True):
            self._add_factors(n, [dims[d] for d in names], alone=True)
            ends.append(len(self.factors))
        self.out, self.summed = (
            [a for d in ds for a in self.atoms.expand(dims[d])] for ds in (out, summed)
        )
        self.factors = [f._replace(dims=[*map(self.atoms.expand, f.dims)]) for f in self.factors]
        self.halves: Halves = self.factors[: ends[0]], self.factors[ends[0] :]  # of the operands

    @property
    def is_sum(self) -> bool:
        return self.nodes[0].op in SUMS

    def _add_factors(self, n: int, dims: Dims, *, alone: bool) -> None:
        """Add the factors of a value; with ``alone``, no operator outside the product reads it."""
        self.steps += 1
        # With more steps there are more factors than any order that is tried has.
        node = None if self.steps > _STEPS else self.makers.of.get(n)
        values = self.program.values
        alone = alone and self.makers.readers[n] == 1
        if node is not None and self.makers.is_view(node):
            m = node.args[0].n
            before = self._find_base_dims(values[n].layout, values[m].layout, dims)
            if before is not None:
                return self._add_factors(m, before, alone=alone)
        elif node is not None and node.op in _COPIES:
            if alone:
                self.nodes.append(node)
            return self._add_factors(node.args[0].n, dims[:: _COPIES[node.op]], alone=alone)
        elif node is not None and alone and self._add_multiplication(node, dims):
            return None
        elif node is not None and self.through_shared and self._is_outer_product(node):
            self.kept.append(node)
            for x in node.args:
                self._add_factors(x.n, self._find_operand_dims(x, dims), alone=False)
            return None
        self.factors.append(Factor(Ref(n), dims))
        return None

    def _is_outer_product(self, node: OpNode) -> bool:
        """Return True for a pointwise product that has at least twice the entries of its factors.

        Then it takes less time to read the factors.
        """
        if node.op is not aten.mul.Tensor or node.kwargs or not self._is_uniform(node):
            return False
        values = self.program.values
        given = [prod(values[n].layout.shape) for n in node.reads()]
        both = all(type(x) is Ref for x in node.args)
        return both and prod(values[node.outs].layout.shape) >= 2 * max(given)

    def _add_multiplication(self, node: OpNode, dims: Dims) -> bool:
        """Add the factors of a pointwise multiplication; return False for another operator."""
        if self.through_shared and node.op is _POWER and not node.kwargs and node.args[1] == 2:
            x = node.args[0]
            if type(x) is not Ref or not self._is_uniform(node):
                return False
            self.nodes.append(node)
            for _ in range(2):
                self._add_factors(x.n, self._find_operand_dims(x, dims), alone=False)
            return True
        if node.kwargs or not (node.op is aten.mul.Tensor or node.op in LINEAR_IN_FIRST):
            return node.op is aten.neg.default and self._add_negation(node, dims)
        x, y, *rest = node.args
        if type(x) is not Ref or not self._is_uniform(node):
            return False
        self.nodes.append(node)
        self._add_factors(x.n, self._find_operand_dims(x, dims), alone=True)
        if type(y) is not Ref:
            self.factors.append(Factor(y, [], node.op, tuple(rest)))
        elif node.op is aten.mul.Tensor:
            self._add_factors(y.n, self._find_operand_dims(y, dims), alone=True)
        else:
            self.factors.append(Factor(y, self._find_operand_dims(y, dims), node.op, tuple(rest)))
        return True

    def _add_negation(self, node: OpNode, dims: Dims) -> bool:
        self.nodes.append(node)
        self.factors.append(Factor(-1, []))
        self._add_factors(node.args[0].n, dims, alone=True)
        return True

    def _is_uniform(self, node: OpNode) -> bool:
        """True if operands and result agree in dtype, device, and lazy conj and neg bits."""
        layouts = [self.program.values[n].layout for n in (*node.reads(), node.outs)]
        return len({(x.dtype, x.device, x.conj, x.neg) for x in layouts}) == 1

    def _find_operand_dims(self, operand: Ref, dims: Dims) -> Dims:
        """The dims of an operand that is broadcast to ``dims``."""
        shape = self.program.values[operand.n].layout.shape
        last = dims[len(dims) - len(shape) :]
        return [d if n > 1 else [] for d, n in zip(last, shape, strict=True)]

    def _find_base_dims(self, view: Layout, given: Layout, dims: Dims) -> Dims | None:
        """The dims of a view's base by its strides, or None where the view leaves entries out.

        A view's dim is made of parts of the base's dims. A part of size q of a dim with stride s
        has the stride f * s, where f is the number of entries that lie inside the part.
        """
        found: dict[int, list[tuple[int, list[int]]]] = {}
        for size, stride, atoms in zip(view.shape, view.strides, dims, strict=True):
            if size == 1 or stride == 0:
                continue  # the same along it
            spots, here = [], stride
            rest = size
            while rest > 1:
                i = _find_stride_dim(given, here)
                if i is None:
                    return None
                f = here // given.strides[i]
                q = min(rest, given.shape[i] // f)
                if rest % q or given.shape[i] % (f * q):
                    return None
                spots.append((i, f, q))
                rest, here = rest // q, here * q
            parts = self.atoms.split(self.atoms.expand(atoms), [q for *_, q in spots])
            if parts is None:
                return None
            for (i, f, _), part in zip(spots, parts, strict=True):
                found.setdefault(i, []).append((f, part))
        return self.atoms.join_parts(given, found)


def _find_stride_dim(given: Layout, stride: int) -> int | None:
    """The dim along which a step of ``stride`` entries goes, None if there is none."""
    for i, (n, s) in enumerate(zip(given.shape, given.strides, strict=True)):
        if n > 1 and s and stride % s == 0 and stride // s < n and n % (stride // s) == 0:
            return i
    return None


def _name_dims(node: OpNode, rank: int) -> tuple[Sequence, ...]:
    """Names for the dims of the operands, of the result, and for the dims that are summed over."""
    if node.op not in SUMS:
        return (*CONTRACTIONS[node.op], "k")
    over = (node.args[1] if len(node.args) > 1 else None) or range(rank)
    summed = {d % rank for d in over}
    return range(rank), [d for d in range(rank) if d not in summed], sorted(summed)


class DefUseMap:
    """The operator that makes each value of a program, and the number of its readers."""

    def __init__(self, program: Program) -> None:
        given = {*program.inputs, *program.captured, *program.constants}
        self.of: dict[int, OpNode] = {}
        for node in program.nodes:  # the first: others return an alias of what there was
            if isinstance(node.outs, int) and node.outs not in given:
                self.of.setdefault(node.outs, node)
        self.readers: Counter[int] = Counter()
        self._values = program.values
        self._reading: dict[int, dict[int, OpNode]] = {}
        self.outputs = [*program.outputs]
        self._left: dict[int, list[int]] = {}  # the places of each output
        for node in program.nodes:
            self._add_reads(node)
        for place, n in enumerate(program.outputs):
            self.readers[n] += 2
            self._left.setdefault(n, []).append(place)

    def _add_reads(self, node: OpNode) -> None:
        for n in {*node.reads()}:
            self.readers[n] += 1
            self._reading.setdefault(n, {})[id(node)] = node

    def replace_node(self, node: OpNode, others: Sequence[OpNode], result: int) -> None:
        """Replace an operator by others, and its result by their ``result`` in all readers."""
        old = node.outs
        for n in {*node.reads()}:
            self.readers[n] -= 1
            del self._reading[n][id(node)]
        for other in others:
            self._add_reads(other)
            self.of[other.outs] = other
        for other in self._reading.pop(old, {}).values():
            other.replace_inputs({old: result})
            self._reading.setdefault(result, {})[id(other)] = other
        for place in self._left.pop(old, ()):
            self.outputs[place] = result
            self._left.setdefault(result, []).append(place)
        self.readers[result] += self.readers.pop(old, 0)
        self.of.pop(old, None)

    def list_replaced_nodes(self, product: Contraction) -> list[OpNode]:
        """The operators that a product replaces, views among them, in program order."""
        factors = {f.value.n for f in product.factors if type(f.value) is Ref}
        found: list[OpNode] = []
        left = [product.nodes[0]]
        while left:
            node = left.pop()
            found = [other for other in found if other is not node]  # before all its readers
            found.append(node)
            left += [self.of[n] for n in node.reads() if n not in factors and n in self.of]
        return found[::-1]

    def is_view(self, node: OpNode) -> bool:
        if not is_pure_view(node.op):
            return False
        here, there = (self._values[n].root for n in (node.args[0].n, node.outs))
        return here == there
