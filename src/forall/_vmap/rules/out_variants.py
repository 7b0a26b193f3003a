"""out= of functions that torch puts together from others, and that go by memory on the way.

They write into a view of ``out`` and ask whether it is one, or whether ``out`` is a subclass; about
our wrappers they are mistaken. So the result is computed, and written.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.registry import OUTS

aten = torch.ops.aten


def _by_result(func: Any) -> Any:
    def call(*args: Any, out: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if torch.can_cast(result.dtype, out.dtype):
            result = result.to(out.dtype)
        return aten.clone.out(result, out=out)

    return call


OUTS.update(
    {func: _by_result(func) for func in (torch.kron, torch.linalg.matrix_rank, torch.matmul)}
)
