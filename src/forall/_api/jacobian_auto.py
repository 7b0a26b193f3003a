"""`jacobian`: by reverse or forward mode, whichever has fewer directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forall._api import argument_checks
from forall._api.chunk_size import get_torch_chunk_size
from forall._api.define_transform import define_transform
from forall._api.jacobian import make_jacobian_transform
from forall._api.jacobian_mode import compute_by_fewer
from forall._api.typing import (
    Chunk,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.argnums import DiffArguments
    from forall._api.jacobian_blocks import JacobianBlocks
    from forall._core.errors import TransformCall


@define_transform()
def jacobian(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
) -> Callable:
    """The Jacobian of ``func`` at a point, by the mode that has less to do.

    The law: ``jacobian(f)(x)`` equals ``jacrev(f)(x)`` and ``jacfwd(f)(x)``. For
    ``f: (*I) -> (*O)`` it has shape ``(*O, *I)`` and holds

        jacobian(f)(x)[o, i] = d f(x)[o] / d x[i].

    Cost: ``f`` is called once and recorded. Then one pull-back per number in the output is run. If
    the input has fewer than half as many numbers, one push-forward per number in it is run instead,
    as the pull-back of the recorded pull-back. That needs a graph of torch's own operators alone,
    and nothing outside that differentiates the Jacobian; else it is `jacrev`.

    `jacfwd` records nothing, so it needs less memory.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(jacobian, aux)``.
        return_value: the result is ``(jacobian, y)``, with has_aux ``(jacobian, (y, aux))``; ``f``
            is not called again for it.
        chunk_size: at most so many directions at once, or ``"auto"`` (see `vmap`). Changes memory,
            not values.
        holomorphic: as in `jacrev`.

    Trees, and what is raised, are those of `jacrev`.

    Source: Griewank and Walther, "Evaluating derivatives" (2008), chapter 3.

    Example:
        >>> def f(x):                                  # (2,) -> (5,): two columns are fewer
        ...     return torch.outer(x, x).flatten()[:3].repeat(2)[:5]
        >>> forall.jacobian(f)(torch.tensor([2.0, 3.0]))             # (5, 2)
        tensor([[4., 0.],
                [3., 2.],
                [3., 2.],
                [4., 0.],
                [3., 2.]])
    """
    argument_checks.check_chunk_size("jacobian", chunk_size)

    def sweep_fewer(
        call: TransformCall, f: Callable, given: DiffArguments, has_aux: bool
    ) -> JacobianBlocks:
        return compute_by_fewer(call, f, given.tensors, has_aux, chunk_size, holomorphic)

    options = {
        "error": RuntimeError,
        "torchs": "jacrev",
        "chunk_size": get_torch_chunk_size(chunk_size),
        "holomorphic": holomorphic,
    }
    which = (argnums, argnames)
    return make_jacobian_transform("jacobian", which, has_aux, return_value, sweep_fewer, **options)
