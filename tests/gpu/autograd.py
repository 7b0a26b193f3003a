"""torch.autograd inside every transform: the acceptance functions of the tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gpu.checks import Check, Skipped, assert_same, default_device, truth_of

EVERY, QUICK = 3, 16  # one in so many of the checks is made
OUTSIDE = ("nothing", "a leaf", "the argument")


def checks(device: torch.device) -> list[Check]:
    try:
        with default_device(device):  # where the file's own constants are to lie
            from limits import test_autograd_inside as tests
    except ModuleNotFoundError as error:
        raise Skipped(f"the functions are in a file of tests, which says: {error}") from error
    functions = {k: f for k, f in tests.CASES.items() if k not in tests.LOOP_REFUSES}
    return of_functions(functions | tests.TRAINED, device)


def of_functions(functions: dict[str, Callable], device: torch.device) -> list[Check]:
    """Each function under each word of `limits.words`."""
    with default_device(device):
        from limits.words import WORDS

    return [
        Check(f"{name}, {word}", partial(compare, word, f, device))
        for name, f in functions.items()
        for word in WORDS
    ]


def compare(word: str, f: Callable, device: torch.device) -> None:
    from limits.words import WORDS, outcome

    there = WORDS[word]
    with default_device(device):
        for outside in OUTSIDE:
            truth = truth_of(partial(outcome, there.truth, f, there.shape, outside))
            found = outcome(there.ours, f, there.shape, outside)
            assert_same(found, truth, f"{outside} requires grad")
