"""Overrides of ``out=`` forms of composite functions that inspect the memory of ``out``.

They write into a view of ``out`` and check that it is a view, or that ``out`` is no subclass. For
wrapper tensors these checks give wrong answers. So the result is computed first, then written.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.registry import OUTS

aten = torch.ops.aten


def _make_out_call(func: Any) -> Any:
    def call(*args: Any, out: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if torch.can_cast(result.dtype, out.dtype):
            result = result.to(out.dtype)
        return aten.clone.out(result, out=out)

    return call


OUTS.update(
    {func: _make_out_call(func) for func in (torch.kron, torch.linalg.matrix_rank, torch.matmul)}
)
