"""`vjp`: value and pull-back, by reverse mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._batching import border
from forall._batching.batched import wrap
from forall._batching.interpreter import VmapLevel, running
from forall._core.errors import name_of
from forall._core.levels import Level, lift, outside, top
from forall._derivatives import forward, reverse
from forall._torch import handover, trees
from forall._transforms import checks

if TYPE_CHECKING:
    from collections.abc import Callable


def vjp(func: Callable, *primals: Any, has_aux: bool = False) -> Any:
    """Value and pull-back."""
    checks.callable_("vjp", func)
    if handover.needed():
        return handover.call("vjp", func, *primals, has_aux=has_aux)
    call = f"vjp({name_of(func)})"
    pull, value, aux = pullback(call, func, primals, has_aux)

    def vjp_fn(
        cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
    ) -> tuple:
        """Pull cotangents, shaped like the output, back to the primals."""
        del create_graph  # decided by what the result can reach
        cots = checks.cotangents(call, pull.outputs, pull.out_spec, cotangents)
        return pull.tree(pull.at(top(), cots, retain_graph=retain_graph))

    return (value, vjp_fn, aux) if has_aux else (value, vjp_fn)


def pullback(call: str, func: Callable, primals: tuple, has_aux: bool) -> tuple[Pullback, Any, Any]:
    """Run ``func`` on fresh variables; what `vjp` and `jacrev` share."""
    outer = torch.is_grad_enabled()
    if not primals:
        raise RuntimeError(f"{call}: called without primals.\nPass at least one tensor.")
    with torch.enable_grad():
        own, leaves, spec = reverse.variables(call, primals)
        out = func(*trees.unflatten(leaves, spec))
        aux = None
        if has_aux:
            out, aux = checks.with_aux(call, out)
        outputs, out_spec = checks.outputs(call, out)
    pull = Pullback(own, leaves, spec, outputs, out_spec, outer)
    value = trees.unflatten(outputs, out_spec)
    value, aux = reverse.closed((value, aux), own, outer)
    return pull, value, aux


class Pullback:
    """The graph from fresh variables to outputs, at the level it was recorded in."""

    def __init__(
        self, own: list, leaves: list, spec: Any, outputs: list, out_spec: Any, outer_grad: bool
    ) -> None:
        self.own = own
        self.leaves = leaves
        self.spec = spec
        self.outputs = outputs
        self.out_spec = out_spec
        self.outer_grad = outer_grad
        self.level = top()

    def tree(self, gradients: list) -> Any:
        """Gradients in the shape of the primals; None where a primal is no tensor."""
        filled = iter(gradients)
        return trees.unflatten(
            [next(filled) if isinstance(x, torch.Tensor) else None for x in self.leaves], self.spec
        )

    def at(self, level: Level | None, cots: list, *, retain_graph: bool = True) -> list:
        """Pull back cotangents of ``level``, which may lie inside the graph's own.

        The graph's values are constant in every level entered since, and the pull-back is linear:
        examples leave their level as one more axis, a tangent is pulled back like its primal.
        """
        if level is self.level or not self._is_inside(level):
            return self._run(cots, retain_graph)
        cots = [lift(c, level) for c in cots]
        with outside(level):
            if isinstance(level, forward.JvpLevel):
                pairs = [forward.unpack(c, level) for c in cots]
                primals = self.at(level.parent, [p for p, _ in pairs])
                tangents = self.at(
                    level.parent, [torch.zeros_like(p) if t is None else t for p, t in pairs]
                )
                return [
                    forward.make_dual(p, t, level) for p, t in zip(primals, tangents, strict=True)
                ]
            stacks = [border.leave(c, 0, level) for c in cots]
            pulled = self.stacked(stacks, level.parent)
            return [border.enter(g, 0, level) for g in pulled]

    def _is_inside(self, level: Level | None) -> bool:
        while level is not None and level is not self.level:
            level = level.parent
        return level is self.level

    def stacked(self, stacks: list, level: Level | None) -> list:
        """Pull back stacks (N, *O) of cotangents that lie at ``level``, all N at once."""
        if level is not self.level and self._is_inside(level):
            n = stacks[0].shape[0]
            stacks = [lift(s, level) for s in stacks]
            with outside(level):
                if isinstance(level, forward.JvpLevel):
                    pairs = [forward.unpack(s, level) for s in stacks]
                    primals = self.stacked([p for p, _ in pairs], level.parent)
                    tangents = self.stacked(
                        [torch.zeros_like(p) if t is None else t for p, t in pairs], level.parent
                    )
                    return [
                        forward.make_dual(p, t, level)
                        for p, t in zip(primals, tangents, strict=True)
                    ]
                folded = [border.leave(s, 0, level).flatten(0, 1) for s in stacks]
                pulled = self.stacked(folded, level.parent)
                return [border.enter(g.unflatten(0, (-1, n)), 0, level) for g in pulled]
        return self._run_stacked(stacks)

    def _run(self, cots: list, retain_graph: bool) -> list:
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            found = reverse.gradients(
                tuple(self.outputs), tuple(cots), self.own, retain_graph=retain_graph
            )
        if any(c.requires_grad for c in cots) and outer:
            return found
        return reverse.closed(found, self.own, outer)

    def _run_stacked(self, stacks: list) -> list:
        size = stacks[0].shape[0]
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            level = VmapLevel(size, "same", top(), records_values=True)
            with running(level):
                found = reverse.gradients(
                    tuple(self.outputs),
                    tuple(wrap(s, 0, level) for s in stacks),
                    self.own,
                )
            found = [self._unstacked(g, level) for g in found]
        if any(s.requires_grad for s in stacks) and outer:
            return found
        return reverse.closed(found, self.own, outer)

    @staticmethod
    def _unstacked(g: torch.Tensor, level: VmapLevel) -> torch.Tensor:
        """(N, *I) of a gradient, with the history it has outside."""
        value, axis = (g.value, g.axis) if getattr(g, "level", None) is level else (g, None)
        if axis is None:
            return value.unsqueeze(0).expand(level.size, *value.shape)
        return value if axis == 0 else value.movedim(axis, 0)


