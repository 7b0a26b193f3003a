"""The state of torch's own random generators, so that draws can be made once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def states(tensors: Iterable[Any]) -> dict[torch.device, torch.Tensor]:
    """The state on the CPU and on every device that one of these tensors lies on."""
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda}
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return {
            torch.device("cpu"): torch.get_rng_state(),
            **{d: torch.cuda.get_rng_state(d) for d in devices},
        }


def restore(saved: dict[torch.device, torch.Tensor]) -> None:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for device, state in saved.items():
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
