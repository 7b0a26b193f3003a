"""Half precision: the dtypes of 16 bits, which sums and squares leave for float32."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32, in which kernels accumulate."""
    return x.float() if x.dtype in HALVES else x
