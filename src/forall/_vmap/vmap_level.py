"""The vmap level, which is active while the user's function sees one example.

The level is two modes. The dispatch mode sees every ATen call below autograd, also factories and
the buffers that torch's own code makes: `dispatch` says what it does. The other one is
`function_mode`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from forall._compat.bitset import make_full_set
from forall._compat.dispatch_state import in_torch_func
from forall._compat.private_api import DispatchMode
from forall._core.levels import Level
from forall._random import key_scope
from forall._vmap.active_set.example_set import ExampleSet
from forall._vmap.mutation.mutation_log import MutationLog

if TYPE_CHECKING:
    from forall._compat.call_site import SourceLine


class VmapConfig(NamedTuple):
    """The options of a vmap level, which a sub-level shares with its root."""

    randomness: str = "error"  # the flag of `vmap`
    diverges: bool = False  # True if examples that diverge run in groups, else they are an error


class VmapState:
    """The state of one call under a vmap level, which a sub-level shares with its root."""

    calls: int | None = None  # calls of the function, where these are not the examples
    columns_of: str | None = None  # the transform, where the examples are its directions
    logs_writes = False  # True while reads and writes of older memory are logged
    applies_updates = True  # True if the end of the call applies the log's pending updates
    # The groups of examples that have diverged, and the user's line at which they did.
    divergence: tuple[list[list[int]], SourceLine] | None = None
    limit: Any = None  # how many steps its loops may take, see `concretize_listeners`
    batch_count: torch.Tensor | None = None  # of a BatchNorm that averages over all calls

    def __init__(self) -> None:
        self.mutation_log = MutationLog()
        # The running scope of random numbers; vmap gives each of its examples one of its own.
        self.scope = key_scope.scopes.running

    def count_as_one_call(self, verb: str, first: bool) -> None:
        """Count the examples as directions of one call, whose writes the ``first`` chunk does."""
        self.columns_of, self.calls, self.logs_writes = verb, int(first), False


_DEFAULTS = VmapConfig()


class VmapLevel(Level, DispatchMode):
    """A level of ``size`` examples that run as one.

    This class is the level's state. Its operations are in `dispatch`, which sets them here: they
    need modules that know this class.
    """

    draws = shares = True

    def __init__(
        self, size: int, config: VmapConfig = _DEFAULTS, parent: Level | None = None
    ) -> None:
        Level.__init__(self, parent)  # not the mode's: its entry makes what it needs
        self.size = size
        self.config = config
        self.state = VmapState()

    @cached_property
    def examples(self) -> ExampleSet:
        """The set of the examples that this level has."""
        return ExampleSet(make_full_set(self.size), self.size, None)

    @cached_property
    def sub_levels(self) -> WeakValueDictionary[int, Any]:
        """Sub-levels of its examples by their bit sets, for as long as values use them."""
        return WeakValueDictionary()


class CotangentLevel(VmapLevel):
    """The level of a pull-back through a graph that was recorded further out.

    Its examples are cotangents. Autograd acts on the stacks, not on the examples, in the grad mode
    in which the level was made. Where that is off nothing is recorded, and operators run as under
    any other level. Those that write are the exception: autograd counts writes into stacks.
    """

    records_on_value = True
    shares = False
    mark: object | None = None  # set once the pull-back leads through an ended call

    def __init__(self, size: int, parent: Level | None) -> None:
        super().__init__(size, VmapConfig("same"), parent)
        grad = torch.is_grad_enabled()  # of one level of torch.func's, and others may record
        self.outer_grad = grad if grad or in_torch_func() else None  # None: nothing is recorded
