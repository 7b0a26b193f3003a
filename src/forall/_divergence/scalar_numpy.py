"""numpy's functions on a `BatchedScalar`: numpy itself, for all examples at once."""

from __future__ import annotations

import operator
from typing import Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._divergence import scalar_storage
from forall._divergence.batched_scalar import BatchedScalar
from forall._divergence.scalar_semantics import DTYPES, KINDS


def call_numpy_on_scalars(func: Any, inputs: tuple, kwargs: dict) -> Any:
    """Call a ufunc on each example's number. If the results are arrays, the lanes diverge."""
    import numpy as np  # the caller has imported it

    def fits(a: Any) -> bool:
        if isinstance(a, np.generic):
            return _dtype(np.array(a)) in KINDS
        return type(a) is BatchedScalar or type(a) in DTYPES

    if func.__name__ == "__call__" and not kwargs and all(map(fits, inputs)):
        return _on_stacks(func, inputs)
    return func(*map(_one, inputs), **{k: _one(a) for k, a in kwargs.items()})


_UFUNCS = {
    operator.add: "add",
    operator.sub: "subtract",
    operator.mul: "multiply",
    operator.truediv: "divide",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.pow: "power",
    divmod: "divmod",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.lshift: "left_shift",
    operator.rshift: "right_shift",
    operator.lt: "less",
    operator.le: "less_equal",
    operator.gt: "greater",
    operator.ge: "greater_equal",
    operator.eq: "equal",
    operator.ne: "not_equal",
}


def operate_with_array(op: Any, a: Any, b: Any) -> Any:
    """Run an operator on a Number and a number or an array of numpy's."""
    import numpy as np  # one of the two is its own

    return call_numpy_on_scalars(getattr(np, _UFUNCS[op]).__call__, (a, b), {})


def _one(a: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return type(a)(map(_one, a))
    return a.concretize() if type(a) is BatchedScalar else a


def _dtype(array: Any) -> torch.dtype:
    with functions_off(), no_dispatch():
        return torch.from_numpy(array).dtype


def _array(t: torch.Tensor) -> Any:
    with functions_off(), no_dispatch():
        return t.cpu().numpy()


def _on_stacks(func: Any, inputs: tuple) -> Any:
    at = [i for i, a in enumerate(inputs) if type(a) is BatchedScalar]
    tensors = scalar_storage.broadcast_values([inputs[i].tensor for i in at])
    levels = scalar_storage.find_batched_levels(tensors[0])
    given = list(inputs)
    for i, t in zip(at, tensors, strict=True):
        given[i] = _array(scalar_storage.order_by_levels(t, levels))
    found = func(*given)
    outs = found if isinstance(found, tuple) else (found,)
    dtypes = [_dtype(out) for out in outs]
    if any(dtype not in KINDS for dtype in dtypes):
        return func(*map(_one, inputs))
    numbers = tuple(
        BatchedScalar(scalar_storage.rebuild_tensor(out, dtype, out.shape, levels))
        for out, dtype in zip(outs, dtypes, strict=True)
    )
    return numbers if isinstance(found, tuple) else numbers[0]
