"""`BatchedScalar`: the Python number of each example, where they differ.

Inside ``vmap``, ``x.item()`` is one number per example. A `BatchedScalar` holds all of them and
behaves like each one: for each example its operators give the result of Python's operator on that
example's number, with the same type, rounding and errors. A torch operator computes all results at
once if it is known to give the same (`scalar_semantics`). Otherwise Python's own operator runs for
one example after another.

If exactly one Python number is needed (``range(n)``, ``if n > 0``, a dict's key) and the examples
differ, they diverge: `active_mask` goes on with those that have one value.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.call_site import find_users_line
from forall._compat.devices import find_new_device
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.errors import format_columns
from forall._core.levels import stack
from forall._divergence import scalar_storage
from forall._divergence.running_sum import (
    KEPT_RANK,
    RANKS,
    SUM_KEEPS_LOSSES,
    SUM_KEEPS_LOSSES_OF_INTEGERS,
    RunningSum,
    find_call_of_sum,
)
from forall._divergence.scalar_semantics import (
    DTYPES,
    KINDS,
    UNARY,
    Operand,
    compute_binary,
    find_bounds,
)
from forall._divergence.vmap_interface import interface
from forall._vmap import registry
from forall._vmap.active_set import active_mask
from forall._vmap.active_set.merge import is_stale, restrict_to_running
from forall._vmap.batched_tensor import is_mapped_at_any
from forall._vmap.failing_example import first_error

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import FrameType

Tensor = torch.Tensor
_SHOWN = 8


class BatchedScalar:
    """One Python number for each example: ``tensor`` has their values, ``kind`` is their type.

    ``tensor`` is 0-d, of dtype bool, int64, float64 or complex128, and differs between the
    examples. No other object holds it, so that it never changes. Numbers carry no derivative.
    """

    __slots__ = ("__weakref__", "_bounds", "_casts", "_some", "_tensor", "kind", "running")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        with functions_off():
            self.kind: type = KINDS[tensor.dtype]  # of each example's number
        self._some: Tensor | None = None  # restricted to the examples that ran at the last read
        self._bounds: tuple[Tensor | None, tuple] = (None, ())  # of this tensor
        self._casts: dict[Any, Tensor] = {}
        self.running: RunningSum | None = None  # if `sum` is adding to it

    @property
    def tensor(self) -> Tensor:
        """The numbers of the examples that run."""
        if not stack.diverged or not is_stale(self._tensor):
            return self._tensor
        some = self._some
        if some is None or is_stale(some):
            some = self._some = restrict_to_running(self._tensor)
        return some

    @property
    def whole(self) -> Tensor:
        """The numbers of all examples that this was made for, whichever of them run now."""
        return self._tensor

    def cast(self, dtype: torch.dtype, device: Any = None) -> Tensor:
        """Return the numbers in another dtype. The result is cached: do not write into it."""
        tensor = self.tensor
        if tensor is not self._tensor:
            return scalar_storage.cast_values(tensor, dtype, device)
        found = self._casts.get((dtype, device))
        if found is None:
            found = self._casts[dtype, device] = scalar_storage.cast_values(tensor, dtype, device)
        return found

    @property
    def __class__(self) -> type:  # so that isinstance(n, float) is true as for each example
        return self.kind

    @property
    def bounds(self) -> tuple:
        """The least and the largest of the numbers of the examples that run."""
        tensor = self.tensor
        of, bounds = self._bounds
        if of is not tensor:
            bounds = find_bounds(tensor)
            self._bounds = tensor, bounds
        return bounds

    def concretize(self) -> Any:
        """Return one Python number. If the examples differ, they diverge."""
        agreed = _find_common_value(self.tensor)
        if agreed is not None:
            return agreed
        return self.kind(active_mask.read_number(self.tensor))

    # --- where Python needs one number

    def __bool__(self) -> bool:
        return BatchedScalar(self.tensor != 0).concretize()

    def __int__(self) -> int:
        return int(_concretize_number(truncate_number(self)))

    def __float__(self) -> float:
        return float(self.concretize())

    def __complex__(self) -> complex:
        return complex(self.concretize())

    def __index__(self) -> int:
        if self.kind not in (bool, int):
            raise TypeError(f"'{self.kind.__name__}' object cannot be interpreted as an integer")
        return int(self.concretize())

    def __hash__(self) -> int:
        return hash(self.concretize())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np  # the caller has imported it

        return np.asarray(self.concretize(), dtype=dtype)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        number = self.concretize()
        return type(number), (number,)

    def __copy__(self) -> BatchedScalar:
        return self

    def __deepcopy__(self, _memo: dict) -> BatchedScalar:
        return self

    # --- text: str is of each example's number, since it can be used as data; repr shows all

    def __repr__(self) -> str:
        sizes = " x ".join(str(n) for n in _values(self.tensor).shape)
        return f"Number({self.kind.__name__}, one for each of {sizes} examples: {self._text()})"

    def __str__(self) -> str:
        return str(self.concretize())

    def __format__(self, spec: str) -> str:
        return format(self.concretize(), spec)

    def _text(self) -> str:
        with functions_off(), no_dispatch():
            flat = _values(self.tensor).flatten().tolist()
        texts = list(map(str, flat[:_SHOWN]))
        return ", ".join([*texts, "..."] if len(flat) > _SHOWN else texts)

    # --- as the number of each example

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the numbers' type: ``n.real``, ``n.is_integer()``, .."""
        if not callable(getattr(self.kind(), name)):  # of a number, not of its class
            return call_per_lane(operator.attrgetter(name), self)

        def method(*args: Any, **kwargs: Any) -> Any:
            return call_per_lane(
                lambda n, a, k: getattr(n, name)(*a, **k), self, args, kwargs, name=name
            )

        return method

    def __round__(self, ndigits: Any = None) -> Any:
        return _unary(round, self) if ndigits is None else call_per_lane(round, self, ndigits)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is None:
            return _binary(operator.pow, self, other)
        return call_per_lane(pow, self, other, modulus)

    def __rpow__(self, other: Any, modulus: Any = None) -> Any:
        return _binary(operator.pow, other, self)

    def __divmod__(self, other: Any) -> Any:
        return _divmod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _divmod(other, self)

    def __array_ufunc__(self, func: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Call a numpy function on each example's number, with numpy's rules for numbers."""
        return interface.call_numpy(getattr(func, method), inputs, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return interface.call_torch(func, args, kwargs or {})


def _values(t: Tensor) -> Tensor:
    """Return all numbers as they are stored, the outermost level's axis first."""
    numbers, _ = scalar_storage.read_with_levels(t)
    return (
        scalar_storage.order_by_levels(t, scalar_storage.find_batched_levels(t)[::-1])
        if numbers.dim()
        else numbers
    )


def _find_common_value(t: Tensor) -> Any:
    """Return the one number that all examples have, equal in every bit; or None."""
    flat = scalar_storage.read_values(t)
    with functions_off(), no_dispatch():
        flat = flat.reshape(-1)
        if not flat.numel():
            return None
        bits = torch.view_as_real(flat) if flat.is_complex() else flat
        bits = bits.view(torch.int64) if bits.is_floating_point() else bits
        return flat[0].item() if bool((bits == bits[:1]).all()) else None


def _concretize_number(n: Any) -> Any:
    return n.concretize() if type(n) is BatchedScalar else n


def read_scalar(t: Tensor) -> Any:
    """Return ``t.item()`` of a 0-d tensor: a `BatchedScalar` if the tensor is batched.

    The `BatchedScalar` keeps the present values, whatever is written into ``t`` later.
    """
    if not is_mapped_at_any(t):
        return t.item()
    scalar_storage.notify_value_read(t)
    kind = complex if t.is_complex() else float if t.is_floating_point() else int
    kind = bool if t.dtype is torch.bool else kind
    return make_number(scalar_storage.cast_values(t, DTYPES[kind], copy=True))


def make_number(t: Tensor) -> Any:
    """Return a `BatchedScalar` of these values; a Python int if all agree, as it can be a size."""
    n = BatchedScalar(t)
    if n.kind is int:
        lo, hi = n.bounds
        if lo == hi and scalar_storage.read_values(t).numel():
            return lo
    return n


def number_to_tensor(n: BatchedScalar) -> Tensor:
    """Return ``torch.tensor(n)``."""
    dtypes = {float: (real := torch.get_default_dtype()), complex: real.to_complex()}
    device = find_new_device()
    with functions_off():
        if n.kind in dtypes:
            return n.cast(dtypes[n.kind], device)
        return n.tensor if n.tensor.device == device else n.cast(n.tensor.dtype, device)


registry.STRANGERS.add(BatchedScalar)
# --- operators ----------------------------------------------------------------------------------


def as_operand(n: Any) -> Operand:
    """Wrap a `BatchedScalar` or a Python number for the table of operators."""
    if type(n) is BatchedScalar:
        return Operand(n.tensor, n.kind, n.bounds)
    return Operand(n, type(n), (n, n))


def _binary(op: Any, a: Any, b: Any) -> Any:
    for n in (a, b):
        if type(n) is not BatchedScalar and type(n) not in DTYPES:
            return _operate_with_stranger(op, a, b, n)
    found = compute_binary(op, as_operand(a), as_operand(b))
    return call_per_lane(op, a, b) if found is None else make_number(found)


def _add(a: Any, b: Any, caller: FrameType) -> Any:
    place = find_call_of_sum(caller)
    return _binary(operator.add, a, b) if place is None else _add_in_sum(place, a, b)


def _add_in_sum(place: Hashable, a: Any, b: Any) -> Any:
    """Add an item to the first ones of `sum`, which is called there, as Python does."""
    before, after = (RANKS.get(n.kind if type(n) is BatchedScalar else type(n)) for n in (a, b))
    if before is None or after is None or not 0 < max(before, after) <= KEPT_RANK:
        return _binary(operator.add, a, b)
    if before < after:  # the first float, or the first complex number
        found = _binary(operator.add, a, b)
        found.running = RunningSum(place, found, 0.0)
        return found
    running = a.running if type(a) is BatchedScalar else None
    if running is None or running.place != place:
        running = RunningSum(place, a, 0.0)
    if after == 0 and not _fits_in_64_bits(b):
        return _binary(operator.add, a, b)
    if after == 0 and not SUM_KEEPS_LOSSES_OF_INTEGERS:
        running = running._replace(total=running.total + b)
    else:
        running = running.add(b)
    return _round_sum(running)


def _round_sum(running: RunningSum) -> Any:
    """Return the number that a sum is if nothing more is added."""
    total, loss = running.total, running.loss
    if type(loss) is BatchedScalar:
        found = BatchedScalar(_choose_sum(total.tensor, (total + loss).tensor, loss.tensor))
    else:
        found = BatchedScalar(total.tensor)
    found.running = running
    return found


def _choose_sum(total: Tensor, whole: Tensor, loss: Tensor) -> Tensor:
    """Choose the sum with the losses where these are finite and not 0; of each part of a number."""
    if total.is_complex():
        parts = [torch.view_as_real(t.to(total.dtype)) for t in (total, whole, loss)]
        return torch.view_as_complex(_choose_sum(*parts))
    return torch.where(torch.isfinite(loss) & (loss != 0), whole, total)


def _fits_in_64_bits(n: Any) -> bool:
    return type(n) is BatchedScalar or -(2**63) <= n < 2**63


def _operate_with_stranger(op: Any, a: Any, b: Any, n: Any) -> Any:
    if isinstance(n, Tensor):
        return interface.operate_with_tensor(op, a, b)
    if hasattr(n, "__array_interface__"):
        return interface.operate_with_array(op, a, b)
    if isinstance(n, (int, float, complex)):
        return call_per_lane(op, a, b)  # of a subclass, with operators of its own
    return NotImplemented


def _unary(op: Any, a: BatchedScalar) -> Any:
    found = UNARY[op](as_operand(a))
    return call_per_lane(op, a) if found is None else make_number(found)


def _divmod(a: Any, b: Any) -> Any:
    if all(type(n) is BatchedScalar or type(n) in DTYPES for n in (a, b)):
        x, y = as_operand(a), as_operand(b)
        found = (compute_binary(operator.floordiv, x, y), compute_binary(operator.mod, x, y))
        if not any(t is None for t in found):
            return tuple(map(make_number, found))
        return call_per_lane(divmod, a, b)
    return _binary(divmod, a, b)


def truncate_number(n: BatchedScalar) -> Any:
    """Compute ``int(n)`` for each example."""
    return _unary(math.trunc, n) if n.kind is not complex else call_per_lane(int, n)


def _make_forward(op: Any) -> Any:
    return lambda self, other: _binary(op, self, other)


def _make_reflected(op: Any) -> Any:
    return lambda self, other: _binary(op, other, self)


for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
]:
    _op = getattr(operator, f"__{_name}__")
    setattr(BatchedScalar, f"__{_name}__", _make_forward(_op))
    setattr(BatchedScalar, f"__r{_name}__", _make_reflected(_op))
if SUM_KEEPS_LOSSES:
    _sum_methods: dict[str, Any] = {
        "__add__": lambda self, other: _add(self, other, sys._getframe(1)),
        "__radd__": lambda self, other: _add(other, self, sys._getframe(1)),
    }
    for _name, _method in _sum_methods.items():
        setattr(BatchedScalar, _name, _method)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(BatchedScalar, f"__{_name}__", _make_forward(getattr(operator, _name)))
for _op in (operator.neg, operator.pos, operator.abs, operator.invert):
    setattr(BatchedScalar, f"__{_op.__name__}__", lambda self, op=_op: _unary(op, self))
for _op in (math.floor, math.ceil, math.trunc):
    setattr(BatchedScalar, f"__{_op.__name__}__", lambda self, op=_op: _unary(op, self))


# --- one example after another ------------------------------------------------------------------


def call_per_lane(func: Any, *args: Any, name: str = "") -> Any:
    """Call ``func(*args)`` with each example's own numbers, for the lanes that run now.

    Numbers of one type become a `BatchedScalar`, tuples of them a tuple. If the types
    differ between lanes, or the results differ and are no numbers, the lanes diverge.
    """
    flat, spec = pytree.flatten(args)
    nested = any(type(a) in (tuple, list, dict) for a in args)
    at = [i for i, a in enumerate(flat) if type(a) is BatchedScalar]
    tensors = scalar_storage.broadcast_values([flat[i].tensor for i in at])
    levels = scalar_storage.find_batched_levels(tensors[0])
    values = [scalar_storage.order_by_levels(t, levels) for t in tensors]
    with functions_off(), no_dispatch():
        lanes = zip(*(v.flatten().tolist() for v in values), strict=True)
        shape = values[0].shape

    def call_for_example(*numbers: Any) -> Any:
        given = list(flat)
        for i, n in zip(at, numbers, strict=True):
            given[i] = n
        return func(*(pytree.unflatten(given, spec) if nested else given))

    try:
        results = [call_for_example(*numbers) for numbers in lanes]
    except Exception as error:  # noqa: BLE001 - Python's own, of whatever kind
        raise _explain_failure(name or func.__name__, call_for_example, tensors) or error from None
    forms = [_result_form(r) for r in results]
    alike = [form == forms[0] for form in forms]

    def tensor(numbers: list, kind: type) -> Tensor:
        return scalar_storage.rebuild_tensor(numbers, DTYPES[kind], shape, levels)

    if not all(alike):  # an int in some lanes, say, a float in others: those go on together
        bool(BatchedScalar(tensor(alike, bool)))
        return call_per_lane(func, *args, name=name)
    if forms[0] is not None:
        return _pack_results(results, tensor)
    if all(r == results[0] for r in results):
        return results[0]
    return call_for_example(*(BatchedScalar(t).concretize() for t in tensors))


def _explain_failure(name: str, alone: Any, tensors: list[Tensor]) -> BaseException | None:
    """Return the error of the first example that fails, with a note that names the example."""
    return first_error(name, lambda *ts: alone(*(t.item() for t in ts)), tuple(tensors), {})


def _result_form(result: Any) -> Any:
    """Return the type of a number, or a tuple of these; None if a tensor cannot hold it."""
    if type(result) is tuple:
        forms = tuple(map(_result_form, result))
        return None if None in forms else forms
    return type(result) if type(result) in DTYPES else None


def _pack_results(results: list, tensor: Any) -> Any:
    """Pack the results of all lanes, which have one form, into one value."""
    first = results[0]
    if type(first) is tuple:
        return tuple(_pack_results(list(part), tensor) for part in zip(*results, strict=True))
    if type(first) is int:
        largest = max(results, key=abs)
        if not -(2**63) <= min(results) <= max(results) < 2**63:
            raise make_too_large_error(largest)
    return make_number(tensor(results, type(first)))


def make_too_large_error(value: int) -> OverflowError:
    place = find_users_line()
    text = str(value) if abs(value) < 10**30 else f"an int of {value.bit_length()} bits"
    return OverflowError(
        "vmap: an int that differs between the examples needs more than 64 bits.\n"
        f"{format_columns([('at', str(place), place.text()), ('value', text, '')])}\n"
        "Compute with floats, or reduce it (% m) before it grows that large."
    )
