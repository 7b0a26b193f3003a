"""`vmap`: a function of one example, applied to all examples at once."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from forall._api import argument_checks, mapped_inputs, ragged
from forall._api.chunk_size import for_torch
from forall._api.execution import strategy
from forall._api.execution.auto_replay import replaying, told
from forall._api.execution.chunked_map import in_chunks
from forall._api.execution.groups import once_more, rows
from forall._api.execution.loop_or_batch import Settled
from forall._api.nested_components import Components, by_shape
from forall._api.subclass_arguments import Looks, looks, stacked_by_class
from forall._api.typing import Chunk, P, R
from forall._compat import (
    functorch_interop,
    pytree,
    tensordict,
    trace_modes,
)
from forall._compat.dispatch_state import functions_off
from forall._compat.tensor_subclass import carried, is_dressed, undressed
from forall._compat.wrapper_tensor import Wrapper
from forall._core.call_site import users_instruction
from forall._core.errors import Call, Origin
from forall._core.levels import top
from forall._divergence.batched_scalar import Number, as_tensor
from forall._random.key_scope import entered as drawing_in
from forall._vmap import boundary
from forall._vmap.batched_tensor import Batched, without_ended
from forall._vmap.concretize_listeners import Limit, Traced, heard_by
from forall._vmap.mutation.mutation_log import memory
from forall._vmap.randomness import Draws
from forall._vmap.sparse_stack import of_coordinates
from forall._vmap.vmap_level import VmapLevel, running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._divergence.report import Report
    from forall._vmap.concretize_listeners import Listener

_NOBODY = nullcontext()


def vmap(
    func: Callable[P, R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str | torch.Tensor = "error",
    *,
    chunk_size: Chunk = None,
    divergence: str = "split",
    ragged: bool = False,
    max_steps: int | None = None,
) -> Callable[P, R]:
    """Return ``func`` of one example as a function of all examples at once.

    The law: ``vmap(f)(xs)`` equals ``torch.stack([f(x) for x in xs])``, values, shapes and dtypes.
    For ``f: (*S) -> (*R)`` and ``xs: (B, *S)``, ``vmap(f)(xs)`` has shape ``(B, *R)``.

    Cost: ``func`` is called once. Each of its operators runs once, on the stacks of all examples;
    one without a rule runs once per example and warns (`PerformanceWarning`).

    If examples diverge (``if x > 0``), that run is undone. From then on a converted form of the
    source of ``func``, and of the functions that it calls, runs in its place. There examples
    diverge and merge again: each operator runs once for each group that reaches it.

    Code that cannot be converted (a generator, code without source) runs once for each group of
    examples that agree, and warns. Prints, and writes to files, then come more than once. If
    ``func`` is seen to only compute, and examples whose values are tested take less time one after
    another, they run so, as in the loop. Calls are timed to find out, see `config.parting`.

    Args:
        func: takes tensors, or trees of them, and returns tensors, numbers, or trees of them.
            Other results (None, strings) pass through; they must be the same for all examples.
        in_dims: for each argument the dim that counts the examples; None shares the argument
            between them. One int for all arguments, or a tuple with an int, None or a tree of
            them per argument. Negative dims count from the end. A dict names arguments, keyword
            arguments included: ``{"x": 0, "mask": 1}``; those it does not name are shared.
        out_dims: where the examples go in each result: one int, or a tree like the result. None
            for a result that is the same for all examples.
        randomness: ``"error"`` forbids random operators, ``"different"`` draws anew for each
            example, ``"same"`` draws once for all. A key of `forall.random` makes what an example
            draws depend on that key, on its number and on what it drew before, alone: the same
            numbers for any number of examples and any chunk_size, those that
            ``forall.random.scope(key, i)`` gives example i alone. A vmap inside one with a key
            needs no flag: its examples draw from the keys of the one around.
        chunk_size: run at most so many examples at once. Changes memory, not values. ``"auto"``
            runs all, and half as many from where memory does not suffice: that chunk is undone
            and begun again, those before it are kept. `Chunks` sets a budget of memory, and shows
            how far a call has come.
        divergence: ``"split"`` runs any Python: where examples want to go different ways (``if x >
            0``, ``while``, ``x.item()``, ``x[mask]``, an operator that fails for some), they
            part, and meet again. `explain` tells where. ``"error"`` refuses that.
        ragged: results with dims leave as nested tensors, examples first, so that their shapes may
            differ between the examples: jagged where they differ in one dim at most. Numbers stay
            stacked. In the outermost vmap alone. With a nested tensor among the mapped arguments
            results of several shapes leave so without it.
        max_steps: how many steps a loop that tests values may take: an example that is asked more
            than ``max_steps + 1`` times at one place of the code, all calls of the function there
            taken together, raises. A loop that asks no tensor (``while n < 10``) is not counted.

    Keyword arguments are shared between the examples, unless a dict of in_dims names them.

    Raises:
        ValueError: where the arguments and ``in_dims``, or the results and ``out_dims``, do not
            fit, where sizes differ, where results of different examples have different shapes
            without ragged or a nested argument, and for a chunk_size below 1 or a max_steps below
            0.
        IndexError: for a place in ``out_dims`` that the result does not have.
        RuntimeError: where examples part under ``divergence="error"``; after max_steps steps; for a
            write of an example's own data into a tensor that all examples share; for a random draw
            under ``randomness="error"``.
        Exception: what the loop would raise first, with a note that names the example.

    Source: the batching transformation of Frostig, Johnson and Leary, "Compiling machine learning
    programs via high-level tracing" (2018).

    Example:
        >>> xs, ys = torch.arange(6.0).reshape(3, 2), torch.ones(2)
        >>> vmap(torch.dot, in_dims=(0, None))(xs, ys)          # (3, 2), (2,) -> (3,)
        tensor([1., 5., 9.])
        >>> vmap(lambda x: x * ys, out_dims=1)(xs).shape        # the examples of (3, 2) go last
        torch.Size([2, 3])
        >>> def root(a):                                        # each example stops for itself
        ...     x = a
        ...     while (x * x - a).abs() > 1e-4:
        ...         x = (x + a / x) / 2
        ...     return x
        >>> vmap(root)(torch.tensor([1.0, 4.0, 100.0]))
        tensor([ 1.,  2., 10.])
    """
    given = told(
        "vmap",
        in_dims=in_dims,
        out_dims=out_dims,
        randomness=randomness,
        chunk_size=chunk_size,
        divergence=divergence,
        ragged=ragged,
        max_steps=max_steps,
    )
    argument_checks.callable_("vmap", func)
    argument_checks.randomness("vmap", randomness, keys=True)
    argument_checks.chunk_size("vmap", chunk_size)
    argument_checks.divergence("vmap", divergence)
    argument_checks.max_steps("vmap", max_steps)

    how = in_dims, out_dims, randomness, chunk_size
    return _mapped(func, given, how, Options(divergence, ragged, max_steps, None))


def _mapped(func: Callable, given: tuple, how: tuple, options: Options) -> Callable:
    """Return the mapped function of `vmap`."""
    settled = Settled(func, *how[:2]) if is_simple(how, options) else None

    @replaying(func, given, settled)
    def mapped(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        return Verb(func, *how).run(options, args, kwargs)

    if not is_dynamo_compiling():
        vars(mapped)["__forall_run__"] = Verb(func, *how).run, options  # what `explain` asks for
    return mapped


class Verb(NamedTuple):
    """The arguments of `vmap`."""

    func: Callable
    in_dims: Any
    out_dims: Any
    randomness: Any
    chunk_size: Chunk

    def run(self, options: Options, args: tuple, kwargs: dict) -> Any:
        """Run one call of the mapped function."""
        func, in_dims, out_dims, randomness, chunk_size = self
        call = Call("vmap", func, in_dims=in_dims)
        if isinstance(in_dims, dict):
            args, kwargs, *dims = mapped_inputs.named(call, func, in_dims, args, kwargs)
            if functorch_interop.needed():
                argument_checks.no_key(call, randomness)
                return functorch_interop.call_named(
                    func, tuple(dims), out_dims, randomness, for_torch(chunk_size)
                )(*args, **kwargs)
        else:
            dims = [in_dims]
            if functorch_interop.needed():
                argument_checks.no_key(call, randomness)
                return functorch_interop.call(
                    "vmap", func, in_dims, out_dims, randomness, chunk_size=for_torch(chunk_size)
                )(*args, **kwargs)
        places = mapped_inputs.Places(Call("vmap", func, out_dims=out_dims), out_dims)
        args, kwargs = mapped_inputs.opened(args, kwargs, *dims)
        entering = Entering(*mapped_inputs.inputs(call, args, kwargs, *dims), (args, kwargs), {})
        for x in entering.leaves:
            if type(x) is not torch.Tensor and is_dressed(x):
                entering = entering.looked_at(call)
                break
        origin = Origin(
            call, users_instruction(), trace_modes.counted(entering.size), entering.size
        )
        is_ragged = any(type(x) is Components for x in entering.leaves)
        told = options._replace(ragged=True) if is_ragged else options
        whole = Mapping(func, entering, places, Draws(randomness), origin, told)
        result = whole.run() if chunk_size is None else in_chunks(whole, chunk_size)
        if not whole.options.ragged:
            return result
        return ragged.joined(places.call, result, entering.leaves, always=options.ragged)


class Options(NamedTuple):
    """The options for running examples that diverge."""

    divergence: str
    ragged: bool
    max_steps: int | None
    report: Report | None

    spares = False  # True if a run is undone when memory does not suffice

    def listening(self, func: Callable, level: VmapLevel) -> Any:
        """Return a context in which listeners are notified of tests on values."""
        listeners: list[Listener] = []
        if trace_modes.are_on():
            listeners.append(Traced(Call("vmap", func)))
        if self.max_steps is not None:
            call = Call("vmap", func, max_steps=self.max_steps)
            level.limit = Limit(call, level, self.max_steps)
            listeners.append(level.limit)
        if self.report is not None:
            self.report.begins(level)
            listeners.append(self.report)
        return heard_by(listeners) if listeners else _NOBODY

    def gave_up(self, level: VmapLevel, error: BaseException | None) -> bool:
        """Return True if a run that ended with this error is to be run again, in groups."""
        return False


_USUAL = Options("split", ragged=False, max_steps=None, report=None)


def is_simple(how: tuple, options: Options) -> bool:
    """Return True for arguments of `vmap` that `Settled` supports."""
    in_dims, _, randomness, chunk_size = how
    dims = in_dims if type(in_dims) is tuple else (in_dims,)
    if chunk_size is not None or type(randomness) is not str or options != _USUAL:
        return False
    return all(dim is None or type(dim) is int for dim in dims)


class Entering(NamedTuple):
    """The arguments of a call, each with the dim that counts its examples, or None."""

    leaves: list
    spec: Any
    dims: list
    size: int
    given: tuple  # args and kwargs, as they came
    looks: dict[int, Looks]  # by the position of a leaf of a class of the user's

    def looked_at(self, call: Call) -> Entering:
        """Return the arguments as plain tensors, with the user's classes noted in ``looks``."""
        found = {
            i: looks(call, leaf, dim, self.size)
            for i, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True))
            if dim is not None and is_dressed(leaf)
        }
        leaves = [undressed(x) if i in found else x for i, x in enumerate(self.leaves)]
        return self._replace(leaves=leaves, looks=found)

    def unflatten(self, entered: list) -> tuple[tuple, dict]:
        """Return args and kwargs of an example; arguments without mapped leaves are the same."""
        old, old_named = self.given
        if not old_named and len(old) == len(entered) and all(map(is_, old, self.leaves)):
            return tuple(entered), {}
        args, kwargs = pytree.unflatten(entered, tensordict.of_one(self.spec, self.dims))
        if None not in self.dims:
            return args, kwargs
        by_place, by_name = (s.children() for s in self.spec.children())
        left = iter(self.dims)
        kept = [
            all(d is None for d in [*islice(left, child.num_leaves)])
            for child in (*by_place, *by_name)
        ]
        n = len(args)
        args = tuple(o if k else a for o, a, k in zip(old, args, kept[:n], strict=True))
        named = {key: old_named[key] for key, k in zip(kwargs, kept[n:], strict=True) if k}
        return args, {**kwargs, **named}


class Mapping(NamedTuple):
    """One call of a mapped function, on all or some of its examples."""

    func: Callable
    entering: Entering
    places: mapped_inputs.Places
    draws: Draws
    origin: Origin
    options: Options

    def some(self, numbers: Sequence[int]) -> Mapping:
        """Return the call on some of the examples, from 0: views for a range, else copies."""
        entering, origin = self.entering, self.origin
        leaves = [
            leaf if dim is None else _some(leaf, dim, numbers)
            for leaf, dim in zip(entering.leaves, entering.dims, strict=True)
        ]
        if isinstance(numbers, range):
            known = origin.numbers[numbers.start : numbers.stop]
        elif origin.numbers == range(origin.size):
            known = numbers
        else:
            known = [origin.numbers[n] for n in numbers]
        return self._replace(
            entering=entering._replace(
                leaves=leaves,
                size=len(numbers),
                looks={
                    i: found.of_some(lambda t: _some(t, 0, numbers))
                    for i, found in entering.looks.items()
                },
            ),
            origin=origin._replace(numbers=known),
        )

    def run(self) -> Any:
        """Run all examples at once, or in groups if they diverge or have several shapes."""
        components = [x for x in self.entering.leaves if type(x) is Components]
        if components:
            return pytree.unflatten(*strategy.run_groups(self, by_shape(components)))
        return pytree.unflatten(*strategy.run(self))

    def once(self) -> tuple[list, Any]:
        """Run the function once; raise `Groups` if its examples diverge."""
        level = VmapLevel(self.entering.size, self.draws.flag, top())
        level.origin = self.origin
        level.scope = self.draws.scope(level, self.origin.numbers)
        level.parts = self.options.divergence == "split"
        entering = self.entering
        entered = list(entering.leaves)
        for i, dim in enumerate(entering.dims):
            if dim is not None:
                leaf = entering.leaves[i]
                level.ledger.arguments.append(leaf)
                entered[i] = boundary.enter(of_coordinates(leaf), dim, level)
        examples = entered
        if entering.looks:
            examples = [*entered]
            for i, found in entering.looks.items():
                examples[i] = found.given_to(entered[i], level)
        args, kwargs = entering.unflatten(examples)
        with (
            once_more(self, level),
            functorch_interop.eagerly(),
            running(level),
            drawing_in(level.scope),
        ):
            with self.options.listening(self.origin.call.func, level):
                result = self.func(*args, **kwargs)
        _hand_back(entering, entered, level, self.origin)
        results, spec = pytree.flatten(result)
        if spec.type is not None:
            mapped_inputs.check_contexts(self.places.call, spec)
        left = []
        seen: set[int] = set()
        places = self.places.of(spec)
        for r, place in zip(results, places, strict=True):
            if type(r) is Number:
                r = as_tensor(r)
            elif isinstance(r, (int, float, complex)) and place is not None:
                r = torch.tensor(r)
            stack = _leave(r, place, level, self.places.call, seen)
            if self.options.ragged and place is not None and isinstance(stack, torch.Tensor):
                stack = ragged.apiece(stack, place)
            left.append(stack)
        return left, tensordict.of_all(spec, places, level.size)


def _some(leaf: Any, dim: int, numbers: Sequence[int]) -> Any:
    if isinstance(leaf, Components):
        return leaf.some(numbers)
    if isinstance(numbers, range):
        return leaf.narrow(dim, numbers.start, len(numbers))
    return rows(leaf, dim, numbers)


def _hand_back(entering: Entering, entered: list, level: VmapLevel, origin: Origin) -> None:
    """Give the caller's tensors the history of writes into their examples."""
    with functions_off():
        changed = [
            leaf
            for leaf, dim, example in zip(entering.leaves, entering.dims, entered, strict=True)
            if dim is not None and boundary.hand_back(example, leaf, dim, level)
        ]
    for leaf in changed:
        twins = [x for x in entering.leaves if isinstance(x, torch.Tensor)]
        if sum(memory(x) == memory(leaf) for x in twins) > 1:
            raise mapped_inputs.written_twice(origin.call, leaf)


def _leave(r: Any, place: int | None, level: VmapLevel, call: Call, seen: set[int]) -> Any:
    if not isinstance(r, torch.Tensor):
        return mapped_inputs.as_it_is(call, r, level)
    if r.is_nested:
        raise mapped_inputs.nested_result(call, r)
    known = r
    if type(r) is not Batched and is_dressed(r):
        r = undressed(r)
    if isinstance(r, Wrapper) and r.level is not level:
        if r.level.root is level:
            r = r.level.completed(r, level)  # a derivative of some of the examples
        elif place is not None:
            ((r,), _) = without_ended(f"the result of {call}", (r,), {})
    if place is None:
        return carried(mapped_inputs.unmapped(call, r, level), known)
    with functions_off():
        rank = r.dim() + 1
    if not -rank <= place < rank:
        raise mapped_inputs.place_outside(call, r, place)
    stack = boundary.leave(r, place % rank, level)
    memory = id(getattr(r, "family", None) or r)
    if memory in seen:  # a tensor returned twice, or with a view of it: the loop would copy both
        stack = stack.clone()
    seen.add(memory)
    return stack if known is r else stacked_by_class(known, stack, place % rank, level)
