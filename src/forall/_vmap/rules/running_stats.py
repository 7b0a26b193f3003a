"""Overrides of norms whose updates of running statistics no operator's rule can express.

``BatchNorm(momentum=None)`` averages over all calls: it reads the number of calls as a Python
number, which differs between the examples. Torch's instance norm writes the mean of statistics of
copies. Both are replaced: the norm runs on new statistics, and then the running ones are updated.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from forall._compat.devices import PASSES_ON
from forall._compat.dispatch_state import functions_off
from forall._compat.private_api import BATCH_NORM
from forall._vmap.function_mode import VmapFunctionMode
from forall._vmap.mutation.pending_updates import (
    find_logging_level,
    is_shared_external,
    update_average,
)
from forall._vmap.registry import CALLS
from forall._vmap.rule_makers.basic import is_mapped

if TYPE_CHECKING:
    from types import CodeType

Tensor = torch.Tensor


def _float(counter: Tensor) -> Any:
    """Override float(num_batches_tracked), which the module calls right before batch_norm."""
    level = find_logging_level()
    if level is None or not _is_called_from(BATCH_NORM):
        return NotImplemented
    if not (is_shared_external(counter, level) or is_mapped(counter, level)):
        return NotImplemented
    level.state.batch_count = counter
    return 1.0


def _is_called_from(code: CodeType) -> bool:
    """True if the overridden API call was made by code ``code``."""
    frame = sys._getframe(2)
    while frame is not None and (
        frame.f_globals.get("__name__") == VmapFunctionMode.__module__ or frame.f_code is PASSES_ON
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _batch_norm(x: Tensor, running_mean: Any, running_var: Any, *args: Any, **kwargs: Any) -> Any:
    level = find_logging_level()
    counter = None if level is None else level.state.batch_count
    if counter is None:
        return NotImplemented
    level.state.batch_count = None
    with functions_off():
        own = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        out = F.batch_norm(x, *own, *args, **kwargs)  # momentum 1: own are the batch's statistics
        with torch.no_grad():
            for running, batch in zip((running_mean, running_var), own, strict=True):
                if is_shared_external(running, level):
                    update_average(running, batch, counter)
                else:
                    running.add_((batch - running) / counter)
    return out


def _instance_norm(
    x: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if running_mean is None or not use_input_stats:
        return NotImplemented
    with functions_off():
        own = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        out = F.instance_norm(x, *own, weight, bias, True, 1.0, eps)
        with torch.no_grad():
            for running, batch in zip((running_mean, running_var), own, strict=True):
                running.mul_(1 - momentum).add_(batch, alpha=momentum)
    return out


CALLS.update({Tensor.__float__: _float, F.batch_norm: _batch_norm, F.instance_norm: _instance_norm})
