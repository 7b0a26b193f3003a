"""What an acceptance function is: a function of one example, and inputs that make examples diverge.

The inputs of B examples are spread evenly, so that even two of them take different ways, and lie
away from what the functions compare them with: stacked and single kernels may differ in the last
bit, and may do so here without taking another branch (`test_cases.py` checks it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draws import make_generator

D = torch.float64

# (examples, seed, argument) -> the stack of this argument
Maker = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Case:
    """A function of one example, and what may be asked of it.

    Attributes:
        grads: the arguments with a derivative.
        forward: whether forward mode may run it: not where it calls a backward pass itself.
        keyed: whether it draws random numbers, which then come from a key.
        writes: whether it writes into its arguments.
        plain: what the loop calls, where `f` itself has a `vmap` inside.
    """

    name: str
    f: Callable[..., Any]
    makers: tuple[Maker, ...]
    grads: tuple[int, ...]
    forward: bool
    keyed: bool
    writes: bool
    plain: Callable[..., Any]

    def stacks(self, size: int, seed: int = 0) -> tuple[Tensor, ...]:
        """The arguments of `size` examples, stacked."""
        return tuple(make(size, seed, place) for place, make in enumerate(self.makers))


CASES: dict[str, Case] = {}


def case(
    *makers: Maker,
    grads: tuple[int, ...] | None = None,
    forward: bool = True,
    keyed: bool = False,
    writes: bool = False,
    plain: Callable[..., Any] | None = None,
) -> Callable[[Callable], Callable]:
    """Enter the decorated function under its own name; by default real arguments have grads."""

    def enter(f: Callable) -> Callable:
        if f.__name__ in CASES:
            raise ValueError(f"two functions are called {f.__name__}")
        found = grads
        if found is None:
            stacks = [make(1, 0, place) for place, make in enumerate(makers)]
            found = tuple(i for i, t in enumerate(stacks) if t.is_floating_point())
        rest = (found, forward, keyed, writes, plain or f)
        CASES[f.__name__] = Case(f.__name__, f, makers, *rest)
        return f

    return enter


# --- makers --------------------------------------------------------------------------------------

# Multiples of these, modulo one, fill the unit interval evenly; one for each argument, so that the
# arguments of an example do not depend on each other.
_STEPS = (0.6180339887, 0.4142135623, 0.7320508075, 0.2360679774)


def _unit(size: int, seed: int, place: int) -> Tensor:
    count = torch.arange(size, dtype=D)
    return (0.2137 + 0.3719 * seed + _STEPS[place] * count) % 1


def between(low: float, high: float) -> Maker:
    """Numbers, evenly spread over an interval."""
    return lambda size, seed, place: low + (high - low) * _unit(size, seed, place)


def integers(low: int, high: int) -> Maker:
    """Integers from `low` to below `high`, each about equally often."""
    return lambda size, seed, place: (low + (high - low) * _unit(size, seed, place)).floor().long()


def flags(size: int, seed: int, place: int) -> Tensor:
    return _unit(size, seed, place) > 0.45


def array(*shape: int, low: float = -2.0, high: float = 2.0) -> Maker:
    """Arrays of numbers from an interval; examples differ in their means too."""

    def make(size: int, seed: int, place: int) -> Tensor:
        draws = make_generator(1000 * seed + 10 * size + place)
        noise = torch.rand(size, *shape, dtype=D, generator=draws)
        middle = _unit(size, seed, place).reshape(size, *[1] * len(shape))
        return low + (high - low) * (0.6 * noise + 0.4 * middle)

    return make


def digits(*shape: int, high: int = 4) -> Maker:
    """Arrays of the integers 0 to below `high`."""
    make = array(*shape, low=0.0, high=high)
    return lambda size, seed, place: make(size, seed, place).floor().long()


scalars = between(-2.0, 2.0)
positive = between(0.1, 4.0)
