"""The truth as an engine: the loop for `vmap`, torch's own autograd for `vjp` and `jvp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from oracle import loop


@dataclass
class Plain:
    own_storage: bool = False  # examples are copies, for entries that look at storage
    by_reverse: bool = False  # no forward mode, for entries of which torch has a wrong formula

    def vmap(self, f: Callable, in_dims: Any = 0, randomness: str = "") -> Callable:
        del randomness
        return loop(f, in_dims, own_storage=self.own_storage)

    def vjp(self, f: Callable, *primals: Tensor) -> tuple[Any, Callable]:
        """The value, and a pull-back whose results can be differentiated again."""
        xs = [_variable(x) for x in primals]
        ys = f(*xs)
        return ys, lambda cots: tuple(_gradients(ys, xs, cots))

    def jvp(self, f: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        """By forward mode; where torch has no formula, by transposing the pull-back.

        That u -> J^T u is linear, so its own pull-back is t -> J t.
        """
        if not self.by_reverse:
            try:
                return _forward(f, primals, tangents)
            except RuntimeError:
                pass
        ys, pull = self.vjp(f, *primals)
        us = [torch.zeros_like(y).requires_grad_() for y in ys]
        return tuple(y.detach() for y in ys), tuple(_gradients(pull(us), us, tangents))

    def linearize(self, f: Callable, *primals: Tensor) -> tuple[Any, Callable]:
        again = tuple(x.clone() for x in primals)  # the function may write into its argument
        return f(*primals), lambda *tangents: self.jvp(f, again, tangents)[1]

    def jacrev(self, f: Callable, argnums: tuple[int, ...]) -> Callable:
        """Row by row; of each result a tuple of the derivatives in each argument."""
        del argnums  # all of them

        def rows(*primals: Tensor) -> tuple:
            ys, pull = self.vjp(f, *primals)
            blocks = []
            for k, y in enumerate(ys):
                found = [pull(_units(ys, k, i)) for i in range(y.numel())]
                blocks.append(
                    tuple(
                        torch.stack([row[j] for row in found]).reshape(*y.shape, *x.shape)
                        if found
                        else x.new_zeros(*y.shape, *x.shape)
                        for j, x in enumerate(primals)
                    )
                )
            return tuple(blocks)

        return rows

    def jacfwd(self, f: Callable, argnums: tuple[int, ...], randomness: str) -> Callable:
        """Column by column."""
        del argnums, randomness  # all of them; draws are not compared

        def columns(*primals: Tensor) -> tuple:
            found = [
                [self.jvp(f, primals, _units(primals, j, i))[1] for i in range(x.numel())]
                for j, x in enumerate(primals)
            ]
            ys = f(*primals)
            return tuple(
                tuple(
                    torch.stack([c[k] for c in found[j]], -1).reshape(*y.shape, *x.shape)
                    if found[j]
                    else y.new_zeros(*y.shape, *x.shape)
                    for j, x in enumerate(primals)
                )
                for k, y in enumerate(ys)
            )

        return columns


def _units(like: Sequence[Tensor], which: int, place: int) -> tuple[Tensor, ...]:
    """Zeros with a one at a place of one of them."""
    found = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in like)
    found[which].view(-1)[place] = 1
    return found


def _variable(x: Tensor) -> Tensor:
    y = x.view_as(x)
    return y if y.requires_grad else y.requires_grad_()


def _gradients(ys: Sequence[Tensor], xs: Sequence[Tensor], cots: Sequence[Tensor]) -> list[Tensor]:
    live = [(y, c) for y, c in zip(ys, cots, strict=True) if y.requires_grad]
    if not live:
        return [torch.zeros_like(x) for x in xs]
    found = torch.autograd.grad(
        [y for y, _ in live], xs, [c for _, c in live], create_graph=True, allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)]


def _forward(f: Callable, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        pairs = [forward_ad.unpack_dual(y) for y in f(*duals)]
        ys = tuple(y for y, _ in pairs)
        return ys, tuple(torch.zeros_like(y) if t is None else t for y, t in pairs)
