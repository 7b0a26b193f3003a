"""The state of torch's own random generators, so that draws can be made once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._torch import whole
from forall._torch.whole import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    States = dict[torch.device | torch.Generator, torch.Tensor]


class _Noting(whole.Here):
    states: tuple[States, ...] = ()


_noting = _Noting.made()


def states(leaves: Iterable[Any]) -> States:
    """Those on the CPU and on every device that a tensor lies on, and of generators given."""
    leaves = list(leaves)
    devices = {t.device for t in leaves if isinstance(t, torch.Tensor) and t.is_cuda}
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return {
            torch.device("cpu"): torch.get_rng_state(),
            **{d: torch.cuda.get_rng_state(d) for d in devices},
            **{g: g.get_state() for g in leaves if isinstance(g, torch.Generator)},
        }


def restore(saved: States) -> None:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for key, state in saved.items():
            if isinstance(key, torch.Generator):
                key.set_state(state)
            elif key.type == "cuda":
                torch.cuda.set_rng_state(state, key)
            else:
                torch.set_rng_state(state)


@contextmanager
def noting(saved: States) -> Iterator[None]:
    """Add to ``saved`` what generators of the user's held before draws inside take from them."""
    was, _noting.states = _noting.states, (*_noting.states, saved)
    try:
        yield
    finally:
        _noting.states = was


def note(args: Iterable[Any]) -> None:
    """A draw with these arguments is about to be made."""
    if _noting.states:
        for a in args:
            if isinstance(a, torch.Generator):
                for saved in _noting.states:
                    if not is_among(a, saved):
                        saved[a] = a.get_state()


def is_among(generator: torch.Generator, others: Iterable[Any]) -> bool:
    """Whether it is one of these. An operator gets a Python object of its own for a generator."""
    return any(isinstance(g, torch.Generator) and g._cdata == generator._cdata for g in others)


def of(args: Iterable[Any]) -> torch.Generator:
    """The generator that a draw with these arguments takes from."""
    device = torch.device("cpu")
    for a in args:
        if isinstance(a, torch.Generator):
            return a
        if isinstance(a, torch.Tensor):
            device = a.device
    cuda = device.type == "cuda"
    return torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
