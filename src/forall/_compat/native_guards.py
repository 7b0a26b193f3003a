"""Whether dicts and tensors are what they were, asked in C: torch has such questions for its own.

Each answers yes only where nothing has changed; a no says nothing.
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
# A number that is another one after each write into a dict, if `is_counted`.
writes_into = torch._C._dynamo.guards.dict_version


class _Object:
    """Of whose attributes Python may tell nobody that they are written."""


def _counts_attributes() -> bool:
    thing = _Object()
    thing.attribute = 0
    before = writes_into(vars(thing))
    thing.attribute = 1
    return writes_into(vars(thing)) != before


# Not in Python 3.13: what an object's `__dict__` holds may lie in the object itself, and is written
# to there.
COUNTS_ATTRIBUTES = _counts_attributes()


def beneath(names: Mapping) -> Any:
    """The dict that is written to where a class gets an attribute, or another mapping itself."""
    return gc.get_referents(names)[0] if type(names) is MappingProxyType else names


def is_counted(names: Mapping) -> bool:
    """Return True if `writes_into` tells of each write into these names.

    Where it misses attributes, a dict may be an object's; that of a module or a class is not.
    """
    if type(beneath(names)) is not dict:
        return False
    if COUNTS_ATTRIBUTES or type(names) is MappingProxyType:
        return True
    name = names.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    return isinstance(module, ModuleType) and vars(module) is names


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """What tells of others in the place of these tensors whether they are like them.

    That is class, shape, strides, dtype, device, whether they require grad, and the conj and neg
    bits.
    """
    if not all(map(has_memory, tensors)):
        return None  # it asks each for its strides
    sizes, strides = (
        [[*of(t)] for t in tensors] for of in (torch.Tensor.size, torch.Tensor.stride)
    )
    look = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    if torch.is_grad_enabled():
        return look
    needs = [*map(_needs, tensors)]  # under `no_grad` it takes none to require grad
    return lambda *others: look(*others) and [*map(_needs, others)] == needs


def state() -> Callable[[], bool]:
    """Tells whether torch's state is what it is now, but for inference mode.

    That is grad mode, autocast, default dtype and determinism; of others it may say no.
    """
    return torch._C._dynamo.guards.GlobalStateGuard().check
