"""What the transforms ask of their arguments, and what they say where it does not hold."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from forall._batching.batched import Batched
from forall._core.errors import columns, name_of, short
from forall._torch import trees

if TYPE_CHECKING:
    from collections.abc import Callable


def callable_(verb: str, func: Any) -> None:
    if not callable(func):
        raise TypeError(
            f"{verb}(func): func must be callable.\n"
            f"{columns([('func', short(func), type(func).__name__)])}\n"
            f"Pass the function itself, not its result: {verb}(f), not {verb}(f(x))."
        )


def randomness(verb: str, flag: Any) -> None:
    if flag not in {"error", "different", "same"}:
        raise RuntimeError(
            f"{verb}(randomness={flag!r}): no such flag.\n"
            "It is one of 'error' (default), 'different' and 'same'."
        )


def chunk_size(verb: str, size: Any) -> None:
    if size is not None and (not isinstance(size, int) or size <= 0):
        raise ValueError(
            f"{verb}(chunk_size={size!r}): a chunk holds at least one example.\n"
            "Pass an int above 0, or None to run all examples at once."
        )


def named(call: str, func: Callable, in_dims: dict, args: tuple, kwargs: dict) -> tuple:
    """The arguments bound to the names that a dict of in_dims uses."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    for name in in_dims:
        if name not in bound.arguments and name not in bound.kwargs:
            raise ValueError(
                f"{call}: in_dims names {name!r}, which the call does not pass.\n"
                f"{columns([('passed', ', '.join(bound.arguments))])}\n"
                "Name only arguments that are passed."
            )
    positional = dict(bound.arguments)
    extra: dict = {}
    args_out: list = []
    for parameter in bound.signature.parameters.values():
        if parameter.name not in positional:
            continue
        value = positional[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            extra.update(value)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            args_out.extend(value)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            args_out.append(value)
        else:
            extra[parameter.name] = value
    return tuple(args_out), extra


def named_dims(in_dims: dict, args: tuple, kwargs: dict) -> tuple:
    return tuple(None for _ in args), {k: in_dims.get(k) for k in kwargs}


def inputs(call: str, given: tuple, in_dims: Any) -> tuple[list, Any, list, int]:
    """Leaves, tree, a dim per leaf (from the front; None for shared) and the number of examples."""
    args, kwargs = given
    if isinstance(in_dims, tuple) and len(in_dims) == 2 and isinstance(in_dims[1], dict) and kwargs.keys() == in_dims[1].keys() and kwargs:
        by_args, by_kwargs = in_dims
    else:
        by_args, by_kwargs = in_dims, None
    if not isinstance(by_args, (int, tuple, list)):
        raise ValueError(
            f"{call}: in_dims must be an int, a tuple or a dict.\n"
            f"{columns([('in_dims', short(by_args), type(by_args).__name__)])}\n"
            "Give one int for all arguments, a tuple with one entry per argument, or a dict of "
            "names."
        )
    if not args and not kwargs:
        raise ValueError(
            f"{call}: called without arguments.\n"
            "There is nothing to map over. Pass at least one tensor."
        )
    leaves, spec = trees.flatten((args, kwargs))
    args_spec = spec.child(0)
    if isinstance(by_args, list):
        by_args = tuple(by_args)
    arg_dims = trees.prefix(by_args, args_spec)
    if arg_dims is None:
        rows = [(f"argument {i}", short(a)) for i, a in enumerate(args)]
        raise ValueError(
            f"{call}: in_dims does not fit the arguments.\n"
            f"{columns([('in_dims', short(by_args)), *rows])}\n"
            "A tuple of in_dims has one entry per argument; a tree of them is shaped like its "
            "argument."
        )
    rest = len(leaves) - len(arg_dims)
    kwarg_dims = [None] * rest if by_kwargs is None else trees.prefix(
        by_kwargs, spec.child(1)
    )
    dims = [*arg_dims, *kwarg_dims]
    dims = [
        _dim(call, i, leaf, dim, given)
        for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
    ]
    mapped = [(i, leaf, d) for i, (leaf, d) in enumerate(zip(leaves, dims, strict=True)) if d is not None]
    if not mapped:
        raise ValueError(
            f"{call}: no argument is mapped.\n"
            f"{columns([('in_dims', short(in_dims))])}\n"
            "At least one tensor needs an int in in_dims, or there is no number of examples."
        )
    sizes = {leaf.shape[d] for _, leaf, d in mapped}
    if len(sizes) > 1:
        names = paths(given)
        rows = [
            (names[i], short(leaf), f"in_dims {d}", f"size {leaf.shape[d]}") for i, leaf, d in mapped
        ]
        raise ValueError(
            f"{call}: the mapped axes differ in size.\n{columns(rows)}\n"
            "All must have one size. To share an argument between examples, give it in_dims=None."
        )
    return leaves, spec, dims, sizes.pop()


def paths(given: tuple) -> list[str]:
    """How a user would write each leaf of the arguments."""
    args, kwargs = given
    found = [
        "args" + trees.keystr(path) for path, _ in trees.tree_flatten_with_path(args)[0]
    ]
    return found + ["kwargs" + trees.keystr(p) for p, _ in trees.tree_flatten_with_path(kwargs)[0]]


def _dim(call: str, i: int, leaf: Any, dim: Any, given: tuple) -> int | None:
    if dim is None:
        return None
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(
            f"{call}: a dim of in_dims must be an int or None.\n"
            f"{columns([(paths(given)[i], short(leaf), f'in_dims {dim!r}', type(dim).__name__)])}\n"
            "Give the dim that counts the examples, or None to share the argument."
        )
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(
            f"{call}: only tensors can be mapped.\n"
            f"{columns([(paths(given)[i], short(leaf), f'in_dims {dim}', type(leaf).__name__)])}\n"
            "Give it in_dims=None to share it between examples, or make it a tensor."
        )
    if not -leaf.dim() <= dim < leaf.dim():
        raise ValueError(
            f"{call}: in_dims names a dim that the argument does not have.\n"
            f"{columns([(paths(given)[i], short(leaf), f'in_dims {dim}', f'rank {leaf.dim()}')])}\n"
            f"Give a dim in [{-leaf.dim()}, {leaf.dim()}), or None to share the argument."
        )
    return dim % leaf.dim()


def out_dims(call: str, given: Any, spec: Any) -> list:
    places = trees.prefix(given, spec)
    if places is None or not all(
        p is None or (isinstance(p, int) and not isinstance(p, bool)) for p in places
    ):
        raise ValueError(
            f"{call}: out_dims does not fit the result.\n"
            f"{columns([('out_dims', short(given)), ('result', str(spec))])}\n"
            "Give one int for all results, or a tree of ints (or None) like the result."
        )
    return places


def out_dim_outside(call: str, r: torch.Tensor, place: int) -> Exception:
    return IndexError(
        f"{call}: out_dims names a place that the result does not have.\n"
        f"{columns([('result of one example', short(r), f'out_dims {place}')])}\n"
        f"Give a place in [{-r.dim() - 1}, {r.dim() + 1})."
    )


def unmapped_result(call: str, r: torch.Tensor, level: Any) -> torch.Tensor:
    """A result with out_dims None leaves as it is, if it is the same for all examples."""
    if not (isinstance(r, Batched) and r.level is level):
        return r
    if r.axis is not None:
        raise ValueError(
            f"{call}: out_dims is None for a result that differs between the examples.\n"
            f"{columns([('result of one example', short(r))])}\n"
            "Give it an int: the place of the examples in the result."
        )
    return r.value


def name(func: Callable) -> str:
    return name_of(func)


def primals(call: str, given: Any) -> tuple[list, Any]:
    if not isinstance(given, tuple):
        raise RuntimeError(
            f"{call}: primals must be a tuple, one entry per argument.\n"
            f"{columns([('primals', short(given), type(given).__name__)])}\n"
            "For one argument write (x,)."
        )
    leaves, spec = trees.flatten(given)
    if not leaves:
        raise RuntimeError(f"{call}: primals is empty.\nPass at least one tensor.")
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise RuntimeError(
                f"{call}: primals must hold tensors only.\n"
                f"{columns([('primal', short(leaf), type(leaf).__name__)])}\n"
                "Close over anything else: jvp(lambda x: f(x, n), (x,), (t,))."
            )
    return leaves, spec


def tangents(call: str, primals: list, spec: Any, given: Any) -> list:
    if not isinstance(given, tuple):
        raise RuntimeError(
            f"{call}: tangents must be a tuple, one entry per primal.\n"
            f"{columns([('tangents', short(given), type(given).__name__)])}\n"
            "For one argument write (t,)."
        )
    leaves, tangent_spec = trees.flatten(given)
    if tangent_spec != spec:
        raise RuntimeError(
            f"{call}: tangents must be shaped like primals.\n"
            f"{columns([('primals', str(spec)), ('tangents', str(tangent_spec))])}\n"
            "Give every primal one tangent, in the same tree."
        )
    rows = []
    for p, t in zip(primals, leaves, strict=True):
        if not isinstance(t, torch.Tensor) or p.shape != t.shape:
            rows.append((f"primal {short(p)}", f"tangent {short(t)}"))
    if rows:
        raise RuntimeError(
            f"{call}: a tangent must have its primal's shape.\n{columns(rows)}\n"
            "A tangent is a direction in the space of its primal."
        )
    return leaves


def with_aux(call: str, out: Any) -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise RuntimeError(
            f"{call}: with has_aux=True the function returns a tuple (output, aux).\n"
            f"{columns([('returned', short(out), type(out).__name__)])}\n"
            "Return two things, or leave has_aux out."
        )
    return out


def outputs(call: str, out: Any) -> tuple[list, Any]:
    """The leaves of a function's output, which must be tensors."""
    leaves, spec = trees.flatten(out)
    if not leaves:
        raise RuntimeError(
            f"{call}: the function returned no tensor.\n"
            f"{columns([('returned', short(out))])}\nReturn at least one."
        )
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise RuntimeError(
                f"{call}: the function must return tensors, or trees of them.\n"
                f"{columns([('returned', short(leaf), type(leaf).__name__)])}\n"
                "has_aux=True lets you return other things beside them."
            )
    return leaves, spec


def independent(call: str, y: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{call}: with strict=True every output must depend on the primals.\n"
        f"{columns([('output', short(y))])}\n"
        "Leave strict out to get zeros for it."
    )


def cotangents(call: str, outputs: list, spec: Any, given: Any) -> list:
    leaves, given_spec = trees.flatten(given)
    if given_spec != spec:
        raise RuntimeError(
            f"{call}: cotangents must be shaped like the output.\n"
            f"{columns([('output', str(spec)), ('cotangents', str(given_spec))])}\n"
            "Give every output one cotangent, in the same tree."
        )
    rows = [
        (f"output {short(y)}", f"cotangent {short(c)}")
        for y, c in zip(outputs, leaves, strict=True)
        if not isinstance(c, torch.Tensor) or c.shape != y.shape
    ]
    if rows:
        raise RuntimeError(
            f"{call}: a cotangent must have its output's shape.\n{columns(rows)}\n"
            "A cotangent weighs every entry of its output."
        )
    return leaves


def differentiable(call: str, x: torch.Tensor) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise RuntimeError(
            f"{call}: only floating-point and complex tensors have a derivative.\n"
            f"{columns([('differentiated', short(x))])}\n"
            "Convert it (x.float()), or leave it out of argnums."
        )
    return x
