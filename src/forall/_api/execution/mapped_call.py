"""The interface between a call of a mapped function and the strategies that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._api.mapped_inputs import OutDims
    from forall._core.errors import CallOrigin
    from forall._vmap.randomness import CallRandomness


class MappedCall(Protocol):
    """A call on all or some of its examples, as `vmap.VmapCall` has it."""

    @property
    def func(self) -> Callable:
        """The function of one example."""
        ...

    @property
    def arguments(self) -> Any:
        """The arguments: their leaves, the dims that count the examples, and the size."""
        ...

    @property
    def places(self) -> OutDims:
        """The positions of the axes of examples in the results."""
        ...

    @property
    def draws(self) -> CallRandomness:
        """The randomness of the examples."""
        ...

    @property
    def origin(self) -> CallOrigin:
        """The user's call, and the numbers of these examples in it."""
        ...

    @property
    def options(self) -> Any:
        """The options for running examples that diverge."""
        ...

    def some(self, numbers: Sequence[int]) -> Self:
        """Return the call on some of the examples, from 0."""
        ...

    def run(self) -> Any:
        """Return the results of all examples, by whichever strategy."""
        ...

    def run_once(self) -> tuple[list, Any]:
        """Return the leaves and the tree of the results, of one run for all examples."""
        ...

    def _replace(self, **changes: Any) -> Self: ...
