"""`vmap` as the loop that it is equal to: each example by itself, on ordinary tensors.

This is for functions that only compute (`side_effect_free`). No level is entered, so no operator
costs more than in a loop that the user writes. Writes into an example's own row of an argument, and
the history of its result, are those of the loop. If an example fails or results do not fit
together, all writes are undone, and the call is run in another way, which raises the error.
"""

from __future__ import annotations

from math import inf
from operator import is_
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._api.execution.function_record import find_bindings
from forall._api.nested_components import NestedExamples
from forall._api.ragged import RaggedResult
from forall._autodiff.jvp_level import JvpLevel
from forall._compat import exception_safety, pytree
from forall._compat.devices import DeviceContext, count_function_modes
from forall._compat.dispatch_state import functions_off
from forall._compat.private_api import PLAIN, count_dispatch_modes, get_version, set_version
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import Level, stack
from forall._divergence import is_running
from forall._vmap.failing_example import is_library_error
from forall._vmap.function_mode import VmapFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from forall._api.execution.mapped_call import MappedCall
    from forall._api.execution.side_effect_free import Bindings
    from forall._api.mapped_inputs import OutDims

    Tensor = torch.Tensor


_RETELLING = 1.0  # seconds that an error may be delayed to give it the loop's text


class CannotLoopError(Exception):
    """A signal that the call has to be run in another way; all writes have been undone.

    Its cause is the error of the first example to fail, if one has failed.
    """


class TooLongError(CannotLoopError):
    """A signal that the loop takes too long; ``seconds`` is an estimate for all examples."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


def may_run_as_loop(call: MappedCall, bindings: Bindings) -> bool:
    """Return True if the loop over the examples gives all the results that a call has to give."""
    options, arguments = call.options, call.arguments
    if options.divergence != "split" or options.max_steps is not None:
        return False
    if options.report is not None or options.retries_on_oom or arguments.looks:
        return False
    if call.axis is not None:  # collectives combine the examples
        return False
    if type(call.draws.flag) is not str:
        return False
    return has_no_observers() and bindings.may_take(arguments.leaves)


def has_no_observers() -> bool:
    """Return True if no mode or level but forward mode acts on the operators of a call.

    A derivative of the loop may be taken by either mode. Under a `vmap`, the choice is left to the
    outer one: the examples of both may diverge.
    """
    if is_running():
        return False
    if stack.listening:  # a recorder that has given up leaves its two modes on
        if stack.top is not None or not all(listener.is_idle for listener in stack.listening):
            return False
        return count_dispatch_modes() == count_function_modes() == len(stack.listening)
    if stack.top is None:
        return not (count_dispatch_modes() or count_function_modes())
    if not isinstance(stack.top, JvpLevel):
        return False
    modes, functions = (
        exception_safety.list_dispatch_modes(),
        exception_safety.list_function_modes(),
    )
    return all(isinstance(mode, Level) for mode in modes) and all(
        type(mode) in (VmapFunctionMode, DeviceContext) for mode in functions
    )


def run_loop(call: MappedCall, seconds: float = inf) -> tuple[list, Any]:
    """Return the results of all examples; raise `TooLongError` after so many seconds."""
    arguments, bindings = call.arguments, find_bindings(call.func)
    if bindings is None:
        raise CannotLoopError
    args, kwargs = arguments.given
    is_flat = not kwargs and len(args) == len(arguments.leaves)
    pack = None if is_flat and all(map(is_, args, arguments.leaves)) else arguments.unflatten
    args = LoopArguments(
        arguments.leaves, arguments.dims, arguments.size, pack, call.options.ragged
    )
    (found,) = run_each_example(call.func, args, call.places, bindings, seconds)
    return pytree.flatten(found)


class LoopArguments(NamedTuple):
    """The arguments of all examples."""

    leaves: Sequence[Any]
    dims: Sequence[int | None]  # the batch axis of each, None if it is shared
    size: int
    pack: Callable[[list], tuple[tuple, dict]] | None  # into args and kwargs, where they are trees
    ragged: bool = False  # True if the results may have several shapes


def run_each_example(
    func: Callable, args: LoopArguments, places: OutDims, bindings: Bindings, seconds: float = inf
) -> tuple:
    """Call ``func`` for one example after another; return the stacks of the results in a tuple."""
    before = _SavedTensors([*args.leaves, *bindings.tensors], copies=bindings.writes)
    failed = None
    try:
        found = _stack_results(_call_each(func, args, bindings, seconds), places, args.ragged)
    except TooLongError:
        before.put_back()
        raise
    except Exception as error:
        if not before.can_be_put_back():
            raise
        found, failed = None, error  # the other way raises it, and names the example
    except BaseException:
        before.put_back()
        raise
    if found is None or (
        before.has_changed() and before.has_changed(but=_find_mapped_places(args))
    ):
        before.put_back()
        raise CannotLoopError from failed
    return found


def restate_error(error: TypeError, call: MappedCall) -> None:
    """Give a TypeError the text that it has in the loop: it names the types of the operands."""
    bindings = None if is_library_error(error) else find_bindings(call.func)
    if bindings is None or not may_run_as_loop(call, bindings):
        return
    try:
        run_loop(call, _RETELLING)
    except CannotLoopError as instead:
        if type(instead.__cause__) is type(error):
            error.args = instead.__cause__.args


def run_each_unguarded(
    func: Callable, args: tuple, dims: Sequence[int | None], size: int, places: OutDims
) -> tuple | None:
    """Run each example of a function that captures no tensor and has no statement that writes.

    Then nothing has to be undone, and the preparation for it takes as long as a small example.
    Return None if the call has to be run in another way.
    """
    try:
        before = _read_versions_directly(args)
    except RuntimeError:  # torch counts no writes into tensors of inference mode
        return None
    rows = [[x] * size if dim is None else x.unbind(dim) for x, dim in zip(args, dims, strict=True)]
    try:
        results = [*map(func, *rows)]
        found = _stack_results(results, places)
    except Exception:
        if _read_versions_directly(args) != before:
            raise
        return None  # the other way raises it, and names the example
    now = _read_versions_directly(args)
    if now != before:
        triples = zip(dims, before, now, strict=True)
        if any(dim is None and number != new for dim, number, new in triples):
            return None  # all examples have written into one argument
    return found


def _find_mapped_places(args: LoopArguments) -> set[int]:
    """Return the positions of the arguments that are mapped."""
    return {n for n, dim in enumerate(args.dims) if dim is not None}


class _SavedTensors:
    """The values of tensors before a call that may write into them."""

    __slots__ = ("copies", "values", "versions")

    def __init__(self, values: list[Any], *, copies: bool) -> None:
        self.values = values
        self.versions = _read_versions(values)
        self.copies = [x.clone() if type(x) in PLAIN else None for x in values] if copies else ()

    def has_changed(self, but: Container[int] = ()) -> bool:
        """Return True if any of them has been written into, other than at the positions ``but``."""
        now = _read_versions(self.values)
        if now == self.versions:
            return False
        pairs = enumerate(zip(now, self.versions, strict=True))
        return any(number != before and n not in but for n, (number, before) in pairs)

    def can_be_put_back(self) -> bool:
        """Return True if each tensor that has been written into has a copy."""
        return bool(self.copies) or not self.has_changed()

    def put_back(self) -> None:
        """Undo all writes into tensors of which there are copies."""
        for x, number, copy in zip(self.values, self.versions, self.copies, strict=False):
            if copy is not None and get_version(x) != number:
                with torch.no_grad():
                    x.copy_(copy)
                set_version(x, number)


def _read_versions(values: Sequence[Any]) -> list[int | None]:
    """Return how often each tensor has been written to.

    Raises:
        RuntimeError: for a tensor of inference mode, see `Bindings.allows_same_kernels`.
    """
    with functions_off():
        return _read_versions_directly(values)


def _read_versions_directly(values: Sequence[Any]) -> list[int | None]:
    """Read the version counters if no function mode is on."""
    return [x._version if type(x) in PLAIN else None for x in values]


def _call_each(
    func: Callable, args: LoopArguments, bindings: Bindings, seconds: float
) -> list[Any]:
    """Call ``func`` for one example after another."""
    leaves, dims, size, pack, _ = args
    # A view made together with others (unbind) must not get history from a write into it.
    one_by_one = bindings.writes and any(x.requires_grad for x in bindings.tensors)
    rows: list[Sequence] = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is None:
            rows.append([leaf] * size)
        elif isinstance(leaf, NestedExamples):
            rows.append(leaf.examples)
        elif one_by_one:
            rows.append([leaf.select(dim, n) for n in range(size)])
        else:
            rows.append(leaf.unbind(dim))
    if pack is None and seconds == inf:
        return [*map(func, *rows)]
    results = []
    start = perf_counter()
    for row in zip(*rows, strict=True):
        own, named = (row, {}) if pack is None else pack([*row])
        results.append(func(*own, **named))
        taken = perf_counter() - start
        if taken > seconds and len(results) < size:
            raise TooLongError(taken / len(results) * size)
    return results


def _stack_results(results: list[Any], places: OutDims, ragged: bool = False) -> tuple[Any] | None:
    """Stack the results as `vmap` does, in a tuple of one; None if they do not fit together."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        place = places.out_dims
        if type(place) is not int:
            (place,) = places.expand_to_leaves(pytree.flatten(first)[1])
        return _stack_column(results, place, ragged)
    leaves, spec = pytree.flatten(first)
    flat = [leaves]
    for result in results[1:]:
        more, its_spec = pytree.flatten(result)
        if its_spec != spec:
            return None
        flat.append(more)
    if pytree.find_contexts(spec):
        return None
    left = []
    for column, place in zip(zip(*flat, strict=True), places.expand_to_leaves(spec), strict=True):
        whole = _stack_column(column, place, ragged)
        if whole is None:
            return None
        left.append(whole[0])
    return (pytree.unflatten(left, spec),)


def _stack_column(
    column: list | tuple, place: int | None, ragged: bool = False
) -> tuple[Any] | None:
    """Stack one result of all examples, in a tuple of one; None if they do not fit together.

    ``ragged`` results are not stacked.
    """
    first = column[0]
    if isinstance(first, torch.Tensor) and place is not None:
        if type(first) is not torch.Tensor and not _are_plain_tensors(column):
            return None
        if ragged and first.dim():
            if not all(isinstance(x, torch.Tensor) and x.dim() for x in column):
                return None
            if not all(x.layout is torch.strided and x.dtype is first.dtype for x in column):
                return None
            return (RaggedResult([*column], place),)
        try:  # it compares the shapes, and promotes types as the other ways do
            found = torch.stack(column, place) if place else torch.stack(column)
        except (RuntimeError, IndexError, TypeError):
            return None
        if type(found) is not torch.Tensor and not _are_plain_tensors(column):
            return None
        return (found,) if found.layout is torch.strided else None
    if len({*map(type, column)}) > 1:
        return None
    kind = type(first)
    if kind in (int, float, bool, complex) and place is not None and place in (0, -1):
        return (torch.tensor([*column]),)
    if (first is None or kind is str) and all(x == first for x in column):
        return (first,)
    return None


def _are_plain_tensors(column: list | tuple) -> bool:
    """Return True if all are tensors, and none is of a class of the user's."""
    return all(type(x) is torch.Tensor or isinstance(x, Wrapper) for x in column)
