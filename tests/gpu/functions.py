"""Custom autograd Functions under every transform: the acceptance functions of the tests."""

from __future__ import annotations

import torch

from gpu.autograd import of_functions
from gpu.checks import Check, Skipped, default_device

EVERY, QUICK = 2, 12  # one in so many of the checks is made


def checks(device: torch.device) -> list[Check]:
    try:
        with default_device(device):
            from limits import test_functions as tests
    except ModuleNotFoundError as error:
        raise Skipped(f"the functions are in a file of tests, which says: {error}") from error
    return of_functions(tests.CASES, device)
