"""Fast checks in C that dicts and tensors have not changed, by Dynamo's guards.

A check that holds proves that nothing has changed; one that fails proves nothing.
"""

from __future__ import annotations

import gc
import sys
from operator import attrgetter
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.storage import has_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_needs = attrgetter("requires_grad")
# The version of a dict, which each write into it changes, if `is_versioned`.
get_dict_version = torch._C._dynamo.guards.dict_version


class _Probe:
    """A class to find out whether writes of attributes change a dict's version."""


def _counts_attributes() -> bool:
    thing = _Probe()
    thing.attribute = 0
    before = get_dict_version(vars(thing))
    thing.attribute = 1
    return get_dict_version(vars(thing)) != before


# Not in Python 3.13: what an object's `__dict__` holds may lie in the object itself, and is written
# to there.
COUNTS_ATTRIBUTES = _counts_attributes()


def get_written_dict(names: Mapping) -> Any:
    """Return the dict that a class's attributes are written into; another mapping itself."""
    return gc.get_referents(names)[0] if type(names) is MappingProxyType else names


def is_versioned(names: Mapping) -> bool:
    """Return True if each write into these names changes their version.

    In a Python that does not count writes of attributes, that is the dict of a module or a class.
    """
    if type(get_written_dict(names)) is not dict:
        return False
    if COUNTS_ATTRIBUTES or type(names) is MappingProxyType:
        return True
    name = names.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return isinstance(module, ModuleType) and vars(module) is names


def make_tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a check that other tensors match these; None if there is no such check.

    It compares class, shape, strides, dtype, device, whether they require grad, and the conj and
    neg bits.
    """
    if not all(map(has_memory, tensors)):
        return None  # the check reads the strides of each
    sizes, strides = (
        [[*of(t)] for t in tensors] for of in (torch.Tensor.size, torch.Tensor.stride)
    )
    look = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    if torch.is_grad_enabled():
        return look
    needs = [*map(_needs, tensors)]  # under `no_grad` the check ignores `requires_grad`
    return lambda *others: look(*others) and [*map(_needs, others)] == needs


def make_state_check() -> Callable[[], bool]:
    """Return a check that torch's state is the same as now, but for inference mode.

    It compares grad mode, autocast, default dtype and determinism. It may fail for other changes
    too.
    """
    return torch._C._dynamo.guards.GlobalStateGuard().check
