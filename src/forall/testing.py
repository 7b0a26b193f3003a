"""Checks of the laws, for users and authors of rules: `vmap` is the loop, derivatives are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._api import mapped_inputs
from forall._api.jvp import jvp
from forall._api.vjp import vjp
from forall._api.vmap import vmap
from forall._compat import pytree
from forall._compat.documented_error import documented_error
from forall._core.errors import TransformCall, format_columns, format_short

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_grad", "check_vmap"]


def check_vmap(
    f: Callable, *args: Any, in_dims: Any = 0, out_dims: Any = 0, chunk_size: int | None = None
) -> None:
    """Assert that ``vmap(f)`` is the loop: ``torch.stack([f(x) for x in xs])``.

    Values are compared up to rounding, shapes and dtypes exactly. ``f`` gets copies of the tensors.

    Raises:
        AssertionError: naming the first result that differs, and where.

    Example:
        >>> check_vmap(torch.mv, torch.rand(2, 3, 4), torch.rand(4), in_dims=(1, None))
    """
    call = TransformCall("check_vmap", f, in_dims=in_dims)
    leaves, spec, dims, size, _ = mapped_inputs.check_inputs(call, _copy_tensors(args), {}, in_dims)
    results = []
    for i in range(size):
        example = [x if d is None else x.select(d, i) for x, d in zip(leaves, dims, strict=True)]
        given, _ = pytree.unflatten(example, spec)
        results.append(f(*given))
    if not results:
        raise documented_error(ValueError, "check-arguments")(
            f"{call}: there is no example.\nPass at least one, to compare with."
        )
    mapped = vmap(f, in_dims, out_dims, chunk_size=chunk_size)(*_copy_tensors(args))
    _, out_spec = pytree.flatten(results[0])
    places = mapped_inputs.OutDims("check_vmap", f, out_dims).expand_to_leaves(out_spec)
    rows = [pytree.get_leaves(r) for r in results]
    truth = [
        _stack_values(list(c), p) for c, p in zip(zip(*rows, strict=True), places, strict=True)
    ]
    _assert_same(call, mapped, pytree.unflatten(truth, out_spec))


def _copy_tensors(args: tuple) -> tuple:
    return pytree.map_tensors(lambda x: x.detach().clone(), args)


def _stack_values(values: list, place: int | None) -> Any:
    if place is None or not isinstance(values[0], (torch.Tensor, int, float, complex)):
        return values[0]
    return torch.stack([torch.as_tensor(v) for v in values], place)


def check_grad(f: Callable, *args: torch.Tensor, order: int = 2, step: float = 1e-5) -> None:
    """Assert that the derivatives of ``f`` at ``args`` are its slopes, up to this order.

    With J the Jacobian, t a direction and c a weight for every output, checks

        jvp:  J t = (f(x + step t) - f(x - step t)) / (2 step)   and   vjp:  c . (J t) = (c J) . t,

    then the same for the pull-back c -> c J, up to ``order``.

    Args:
        args: float64 tensors; in float32 a difference has too few digits to compare with.

    Raises:
        AssertionError: naming the derivative that is off.
        ValueError: for an argument that is not float64.

    Example:
        >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]], dtype=torch.float64)
        >>> check_grad(lambda x: x.log().sum(0), x)              # (2, 3) -> (3,)
    """
    call = TransformCall("check_grad", f)
    for x in args:
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float64:
            raise documented_error(ValueError, "check-arguments")(
                f"{call}: arguments must be float64 tensors.\n"
                f"{format_columns([('argument', format_short(x))])}\nConvert it: x.double()."
            )
    draw = torch.Generator().manual_seed(0)
    directions = tuple(_like(x, draw) for x in args)

    def flat(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(y for y in pytree.get_leaves(f(*xs)) if y.is_floating_point())

    def evaluate_moved(by: float) -> tuple[torch.Tensor, ...]:
        return flat(*(x + by * t for x, t in zip(args, directions, strict=True)))

    ys, pushed = jvp(flat, args, directions)
    slopes = tuple(
        (a - b) / (2 * step)
        for a, b in zip(evaluate_moved(step), evaluate_moved(-step), strict=True)
    )
    _assert_same(call, pushed, slopes, rtol=1e-5, atol=1e-6)
    weights = tuple(_like(y, draw) for y in ys)
    pulled = vjp(flat, *args)[1](weights)
    _assert_same(call, _dot(pulled, directions), _dot(weights, pushed), rtol=1e-7, atol=1e-9)
    if order > 1:
        n = len(args)
        check_grad(
            lambda *both: vjp(flat, *both[:n])[1](tuple(both[n:])),
            *args,
            *weights,
            order=order - 1,
            step=step,
        )


def _like(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=draw, device=draw.device).to(x.device)


def _dot(a: tuple, b: tuple) -> torch.Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def _assert_same(call: TransformCall, found: Any, truth: Any, **tolerance: float) -> None:
    mine, spec = pytree.flatten(found)
    theirs, true_spec = pytree.flatten(truth)
    if spec != true_spec:
        raise AssertionError(
            f"{call}: {pytree.format_tree(spec)} instead of {pytree.format_tree(true_spec)}"
        )
    for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(
                x,
                y,
                equal_nan=True,
                **tolerance,
                msg=lambda text, i=i: f"{call}: result {i} is off.\n{text}",
            )
        elif x != y:
            raise AssertionError(f"{call}: result {i} is {x!r} instead of {y!r}")
