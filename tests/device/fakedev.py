"""A device of CPU memory under another name, which shows what differs on an accelerator.

NOTE [a device for the whole process]
    Torch has room for one such device, its name holds for the process, and autograd starts the
    device's threads with the first backward pass of all. So `load` comes before any of them, in a
    process of its own: tests on the device run with FORALL_DEVICE=fakedev, beside no others.

The library is built where it is first needed, into build/, once for a version of torch and of
fakedev.cpp. `waits` counts where the host would wait for a real device, and `sent` the tensors that
go to it from the host.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

NAME = "fakedev"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILDS = Path(__file__).parents[2] / "build" / NAME
_ops = torch.ops.fakedev


def why_not() -> str | None:
    """Why the library cannot be built on this machine; None if it can."""
    if not sys.platform.startswith("linux"):
        return "fakedev is built on Linux alone"
    return None if shutil.which("g++") else "fakedev is built by g++, which is not installed"


def build() -> Path:
    """Return the library, built if it was not; one process builds while others wait for it."""
    home = Path(torch.__file__).parent
    include = home / "include"
    command = [
        *("g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-DAT_PER_OPERATOR_HEADERS"),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE)),
        *(f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    library = BUILDS / f"{torch.__version__}-{key}.so"
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            subprocess.run([*command, "-o", str(part)], check=True)
            part.rename(library)
    return library


def load() -> None:
    """Give torch the device, once. See NOTE [a device for the whole process]."""
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)


def _module() -> types.ModuleType:
    """`torch.fakedev`, with what torch and its users ask of `torch.cuda`."""
    module = types.ModuleType(f"torch.{NAME}")
    generators = tuple(_ops.default_generator(i) for i in range(2))

    def index(device: torch.device | str | int | None) -> int:
        if isinstance(device, int):
            return device
        i = None if device is None else torch.device(device).index
        return current() if i is None else i

    def current() -> int:
        with torch._C._DisableTorchDispatch():  # no operator, to those who watch them
            return _ops.current()

    def set_device(device: torch.device | str | int) -> None:
        i = index(device)
        with torch._C._DisableTorchDispatch():
            _ops.set_current(i)

    @contextmanager
    def on(device: torch.device | str | int) -> Iterator[None]:
        was = current()
        set_device(device)
        try:
            yield
        finally:
            set_device(was)

    def manual_seed_all(seed: int) -> None:
        for g in generators:
            g.manual_seed(seed)

    def get_rng_state(device: torch.device | str | int | None = NAME) -> torch.Tensor:
        return generators[index(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: torch.device | str | int | None = NAME) -> None:
        generators[index(device)].set_state(state)

    vars(module).update(
        default_generators=generators,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # or torch's checkpoints keep no state of its generators
        device_count=lambda: len(generators),
        current_device=current,
        device=on,
        set_device=set_device,
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: generators[current()].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        synchronize=lambda device=None: None,
        empty_cache=torch.accelerator.empty_cache,
    )
    return module


def waits() -> int:
    """How often the host has waited for the device so far."""
    return _ops.waits()


def sent() -> int:
    """How many tensors have gone from the host to the device so far."""
    return _ops.sent()


def emptied() -> int:
    """How often the allocator's cache has been emptied so far."""
    return _ops.emptied()


def lost() -> int:
    """How often a kernel's failed assertion would have ended the use of the device so far."""
    return _ops.lost()


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host would wait for the device, at that call."""
    was = _ops.forbid(True)
    try:
        yield
    finally:
        _ops.forbid(was)


@contextmanager
def limited(spare: int) -> Iterator[None]:
    """Let so many bytes be taken beyond those that are; more raises torch.OutOfMemoryError."""
    _ops.limit(_ops.live() + spare)
    try:
        yield
    finally:
        _ops.limit(0)


def is_asked_for() -> bool:
    """Whether this process runs its tests on the device."""
    return os.environ.get("FORALL_DEVICE") == NAME
