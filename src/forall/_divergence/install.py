"""Installs the interface to vmap that the runtime uses, and ``x.item()`` inside vmap."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.wrapper_tensor import Wrapper
from forall._divergence import (
    aliases,
    scalar_factories,  # noqa: F401 - torch.tensor(n)
    scalar_numpy,  # noqa: F401 - np.sin(n)
    scalar_torch,
    varying_slices,  # noqa: F401 - x[n:m]
)
from forall._divergence.batched_scalar import BatchedScalar, read_scalar
from forall._divergence.scalar_math import BUILTINS, MATH
from forall._divergence.vmap_interface import install_interface, words
from forall._vmap.active_set import active_mask
from forall._vmap.active_set.rerun import run_per_group
from forall._vmap.concretize import get_plain_numbers, read_answers
from forall._vmap.mutation.mutation_log import take_written_families
from forall._vmap.mutation.view_copies import ALIAS_UPDATES, find_alias_family, is_partial_name
from forall._vmap.registry import CALLS


def _read_item(x: torch.Tensor) -> Any:
    """Return ``x.item()``: one Python number if all examples agree, else a `BatchedScalar`."""
    if not isinstance(x, Wrapper) or x.numel() != 1:
        return NotImplemented
    if not x.dim() and get_plain_numbers(x) is not None and x.level.config.diverges:
        return read_scalar(x)
    _, levels = read_answers(x)
    if not levels or not all(
        level.config.diverges and level.active and level.size for level in levels
    ):
        return NotImplemented
    return read_scalar(x.detach().reshape(()))


CALLS[torch.Tensor.item] = _read_item
install_interface(
    now=active_mask.get_active_set,
    asked=active_mask.evaluate_users_test,
    running=active_mask.run_active_set,
    joined=active_mask.join_tensors,
    undefined=active_mask.UndefinedForExamples,
    apart=run_per_group,
    tensor=torch.Tensor,
    number=BatchedScalar,
    again=active_mask.evaluate_test,
    told=active_mask.join_numbers,
    memory=find_alias_family,
    views=is_partial_name,
    renamed=active_mask.make_new_name,
    changed=take_written_families,
    put=active_mask.write_examples,
)
words.mean = scalar_torch.call_with_numbers
words.convert = lambda n, kind: BUILTINS[kind](n)
words.calculate = lambda f, args, kwargs: MATH[f](*args, **kwargs)
ALIAS_UPDATES.append(aliases.propagate_writes)
