"""`jit` by torch's compiler, which takes seconds for each program."""

from __future__ import annotations

import torch

from gpu.checks import Check
from gpu.recording import by_backend

QUICK = 4  # one in so many of the checks is made with --quick


def checks(device: torch.device) -> list[Check]:
    return by_backend("inductor", device)
