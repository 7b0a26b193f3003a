"""The vmap level, which is active while the user's function sees one example.

The level is two modes. The dispatch mode sees every ATen call below autograd, also factories and
the buffers that torch's own code makes: `dispatch` says what it does. The other one is
`function_mode`.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakValueDictionary

import torch

from forall._compat.private_api import DispatchMode
from forall._core.levels import Level
from forall._random import key_scope
from forall._vmap.mutation.mutation_log import MutationLog


class VmapLevel(Level, DispatchMode):
    """A level of ``size`` examples that run as one; ``randomness`` is the flag of `vmap`.

    With ``records_values`` autograd acts on the stacks, not on the examples, in the grad mode in
    which the level was made. A pull-back through a graph that was recorded further out needs this.

    This class is the level's state. Its operations are in `dispatch`, which sets them here: they
    need modules that know this class.
    """

    draws = True

    def __init__(
        self,
        size: int,
        randomness: str = "error",
        parent: Level | None = None,
        *,
        records_values: bool = False,
    ) -> None:
        Level.__init__(self, parent)  # not the mode's: its entry makes what it needs
        self.size = size
        self.randomness = randomness
        self.records_values = self.records_on_value = records_values
        self.shares = not records_values
        self.outer_grad = torch.is_grad_enabled()
        self.scope = key_scope.scopes.running  # vmap gives each of its examples one of its own
        self.mutation_log = MutationLog()
        self.met: list[torch.Tensor] = []  # shared tensors from outside, of one operator

    calls: int | None = None  # calls of the function, where these are not the examples
    logs_writes, applies_updates = (
        False,
        True,
    )  # log its writes to older memory; apply them at the end
    members: int | None = None
    rows: torch.Tensor | None = None
    parts = False  # whether its call runs examples that diverge in groups
    parted: list[list[int]] | None = None  # the groups, once they are known
    parted_at: Any = None  # the user's line at which they diverged
    limit: Any = None  # how many steps its loops may take, see `concretize_listeners`
    crosses: Any = None  # a mark, once its pull-back leads through an ended call
    counted: torch.Tensor | None = None  # by a BatchNorm that averages over all calls

    @functools.cached_property
    def sub_levels(self) -> WeakValueDictionary[int, Any]:
        """Sub-levels of its examples by their bit sets, for as long as values use them."""
        return WeakValueDictionary()
