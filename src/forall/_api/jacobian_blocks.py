"""All derivatives of a function of tensors: a pull-back per row, or a push-forward per column.

Both give, for each output and each input, one block of shape (*O, *I).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from forall._api import argument_checks
from forall._api.argnums import DiffArguments, with_value_as_aux
from forall._api.chunk_size import count_columns
from forall._api.execution.chunked_map import run_each_chunk
from forall._api.jacobian_basis import Basis
from forall._api.jvp import push_forward
from forall._api.vjp import GraphPullback, record_pullback
from forall._api.vmap import vmap
from forall._autodiff import reverse_mode, standard_basis
from forall._compat import functorch_interop, pytree
from forall._compat.autograd_graph import iterate_nodes
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.storage import is_out_of_memory
from forall._core.errors import TransformCall, format_columns, format_short
from forall._core.levels import may_carry_tangents, top
from forall._vmap import boundary
from forall._vmap.mutation.mutation_log import take_log_snapshots
from forall._vmap.randomness import get_direction_flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.jacobian_basis import RankRows
    from forall._api.typing import Chunk


class JacobianBlocks(NamedTuple):
    """Derivatives: ``blocks[o][i]`` is that of output o with respect to input i."""

    blocks: list[list[torch.Tensor]]
    spec: Any  # the tree of the outputs
    aux: Any

    def tree(self, shaped: Callable[[list], Any]) -> Any:
        """Return the output's tree, with a tree like the inputs (`DiffLeaves.shaped`) at leaves."""
        return pytree.unflatten([shaped(row) for row in self.blocks], self.spec)


class InnerJacobian:
    """The Jacobian at a call's arguments, as a function of the differentiated tensors.

    It returns ``blocks[o][i]`` (`JacobianBlocks`), and the value of the user's function as its aux.
    """

    # `spec` is written by the call itself. A slot is no state that the user's code could share.
    __slots__ = ("__dict__", "spec")

    def __init__(
        self,
        call: TransformCall,
        func: Callable,
        args: tuple,
        kwargs: dict,
        which: tuple[Any, Any],  # argnums, argnames
        has_aux: bool,
        chunk: Chunk = None,
        *,
        holomorphic: bool | None = None,
    ) -> None:
        self.call = call
        self.holomorphic = holomorphic
        self.func = with_value_as_aux(call.verb, func, has_aux)
        self.given = DiffArguments(call, args, kwargs, *which, ValueError)
        self.has_aux = has_aux
        self.chunk = chunk
        self.spec: Any = None

    def __call__(self, *xs: torch.Tensor) -> tuple[list, Any]:
        if functorch_interop.must_hand_over():
            found = self._by_torch(xs)
        else:
            found = compute_by_rows(
                self.call, self._value, list(xs), True, self.chunk, self.holomorphic
            )
        self.spec = found.spec
        return found.blocks, found.aux

    def _value(self, *xs: torch.Tensor) -> Any:
        return self.given.call(self.func, xs)

    def _by_torch(self, xs: tuple) -> JacobianBlocks:
        n = len(xs)
        jacobian = functorch_interop.call_torch_func(
            "jacrev", self._value, tuple(range(n)), has_aux=True
        )
        found, y = jacobian(*xs)
        flat = pytree.get_leaves(found)
        _, spec = pytree.flatten(y[0] if self.has_aux else y)
        return JacobianBlocks([flat[i : i + n] for i in range(0, len(flat), n)], spec, y)

    def tree(self, blocks: list) -> Any:
        return JacobianBlocks(blocks, self.spec, None).tree(self.given.unflatten_results)

    def answer(self, result: Any, j: list, y: Any, return_value: bool) -> Any:
        """Return ``result`` with the value, Jacobian and aux that were asked for."""
        return pack_answer(result, self.tree(j), y, self.has_aux, return_value)


def pack_answer(result: Any, jacobian: Any, y: Any, has_aux: bool, return_value: bool) -> Any:
    """Return a second derivative with the Jacobian, value and aux that were asked for.

    With has_aux, ``y`` is the value and the aux.
    """
    if return_value:
        return result, (jacobian, *y) if has_aux else (jacobian, y)
    return (result, y[1]) if has_aux else result


def check_jacobian_inputs(
    call: TransformCall, xs: list[torch.Tensor], holomorphic: bool | None
) -> list[torch.Tensor]:
    """Check that the inputs of a Jacobian are real, or complex if it is holomorphic."""
    argument_checks.check_real_or_complex(call, "inputs", xs, holomorphic)
    for x in xs:
        boundary.refuse_torch_transforms(x)
    return xs


def compute_by_rows(
    call: TransformCall,
    func: Callable,
    xs: list[torch.Tensor],
    has_aux: bool,
    chunk: Chunk,
    holomorphic: bool | None,
    ranks: RankRows | None = None,
) -> JacobianBlocks:
    """Compute a Jacobian in reverse mode: pull back every number of the outputs."""
    pull, _, aux = record_pullback(
        call, func, tuple(check_jacobian_inputs(call, xs, holomorphic)), has_aux
    )
    argument_checks.check_real_or_complex(call, "outputs", pull.outputs, holomorphic)
    return JacobianBlocks(compute_rows(pull, chunk, holomorphic, ranks), pull.out_spec, aux)


def compute_rows(
    pull: GraphPullback, chunk: Chunk, holomorphic: bool | None, ranks: RankRows | None = None
) -> list[list[torch.Tensor]]:
    """Return blocks ``[o][i]`` of shape (*O, *I), by rows.

    torch's backward multiplies a cotangent by the conjugate of df/dz.
    """
    blocks = compute_blocks(pull, chunk, ranks)
    return [[b.conj_physical() for b in row] for row in blocks] if holomorphic else blocks


def compute_blocks(
    pull: GraphPullback, chunk: Chunk, ranks: RankRows | None = None
) -> list[list[torch.Tensor]]:
    """Return blocks ``[o][i]`` of shape (*O, *I), by rows."""
    basis = Basis.choose("outputs", pull.outputs, ranks)
    stacks = _pull_back_basis(pull, chunk, basis)
    first, blocks = 0, []
    for rows, shape in zip(*basis, strict=True):
        n = len(rows)
        blocks.append([s[first : first + n].reshape((*shape, *s.shape[1:])) for s in stacks])
        first += n
    return blocks


def _pull_back_basis(pull: GraphPullback, chunk: Chunk, basis: Basis) -> list[torch.Tensor]:
    """Return (N, *I) for each input: the pull-backs of N directions of the outputs together."""
    total = basis.total
    if not total:
        return [torch.zeros(0, *x.shape, dtype=x.dtype, device=x.device) for x in pull.own]
    if (
        total == sum(y.numel() for y in pull.outputs) == 1
    ):  # a scalar function's only row is its gradient
        cots = [c.squeeze(0) for c in standard_basis.make_basis_rows(pull.outputs, 0, 1)]
        return [g.unsqueeze(0) for g in pull.pull_back_at(top(), cots)]

    def some(numbers: range) -> list[torch.Tensor]:
        cots = standard_basis.select_basis_rows(pull.outputs, basis.select(numbers))
        return pull.pull_back_stacked(cots, top())

    parts = [*run_each_chunk(some, total, chunk, pull.own, "row")]
    return parts[0] if len(parts) == 1 else [torch.cat(p) for p in zip(*parts, strict=True)]


def compute_by_columns(
    call: TransformCall,
    func: Callable,
    given: DiffArguments,
    has_aux: bool,
    randomness: str,
    chunk: Chunk,
    holomorphic: bool | None,
    ranks: RankRows | None = None,
) -> JacobianBlocks:
    """Compute a Jacobian in forward mode: push forward every number of the inputs."""
    xs, beside = check_jacobian_inputs(call, given.tensors, holomorphic), given.find_other_tensors()
    specs: list[Any] = []
    first = _FirstRun(call, xs, beside)

    def column(*directions: torch.Tensor) -> Any:
        level: Any = top()
        if chunk is not None:
            first.begin(level)
        level.state.count_as_one_call(call.verb, first=chunk is not None or not specs)
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        value, tangent, *aux = push_forward(
            call,
            func,
            tuple(xs),
            directions,
            strict=False,
            has_aux=has_aux,
            beside=beside,
            written=written,
        )
        first.note(written)
        argument_checks.check_real_or_complex(
            call, "outputs", pytree.get_leaves(value), holomorphic
        )
        leaves, spec = pytree.flatten(tangent)
        specs.append(spec)
        return leaves, aux, [value for _, value in written]

    basis = Basis.choose("inputs", xs, ranks)
    directions = standard_basis.select_basis_rows(xs, basis.select(range(basis.total)))
    flag = get_direction_flag(randomness)
    push_all = vmap(column, 0, (-1, None, None), flag, chunk_size=count_columns(chunk))
    try:
        stacks, aux, values = push_all(*directions)
        for target, value in zip(first.written or (), values, strict=True):
            boundary.give_history(target, value)
    finally:
        first.forget()  # else a reference cycle through torch's graph may hold this function
    return JacobianBlocks(
        [_split_inputs(s, basis) for s in stacks], specs[0], aux[0] if has_aux else None
    )


# --- the mode with fewer directions: the double-backward trick -----------------------------------


class HookDetector(TorchFunctionMode):
    """A function mode that notes whether a hook is registered: hooks may change a cotangent."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func in _HOOKED
        return func(*args, **(kwargs or {}))


# No mode sees a node's own hooks being registered, but the read of `grad_fn` before that.
_HOOKED = {torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__}


def compute_by_fewer(
    call: TransformCall,
    func: Callable,
    xs: list[torch.Tensor],
    has_aux: bool,
    chunk: Chunk,
    holomorphic: bool,
) -> JacobianBlocks:
    """Pull back every number of the outputs, or push forward those of the inputs if they are fewer.

    ``func`` has run by the time that its outputs can be counted. A pull-back is linear in the
    cotangents, so its own pull-back is the push-forward, which costs about twice as much.
    """
    hooks = HookDetector()

    def call_watching_hooks(*xs: torch.Tensor) -> Any:
        with hooks:
            return func(*xs)

    pull, _, aux = record_pullback(
        call, call_watching_hooks, tuple(check_jacobian_inputs(call, xs, holomorphic)), has_aux
    )
    argument_checks.check_real_or_complex(call, "outputs", pull.outputs, holomorphic)
    few = 2 * sum(x.numel() for x in xs) < sum(y.numel() for y in pull.outputs)
    pushes = few and not hooks.seen and _can_pull_back_twice(pull)
    found = _push_columns(call, pull, xs, chunk) if pushes else None
    return JacobianBlocks(found or compute_rows(pull, chunk, holomorphic), pull.out_spec, aux)


# The nodes of torch's own operators; the name of a Function's node has no number.
_TORCHS = re.compile(r".*Backward\d+|AccumulateGrad|CopySlices|CopyBackwards")


def _can_pull_back_twice(pull: GraphPullback) -> bool:
    """Return True if a graph can be pulled back twice, and no third pass is possible.

    The backward of a Function need not be differentiable. A third pass lacks terms in torch.
    """
    with functions_off():
        if may_carry_tangents() or any(x.grad_fn is not None for x in pull.own):
            return False
        if torch.is_grad_enabled() and reverse_mode.leads_outside(pull.outputs, pull.run):
            return False
        return all(_TORCHS.fullmatch(type(n).__name__) for n in iterate_nodes(pull.outputs))


def _push_columns(call: TransformCall, pull: GraphPullback, xs: list, chunk: Chunk) -> list | None:
    """Return ``[o][i]`` of shape (*O, *I), by columns; None where torch has no second backward."""
    cots = tuple(map(torch.zeros_like, pull.outputs))
    try:
        push, *_ = record_pullback(
            call, lambda *cots: tuple(pull.pull_back_at(top(), [*cots])), cots, False
        )
        columns = compute_blocks(push, chunk)  # [i][o], of shape (*I, *O)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None
    return [
        [_move_outputs_first(c[o], x.dim()) for c, x in zip(columns, xs, strict=True)]
        for o in range(len(cots))
    ]


def _move_outputs_first(block: torch.Tensor, n: int) -> torch.Tensor:
    """Return a block (*I, *O) as (*O, *I), with n dims in I."""
    with functions_off():
        return block.permute([*range(n, block.dim()), *range(n)]).detach().contiguous()


# --- what the first chunk of columns writes ------------------------------------------------------


class _FirstRun:
    """The run of the first chunk of directions: its writes, and older memory as it was before."""

    def __init__(
        self, call: TransformCall, xs: list[torch.Tensor], beside: list[torch.Tensor]
    ) -> None:
        self.call, self.xs, self.beside = call, xs, beside
        self.before: Any = None
        self.marks: list[tuple[Any, tuple]] = []
        self.written: list[torch.Tensor] | None = None  # the arguments with history at stake

    def begin(self, level: Any) -> None:
        """Restore older memory, so that directions of ``level`` read what the first ones read."""
        if self.before is not None:
            self.undo()
            return
        self.before = level.state.mutation_log.undo_state
        self.marks = take_log_snapshots(level.parent)
        for x in (*self.xs, *self.beside):
            if not x.requires_grad:
                self.before.keep_history(x)

    def undo(self) -> None:
        """Undo writes, and the logs that levels further out have kept since."""
        moved = {id(x) for x in self.xs if x.requires_grad}
        for t in self.written or ():
            if id(t) in moved:  # each chunk would give it history upon history
                raise documented_error(RuntimeError, "modified-since")(
                    f"{self.call}: with a chunk_size, the function writes into the argument that "
                    "it is differentiated in, and a derivative is taken outside of it.\n"
                    f"{format_columns([('written to', format_short(t))])}\n"
                    "Clone the argument inside the function (.clone()), or leave out chunk_size."
                )
        self.before.undo()
        for ledger, mark in self.marks:
            ledger.restore_snapshot(mark)

    def note(self, written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep the arguments that the first run has written to."""
        if self.written is None:
            self.written = [target for target, _ in written]

    def forget(self) -> None:
        """Drop all references."""
        self.__dict__.clear()


def _split_inputs(stack: torch.Tensor, basis: Basis) -> list[torch.Tensor]:
    """Split (*O, N), where N counts the numbers of all inputs together, into (*O, *I) for each."""
    parts = stack.split([*map(len, basis.rows)], -1)
    return [
        p.reshape((*stack.shape[:-1], *shape)) for p, shape in zip(parts, basis.shapes, strict=True)
    ]
