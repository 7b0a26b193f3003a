"""Random programs whose examples diverge give the loop's values and gradients.

By hand, for more programs than the tests try:

    python tests/divergence/test_random_programs.py 5000 --seed 1000
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from torch.utils._pytree import tree_leaves

import forall
from divergence.programs import Numbers, Writer, compiled, inputs, limited, shorter, source
from divergence.truth import gradient, jacobian, total
from forall._api.execution import converted_run
from oracle import difference, loop

PROGRAMS = 300
GRADS = (0, 1, 2)


def values(f: Callable, seed: int, *, mapped: bool) -> Any:
    return (forall.vmap(f) if mapped else loop(f))(*inputs(seed))


def gradients(f: Callable, seed: int, *, mapped: bool) -> Any:
    """One kind of derivative: inside, outside, or forward, as the seed has it."""
    a, b, v, n = inputs(seed)
    if seed % 3 == 0:
        leaves = [t.clone().requires_grad_() for t in (a, b, v)]
        return gradient(total((forall.vmap(f) if mapped else loop(f))(*leaves, n)), leaves)
    if mapped:
        derive = forall.grad if seed % 3 == 1 else forall.jacfwd
        return list(forall.vmap(derive(lambda *row: total(f(*row)), GRADS))(a, b, v, n))

    def one(a, b, v, n):
        leaves = [t.clone().requires_grad_() for t in (a, b, v)]
        y = total(f(*leaves, n))
        return gradient(y, leaves) if seed % 3 == 1 else [j[0] for j in jacobian(y[None], leaves)]

    return loop(one)(a, b, v, n)


@contextlib.contextmanager
def obstacles() -> Iterator[list[converted_run.Obstacle]]:
    """Why calls in the body were not run converted, which is not warned of."""
    found: list[converted_run.Obstacle] = []
    before, converted_run.warn_of_groups = (
        converted_run.warn_of_groups,
        lambda _call, why: found.append(why),
    )
    try:
        yield found
    finally:
        converted_run.warn_of_groups = before


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def stable(f: Callable, seed: int) -> bool:
    """Whether the loop is the same for inputs that differ in their last bits."""
    rows = inputs(seed)
    moved = [t * (1 + 1e-12) if t.is_floating_point() else t for t in rows]
    return difference(loop(f)(*moved), loop(f)(*rows)) is None


def complaint(text: str, seed: int, ask: Callable = values) -> str | None:
    """What is wrong with a program under `vmap`; None where nothing is, or the loop fails too."""
    f = outcome(lambda: compiled(text, f"program {seed}"))
    truth = f if isinstance(f, Exception) else outcome(lambda: ask(f, seed, mapped=False))
    if isinstance(truth, Exception):
        return None
    with obstacles() as met:
        found = outcome(lambda: ask(f, seed, mapped=True))
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    internal = [why for why in met if why.is_internal]
    return f"not converted: {internal[0]}" if internal else difference(found, truth)


def complaint_about_numbers(text: str, seed: int, ask: Callable = values) -> str | None:
    """The same of a program of Python numbers: all is the loop's to the bit, errors included."""
    f = outcome(lambda: compiled(text, f"program {seed}"))
    if isinstance(f, Exception):
        return None
    truth = outcome(lambda: ask(f, seed, mapped=False))
    with obstacles() as met:
        found = outcome(lambda: ask(f, seed, mapped=True))
    if isinstance(truth, Exception):
        same = type(found) is type(truth) and str(found).startswith(str(truth))
        return None if same else f"{type(found).__name__}: {found} instead of {truth!r}"
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    internal = [why for why in met if why.is_internal]
    if internal:
        return f"not converted: {internal[0]}"
    pairs = zip(tree_leaves(found), tree_leaves(truth), strict=True)
    same = all(torch.equal(bits(a), bits(b)) for a, b in pairs if a is not None)
    return None if same else f"differs: {difference(found, truth) or 'in the last bits'}"


def bits(t: Any) -> torch.Tensor:
    t = torch.as_tensor(t)
    return t.view(torch.int64) if t.is_floating_point() else t


def ends(text: str, seed: int) -> bool:
    """Whether the loop runs a program, and to its end."""
    f = outcome(lambda: limited(compiled(text, f"program {seed}")))
    return not isinstance(f, Exception) and not isinstance(
        outcome(lambda: loop(f)(*inputs(seed))), Exception
    )


def kind(told: str | None) -> str | None:
    return told and told.split(":")[0].split(" ")[0]


def shrunk(
    text: str,
    seed: int,
    ask: Callable = values,
    tries: int = 2000,
    complain: Callable = complaint,
) -> str:
    """A program as short as dropping statements makes it that fails in the same way."""
    wanted = kind(complain(text, seed, ask))
    smaller = iter(shorter(text))
    for _ in range(tries):
        candidate = next(smaller, None)
        if candidate is None:
            break
        if ends(candidate, seed) and kind(complain(candidate, seed, ask)) == wanted:
            text, smaller = candidate, iter(shorter(candidate))
    return text


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_values(seed):
    told = complaint(source(seed), seed)
    assert told is None, f"{told}\n\n{source(seed)}"


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_numbers(seed):
    text = source(seed, Numbers)
    told = complaint_about_numbers(text, seed)
    assert told is None, f"{told}\n\n{text}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(0, PROGRAMS, 5))
def test_gradients(seed):
    told = complaint(source(seed), seed, gradients)
    assert told is None, f"{told}\n\n{source(seed)}"


def test_the_loop_runs_the_programs_and_the_last_bit_does_not_decide():
    for seed in range(PROGRAMS):
        assert stable(compiled(source(seed), f"program {seed}"), seed), seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=1000, help="of the first program")
    parser.add_argument("--gradients", action="store_true", help="derivatives, not values")
    parser.add_argument("--numbers", action="store_true", help="programs of Python numbers")
    parser.add_argument("--loop", action="store_true", help="check the programs, not vmap")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--whole", action="store_true", help="do not shrink what fails")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ask = gradients if options.gradients else values
    complain = complaint_about_numbers if options.numbers else complaint
    failed, start = 0, time.perf_counter()
    for seed in range(options.seed, options.seed + options.programs):
        text = source(seed, Numbers if options.numbers else Writer)
        if options.show:
            print(f"# program {seed}\n{text}")
        f = compiled(text, f"program {seed}")
        if not options.numbers and not stable(f, seed):
            print(f"program {seed}: the last bit decides, left out")
            continue
        told = None if options.loop else complain(text, seed, ask)
        if told is not None:
            failed += 1
            short = text if options.whole else shrunk(text, seed, ask, complain=complain)
            print(f"--- program {seed}: {told}\n{short}", flush=True)
    print(f"{options.programs} programs, {failed} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
