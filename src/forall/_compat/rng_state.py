"""The state of torch's own random generators, so that draws can be repeated."""

from __future__ import annotations

import inspect
import random
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import exception_safety
from forall._compat.device_threads import has_device_threads
from forall._compat.devices import hide_from_observers
from forall._compat.exception_safety import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    States = dict[torch.device | torch.Generator, torch.Tensor]


class _OpenRecords(exception_safety.RestoredState):
    states: tuple[States, ...] = ()


_noting = _OpenRecords.make_instance()


# They set the state of a generator that all examples share.
SEEDERS = frozenset(
    map(
        inspect.unwrap,  # torch._dynamo wraps some of them when it is imported
        (
            torch.manual_seed,
            torch.seed,
            torch.set_rng_state,
            torch.cuda.manual_seed,
            torch.cuda.manual_seed_all,
            torch.cuda.set_rng_state,
            random.Random.seed,
        ),
    )
)


def save_states(leaves: Iterable[Any]) -> States:
    """Return the states of the CPU, of all devices in use and of the generators given.

    A function may draw on a device that holds none of its arguments.
    """
    with hide_from_observers():
        return {
            torch.device("cpu"): torch.get_rng_state(),
            **{d: _read(d) for d in _find_used_devices()},
            **{g: g.get_state() for g in leaves if isinstance(g, torch.Generator)},
        }


def _find_used_devices() -> list[torch.device]:
    """Return the accelerator's devices, if one has been used: a query must not initialise them."""
    if not has_device_threads():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # noqa: S101 - one is available
    is_set_up = getattr(torch.get_device_module(kind), "is_initialized", None)
    if is_set_up is not None and not is_set_up():
        return []
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]


def _read(device: torch.device) -> torch.Tensor:
    module = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def _write(state: torch.Tensor, device: torch.device) -> None:
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def restore_states(saved: States) -> None:
    with hide_from_observers():
        for key, state in saved.items():
            if isinstance(key, torch.Generator):
                key.set_state(state)
            elif key.type == "cpu":
                torch.set_rng_state(state)
            else:
                _write(state, key)


@contextmanager
def record_new_states(saved: States) -> Iterator[None]:
    """Add states of users' generators before their first draw in the block to ``saved``."""
    was, _noting.states = _noting.states, (*_noting.states, saved)
    try:
        yield
    finally:
        _noting.states = was


def record_draw(args: Iterable[Any]) -> None:
    """Record the states of the generators in the arguments of a draw about to be made."""
    if _noting.states:
        for a in args:
            if isinstance(a, torch.Generator):
                for saved in _noting.states:
                    if not is_same_generator_in(a, saved):
                        saved[a] = a.get_state()


def is_same_generator_in(generator: torch.Generator, others: Iterable[Any]) -> bool:
    """Return True if a generator is one of others.

    An operator receives a Python object of its own for a generator, so they are compared in C.
    """
    return any(isinstance(g, torch.Generator) and g._cdata == generator._cdata for g in others)


def find_generator(args: Iterable[Any]) -> torch.Generator:
    """Return the generator that a draw with these arguments uses."""
    device = torch.device("cpu")
    for a in args:
        if isinstance(a, torch.Generator):
            return a
        if isinstance(a, torch.Tensor):
            device = a.device
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if device.type == "mps":
        return module._get_default_mps_generator()
    return module.default_generators[device.index or 0]
