"""Replacements of torch's own control-flow operators inside our transforms.

Torch's, if called eagerly, compile their functions, which refuses wrapper tensors, and have no
higher-order derivatives. They are still used outside our transforms, and while Dynamo traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._api.vmap import vmap
from forall._compat import higher_order_ops, pytree
from forall._control_flow import flex_attention
from forall._control_flow import scan as ours
from forall._control_flow.associative_scan import associative_scan as our_associative_scan
from forall._control_flow.cond import cond as our_cond
from forall._control_flow.while_loop import while_loop as our_while_loop

if TYPE_CHECKING:
    from collections.abc import Callable


def cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: tuple | list = ()) -> Any:
    return our_cond(pred, true_fn, false_fn, *operands)


def while_loop(cond_fn: Callable, body_fn: Callable, carried_inputs: tuple | list) -> tuple:
    def body(carry: tuple) -> tuple:
        carry = body_fn(*carry)
        return tuple(carry) if isinstance(carry, (tuple, list)) else (carry,)

    return our_while_loop(lambda carry: cond_fn(*carry), body, tuple(carried_inputs))


def scan(
    combine_fn: Callable, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    leaves = pytree.get_leaves(xs)
    if not leaves:
        return init, []
    dim %= max(leaves[0].dim(), 1)
    first = pytree.map_tensors(lambda x: x.movedim(dim, 0), xs)
    carry, ys = ours.scan(combine_fn, init, first, reverse=reverse)
    return carry, pytree.map_tensors(lambda y: y.movedim(0, dim) if dim < y.dim() else y, ys)


def map(f: Callable, xs: Any, *args: Any) -> Any:
    return ours.map(lambda x: f(x, *args), xs)


def associative_scan(
    combine_fn: Callable,
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """Run ours, which calls ``fn`` on many elements with the dim; torch's on one without it."""
    dim %= max(pytree.get_leaves(xs)[0].dim(), 1)
    each = vmap(combine_fn, in_dims=dim, out_dims=dim, randomness="different")
    return our_associative_scan(each, xs, reverse, dim)


def install_control_flow() -> None:
    """Replace torch's operators by these, once."""
    for meaning in (cond, while_loop, scan, map, associative_scan):
        higher_order_ops.redirect(meaning)
    flex_attention.install_flex_attention()
