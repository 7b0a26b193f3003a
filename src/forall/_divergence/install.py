"""Installs the interface to vmap that the runtime uses, and ``x.item()`` inside vmap."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.wrapper_tensor import Wrapper
from forall._divergence import (
    aliases,
    scalar_torch,
)
from forall._divergence.batched_scalar import Number, number
from forall._divergence.scalar_math import BUILTINS, MATH
from forall._divergence.vmap_interface import use, words
from forall._vmap.active_set import active_mask
from forall._vmap.active_set.rerun import apart
from forall._vmap.concretize import answers, plain_numbers
from forall._vmap.mutation.mutation_log import changed
from forall._vmap.mutation.view_copies import FOLLOWING, memory_of, views
from forall._vmap.registry import CALLS


def _item(x: torch.Tensor) -> Any:
    """Return ``x.item()``: one Python number if all examples agree, else a `Number`."""
    if not isinstance(x, Wrapper) or x.numel() != 1:
        return NotImplemented
    if not x.dim() and plain_numbers(x) is not None and x.level.parts:
        return number(x)
    _, levels = answers(x)
    if not levels or not all(level.parts and level.active and level.size for level in levels):
        return NotImplemented
    return number(x.detach().reshape(()))


CALLS[torch.Tensor.item] = _item
use(
    now=active_mask.now,
    asked=active_mask.question,
    running=active_mask.running,
    joined=active_mask.joined,
    undefined=active_mask.Undefined,
    apart=apart,
    tensor=torch.Tensor,
    number=Number,
    again=active_mask.asked,
    told=active_mask.told,
    memory=memory_of,
    views=views,
    renamed=active_mask.renamed,
    changed=changed,
    put=active_mask.put,
)
words.mean = scalar_torch.called
words.convert = lambda n, kind: BUILTINS[kind](n)
words.calculate = lambda f, args, kwargs: MATH[f](*args, **kwargs)
FOLLOWING.append(aliases.follow)
