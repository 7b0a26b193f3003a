"""Pull-backs that functions capture, as values bound to a recorded program.

A pull-back of `vjp` is another function at each point. If its point was replayed, it is one
function of cotangents and of the tensors that it saved, see `replayed_pullback`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from forall._api.vjp import GraphPullback, make_vjp_fn
from forall._compat.inference_mode import copy_if_inference
from forall._compat.wrapper_tensor import has_history
from forall._core.errors import TransformCall
from forall._core.levels import top
from forall._core.python_state import UnguardedState
from forall._vmap.concretize_listeners import end_recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._api.argnums import DiffLeaves
    from forall._api.vjp import PullbackRecord
    from forall._jit.cache.replayed_pullback import ReplayedPullback


class BoundPullback(UnguardedState):
    """A placeholder for pull-backs of one program, which differ in what they have saved.

    It holds no tensors, and nothing of the function that was pulled back. ``originals`` has the
    pull-backs that are in use, by the first tensor that was read of each.
    """

    originals: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def __init__(self, record: PullbackRecord, replayed: ReplayedPullback) -> None:
        self.count = len(replayed.saved)
        self._replayed = replayed._replace(saved=())
        self._moved = record.pull.moved.without_leaves()
        self._out_spec, self._has_aux = record.pull.out_spec, record.has_aux

    def bind(self, saved: Sequence[torch.Tensor]) -> Callable:
        """Return the pull-back that has saved these tensors.

        What it cannot do without a graph ends a recording, and is up to the original.
        """
        original = self.originals.get(saved[0])
        replayed = self._replayed._replace(saved=tuple(saved))
        pull = _SavedPullback(replayed, self._moved, self._out_spec)
        run = make_vjp_fn(TransformCall("vjp", None), pull, self._has_aux)

        def run_or_refuse(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except Exception:
                end_recordings("a pull-back is asked for what only its graph has")
                if original is None:
                    raise
            return original(*args, **kwargs)

        return run_or_refuse


class _SavedPullback(GraphPullback):
    """A pull-back that is the program of a replayed call, without a graph."""

    def __init__(self, replayed: ReplayedPullback, moved: DiffLeaves, out_spec: Any) -> None:
        self.moved, self.out_spec = moved, out_spec
        self.outputs = [
            torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device=like.device)
            for like in replayed.get_output_layouts()
        ]
        self.own, self.level, self._replayed = [], top(), replayed

    def find_replayed(self) -> ReplayedPullback | None:
        return self._replayed

    def _run_backward(self, cots: list, retain_graph: bool) -> list:
        if not retain_graph:
            raise _NeedsGraph  # it will be freed
        self._check_history(cots)
        return self._replayed.pull_back([*map(copy_if_inference, cots)])

    def _run_stacked(self, stacks: list) -> list:
        self._check_history(stacks)
        return self._pull_back_batched(
            lambda _, cots: self._replayed.pull_back(cots), [*map(copy_if_inference, stacks)]
        )

    def _check_history(self, cotangents: list) -> None:
        if any(map(has_history, cotangents)):
            raise _NeedsGraph


class _NeedsGraph(Exception):  # noqa: N818 - the original answers
    """A pull-back without a graph is asked for what only a graph has."""
