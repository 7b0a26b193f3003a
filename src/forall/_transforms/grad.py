"""`grad`, `grad_and_value`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import Call
from forall._derivatives import reverse
from forall._torch import handover, trees
from forall._transforms import checks
from forall._transforms.arguments import pick, put

if TYPE_CHECKING:
    from collections.abc import Callable


def grad(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """The gradient of a scalar function, by reverse mode.

    For ``f: (*I) -> ()``, ``grad(f)(x)`` has shape ``(*I)`` and holds

        grad(f)(x)[i] = d f(x) / d x[i].

    Cost: one forward pass and one backward pass, whatever the size of ``x``. A higher derivative
    is a ``grad`` of a ``grad``; a Hessian times a vector is ``grad(lambda x: grad(f)(x) @ v)``
    (Pearlmutter 1994), at the cost of a few gradients.

    Trees: the result is shaped like the argument; a leaf that is no tensor gets None. The
    gradient requires grad itself only if something outside the call does. ``func`` is recorded
    under an outer ``torch.no_grad`` too; one inside it cuts, as always. With respect to a complex
    ``z`` the result is the conjugate gradient, torch's convention: the direction of steepest
    ascent.

    Args:
        argnums: one position, or several; several give a tuple in the order asked. Arguments
            passed by keyword are not differentiated.
        has_aux: ``func`` returns ``(value, aux)``; the result is then ``(gradient, aux)``.

    Raises:
        RuntimeError: where ``func`` does not return one real number as a tensor of rank 0, for an
            ``argnums`` that the call does not have, and for an integer tensor at ``argnums``.
        ValueError: where the arguments at ``argnums`` hold no tensor.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.2; Pearlmutter, "Fast exact multiplication by the
    Hessian" (1994).

    Example:
        >>> def f(w, x):                               # (2, 3), (3,) -> ()
        ...     return (w @ x).square().sum()
        >>> w, x = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 0.0, 2.0])
        >>> grad(f)(w, x)                              # (2, 3)
        tensor([[ 8.,  0., 16.],
                [26.,  0., 52.]])
        >>> grad(f, argnums=1)(w, x)                   # (3,)
        tensor([ 78., 112., 146.])
    """
    checks.callable_("grad", func)
    both = _grad_and_value("grad", func, argnums, has_aux)

    @functools.wraps(func, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call("grad", func, argnums, has_aux)(*args, **kwargs)
        g, value = both(*args, **kwargs)
        return (g, value[1]) if has_aux else g

    return gradient


def grad_and_value(
    func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable:
    """The gradient of a scalar function and its value, from one forward pass.

    The law: ``grad_and_value(f)(x)`` equals ``(grad(f)(x), f(x))``. The gradient comes first.

    Cost and trees are those of `grad`; so are ``argnums`` and what is raised.

    Args:
        has_aux: ``func`` returns ``(value, aux)``; the result is then ``(gradient, (value, aux))``.

    Source: see `grad`.

    Example:
        >>> def f(w, x):                               # (2, 3), (3,) -> ()
        ...     return (w @ x).square().sum()
        >>> w, x = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 0.0, 2.0])
        >>> grad_and_value(f, argnums=1)(w, x)         # (3,), ()
        (tensor([ 78., 112., 146.]), tensor(185.))
    """
    checks.callable_("grad_and_value", func)
    return _grad_and_value("grad_and_value", func, argnums, has_aux)


def _grad_and_value(verb: str, func: Callable, argnums: Any, has_aux: bool) -> Callable:
    @functools.wraps(func, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call(verb, func, argnums, has_aux)(*args, **kwargs)
        call = Call(verb, func, argnums=argnums)
        outer = torch.is_grad_enabled()
        with handover.eagerly(), torch.enable_grad():
            chosen = pick(call, args, argnums)
            variables, leaves, spec = reverse.variables(call, chosen)
            checks.some_tensor(call, leaves)
            value = func(*put(args, argnums, trees.unflatten(leaves, spec)), **kwargs)
            aux = None
            if has_aux:
                value, aux = checks.with_aux(call, value, "value")
            checks.scalar(call, value)
            gradients = reverse.gradients((value,), None, variables)
        filled = iter(gradients)
        tree = trees.unflatten(
            [next(filled) if isinstance(x, torch.Tensor) else None for x in leaves], spec
        )
        tree, value, aux = reverse.closed((tree, value, aux), variables, outer)
        return tree, (value, aux) if has_aux else value

    return both
