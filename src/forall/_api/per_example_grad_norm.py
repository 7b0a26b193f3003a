"""`per_example_grad_norm`: the norm of each example's gradient, without the gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from forall._api import argument_checks
from forall._api.argnums import DiffArguments, describe_call, find_places
from forall._api.define_transform import define_transform
from forall._api.grad import grad_and_value
from forall._api.typing import Chunk
from forall._api.vmap import vmap
from forall._autodiff import reverse_mode
from forall._compat import functorch_interop, pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.tensor_subclass import unwrap_posed
from forall._core.levels import may_carry_tangents, top
from forall._vmap.lazy_grad import ghost_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


@define_transform()
def per_example_grad_norm(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
    in_dims: Any = 0,
    randomness: str | torch.Tensor = "error",
    chunk_size: Chunk = None,
    mesh: DeviceMesh | None = None,
) -> Callable:
    """The norm of each example's gradient.

    ``func`` is a scalar function of one example. For ``f: (*I), (*S) -> ()`` and ``xs: (B, *S)``,
    ``per_example_grad_norm(f)(w, xs)`` has shape ``(B,)`` and holds

        per_example_grad_norm(f)(w, xs)[b] = grad(f)(w, xs[b]).norm(),

    for a tree ``w`` the norm of all its gradients as one vector.

    Cost: one forward and one backward pass over all examples. The gradient of a weight that is
    used by ``linear``, ``@``, a convolution or an ``embedding`` is kept as its two factors, if they
    hold fewer numbers than the product. Factors from several uses of a weight are concatenated. All
    other gradients (of biases, of the weights of norms) are computed.

    Args:
        argnums: one position, or several; several are one vector together.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(value, aux)``; the result is then ``(norms, auxs)``.
        return_value: the result is ``(norms, values)``, with has_aux ``(norms, (values, auxs))``.
        in_dims: as `vmap`'s. One int is for the arguments that are not differentiated; those that
            are, a model's parameters, are shared between the examples.
        randomness: as `vmap`'s.
        chunk_size: as `vmap`'s.
        mesh: as `vmap`'s: the norms are those of this rank's examples.

    Raises:
        RuntimeError, ValueError: as `grad` and `vmap`.

    Source: Goodfellow, "Efficient per-example gradient computations" (2015); for sequences Li,
    Tramèr, Liang and Hashimoto, "Large language models can be strong differentially private
    learners" (2022); for convolutions Rochette, Manoel and Tramel, "Efficient per-example gradient
    computations in convolutional neural networks" (2019).

    Example:
        >>> def loss(w, x, y):                         # (2,), (2,), () -> ()
        ...     return (x @ w - y) ** 2
        >>> w = torch.tensor([1.0, 2.0])
        >>> xs, ys = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([10.0, 5.0])
        >>> forall.per_example_grad_norm(loss)(w, xs, ys)            # of (6, 8) and (0, -6)
        tensor([10.,  6.])
    """
    verb, which = "per_example_grad_norm", (argnums, argnames)
    argument_checks.check_randomness(verb, randomness, keys=True)
    argument_checks.check_chunk_size(verb, chunk_size)
    argument_checks.check_mesh(verb, mesh, randomness)

    def compute_norms(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(func, updated=())
        def norm_of_one(*args: Any, **kwargs: Any) -> tuple:
            return _compute_norm(func, args, kwargs, which, has_aux)

        call = describe_call(verb, func, *which)
        dims = _make_in_dims(in_dims, find_places(call, args, kwargs, *which), len(args))
        mapped = vmap(norm_of_one, dims, randomness=randomness, chunk_size=chunk_size, mesh=mesh)
        norm, value, *aux = mapped(*args, **kwargs)
        beside = [value, *aux] if return_value else aux
        if not beside:
            return norm
        return norm, beside[0] if len(beside) == 1 else tuple(beside)

    return compute_norms


def _make_in_dims(in_dims: Any, places: Any, n: int) -> Any:
    """Return the in_dims for `vmap`; one int is for the arguments that are not differentiated."""
    if not isinstance(in_dims, int):
        return in_dims
    shared = places if isinstance(places, tuple) else (places,)
    return tuple(None if i in shared else in_dims for i in range(n))


def _compute_norm(func: Callable, args: tuple, kwargs: dict, which: tuple, has_aux: bool) -> tuple:
    """Return the norm of a gradient, the value, and the aux if there is one."""
    call = describe_call("per_example_grad_norm", func, *which)
    if is_dynamo_compiling() or functorch_interop.must_hand_over():
        argnums, argnames = which
        both = grad_and_value(func, argnums, has_aux, argnames=argnames)
        gradient, value = both(*args, **kwargs)
        norm = _take_root_of_sum([g.abs().square().sum() for g in pytree.get_leaves(gradient)])
        return norm, *(value if has_aux else (value,))
    outer = torch.is_grad_enabled()
    with functorch_interop.run_eagerly(), reverse_mode.record_autograd() as run:
        given = DiffArguments(call, args, kwargs, *which)
        variables = reverse_mode.make_variables(given.tensors)
        out = given.call(func, reverse_mode.restore_classes(variables, given.tensors))
        value, *aux = argument_checks.split_aux(call, out, "value") if has_aux else (out,)
        argument_checks.check_scalar_value(call, value)
        scalar = unwrap_posed(value)
        with functions_off():  # a pass that is not recorded cuts tangents too
            leads = outer and reverse_mode.leads_outside((scalar,), run)
            recorded = leads or may_carry_tangents()
        ones = reverse_mode.make_ones(scalar)
        with ghost_norm.GhostNormMode(top()):
            found = reverse_mode.pull_back_incomplete(
                (scalar,), (ones,), variables, retain_graph=recorded, create_graph=recorded
            )
        with functions_off():
            squares = [*map(ghost_norm.compute_squared_grad_norm, found, variables)]
            norm = _take_root_of_sum(squares).to(_find_norm_dtype(variables))
    return reverse_mode.detach_from_run((norm, value, *aux), run, outer)


def _find_norm_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the norm: the widest of the tensors', and real."""
    found = tensors[0].dtype
    for x in tensors[1:]:
        found = torch.promote_types(found, x.dtype)
    return found.to_real()


def _take_root_of_sum(squares: list[torch.Tensor]) -> torch.Tensor:
    """Return the root of a sum, with derivative 0 at 0, as torch has it for a norm."""
    total = functools.reduce(torch.add, squares)
    zero = total == 0
    return total.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
