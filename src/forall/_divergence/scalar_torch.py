"""A `BatchedScalar` as an argument of torch's functions, promoted as torch does Python's numbers.

If possible, a 0-d tensor replaces the number, in the dtype to which torch would promote it. For any
other argument (a size, a dim, ``alpha=``) one Python number is needed, and the lanes diverge.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.devices import find_new_device
from forall._compat.dispatch_state import functions_off
from forall._compat.versions import HAS_BOUNDS_WITHIN
from forall._core.half_precision import HALVES
from forall._divergence import scalar_storage
from forall._divergence.batched_scalar import BatchedScalar
from forall._divergence.scalar_semantics import DTYPES, widest_type
from forall._vmap.rule_makers.pointwise import is_exact_on_the_right, result_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
_CPU = torch.device("cpu")


def call_with_numbers(func: Any, args: tuple, kwargs: dict) -> Any:
    """Call ``func`` with Numbers among its arguments: each example has its own number."""
    place = _PLACES.get(func.__name__) if _home(func) in _HOMES else None
    found = NotImplemented if place is None else place(func, args, kwargs)
    if found is NotImplemented:
        found = (func, concretize_numbers(args), concretize_numbers(kwargs))
    func, args, kwargs = found
    return func(*args, **kwargs)


# The reflected operators, which Python calls on a tensor on the right.
_MIRRORED = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
    **{
        getattr(operator, f"__{name}__"): getattr(Tensor, f"__r{name}__")
        for name in [
            "add",
            "sub",
            "mul",
            "floordiv",
            "mod",
            "pow",
            "lshift",
            "rshift",
            "and",
            "or",
            "xor",
        ]
    },
}


def operate_with_tensor(op: Any, a: Any, b: Any) -> Any:
    """Run an operator on a Number and a tensor."""
    if isinstance(a, Tensor):
        return call_with_numbers(op, (a, b), {})
    if op is operator.truediv:  # as torch has it, rounding and all
        return call_with_numbers(operator.mul, (b.reciprocal(), a), {})
    return call_with_numbers(_MIRRORED[op], (b, a), {}) if op in _MIRRORED else NotImplemented


_HOMES = {"TensorBase", "Tensor", "_VariableFunctionsClass", "_operator"}


def _home(func: Any) -> str:
    if getattr(func, "__module__", None) == "_operator":
        return "_operator"
    return getattr(func, "__qualname__", "").partition(".")[0]


def concretize_numbers(tree: Any) -> Any:
    """Replace every Number by one Python number: where the examples differ, they diverge."""
    if type(tree) is BatchedScalar:
        return tree.concretize()
    if type(tree) in (list, tuple):
        return type(tree)(map(concretize_numbers, tree))
    if type(tree) is dict:
        return {k: concretize_numbers(v) for k, v in tree.items()}
    return tree


# --- the dtype of a number ----------------------------------------------------------------------


def cast_number(n: BatchedScalar, dtype: torch.dtype, device: Any = None) -> Tensor | None:
    """Return the number in ``dtype``, or None if it may be too large, so that torch decides."""
    bounds = (0, 0) if n.kind is complex else n.bounds
    return n.cast(dtype, device) if fits_in_dtype(n.kind, bounds, dtype) else None


def fits_in_dtype(kind: type, bounds: tuple, dtype: torch.dtype) -> bool:
    """Return True if numbers of this type and within these bounds are none too large."""
    if kind is complex:
        return dtype.is_complex
    lo, hi = bounds
    if dtype.is_floating_point or dtype.is_complex:
        return not torch.finfo(dtype).max < max(-lo, hi) < math.inf
    if dtype is torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min <= lo <= hi <= info.max


def promote_dtypes(values: list) -> torch.dtype:
    """Return the dtype to which torch promotes these values; a Number is a Python number."""
    with functions_off():
        tensors = [v for v in values if isinstance(v, Tensor)]
        kind = reduce(
            widest_type,
            (
                v.kind if type(v) is BatchedScalar else type(v)
                for v in values
                if not isinstance(v, Tensor)
            ),
        )
        low = tuple(t.dtype for t in tensors if not t.dim())
        high = tuple(t.dtype for t in tensors if t.dim())
        return result_dtype(high, low, kind)


# --- numbers and tensors, promoted to one dtype -------------------------------------------------

_PROMOTING_NAMES = """
    add sub subtract rsub mul multiply div divide true_divide truediv floor_divide floordiv
    remainder mod fmod pow lt le gt ge eq ne less less_equal
    greater greater_equal not_equal __lt__ __le__ __gt__ __ge__ __eq__ __ne__
    and_ or_ xor lshift rshift bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift clamp clip clamp_min clamp_max xlogy copysign lerp where __radd__
    __rmul__ __rsub__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__
    __or__ __xor__ __rand__ __ror__ __rxor__ __lshift__ __rshift__ __rlshift__ __rrshift__ add_
    sub_ mul_ div_ floor_divide_ remainder_ fmod_ pow_ lt_ le_ gt_ ge_ eq_ ne_ clamp_ clip_
    clamp_min_ clamp_max_ bitwise_and_ bitwise_or_ bitwise_xor_ __iand__ __ior__ __ixor__
    __ilshift__ __irshift__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__
"""
_PROMOTING = frozenset(_PROMOTING_NAMES.split())
_VALUES = frozenset({"other", "min", "max", "input", "self", "exponent", "weight"})
_AS_IT_IS_INTO = {"mul_": torch.mul, "div_": torch.div, "floor_divide_": torch.floor_divide}


def _is_value(a: Any) -> bool:
    return isinstance(a, Tensor) or type(a) is BatchedScalar or type(a) in DTYPES


def _convert_promoting(func: Any, args: tuple, kwargs: dict) -> Any:
    name = func.__name__
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    places = [p for p, a in given.items() if _is_value(a) and (type(p) is int or p in _VALUES)]
    if name == "where":  # the mask is no value
        places.remove(1 if _home(func) == "TensorBase" else 0)
    numbers = [p for p in places if type(given[p]) is BatchedScalar]
    if len(numbers) < sum(type(a) is BatchedScalar for a in given.values()):
        return NotImplemented
    dtype = promote_dtypes([given[p] for p in places])
    if _needs_python_number(name, [given[p] for p in places], dtype):
        return NotImplemented
    device = next((a.device for a in given.values() if isinstance(a, Tensor)), None)
    as_it_is = dtype in HALVES and is_exact_on_the_right(name)
    if numbers[0] == places[0] and device is not None and device.type == "cpu":
        as_it_is = False
    target = torch.float32 if as_it_is else dtype
    for p in numbers:  # of numbers alone, torch makes a tensor of the CPU
        given[p] = cast_number(given[p], target, _CPU if device is None else device)
        if given[p] is None:
            return NotImplemented
    if name in _CLAMPS:
        # Both bounds are numbers: beside one, torch takes a tensor for its number.
        for p in places[1:]:
            if not isinstance(given[p], Tensor):
                given[p] = torch.tensor(given[p], dtype=dtype, device=device)
            given[p] = given[p].detach()
        if given[0].is_floating_point() and "out" not in given:
            func = _CLAMPS[name]
    args = tuple(given[i] for i in range(len(args)))
    return (
        _compute_in_float32(func, dtype) if as_it_is else func,
        args,
        {k: given[k] for k in kwargs},
    )


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Clamp with the derivative at a bound that torch has if the bounds are numbers.

    With tensors for bounds, the derivative there is another: 0.5, or, in some releases of torch,
    different in forward and reverse mode.
    """
    x = input.detach()
    out = torch.clamp(x, min, max)
    above, below = (torch.ge, torch.le) if HAS_BOUNDS_WITHIN else (torch.gt, torch.lt)
    sides = [above(x, min)] if min is not None else []
    sides += [below(x, max)] if max is not None else []
    return torch.where(reduce(torch.logical_and, sides), input, out)


def _clamp_min(input: Tensor, min: Any) -> Tensor:
    return _clamp(input, min)


def _clamp_max(input: Tensor, max: Any) -> Tensor:
    return _clamp(input, None, max)


def _make_clamp_in_place(clamp: Callable) -> Callable:
    def clamp_in_place(input: Tensor, *bounds: Any, **named: Any) -> Tensor:
        return input.copy_(clamp(input, *bounds, **named))

    return clamp_in_place


_CLAMPS = {"clamp": _clamp, "clip": _clamp, "clamp_min": _clamp_min, "clamp_max": _clamp_max}
_CLAMPS |= {f"{name}_": _make_clamp_in_place(clamp) for name, clamp in _CLAMPS.items()}


def _needs_python_number(name: str, values: list, dtype: torch.dtype) -> bool:
    """True if torch treats a Python number in another way here than a tensor."""
    if "sub" in name:
        return any(type(v) is BatchedScalar and v.kind is bool for v in values)
    if "floor" in name:
        return dtype is torch.bool or dtype.is_complex
    if "pow" in name and not (dtype.is_floating_point or dtype.is_complex):
        return dtype is torch.bool or any(
            type(v) is BatchedScalar and v.bounds[0] < 0 for v in values
        )
    return False


def _compute_in_float32(func: Any, dtype: torch.dtype) -> Callable:
    def call(x: Any, y: Any, **kwargs: Any) -> Tensor:
        a, b = (t.float() if isinstance(t, Tensor) else t for t in (x, y))
        into = _AS_IT_IS_INTO.get(func.__name__)
        if into is not None:
            return x.copy_(into(a, b, **kwargs))
        return func(a, b, **kwargs).to(dtype)

    return call


# --- numbers that are written into a tensor, and places -----------------------------------------


def _convert_filling(func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert the number of a call that fills ``args[0]``: the last argument, or ``value=``."""
    x = args[0]
    name = next((k for k in ("value", "fill_value") if k in kwargs), None)
    n = args[-1] if name is None else kwargs[name]
    if type(n) is not BatchedScalar:
        return NotImplemented
    t = cast_number(n, kwargs.get("dtype") or x.dtype, x.device)
    if t is None:
        return NotImplemented
    if name is None:
        return func, (*concretize_numbers(args[:-1]), t), kwargs
    return func, concretize_numbers(args), {**kwargs, name: t}


def _convert_item(func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert the numbers of ``x[n]`` and ``x[n] = m``."""
    x, index, *value = args
    index = tuple(map(_as_index, index)) if type(index) is tuple else _as_index(index)
    if value and type(value[0]) is BatchedScalar:
        value = [cast_number(value[0], x.dtype, x.device)]
        if value[0] is None:
            return NotImplemented
    return func, (x, index, *value), kwargs


def _as_index(n: Any) -> Any:
    """Return a number, or a list of them, as an index tensor."""
    if type(n) is list and n and all(_is_int(i) for i in n):
        places = [i.tensor if type(i) is BatchedScalar else torch.tensor(i) for i in n]
        return torch.stack(scalar_storage.move_to_one_device(places))
    return n.tensor if type(n) is BatchedScalar and n.kind is int else concretize_numbers(n)


def _is_int(n: Any) -> bool:
    return type(n) is int or (type(n) is BatchedScalar and n.kind is int)


def _convert_narrow(func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert the numbers of ``x.narrow(dim, n, length)``."""

    def narrow(input: Tensor, dim: int, start: Any, length: Any) -> Tensor:
        if type(start) is BatchedScalar and start.kind is int:
            start = start.tensor
        return func(input, *concretize_numbers((dim, start, length)))

    return narrow, args, kwargs


def _convert_select(func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert the numbers of ``x.select(dim, n)``, whose result is a view."""

    def select(input: Tensor, dim: Any, index: Any) -> Tensor:
        dim = concretize_numbers(dim)
        low, high = index.bounds if type(index) is BatchedScalar else (index, index)
        size = input.shape[dim] if -input.dim() <= dim < input.dim() else 0
        if index.kind is not int or not -size <= low <= high < size:
            return func(input, dim, concretize_numbers(index))
        return input.narrow(dim, index.tensor, 1).squeeze(dim)

    return select, args, kwargs


def _convert_roll(func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert the numbers of ``x.roll(n, dim)``, which becomes an ``index_select``."""

    def roll(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
        dim = dims[0] if type(dims) in (tuple, list) and len(dims) == 1 else dims
        is_one = type(shifts) is BatchedScalar and shifts.kind is int and input.numel()
        if is_one and type(dim) is int and -input.dim() <= dim < input.dim():
            size = input.shape[dim]
            places = torch.arange(size, device=input.device) - shifts.tensor
            return input.index_select(dim, places.remainder(size))
        if is_one and dim in ((), []):
            return roll(input.flatten(), shifts, 0).view(input.shape)
        return func(input, concretize_numbers(shifts), concretize_numbers(dims))

    return roll, args, kwargs


# --- numbers that become tensors ----------------------------------------------------------------


def _convert_full(func: Any, args: tuple, kwargs: dict) -> Any:
    def full(size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor:
        dtype = dtype or promote_dtypes([fill_value])
        options["device"] = find_new_device(options.get("device"))
        t = cast_number(fill_value, dtype, options["device"])
        value = fill_value.concretize() if t is None else t
        return func(concretize_numbers(size), value, dtype=dtype, **options)

    fill_value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    return (full, args, kwargs) if type(fill_value) is BatchedScalar else NotImplemented


def _convert_scalar_tensor(func: Any, args: tuple, kwargs: dict) -> Any:
    def scalar_tensor(
        s: BatchedScalar, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        device = find_new_device(device)
        t = cast_number(s, dtype or torch.get_default_dtype(), device)
        return func(s.concretize(), dtype=dtype, device=device) if t is None else t.clone()

    return scalar_tensor, args, kwargs


def _convert_spaced(func: Any, args: tuple, kwargs: dict) -> Any:
    """Convert the ends of ``linspace`` and ``logspace``, without effect on the result's dtype."""
    ends = [a.cast(torch.float64) if _is_real(a) else a for a in args[:2]]
    if kwargs.keys() & {"start", "end"} or any(type(a) is BatchedScalar for a in ends):
        return NotImplemented
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    ends = [e if isinstance(e, Tensor) else torch.tensor(e, dtype=torch.float64) for e in ends]
    device = find_new_device(kwargs.get("device"))
    return (
        func,
        (*ends, *concretize_numbers(args[2:])),
        {**concretize_numbers(kwargs), "dtype": dtype, "device": device},
    )


def _is_real(a: Any) -> bool:
    return type(a) is BatchedScalar and a.kind is not complex


_PLACES: dict[str, Callable] = {
    **dict.fromkeys(_PROMOTING, _convert_promoting),
    **dict.fromkeys(
        ("fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_"),
        _convert_filling,
    ),
    **dict.fromkeys(("full_like", "new_full"), _convert_filling),
    "__getitem__": _convert_item,
    "__setitem__": _convert_item,
    "narrow": _convert_narrow,
    "select": _convert_select,
    "roll": _convert_roll,
    "full": _convert_full,
    "scalar_tensor": _convert_scalar_tensor,
    "linspace": _convert_spaced,
    "logspace": _convert_spaced,
}
