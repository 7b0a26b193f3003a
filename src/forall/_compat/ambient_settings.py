"""torch's settings of a thread or the process that code which runs later depends on."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.devices import find_default_device, override_default_device
from forall._compat.dispatch_state import get_autocast_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class Setting(NamedTuple):
    """A setting of torch: ``get()`` reads it, ``under(value)`` is a context that sets it."""

    name: str
    get: Callable[[], Any]
    under: Callable[[Any], AbstractContextManager]


@contextmanager
def _set_temporarily(
    get: Callable[[], Any], put: Callable[[Any], None], value: Any
) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def _make_setting(name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> Setting:
    return Setting(name, get, partial(_set_temporarily, get, put))


def _make_c_setting(
    name: str, setter: str | None = None, *, several: bool = False
) -> Setting | None:
    """Return a flag of torch's C++, or None; ``several`` values are passed as arguments."""
    get = getattr(torch._C, f"_get_{name}", None)
    put = getattr(torch._C, setter or f"_set_{name}", None)
    if get is None or put is None:
        return None
    return _make_setting(name, get, (lambda value: put(*value)) if several else put)


@contextmanager
def set_autocast(wanted: tuple) -> Iterator[None]:
    """Set autocast for a block as `get_autocast_state` returned it."""
    now, then = dict(get_autocast_state()), dict(wanted)
    with ExitStack() as contexts:
        for device in now.keys() | then.keys():
            to = then.get(device)
            contexts.enter_context(torch.autocast(device, dtype=to, enabled=to is not None))
        yield


def _get_determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


# The names of float32's precision; one that is "none" inherits from the one before it.
_OF_PRECISION = [
    (backend, operators)
    for backend, several in {
        "generic": ["all"],
        "cuda": ["all", "matmul", "conv", "rnn"],
        "mkldnn": ["all", "matmul", "conv", "rnn"],
    }.items()
    for operators in several
]


_OF_CUDA = 5  # the first of these concern CUDA


def _get_precision() -> tuple[str | None, ...]:
    """Return the precision by torch's older name, and by each of the newer ones.

    The older name sets some of the newer ones, and none of these sets it.
    """
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # it contradicts one of the others
        older = None
    return (older, *(torch._C._get_fp32_precision_getter(*of) for of in _OF_PRECISION))


def _set_precision(value: tuple[str | None, ...]) -> None:
    older = _get_precision()[0]
    if older is not None and value[0] is not None and older != value[0]:
        torch.set_float32_matmul_precision(value[0])
    for of, wanted in zip(_OF_PRECISION, value[1:], strict=True):
        if torch._C._get_fp32_precision_getter(*of) != wanted:
            torch._C._set_fp32_precision_setter(*of, wanted)


_FASTPATH = _make_setting(
    "attention in one kernel",
    torch.backends.mha.get_fastpath_enabled,
    torch.backends.mha.set_fastpath_enabled,
)
# The kernels that attention and recurrent layers may use: recording a function chooses one.
_OF_KERNELS: list[Setting] = [
    s
    for s in (
        _make_c_setting("flash_sdp_enabled", "_set_sdp_use_flash"),
        _make_c_setting("mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        _make_c_setting("math_sdp_enabled", "_set_sdp_use_math"),
        _make_c_setting("cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        _make_c_setting("overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        _make_c_setting("fa3_sdp_enabled", "_set_sdp_use_fa3"),
        _make_c_setting("sdp_priority_order"),
        _make_c_setting("math_sdp_allow_fp16_bf16_reduction"),
        _FASTPATH,
        _make_c_setting("cudnn_enabled"),
        _make_c_setting("mkldnn_enabled"),
        _make_c_setting("nnpack_enabled"),
    )
    if s is not None
]
_OF_NUMBERS: list[Setting] = [
    s
    for s in (
        _make_setting("precision of float32", _get_precision, _set_precision),
        _make_c_setting("cublas_allow_fp16_reduced_precision_reduction", several=True),
        _make_c_setting("cublas_allow_bf16_reduced_precision_reduction", several=True),
        _make_c_setting("cublas_allow_fp16_accumulation"),
        _make_c_setting("cpu_allow_fp16_reduced_precision_reduction"),
        _make_c_setting("cudnn_benchmark"),
        _make_c_setting("cudnn_deterministic"),
        _make_c_setting("mkldnn_deterministic"),
        _make_c_setting("deterministic_fill_uninitialized_memory"),
    )
    if s is not None
]
SETTINGS: list[Setting] = [
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("autocast", get_autocast_state, set_autocast),
    _make_setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", find_default_device, override_default_device),
    _make_setting("determinism", _get_determinism, _set_determinism),
    *_OF_KERNELS,
    *_OF_NUMBERS,
]
_ASKED_OF_KERNELS = [s.get for s in _OF_KERNELS]
_ASKED_OF_NUMBERS = [
    *(partial(torch._C._get_fp32_precision_getter, *of) for of in _OF_PRECISION[:_OF_CUDA]),
    *(s.get for s in _OF_NUMBERS[1:]),
    torch.are_deterministic_algorithms_enabled,
]


def get_allowed_kernels() -> tuple:
    """Return the kernels that attention and recurrent layers may use, and their priorities."""
    return tuple([ask() for ask in _ASKED_OF_KERNELS])


def get_allowed_precision() -> tuple:
    """Return the settings that CUDA kernels are chosen by: precision, benchmarks, determinism.

    An operator reads them when it runs, compiled code and graphs when they are created.
    """
    return tuple([ask() for ask in _ASKED_OF_NUMBERS])


def read_settings() -> tuple:
    """Return the value of each setting."""
    return tuple([s.get() for s in SETTINGS])


@contextmanager
def apply_settings(values: tuple) -> Iterator[None]:
    """Apply the settings that `read_settings` returned for a block; equal ones are not touched."""
    with ExitStack() as contexts:
        for setting, value in zip(SETTINGS, values, strict=True):
            if setting.get() != value:
                contexts.enter_context(setting.under(value))
        yield
