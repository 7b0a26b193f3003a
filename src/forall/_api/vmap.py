"""`vmap`: a function of one example, applied to all examples at once."""

from __future__ import annotations

from contextlib import nullcontext
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._api import argument_checks, mapped_inputs, ragged
from forall._api.chunk_size import get_torch_chunk_size
from forall._api.define_transform import define_transform
from forall._api.execution.chunked_map import run_in_chunks
from forall._api.execution.loop_or_batch import SettledCalls
from forall._api.execution.mapped_call import MappedArguments, MappedCall, VmapOptions
from forall._api.execution.strategy import run_mapped_call
from forall._api.nested_components import NestedExamples
from forall._api.typing import Chunk, P, R
from forall._compat import (
    functorch_interop,
    pytree,
    trace_modes,
)
from forall._compat.call_site import find_users_instruction
from forall._compat.tensor_subclass import is_of_users_class
from forall._compat.transform_call import call_transform
from forall._core.errors import CallOrigin, TransformCall
from forall._core.levels import stack
from forall._divergence.converted_call import collect_report
from forall._divergence.report import Report
from forall._divergence.thread_state import inner
from forall._vmap.randomness import CallRandomness

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch.distributed.device_mesh import DeviceMesh

    from forall._mesh.rank_call import RankCall

_NOTHING = nullcontext()
_REPORTED = 8  # vmaps inside an explained call of another transform
_TENSOR = {torch.Tensor}


_USUAL = {"chunk_size": None, "divergence": "split", "ragged": False, "max_steps": None}
_USUAL |= {"axis_name": None, "axis_size": None, "mesh": None}
_PLAIN_DIMS = frozenset({int, NoneType})


def _make_settled_calls(func: Callable, options: dict[str, Any]) -> SettledCalls | None:
    """Return the calls that run as the loop without checks; None for options that need checks."""
    if type(options["randomness"]) is not str or not _USUAL.items() <= options.items():
        return None
    in_dims = options["in_dims"]
    dims = in_dims if type(in_dims) is tuple else (in_dims,)
    is_plain = _PLAIN_DIMS.issuperset(map(type, dims))
    return SettledCalls(func, in_dims, options["out_dims"]) if is_plain else None


@define_transform(settled=_make_settled_calls)
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
    axis_name: Hashable = None,
    axis_size: int | None = None,
    mesh: DeviceMesh | None = None,
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
    another, they run so, as in the loop. Calls are timed to find out, see `config.strategy`.

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
        axis_name: a name for the examples, by which collectives inside combine them: `psum`,
            `all_gather` and others. An inner name hides the same name further out.
        axis_size: how many examples there are. Needed where no argument is mapped, else checked.
        mesh: a `torch.distributed` DeviceMesh of one dim (``mesh["dp"]``). The mapped arguments are
            this rank's examples; all ranks have to make the call. The examples of rank 0 come
            first, then those of rank 1, and so on; ranks may have unlike numbers of them.
            Collectives combine the examples of all ranks, and a key draws by numbers over all
            ranks. The results are those of this rank's examples. A DTensor stands for the examples
            of all ranks: ``Shard`` in its in_dim, or ``Replicate`` if it is shared. With one among
            the arguments the results are DTensors too.

    Keyword arguments are shared between the examples, unless a dict of in_dims names them.

    Raises:
        ValueError: where the arguments and ``in_dims``, or the results and ``out_dims``, do not
            fit, where sizes differ, where results of different examples have different shapes
            without ragged or a nested argument, for another number of examples than axis_size, and
            for a chunk_size below 1 or a max_steps or axis_size below 0.
        IndexError: for a place in ``out_dims`` that the result does not have.
        RuntimeError: where examples diverge under ``divergence="error"``; after max_steps steps;
            for a write of an example's own data into a tensor that all examples share; for a random
            draw under ``randomness="error"``.
        RankError: on all ranks of a mesh, where one fails or they come to different places.
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
    argument_checks.check_randomness("vmap", randomness, keys=True)
    argument_checks.check_chunk_size("vmap", chunk_size)
    argument_checks.check_divergence("vmap", divergence)
    argument_checks.check_max_steps("vmap", max_steps)
    if axis_name is not None or axis_size is not None or mesh is not None:
        argument_checks.check_axis("vmap", axis_name, axis_size)
        argument_checks.check_mesh("vmap", mesh, randomness)

    options = VmapOptions(divergence, ragged, max_steps, None)

    def run_mapped(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        more = (axis_name, axis_size, mesh)
        spec = VmapSpec(func, in_dims, out_dims, randomness, chunk_size, *more)
        return spec.run(options, args, kwargs)

    return run_mapped


def run_and_report(
    func: Callable, options: dict[str, Any], args: tuple, kwargs: dict, report: Report
) -> Any:
    """Run one call of the mapped function with these options of `vmap`, and fill the report."""
    spec = VmapSpec(func, *[options[name] for name in VmapSpec._fields[1:]])
    ways = {name: options[name] for name in ("divergence", "ragged", "max_steps")}
    how = VmapOptions(**ways, report=report)
    # The outermost call: else one inside it would reset the state of those around when it ends.
    return call_transform(spec._run, how, args, kwargs)


class VmapSpec(NamedTuple):
    """The arguments of `vmap`."""

    func: Callable
    in_dims: Any
    out_dims: Any
    randomness: Any
    chunk_size: Chunk
    axis_name: Hashable
    axis_size: int | None
    mesh: DeviceMesh | None

    def run(self, options: VmapOptions, args: tuple, kwargs: dict) -> Any:
        """Run one call of the mapped function; report it if it is in another explained call."""
        reports = inner.reports
        if reports is None or stack.listening or len(reports) == _REPORTED:
            return self._run(options, args, kwargs)
        report = Report()
        reports.append(report)
        with collect_report(report):
            return self._run(options._replace(report=report), args, kwargs)

    def _run(self, options: VmapOptions, args: tuple, kwargs: dict) -> Any:
        call = TransformCall("vmap", self.func, in_dims=self.in_dims)
        if functorch_interop.must_hand_over():
            return self._hand_over(call, args, kwargs)
        if self.mesh is None:
            return self._run_here(call, options, None, args, kwargs)
        from forall._mesh.rank_call import run_rank_call  # imports torch.distributed

        run = self._run_here
        return run_rank_call(self.mesh, call, lambda r: run(call, options, r, args, kwargs))

    def _hand_over(self, call: TransformCall, args: tuple, kwargs: dict) -> Any:
        """Let torch.func make the call, under whose transforms or compiler it is made."""
        func, in_dims, out_dims, randomness, chunk_size, axis_name, axis_size, mesh = self
        argument_checks.refuse_own_options(call, randomness, axis_name, axis_size, mesh)
        chunk_size = get_torch_chunk_size(chunk_size)
        if isinstance(in_dims, dict):
            args, kwargs, *dims = mapped_inputs.bind_named_dims(call, func, in_dims, args, kwargs)
            mapped = functorch_interop.vmap_with_named_dims(
                func, tuple(dims), out_dims, randomness, chunk_size
            )
        else:
            options = {"chunk_size": chunk_size}
            mapped = functorch_interop.call_torch_func(
                "vmap", func, in_dims, out_dims, randomness, **options
            )
        return mapped(*args, **kwargs)

    def _run_here(
        self,
        call: TransformCall,
        options: VmapOptions,
        running: RankCall | None,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Make the call on the examples of this process; ``running`` is the call of all ranks."""
        func, in_dims, out_dims, randomness, chunk_size, axis_name, axis_size, _ = self
        dims = [in_dims]
        if isinstance(in_dims, dict):
            args, kwargs, *dims = mapped_inputs.bind_named_dims(call, func, in_dims, args, kwargs)
        places = mapped_inputs.OutDims("vmap", func, out_dims)
        local = None
        if running is not None:
            local = running.take_local(args, kwargs)
            args, kwargs = (args, kwargs) if local is None else (local.args, local.kwargs)
            axis_size = running.find_local_size(axis_size, args, kwargs, dims)
        known = mapped_inputs.check_inputs(call, args, kwargs, *dims, axis_size=axis_size)
        arguments = MappedArguments(*known, {})
        if local is not None:
            local.check_dims(arguments.dims)
        kinds = {*map(type, arguments.leaves)}
        if kinds != _TENSOR and any(map(is_of_users_class, arguments.leaves)):
            arguments = arguments.strip_user_classes(call)
        size, ranks = arguments.size, None
        numbers: Any = range(size) if type(size) is int else trace_modes.SymbolicRange(size)
        if running is not None:
            ranks = running.begin(size, self.axis_size)
            numbers = range(ranks.start, ranks.start + size)
            axis_name = running if axis_name is None else axis_name  # a name that no user has
        origin = CallOrigin(call, find_users_instruction(), numbers, size)
        told = options._replace(ragged=True) if NestedExamples in kinds else options
        axis = None if axis_name is None else arguments.make_axis(axis_name, chunk_size, ranks)
        draws = CallRandomness(randomness)
        whole = MappedCall(func, arguments, places, draws, origin, told, axis=axis)
        try:
            found = (
                run_mapped_call(whole) if chunk_size is None else run_in_chunks(whole, chunk_size)
            )
        except Exception as error:
            if kwargs and not isinstance(in_dims, dict):
                mapped_inputs.note_shared_keywords(error, kwargs, size)
            raise
        leaves, spec = found
        if local is not None and ranks is not None:
            leaves = local.make_results(leaves, places.expand_to_leaves(spec), ranks)
        result = leaves[0] if spec is pytree.LEAF else pytree.unflatten(leaves, spec)
        if not whole.options.ragged:
            return result
        return ragged.nest_results(places.call, result, arguments.leaves, always=options.ragged)
