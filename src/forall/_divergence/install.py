"""Installs the interface to vmap that the runtime uses, and ``x.item()`` inside vmap."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.wrapper_tensor import Wrapper
from forall._divergence import (
    aliases,
    scalar_factories,  # noqa: F401 - torch.tensor(n)
    scalar_numpy,
    scalar_torch,
    varying_slices,  # noqa: F401 - x[n:m]
)
from forall._divergence.batched_scalar import BatchedScalar, read_scalar
from forall._divergence.scalar_math import BUILTINS, MATH
from forall._divergence.vmap_interface import VmapInterface, install_interface, interface
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


class _Vmap:
    Tensor = torch.Tensor
    BatchedScalar = BatchedScalar
    UndefinedForExamples: type[BaseException] = active_mask.UndefinedForExamples
    get_active_set = staticmethod(active_mask.get_active_set)
    run_active_set = active_mask.run_active_set
    evaluate_users_test = staticmethod(active_mask.evaluate_users_test)
    evaluate_test = staticmethod(active_mask.evaluate_test)
    join_tensors = staticmethod(active_mask.join_tensors)
    join_numbers = staticmethod(active_mask.join_numbers)
    run_per_group = staticmethod(run_per_group)
    find_alias_family = staticmethod(find_alias_family)
    is_partial_name = staticmethod(is_partial_name)
    make_new_name = staticmethod(active_mask.make_new_name)
    take_written_families = staticmethod(take_written_families)
    write_examples = staticmethod(active_mask.write_examples)
    call_torch = staticmethod(scalar_torch.call_with_numbers)
    call_numpy = staticmethod(scalar_numpy.call_numpy_on_scalars)
    operate_with_tensor = staticmethod(scalar_torch.operate_with_tensor)
    operate_with_array = staticmethod(scalar_numpy.operate_with_array)
    # The analysis is in a package above, which may have set it before or will set it later.
    find_pure_bindings = staticmethod(interface.find_pure_bindings)

    @staticmethod
    def convert_number(n: Any, kind: type, /) -> Any:
        return BUILTINS[kind](n)

    @staticmethod
    def call_math(f: Any, args: tuple, kwargs: dict, /) -> Any:
        return (BUILTINS if f in BUILTINS else MATH)[f](*args, **kwargs)


_vmap: VmapInterface = _Vmap()
install_interface(_vmap)
ALIAS_UPDATES.append(aliases.propagate_writes)
