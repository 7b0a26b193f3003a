"""Checks of the arguments of transforms, with the errors that they raise."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from forall._api.chunk_size import Chunks
from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._core.errors import Call, columns, kind, short
from forall._core.escaped_values import flatten
from forall._random.keys import check as check_key


def callable_(verb: str, func: Any) -> None:
    if is_dynamo_compiling():
        return  # Dynamo can rarely tell if an object is callable, and traces this function
    if not callable(func):
        raise TypeError(
            f"{verb}(func): func must be callable.\n"
            f"{columns([('func', short(func), kind(func))])}\n"
            f"Pass the function itself, not its result: {verb}(f), not {verb}(f(x))."
        )


def randomness(verb: str, flag: Any, *, keys: bool = False) -> None:
    if keys and isinstance(flag, torch.Tensor):
        check_key(f"{verb}(randomness={short(flag)})", flag)
    elif not isinstance(flag, str) or flag not in ("error", "different", "same"):
        flags = "'error' (default), 'different' and 'same'"
        raise RuntimeError(
            f"{verb}(randomness={short(flag)}): no such flag.\n"
            f"It is one of {flags}{', or a key of forall.random' if keys else ''}."
        )


def no_key(call: Call, flag: Any) -> None:
    """Refuse a key of forall.random where torch's own vmap does the work, which draws by no key."""
    if isinstance(flag, torch.Tensor):
        raise NotImplementedError(
            f"{call}: torch.compile and the transforms of torch.func cannot draw by a key.\n"
            f"{columns([('randomness', short(flag))])}\n"
            "Use forall's transforms around it, or hand each example a key: vmap(f)(x, split(key, "
            "n))."
        )


def divergence(verb: str, given: Any) -> None:
    if given not in ("split", "error"):
        raise ValueError(
            f"{verb}: divergence must be 'split' or 'error'.\n"
            f"{columns([('divergence', repr(given))])}\n"
            "'split' runs examples that part in groups; 'error' refuses them."
        )


def max_steps(verb: str, steps: Any) -> None:
    if steps is not None and (not isinstance(steps, int) or steps < 0):
        raise ValueError(
            f"{verb}: max_steps counts steps.\n"
            f"{columns([('max_steps', short(steps), kind(steps))])}\n"
            "Pass an int of at least 0, or None."
        )


def chunk_size(verb: str, size: Any) -> None:
    automatic = size == "auto" or isinstance(size, Chunks)
    if size is None or automatic or (isinstance(size, int) and size > 0):
        return
    raise ValueError(
        f"{verb}(chunk_size={short(size)}): a chunk holds at least one example.\n"
        "Pass an int above 0, 'auto' for as many as fit, or None to run all examples at once."
    )


# --- where a derivative is taken ---------------------------------------------------------------


def primals(call: Call, given: tuple) -> tuple[list, Any]:
    """Return the leaves and tree of the primals; forward mode takes tensors only."""
    leaves, spec = flatten(given)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise RuntimeError(
                f"{call}: primals must hold tensors only.\n"
                f"{columns([('primal', short(leaf), kind(leaf))])}\n"
                f"Close over anything else: lambda x: {short_name(call)}(x, {short(leaf)})."
            )
        differentiable(call, leaf, ValueError)
    return leaves, spec


def short_name(call: Call) -> str:
    name = getattr(call.func, "__name__", "f")
    return name if name.isidentifier() else "f"


def a_tuple(call: Call, given: Any) -> None:
    """Check that the primals of `jvp` are a tuple that holds something."""
    if not isinstance(given, tuple):
        raise RuntimeError(
            f"{call}: primals must be a tuple, one entry per argument.\n"
            f"{columns([('primals', short(given), kind(given))])}\n"
            "For one argument write (x,)."
        )
    if not pytree.leaves(given):
        raise RuntimeError(f"{call}: primals is empty.\nPass at least one tensor.")


def differentiable(
    call: Call, x: torch.Tensor, error: type[Exception] = RuntimeError
) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise error(
            f"{call}: only floating-point and complex tensors have a derivative.\n"
            f"{columns([('differentiated', short(x))])}\n"
            "Convert it (x.float()), or do not differentiate with respect to it."
        )
    return x


def no_tensor(call: Call, leaves: list) -> ValueError:
    """Return the error for arguments without a tensor; numbers beside tensors are no error."""
    return ValueError(
        f"{call}: there is no tensor to differentiate with respect to.\n"
        f"{columns([('differentiated', short(x), kind(x)) for x in leaves])}\n"
        f"{unknown_tree(leaves[0]) or 'Make it a tensor: torch.tensor(x).'}"
    )


def unknown_tree(x: Any) -> str:
    """Return the cure for an object that torch's pytrees take for a leaf; "" for any other leaf."""
    kind = type(x)
    name = kind.__name__
    if isinstance(x, type):
        return ""
    if is_dataclass(x):
        return (
            f"Its fields are not seen: register it once, torch.export.register_dataclass({name})."
        )
    register = f"torch.utils._pytree.register_pytree_node({name}, "
    if names := [a.name for a in getattr(kind, "__attrs_attrs__", ())]:
        parts = "".join(f"x.{n}, " for n in names)
        return (
            "Its fields are not seen: register it once,\n"
            f"{register}lambda x: (({parts.rstrip()}), None), lambda xs, _: {name}(*xs))."
        )
    known = getattr(sys.modules.get("optree"), "register_pytree_node", None)
    if known is not None and known.get(kind) is not None:
        return (
            "optree knows its parts, and torch does not: register it with torch too,\n"
            f"{register}flatten, unflatten)."
        )
    return ""


def real_or_complex(call: Call, what: str, tensors: list, holomorphic: bool | None) -> None:
    """Check that tensors are real; with ``holomorphic``, that they are complex.

    A Jacobian has one column per real number, that of a holomorphic function one per complex
    number. ``holomorphic`` is None for a transform that has no such option.
    """
    among = [x for x in tensors if isinstance(x, torch.Tensor)]
    for x in among:
        if x.is_nested:
            raise NotImplementedError(
                f"{call}: the {what} of a Jacobian must not be nested tensors.\n"
                f"{columns([(what, short(x))])}\n"
                "Take their rows (x.values()), which have one shape, or use vjp or jvp."
            )
    wrong = [x for x in among if x.is_complex() is not bool(holomorphic)]
    if not wrong:
        return
    rows = columns([(what, short(x)) for x in wrong])
    if holomorphic:
        raise RuntimeError(
            f"{call}: the {what} of a holomorphic function must be complex.\n{rows}\n"
            "Convert them (z.to(torch.complex64)), or leave out holomorphic."
        )
    option = HOLOMORPHIC if holomorphic is False and what == "inputs" else ""
    raise RuntimeError(
        f"{call}: the {what} of a Jacobian must be real.\n{rows}\n"
        f"Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.{option}"
    )


HOLOMORPHIC = "\nFor a complex-differentiable function give holomorphic=True: the result is df/dz."


def not_nested(call: Call, tensors: list) -> None:
    """Refuse nested tensors as primals of `linearize`, whose recorded program has one shape."""
    for x in tensors:
        if x.is_nested:
            raise NotImplementedError(
                f"{call}: a primal must not be a nested tensor.\n"
                f"{columns([('primal', short(x))])}\n"
                "Take its rows (x.values()), which have one shape, or use jvp."
            )


# --- tangents and cotangents -------------------------------------------------------------------


def tangents(call: Call, primals: list, spec: Any, given: Any) -> list:
    if not isinstance(given, tuple):
        raise RuntimeError(
            f"{call}: tangents must be a tuple, one entry per primal.\n"
            f"{columns([('tangents', short(given), kind(given))])}\n"
            "For one argument write (t,)."
        )
    leaves, tangent_spec = flatten(given)
    if tangent_spec != spec:
        rows = [("primals", pytree.text(spec)), ("tangents", pytree.text(tangent_spec))]
        raise RuntimeError(
            f"{call}: tangents must be shaped like primals.\n{columns(rows)}\n"
            "Give every primal one tangent, in the same tree."
        )
    rows = [
        (f"primal {short(p)}", f"tangent {short(t)}")
        for p, t in zip(primals, leaves, strict=True)
        if not isinstance(t, torch.Tensor) or p.shape != t.shape
    ]
    if rows:
        raise RuntimeError(
            f"{call}: a tangent must have its primal's shape.\n{columns(rows)}\n"
            "A tangent is a direction in the space of its primal."
        )
    for t in leaves:
        differentiable(call, t, ValueError)
    rows = [
        (f"primal {short(p)}", f"tangent {short(t)}")
        for p, t in zip(primals, leaves, strict=True)
        if p.is_complex() != t.is_complex()
    ]
    if rows:
        raise RuntimeError(
            f"{call}: a tangent must be complex where its primal is, and real where it is.\n"
            f"{columns(rows)}\nConvert it: t.to(x.dtype), or t.real."
        )
    return leaves


def vector_last(call: Call, args: tuple) -> tuple[tuple, Any]:
    """Split the arguments of `hvp` into those of its function and the vector."""
    if len(args) < 2:
        raise TypeError(
            f"{call}: the arguments of the function come first, then the vector.\n"
            f"{columns([('positional arguments', str(len(args)))])}\n"
            f"Pass both: hvp({short_name(call)})(x, v)."
        )
    return args[:-1], args[-1]


def vector_like(call: Call, given: Any, vector: Any) -> tuple:
    """Return the vector's leaves at the differentiated tensors; `tangents` checks their shapes."""
    leaves, spec = flatten(vector)
    if spec != given.spec:
        rows = [("arguments", pytree.text(given.spec)), ("vector", pytree.text(spec))]
        raise RuntimeError(
            f"{call}: the vector must be shaped like what is differentiated.\n{columns(rows)}\n"
            "Give it the same tree; several argnums take a tuple of vectors."
        )
    return tuple(leaves[i] for i in given.at)


def alike(call: Call, primals: list, tangents: list) -> None:
    """Check dtypes and devices: a program is kept for those that it was recorded with."""
    rows = [
        (f"primal {short(p)} on {p.device}", f"tangent {short(t)} on {t.device}")
        for p, t in zip(primals, tangents, strict=True)
        if p.dtype != t.dtype or p.device != t.device
    ]
    if rows:
        raise RuntimeError(
            f"{call}: a tangent must have its primal's dtype and device.\n{columns(rows)}\n"
            "Convert it: t.to(x)."
        )


def cotangents(call: Call, outputs: list, spec: Any, given: Any) -> list:
    leaves, given_spec = flatten(given)
    if given_spec != spec:
        rows = [("output", pytree.text(spec)), ("cotangents", pytree.text(given_spec))]
        raise RuntimeError(
            f"{call}: cotangents must be shaped like the output.\n{columns(rows)}\n"
            "Give every output one cotangent, in the same tree."
        )
    pairs = list(zip(outputs, leaves, strict=True))
    for _, c in pairs:
        if c is not None and not isinstance(c, torch.Tensor):
            raise TypeError(
                f"{call}: a cotangent must be a tensor.\n"
                f"{columns([('cotangent', short(c), kind(c))])}\n"
                "Make it one: torch.tensor(c)."
            )
    rows = [
        (f"output {short(y)}", f"cotangent {short(c)}")
        for y, c in pairs
        if (c is None and (y.numel() != 1 or y.is_complex()))
        or (c is not None and c.shape != y.shape)
    ]
    if rows:
        raise RuntimeError(
            f"{call}: a cotangent must have its output's shape.\n{columns(rows)}\n"
            "A cotangent weighs every entry of its output."
        )
    rows = [
        (f"output {short(y)}", f"cotangent {short(c)}")
        for y, c in pairs
        if c is not None and c.is_complex() != y.is_complex()
    ]
    if rows:
        raise RuntimeError(
            f"{call}: a cotangent must be complex where its output is, and real where it is.\n"
            f"{columns(rows)}\nConvert it: c.to(y.dtype), or c.real."
        )
    return [torch.ones_like(y) if c is None else c for y, c in pairs]


# --- what the function returns -----------------------------------------------------------------


def with_aux(call: Call, out: Any, first: str = "output") -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise RuntimeError(
            f"{call}: with has_aux=True the function returns a tuple ({first}, aux).\n"
            f"{columns([('returned', short(out), kind(out))])}\n"
            "Return two things, or leave has_aux out."
        )
    return out


def outputs(call: Call, out: Any) -> tuple[list, Any]:
    """The leaves of a function's output, which must be tensors."""
    leaves, spec = pytree.flatten(out)
    if not leaves:
        raise RuntimeError(
            f"{call}: the function returned no tensor.\n"
            f"{columns([('returned', short(out))])}\nReturn at least one."
        )
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise RuntimeError(
                f"{call}: the function must return tensors, or trees of them.\n"
                f"{columns([('returned', short(leaf), kind(leaf))])}\n"
                "has_aux=True lets you return other things beside them."
            )
    return leaves, spec


def floating(call: Call, outputs: list) -> None:
    rows = [("output", short(y)) for y in outputs if not (y.is_floating_point() or y.is_complex())]
    if rows:
        raise RuntimeError(
            f"{call}: outputs must be floating-point or complex.\n{columns(rows)}\n"
            "No derivative reaches any other. Convert it, or return it beside, with has_aux=True."
        )


def scalar(call: Call, value: Any, holomorphic: bool | None = None) -> None:
    """Check that a function returned a scalar; see `real_or_complex` for ``holomorphic``."""
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(
            f"{call}: the function must return a tensor.\n"
            f"{columns([('returned', short(value), kind(value))])}\n"
            "Return the scalar to differentiate; has_aux=True lets you return more beside it."
        )
    with functions_off():
        rank, is_complex = value.dim(), value.is_complex()
    if rank:
        raise RuntimeError(
            f"{call}: the function must return a scalar, a tensor of rank 0.\n"
            f"{columns([('returned', short(value))])}\n"
            "Reduce it (.sum(), .mean()), or use jacrev for the derivative of every entry."
        )
    if holomorphic and not is_complex:
        raise RuntimeError(
            f"{call}: a holomorphic function must return a complex number.\n"
            f"{columns([('returned', short(value))])}\n"
            "Convert it (y.to(torch.complex64)), or leave out holomorphic."
        )
    if is_complex and not holomorphic:
        option = "" if holomorphic is None else HOLOMORPHIC
        raise RuntimeError(
            f"{call}: the function must return a real number.\n"
            f"{columns([('returned', short(value))])}\n"
            "Return its real part or its absolute value, or use vjp with a complex cotangent."
            f"{option}"
        )


def independent(call: Call, y: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{call}: with strict=True every output must depend on the primals.\n"
        f"{columns([('output', short(y))])}\n"
        "Leave strict out to get zeros for it."
    )
