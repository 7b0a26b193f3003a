"""`jacrev`, `jacfwd`, `jacobian`, `hessian`: all derivatives of a function at a point."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from forall._api import argument_checks
from forall._api.argnums import (
    DiffArguments,
    call_torch_holomorphic,
    call_torch_transform,
    describe_call,
    with_value_as_aux,
)
from forall._api.chunk_size import get_torch_chunk_size
from forall._api.define_transform import define_transform
from forall._api.jacobian_blocks import (
    InnerJacobian,
    JacobianBlocks,
    compute_by_columns,
    compute_by_fewer,
    compute_by_rows,
    pack_answer,
)
from forall._api.typing import Chunk
from forall._compat import functorch_interop
from forall._core.errors import TransformCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


@define_transform()
def jacrev(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable:
    """The Jacobian of ``func`` at a point, by reverse mode.

    For ``f: (*I) -> (*O)``, ``jacrev(f)(x)`` has shape ``(*O, *I)`` and holds

        jacrev(f)(x)[o, i] = d f(x)[o] / d x[i].

    Cost: one forward pass, then one pull-back per number in the output, stacked as `vmap` does.
    When the output is larger than the input, `jacfwd` gives the same answer for less.

    Trees: the result is shaped like ``f``'s output, with a tree like ``x`` at every leaf; in it a
    leaf that is no floating-point or complex tensor gets None.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(jacobian, aux)``.
        return_value: the result is ``(jacobian, y)``, with has_aux ``(jacobian, (y, aux))``; ``f``
            is not called again for it.
        chunk_size: pull back at most so many rows at once, or ``"auto"`` (see `vmap`).
            Changes memory, not values.
        holomorphic: True for a complex-differentiable function, of complex arguments with complex
            outputs; the result is df/dz.
        mesh: a `torch.distributed` DeviceMesh of one dim. Each rank computes the rows of its part
            of dim 0 of each output, as `torch.chunk` splits it. Their results, one after another,
            are the Jacobian; that of an output without dims is whole on each rank. All ranks have
            to make the call, with the same function and arguments.
        _preallocate_and_copy: torch.func's, for memory alone; it changes nothing here.

    Raises:
        RuntimeError: for an argument at ``argnums`` or an output that is complex (with
            holomorphic: that is real) or an integer, for an output that is no tensor, and for an
            ``argnums`` that the call does not have.
        ValueError: where the arguments at ``argnums`` hold no tensor; a chunk_size below 1.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.2.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> jacrev(f)(torch.tensor([2.0, 3.0]))        # (3, 2)
        tensor([[3., 2.],
                [1., 1.],
                [4., 0.]])
    """
    argument_checks.check_chunk_size("jacrev", chunk_size)

    which = (argnums, argnames)
    return _make_reverse_jacobian(
        "jacrev", compute_by_rows, which, has_aux, return_value, chunk_size, holomorphic, mesh
    )


@define_transform()
def jacfwd(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    argnames: str | tuple[str, ...] | None = None,
    return_value: bool = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable:
    """The Jacobian of ``func`` at a point, by forward mode.

    For ``f: (*I) -> (*O)``, ``jacfwd(f)(x)`` has shape ``(*O, *I)`` and holds

        jacfwd(f)(x)[o, i] = d f(x)[o] / d x[i].

    Cost: one `jvp` per number in the input, stacked by `vmap`; no graph in memory. When the input
    is larger than the output, `jacrev` gives the same answer for less.

    Trees: the result is shaped like ``f``'s output, with a tree like ``x`` at every leaf; in it a
    leaf that is no floating-point or complex tensor gets None.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(jacobian, aux)``.
        return_value: the result is ``(jacobian, y)``, with has_aux ``(jacobian, (y, aux))``; ``f``
            is not called again for it.
        randomness: what `vmap` does with random numbers drawn inside ``f``. ``"same"`` gives the
            derivative of one draw.
        chunk_size: push at most so many columns at once, or ``"auto"`` (see `vmap`).
            Changes memory, not values.
        holomorphic: True for a complex-differentiable function, of complex arguments with complex
            outputs; the result is df/dz.
        mesh: as `jacrev`'s, but each rank computes the columns of its part of dim 0 of each input.
            Their results are concatenated along the first dim of ``I``.

    Raises:
        RuntimeError: for an argument at ``argnums`` or an output that is complex (with
            holomorphic: that is real), for an output that is no tensor, and for an ``argnums``
            that the call does not have.
        ValueError: for an integer argument at ``argnums``, and where they hold no tensor; a
            chunk_size below 1.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.1.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> jacfwd(f)(torch.tensor([2.0, 3.0]))        # (3, 2)
        tensor([[3., 2.],
                [1., 1.],
                [4., 0.]])
    """
    argument_checks.check_randomness("jacfwd", randomness)
    argument_checks.check_chunk_size("jacfwd", chunk_size)
    argument_checks.check_mesh("jacfwd", mesh, randomness)

    def columns(
        call: TransformCall, f: Callable, given: DiffArguments, has_aux: bool, *ranks: Any
    ) -> JacobianBlocks:
        how = randomness, chunk_size, holomorphic
        return compute_by_columns(call, f, given, has_aux, *how, *ranks)

    which = (argnums, argnames)
    return _make_jacobian(
        "jacfwd",
        columns,
        which,
        has_aux,
        return_value,
        holomorphic,
        ValueError,
        "jacfwd",
        mesh,
        randomness=randomness,
    )


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
    mesh: DeviceMesh | None = None,
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
        mesh: as in `jacrev`; it is by rows then.

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

    which, compute = (argnums, argnames), compute_by_fewer if mesh is None else compute_by_rows
    return _make_reverse_jacobian(
        "jacobian", compute, which, has_aux, return_value, chunk_size, holomorphic, mesh
    )


@define_transform()
def hessian(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable:
    """All second derivatives of ``func`` at a point: forward mode over reverse mode.

    For ``f: (*I) -> (*O)``, ``hessian(f)(x)`` has shape ``(*O, *I, *I)`` and holds

        hessian(f)(x)[o, i, j] = d^2 f(x)[o] / d x[i] d x[j],

    the same as ``jacfwd(jacrev(f))(x)``.

    Cost: for a scalar function, one gradient with its tangent per number in ``x``. For parts
    of it that cost less see `hvp`, `hessian_diag` and `laplacian`.

    Trees: the tree of the output, with one like ``x`` at every leaf, and another at its leaves.

    Args:
        argnums: one position, or several; several give a tuple of tuples.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(hessian, aux)``.
        return_value: the result is ``(hessian, (jacobian, y))``, with has_aux
            ``(hessian, (jacobian, y, aux))``; the Jacobian of a scalar function is its gradient.
            Nothing is computed again for it.
        chunk_size: push at most so many columns, and pull back at most so many rows, at once;
            or ``"auto"`` (see `vmap`).
        holomorphic: True for a complex-differentiable function, of complex arguments with complex
            outputs; the result is d^2 f / dz^2.
        mesh: as `jacfwd`'s: the results are concatenated along the first dim of the second ``I``.

    Raises:
        RuntimeError, ValueError: as `jacfwd`.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian" (1994), one column per
    direction.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> hessian(f)(torch.tensor([2.0, 3.0]))       # (3, 2, 2)
        tensor([[[0., 1.],
                 [1., 0.]],
        <BLANKLINE>
                [[0., 0.],
                 [0., 0.]],
        <BLANKLINE>
                [[2., 0.],
                 [0., 0.]]])
    """
    argument_checks.check_chunk_size("hessian", chunk_size)
    argument_checks.check_mesh("hessian", mesh)

    def compute_hessian(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        if functorch_interop.must_hand_over():
            argument_checks.refuse_mesh("hessian", mesh)
            by = call_torch_holomorphic if holomorphic else call_torch_transform
            return _hessian_by_torch(
                by, func, argnums, argnames, has_aux, return_value, args, kwargs
            )
        call = describe_call("hessian", func, argnums, argnames, holomorphic=holomorphic)
        which = (argnums, argnames)

        def compute(*ranks: Any) -> Any:
            first = InnerJacobian(
                call, func, args, kwargs, which, has_aux, chunk_size, holomorphic=holomorphic
            )
            given = first.given

            def jacobian_as_aux(*xs: Any) -> Any:
                j, y = first(*xs)
                return j, (j, y)

            how = "error", chunk_size, holomorphic
            found = compute_by_columns(call, jacobian_as_aux, given, True, *how, *ranks)
            columns = [  # for each output and input of `first`
                given.unflatten_results(c) for c in found.blocks
            ]
            n = len(given.tensors)
            h = first.tree([columns[i : i + n] for i in range(0, len(columns), n)])
            return first.answer(h, *found.aux, return_value)

        return _run_over_ranks(mesh, call, compute)

    return compute_hessian


def _make_reverse_jacobian(
    verb: str,
    compute: Callable[..., JacobianBlocks],
    which: tuple[Any, Any],  # argnums, argnames
    has_aux: bool,
    return_value: bool,
    chunk_size: Chunk,
    holomorphic: bool,
    mesh: DeviceMesh | None,
) -> Callable:
    argument_checks.check_mesh(verb, mesh)

    def rows(
        call: TransformCall, f: Callable, given: DiffArguments, has_aux: bool, *ranks: Any
    ) -> JacobianBlocks:
        return compute(call, f, given.tensors, has_aux, chunk_size, holomorphic, *ranks)

    size = get_torch_chunk_size(chunk_size)
    return _make_jacobian(
        verb,
        rows,
        which,
        has_aux,
        return_value,
        holomorphic,
        RuntimeError,
        "jacrev",
        mesh,
        chunk_size=size,
    )


def _make_jacobian(
    verb: str,
    sweep: Callable[..., JacobianBlocks],
    which: tuple[Any, Any],  # argnums, argnames
    has_aux: bool,
    return_value: bool,
    holomorphic: bool,
    error: type[Exception],
    torchs: str,  # the transform of torch.func that does the same
    mesh: DeviceMesh | None,
    **options: Any,  # further ones of that transform
) -> Callable:
    """Return a function that runs a call: the blocks of ``sweep``, and the value or aux."""
    beside = has_aux or return_value

    def compute_jacobian(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        f = with_value_as_aux(verb, func, has_aux) if return_value else func
        if functorch_interop.must_hand_over():
            argument_checks.refuse_mesh(verb, mesh)
            by = call_torch_holomorphic if holomorphic else call_torch_transform
            return by(torchs, f, args, kwargs, *which, has_aux=beside, **options)
        call = describe_call(verb, func, *which, holomorphic=holomorphic)

        def compute(*ranks: Any) -> Any:
            given = DiffArguments(call, args, kwargs, *which, error)
            found = sweep(call, lambda *xs: given.call(f, xs), given, beside, *ranks)
            tree = found.tree(given.unflatten_results)
            return (tree, found.aux) if beside else tree

        return _run_over_ranks(mesh, call, compute)

    return compute_jacobian


def _run_over_ranks(mesh: DeviceMesh | None, call: TransformCall, compute: Callable) -> Any:
    """Return ``compute()``, or ``compute`` of the ranks of a mesh, which all make this call."""
    if mesh is None:
        return compute()
    from forall._mesh.rank_call import run_rank_call  # imports torch.distributed

    return run_rank_call(mesh, call, compute)


def _hessian_by_torch(
    by: Callable,  # takes the first and the second derivatives, by torch.func
    func: Callable,
    argnums: Any,
    argnames: Any,
    has_aux: bool,
    return_value: bool,
    args: tuple,
    kwargs: dict,
) -> Any:
    @functools.wraps(func, updated=())  # argnames asks it for names
    def jacobian_as_value(*args: Any, **kwargs: Any) -> Any:
        f = with_value_as_aux("hessian", func, has_aux)
        j, y = by("jacrev", f, args, kwargs, argnums, argnames, has_aux=True)
        return j, (j, y)

    h, (j, y) = by("jacfwd", jacobian_as_value, args, kwargs, argnums, argnames, has_aux=True)
    return pack_answer(h, j, y, has_aux, return_value)
