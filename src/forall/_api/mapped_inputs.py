"""The ``in_dims`` and ``out_dims`` of `vmap`: a dim for every argument and every result."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._api import argument_checks
from forall._api.argnums import get_signature
from forall._api.nested_components import NestedExamples
from forall._compat import pytree, tensordict
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.tensor_subclass import unwrap_posed
from forall._core.errors import TransformCall, format_columns, format_short, type_name_of
from forall._core.escaped_values import flatten_without_escaped
from forall._core.reachable import iterate_hidden
from forall._divergence.batched_scalar import BatchedScalar
from forall._vmap import boundary
from forall._vmap.batched_tensor import BatchedTensor

if TYPE_CHECKING:
    from collections.abc import Callable


# --- arguments ---------------------------------------------------------------------------------


def bind_named_dims(
    call: TransformCall, func: Callable, in_dims: dict, args: tuple, kwargs: dict
) -> tuple[tuple, dict, tuple, dict]:
    """Return the arguments and their dims if a dict of in_dims names the arguments."""
    try:
        parameters = get_signature(func)
    except ValueError:
        raise documented_error(ValueError, "in-dims-names")(
            f"{call}: a dict of in_dims needs the names of the arguments.\n"
            f"{format_columns([('func', format_short(func))])}\n"
            "Python does not know them for this function. Give a tuple of in_dims."
        ) from None
    bound = parameters.bind(*args, **kwargs)
    dims: OrderedDict[str, Any] = OrderedDict()
    known: set[str] = set()
    for name, value in bound.arguments.items():
        parameter = parameters.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            dims[name] = {k: in_dims.get(k) for k in value}
            known |= value.keys()
            continue
        dim = in_dims.get(name)
        dims[name] = (dim,) * len(value) if parameter.kind is parameter.VAR_POSITIONAL else dim
        known.add(name)
    strangers = [name for name in in_dims if name not in known]
    if strangers:
        rows = [("in_dims", str(strangers[0])), ("passed", ", ".join(sorted(known)))]
        raise documented_error(ValueError, "in-dims-names")(
            f"{call}: in_dims names an argument that the call does not pass.\n"
            f"{format_columns(rows)}\n"
            "Name only arguments that are passed."
        )
    places = inspect.BoundArguments(parameters, dims)
    return bound.args, bound.kwargs, places.args, places.kwargs


def check_inputs(
    call: TransformCall,
    args: tuple,
    kwargs: dict,
    in_dims: Any,
    named_dims: dict | None = None,
    axis_size: int | None = None,
) -> tuple[list, Any, list, int, tuple[tuple, dict]]:
    """Return leaves, tree, a dim per leaf (from the front; None for shared) and the batch size.

    Last come args and kwargs, with collections in the place of modules that hold one.
    ``named_dims`` are for the keyword arguments, which are shared without it. ``axis_size`` is the
    number of examples, if the user has given it.
    """
    maps_nothing = in_dims is None and axis_size is not None
    if not isinstance(in_dims, (int, tuple, list)) and not maps_nothing:
        raise documented_error(ValueError, "in-dims-type")(
            f"{call}: in_dims must be an int, a tuple or a dict.\n"
            f"{format_columns([('in_dims', format_short(in_dims), type_name_of(in_dims))])}\n"
            "Give one int for all arguments, a tuple with one entry per argument, or a dict of "
            "names."
        )
    if not args and not kwargs and axis_size is None:
        raise documented_error(ValueError, "nothing-mapped")(
            f"{call}: called without arguments.\n"
            "There is nothing to map over. Pass at least one tensor."
        )
    by_position = tuple(in_dims) if isinstance(in_dims, list) else in_dims
    if not kwargs and _TENSOR.issuperset(map(type, args)):  # as in most calls
        leaves, spec = [*args], _tree_of_leaves(len(args))
        dims = by_position if type(by_position) is tuple else (by_position,) * len(args)
        is_matched = len(dims) == len(args) and _DIMS.issuperset(map(type, dims))
        dims = [*dims] if is_matched else pytree.broadcast_prefix(by_position, spec.child(0))
    else:
        args, kwargs = _unwrap_collections(args, kwargs, by_position, named_dims)
        leaves, spec = flatten_without_escaped((args, kwargs))
        dims = pytree.broadcast_prefix((by_position, named_dims if kwargs else None), spec)
        dims = dims and tensordict.count_from_front(spec, dims)
    if dims is None:
        raise _make_misfit_error(call, args, kwargs, in_dims, named_dims)
    sizes: list[int] = []  # a tracer's are not hashable
    with functions_off():
        for i, d in enumerate(dims):
            if d is not None:
                dims[i] = _check_dim(call, i, leaves[i], d, args, kwargs, sizes)
    if axis_size is not None:
        if any(size != axis_size for size in sizes):
            raise _make_axis_size_error(call, args, kwargs, leaves, dims, axis_size)
        sizes.append(axis_size)
    if not sizes:
        raise _make_unmapped_error(call, args, in_dims)
    if sizes.count(sizes[0]) < len(sizes):
        raise _make_sizes_error(call, args, kwargs, leaves, dims)
    for i, (leaf, d) in enumerate(zip(leaves, dims, strict=True)):
        if d is not None and leaf.is_nested:
            if not sizes[0]:
                raise _make_no_components_error(call, find_arg_paths(args, kwargs)[i], leaf)
            leaves[i] = NestedExamples.from_nested(leaf)
    return leaves, spec, dims, sizes[0], (args, kwargs)


def _unwrap_collections(
    args: tuple, kwargs: dict, in_dims: Any, named_dims: Any
) -> tuple[tuple, dict]:
    """Return args and kwargs with collections in the place of mapped modules that hold one."""
    wrapper = tensordict.find_params_class()
    leaves, spec = flatten_without_escaped((args, kwargs)) if wrapper else ([], None)
    if not any(isinstance(leaf, wrapper) for leaf in leaves):
        return args, kwargs
    dims = pytree.broadcast_prefix((in_dims, named_dims), spec)
    if dims is None:
        return args, kwargs  # `check_inputs` raises the error
    is_mapped = [
        isinstance(x, wrapper) and d is not None for x, d in zip(leaves, dims, strict=True)
    ]
    pairs = zip(leaves, is_mapped, strict=True)
    return pytree.unflatten([tensordict.get_collection(x) if m else x for x, m in pairs], spec)


_TENSOR = frozenset({torch.Tensor})
_DIMS = frozenset({int, type(None)})


@functools.lru_cache(maxsize=64)
def _tree_of_leaves(n: int) -> Any:
    return pytree.flatten(((0,) * n, {}))[1]


def _check_dim(
    call: TransformCall, i: int, leaf: Any, dim: Any, args: tuple, kwargs: dict, sizes: list[int]
) -> int:
    """Return the dim of leaf ``i``, from the front; append its number of examples to ``sizes``."""
    if type(dim) is not int:
        rows = [
            (
                find_arg_paths(args, kwargs)[i],
                format_short(leaf),
                f"in_dims {dim!r}",
                type_name_of(dim),
            )
        ]
        raise documented_error(ValueError, "in-dims-type")(
            f"{call}: a dim of in_dims must be an int or None.\n"
            f"{format_columns(rows)}\n"
            "Give the dim that counts the examples, or None to share the argument."
        )
    if not isinstance(leaf, torch.Tensor):
        cure = "Give it in_dims=None to share it between examples, or make it a tensor."
        rows = [
            (
                find_arg_paths(args, kwargs)[i],
                format_short(leaf),
                f"in_dims {dim}",
                type_name_of(leaf),
            )
        ]
        raise documented_error(ValueError, "only-tensors-mapped")(
            f"{call}: only tensors can be mapped.\n"
            f"{format_columns(rows)}\n"
            f"{argument_checks.suggest_tree(leaf) or cure}"
        )
    if leaf.is_nested:
        if dim % leaf.dim():
            rows = [(find_arg_paths(args, kwargs)[i], format_short(leaf), f"in_dims {dim}")]
            raise documented_error(ValueError, "nested-tensors")(
                f"{call}: the examples of a nested tensor are its components, along dim 0.\n"
                f"{format_columns(rows)}\n"
                "Give it in_dims=0, or None to share it between examples."
            )
        sizes.append(leaf.size(0))
        return 0
    rank = leaf.dim()
    if not -rank <= dim < rank:
        can = f"Give a dim in [{-rank}, {rank})" if rank else "A tensor of rank 0 has none"
        row = (
            find_arg_paths(args, kwargs)[i],
            format_short(leaf),
            f"in_dims {dim}",
            f"rank {rank}",
        )
        raise documented_error(ValueError, "in-dims-range")(
            f"{call}: in_dims names a dim that the argument does not have.\n"
            f"{format_columns([row])}\n{can}; to share the argument between examples, give it None."
        )
    dim %= rank
    sizes.append(leaf.shape[dim])
    return dim


def find_arg_paths(args: tuple, kwargs: dict) -> list[str]:
    """Return each leaf of the arguments as a user would write it."""
    found = ["args" + pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(args)[0]]
    return found + [
        "kwargs" + pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(kwargs)[0]
    ]


def note_shared_keywords(error: Exception, kwargs: dict, size: int) -> None:
    """Add a note to a user's error if a shared keyword argument looks like one for each example."""
    alike = [
        name
        for name, a in kwargs.items()
        if any(
            isinstance(x, torch.Tensor) and [*x.shape[:1]] == [size] for x in pytree.get_leaves(a)
        )
    ]
    if alike:
        error.add_note(
            f"vmap: {alike[0]} was passed by keyword, so all examples share it. To map it, name "
            f"the mapped arguments: in_dims={{'x': 0, {alike[0]!r}: 0}}."
        )


def _make_misfit_error(
    call: TransformCall, args: tuple, kwargs: dict, in_dims: Any, named_dims: Any
) -> ValueError:
    rows = [("in_dims", format_short(in_dims if named_dims is None else named_dims))]
    rows += [(f"args[{i}]", format_short(a)) for i, a in enumerate(args)]
    rows += [(f"kwargs[{k!r}]", format_short(a)) for k, a in kwargs.items()]
    return documented_error(ValueError, "in-dims-structure")(
        f"{call}: in_dims does not fit the arguments.\n{format_columns(rows)}\n"
        "A tuple of in_dims has one entry per argument; a tree of them is shaped like its argument."
    )


def _make_unmapped_error(call: TransformCall, args: tuple, in_dims: Any) -> ValueError:
    cure = "At least one tensor needs an int in in_dims, or there is no number of examples."
    if not args:
        cure = "Keyword arguments are shared unless a dict names them: in_dims={'x': 0}."
    rows = [("in_dims", format_short(in_dims))]
    return documented_error(ValueError, "nothing-mapped")(
        f"{call}: no argument is mapped.\n{format_columns(rows)}\n{cure}"
    )


def _make_no_components_error(call: TransformCall, path: str, leaf: torch.Tensor) -> ValueError:
    rows = [(path, format_short(leaf))]
    return documented_error(ValueError, "nested-tensors")(
        f"{call}: a mapped nested tensor has no components.\n{format_columns(rows)}\n"
        "Nothing tells the shape of an example. Pass at least one."
    )


def _describe_sizes(args: tuple, kwargs: dict, leaves: list, dims: list) -> list[tuple[str, ...]]:
    """Return a row for each mapped leaf, with the size of its dim."""
    return [
        (path, format_short(leaf), f"in_dims {d}", f"size {leaf.size(d)}")
        for path, leaf, d in zip(find_arg_paths(args, kwargs), leaves, dims, strict=True)
        if d is not None
    ]


def _make_sizes_error(
    call: TransformCall, args: tuple, kwargs: dict, leaves: list, dims: list
) -> ValueError:
    rows = _describe_sizes(args, kwargs, leaves, dims)
    cure = "All must have one size. To share an argument between examples, give it in_dims=None."
    if "in_dims" in kwargs:
        cure = "in_dims belongs to vmap: vmap(f, in_dims=...)(x)."
    elif path := _find_list_of_examples(args, leaves, dims):
        cure = (
            f"{path} is a tree of arguments. If it shall be the list of the examples, stack it, or "
            f"for\nseveral sizes torch.nested.nested_tensor({path}, layout=torch.jagged)."
        )
    return documented_error(ValueError, "axes-differ")(
        f"{call}: the mapped axes differ in size.\n{format_columns(rows)}\n{cure}"
    )


def _find_list_of_examples(args: tuple, leaves: list, dims: list) -> str:
    """Return the path of an argument that is a list of tensors of several sizes; "" for none."""
    pairs = iter(zip(leaves, dims, strict=True))
    for i, a in enumerate(args):
        own = [next(pairs) for _ in pytree.get_leaves(a)]
        sizes = {None if d is None else leaf.size(d) for leaf, d in own}
        if type(a) in (list, tuple) and len(own) == len(a) and None not in sizes and len(sizes) > 1:
            return f"args[{i}]"
    return ""


def _make_axis_size_error(
    call: TransformCall, args: tuple, kwargs: dict, leaves: list, dims: list, size: int
) -> ValueError:
    rows = _describe_sizes(args, kwargs, leaves, dims)
    return documented_error(ValueError, "axis-size")(
        f"{call}: the mapped axes have another size than axis_size={size}.\n"
        f"{format_columns(rows)}\n"
        "Give no axis_size where an argument is mapped, or the size that it has."
    )


def make_written_twice_error(call: TransformCall, leaf: torch.Tensor) -> RuntimeError:
    return documented_error(RuntimeError, "write-with-derivative")(
        f"{call}: a mapped argument was written in place, with a derivative at stake, and its "
        "memory was passed twice.\n"
        f"{format_columns([('written', format_short(leaf))])}\n"
        "What the other argument's examples depend on would be lost. Clone one of the two."
    )


# --- results -----------------------------------------------------------------------------------


def is_valid_out_dims(given: Any) -> bool:
    """Return True if ``given`` is an int, None, or a tree of them, as out_dims must be."""
    return (
        type(given) is int
        or given is None
        or all(type(p) is int or p is None for p in pytree.get_leaves(given))
    )


def make_out_dims_error(call: TransformCall) -> ValueError:
    return documented_error(ValueError, "out-dims-structure")(
        f"{call}: out_dims must be an int, None, or a tree of them.\n"
        f"{format_columns([('out_dims', format_short(call.options['out_dims']))])}\n"
        "Give the place of the examples in each result; None for one that is the same for all."
    )


class OutDims:
    """The out_dims of a call: the place of the batch axis in each result."""

    __slots__ = ("_func", "_verb", "out_dims")

    def __init__(self, verb: str, func: Callable, out_dims: Any) -> None:
        self._verb, self._func = verb, func
        self.out_dims = out_dims
        if type(out_dims) is not int and not is_valid_out_dims(out_dims):
            raise make_out_dims_error(self.call)

    @property
    def call(self) -> TransformCall:
        """The call, for error messages."""
        return TransformCall(self._verb, self._func, out_dims=self.out_dims)

    def expand_to_leaves(self, spec: Any) -> list:
        """Return a place for every leaf of the result."""
        given = self.out_dims
        if spec.type is None and type(given) is int:
            return [given]
        if spec.type is None and type(given) is tuple and len(given) == 1:
            given = given[0]  # as torch.func has it: one place for one result
        found = pytree.broadcast_prefix(given, spec)
        if found is None:
            rows = [("out_dims", format_short(given)), ("result", pytree.format_tree(spec))]
            raise documented_error(ValueError, "out-dims-structure")(
                f"{self.call}: out_dims does not fit the result.\n"
                f"{format_columns(rows)}\n"
                "Give one int for all results, or a tree of ints (or None) like the result."
            )
        return tensordict.count_from_front(spec, found, 1)


def make_missing_place_error(call: TransformCall, result: torch.Tensor, place: int) -> IndexError:
    rank = result.dim() + 1
    rows = [("result of one example", format_short(result), f"out_dims {place}")]
    return documented_error(IndexError, "out-dims-range")(
        f"{call}: out_dims names a place that the result does not have.\n"
        f"{format_columns(rows)}\n"
        f"Give a place in [{-rank}, {rank})."
    )


def make_nested_error(call: TransformCall, result: torch.Tensor) -> NotImplementedError:
    return documented_error(NotImplementedError, "nested-tensors")(
        f"{call}: a nested tensor is a result of each example, and nothing can hold all of them.\n"
        f"{format_columns([('result of one example', format_short(result))])}\n"
        "Return its rows (x.values()), or its components in a list (x.unbind())."
    )


def keep_unmapped(places: OutDims, result: torch.Tensor, level: Any) -> torch.Tensor:
    """Return a result with out_dims None as it is, if it is the same for all examples."""
    if not (isinstance(result, BatchedTensor) and result.level is level):
        return result
    if result.axis is not None:
        raise documented_error(ValueError, "out-dims-none")(
            f"{places.call}: out_dims is None for a result that differs between the examples.\n"
            f"{format_columns([('result of one example', format_short(result))])}\n"
            "Give it an int: the place of the examples in the result."
        )
    return boundary.keep_shared(result)


def pass_through(places: OutDims, result: Any, level: Any) -> Any:
    """Return a result that is no tensor as it is, if no example's own tensor hides in it."""
    held = _find_hidden([result], level)
    if held is None:
        return result
    raise _make_hidden_error(
        places.call, type(result).__name__, held, argument_checks.suggest_registration(result)
    )


def check_contexts(places: OutDims, spec: Any, level: Any) -> None:
    """Raise if an example's own value is in the context of a container, or a key of a dict."""
    contexts = pytree.find_contexts(spec)
    held = _find_hidden([*contexts, *pytree.find_odd_keys(spec)], level)
    if held is not None:
        where = "the context of a container" if contexts else "the keys of a dict"
        raise _make_hidden_error(places.call, where, held)


def _make_hidden_error(
    call: TransformCall, result: str, held: Any, cure: str | None = None
) -> ValueError:
    return documented_error(ValueError, "hidden-tensors")(
        f"{call}: a result holds tensors where torch's trees do not see them.\n"
        f"{format_columns([('result', result), ('holds', format_short(held))])}\n"
        f"{cure or 'Return its tensors in a tuple, a list or a dict.'}"
    )


def _find_hidden(results: list[Any], level: Any) -> Any:
    """Return the first value of an example that objects hold, at any depth, or None."""
    for x in iterate_hidden(results):
        of = unwrap_posed(x)
        if type(x) is BatchedScalar or (
            isinstance(of, BatchedTensor) and of.level is level and of.axis is not None
        ):
            return of
    return None


class LeafPlace(NamedTuple):
    """The place of a leaf in the tree of a function's results."""

    spec: Any
    number: int

    def describe(self) -> str:
        leaves = pytree.unflatten(range(self.spec.num_leaves), self.spec)
        path = pytree.keystr(pytree.tree_flatten_with_path(leaves)[0][self.number][0])
        return f"result{path} of " if path else ""


def join_column(
    call: TransformCall, column: tuple, place: int | None, firsts: list[int], leaf: LeafPlace
) -> Any:
    """Return one result of all groups, whose first examples have the numbers ``firsts``."""
    first = column[0]
    if all(isinstance(x, torch.Tensor) for x in column):
        if place is None:
            return first
        _check_same_shapes(call, column, place, firsts, leaf)
        return torch.cat(column, place % first.dim())
    for number, other in zip(firsts, column, strict=True):
        is_same = pytree.holds_same(first, other)
        if not is_same or isinstance(other, torch.Tensor) != isinstance(first, torch.Tensor):
            rows = [
                (f"{leaf.describe()}example {n}", *_describe_of_one(x, place))
                for n, x in ((firsts[0], first), (number, other))
            ]
            raise documented_error(ValueError, "result-is-no-tensor")(
                f"{call}: a result that is no tensor differs between the examples.\n"
                f"{format_columns(rows)}\n"
                "Tensors and numbers are stacked; anything else must be the same for all. Return a "
                "number instead: an index in the place of a string, nan in the place of None."
            )
    return first


def _describe_of_one(value: Any, place: int | None) -> tuple[str, str]:
    """Return a result of one example as text, and the name of its type."""
    if isinstance(value, torch.Tensor):
        return format_short(value if place is None else value.select(place, 0)), "Tensor"
    return format_short(value), type_name_of(value)


def _check_same_shapes(
    call: TransformCall, column: tuple, place: int, firsts: list[int], leaf: LeafPlace
) -> None:
    shapes = [[*t.shape] for t in column]
    for shape in shapes:
        del shape[place % (len(shape) or 1)]
    for number, shape in zip(firsts, shapes, strict=True):
        if shape != shapes[0]:
            rows = [
                (f"{leaf.describe()}example {n}", f"{s}")
                for n, s in ((firsts[0], shapes[0]), (number, shape))
            ]
            raise documented_error(ValueError, "results-differ-in-shape")(
                f"{call}: the results of the examples differ in shape.\n{format_columns(rows)}\n"
                "They cannot be stacked. Return the same shape for every example, or say "
                "ragged=True for a nested tensor."
            )


def make_trees_error(
    call: TransformCall, first: int, spec: Any, number: int, other: Any
) -> ValueError:
    rows = [
        (f"example {first}", pytree.format_tree(spec)),
        (f"example {number}", pytree.format_tree(other)),
    ]
    return documented_error(ValueError, "results-differ-in-structure")(
        f"{call}: the results of the examples differ in structure.\n{format_columns(rows)}\n"
        "Return the same tree for every example."
    )
