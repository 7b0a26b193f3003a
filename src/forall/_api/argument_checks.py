"""Checks of the arguments of transforms, with the errors that they raise."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from forall._api.chunk_size import Chunks
from forall._compat import pytree
from forall._compat.device_mesh import is_mesh_class
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._core.errors import TransformCall, format_columns, format_short, type_name_of
from forall._core.escaped_values import flatten_without_escaped
from forall._random.keys import check_key

if TYPE_CHECKING:
    from collections.abc import Hashable


def check_callable(verb: str, func: Any) -> None:
    if is_dynamo_compiling():
        return  # Dynamo can rarely tell if an object is callable, and traces this function
    if not callable(func):
        raise documented_error(TypeError, "not-callable")(
            f"{verb}(func): func must be callable.\n"
            f"{format_columns([('func', format_short(func), type_name_of(func))])}\n"
            f"Pass the function itself, not its result: {verb}(f), not {verb}(f(x))."
        )


_PLAIN = frozenset({int, bool, float, str, NoneType})


def fix_options(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return options with Python's numbers in the place of symbols, which a tracer gives for sizes.

    Options decide how a transform runs, so the tracer is told that the size is fixed.
    """
    if _are_plain(args) and _are_plain(kwargs.values()):  # as almost always
        return args, kwargs
    return _fix_numbers(args), _fix_numbers(kwargs)


def _are_plain(options: Iterable[Any]) -> bool:
    """Return True for numbers and words, and tuples of these."""
    for option in options:
        kind = type(option)
        if kind not in _PLAIN and not (kind is tuple and _PLAIN.issuperset(map(type, option))):
            return False
    return True


def _fix_numbers(options: Any) -> Any:
    """Return options without symbols.

    A container that has none is returned as it is: the caller may change it later.
    """
    if isinstance(options, torch.SymInt):
        return int(options)
    if type(options) in (tuple, list):
        fixed = [_fix_numbers(x) for x in options]
        is_same = all(map(operator.is_, fixed, options))
        return options if is_same else type(options)(fixed)
    if type(options) is dict:
        values = _fix_numbers([*options.values()])
        is_same = all(map(operator.is_, values, options.values()))
        return options if is_same else dict(zip(options, values, strict=True))
    return options


def check_randomness(verb: str, flag: Any, *, keys: bool = False) -> None:
    if keys and isinstance(flag, torch.Tensor):
        check_key(f"{verb}(randomness={format_short(flag)})", flag)
    elif not isinstance(flag, str) or flag not in ("error", "different", "same"):
        flags = "'error' (default), 'different' and 'same'"
        raise documented_error(RuntimeError, "unknown-option")(
            f"{verb}(randomness={format_short(flag)}): no such flag.\n"
            f"It is one of {flags}{', or a key of forall.random' if keys else ''}."
        )


def refuse_own_options(
    call: TransformCall, flag: Any, axis_name: Hashable, axis_size: int | None, mesh: Any
) -> None:
    """Refuse options that torch's own vmap lacks where that does the work."""
    if axis_name is not None or axis_size is not None or mesh is not None:
        raise documented_error(NotImplementedError, "compiled-axis")(
            f"{call}: torch.compile and the transforms of torch.func know no named axes.\n"
            f"{format_columns([('axis_name', repr(axis_name)), ('axis_size', repr(axis_size))])}\n"
            "Use forall's transforms around it, and forall.jit in the place of torch.compile."
        )
    if isinstance(flag, torch.Tensor):
        raise documented_error(NotImplementedError, "no-keyed-draw")(
            f"{call}: torch.compile and the transforms of torch.func cannot draw by a key.\n"
            f"{format_columns([('randomness', format_short(flag))])}\n"
            "Use forall's transforms around it, or hand each example a key: vmap(f)(x, split(key, "
            "n))."
        )


def check_divergence(verb: str, given: Any) -> None:
    if given not in ("split", "error"):
        raise documented_error(ValueError, "unknown-option")(
            f"{verb}: divergence must be 'split' or 'error'.\n"
            f"{format_columns([('divergence', repr(given))])}\n"
            "'split' runs examples that diverge in groups; 'error' refuses them."
        )


def check_max_steps(verb: str, steps: Any) -> None:
    if steps is not None and (not isinstance(steps, int) or steps < 0):
        raise documented_error(ValueError, "count-of-steps")(
            f"{verb}: max_steps counts steps.\n"
            f"{format_columns([('max_steps', format_short(steps), type_name_of(steps))])}\n"
            "Pass an int of at least 0, or None."
        )


def check_axis(verb: str, name: Any, size: Any) -> None:
    try:
        # No hash(name): not every release's Dynamo reads that.
        is_name = bool({name: None}) and not isinstance(name, tuple)
    except TypeError:
        is_name = False
    if not is_name:
        raise documented_error(TypeError, "axis-name")(
            f"{verb}: axis_name must be hashable, and no tuple.\n"
            f"{format_columns([('axis_name', format_short(name), type_name_of(name))])}\n"
            "Give a string. A tuple stands for several axes, in psum and its kin."
        )
    if size is not None and (type(size) is not int or size < 0):
        raise documented_error(ValueError, "axis-size")(
            f"{verb}: axis_size counts examples.\n"
            f"{format_columns([('axis_size', format_short(size), type_name_of(size))])}\n"
            "Pass an int of at least 0, or None."
        )


def refuse_mesh(verb: str, mesh: Any) -> None:
    """Refuse a mesh where torch's own transform does the work."""
    if mesh is not None:
        raise documented_error(NotImplementedError, "compiled-axis")(
            f"{verb}: torch.compile and the transforms of torch.func know no mesh.\n"
            f"{format_columns([('mesh', str(mesh))])}\n"
            "Use forall's transforms around it, and forall.jit in the place of torch.compile."
        )


def check_named_mesh(verb: str, mesh: Any) -> None:
    """Check a mesh whose dims are named axes."""
    _check_is_mesh(verb, mesh)
    if not mesh.mesh_dim_names:
        raise documented_error(ValueError, "mesh")(
            f"{verb}: the dims of the mesh have no names, by which collectives could know them.\n"
            f"{format_columns([('mesh', str(mesh))])}\n"
            'Name them: init_device_mesh("cuda", (8,), mesh_dim_names=("dp",)).'
        )


def _check_is_mesh(verb: str, mesh: Any) -> None:
    if not is_mesh_class(type(mesh)):
        raise documented_error(TypeError, "mesh")(
            f"{verb}: mesh must be a torch.distributed DeviceMesh.\n"
            f"{format_columns([('mesh', format_short(mesh), type_name_of(mesh))])}\n"
            'Make one: init_device_mesh("cuda", (8,), mesh_dim_names=("dp",)).'
        )


def check_mesh(verb: str, mesh: Any, randomness: Any = None) -> None:
    """Check a mesh, unless it is None."""
    if mesh is None:
        return
    _check_is_mesh(verb, mesh)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f'mesh["{names[0]}"]' if names else "a mesh with mesh_dim_names, and one of them"
        raise documented_error(ValueError, "mesh")(
            f"{verb}: the examples lie along one dim of a mesh.\n"
            f"{format_columns([('mesh', str(mesh), f'{mesh.ndim} dims')])}\n"
            f"Choose one: {one}."
        )
    if isinstance(randomness, str) and randomness == "same":
        raise documented_error(ValueError, "mesh")(
            f"{verb}: the generators of the ranks need not agree, so no draw is the same for all "
            "examples of a mesh.\n"
            f"{format_columns([('randomness', repr(randomness))])}\n"
            "Pass a key of forall.random, or draw before the call and share the numbers."
        )


def check_chunk_size(verb: str, size: Any) -> None:
    if size is None:
        return
    automatic = size == "auto" or isinstance(size, Chunks)
    if automatic or (isinstance(size, int) and size > 0):
        return
    raise documented_error(ValueError, "chunk-size")(
        f"{verb}(chunk_size={format_short(size)}): a chunk holds at least one example.\n"
        "Pass an int above 0, 'auto' for as many as fit, or None to run all examples at once."
    )


# --- where a derivative is taken ---------------------------------------------------------------


def check_primals(call: TransformCall, given: tuple) -> tuple[list, Any]:
    """Return the leaves and tree of the primals; forward mode takes tensors only."""
    leaves, spec = flatten_without_escaped(given)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise documented_error(RuntimeError, "primals")(
                f"{call}: primals must hold tensors only.\n"
                f"{format_columns([('primal', format_short(leaf), type_name_of(leaf))])}\n"
                f"Close over anything else: lambda x: {get_short_name(call)}"
                f"(x, {format_short(leaf)})."
            )
        check_differentiable(call, leaf, ValueError)
    return leaves, spec


def get_short_name(call: TransformCall) -> str:
    name = getattr(call.func, "__name__", "f")
    return name if name.isidentifier() else "f"


def check_primals_tuple(call: TransformCall, given: Any) -> None:
    """Check that the primals of `jvp` are a tuple that holds something."""
    if not isinstance(given, tuple):
        raise documented_error(RuntimeError, "primals")(
            f"{call}: primals must be a tuple, one entry per argument.\n"
            f"{format_columns([('primals', format_short(given), type_name_of(given))])}\n"
            "For one argument write (x,)."
        )
    if not pytree.get_leaves(given):
        raise documented_error(RuntimeError, "primals")(
            f"{call}: primals is empty.\nPass at least one tensor."
        )


def make_argnums_error(call: TransformCall, given: Any) -> RuntimeError:
    cure = "Count the positional arguments from 0."
    if isinstance(given, str):
        cure = f"Names go in argnames: {call.verb}(f, argnames={given!r})."
    elif not isinstance(given, (int, float, list)):
        cure = f"The arguments of f come in a second call: {call.verb}(f)(x)."
    return documented_error(RuntimeError, "argnums-type")(
        f"{call}: argnums must be an int or a tuple of ints.\n"
        f"{format_columns([('argnums', format_short(given), type_name_of(given))])}\n{cure}"
    )


def check_differentiable(
    call: TransformCall, x: torch.Tensor, error: type[Exception] = RuntimeError
) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise documented_error(error, "not-differentiable")(
            f"{call}: only floating-point and complex tensors have a derivative.\n"
            f"{format_columns([('differentiated', format_short(x))])}\n"
            "Convert it (x.float()), or do not differentiate with respect to it."
        )
    return x


def make_no_tensor_error(call: TransformCall, leaves: list) -> ValueError:
    """Return the error for arguments without a tensor; numbers beside tensors are no error."""
    rows = [("differentiated", format_short(x), type_name_of(x)) for x in leaves]
    return documented_error(ValueError, "nothing-to-differentiate")(
        f"{call}: there is no tensor to differentiate with respect to.\n"
        f"{format_columns(rows)}\n"
        f"{suggest_tree(leaves[0], _AS_ARGUMENTS) or 'Make it a tensor: torch.tensor(x).'}"
    )


_AS_ARGUMENTS = (
    "Pass its parameters as a dict, {name: p.detach() for name, p in net.named_parameters()}, and\n"
    "call it by functional_call(net, parameters, (x,))."
)
_AS_STACKS = (
    "To run several modules, map their parameters, parameters, _ = stack_module_state(models),\n"
    "and call one by functional_call(models[0], parameters, (x,))."
)


def suggest_tree(x: Any, of_module: str = _AS_STACKS) -> str:
    """Return the cure for a leaf in which tensors may be that nobody sees; "" for any other leaf.

    ``of_module`` is the cure for a module.
    """
    if isinstance(x, torch.nn.Module):
        return of_module
    if isinstance(x, Iterator):
        return "What an iterator will give is not seen. Make it a list, or a dict."
    return suggest_registration(x)


def suggest_registration(x: Any) -> str:
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


def check_real_or_complex(
    call: TransformCall, what: str, tensors: list, holomorphic: bool | None
) -> None:
    """Check that tensors are real; with ``holomorphic``, that they are complex.

    A Jacobian has one column per real number, that of a holomorphic function one per complex
    number. ``holomorphic`` is None for a transform that has no such option.
    """
    among = [x for x in tensors if isinstance(x, torch.Tensor)]
    for x in among:
        if x.is_nested:
            raise documented_error(NotImplementedError, "nested-tensors")(
                f"{call}: the {what} of a Jacobian must not be nested tensors.\n"
                f"{format_columns([(what, format_short(x))])}\n"
                "Take their rows (x.values()), which have one shape, or use vjp or jvp."
            )
    wrong = [x for x in among if x.is_complex() is not bool(holomorphic)]
    if not wrong:
        return
    rows = format_columns([(what, format_short(x)) for x in wrong])
    if holomorphic:
        raise documented_error(RuntimeError, "holomorphic")(
            f"{call}: the {what} of a holomorphic function must be complex.\n{rows}\n"
            "Convert them (z.to(torch.complex64)), or leave out holomorphic."
        )
    option = HOLOMORPHIC_HINT if holomorphic is False and what == "inputs" else ""
    raise documented_error(RuntimeError, "complex-derivative")(
        f"{call}: the {what} of a Jacobian must be real.\n{rows}\n"
        f"Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.{option}"
    )


HOLOMORPHIC_HINT = (
    "\nFor a complex-differentiable function give holomorphic=True: the result is df/dz."
)


def refuse_nested_primals(call: TransformCall, tensors: list) -> None:
    """Refuse nested tensors as primals of `linearize`, whose recorded program has one shape."""
    for x in tensors:
        if x.is_nested:
            raise documented_error(NotImplementedError, "nested-tensors")(
                f"{call}: a primal must not be a nested tensor.\n"
                f"{format_columns([('primal', format_short(x))])}\n"
                "Take its rows (x.values()), which have one shape, or use jvp."
            )


# --- tangents and cotangents -------------------------------------------------------------------


def check_tangents(call: TransformCall, primals: list, spec: Any, given: Any) -> list:
    if not isinstance(given, tuple):
        raise documented_error(RuntimeError, "primals")(
            f"{call}: tangents must be a tuple, one entry per primal.\n"
            f"{format_columns([('tangents', format_short(given), type_name_of(given))])}\n"
            "For one argument write (t,)."
        )
    leaves, tangent_spec = flatten_without_escaped(given)
    if tangent_spec != spec:
        rows = [
            ("primals", pytree.format_tree(spec)),
            ("tangents", pytree.format_tree(tangent_spec)),
        ]
        raise documented_error(RuntimeError, "tangent-mismatch")(
            f"{call}: tangents must be shaped like primals.\n{format_columns(rows)}\n"
            "Give every primal one tangent, in the same tree."
        )
    rows = [
        (f"primal {format_short(p)}", f"tangent {format_short(t)}")
        for p, t in zip(primals, leaves, strict=True)
        if not isinstance(t, torch.Tensor) or p.shape != t.shape
    ]
    if rows:
        raise documented_error(RuntimeError, "tangent-mismatch")(
            f"{call}: a tangent must have its primal's shape.\n{format_columns(rows)}\n"
            "A tangent is a direction in the space of its primal."
        )
    for t in leaves:
        check_differentiable(call, t, ValueError)
    rows = [
        (f"primal {format_short(p)}", f"tangent {format_short(t)}")
        for p, t in zip(primals, leaves, strict=True)
        if p.is_complex() != t.is_complex()
    ]
    if rows:
        raise documented_error(RuntimeError, "tangent-mismatch")(
            f"{call}: a tangent must be complex where its primal is, and real where it is.\n"
            f"{format_columns(rows)}\nConvert it: t.to(x.dtype), or t.real."
        )
    return leaves


def split_off_vector(call: TransformCall, args: tuple) -> tuple[tuple, Any]:
    """Split the arguments of `hvp` into those of its function and the vector."""
    if len(args) < 2:
        raise documented_error(TypeError, "hvp-vector")(
            f"{call}: the arguments of the function come first, then the vector.\n"
            f"{format_columns([('positional arguments', str(len(args)))])}\n"
            f"Pass both: hvp({get_short_name(call)})(x, v)."
        )
    return args[:-1], args[-1]


def select_vector_leaves(call: TransformCall, given: Any, vector: Any) -> tuple:
    """Return the vector's leaves at the differentiated tensors; their shapes are unchecked."""
    leaves, spec = flatten_without_escaped(vector)
    if spec != given.spec:
        rows = [("arguments", pytree.format_tree(given.spec)), ("vector", pytree.format_tree(spec))]
        raise documented_error(RuntimeError, "hvp-vector")(
            f"{call}: the vector must be shaped like what is differentiated.\n"
            f"{format_columns(rows)}\n"
            "Give it the same tree; several argnums take a tuple of vectors."
        )
    return tuple(leaves[i] for i in given.at)


def check_same_dtype_device(call: TransformCall, primals: list, tangents: list) -> None:
    """Check dtypes and devices: a program is kept for those that it was recorded with."""
    rows = [
        (f"primal {format_short(p)} on {p.device}", f"tangent {format_short(t)} on {t.device}")
        for p, t in zip(primals, tangents, strict=True)
        if p.dtype != t.dtype or p.device != t.device
    ]
    if rows:
        raise documented_error(RuntimeError, "tangent-mismatch")(
            f"{call}: a tangent must have its primal's dtype and device.\n{format_columns(rows)}\n"
            "Convert it: t.to(x)."
        )


def check_one_cotangent(call: TransformCall, second: Any) -> None:
    """Check the second argument of a pull-back, which is none for another output."""
    if isinstance(second, torch.Tensor):
        raise documented_error(TypeError, "cotangent-mismatch")(
            f"{call}: the cotangents are one argument, shaped like the output.\n"
            f"{format_columns([('second argument', format_short(second))])}\n"
            "For an output that is a tuple pass a tuple: pull((c1, c2))."
        )


def check_cotangents(call: TransformCall, outputs: list, spec: Any, given: Any) -> list:
    leaves, given_spec = flatten_without_escaped(given)
    if given_spec != spec:
        rows = [
            ("output", pytree.format_tree(spec)),
            ("cotangents", pytree.format_tree(given_spec)),
        ]
        raise documented_error(RuntimeError, "cotangent-mismatch")(
            f"{call}: cotangents must be shaped like the output.\n{format_columns(rows)}\n"
            "Give every output one cotangent, in the same tree."
        )
    pairs = list(zip(outputs, leaves, strict=True))
    for _, c in pairs:
        if c is not None and not isinstance(c, torch.Tensor):
            raise documented_error(TypeError, "cotangent-mismatch")(
                f"{call}: a cotangent must be a tensor.\n"
                f"{format_columns([('cotangent', format_short(c), type_name_of(c))])}\n"
                "Make it one: torch.tensor(c)."
            )
    rows = [
        (f"output {format_short(y)}", f"cotangent {format_short(c)}")
        for y, c in pairs
        if (c is None and (y.numel() != 1 or y.is_complex()))
        or (c is not None and c.shape != y.shape)
    ]
    if rows:
        raise documented_error(RuntimeError, "cotangent-mismatch")(
            f"{call}: a cotangent must have its output's shape.\n{format_columns(rows)}\n"
            "A cotangent weighs every entry of its output."
        )
    rows = [
        (f"output {format_short(y)}", f"cotangent {format_short(c)}")
        for y, c in pairs
        if c is not None and c.is_complex() != y.is_complex()
    ]
    if rows:
        raise documented_error(RuntimeError, "cotangent-mismatch")(
            f"{call}: a cotangent must be complex where its output is, and real where it is.\n"
            f"{format_columns(rows)}\nConvert it: c.to(y.dtype), or c.real."
        )
    return [torch.ones_like(y) if c is None else c for y, c in pairs]


# --- what the function returns -----------------------------------------------------------------


def split_aux(call: TransformCall, out: Any, first: str = "output") -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise documented_error(RuntimeError, "has-aux")(
            f"{call}: with has_aux=True the function returns a tuple ({first}, aux).\n"
            f"{format_columns([('returned', format_short(out), type_name_of(out))])}\n"
            "Return two things, or leave has_aux out."
        )
    return out


def check_outputs(call: TransformCall, out: Any) -> tuple[list, Any]:
    """The leaves of a function's output, which must be tensors."""
    leaves, spec = pytree.flatten(out)
    if not leaves:
        raise documented_error(RuntimeError, "no-tensor-returned")(
            f"{call}: the function returned no tensor.\n"
            f"{format_columns([('returned', format_short(out))])}\nReturn at least one."
        )
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise documented_error(RuntimeError, "no-tensor-returned")(
                f"{call}: the function must return tensors, or trees of them.\n"
                f"{format_columns([('returned', format_short(leaf), type_name_of(leaf))])}\n"
                "has_aux=True lets you return other things beside them."
            )
    return leaves, spec


def check_floating_outputs(call: TransformCall, outputs: list) -> None:
    rows = [
        ("output", format_short(y))
        for y in outputs
        if not (y.is_floating_point() or y.is_complex())
    ]
    if rows:
        raise documented_error(RuntimeError, "not-differentiable")(
            f"{call}: outputs must be floating-point or complex.\n{format_columns(rows)}\n"
            "No derivative reaches any other. Convert it, or return it beside, with has_aux=True."
        )


def check_scalar_value(call: TransformCall, value: Any, holomorphic: bool | None = None) -> None:
    """Check that a function returned a scalar; see `check_real_or_complex` for ``holomorphic``."""
    if not isinstance(value, torch.Tensor):
        raise documented_error(RuntimeError, "no-tensor-returned")(
            f"{call}: the function must return a tensor.\n"
            f"{format_columns([('returned', format_short(value), type_name_of(value))])}\n"
            "Return the scalar to differentiate; has_aux=True lets you return more beside it."
        )
    with functions_off():
        rank, is_complex = value.dim(), value.is_complex()
    if rank:
        raise documented_error(RuntimeError, "not-a-scalar")(
            f"{call}: the function must return a scalar, a tensor of rank 0.\n"
            f"{format_columns([('returned', format_short(value))])}\n"
            "Reduce it (.sum(), .mean()), or use jacrev for the derivative of every entry."
        )
    if holomorphic and not is_complex:
        raise documented_error(RuntimeError, "holomorphic")(
            f"{call}: a holomorphic function must return a complex number.\n"
            f"{format_columns([('returned', format_short(value))])}\n"
            "Convert it (y.to(torch.complex64)), or leave out holomorphic."
        )
    if is_complex and not holomorphic:
        option = "" if holomorphic is None else HOLOMORPHIC_HINT
        raise documented_error(RuntimeError, "complex-derivative")(
            f"{call}: the function must return a real number.\n"
            f"{format_columns([('returned', format_short(value))])}\n"
            "Return its real part or its absolute value, or use vjp with a complex cotangent."
            f"{option}"
        )


def make_independence_error(call: TransformCall, y: torch.Tensor) -> RuntimeError:
    return documented_error(RuntimeError, "strict")(
        f"{call}: with strict=True every output must depend on the primals.\n"
        f"{format_columns([('output', format_short(y))])}\n"
        "Leave strict out to get zeros for it."
    )
