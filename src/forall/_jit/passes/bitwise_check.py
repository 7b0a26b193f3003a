"""Bitwise checks: trials on random data that other operators give the same bits.

NOTE [the same bits]
    The order in which a product of matrices is summed is not documented. It depends on shapes,
    strides, dtypes and the number of threads, never on the data. So if some hundred entries, each
    with its own rounding, have the same bits, all have. This tells whether a product of matrices
    with other strides, or one that begins with a bias, adds in the same order.

    Kernels of bfloat16 and float16 sum in float32 and round at the end, so that two orders differ
    in one entry of some thousands. Trials cannot tell them apart, and the answer is no.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import disable_autocast, is_autocast, without_history
from forall._compat.exception_safety import contextmanager
from forall._jit.cache.call_key import read_torch_state
from forall._jit.passes.cse import freeze_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forall._jit.graph import Layout, OpNode, Value

_ENTRIES = 256  # the fewest entries, of each operand and of the result, in all trials
_TRIALS = 32  # the most trials; where they would have too few entries, the answer is no
_KEPT = 1024  # answers that are kept: layers of one kind have the same trials
_MOST = 1 << 16  # entries of the largest tensor in a trial, which computes both sides
_CPU = torch.device("cpu")
_DTYPES = frozenset({torch.float32, torch.float64})


def can_try_bits(values: Sequence[Value], nodes: Sequence[OpNode]) -> bool:
    """True if these operators have small float32 or float64 tensors on the CPU alone."""
    layouts = [values[n].layout for node in nodes for n in (*node.reads(), *node.makes())]
    return all(x.device == _CPU and x.dtype in _DTYPES and prod(x.shape) <= _MOST for x in layouts)


def have_same_bits(values: Sequence[Value], old: Sequence[OpNode], new: Sequence[OpNode]) -> bool:
    """True if trials of ``old`` and of ``new`` give the same bits as their last result."""
    if not can_try_bits(values, (*old, *new)):
        return False
    try:
        key = _make_trial_key(values, old, new)
    except TypeError:
        return _run_trials(values, old, new)
    if key not in _known:
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = _run_trials(values, old, new)
    return _known[key]


_known: dict[Any, bool] = {}


def _make_trial_key(values: Sequence[Value], old: Sequence[OpNode], new: Sequence[OpNode]) -> Any:
    """The key of a trial: operators, layouts, threads, and the state of torch."""
    numbers: dict[int, int] = {}

    def of_value(n: int) -> Any:
        return numbers.setdefault(n, len(numbers)), values[n].layout

    lines = [
        (node.op, freeze_arguments((node.args, node.kwargs), of_value), of_value(node.outs))
        for node in (*old, *new)
    ]
    return len(old), *lines, torch.get_num_threads(), read_torch_state()


def _run_trials(values: Sequence[Value], old: Sequence[OpNode], new: Sequence[OpNode]) -> bool:
    made = {n for node in (*old, *new) for n in node.makes()}
    given = {n for node in (*old, *new) for n in node.reads()} - made
    layouts = {n: values[n].layout for n in given}
    fewest = min(prod(values[n].layout.shape) for n in (*given, old[-1].outs))
    trials = -(-_ENTRIES // max(fewest, 1))
    if trials > _TRIALS:
        return False
    random = torch.Generator().manual_seed(0)
    with disable_grad_and_casts():
        for _ in range(trials):
            env = {n: _make_random(layout, random) for n, layout in layouts.items()}
            if not torch.equal(*(_run_nodes(nodes, env) for nodes in (old, new))):
                return False
    return True


@contextmanager
def disable_grad_and_casts() -> Iterator[None]:
    """Return a context within which operators run without autograd and autocast."""
    with without_history(), torch.no_grad():
        with disable_autocast() if is_autocast() else nullcontext():
            yield


def _make_random(layout: Layout, random: torch.Generator) -> torch.Tensor:
    shape, strides, offset, dtype, *_ = layout
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    # Random doubles, cast if need be: entries with few bits would have exact products.
    memory = torch.randn(offset + reach, generator=random, dtype=torch.float64).to(dtype)
    return memory.as_strided(shape, strides, offset)


def _run_nodes(nodes: Sequence[OpNode], given: dict[int, torch.Tensor]) -> torch.Tensor:
    env = dict(given)
    for node in nodes:
        node.run(env)
    return env[nodes[-1].outs].contiguous().view(torch.uint8)
