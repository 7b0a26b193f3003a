"""`vjp`: value and pull-back, by reverse mode."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._api import argument_checks
from forall._api.argnums import DiffLeaves
from forall._api.define_transform import define_transform_at_point
from forall._api.execution.transform_decorator import make_replayable
from forall._autodiff import jvp_level, reverse_mode
from forall._autodiff.dual_tensor import make_dual, unpack_dual
from forall._autodiff.jvp_by_double_vjp import repeat_draws
from forall._compat import functorch_interop, pytree
from forall._compat.autograd_graph import iterate_nodes
from forall._compat.dispatch_state import functions_off, is_functorch_wrapped
from forall._compat.documented_error import documented_error
from forall._compat.inference_mode import copy_if_inference
from forall._compat.lazy_bits import pass_lazy_zeros
from forall._compat.private_api import PLAIN
from forall._compat.tensor_subclass import unwrap_posed
from forall._compat.transform_call import call_transform
from forall._compat.wrapper_tensor import has_history
from forall._core.axes import move_axis_to_front
from forall._core.errors import DataDependentError, TransformCall, warn_slow_path
from forall._core.levels import Level, lift, run_outside, top
from forall._core.python_state import is_ours
from forall._divergence import convert_if_running
from forall._vmap import boundary
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.dispatch import run_vmap_level
from forall._vmap.mutation.mutation_log import take_log_snapshots
from forall._vmap.outer_graph import sum_leaving_cotangents
from forall._vmap.vmap_level import CotangentLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forall._jit.cache.replayed_pullback import ReplayedPullback


@define_transform_at_point()
def vjp(func: Callable, *primals: Any, has_aux: bool = False) -> Any:
    """The value of a function and its pull-back, by reverse mode.

    For ``f: (*I) -> (*O)``, ``vjp(f, x)`` is ``(f(x), pull)`` where ``pull(c)`` holds one result
    for each primal; with ``c`` of shape ``(*O)`` and J the Jacobian ``(*O, *I)``,

        pull(c)[0][i] = sum over o of c[o] * J[o, i],   of shape (*I).

    Cost: one forward pass now, one backward pass per ``pull``. What the backward pass needs stays
    in memory as long as ``pull`` does.

    Trees: cotangents are shaped like the output, results like the primals; a leaf that is no
    floating-point or complex tensor gets None. ``pull`` may be called any number of times, also
    under `vmap` and `jvp`.

    Args:
        has_aux: ``func`` returns ``(output, aux)``; the result is then ``(output, pull, aux)``.

    Raises:
        RuntimeError: for an integer primal, for an output that is not a floating-point or complex
            tensor, and where cotangents and outputs do not fit.
        ValueError: where there are primals and none is a tensor.
        TypeError: for a cotangent that is no tensor.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.2.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> y, pull = vjp(f, torch.tensor([2.0, 3.0]))
        >>> y
        tensor([6., 5., 4.])
        >>> pull(torch.tensor([1.0, 0.0, 10.0]))       # (3,) -> (2,)
        (tensor([43.,  2.]),)
    """
    call = TransformCall("vjp", func)
    try:
        pull, value, aux = call_transform(
            record_pullback, call, make_replayable(func), primals, has_aux
        )
    except TypeError as error:
        if not primals:  # it lacks arguments
            error.add_note("vjp runs at once: write vjp(f, x), not vjp(f)(x).")
        raise

    vjp_fn = make_vjp_fn(call, pull, has_aux)
    return (value, vjp_fn, aux) if has_aux else (value, vjp_fn)


def make_vjp_fn(call: TransformCall, pull: GraphPullback, has_aux: bool) -> Callable:
    """Return the function of cotangents that `vjp` returns for a pull-back."""

    @functorch_interop.exclude_from_dynamo
    def vjp_fn(
        cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
    ) -> tuple:
        """Pull cotangents, shaped like the output, back to the primals."""
        del create_graph  # decided by what the result can reach
        argument_checks.check_one_cotangent(call, retain_graph)
        cots = argument_checks.check_cotangents(call, pull.outputs, pull.out_spec, cotangents)
        found = call_transform(pull.pull_back_at, top(), cots, retain_graph=retain_graph)
        return pull.moved.unflatten_results(found)

    vars(vjp_fn)["__forall_pullback__"] = PullbackRecord(pull, has_aux)
    return vjp_fn


class PullbackRecord(NamedTuple):
    """A record of how a pull-back was made."""

    pull: GraphPullback
    has_aux: bool


def find_pullback(x: Any) -> PullbackRecord | None:
    """Return the record of a pull-back that `vjp` returned; None for any other function."""
    if type(x) is not FunctionType or "__forall_pullback__" not in vars(x) or not is_ours(x):
        return None  # attributes are copied to others (functools.wraps)
    return vars(x)["__forall_pullback__"]


def record_pullback(
    call: TransformCall, func: Callable, primals: tuple, has_aux: bool
) -> tuple[GraphPullback, Any, Any]:
    """Run ``func`` on fresh variables, for `vjp` and `jacrev`, and return its pull-back."""
    outer = torch.is_grad_enabled()
    with functorch_interop.run_eagerly(), reverse_mode.record_autograd() as run:
        moved = DiffLeaves(call, primals, primals)
        own = reverse_mode.make_variables(moved.tensors)
        out = convert_if_running(func)(
            *moved.replace_tensors(reverse_mode.restore_classes(own, moved.tensors))
        )
        aux = None
        if has_aux:
            out, aux = argument_checks.split_aux(call, out)
        outputs, out_spec = argument_checks.check_outputs(call, out)
        argument_checks.check_floating_outputs(call, outputs)
    pull = GraphPullback(run, own, moved, [*map(unwrap_posed, outputs)], out_spec)
    value = pytree.unflatten(outputs, out_spec)
    value, aux = reverse_mode.detach_from_run((value, aux), run, outer)
    return pull, value, aux


class GraphPullback:
    """The graph from fresh variables to outputs, at the level that it was recorded in."""

    can_share = True  # whether cotangents that all examples share are pulled back once
    _nodes: set | None = None

    def __init__(
        self,
        run: reverse_mode.VariableScope,
        own: list,
        moved: DiffLeaves,
        outputs: list,
        out_spec: Any,
    ) -> None:
        self.run = run
        self.own = own
        self.moved = moved
        self.outputs = outputs
        self.out_spec = out_spec
        self.level = top()

    def pull_back_at(self, level: Level | None, cots: list, *, retain_graph: bool = True) -> list:
        """Pull back cotangents of ``level``, which may be inside the graph's own.

        The graph's values are constant in every level entered since, and the pull-back is linear.
        So examples leave their level as one more axis, and a tangent is pulled back like its
        primal.
        """
        if level is self.level or not self._is_inside(level):
            return self._run_backward(cots, retain_graph)
        if any(is_functorch_wrapped(c) for c in cots):
            raise documented_error(NotImplementedError, "mixed-with-torch-func")(
                "vjp: its function is called inside a transform of torch.func that is itself "
                "inside one of forall.\n"
                "Such a value cannot be pulled back through a graph from outside both.\n"
                "Use forall's transform in the place of torch.func's."
            )
        cots = [lift(c, level) for c in cots]
        with run_outside(level):
            if isinstance(level, jvp_level.JvpLevel):
                return _pull_back_duals(
                    lambda parts: self.pull_back_at(level.parent, parts), cots, level
                )
            if not self.can_share or any(c.axis is not None for c in cots):
                stacks = [boundary.example_to_stack(c, 0, level) for c in cots]
                pulled = self.pull_back_stacked(stacks, level.parent)
                return [boundary.stack_to_example(g, 0, level) for g in pulled]
            pulled = self.pull_back_at(level.parent, [*map(boundary.keep_shared, cots)])
        return [lift(g, level) for g in pulled]  # the same for all examples

    def _is_inside(self, level: Level | None) -> bool:
        while level is not None and level is not self.level:
            level = level.parent
        return level is self.level

    def pull_back_stacked(self, stacks: list, level: Level | None) -> list:
        """Pull back stacks (N, *O) of cotangents that are values of ``level``, all N at once."""
        if level is not self.level and self._is_inside(level):
            n = stacks[0].shape[0]
            stacks = [lift(s, level) for s in stacks]
            with run_outside(level):
                if isinstance(level, jvp_level.JvpLevel):
                    return _pull_back_duals(
                        lambda parts: self.pull_back_stacked(parts, level.parent), stacks, level
                    )
                folded = [boundary.example_to_stack(s, 0, level).flatten(0, 1) for s in stacks]
                pulled = self.pull_back_stacked(folded, level.parent)
                return [
                    boundary.stack_to_example(g.unflatten(0, (-1, n)), 0, level) for g in pulled
                ]
        return self._run_stacked(stacks)

    def _run_backward(self, cots: list, retain_graph: bool) -> list:
        outer = torch.is_grad_enabled()
        with reverse_mode.record_autograd() as run, reverse_mode.hide_ended_tangents():
            run.include(self.run)
            found = reverse_mode.compute_gradients(
                tuple(self.outputs),
                tuple(map(copy_if_inference, cots)),
                self.own,
                retain_graph=retain_graph,
                closes=None if any(map(has_history, cots)) else run,
            )
        return reverse_mode.detach_from_run(found, run, outer)

    def find_replayed(self) -> ReplayedPullback | None:
        """Return the pull-back as a function of saved tensors, if the call was replayed."""
        if self.level is not None or not self.outputs:
            return None
        if type(self.outputs[0].grad_fn).__name__ != _REPLAYED:
            return None
        from forall._jit.cache.replayed_pullback import find_replayed_pullback  # it takes long

        return find_replayed_pullback(self.outputs, self.own)

    def _run_stacked(self, stacks: list) -> list:
        outer = torch.is_grad_enabled()
        with reverse_mode.record_autograd() as run, reverse_mode.hide_ended_tangents():
            run.include(self.run)
            stacks = [*map(copy_if_inference, stacks)]
            found = self._run_stacked_replayed(stacks)
            if found is None:
                closes = None if any(map(has_history, stacks)) else run
                found = self._pull_back_batched(
                    lambda ys, cots: reverse_mode.compute_gradients(
                        ys, cots, self.own, closes=closes
                    ),
                    stacks,
                )
        return reverse_mode.detach_from_run(found, run, outer)

    def _run_stacked_replayed(self, stacks: list) -> list | None:
        """Pull back by the program of a replayed call; return None if that cannot be done."""
        if any(type(s) not in PLAIN or s.requires_grad or is_functorch_wrapped(s) for s in stacks):
            return None
        replayed = self.find_replayed()
        if replayed is None:
            return None
        try:
            return self._pull_back_batched(lambda _, cots: replayed.pull_back(cots), stacks)
        except Exception:  # noqa: BLE001 - an operator without a form for examples: the graph has it
            return None

    def _pull_back_batched(self, pull: Callable[[tuple, tuple], Iterable], stacks: list) -> list:
        """Return the results of ``pull`` for N cotangents of each output: (N, *I), or None."""
        if stacks[0].shape[0] == 1:  # a plain pass, without a level
            found = pull(tuple(self.outputs), tuple(s.squeeze(0) for s in stacks))
            return [None if g is None else g.unsqueeze(0) for g in found]
        try:
            return self._pull_back_together(pull, stacks)
        except DataDependentError as error:
            found = self._pull_back_in_turn(pull, stacks)
            warn_slow_path(
                "vjp: cotangents were pulled back one after another, not all at once: a backward "
                "or a hook asks for numbers of its gradient, which differ.\n"
                f"{str(error).splitlines()[1]}\n"
                "Write it without Python's questions: torch.where instead of `if`, a fixed number "
                "of steps instead of `while`."
            )
            return found

    def _pull_back_together(self, pull: Callable[[tuple, tuple], Iterable], stacks: list) -> list:
        """Pull all cotangents back in one pass, which is undone if they would go different ways."""
        level = CotangentLevel(stacks[0].shape[0], top())
        log, around = level.state.mutation_log, take_log_snapshots(top())
        log.undoable = True
        try:
            with run_vmap_level(level), pass_lazy_zeros():
                found = pull(tuple(self.outputs), tuple(wrap_stack(s, 0, level) for s in stacks))
        except DataDependentError:
            log.undo_state.undo()
            for outer, mark in around:
                outer.restore_snapshot(mark)
            raise
        found = [None if g is None else self._unbatch_gradient(g, level) for g in found]
        if level.mark:
            with functions_off():
                sum_leaving_cotangents(
                    level, [g for g in found if g is not None], self._get_recorded_nodes()
                )
        return found

    def _pull_back_in_turn(self, pull: Callable[[tuple, tuple], Iterable], stacks: list) -> list:
        """Pull one cotangent back after another, with the same random draws for each."""
        pull_one = repeat_draws(lambda *cots: tuple(pull(tuple(self.outputs), cots)), stacks)
        rows = [pull_one(*cots) for cots in zip(*(s.unbind(0) for s in stacks), strict=True)]
        found = []
        for column in zip(*rows, strict=True):
            like = next((g for g in column if g is not None), None)
            found.append(
                None
                if like is None
                else torch.stack([torch.zeros_like(like) if g is None else g for g in column])
            )
        return found

    def _get_recorded_nodes(self) -> set:
        """Return the nodes that existed before a backward pass."""
        if self._nodes is None:
            self._nodes = {*iterate_nodes(self.outputs)}
        return self._nodes

    @staticmethod
    def _unbatch_gradient(g: torch.Tensor, level: CotangentLevel) -> torch.Tensor:
        """Return a gradient as (N, *I), with the history that it has outside."""
        value, axis = (g.value, g.axis) if getattr(g, "level", None) is level else (g, None)
        if axis is None:
            return value.expand(level.size, *value.shape)
        return move_axis_to_front(value, axis)


_REPLAYED = "ReplayFunctionBackward"  # the class of the nodes of replayed calls


def _pull_back_duals(pull: Callable[[list], list], duals: list, level: jvp_level.JvpLevel) -> list:
    """Apply a linear ``pull`` to values of a jvp level: to the primals, and to the tangents."""
    pairs = [unpack_dual(d, level) for d in duals]
    primals = pull([p for p, _ in pairs])
    tangents = pull([torch.zeros_like(p) if t is None else t for p, t in pairs])
    return [make_dual(p, t, level) for p, t in zip(primals, tangents, strict=True)]
