"""The transforms under which an entry is swept, each written once for all engines.

A word is a function of an engine (forall, torch.func, or the plain truth) and of a `Task`. It
makes its arguments anew, and draws the same cotangents and tangents for every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oracle import empty_truth

from .cases import Case
from .entries import EXAMPLES, Sample

OUTER = 2  # examples of the outer of two vmaps
MOST_ROWS = 400  # of a Jacobian, counting complex numbers as one


@dataclass
class Slopes:
    """Of which tensor arguments, and of which results, derivatives are taken."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    like: list[Tensor]  # those results, for their shapes and dtypes


@dataclass
class Task:
    case: Case
    slopes: Slopes | None
    writes: set[int]
    options: dict[str, Any] = field(default_factory=dict)
    outer: tuple = ()  # in_dims of the outer of two vmaps
    via: torch.dtype | None = None  # what cotangents and tangents are rounded to first

    def drawn(self, shape: Sequence[int], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        drawn = torch.randn(shape, dtype=wide, generator=draw).to(self.via or dtype).to(dtype)
        examples = self.case.sample.leaves[0]
        return drawn.to(examples[0].device) if examples else drawn

    def values(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results that have a derivative. What an entry writes into is its own copy."""
        assert self.slopes is not None
        tensors = [x.clone() if j in self.writes else x for j, x in enumerate(tensors)]
        found = _tensors(_processed(self.case.sample, tensors))
        return tuple(found[i] for i in self.slopes.outputs)

    def put(self, args: Sequence[Tensor], primals: Sequence[Tensor]) -> list[Tensor]:
        assert self.slopes is not None
        full = list(args)
        for j, x in zip(self.slopes.inputs, primals, strict=True):
            full[j] = x
        return full

    def of(self, args: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """The function of the arguments that derivatives are taken of; the others stay."""
        return lambda *primals: self.values(self.put(args, primals))

    def picked(self, args: Sequence[Tensor]) -> list[Tensor]:
        assert self.slopes is not None
        return [args[j] for j in self.slopes.inputs]

    def cotangents(self, size: int | None, draw: torch.Generator) -> list[Tensor]:
        assert self.slopes is not None
        lead = () if size is None else (size,)
        return [self.drawn((*lead, *y.shape), y.dtype, draw) for y in self.slopes.like]


def _processed(sample: Sample, tensors: Sequence[Tensor]) -> Any:
    out = sample.call(*tensors)
    return sample.process(out) if sample.process else out


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _fresh() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def slopes_of(sample: Sample, writes: set[int]) -> Slopes | None:
    """What a plain call says has a derivative; None where torch itself takes none."""
    usable = [
        j
        for j, x in enumerate(sample.leaves[0])
        if x.layout == torch.strided and (x.is_floating_point() or x.is_complex())
    ]
    # Some entries have a derivative in the first argument only, and raise for the others.
    for inputs in dict.fromkeys((tuple(usable), tuple(usable[:1]))):
        if not inputs:
            return None
        try:
            found = _differentiable(sample, inputs)
        except (RuntimeError, ValueError, NotImplementedError):
            continue
        if found.outputs:
            return found
    return None


def _differentiable(sample: Sample, inputs: tuple[int, ...]) -> Slopes:
    args = [x.clone() for x in sample.leaves[0]]
    for j in inputs:
        args[j] = args[j].requires_grad_()
    leaves = [args[j] for j in inputs]
    args = [x.clone() for x in args]  # what is written into is no leaf
    found = _tensors(_processed(sample, args))
    outputs = tuple(i for i, y in enumerate(found) if y.requires_grad)
    like = [found[i] for i in outputs]
    if outputs:
        cots = [torch.ones_like(y) for y in like]
        torch.autograd.grad(like, leaves, cots, allow_unused=True)
    return Slopes(inputs, outputs, [y.detach() for y in like])


# --- the words ---------------------------------------------------------------------------------


def vmap(e: Any, t: Task) -> Any:
    args = t.case.args()
    out = e.vmap(t.case.call, in_dims=t.case.in_dims, **t.options)(*args)
    return out, args


def vmap_vmap(e: Any, t: Task) -> Any:
    """Each of the outer examples has the inner ones in another order."""
    args = _twice(t)
    inner = e.vmap(t.case.call, in_dims=t.case.in_dims, **t.options)
    return e.vmap(inner, in_dims=t.outer, **t.options)(*args), args


def _twice(t: Task) -> tuple:
    examples = t.case.sample.leaves
    if not examples[0]:
        return (torch.arange(OUTER * t.case.size).view(OUTER, t.case.size),)
    turned = []
    for o in range(OUTER):
        leaves = [examples[(k + o) % EXAMPLES] for k in range(EXAMPLES)]
        turned.append(replace(t.case, sample=replace(t.case.sample, leaves=leaves)).args())
    return tuple(
        column[0] if d is None else torch.stack(column, d)
        for column, d in zip(zip(*turned, strict=True), t.outer, strict=True)
    )


def vmap_vjp(e: Any, t: Task) -> Any:
    args, n = t.case.args(), len(t.case.in_dims)
    cots = t.cotangents(t.case.size, _fresh())

    def one(*both: Tensor) -> Any:
        xs, cs = both[:n], both[n:]
        ys, pull = e.vjp(t.of(xs), *t.picked(xs))
        return tuple(ys), tuple(pull(tuple(cs)))

    return e.vmap(one, in_dims=(*t.case.in_dims, *[0] * len(cots)), **t.options)(*args, *cots)


def vmap_jvp(e: Any, t: Task) -> Any:
    return _along(e, t, lambda f, at, ts: e.jvp(f, tuple(at), tuple(ts)))


def _along(e: Any, t: Task, pushed: Callable[..., tuple[Any, Any]]) -> Any:
    """Every example has a direction of its own, also in the arguments that all share."""
    args, n = t.case.args(), len(t.case.in_dims)
    draw = _fresh()
    examples = t.picked(t.case.sample.leaves[0])
    tangents = [t.drawn((t.case.size, *x.shape), x.dtype, draw) for x in examples]

    def one(*both: Tensor) -> Any:
        xs, ts = both[:n], both[n:]
        ys, moved = pushed(t.of(xs), t.picked(xs), ts)
        return tuple(ys), tuple(moved)

    dims = (*t.case.in_dims, *[0] * len(tangents))
    return e.vmap(one, in_dims=dims, **t.options)(*args, *tangents)


def _stacked(e: Any, t: Task, args: Sequence[Tensor]) -> Callable[..., Any]:
    mapped = e.vmap(lambda *xs: t.values(xs), in_dims=t.case.in_dims, **t.options)
    return lambda *primals: mapped(*t.put(args, primals))


def vjp_vmap(e: Any, t: Task) -> Any:
    args = t.case.args()
    ys, pull = e.vjp(_stacked(e, t, args), *t.picked(args))
    return tuple(ys), tuple(pull(tuple(t.cotangents(t.case.size, _fresh()))))


def jvp_vmap(e: Any, t: Task) -> Any:
    args, draw = t.case.args(), _fresh()
    primals = t.picked(args)
    tangents = tuple(t.drawn(x.shape, x.dtype, draw) for x in primals)
    ys, pushed = e.jvp(_stacked(e, t, args), tuple(primals), tangents)
    return tuple(ys), tuple(pushed)


def _pull(e: Any, t: Task) -> tuple[Callable[..., Any], list[Tensor]]:
    """The pull-back of one example as a function of its point and its cotangents, and both."""
    args = [x.clone() for x in t.case.sample.leaves[0]]
    primals = t.picked(args)
    n = len(primals)

    def pull(*both: Tensor) -> tuple[Tensor, ...]:
        return tuple(e.vjp(t.of(args), *both[:n])[1](tuple(both[n:])))

    return pull, [*primals, *t.cotangents(None, _fresh())]


def _pushed(e: Any, t: Task, pull: Callable[..., Any], at: list[Tensor]) -> Any:
    draw = _fresh().manual_seed(6)
    tangents = tuple(t.drawn(x.shape, x.dtype, draw) for x in at)
    value, pushed = e.jvp(pull, tuple(at), tangents)
    return tuple(value), tuple(pushed)


def _pulled(e: Any, t: Task, pull: Callable[..., Any], at: list[Tensor]) -> Any:
    draw = _fresh().manual_seed(6)
    value, again = e.vjp(pull, *at)
    cots = tuple(t.drawn(x.shape, x.dtype, draw) for x in value)
    return tuple(value), tuple(again(cots))


def jvp_vjp(e: Any, t: Task) -> Any:
    return _pushed(e, t, *_pull(e, t))


def vjp_vjp(e: Any, t: Task) -> Any:
    return _pulled(e, t, *_pull(e, t))


def _pull_of_all(e: Any, t: Task) -> tuple[Callable[..., Any], list[Tensor]]:
    """The same of all examples at once: what they share gets the sum."""
    args = t.case.args()
    primals = t.picked(args)
    n = len(primals)

    def pull(*both: Tensor) -> tuple[Tensor, ...]:
        return tuple(e.vjp(_stacked(e, t, args), *both[:n])[1](tuple(both[n:])))

    return pull, [*primals, *t.cotangents(t.case.size, _fresh())]


def jvp_vjp_vmap(e: Any, t: Task) -> Any:
    """What a Hessian is made of, of a loss over examples."""
    return _pushed(e, t, *_pull_of_all(e, t))


def vjp_vjp_vmap(e: Any, t: Task) -> Any:
    return _pulled(e, t, *_pull_of_all(e, t))


def _of_one(
    t: Task, moved: Sequence[Tensor]
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The entry as a function of one example, with real results, and that example.

    Every number of ``moved`` is a row or a column of the Jacobian.
    """
    args = [x.clone() for x in t.case.sample.leaves[0]]
    if sum(x.numel() for x in moved) > MOST_ROWS or any(x.is_complex() for x in t.picked(args)):
        raise ValueError("a Jacobian that is too large for the loop, or of complex numbers")
    of = t.of(args)

    def real(*primals: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.view_as_real(y) if y.is_complex() else y for y in of(*primals))

    return real, t.picked(args)


def jacrev(e: Any, t: Task) -> Any:
    """Only the cotangents are stacked: nothing else differs between the rows."""
    assert t.slopes is not None
    of, at = _of_one(t, t.slopes.like)
    return e.jacrev(of, tuple(range(len(at))))(*at)


def linearize(e: Any, t: Task) -> Any:
    """A linear map of one example, applied twice."""
    args = [x.clone() for x in t.case.sample.leaves[0]]
    at, draw = t.picked(args), _fresh()
    pairs = [tuple(t.drawn(x.shape, x.dtype, draw) for x in at) for _ in range(2)]
    value, push = e.linearize(t.of(args), *at)
    return tuple(value), *(tuple(push(*tangents)) for tangents in pairs)


def vmap_linearize(e: Any, t: Task) -> Any:
    def pushed(f: Callable, at: Sequence[Tensor], ts: Sequence[Tensor]) -> tuple[Any, Any]:
        value, push = e.linearize(f, *at)
        return value, push(*ts)

    return _along(e, t, pushed)


def jacfwd(e: Any, t: Task) -> Any:
    of, at = _of_one(t, t.picked(t.case.sample.leaves[0]))
    return e.jacfwd(of, tuple(range(len(at))), randomness="same")(*at)


WORDS: dict[str, Callable[[Any, Task], Any]] = {
    "vmap": vmap,
    "vmap∘vmap": vmap_vmap,
    "vmap∘vjp": vmap_vjp,
    "vmap∘jvp": vmap_jvp,
    "vjp∘vmap": vjp_vmap,
    "jvp∘vmap": jvp_vmap,
    "jvp∘vjp": jvp_vjp,
    "vjp∘vjp": vjp_vjp,
    "jvp∘vjp∘vmap": jvp_vjp_vmap,
    "vjp∘vjp∘vmap": vjp_vjp_vmap,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "linearize": linearize,
    "vmap∘linearize": vmap_linearize,
}
DERIVATIVES = set(WORDS) - {"vmap", "vmap∘vmap"}
ALONE = {
    "jvp∘vjp",
    "vjp∘vjp",
    "jacrev",
    "jacfwd",
    "linearize",
}  # without a vmap: one example, nothing to place
FULL = ("float64", "float32")  # under every word
PART = ("bfloat16", "complex64", "complex128", "int64", "bool")  # under these:
PART_WORDS = ("vmap", "vmap∘vjp", "jacrev")
WRITING_WORDS = ("vmap", "vmap∘vmap", "vmap∘vjp")  # forms in place and with out=


def in_double(t: Task, dtype: torch.dtype) -> Task:
    """The same numbers in double precision."""

    def wide(x: Tensor) -> Tensor:
        return x.to(_DOUBLE[x.dtype]) if x.dtype in _DOUBLE else x

    leaves = [[wide(x) for x in values] for values in t.case.sample.leaves]
    slopes = t.slopes and replace(t.slopes, like=[wide(y) for y in t.slopes.like])
    sample = replace(t.case.sample, leaves=leaves)
    return replace(t, case=replace(t.case, sample=sample), slopes=slopes, via=dtype)


_DOUBLE = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


# --- no examples -------------------------------------------------------------------------------


def truth_of(word: str, plain: Any, t: Task) -> Any:
    """What the plain engine gives; of no examples, what it gives for some, cut off.

    That way shapes that depend on values, which have no one truth, show.
    """
    if t.case.size:
        return WORDS[word](plain, t)
    some = WORDS[word](plain, replace(t, case=replace(t.case, size=EXAMPLES)))
    if word == "vmap":
        return empty_truth(some[0]), t.case.args()
    if word == "vmap∘vmap":
        return empty_truth(some[0], 1), _twice(t)
    if word == "vjp∘vmap":
        return empty_truth(some[0]), _no_gradients(t, some[1])
    if word == "jvp∘vjp∘vmap":
        return _no_gradients(t, some[0]), _no_gradients(t, some[1])
    if word == "vjp∘vjp∘vmap":
        n = len(some[0])
        cotangents = tuple(empty_truth(list(some[1][n:])))
        return _no_gradients(t, some[0]), (*_no_gradients(t, some[1][:n]), *cotangents)
    return empty_truth(some)


def _no_gradients(t: Task, some: tuple) -> tuple:
    """The sum over no examples is zero; a mapped argument has no examples itself."""
    assert t.slopes is not None
    dims = [t.case.in_dims[j] for j in t.slopes.inputs]
    return tuple(
        torch.zeros_like(g) if d is None else g.narrow(d, 0, 0)
        for g, d in zip(some, dims, strict=True)
    )
