"""`grad`, `grad_and_value`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._api import argument_checks
from forall._api.argnums import (
    DiffArguments,
    call_torch_holomorphic,
    call_torch_transform,
    describe_call,
)
from forall._api.argnums import with_value_as_aux as with_its_value
from forall._api.define_transform import define_transform
from forall._autodiff import reverse_mode
from forall._compat import functorch_interop
from forall._compat.tensor_subclass import posing, unwrap_posed

if TYPE_CHECKING:
    from collections.abc import Callable


_USUAL = {"has_aux": False, "argnames": None, "holomorphic": False}


def _make_autograd_call(verb: str, func: Callable, options: dict[str, Any]) -> Callable | None:
    """Return the transform by torch.autograd, for ordinary tensors without history.

    Return None for other options than a position.
    """
    argnums = options["argnums"]
    if type(argnums) is not int or argnums < 0 or options != {**_USUAL, "argnums": argnums}:
        return None

    def differentiate_by_autograd(*args: Any) -> Any:
        x = args[argnums].detach().requires_grad_()
        value = func(*args[:argnums], x, *args[argnums + 1 :])
        if type(value) is not torch.Tensor or value.dim():
            call = describe_call(verb, func, argnums, None)
            argument_checks.check_scalar_value(call, value, holomorphic=False)
        gradient = None
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, x, allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(x)
        return gradient if verb == "grad" else (gradient, value.detach())

    return differentiate_by_autograd


@define_transform(alone=functools.partial(_make_autograd_call, "grad"))
def grad(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    argnames: str | tuple[str, ...] | None = None,
    holomorphic: bool = False,
) -> Callable:
    """The gradient of a scalar function, by reverse mode.

    For ``f: (*I) -> ()``, ``grad(f)(x)`` has shape ``(*I)`` and holds

        grad(f)(x)[i] = d f(x) / d x[i].

    Cost: one forward pass and one backward pass, whatever the size of ``x``. A higher derivative
    is a ``grad`` of a ``grad``; for a Hessian times a vector see `hvp`.

    Trees: the result is shaped like the argument; a leaf that is no floating-point or complex
    tensor gets None. The gradient requires grad itself only if something outside the call does.
    ``func`` is recorded under an outer ``torch.no_grad`` too; one inside it cuts, as always. With
    respect to a complex ``z`` the result is the conjugate gradient, torch's convention: the
    direction of steepest ascent. With ``holomorphic=True`` it is df/dz.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``func`` returns ``(value, aux)``; the result is then ``(gradient, aux)``.
        holomorphic: True for a complex-differentiable function, of complex arguments with a
            complex value; the result is df/dz.

    Raises:
        RuntimeError: where ``func`` does not return one real number (with holomorphic: one complex
            number) as a tensor of rank 0, for an argument that the call does not have, and for one
            that is an integer tensor (with holomorphic: that is not complex).
        ValueError: where the arguments hold no tensor.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.2.

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
    return _make_gradient("grad", argnums, argnames, has_aux, holomorphic)


@define_transform(alone=functools.partial(_make_autograd_call, "grad_and_value"))
def grad_and_value(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    argnames: str | tuple[str, ...] | None = None,
    holomorphic: bool = False,
) -> Callable:
    """The gradient of a scalar function and its value, from one forward pass.

    The law: ``grad_and_value(f)(x)`` equals ``(grad(f)(x), f(x))``. The gradient comes first.

    Cost and trees are those of `grad`; so are ``argnums``, ``argnames`` and what is raised.

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
    return _make_gradient("grad_and_value", argnums, argnames, has_aux, holomorphic)


def _make_gradient(
    verb: str, argnums: Any, argnames: Any, has_aux: bool, holomorphic: bool
) -> Callable:
    valued = verb == "grad_and_value"

    def pack_result(tree: Any, value: Any, aux: Any) -> Any:
        """Return the result of the transform, with the value and aux that were asked for."""
        if valued:
            return tree, (value, aux) if has_aux else value
        return (tree, aux) if has_aux else tree

    def differentiate(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        if functorch_interop.must_hand_over():
            if holomorphic:
                f = with_its_value(verb, func, has_aux)
                which = (argnums, argnames)
                found, y = call_torch_holomorphic("jacrev", f, args, kwargs, *which, has_aux=True)
                return pack_result(found, *(y if has_aux else (y, None)))
            return call_torch_transform(
                verb, func, args, kwargs, argnums, argnames, has_aux=has_aux
            )
        call = describe_call(verb, func, argnums, argnames, holomorphic=holomorphic)
        outer = torch.is_grad_enabled()
        with functorch_interop.run_eagerly(), reverse_mode.record_autograd() as run:
            given = DiffArguments(call, args, kwargs, argnums, argnames)
            if holomorphic:
                argument_checks.check_real_or_complex(call, "inputs", given.tensors, holomorphic)
            variables = reverse_mode.make_variables(given.tensors)
            value = given.call(func, reverse_mode.restore_classes(variables, given.tensors))
            aux = None
            if has_aux:
                value, aux = argument_checks.split_aux(call, value, "value")
            argument_checks.check_scalar_value(call, value, holomorphic)
            one = (torch.ones_like(unwrap_posed(value)),) if holomorphic else None
            bare = unwrap_posed(value) if posing.used else value
            with reverse_mode.hide_ended_tangents():
                gradients = reverse_mode.compute_gradients((bare,), one, variables, closes=run)
            if holomorphic:  # the conjugate of df/dz is torch's
                gradients = [g.conj_physical() for g in gradients]
        found = pack_result(given.unflatten_results(gradients), value, aux)
        return reverse_mode.detach_from_run(found, run, outer)

    return differentiate
