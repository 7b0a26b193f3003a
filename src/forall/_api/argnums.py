"""Selection of the arguments and tensors that a derivative is taken with respect to."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._api import argument_checks
from forall._compat import functorch_interop, pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._core.errors import TransformCall, format_columns, format_short, type_name_of
from forall._core.escaped_values import flatten_without_escaped
from forall._core.python_state import read_signature
from forall._divergence import convert_if_running, thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from inspect import Signature

# The position of an argument, or the name that it was passed by; one, or a tuple of them.
ArgPlaces = Any


class DiffLeaves:
    """A tree whose floating-point and complex tensors are differentiated; other leaves stay.

    ``asked`` are the arguments that make up the tree. An integer tensor inside one of them has no
    derivative and stays. An integer tensor that is itself one of them is an error.
    """

    __slots__ = ("at", "leaves", "spec", "tensors")

    def __init__(
        self, call: TransformCall, tree: Any, asked: tuple, error: type[Exception] = RuntimeError
    ) -> None:
        is_leaf = type(tree) is torch.Tensor
        self.leaves, self.spec = ([tree], pytree.LEAF) if is_leaf else flatten_without_escaped(tree)
        self.at: list[int] = []
        self.tensors: list[torch.Tensor] = []
        with functions_off():
            for i, x in enumerate(self.leaves):
                if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
                    self.at.append(i)
                    self.tensors.append(x)
        if len(self.at) == len(self.leaves):
            return
        for x in asked if self.at else (*asked, *self.leaves):
            if isinstance(x, torch.Tensor):
                argument_checks.check_differentiable(call, x, error)
        if not self.at:
            raise argument_checks.make_no_tensor_error(call, self.leaves)

    def without_leaves(self) -> DiffLeaves:
        """Return the places and the tree alone, to unflatten results."""
        made = DiffLeaves.__new__(DiffLeaves)
        made.at, made.spec, made.tensors = self.at, self.spec, []
        made.leaves = [None] * len(self.leaves)
        return made

    def replace_tensors(self, new: Any) -> Any:
        """Return the tree with other tensors in the place of those that are differentiated."""
        return self._fill_leaves(list(self.leaves), new)

    def unflatten_results(self, new: Any) -> Any:
        """Return a tree with results at the differentiated tensors and None at other leaves."""
        return self._fill_leaves([None] * len(self.leaves), new)

    def _fill_leaves(self, leaves: list, new: Any) -> Any:
        for i, x in zip(self.at, new, strict=True):
            leaves[i] = x
        return leaves[0] if self.spec is pytree.LEAF else pytree.unflatten(leaves, self.spec)


class DiffArguments(DiffLeaves):
    """The arguments of a call, with those that argnums or argnames select differentiated."""

    __slots__ = ("args", "kwargs", "places")

    def __init__(
        self,
        call: TransformCall,
        args: tuple,
        kwargs: dict,
        argnums: Any,
        argnames: Any = None,
        error: type[Exception] = RuntimeError,
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        if argnames is None and type(argnums) is int and 0 <= argnums < len(args):  # as by default
            self.places, chosen = argnums, args[argnums]
        else:
            self.places = find_places(call, args, kwargs, argnums, argnames)
            chosen = pick_arguments(args, kwargs, self.places)
        asked = chosen if isinstance(self.places, tuple) else (chosen,)
        super().__init__(call, chosen, asked, error)

    def find_other_tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments that are not differentiated."""
        moved = set(map(id, self.tensors))
        leaves = pytree.get_leaves((self.args, self.kwargs))
        return [x for x in leaves if isinstance(x, torch.Tensor) and id(x) not in moved]

    def call(self, func: Callable, new: Any) -> Any:
        """Call ``func`` with other tensors in the place of those that are differentiated."""
        args, kwargs = replace_arguments(
            self.args, self.kwargs, self.places, self.replace_tensors(new)
        )
        return (convert_if_running(func) if thread.runs else func)(*args, **kwargs)


def pick_arguments(args: tuple, kwargs: dict, places: ArgPlaces) -> Any:
    """Return the argument at ``places``, or the tuple of them."""
    if isinstance(places, tuple):
        return tuple(pick_arguments(args, kwargs, p) for p in places)
    return kwargs[places] if isinstance(places, str) else args[places]


def replace_arguments(args: tuple, kwargs: dict, places: ArgPlaces, new: Any) -> tuple[tuple, dict]:
    """Return the arguments with ``new``, a tree of `pick_arguments`, at ``places``."""
    by_position, by_name = list(args), dict(kwargs)
    several = isinstance(places, tuple)
    for p, x in zip(places if several else (places,), new if several else (new,), strict=True):
        if isinstance(p, str):
            by_name[p] = x
        else:
            by_position[p] = x
    return tuple(by_position), by_name


def describe_call(
    verb: str, func: Callable, argnums: Any, argnames: Any, *, holomorphic: bool = False
) -> TransformCall:
    """Return the call for error messages, with the options that change the derivatives."""
    which = {"argnums": argnums} if argnames is None else {"argnames": argnames}
    return TransformCall(verb, func, **which, **({"holomorphic": True} if holomorphic else {}))


def call_torch_transform(
    verb: str,
    func: Callable,
    args: tuple,
    kwargs: dict,
    argnums: Any,
    argnames: Any,
    **options: Any,
) -> Any:
    """Call torch.func's transform of this name, which takes argnums and no argnames."""
    if argnames is None:

        def by_position(*xs: Any) -> Any:  # Dynamo cannot look into a functools.partial
            return func(*xs, **kwargs)

        return functorch_interop.call_torch_func(verb, by_position, argnums, **options)(*args)
    at = find_places(describe_call(verb, func, argnums, argnames), args, kwargs, argnums, argnames)
    several = isinstance(at, tuple)

    def of_chosen(*xs: Any) -> Any:
        by_place, by_name = replace_arguments(args, kwargs, at, xs if several else xs[0])
        return func(*by_place, **by_name)

    chosen = pick_arguments(args, kwargs, at)
    argnums = tuple(range(len(chosen))) if several else 0
    return functorch_interop.call_torch_func(verb, of_chosen, argnums, **options)(
        *(chosen if several else (chosen,))
    )


def call_torch_holomorphic(
    verb: str,
    func: Callable,
    args: tuple,
    kwargs: dict,
    argnums: Any,
    argnames: Any,
    *,
    has_aux: bool,
    **options: Any,
) -> Any:
    """Return df/dz by torch.func's Jacobian of this name, which has no such option."""
    at = find_places(describe_call(verb, func, argnums, argnames), args, kwargs, argnums, argnames)
    chosen = pick_arguments(args, kwargs, at)
    x, y = (pytree.map_tensors(part, chosen) for part in (torch.real, torch.imag))

    def split_complex(x: Any) -> tuple[Any, Any]:
        z = pytree.tree_map(_complex, x, y)
        by_place, by_name = replace_arguments(args, kwargs, at, z)
        out = func(*by_place, **by_name)
        out, aux = out if has_aux else (out, ())  # torch takes no None for an aux
        return pytree.map_tensors(lambda w: torch.stack([w.real, w.imag]), out), aux

    jacobian, aux = functorch_interop.call_torch_func(verb, split_complex, has_aux=True, **options)(
        x
    )
    found = pytree.map_tensors(lambda j: torch.complex(j[0], j[1]), jacobian)
    return (found, aux) if has_aux else found


def _complex(x: Any, y: Any) -> Any:
    return torch.complex(x, y) if isinstance(x, torch.Tensor) else x


def with_value_as_aux(verb: str, func: Callable, has_aux: bool) -> Callable:
    """Return ``func`` with its own value as its aux, so that a derivative returns the value too."""

    @functools.wraps(func, updated=())  # argnames asks it for names
    def value_and_aux(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = convert_if_running(func)(*args, **kwargs)
        if not has_aux:
            return out, out
        out, aux = argument_checks.split_aux(TransformCall(verb, func), out)
        return out, (out, aux)

    return value_and_aux


# --- places ------------------------------------------------------------------------------------


def find_places(
    call: TransformCall, args: tuple, kwargs: dict, argnums: Any, argnames: Any
) -> ArgPlaces:
    """Return the positions or names of the arguments that ``argnums`` or ``argnames`` select."""
    if argnames is not None:
        return _find_named_places(call, args, kwargs, argnums, argnames)
    if isinstance(argnums, int) and not isinstance(argnums, bool):
        return _check_argnum(call, args, argnums)
    if isinstance(argnums, tuple):
        if not argnums:
            raise documented_error(RuntimeError, "argnums-type")(
                f"{call}: argnums must not be empty.\nName at least one argument."
            )
        return _check_distinct(
            call, "argnums", argnums, tuple(_check_argnum(call, args, a) for a in argnums)
        )
    raise argument_checks.make_argnums_error(call, argnums)


def _check_argnum(call: TransformCall, args: tuple, argnum: Any) -> int:
    if not isinstance(argnum, int):
        raise argument_checks.make_argnums_error(call, argnum)
    n = len(args)
    if not -n <= argnum < n:
        can = f"Give an int in [{-n}, {n}), and pass" if n else "Pass"
        raise documented_error(RuntimeError, "argnums-range")(
            f"{call}: argnums names an argument that the call does not have.\n"
            f"{format_columns([('argnums', str(argnum)), ('positional arguments', str(n))])}\n"
            f"{can} the argument by position, or name it in argnames."
        )
    return argnum % n


def _check_distinct(call: TransformCall, option: str, given: tuple, found: tuple) -> tuple:
    if len(set(found)) < len(found):
        raise documented_error(RuntimeError, "argnums-twice")(
            f"{call}: {option} names an argument twice.\n"
            f"{format_columns([(option, repr(given))])}\nName each argument once."
        )
    return found


def _find_named_places(
    call: TransformCall, args: tuple, kwargs: dict, argnums: Any, argnames: Any
) -> ArgPlaces:
    several = argnames if isinstance(argnames, tuple) else (argnames,)
    if not several or not all(isinstance(name, str) for name in several):
        raise documented_error(RuntimeError, "argnums-type")(
            f"{call}: argnames must be a str or a tuple of strs.\n"
            f"{format_columns([('argnames', format_short(argnames), type_name_of(argnames))])}\n"
            "Give the names of the arguments."
        )
    if argnums != 0:
        rows = [("argnums", format_short(argnums)), ("argnames", format_short(argnames))]
        raise documented_error(RuntimeError, "argnums-twice")(
            f"{call}: argnums and argnames both say which arguments.\n"
            f"{format_columns(rows)}\n"
            "Give one of them."
        )
    found = tuple(
        name if name in kwargs else _find_position(call, args, kwargs, name) for name in several
    )
    return _check_distinct(call, "argnames", several, found) if several is argnames else found[0]


def get_signature(func: Any) -> Signature:
    """Return the signature of a function; for a module, that of its forward."""
    return read_signature(func.forward if isinstance(func, torch.nn.Module) else func)


def _find_position(call: TransformCall, args: tuple, kwargs: dict, name: str) -> int:
    """Return the position of an argument that was passed by position."""
    try:
        parameters = list(get_signature(call.func).parameters.values())
    except ValueError:
        raise documented_error(ValueError, "argnames")(
            f"{call}: argnames needs the names of the arguments.\n"
            f"{format_columns([('func', format_short(call.func))])}\n"
            "Python does not know them for this function. Pass them by keyword, or give argnums."
        ) from None
    by_position = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in kwargs
    ]
    passed = by_position[: len(args)]
    if name not in passed:
        row = ("passed", ", ".join([*passed, *kwargs]) or "nothing")
        raise documented_error(RuntimeError, "argnames")(
            f"{call}: argnames names an argument that the call does not pass.\n"
            f"{format_columns([('argnames', repr(name)), row])}\n"
            "Pass the argument; a default is not differentiated."
        )
    return passed.index(name)
