"""Cache keys: the kind of a call, by its arguments and the state of torch."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import (
    are_deterministic_algorithms_enabled,
    get_default_dtype,
    is_anomaly_enabled,
    is_deterministic_algorithms_warn_only_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from forall._compat.devices import (
    accelerator,
    any_function_modes,
    current_device,
    default_device,
    function_modes,
)
from forall._compat.dispatch_state import (
    autocast_state,
    dispatch_modes,
    in_torch_func,
    is_autocast,
    users_tangents,
)
from forall._compat.native_guards import alike, state
from forall._compat.private_api import PLAIN, hooks_on_saved
from forall._core.levels import stack
from forall._jit.guards.codegen import Tests
from forall._jit.guards.identity import EXACT, Reading, Unfit
from forall._jit.static_args import Static

if TYPE_CHECKING:
    from collections.abc import Sequence

_place = attrgetter("_cdata")
_own = attrgetter("__dict__")
_offset = torch.Tensor.storage_offset


def of_leaf(x: Any) -> Any:
    """The key of an argument: its value, or a tensor's metadata and attributes without its data."""
    kind = type(x)
    if kind in PLAIN:
        if x.layout is not torch.strided or x.is_quantized or x.is_nested:
            raise Unfit(f"an argument of layout {'nested' if x.is_nested else x.layout}")
        return (
            kind,
            _attributes(x),
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            x.requires_grad,
            x.storage_offset(),
            x.is_conj(),
            x.is_neg(),
            x.is_inference(),
        )
    if kind in EXACT:
        return kind, x
    if kind is float and x == x:  # noqa: PLR0124 - not nan; `Reading` says as much, for more
        return kind, repr(x)
    if isinstance(x, torch.Tensor):
        raise Unfit(f"an argument of class {kind.__name__}")
    return x.key if kind is Static else Reading().leaf(x)


def _attributes(x: torch.Tensor) -> tuple:
    """The key of the attributes that the user has set on a tensor."""
    if not x.__dict__:
        return ()
    reading = Reading()
    found = tuple([(name, reading.value(value)) for name, value in x.__dict__.items()])
    if reading.objects or reading.changes():
        raise Unfit("an argument with an attribute that may change: " + ", ".join(x.__dict__))
    return found


# Tests that no transform, mode or tracer is active around a call.
FREE = Tests(
    [
        "stack.top is None",
        "not dispatch_modes()",
        "(not any_function_modes() or not function_modes())",
        "(forward_ad._current_level < 0 or not users_tangents())",
        "not in_torch_func()",
        "not is_dynamo_compiling()",
        "not is_anomaly_enabled()",  # it raises errors that no program raises
        "not hooks_on_saved()",  # the user's hooks see each tensor that is saved
    ],
    {
        "stack": stack,
        "dispatch_modes": dispatch_modes,
        "any_function_modes": any_function_modes,
        "function_modes": function_modes,
        "forward_ad": forward_ad,
        "users_tangents": users_tangents,
        "in_torch_func": in_torch_func,
        "is_dynamo_compiling": is_dynamo_compiling,
        "is_anomaly_enabled": is_anomaly_enabled,
        "hooks_on_saved": hooks_on_saved,
    },
)
is_free = FREE.written_out()


def ambient() -> tuple:
    """The state of torch that operators depend on, as part of a key."""
    return (
        is_grad_enabled(),
        is_inference_mode_enabled(),
        autocast_state() if is_autocast() else None,
        get_default_dtype(),
        default_device(),
        current_device(),
        are_deterministic_algorithms_enabled(),
        is_deterministic_algorithms_warn_only_enabled(),
    )


def kind_of(outline: Any, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The cache key of a call; ``tensors`` are those among the leaves."""
    kind = (outline, *map(of_leaf, leaves), *ambient())
    return (kind, _shared(tensors)) if len(tensors) > 1 else kind


def like(outline: Any, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Tests | None:
    """Return fast tests, mostly in C, that another call has the key of this one; None if none fit.

    The tests are of ``outline, leaves, tensors``. True is certain; False is not.
    """
    looks = alike(tensors)
    if (tensors and looks is None) or len(leaves) != len(tensors) or any(map(_own, tensors)):
        return None
    given = {"known": outline, "state": state(), "inference": is_inference_mode_enabled}
    tests = ["outline == known", "len(tensors) == len(leaves)", "state()"]
    tests.append(f"inference() is {is_inference_mode_enabled()}")
    if default_device() is None:
        tests.append("not modes()")
        given["modes"] = any_function_modes
    else:
        tests.append("device() == set")
        given |= {"device": default_device, "set": default_device()}
    if accelerator() is not None:
        given |= {"current": current_device, "index": current_device()}
        tests.append("current() == index")
    if tensors:
        given |= {"looks": looks, "offset": _offset, "begin": [*map(_offset, tensors)]}
        given |= {"own": _own, "map": map, "any": any}
        tests += ["looks(*tensors)", "[*map(offset, tensors)] == begin"]
        tests.append("not any(map(own, tensors))")
    if len(tensors) > 1:
        given |= {"shared": _shared, "places": _shared(tensors)}
        tests.append("shared(tensors) == places")
    return Tests(tests, given)


def _shared(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each argument, the first one with the same memory and the first that is the same tensor.

    Empty if no arguments share memory.
    """
    places = [*map(_place, map(torch.Tensor.untyped_storage, tensors))]
    if len({*places}) == len(places):
        return ()
    same = [*map(id, tensors)]
    return (*map(places.index, places), *map(same.index, same))
