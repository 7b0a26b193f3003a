"""Every pair of transforms, and triples, beside what they come down to."""

from __future__ import annotations

from functools import partial

import torch

from gpu.checks import Check
from laws.nesting import PAIRS, TRIPLES, check_nesting


def checks(device: torch.device) -> list[Check]:
    return [
        Check(
            f"{' of '.join(names)}{', recorded outside' if outside else ''}",
            partial(check_nesting, names, outside, device),
        )
        for names in (*PAIRS, *TRIPLES)
        for outside in (False, True)
    ]
