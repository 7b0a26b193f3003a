"""torch.utils.checkpoint, told where a function ran and of draws that are no generator's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_forward = checkpoint.CheckpointFunction.forward
_generator = checkpoint._checkpoint_without_reentrant_generator


def _nothing() -> Iterator[None]:
    """Before the function and after it, where checkpoint asks."""
    yield


def install(in_place: Callable, drawing: Callable, tangents: Callable[[], bool]) -> None:
    """Recompute by ``in_place(function)``, made where it is first run; once.

    Where draws are to be repeated, by ``in_place(drawing(function))``. While there may be
    ``tangents`` nothing is recomputed, for what autograd saves loses them on its way through the
    hooks of a checkpoint: the same numbers for more memory.
    """
    if checkpoint.CheckpointFunction.forward is not _forward:
        return

    @functools.wraps(_forward)
    def forward(ctx: Any, function: Callable, preserve: bool, *args: Any) -> Any:
        again = in_place(drawing(function) if preserve else function)
        out = _forward(ctx, function, preserve, *args)
        ctx.run_function = again
        return out

    @functools.wraps(_generator)
    def generator(function: Callable, preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
        if tangents():
            return _nothing()
        again = in_place(drawing(function) if preserve else function)
        return _generator(again, preserve, *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)
    checkpoint._checkpoint_without_reentrant_generator = generator
