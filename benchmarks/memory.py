"""Peak memory of a program, as the allocator sees it.

The allocator is the one place that counts the same for every contestant, whatever tensor
subclasses, modes or C++ code the memory was requested through.
"""

import gc

import torch
from torch.profiler import ProfilerActivity, profile

from registry import Program

# Tensors caught in reference cycles outlive the call that made them. Several calls in a row,
# with the garbage collector left to its own timing, let those count towards the peak.
CALLS = 3


def peak_bytes(program: Program, device: torch.device) -> int:
    """The most bytes held at once during CALLS calls, above what was held before."""
    gc.collect()
    if device.type == "cuda":
        return _peak_cuda(program, device)
    return _peak_cpu(program)


def _peak_cuda(program: Program, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(CALLS):
        program()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(program: Program) -> int:
    """Add up the profiler's allocations and releases in order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        for _ in range(CALLS):
            program()
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    events = prof.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()  # pyright: ignore[reportAttributeAccessIssue]: torch's stub lacks it
        peak = max(peak, held)
    if peak == 0:
        raise RuntimeError("the profiler recorded no allocation")
    return peak
