"""numpy's functions in torch's own numpy layer, and conversions between tensors and arrays.

numpy itself is not needed: nothing here runs before numpy has called forall.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error

if TYPE_CHECKING:
    from collections.abc import Callable

# Functions for which torch's layer agrees with numpy, dtype included; tests compare each.
_UFUNC_NAMES = """
    absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh ceil conjugate copysign cos
    cosh deg2rad degrees divide equal exp exp2 expm1 float_power floor floor_divide fmax fmin fmod
    greater greater_equal heaviside hypot isfinite isinf isnan less less_equal log log10 log1p log2
    logical_and logical_not logical_or logical_xor matmul maximum minimum multiply negative
    not_equal positive power rad2deg radians reciprocal remainder rint sign signbit sin sinh sqrt
    square subtract tan tanh true_divide trunc
"""
_FUNCTION_NAMES = """
    all amax amin any broadcast_to clip column_stack concatenate cumprod cumsum diag diagonal diff
    dot expand_dims flip fliplr flipud full_like hstack imag inner kron max mean min moveaxis
    ones_like outer prod ravel real repeat reshape roll sort squeeze stack std sum swapaxes
    tensordot tile trace transpose tril triu var vdot vstack where zeros_like
    linalg.cholesky linalg.det linalg.eigvalsh linalg.inv linalg.matrix_power linalg.norm
    linalg.pinv linalg.solve
"""
UFUNCS = frozenset(_UFUNC_NAMES.split())
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())


def find_counterpart(func: Any) -> Callable | None:
    """Return the function of torch's numpy layer with the same meaning, or None."""
    numpy = sys.modules["numpy"]
    if isinstance(func, numpy.ufunc):
        name = func.__name__ if func.__name__ in UFUNCS else ""
    else:
        home = (getattr(func, "__module__", "") or "").removeprefix("numpy").lstrip(".")
        name = f"{home}.{func.__name__}" if home else func.__name__
        name = name if name in FUNCTIONS else ""
    if not name:
        return None
    import torch._numpy as layer

    found: Any = layer
    for part in name.split("."):
        found = getattr(found, part)
    return found


def to_layer_arrays(a: Any) -> Any:
    """Convert tensors, and numpy's arrays and numbers, to arrays of torch's layer, in lists too."""
    import torch._numpy as layer

    numpy = sys.modules["numpy"]
    if isinstance(a, torch.Tensor):
        return layer.ndarray(a)
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return layer.ndarray(torch.from_numpy(numpy.array(a)))
    if isinstance(a, type) and issubclass(a, numpy.generic):
        return getattr(layer, a.__name__)
    if isinstance(a, (list, tuple)):
        return type(a)(map(to_layer_arrays, a))
    return a


def to_tensors(a: Any) -> Any:
    """Convert arrays of torch's layer, or of numpy, to tensors, in lists too."""
    import torch._numpy as layer

    numpy = sys.modules["numpy"]
    if isinstance(a, layer.ndarray):
        return a.tensor
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return torch.from_numpy(numpy.array(a))
    if isinstance(a, (list, tuple)):
        return (
            type(a)(map(to_tensors, a)) if type(a) in (list, tuple) else tuple(map(to_tensors, a))
        )
    return a


def to_numpy(a: Any) -> Any:
    """Return an ordinary tensor as numpy's array."""
    if not isinstance(a, torch.Tensor):
        return a
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return a.detach().resolve_conj().resolve_neg().numpy()


def is_numpy_value(a: Any) -> bool:
    """Return True for an array or a number of numpy's own."""
    numpy = sys.modules["numpy"]
    return isinstance(a, (numpy.ndarray, numpy.generic))


def is_numpy_number(a: Any) -> bool:
    """Return True for a number or a truth value of numpy's own."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(a, (numpy.number, numpy.bool_))


def call_ufunc(func: Any, method: str, inputs: tuple, kwargs: dict, level: Any) -> Any:
    """Implement __array_ufunc__ for values of ``level``."""
    if kwargs.get("out") is not None:
        raise documented_error(TypeError, "numpy")(
            f"np.{func.__name__}: out= cannot take a tensor's values.\n"
            "Use the result, or torch's operators."
        )
    if method != "__call__":
        return level.call_numpy(getattr(func, method), inputs, kwargs)
    if len(inputs) == 2 and isinstance(inputs[0], sys.modules["numpy"].generic):
        reflected = _REFLECTED.get(func.__name__)
        if reflected is not None:  # np.float64(2) * x asks numpy first; for a tensor it is torch's
            return getattr(inputs[1], reflected)(inputs[0].item())
    return call_array_function(func, inputs, kwargs, level)


_REFLECTED = {
    "add": "__radd__",
    "subtract": "__rsub__",
    "multiply": "__rmul__",
    "divide": "__rtruediv__",
    "floor_divide": "__rfloordiv__",
    "remainder": "__rmod__",
    "power": "__rpow__",
    "bitwise_and": "__rand__",
    "bitwise_or": "__ror__",
    "bitwise_xor": "__rxor__",
    "less": "__gt__",
    "less_equal": "__ge__",
    "greater": "__lt__",
    "greater_equal": "__le__",
    "equal": "__eq__",
    "not_equal": "__ne__",
}
# For these dtypes torch's layer agrees with numpy; it promotes integers by torch's rules.
_FLOATS = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


_LOOKS = {"ndim": torch.Tensor.dim, "shape": lambda x: x.shape, "size": torch.Tensor.numel}


def call_array_function(func: Any, args: tuple, kwargs: dict, level: Any) -> Any:
    """Implement __array_function__ for values of ``level``."""
    if func.__name__ in _LOOKS and len(args) == 1 and isinstance(args[0], torch.Tensor):
        return _LOOKS[func.__name__](args[0])
    ours = find_counterpart(func)
    if ours is not None:
        given = [to_layer_arrays(a) for a in args]
        named = {k: to_layer_arrays(a) for k, a in kwargs.items()}
        if all(t.dtype in _FLOATS for t in _tensors(given[func.__name__ == "where" :], named)):
            try:
                return to_tensors(ours(*given, **named))
            except Exception:  # noqa: BLE001, S110 - numpy itself has the last word, errors too
                pass
    return level.call_numpy(func, args, kwargs)


def _tensors(given: Any, named: dict) -> list[torch.Tensor]:
    import torch._numpy as layer

    found = []
    for a in (*given, *named.values()):
        if isinstance(a, layer.ndarray):
            found.append(a.tensor)
        elif isinstance(a, (list, tuple)):
            found.extend(_tensors(a, {}))
    return found
