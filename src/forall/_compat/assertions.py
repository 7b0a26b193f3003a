"""Assertions about data that raise an ordinary Python error on every device.

NOTE [assertions of a device]
    `torch._assert_async` raises on the CPU. On an accelerator it is a kernel that nobody waits for,
    and its failure ends the use of the device by the whole process. So the host reads the answer
    there, as torch's own operators do when they check data. The read is one operator, so that each
    level unwraps its values for it, and a recorded program makes the same test in each call.
"""

from __future__ import annotations

import torch

from forall._compat import trace_modes
from forall._compat.dispatch_state import functions_off, in_torch_func, no_dispatch
from forall._compat.wrapper_tensor import unwrap_all

_library = torch.library.Library("forall", "FRAGMENT")
_library.define("require(Tensor holds, str message) -> ()")
REQUIRE = torch.ops.forall.require.default
_HOLDS = torch.ops.aten._assert_async.msg


def require(holds: torch.Tensor, message: str) -> None:
    """Raise RuntimeError with this message unless a yes or no holds for every example."""
    (_HOLDS if raises_on_host(holds) else REQUIRE)(holds, message)


def raises_on_host(t: torch.Tensor) -> bool:
    """Return True if torch's own assertion serves: it raises on the host, or a tracer records it.

    A CUDA graph that the user captures cannot be waited for.
    """
    t = unwrap_all(t)
    return (
        t.is_cpu
        or t.is_meta
        or trace_modes.is_tracer_on()
        or in_torch_func()
        or torch.compiler.is_dynamo_compiling()
        or (t.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _read(holds: torch.Tensor, message: str) -> None:
    with no_dispatch(), functions_off():
        answer = bool(holds)
    if not answer:
        raise RuntimeError(message)


def _none(holds: torch.Tensor, message: str) -> None:
    """A tensor of the meta device has no numbers."""


_library.impl("require", _read, "CompositeExplicitAutograd")
_library.impl("require", _none, "Meta")
