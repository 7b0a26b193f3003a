"""Rule of ``copy_``."""

from __future__ import annotations

import torch

from forall._vmap.mutation.in_place import level_write
from forall._vmap.registry import register

aten = torch.ops.aten


def _copy(level, func, args, kwargs):
    return level_write(level, func, [args[0]], [args[1]])


register({aten.copy_.default: _copy})
