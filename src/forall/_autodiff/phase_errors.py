"""The check that a loss does not depend on the phase of complex eigenvectors.

Such vectors are defined up to a factor e^{i phi}, so such a loss has no derivative. Torch's
backwards check that for plain tensors alone. Under a level, and while a call is recorded, the same
check is made here, for each example. It is an operator, so recorded calls repeat it. (Torch's
backward for singular vectors checks all tensors itself.)
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.assertions import require
from forall._compat.dispatch_state import functions_off
from forall._compat.op_schema import met
from forall._compat.private_api import count_dispatch_modes
from forall._compat.wrapper_tensor import Wrapper

aten = torch.ops.aten

DECOMPOSITIONS = frozenset({aten.linalg_eig.default, aten._linalg_eigh.default})
_DEPENDS = (
    "The eigenvectors in the complex case are specified up to multiplication by e^{i phi}. The "
    "specified loss function depends on this quantity, so it is ill-defined."
)


def may_have_phases() -> bool:
    """True if any level or recorder has run an eigendecomposition, so that graphs may have one."""
    return not DECOMPOSITIONS.isdisjoint(met)


PHASES = {
    "LinalgEigBackward0": "linalg_eig_backward",
    "LinalgEighBackward0": "linalg_eigh_backward",
}


class PhaseCheckHook:
    """A pre-hook on a node of `PHASES` that makes the check."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __call__(self, cotangents: tuple) -> None:
        g = cotangents[1]
        if (
            g is None
            or not g.is_complex()
            or not (count_dispatch_modes() or isinstance(g, Wrapper))
        ):
            return  # torch checks plain tensors itself
        with torch.no_grad(), functions_off():
            phases = (self.node._saved_eigenvectors.conj() * g).sum(-2).imag
            holds = (phases.abs() <= 0.01).all()  # torch's tolerance
            require(holds, f"{PHASES[type(self.node).__name__]}: {_DEPENDS}")
