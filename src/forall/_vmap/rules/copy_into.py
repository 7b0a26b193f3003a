"""Rule of ``copy_``."""

from __future__ import annotations

import torch

from forall._vmap.mutation.in_place import write_all
from forall._vmap.registry import register_rows

aten = torch.ops.aten


def _copy(level, func, args, kwargs):
    return write_all(level, func, [args[0]], [args[1]])


register_rows({aten.copy_.default: _copy})
