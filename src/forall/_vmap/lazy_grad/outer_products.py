"""Gradients that are products of two factors, and the norm of a sum of them (ghost norms).

The gradient of a weight matrix is a sum of S outer products, one for each use of the weight. It is
``left @ right``, with S columns in left. If S is small, the factors hold fewer numbers than the
product. An inner product of two such matrices needs the factors alone,

    <A @ B, C @ D> = sum of (A.T @ C) * (B @ D.T).

Source: Goodfellow, "Efficient per-example gradient computations" (2015), for S = 1; Li, Tramèr,
Liang and Hashimoto, "Large language models can be strong differentially private learners" (2022),
for sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.half_precision import to_float32
from forall._vmap.lazy_grad.lazy_tensor import Deferred, flatten_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Term(Deferred):
    """A result of an operator of a backward pass, not computed, kept as the arguments.

    ``frame`` is the shape of the product (*N, V, D), ``size`` the number of entries of the factors.
    """

    __slots__ = ("args", "frame", "func", "size")

    def __init__(self, func: Any, args: tuple, frame: tuple[int, ...], size: int) -> None:
        super().__init__(a for a in flatten_args(args) if isinstance(a, torch.Tensor))
        self.func, self.args, self.frame, self.size = func, args, frame, size

    def make(self) -> Tensor:
        return self.func(*self.args)


class MatmulTerm(Term):
    """The product ``left @ right``: (*N, V, S), (*N, S, D) -> (*N, V, D), or its transpose."""

    __slots__ = ("turned",)

    def make(self) -> Tensor:
        return super().make().mT if self.turned else super().make()

    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = self.args
        right = right.unsqueeze(0) if right.dim() == 1 else right
        return (right.mT, left.mT) if self.turned else (left, right)

    def transpose(self) -> MatmulTerm:
        other = MatmulTerm(self.func, self.args, (*self.frame[:-2], *self.frame[:-3:-1]), self.size)
        other.turned, other.counts = not self.turned, self.counts
        return other


def make_matmul_term(func: Any, args: tuple) -> MatmulTerm:
    left, right = args
    frame = (*left.shape[:-1], right.shape[-1])
    found = MatmulTerm(func, args, frame, left.numel() + right.numel())
    found.turned = False
    return found


def make_outer_term(func: Any, args: tuple) -> MatmulTerm | None:
    """Return a column times a row, which torch computes as a broadcast multiplication, or None."""
    left, right = args
    if not isinstance(right, torch.Tensor) or left.dim() != 2 or right.dim() not in (1, 2):
        return None
    if left.shape[1] != 1 or right.numel() != right.shape[-1]:
        return None
    return make_matmul_term(func, args)


class EmbeddingTerm(Term):
    """The gradient (V, D) of an embedding: rows (S, D) added at the embedding's indices."""

    __slots__ = ()

    def rows(self) -> tuple[Tensor, Tensor]:
        g, index, _, padding, _ = self.args
        index, g = index.reshape(-1), g.reshape(-1, g.shape[-1])
        if padding >= 0:
            g = g.masked_fill((index == padding).unsqueeze(-1), 0)
        return index, g


class ConvolutionTerm(Term):
    """The gradient of a convolution's weight: (G, V, S), (G, S, D) -> (G, V, D) for G groups.

    The right factor is the unfolded input (im2col).

    Source: Rochette, Manoel and Tramel, "Efficient per-example gradient computations in
    convolutional neural networks" (2019).
    """

    __slots__ = ()

    def make(self) -> Tensor:
        return super().make()[1]

    def factors(self) -> tuple[Tensor, Tensor]:
        g, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = self.args
        if transposed:  # input and output swap roles
            g, x = x, g
        n = weight.dim() - 2
        x = torch.nn.functional.pad(
            x, [p for p in _repeat_option(padding, n)[::-1] for _ in range(2)]
        )
        step, gap = _repeat_option(stride, n), _repeat_option(dilation, n)
        return _group_cotangents(g, groups), _unfold_windows(
            x, g.shape[2:], weight.shape[2:], step, gap, groups
        )


def make_embedding_term(func: Any, args: tuple) -> EmbeddingTerm | None:
    g, index, n, _, by_frequency = args
    if by_frequency:
        return None
    return EmbeddingTerm(func, args, (n, g.shape[-1]), g.numel() + index.numel())


def make_convolution_term(func: Any, args: tuple) -> ConvolutionTerm:
    g, x, weight, *_, transposed, _, groups, _ = args
    if transposed:
        g, x = x, g
    D = weight[0].numel()
    S = g.numel() // max(g.shape[1], 1)
    frame = (groups, weight.shape[0] // groups, D)
    return ConvolutionTerm(
        func, (*args[:10], [False, True, False]), frame, g.numel() + groups * S * D
    )


def _repeat_option(option: Sequence[int], n: int) -> list[int]:
    return [*option] * n if len(option) == 1 else [*option]


def _group_cotangents(g: Tensor, groups: int) -> Tensor:
    """Permute cotangents to the left factor: (N, O, *out) -> (G, O / G, N * out)."""
    return g.unflatten(1, (groups, -1)).flatten(3).permute(1, 2, 0, 3).flatten(2)


def _unfold_windows(
    x: Tensor, out: Sequence[int], kernel: Sequence[int], step: list, gap: list, groups: int
) -> Tensor:
    """Unfold the input to the right factor: (N, C, *in) -> (G, N * out, C / G * kernel)."""
    n = len(out)
    for i, k in enumerate(kernel):
        x = x.unfold(2 + i, gap[i] * (k - 1) + 1, step[i])
        x = x.narrow(2 + i, 0, out[i])[..., :: gap[i]]
    x = x.unflatten(1, (groups, -1))  # (N, G, C / G, *out, *kernel)
    x = x.permute(1, 0, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    return x.flatten(2 + n).flatten(1, 1 + n)


# --- the norm of a sum -------------------------------------------------------------------------


def compute_squared_norm(terms: Sequence[Any]) -> Tensor:
    """The squared norm of the sum of the terms, a tensor of rank 0."""
    for term in terms:
        term.check_versions()
    sparse = [t.rows() for t in terms if isinstance(t, EmbeddingTerm)]
    dense = [t.factors() for t in terms if not isinstance(t, EmbeddingTerm)]
    left, right = _concat_pairs(dense, -1, -2)
    index, values = _concat_pairs(sparse, 0, 0)
    if not sparse and left.shape[-1] == 1:
        return (
            to_float32(left).square().sum((-1, -2)) * to_float32(right).square().sum((-1, -2))
        ).sum()
    # Terms may cancel: in double precision the rounding errors of the squares stay small.
    left, right, values = left.double(), right.double(), values.double()
    found = left.new_zeros(()) if dense else values.new_zeros(())
    if dense:
        found = found + ((left.mT @ left) * (right @ right.mT)).sum()
    if sparse:
        same = index.unsqueeze(1) == index
        found = found + (values @ values.mT).masked_fill(~same, 0).sum()
    if dense and sparse:
        found = found + 2 * (left.index_select(0, index) * (values @ right.mT)).sum()
    return found.clamp(min=0)


def _concat_pairs(pairs: list, first: int, second: int) -> tuple[Tensor, Tensor]:
    if not pairs:
        return torch.zeros(0), torch.zeros(0)
    return torch.cat([p for p, _ in pairs], first), torch.cat([p for _, p in pairs], second)
