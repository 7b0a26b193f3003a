"""Operators that may raise an error for some numbers of their operands, whatever the shapes.

NOTE [errors of numbers]
    An index may be out of range, a matrix not positive definite, a divisor a whole zero. Then it
    depends on more than shapes and dtypes if a kernel raises, and one call without an error proves
    nothing about the next.

    Schemas show most of these operators: they take whole numbers under the name of an index. The
    others are listed here. `tests/laws/test_errors_of_numbers.py` tries the operators of torch's
    own samples with other numbers, and finds those that are missing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_TORCHS = ("aten", "prims", "forall")  # operators of other libraries are unknown

# Arguments that are indices or counts; of a mask the shape alone decides.
_PLACES = frozenset(
    {
        "index",
        "indices",
        "target",
        "targets",
        "repeats",
        "lengths",
        "offsets",
        "pivots",
        "LU_pivots",
        "sorter",
    }
)

# Operators that may raise for numbers of any dtype; in place or not.
_BY_ANY = frozenset(
    {
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "_functional_assert_async",
        "_functional_assert_scalar",
        "_histogramdd_bin_edges",
        "_histogramdd_from_bin_cts",
        "_histogramdd_from_bin_tensors",
        "_linalg_det",
        "_linalg_eigh",
        "_linalg_eigvals",
        "_linalg_slogdet",
        "_linalg_solve_ex",
        "_linalg_svd",
        "_pdist_forward",
        "binary_cross_entropy",
        "bincount",
        "cholesky",
        "cholesky_inverse",
        "fake_quantize_per_channel_affine_cachemask",
        "histc",
        "histogram",
        "linalg_cholesky_ex",
        "linalg_eig",
        "linalg_eigvals",
        "linalg_inv_ex",
        "linalg_ldl_factor_ex",
        "linalg_lstsq",
        "linalg_lu_factor_ex",
        "linalg_pinv",
        "lu_unpack",
        "masked_scatter",
        "segment_reduce",
    }
)

# The same, if a tensor gives the distribution's parameters, or the ends of a range.
_BY_TENSORS = frozenset(
    {"bernoulli", "binomial", "multinomial", "normal", "poisson", "linspace", "logspace"}
)

# Operators that raise for a whole number that is zero; a float gives inf or nan.
_BY_ZERO = frozenset({"floor_divide", "fmod", "remainder", "div", "divide"})

_NEVER, _ALWAYS, _WHOLE, _AT_PLACES = range(4)


@cache
def _classify_operator(func: Any) -> tuple[int, tuple[int | str, ...]]:
    """Return the condition under which an operator may raise, and its indices, see `may_raise`."""
    if func.namespace not in _TORCHS:
        return _ALWAYS, ()
    arguments = func._schema.arguments
    name = func.overloadpacket.__name__
    name = name.removesuffix("_") if not name.endswith("__") else name
    if name in _BY_ANY or (name in _BY_TENSORS and any(map(_is_read, arguments))):
        return _ALWAYS, ()
    if name in _BY_ZERO:
        takes = name != "div" or any(a.name == "rounding_mode" for a in arguments)
        return (_WHOLE if takes else _NEVER), ()
    places = tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(arguments)
        if a.name in _PLACES and "Tensor" in str(a.type)
    )
    return (_AT_PLACES, places) if places else (_NEVER, ())


def may_raise(func: Any, args: tuple, kwargs: dict, dtypes: Any) -> bool:
    """Return True if the operator may raise for other numbers in its operands.

    ``dtypes`` gives those of the tensors in an argument, or in all of them.
    """
    kind, places = _classify_operator(func)
    if kind in (_NEVER, _ALWAYS):
        return kind == _ALWAYS
    if kind == _WHOLE:
        return not any(d.is_floating_point or d.is_complex for d in dtypes((args, kwargs)))
    given = [
        (args[p] if p < len(args) else None) if isinstance(p, int) else kwargs.get(p)
        for p in places
    ]
    return any(_is_whole(d) for d in dtypes(given))


def has_unknown_class(x: torch.Tensor, num_classes: int) -> bool:
    """True if `torch.nn.functional.one_hot` would raise; it does not check wrappers.

    ``x`` has all examples, and ``num_classes`` is -1 if the largest number determines it.
    """
    return bool((x < 0).any() or (num_classes > 0 and (x >= num_classes).any()))


def _is_read(argument: Any) -> bool:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return "Tensor" in str(argument.type) and not written


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
