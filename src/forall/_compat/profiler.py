"""Names for calls in a profile, computed only while a profiler of torch's is on."""

from __future__ import annotations

from typing import Any

import torch

is_profiling = torch._C._autograd._profiler_enabled


def make_span(name: str) -> Any:
    """Return a context under this name. It is no operator, so modes do not see it."""
    return torch._C._profiler._RecordFunctionFast(f"forall.{name}")
