"""`Number`: the Python number of each example, where they differ.

Inside ``vmap``, ``x.item()`` is one number for each example. A `Number` holds all of them and
behaves like each one: for each example its operators give the result of Python's operator on that
example's number, with the same type, rounding and errors. A torch operator computes all results at
once if it is known to give the same (`arithmetic`). Otherwise Python's own operator runs for one
example after another.

If exactly one Python number is needed (``range(n)``, ``if n > 0``, a dict's key) and the examples
differ, they diverge: `worlds.one_of` goes on with those that have one value.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from forall._compat import pytree
from forall._compat.devices import new_device
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.call_site import users_line
from forall._core.errors import columns
from forall._core.levels import stack
from forall._divergence import scalar_storage
from forall._divergence.scalar_semantics import (
    DTYPES,
    KINDS,
    UNARY,
    Operand,
    binary,
    bounds_of,
)
from forall._vmap import registry
from forall._vmap.active_set import active_mask
from forall._vmap.active_set.merge import is_stale, narrow
from forall._vmap.batched_tensor import is_mapped_at_any
from forall._vmap.failing_example import first_error

Tensor = torch.Tensor
_SHOWN = 8


class Number:
    """One Python number for each example: ``tensor`` has their values, ``kind`` is their type.

    ``tensor`` is 0-d, of dtype bool, int64, float64 or complex128, and differs between the
    examples. No other object holds it, so that it never changes. Numbers carry no derivative.
    """

    __slots__ = ("__weakref__", "_bounds", "_casts", "_some", "_tensor", "kind")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        with functions_off():
            self.kind: type = KINDS[tensor.dtype]  # of each example's number
        self._some: Tensor | None = None  # restricted to the examples that ran at the last read
        self._bounds: tuple[Tensor | None, tuple] = (None, ())  # of this tensor
        self._casts: dict[Any, Tensor] = {}

    @property
    def tensor(self) -> Tensor:
        """The numbers of the examples that run."""
        if not stack.parted or not is_stale(self._tensor):
            return self._tensor
        some = self._some
        if some is None or is_stale(some):
            some = self._some = narrow(self._tensor)
        return some

    @property
    def whole(self) -> Tensor:
        """The numbers of all examples that this was made for, whichever of them run now."""
        return self._tensor

    def cast(self, dtype: torch.dtype, device: Any = None) -> Tensor:
        """Return the numbers in another dtype. The result is cached: do not write into it."""
        tensor = self.tensor
        if tensor is not self._tensor:
            return scalar_storage.cast(tensor, dtype, device)
        found = self._casts.get((dtype, device))
        if found is None:
            found = self._casts[dtype, device] = scalar_storage.cast(tensor, dtype, device)
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
            bounds = bounds_of(tensor)
            self._bounds = tensor, bounds
        return bounds

    def one(self) -> Any:
        """Return one Python number. If the examples differ, they diverge."""
        agreed = _agreed(self.tensor)
        if agreed is not None:
            return agreed
        return self.kind(active_mask.one_of(self.tensor))

    # --- where Python needs one number

    def __bool__(self) -> bool:
        return Number(self.tensor != 0).one()

    def __int__(self) -> int:
        return int(_one(trunc(self)))

    def __float__(self) -> float:
        return float(self.one())

    def __complex__(self) -> complex:
        return complex(self.one())

    def __index__(self) -> int:
        if self.kind not in (bool, int):
            raise TypeError(f"'{self.kind.__name__}' object cannot be interpreted as an integer")
        return int(self.one())

    def __hash__(self) -> int:
        return hash(self.one())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np  # the caller has imported it

        return np.asarray(self.one(), dtype=dtype)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        number = self.one()
        return type(number), (number,)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, _memo: dict) -> Number:
        return self

    # --- text: str is of each example's number, since it can be used as data; repr shows all

    def __repr__(self) -> str:
        sizes = " x ".join(str(n) for n in _values(self.tensor).shape)
        return f"Number({self.kind.__name__}, one for each of {sizes} examples: {self._text()})"

    def __str__(self) -> str:
        return str(self.one())

    def __format__(self, spec: str) -> str:
        return format(self.one(), spec)

    def _text(self) -> str:
        with functions_off(), no_dispatch():
            flat = _values(self.tensor).flatten().tolist()
        texts = list(map(str, flat[:_SHOWN]))
        return ", ".join([*texts, "..."] if len(flat) > _SHOWN else texts)

    # --- as the number of each example

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the numbers' type: ``n.real``, ``n.is_integer()``, .."""
        if not callable(getattr(self.kind(), name)):  # of a number, not of its class
            return by_lane(operator.attrgetter(name), self)

        def method(*args: Any, **kwargs: Any) -> Any:
            return by_lane(lambda n, a, k: getattr(n, name)(*a, **k), self, args, kwargs, name=name)

        return method

    def __round__(self, ndigits: Any = None) -> Any:
        return _unary(round, self) if ndigits is None else by_lane(round, self, ndigits)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is None:
            return _binary(operator.pow, self, other)
        return by_lane(pow, self, other, modulus)

    def __rpow__(self, other: Any, modulus: Any = None) -> Any:
        return _binary(operator.pow, other, self)

    def __divmod__(self, other: Any) -> Any:
        return _divmod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _divmod(other, self)

    def __array_ufunc__(self, func: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Call a numpy function on each example's number, with numpy's rules for numbers."""
        from forall._divergence.scalar_numpy import by_numpy  # which needs to know this class

        return by_numpy(getattr(func, method), inputs, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from forall._divergence.scalar_torch import called  # which needs to know this class

        return called(func, args, kwargs or {})


def _values(t: Tensor) -> Tensor:
    """Return all numbers as they are stored, the outermost level's axis first."""
    numbers, _ = scalar_storage.read(t)
    return (
        scalar_storage.in_order(t, scalar_storage.levels_of(t)[::-1]) if numbers.dim() else numbers
    )


def _agreed(t: Tensor) -> Any:
    """Return the one number that all examples have, equal in every bit; or None."""
    flat = scalar_storage.plain(t)
    with functions_off(), no_dispatch():
        flat = flat.reshape(-1)
        if not flat.numel():
            return None
        bits = torch.view_as_real(flat) if flat.is_complex() else flat
        bits = bits.view(torch.int64) if bits.is_floating_point() else bits
        return flat[0].item() if bool((bits == bits[:1]).all()) else None


def _one(n: Any) -> Any:
    return n.one() if type(n) is Number else n


def number(t: Tensor) -> Any:
    """Return ``t.item()`` of a 0-d tensor: a `Number` if the tensor is batched.

    The `Number` keeps the present values, whatever is written into ``t`` later.
    """
    if not is_mapped_at_any(t):
        return t.item()
    scalar_storage.tell(t)
    kind = complex if t.is_complex() else float if t.is_floating_point() else int
    kind = bool if t.dtype is torch.bool else kind
    return told(scalar_storage.cast(t, DTYPES[kind], copy=True))


def told(t: Tensor) -> Any:
    """Return a `Number` of these values; a Python int if all agree, as it can be a size."""
    n = Number(t)
    if n.kind is int:
        lo, hi = n.bounds
        if lo == hi and scalar_storage.plain(t).numel():
            return lo
    return n


def as_tensor(n: Number) -> Tensor:
    """Return ``torch.tensor(n)``."""
    dtypes = {float: (real := torch.get_default_dtype()), complex: real.to_complex()}
    device = new_device()
    with functions_off():
        if n.kind in dtypes:
            return n.cast(dtypes[n.kind], device)
        return n.tensor if n.tensor.device == device else n.cast(n.tensor.dtype, device)


registry.STRANGERS.add(Number)
# --- operators ----------------------------------------------------------------------------------


def operand(n: Any) -> Operand:
    """Wrap a `Number` or a Python number for the table of operators."""
    if type(n) is Number:
        return Operand(n.tensor, n.kind, n.bounds)
    return Operand(n, type(n), (n, n))


def _binary(op: Any, a: Any, b: Any) -> Any:
    for n in (a, b):
        if type(n) is not Number and type(n) not in DTYPES:
            return _with_stranger(op, a, b, n)
    found = binary(op, operand(a), operand(b))
    return by_lane(op, a, b) if found is None else told(found)


def _with_stranger(op: Any, a: Any, b: Any, n: Any) -> Any:
    if isinstance(n, Tensor):
        from forall._divergence import scalar_torch  # which needs to know this class

        return scalar_torch.operated(op, a, b)
    if hasattr(n, "__array_interface__"):
        from forall._divergence import scalar_numpy

        return scalar_numpy.operated(op, a, b)
    if isinstance(n, (int, float, complex)):
        return by_lane(op, a, b)  # of a subclass, with operators of its own
    return NotImplemented


def _unary(op: Any, a: Number) -> Any:
    found = UNARY[op](operand(a))
    return by_lane(op, a) if found is None else told(found)


def _divmod(a: Any, b: Any) -> Any:
    if all(type(n) is Number or type(n) in DTYPES for n in (a, b)):
        x, y = operand(a), operand(b)
        found = (binary(operator.floordiv, x, y), binary(operator.mod, x, y))
        if not any(t is None for t in found):
            return tuple(map(told, found))
        return by_lane(divmod, a, b)
    return _binary(divmod, a, b)


def trunc(n: Number) -> Any:
    """Compute ``int(n)`` for each example."""
    return _unary(math.trunc, n) if n.kind is not complex else by_lane(int, n)


def _forward(op: Any) -> Any:
    return lambda self, other: _binary(op, self, other)


def _reflected(op: Any) -> Any:
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
    setattr(Number, f"__{_name}__", _forward(_op))
    setattr(Number, f"__r{_name}__", _reflected(_op))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _forward(getattr(operator, _name)))
for _op in (operator.neg, operator.pos, operator.abs, operator.invert):
    setattr(Number, f"__{_op.__name__}__", lambda self, op=_op: _unary(op, self))
for _op in (math.floor, math.ceil, math.trunc):
    setattr(Number, f"__{_op.__name__}__", lambda self, op=_op: _unary(op, self))


# --- one example after another ------------------------------------------------------------------


def by_lane(func: Any, *args: Any, name: str = "") -> Any:
    """Call ``func(*args)`` with each example's own numbers, for the lanes that run now.

    Results that are numbers of one type become a `Number`, tuples of them a tuple. If the types
    differ between lanes, or the results differ and are no numbers, the lanes diverge.
    """
    flat, spec = pytree.flatten(args)
    nested = any(type(a) in (tuple, list, dict) for a in args)
    at = [i for i, a in enumerate(flat) if type(a) is Number]
    tensors = scalar_storage.spread([flat[i].tensor for i in at])
    levels = scalar_storage.levels_of(tensors[0])
    values = [scalar_storage.in_order(t, levels) for t in tensors]
    with functions_off(), no_dispatch():
        lanes = zip(*(v.flatten().tolist() for v in values), strict=True)
        shape = values[0].shape

    def alone(*numbers: Any) -> Any:
        given = list(flat)
        for i, n in zip(at, numbers, strict=True):
            given[i] = n
        return func(*(pytree.unflatten(given, spec) if nested else given))

    try:
        results = [alone(*numbers) for numbers in lanes]
    except Exception as error:  # noqa: BLE001 - Python's own, of whatever kind
        raise _of_example(name or func.__name__, alone, tensors) or error from None
    forms = [_form(r) for r in results]
    alike = [form == forms[0] for form in forms]

    def tensor(numbers: list, kind: type) -> Tensor:
        return scalar_storage.rebuilt(numbers, DTYPES[kind], shape, levels)

    if not all(alike):  # an int in some lanes, say, a float in others: those go on together
        bool(Number(tensor(alike, bool)))
        return by_lane(func, *args, name=name)
    if forms[0] is not None:
        return _packed(results, tensor)
    if all(r == results[0] for r in results):
        return results[0]
    return alone(*(Number(t).one() for t in tensors))


def _of_example(name: str, alone: Any, tensors: list[Tensor]) -> BaseException | None:
    """Return the error of the first example that fails, with a note that names the example."""
    return first_error(name, lambda *ts: alone(*(t.item() for t in ts)), tuple(tensors), {})


def _form(result: Any) -> Any:
    """Return the type of a number, or a tuple of these; None if a tensor cannot hold it."""
    if type(result) is tuple:
        forms = tuple(map(_form, result))
        return None if None in forms else forms
    return type(result) if type(result) in DTYPES else None


def _packed(results: list, tensor: Any) -> Any:
    """Pack the results of all lanes, which have one form, into one value."""
    first = results[0]
    if type(first) is tuple:
        return tuple(_packed(list(part), tensor) for part in zip(*results, strict=True))
    if type(first) is int:
        largest = max(results, key=abs)
        if not -(2**63) <= min(results) <= max(results) < 2**63:
            raise too_large(largest)
    return told(tensor(results, type(first)))


def too_large(value: int) -> OverflowError:
    place = users_line()
    text = str(value) if abs(value) < 10**30 else f"an int of {value.bit_length()} bits"
    return OverflowError(
        "vmap: an int that differs between the examples needs more than 64 bits.\n"
        f"{columns([('at', str(place), place.text()), ('value', text, '')])}\n"
        "Compute with floats, or reduce it (% m) before it grows that large."
    )
