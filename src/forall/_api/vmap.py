"""`vmap`: a function of one example, applied to all examples at once."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from forall._api import argument_checks, mapped_inputs, ragged
from forall._api.chunk_size import get_torch_chunk_size
from forall._api.execution import strategy
from forall._api.execution.auto_replay import collect_options, replay_transform
from forall._api.execution.chunked_map import run_in_chunks
from forall._api.execution.groups import Rollback, select_rows
from forall._api.execution.loop_or_batch import SettledCalls
from forall._api.nested_components import NestedExamples, group_by_shape
from forall._api.subclass_arguments import (
    ExampleAttributes,
    find_example_attributes,
    stack_by_class,
)
from forall._api.typing import Chunk, P, R
from forall._compat import (
    functorch_interop,
    pytree,
    tensordict,
    trace_modes,
)
from forall._compat.dispatch_state import functions_off
from forall._compat.tensor_subclass import is_of_users_class, restore_users_class, strip_users_class
from forall._compat.wrapper_tensor import Wrapper
from forall._core.call_site import find_users_instruction
from forall._core.errors import CallOrigin, TransformCall
from forall._core.levels import top
from forall._divergence.batched_scalar import BatchedScalar, number_to_tensor
from forall._random.key_scope import enter_scope as drawing_in
from forall._vmap import boundary
from forall._vmap.batched_tensor import BatchedTensor, replace_ended_args
from forall._vmap.concretize_listeners import StepLimit, TracerListener, add_listeners
from forall._vmap.dispatch import run_vmap_level
from forall._vmap.mutation.mutation_log import get_memory_key
from forall._vmap.randomness import CallRandomness
from forall._vmap.sparse_stack import to_coordinates
from forall._vmap.vmap_level import VmapConfig, VmapLevel

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
    given = collect_options(
        "vmap",
        in_dims=in_dims,
        out_dims=out_dims,
        randomness=randomness,
        chunk_size=chunk_size,
        divergence=divergence,
        ragged=ragged,
        max_steps=max_steps,
    )
    argument_checks.check_callable("vmap", func)
    argument_checks.check_randomness("vmap", randomness, keys=True)
    argument_checks.check_chunk_size("vmap", chunk_size)
    argument_checks.check_divergence("vmap", divergence)
    argument_checks.check_max_steps("vmap", max_steps)

    how = in_dims, out_dims, randomness, chunk_size
    return _make_mapped(func, given, how, VmapOptions(divergence, ragged, max_steps, None))


def _make_mapped(func: Callable, given: tuple, how: tuple, options: VmapOptions) -> Callable:
    """Return the mapped function of `vmap`."""
    settled = SettledCalls(func, *how[:2]) if can_settle(how, options) else None

    @replay_transform(func, given, settled)
    def run_mapped(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        return VmapSpec(func, *how).run(options, args, kwargs)

    if not is_dynamo_compiling():
        vars(run_mapped)["__forall_run__"] = (
            VmapSpec(func, *how).run,
            options,
        )  # what `explain` asks for
    return run_mapped


class VmapSpec(NamedTuple):
    """The arguments of `vmap`."""

    func: Callable
    in_dims: Any
    out_dims: Any
    randomness: Any
    chunk_size: Chunk

    def run(self, options: VmapOptions, args: tuple, kwargs: dict) -> Any:
        """Run one call of the mapped function."""
        func, in_dims, out_dims, randomness, chunk_size = self
        call = TransformCall("vmap", func, in_dims=in_dims)
        if isinstance(in_dims, dict):
            args, kwargs, *dims = mapped_inputs.bind_named_dims(call, func, in_dims, args, kwargs)
            if functorch_interop.must_hand_over():
                argument_checks.refuse_key_randomness(call, randomness)
                return functorch_interop.vmap_with_named_dims(
                    func, tuple(dims), out_dims, randomness, get_torch_chunk_size(chunk_size)
                )(*args, **kwargs)
        else:
            dims = [in_dims]
            if functorch_interop.must_hand_over():
                argument_checks.refuse_key_randomness(call, randomness)
                return functorch_interop.call_torch_func(
                    "vmap",
                    func,
                    in_dims,
                    out_dims,
                    randomness,
                    chunk_size=get_torch_chunk_size(chunk_size),
                )(*args, **kwargs)
        places = mapped_inputs.OutDims(TransformCall("vmap", func, out_dims=out_dims), out_dims)
        args, kwargs = mapped_inputs.unwrap_collections(args, kwargs, *dims)
        arguments = MappedArguments(
            *mapped_inputs.check_inputs(call, args, kwargs, *dims), (args, kwargs), {}
        )
        for x in arguments.leaves:
            if type(x) is not torch.Tensor and is_of_users_class(x):
                arguments = arguments.strip_user_classes(call)
                break
        origin = CallOrigin(
            call, find_users_instruction(), trace_modes.make_range(arguments.size), arguments.size
        )
        is_ragged = any(type(x) is NestedExamples for x in arguments.leaves)
        told = options._replace(ragged=True) if is_ragged else options
        whole = VmapCall(func, arguments, places, CallRandomness(randomness), origin, told)
        result = whole.run() if chunk_size is None else run_in_chunks(whole, chunk_size)
        if not whole.options.ragged:
            return result
        return ragged.nest_results(places.call, result, arguments.leaves, always=options.ragged)


class VmapOptions(NamedTuple):
    """The options for running examples that diverge."""

    divergence: str
    ragged: bool
    max_steps: int | None
    report: Report | None

    retries_on_oom = False  # True if a run is undone when memory does not suffice

    def listen_to_tests(self, func: Callable, level: VmapLevel) -> Any:
        """Return a context in which listeners are notified of tests on values."""
        listeners: list[Listener] = []
        if trace_modes.is_tracer_on():
            listeners.append(TracerListener(TransformCall("vmap", func)))
        if self.max_steps is not None:
            call = TransformCall("vmap", func, max_steps=self.max_steps)
            level.state.limit = StepLimit(call, level, self.max_steps)
            listeners.append(level.state.limit)
        if self.report is not None:
            self.report.begin_run(level)
            listeners.append(self.report)
        return add_listeners(listeners) if listeners else _NOBODY

    def must_rerun(self, level: VmapLevel, error: BaseException | None) -> bool:
        """Return True if a run that ended with this error is to be run again, in groups."""
        return False


_USUAL = VmapOptions("split", ragged=False, max_steps=None, report=None)


def can_settle(how: tuple, options: VmapOptions) -> bool:
    """Return True for arguments of `vmap` that `SettledCalls` supports."""
    in_dims, _, randomness, chunk_size = how
    dims = in_dims if type(in_dims) is tuple else (in_dims,)
    if chunk_size is not None or type(randomness) is not str or options != _USUAL:
        return False
    return all(dim is None or type(dim) is int for dim in dims)


class MappedArguments(NamedTuple):
    """The arguments of a call, each with the dim that counts its examples, or None."""

    leaves: list
    spec: Any
    dims: list
    size: int
    given: tuple  # args and kwargs, as they came
    looks: dict[int, ExampleAttributes]  # by the position of a leaf of a class of the user's

    def strip_user_classes(self, call: TransformCall) -> MappedArguments:
        """Return the arguments as plain tensors, with the user's classes noted in ``looks``."""
        found = {
            i: find_example_attributes(call, leaf, dim, self.size)
            for i, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True))
            if dim is not None and is_of_users_class(leaf)
        }
        leaves = [strip_users_class(x) if i in found else x for i, x in enumerate(self.leaves)]
        return self._replace(leaves=leaves, looks=found)

    def unflatten(self, entered: list) -> tuple[tuple, dict]:
        """Return args and kwargs of an example; arguments without mapped leaves are the same."""
        old, old_named = self.given
        if not old_named and len(old) == len(entered) and all(map(is_, old, self.leaves)):
            return tuple(entered), {}
        args, kwargs = pytree.unflatten(entered, tensordict.make_example_spec(self.spec, self.dims))
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


class VmapCall(NamedTuple):
    """One call of a mapped function, on all or some of its examples."""

    func: Callable
    arguments: MappedArguments
    places: mapped_inputs.OutDims
    draws: CallRandomness
    origin: CallOrigin
    options: VmapOptions

    def some(self, numbers: Sequence[int]) -> VmapCall:
        """Return the call on some of the examples, from 0: views for a range, else copies."""
        arguments, origin = self.arguments, self.origin
        leaves = [
            leaf if dim is None else _select_examples(leaf, dim, numbers)
            for leaf, dim in zip(arguments.leaves, arguments.dims, strict=True)
        ]
        if isinstance(numbers, range):
            known = origin.numbers[numbers.start : numbers.stop]
        elif origin.numbers == range(origin.size):
            known = numbers
        else:
            known = [origin.numbers[n] for n in numbers]
        return self._replace(
            arguments=arguments._replace(
                leaves=leaves,
                size=len(numbers),
                looks={
                    i: found.select_attributes(lambda t: _select_examples(t, 0, numbers))
                    for i, found in arguments.looks.items()
                },
            ),
            origin=origin._replace(numbers=known),
        )

    def run(self) -> Any:
        """Run all examples at once, or in groups if they diverge or have several shapes."""
        components = [x for x in self.arguments.leaves if type(x) is NestedExamples]
        if components:
            return pytree.unflatten(*strategy.run_groups(self, group_by_shape(components)))
        return pytree.unflatten(*strategy.run_mapped_call(self))

    def run_once(self) -> tuple[list, Any]:
        """Run the function once; raise `Groups` if its examples diverge."""
        config = VmapConfig(self.draws.flag, self.options.divergence == "split")
        level = VmapLevel(self.arguments.size, config, top())
        level.origin = self.origin
        level.state.scope = self.draws.scope(level, self.origin.numbers)
        arguments = self.arguments
        entered = list(arguments.leaves)
        for i, dim in enumerate(arguments.dims):
            if dim is not None:
                leaf = arguments.leaves[i]
                level.state.mutation_log.arguments.append(leaf)
                entered[i] = boundary.stack_to_example(to_coordinates(leaf), dim, level)
        examples = entered
        if arguments.looks:
            examples = [*entered]
            for i, found in arguments.looks.items():
                examples[i] = found.put_on_example(entered[i], level)
        with (
            Rollback(self, level),
            functorch_interop.run_eagerly(),
            run_vmap_level(level),
            drawing_in(level.state.scope),
        ):
            with self.options.listen_to_tests(self.origin.call.func, level):
                # Classes of the user's may look at examples where they are put together.
                args, kwargs = arguments.unflatten(examples)
                result = self.func(*args, **kwargs)
        _give_back_history(arguments, entered, level, self.origin)
        results, spec = pytree.flatten(result)
        if spec.type is not None:
            mapped_inputs.check_contexts(self.places.call, spec)
        left = []
        seen: set[int] = set()
        places = self.places.expand_to_leaves(spec)
        for r, place in zip(results, places, strict=True):
            if type(r) is BatchedScalar:
                r = number_to_tensor(r)
            elif isinstance(r, (int, float, complex)) and place is not None:
                r = torch.tensor(r)
            stack = _take_out_result(r, place, level, self.places.call, seen)
            if self.options.ragged and place is not None and isinstance(stack, torch.Tensor):
                stack = ragged.split_examples(stack, place)
            left.append(stack)
        return left, tensordict.make_batch_spec(spec, places, level.size)


def _select_examples(leaf: Any, dim: int, numbers: Sequence[int]) -> Any:
    if isinstance(leaf, NestedExamples):
        return leaf.some(numbers)
    if isinstance(numbers, range):
        return leaf.narrow(dim, numbers.start, len(numbers))
    return select_rows(leaf, dim, numbers)


def _give_back_history(
    arguments: MappedArguments, entered: list, level: VmapLevel, origin: CallOrigin
) -> None:
    """Give the caller's tensors the history of writes into their examples."""
    with functions_off():
        changed = [
            leaf
            for leaf, dim, example in zip(arguments.leaves, arguments.dims, entered, strict=True)
            if dim is not None and boundary.hand_back_history(example, leaf, dim, level)
        ]
    for leaf in changed:
        twins = [x for x in arguments.leaves if isinstance(x, torch.Tensor)]
        if sum(get_memory_key(x) == get_memory_key(leaf) for x in twins) > 1:
            raise mapped_inputs.make_written_twice_error(origin.call, leaf)


def _take_out_result(
    r: Any, place: int | None, level: VmapLevel, call: TransformCall, seen: set[int]
) -> Any:
    if not isinstance(r, torch.Tensor):
        return mapped_inputs.pass_through(call, r, level)
    with functions_off():  # who asks a value of an ended level has what is left of it made
        is_nested = r.is_nested
    if is_nested:
        raise mapped_inputs.make_nested_error(call, r)
    known = r
    if type(r) is not BatchedTensor and is_of_users_class(r):
        r = strip_users_class(r)
    if isinstance(r, Wrapper) and r.level is not level:
        if r.level.root is level:
            r = r.level.complete_gradient_for(r, level)  # a derivative of some of the examples
        elif place is not None:
            ((r,), _) = replace_ended_args(f"the result of {call}", (r,), {})
    if place is None:
        return restore_users_class(mapped_inputs.keep_unmapped(call, r, level), known)
    with functions_off():
        rank = r.dim() + 1
    if not -rank <= place < rank:
        raise mapped_inputs.make_out_dim_error(call, r, place)
    stack = boundary.example_to_stack(r, place % rank, level)
    memory = id(getattr(r, "family", None) or r)
    if memory in seen:  # a tensor returned twice, or with a view of it: the loop would copy both
        stack = stack.clone()
    seen.add(memory)
    return stack if known is r else stack_by_class(known, stack, place % rank, level)
