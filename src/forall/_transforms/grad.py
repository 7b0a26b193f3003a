"""`grad`, `grad_and_value`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import columns, name_of, short
from forall._derivatives import reverse
from forall._torch import handover, trees
from forall._torch.dispatch import run_backward
from forall._transforms import checks
from forall._transforms.arguments import pick, put

if TYPE_CHECKING:
    from collections.abc import Callable


def grad_and_value(
    func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable:
    """The gradient of a scalar function and its value."""
    checks.callable_("grad_and_value", func)
    return _grad_and_value("grad_and_value", func, argnums, has_aux)


def grad(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """The gradient of a scalar function."""
    checks.callable_("grad", func)
    both = _grad_and_value("grad", func, argnums, has_aux)

    @functools.wraps(func, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call("grad", func, argnums, has_aux)(*args, **kwargs)
        g, value = both(*args, **kwargs)
        return (g, value[1]) if has_aux else g

    return gradient


def _grad_and_value(verb: str, func: Callable, argnums: Any, has_aux: bool) -> Callable:
    @functools.wraps(func, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call(verb, func, argnums, has_aux)(*args, **kwargs)
        call = f"{verb}({name_of(func)}, argnums={argnums!r})"
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            chosen = pick(call, args, argnums)
            variables, leaves, spec = reverse.variables(call, chosen)
            out = func(*put(args, argnums, trees.unflatten(leaves, spec)), **kwargs)
            value, aux = _split(call, out, has_aux)
            _check_scalar(call, value)
            gradients = reverse.gradients((value,), None, variables)
        filled = iter(gradients)
        tree = trees.unflatten(
            [next(filled) if isinstance(x, torch.Tensor) else None for x in leaves], spec
        )
        tree, value, aux = reverse.closed((tree, value, aux), variables, outer)
        return tree, (value, aux) if has_aux else value

    return both


def _split(call: str, out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise RuntimeError(
            f"{call}: with has_aux=True the function returns a tuple (value, aux).\n"
            f"{columns([('returned', short(out), type(out).__name__)])}\n"
            "Return two things, or leave has_aux out."
        )
    return out


def _check_scalar(call: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(
            f"{call}: the function must return a tensor.\n"
            f"{columns([('returned', short(value), type(value).__name__)])}\n"
            "Return the scalar to differentiate; has_aux=True lets you return more beside it."
        )
    if value.dim() != 0:
        raise RuntimeError(
            f"{call}: the function must return a scalar, a tensor of rank 0.\n"
            f"{columns([('returned', short(value))])}\n"
            "Reduce it (.sum(), .mean()), or use jacrev for the derivative of every entry."
        )
