"""The slow truth that the tests hold ``vmap`` to.

``vmap(f)(xs)`` has to equal ``torch.stack([f(x) for x in xs])`` in values, shapes and dtypes;
:func:`loop` is the right-hand side, over plain tensors, and :func:`same` is the equals sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# (relative to the largest finite entry, absolute). The relative part covers a different order of
# summation; the absolute part only covers exact zeros that came out as rounding noise.
TOLERANCE = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-4, 1e-6),
    torch.float16: (2e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}


# --------------------------------------------------------------------------- the loop


def spread(dims: Any, tree: Any) -> list[Any]:
    """One entry of ``dims`` per leaf of ``tree``; an int or None stands for its whole subtree."""
    if isinstance(dims, (list, tuple)):
        if not isinstance(tree, (list, tuple)) or len(dims) != len(tree):
            raise ValueError(f"dims {dims!r} do not fit the tree {tree!r}")
        return [d for sub, node in zip(dims, tree, strict=True) for d in spread(sub, node)]
    if isinstance(dims, dict):
        return [d for key, node in tree.items() for d in spread(dims[key], node)]
    return [dims] * len(tree_flatten(tree)[0])


def batch_size(leaves: list[Any], dims: list[Any]) -> int:
    sizes = {
        x.shape[d]
        for x, d in zip(leaves, dims, strict=True)
        if isinstance(x, Tensor) and d is not None
    }
    if len(sizes) != 1:
        raise ValueError(f"expected one size along the mapped axes, found {sorted(sizes)}")
    return sizes.pop()


def loop(
    f: Callable, in_dims: Any = 0, out_dims: Any = 0, own_storage: bool = False
) -> Callable[..., Any]:
    """``f`` called once per example on plain tensors, the results stacked.

    Keyword arguments are shared, as torch.func has it. Examples are views of the mapped
    tensor, so that in-place writes reach it; ``own_storage`` copies them instead, for functions
    that look at a tensor's storage and would otherwise see the other examples.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        dims = spread(in_dims, args) + [None] * len(tree_flatten(kwargs)[0])
        size = batch_size(leaves, dims)
        if size == 0:
            raise ValueError("a loop over no examples has no result; see empty_truth")
        results = []
        for i in range(size):
            ours = [_example(x, d, i, own_storage) for x, d in zip(leaves, dims, strict=True)]
            a, k = tree_unflatten(ours, spec)
            results.append(f(*a, **k))
        return stack_trees(results, out_dims)

    return run


def _example(leaf: Any, dim: int | None, i: int, own_storage: bool) -> Any:
    if not isinstance(leaf, Tensor) or dim is None:
        return leaf
    view = leaf.select(dim, i)
    return view.clone() if own_storage else view


def stack_trees(results: list[Any], out_dims: Any = 0) -> Any:
    """Stack the leaves, numbers as if they were tensors of no dimensions.

    Leaves that are neither stay when all examples agree and become a list when not.
    """
    first, spec = tree_flatten(results[0])
    columns = list(zip(*(tree_flatten(r)[0] for r in results), strict=True)) if first else []
    dims = spread(out_dims, results[0])
    return tree_unflatten([_stack(list(c), d) for c, d in zip(columns, dims, strict=True)], spec)


def _stack(values: list[Any], dim: int | None) -> Any:
    if all(isinstance(v, (int, float, complex)) for v in values) and dim is not None:
        return torch.tensor(values)
    if all(isinstance(v, Tensor) for v in values):
        return values[0] if dim is None else torch.stack(values, dim)
    return values[0] if all(v == values[0] for v in values) else values


def empty_truth(some: Any, out_dims: Any = 0) -> Any:
    """What size 0 has to give, from the result of a loop over some examples."""
    leaves, spec = tree_flatten(some)
    if not all(isinstance(x, Tensor) for x in leaves):
        raise ValueError("no examples, and so no value for what is not a tensor")
    cut = [
        x if d is None else x.narrow(d, 0, 0)
        for x, d in zip(leaves, spread(out_dims, some), strict=True)
    ]
    return tree_unflatten(cut, spec)


# --------------------------------------------------------------------------- comparing


def same(a: Any, b: Any, values: bool = True) -> bool:
    """Whether two trees agree in structure, shapes, dtypes and (unless told not to) values."""
    return difference(a, b, values) is None


def difference(
    a: Any, b: Any, values: bool = True, working: torch.dtype | None = None
) -> str | None:
    """The first difference between ``a`` and the truth ``b``, in words; None when they agree.

    ``working`` is the dtype that a result was computed in where that is a coarser one than its
    own: a float64 from float32 arithmetic is right to 7 digits, not to 16.
    """
    mine, spec_a = tree_flatten(a)
    theirs, spec_b = tree_flatten(b)
    if spec_a != spec_b:
        return f"structure: {_kinds(a)} instead of {_kinds(b)}"
    for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        found = _leaf_difference(x, y, values, working)
        if found is not None:
            return found if len(theirs) == 1 else f"leaf {i}: {found}"
    return None


def _kinds(tree: Any) -> str:
    return str(tree_map(lambda x: type(x).__name__, tree))


def _leaf_difference(x: Any, y: Any, values: bool, working: torch.dtype | None) -> str | None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        if type(x) is not type(y) or (values and repr(x) != repr(y)):
            return f"value: {x!r} instead of {y!r}"
        return None
    if x.shape != y.shape:
        return f"shape: {tuple(x.shape)} instead of {tuple(y.shape)}"
    if x.dtype != y.dtype:
        return f"dtype: {x.dtype} instead of {y.dtype}"
    if not values or not y.numel():
        return None
    return _value_difference(_plain(x), _plain(y), working)


def _plain(x: Tensor) -> Tensor:
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    return x.resolve_conj().resolve_neg()


def _value_difference(x: Tensor, y: Tensor, working: torch.dtype | None) -> str | None:
    good = _agree(x, y, working)
    if bool(good.all()):
        return None
    at = tuple((~good).nonzero()[0].tolist())
    count = int((~good).sum())
    return f"value: {x[at].item()} instead of {y[at].item()} at {at} ({count} of {y.numel()} off)"


def _agree(x: Tensor, y: Tensor, working: torch.dtype | None = None) -> Tensor:
    if not (y.is_floating_point() or y.is_complex()):
        return x == y
    nan = x.isnan() & y.isnan()
    if y.is_complex():
        # A complex number with one NaN part is NaN; what the other part holds says nothing.
        parts = _agree(torch.view_as_real(x), torch.view_as_real(y), working).all(-1)
        return nan | parts
    if y.dtype not in TOLERANCE:
        return nan | (x.float() == y.float())
    relative, absolute = max(TOLERANCE[y.dtype], TOLERANCE[working or y.dtype])
    x, y = x.double(), y.double()
    finite = y.isfinite() & x.isfinite()
    scale = float(y[finite].abs().max()) if bool(finite.any()) else 0.0
    return nan | (x == y) | (finite & ((x - y).abs() <= relative * scale + absolute))


# --------------------------------------------------------------------------- both together


def check_vmap(
    f: Callable,
    args: tuple,
    in_dims: Any = 0,
    out_dims: Any = 0,
    vmap: Callable | None = None,
    **options: Any,
) -> Any:
    """Assert that vmap keeps the law for ``f`` at ``args``; give back what vmap gave.

    Both sides get copies of the tensors, and what an in-place ``f`` leaves in them is compared
    too. ``options`` go to vmap (randomness, chunk_size).
    """
    if vmap is None:
        import forall

        vmap = forall.vmap
    mine, theirs = _copies(args), _copies(args)
    truth = loop(f, in_dims, out_dims)(*theirs)
    result = vmap(f, in_dims=in_dims, out_dims=out_dims, **options)(*mine)
    found = difference(result, truth)
    assert found is None, f"vmap with in_dims={in_dims!r}, out_dims={out_dims!r}: {found}"
    left = difference(mine, theirs)
    assert left is None, f"arguments after the call, in_dims={in_dims!r}: {left}"
    return result


def _copies(tree: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)
