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
    count_all_function_modes,
    count_function_modes,
    find_default_device,
    get_accelerator,
    get_current_device,
)
from forall._compat.dispatch_state import (
    get_autocast_state,
    has_users_tangents,
    in_torch_func,
    is_autocast,
    is_torch_func_value,
)
from forall._compat.native_guards import make_state_check, make_tensor_check
from forall._compat.private_api import PLAIN, count_dispatch_modes, hooks_on_saved
from forall._core.bound_meshes import bound
from forall._core.levels import stack
from forall._jit.guards.codegen import GuardTests
from forall._jit.guards.identity import EXACT_CLASSES, KeyMaker, UnfitArgument
from forall._jit.static_args import StaticBox

if TYPE_CHECKING:
    from collections.abc import Sequence

_place = attrgetter("_cdata")
_own = attrgetter("__dict__")
_offset = torch.Tensor.storage_offset


def make_argument_key(x: Any) -> Any:
    """The key of an argument: its value, or a tensor's metadata and attributes without its data."""
    kind = type(x)
    if kind in PLAIN:
        if x.layout is not torch.strided or x.is_quantized or x.is_nested:
            raise UnfitArgument(f"an argument of layout {'nested' if x.is_nested else x.layout}")
        if is_torch_func_value(x):
            raise UnfitArgument("an argument that a transform of torch.func has left")
        return (
            kind,
            _make_attribute_key(x),
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
    if kind in EXACT_CLASSES:
        return kind, x
    if kind is float and x == x:  # noqa: PLR0124 - not nan; `KeyMaker` says as much, for more
        return kind, repr(x)
    if isinstance(x, torch.Tensor):
        raise UnfitArgument(f"an argument of class {kind.__name__}")
    return x.key if kind is StaticBox else KeyMaker().make_leaf_key(x)


def _make_attribute_key(x: torch.Tensor) -> tuple:
    """The key of the attributes that the user has set on a tensor."""
    if not x.__dict__:
        return ()
    reading = KeyMaker()
    found = tuple([(name, reading.make_key(value)) for name, value in x.__dict__.items()])
    if reading.objects or reading.has_mutable():
        raise UnfitArgument(
            "an argument with an attribute that may change: " + ", ".join(x.__dict__)
        )
    return found


# Tests that no transform, mode or tracer is active around a call.
FREE_TESTS = GuardTests(
    [
        "stack.top is None",
        "not dispatch_modes()",
        "(not any_function_modes() or not function_modes())",
        "(forward_ad._current_level < 0 or not users_tangents())",
        "not in_torch_func()",
        "not is_dynamo_compiling()",
        "not is_anomaly_enabled()",  # it raises errors that no program raises
        "not hooks_on_saved()",  # the user's hooks see each tensor that is saved
        "not bound.meshes",  # collectives would communicate over these
    ],
    {
        "stack": stack,
        "dispatch_modes": count_dispatch_modes,
        "any_function_modes": count_all_function_modes,
        "function_modes": count_function_modes,
        "forward_ad": forward_ad,
        "users_tangents": has_users_tangents,
        "in_torch_func": in_torch_func,
        "is_dynamo_compiling": is_dynamo_compiling,
        "is_anomaly_enabled": is_anomaly_enabled,
        "hooks_on_saved": hooks_on_saved,
        "bound": bound,
    },
)
is_free = FREE_TESTS.compile_tests()


def read_torch_state() -> tuple:
    """The state of torch that operators depend on, as part of a key."""
    return (
        is_grad_enabled(),
        is_inference_mode_enabled(),
        get_autocast_state() if is_autocast() else None,
        get_default_dtype(),
        find_default_device(),
        get_current_device(),
        are_deterministic_algorithms_enabled(),
        is_deterministic_algorithms_warn_only_enabled(),
    )


def make_call_key(outline: Any, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The cache key of a call; ``tensors`` are those among the leaves."""
    kind = (outline, *map(make_argument_key, leaves), *read_torch_state())
    return (kind, _find_shared_memory(tensors)) if len(tensors) > 1 else kind


def make_fast_tests(
    outline: Any, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> GuardTests | None:
    """Return fast tests, mostly in C, that another call has the key of this one; None if none fit.

    The tests are of ``outline, leaves, tensors``. True is certain; False is not.
    """
    looks = make_tensor_check(tensors)
    if (tensors and looks is None) or len(leaves) != len(tensors) or any(map(_own, tensors)):
        return None
    given = {"known": outline, "state": make_state_check(), "inference": is_inference_mode_enabled}
    tests = ["outline == known", "len(tensors) == len(leaves)", "state()"]
    tests.append(f"inference() is {is_inference_mode_enabled()}")
    if find_default_device() is None:
        tests.append("not modes()")
        given["modes"] = count_all_function_modes
    else:
        tests.append("device() == set")
        given |= {"device": find_default_device, "set": find_default_device()}
    if get_accelerator() is not None:
        given |= {"current": get_current_device, "index": get_current_device()}
        tests.append("current() == index")
    if tensors:
        given |= {"looks": looks, "offset": _offset, "begin": [*map(_offset, tensors)]}
        given |= {"own": _own, "map": map, "any": any}
        tests += ["looks(*tensors)", "[*map(offset, tensors)] == begin"]
        tests.append("not any(map(own, tensors))")
    if len(tensors) > 1:
        given |= {"shared": _find_shared_memory, "places": _find_shared_memory(tensors)}
        tests.append("shared(tensors) == places")
    return GuardTests(tests, given)


def _find_shared_memory(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each argument, the first one with the same memory and the first that is the same tensor.

    Empty if no arguments share memory.
    """
    places = [*map(_place, map(torch.Tensor.untyped_storage, tensors))]
    if len({*places}) == len(places):
        return ()
    same = [*map(id, tensors)]
    return (*map(places.index, places), *map(same.index, same))
