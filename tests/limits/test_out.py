"""out= of every operator that has it, against the loop: a part drawn with a fixed seed."""

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from draws import make_generator
from forall import grad, vmap
from oracle import difference, loop
from sweep.entries import STORAGE, UNINITIALISED, Sample, all_ops, dtypes_for, samples_of

OPS = {name: op for name, op in all_ops().items() if op.supports_out and op.dtypes}

SEED = 0
FRACTION = 0.3  # 1 takes ten seconds for a process of its own

# What one call cannot have in common with the loop, and why.
LEFT_OUT = {
    **dict.fromkeys(UNINITIALISED, "memory that nobody wrote"),
    **dict.fromkeys(("bernoulli", "multinomial", "normal"), "draws random numbers"),
    "normal:number_mean": "draws random numbers",
    **dict.fromkeys(("masked_select", "nonzero"), "a shape that depends on values"),
    "_native_batch_norm_legit": "writes into an argument besides, and is private",
}


DRAWN = sorted(
    random.Random(SEED).sample(sorted(OPS.keys() - LEFT_OUT.keys()), round(FRACTION * len(OPS)))
)
WIDER = {
    torch.float32: torch.float64,
    torch.float64: torch.complex128,
    torch.int64: torch.float64,
    torch.bool: torch.uint8,
}


def with_out(op: Any) -> tuple[SimpleNamespace, Callable[[Any], None]]:
    """The entry, with an out= that can be set from outside."""
    held: list[Any] = [None]

    def call(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs) if held[0] is None else op.op(*args, out=held[0], **kwargs)

    def put(out: Any) -> None:
        held[0] = out

    return SimpleNamespace(op=call, sample_inputs=op.sample_inputs), put


def stacks(sample: Sample) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*sample.leaves, strict=True)]


def outs_like(result: Any, made: Callable[[Tensor], Tensor]) -> Any:
    leaves = [made(r) for r in tree_flatten(result)[0]]
    return leaves[0] if isinstance(result, Tensor) else tuple(leaves)


def local(shape_of: str) -> Callable[[Tensor], Tensor]:
    def made(r: Tensor) -> Tensor:
        if shape_of == "empty":
            return torch.empty(0, dtype=r.dtype)
        if shape_of == "transposed":
            return torch.zeros(r.shape[::-1], dtype=r.dtype).permute(*range(r.dim())[::-1])
        if shape_of == "wider":
            return torch.zeros(r.shape, dtype=WIDER.get(r.dtype, r.dtype))
        return torch.zeros(r.shape, dtype=r.dtype)

    return made


def check(sample: Sample, put: Callable[[Any], None], kind: str, own_storage: bool) -> str | None:
    """The first difference from the loop; None when there is none or torch itself refuses."""
    put(None)
    try:
        results = [sample.call(*(x.clone() for x in leaves)) for leaves in sample.leaves]
    except Exception:
        return None
    columns = list(zip(*(tree_flatten(r)[0] for r in results), strict=True))
    if not all(isinstance(r, Tensor) and r.layout == torch.strided for c in columns for r in c):
        return None
    if any(len({(r.shape, r.dtype) for r in c}) != 1 for c in columns):
        return None
    right = [torch.stack(c) for c in columns]

    def into_local(*tensors: Tensor) -> Any:
        out = outs_like(results[0], local(kind))
        put(out)
        try:
            returned = sample.call(*tensors)
        finally:
            put(None)
        return returned, out

    def into_given(given: tuple, *tensors: Tensor) -> Any:
        put(given[0] if isinstance(results[0], Tensor) else given)
        try:
            return sample.call(*tensors)
        finally:
            put(None)

    if kind == "mapped" and own_storage:
        return None  # the loop would write into a copy

    def run(mapped: Callable) -> Any:
        xs = [x.clone() for x in stacks(sample)]
        if kind not in {"mapped", "shared"}:
            if kind == "nested":
                return mapped(mapped(into_local))(*(torch.stack([x, x.flip(0)]) for x in xs))
            return mapped(into_local)(*xs)
        leaves = tree_flatten(results[0])[0]
        if kind == "shared":
            given = tuple(torch.zeros(r.shape, dtype=r.dtype) for r in leaves)
            with_given = mapped(lambda *tensors: (into_given(given, *tensors), tensors[0])[1])
            return with_given(*xs), given
        given = tuple(torch.zeros(len(results), *r.shape, dtype=r.dtype) for r in leaves)
        return mapped(into_given)(given, *xs), given

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            truth = run(lambda f: loop(f, own_storage=own_storage))
            wrote = [t.to(r.dtype) for t, r in zip(tree_flatten(truth)[0], right, strict=False)]
            if kind not in {"nested", "shared"} and difference(wrote, right):
                return None  # torch itself does not write what it returns
        except Exception:
            return None
        try:
            mine = run(vmap)
        except RuntimeError as error:
            if kind == "shared" and str(error).startswith("vmap: "):
                return None  # and no other number
            return f"{kind}: {error}"
        except Exception as error:
            return f"{kind}: {type(error).__name__}: {error}"
    found = difference(mine, truth)
    return found and f"{kind}: {found}"


KINDS = ("local", "mapped", "empty", "transposed", "wider", "nested", "shared")


def verdict(name: str) -> str | None:
    op, put = with_out(OPS[name])
    dtype = dtypes_for(OPS[name], [torch.float64])[0]
    for sample in samples_of(op, dtype, 3):
        if not sample.leaves[0]:
            continue
        for kind in KINDS:
            found = check(sample, put, kind, name in STORAGE)
            if found:
                return f"{name}{sample.text}: {found}"
    return None


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")  # entries warn, and out= that is resized does
@pytest.mark.parametrize("name", DRAWN)
def test_out_of_an_entry_equals_the_loop(name):
    assert verdict(name) is None


# --- as users write it --------------------------------------------------------------------------

X = torch.randn(4, 3, dtype=torch.float64, generator=make_generator(1))


def into_like(x):
    y = torch.empty_like(x)
    torch.sin(x, out=y)
    return y


def into_a_slice(x):
    table = torch.zeros(2, 3, dtype=x.dtype)
    torch.sin(x, out=table[1])
    return table


def into_its_own_argument(x):
    torch.mul(x, 2, out=x)
    return x + 1


def into_several(x):
    values, places = torch.empty((), dtype=x.dtype), torch.empty((), dtype=torch.int64)
    torch.max(x, 0, out=(values, places))
    return values, places


def into_q_and_r(x):
    q, r = torch.empty(0, dtype=x.dtype), torch.empty(0, dtype=x.dtype)
    torch.linalg.qr(x.outer(x) + torch.eye(3), out=(q, r))
    return q.abs(), r.abs()


def twice_into_one(x):
    out = torch.zeros(3, dtype=x.dtype)
    torch.add(x, 1, out=out)
    torch.mul(out, x, out=out)
    return out


def a_shared_result_then_an_own_one(x):
    out = torch.zeros(3, dtype=x.dtype)
    torch.add(torch.ones(3, dtype=x.dtype), 1, out=out)
    first = out.clone()
    torch.add(x, 1, out=out)
    return first, out


@pytest.mark.parametrize(
    "f",
    [
        into_like,
        lambda x: torch.sin(x, out=torch.empty(3, dtype=x.dtype)),
        into_a_slice,
        into_its_own_argument,
        into_several,
        into_q_and_r,
        twice_into_one,
        a_shared_result_then_an_own_one,
        lambda x: torch.cat([x, x], out=torch.empty(6, dtype=x.dtype)),
        lambda x: torch.sum(x, 0, out=torch.empty((), dtype=x.dtype)),
        lambda x: torch.matmul(x.outer(x), x, out=torch.empty(3, dtype=x.dtype)),
    ],
)
def test_out_as_users_write_it(f):
    mine, theirs = X.clone(), X.clone()
    assert difference(vmap(f)(mine), loop(f)(theirs)) is None
    assert difference(mine, theirs) is None
    nested = torch.stack([X, X.flip(0)])
    assert difference(vmap(vmap(f))(nested.clone()), loop(loop(f))(nested.clone())) is None


def test_the_result_is_the_very_out():
    def f(x):
        out = torch.empty_like(x)
        return torch.tensor(float(torch.sin(x, out=out) is out))

    assert bool(vmap(f)(X).all())


def test_a_result_of_another_dtype_is_refused_as_in_the_loop():
    def f(x):
        return torch.sin(x, out=torch.empty(3, dtype=torch.int64))

    with pytest.raises(RuntimeError, match="can't be cast"):
        loop(f)(X)
    with pytest.raises(RuntimeError, match="can't be cast"):
        vmap(f)(X)


def test_out_under_grad_is_refused_as_in_the_loop():
    def f(x):
        return torch.sin(x, out=torch.empty(3, dtype=x.dtype)).sum()

    for run in (loop, vmap):
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            run(grad(f))(X)


def test_the_same_data_may_go_into_a_buffer_from_outside():
    buffer = torch.zeros(3, dtype=X.dtype)
    table = torch.arange(3, dtype=X.dtype)
    vmap(lambda x: (torch.sin(table, out=buffer), x)[1])(X)
    assert difference(buffer, table.sin()) is None


def test_own_data_may_not():
    buffer = torch.zeros(3, dtype=X.dtype)
    with pytest.raises(RuntimeError, match="all examples share"):
        vmap(lambda x: torch.sin(x, out=buffer))(X)
    assert not buffer.any()
