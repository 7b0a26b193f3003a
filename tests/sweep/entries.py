"""What is swept: torch's op_db entries, their samples, and distinct values for each example."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from draws import HERE

EXAMPLES = 3
SCAN = 160  # how many samples of an entry are looked at to choose from
LARGEST = 20_000  # elements in all the tensors of one sample

# Results hold uninitialised memory: only shape and dtype mean anything.
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}

# These address their argument's storage, so that an example that is a view of the mapped tensor
# would read its neighbours. The loop gives each example a storage of its own, and only axis 0 is
# mapped: the strides an example has on another axis are not the caller's to know.
STORAGE = {"as_strided", "as_strided_copy", "as_strided_scatter"}

# Torch's forward mode drops a term of these, or all of them, without a word; its backward does not.
NO_FORWARD_MODE = {
    "index_reduce",
    "nn.functional.linear_cross_entropy",
    "scatter_reduce",
    "triangular_solve",
}


@dataclass
class Sample:
    """One call of an entry: ``leaves[k][j]`` is tensor argument j with the values of example k."""

    number: int
    call: Callable[..., Any]  # takes the tensor arguments, flat
    leaves: list[list[Tensor]]
    text: str
    working: torch.dtype | None = None  # the least precise dtype computed in, if not the result's
    process: Callable[[Any], Any] | None = None  # leaves what has one derivative (no free phases)

    def on(self, device: torch.device) -> Sample:
        """The same call of tensors on this device."""
        return replace(self, leaves=[[x.to(device) for x in row] for row in self.leaves])


class Flat(NamedTuple):
    """A sample's arguments, flat."""

    leaves: list
    spec: TreeSpec
    process: Callable[[Any], Any]


def all_ops() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    ops: dict[str, Any] = {}
    for op in op_db:
        key = name_of(op)
        while key in ops:
            key += "'"
        ops[key] = op
    return ops


def name_of(op: Any) -> str:
    return op.name + (f":{op.variant_test_name}" if op.variant_test_name else "")


def takes_any_value(op: Any) -> bool:
    """Whether NaN and infinity are as good arguments as others, and equal ones worth a look."""
    op = getattr(op, "info", op)
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    return isinstance(op, (BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo))


def dtypes_for(op: Any, wanted: list[torch.dtype]) -> list[torch.dtype]:
    """The wanted dtypes that the entry takes; one that it does take where it takes none of them."""
    supported = set(op.dtypes)
    found = [d for d in wanted if d in supported]
    if found or not supported:
        return found or wanted[:1]
    for other in (torch.int64, torch.bool, torch.complex128):
        if other in supported:
            return [other]
    return [min(supported, key=str)]


# --------------------------------------------------------------------------- samples


def samples_of(op: Any, dtype: torch.dtype, count: int, seed: int = 0) -> list[Sample]:
    """At most ``count`` samples whose argument patterns differ most, with values per example.

    The examples' values come from running the entry's generator under other seeds, which keeps
    whatever the entry asks of them (symmetric, sorted, in range); :func:`_perturb` has the rest.
    """
    runs = [_generate(op, dtype, seed + 1000 * k) for k in range(EXAMPLES)]
    made = []
    for i in _most_different(runs[0], count):
        others = [run[i] if i < len(run) else None for run in runs[1:]]
        made.append(_sample(op, i, runs[0][i], others))
    return made


def _generate(op: Any, dtype: torch.dtype, seed: int) -> list[Flat]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the generators draw from this one
    found = islice(op.sample_inputs(HERE.type, dtype, requires_grad=False, set_seed=False), SCAN)
    return [
        Flat(*tree_flatten((s.input, tuple(s.args), dict(s.kwargs))), s.output_process_fn_grad)
        for s in found
    ]


def _elements(flat: Flat) -> int:
    return sum(x.numel() for x in flat[0] if isinstance(x, Tensor))


def _features(flat: Flat) -> frozenset:
    """What a sample has that others may lack. Shapes weigh less than the rest: see _score."""
    leaves, spec, _ = flat
    found: set = {str(spec)}
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            found |= {(i, x.ndim, x.dtype), (i, "tensor", 1 in x.shape), ("shape", i, x.shape)}
        else:
            found.add((i, type(x).__name__, repr(x)[:40]))
    return frozenset(found)


def _most_different(runs: list[Flat], count: int) -> list[int]:
    """Greedy: each next sample is the one that adds the most features not seen yet.

    Samples without elements have many features of their own and nothing to be wrong in, so that
    there is one of them at most.
    """
    full, empty = {}, {}
    for i, flat in enumerate(runs):
        if _elements(flat) <= LARGEST:
            hollow = any(isinstance(x, Tensor) and x.numel() == 0 for x in flat[0])
            (empty if hollow else full)[i] = _features(flat)
    chosen = _greedy(full, count - bool(empty) if full else 0)
    return sorted(chosen) + _greedy(empty, min(1, count - len(chosen)))


def _greedy(left: dict[int, frozenset], count: int) -> list[int]:
    chosen: list[int] = []
    seen: set = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda i: (_score(left[i] - seen), -i))
        seen |= left.pop(best)
        chosen.append(best)
    return chosen


def _score(features: frozenset) -> int:
    return sum(1 if f[0] == "shape" else 4 for f in features)


def _sample(op: Any, number: int, flat: Flat, others: list[Flat | None]) -> Sample:
    leaves, spec, _ = flat
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def call(*tensors: Tensor) -> Any:
        full = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            full[i] = t
        first, args, kwargs = spec.unflatten(full)
        return op.op(first, *args, **kwargs)

    base = [leaves[i].detach() for i in where]
    per_example = [base]
    for k, other in enumerate(others, 1):
        drawn = [_drawn(x, i, other, flat) for x, i in zip(base, where, strict=True)]
        moved = [_perturb(x, k) if y is None else y for x, y in zip(base, drawn, strict=True)]
        kept = [x if y is None else y for x, y in zip(base, drawn, strict=True)]
        per_example.append(moved if _runs(call, moved) else kept)
    return Sample(number, call, per_example, _describe(flat), process=flat.process)


def _drawn(x: Tensor, i: int, other: Flat | None, flat: Flat) -> Tensor | None:
    """The value under another seed of an argument that is ``x`` under this one, if it differs."""
    if other is None or other[1] != flat[1] or not isinstance(other[0][i], Tensor):
        return None
    y = other[0][i].detach()
    alike = y.shape == x.shape and y.dtype == x.dtype and y.layout == x.layout
    return y if alike and not _identical(x, y) else None


def _runs(call: Callable[..., Any], args: list[Tensor]) -> bool:
    try:
        call(*(x.clone() for x in args))
    except Exception:
        return False
    return True


def _identical(x: Tensor, y: Tensor) -> bool:
    if x.layout != torch.strided:
        return False
    return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) if x.numel() else True


def _perturb(x: Tensor, k: int) -> Tensor:
    """Values written out in the entry come out the same under every seed: move them instead.

    Where the entry then refuses them they stay (offsets that have to start at 0, for one). Floats
    shrink a little towards zero, which few domains mind, and stay sorted where they are (bin
    edges); integers and masks only change places, and so stay in range.
    """
    if x.layout != torch.strided or x.numel() == 0:
        return x
    if x.is_floating_point() or x.is_complex():
        x = x * (1 - 0.07 * k)
        if not x.is_complex() and x.numel() > 1 and bool((x.diff(dim=-1) > 0).all()):
            return x
    return x.flatten().roll(k).reshape(x.shape)


def _describe(flat: Flat) -> str:
    def show(x: Any) -> str:
        if isinstance(x, Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        return repr(x)[:60]

    leaves, spec, _ = flat
    first, args, kwargs = spec.unflatten([_Shown(show(x)) for x in leaves])
    parts = [repr(first), *map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())]
    return "(" + ", ".join(parts) + ")"


class _Shown(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
