"""An error that hangs on numbers is one in each call: recorded, replayed, and of no result's need.

The last test takes some of torch's own samples. All of them, each operator in a process of its own
(a kernel may end it), are tried by ``python tests/laws/test_errors_of_numbers.py``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import forall
from draws import HERE
from forall import grad, jit, jvp, vmap
from forall._compat import pytree
from forall._compat.value_errors import may_raise

X = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
PLACES, FAR = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.tensor([[0, 1, 2], [2, 7, 0]])
ONES, ZERO = torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([[1, 2, 3], [3, 0, 1]])
HALVES = torch.full((2, 3), 0.5)
EYES = torch.eye(2).expand(2, 2, 2).clone()
THREES = torch.eye(3).expand(2, 3, 3).clone()
SINGULAR = torch.stack([torch.eye(2), -torch.ones(2, 2)])
W = torch.arange(6.0).reshape(3, 2)

# A function of an example and of numbers that decide whether it raises; good ones, and bad ones.
CASES = {
    "cross_entropy": (lambda x, t: F.cross_entropy(x.expand(3, 3), t), PLACES, FAR),
    "nll_loss": (lambda x, t: F.nll_loss(x.expand(3, 3), t), PLACES, FAR),
    "nll_loss of images": (
        lambda x, t: F.nll_loss(x.reshape(1, 3, 1, 1).expand(1, 3, 1, 3), t.reshape(1, 1, 3)),
        PLACES,
        FAR,
    ),
    "multi_margin_loss": (lambda x, t: F.multi_margin_loss(x.expand(3, 3), t), PLACES, FAR),
    "embedding": (lambda x, t: F.embedding(t, x[:, None] * W), PLACES, FAR),
    "binary_cross_entropy": (lambda x, p: F.binary_cross_entropy(p, x), HALVES, 3 * HALVES),
    "one_hot": (lambda x, t: F.one_hot(t, 3) * x, PLACES, FAR),
    "one_hot, negative": (lambda x, t: F.one_hot(t, 3) * x, PLACES, -PLACES),
    "index": (lambda x, t: x[t], PLACES, FAR),
    "index, of one": (lambda x, t: x[t[1]], PLACES, FAR),
    "gather": (lambda x, t: x.gather(0, t), PLACES, FAR),
    "scatter": (lambda x, t: x.scatter(0, t, 1.0), PLACES, FAR),
    "scatter_add": (lambda x, t: x.scatter_add(0, t, x), PLACES, FAR),
    "scatter_reduce": (lambda x, t: x.scatter_reduce(0, t, x, "amax"), PLACES, FAR),
    "index_add": (lambda x, t: x.index_add(0, t, x), PLACES, FAR),
    "index_copy": (lambda x, t: x.index_copy(0, t, x), PLACES, FAR),
    "index_fill": (lambda x, t: x.index_fill(0, t, 1.0), PLACES, FAR),
    "index_put": (lambda x, t: x.index_put((t,), x), PLACES, FAR),
    "index_select": (lambda x, t: x.index_select(0, t), PLACES, FAR),
    "take": (lambda x, t: x.take(t), PLACES, FAR),
    "put": (lambda x, t: x.put(t, x), PLACES, FAR),
    "floor division": (lambda x, t: x * (6 // t), ONES, ZERO),
    "remainder": (lambda x, t: x * (6 % t), ONES, ZERO),
    "remainder of two": (lambda x, t: x * torch.remainder(t + 1, t), ONES, ZERO),
    "fmod": (lambda x, t: x * torch.fmod(t + 1, t), ONES, ZERO),
    "division, rounded": (lambda x, t: x * torch.div(t, t, rounding_mode="floor"), ONES, ZERO),
    "cholesky": (lambda x, a: torch.linalg.cholesky(a).sum() * x, EYES, SINGULAR),
    "torch.cholesky": (lambda x, a: torch.cholesky(a).sum() * x, EYES, SINGULAR),
    "inverse": (lambda x, a: torch.linalg.inv(a).sum() * x, EYES, SINGULAR),
    "solve": (lambda x, a: torch.linalg.solve(a, x[:2]).sum() * x, EYES, SINGULAR),
    "eigh": (lambda x, a: torch.linalg.eigh(a)[0].sum() * x, THREES, THREES * torch.nan),
    "svd": (lambda x, a: torch.linalg.svdvals(a).sum() * x, EYES, EYES * torch.nan),
    "bincount": (lambda x, t: t.bincount(minlength=3) * x, PLACES, -PLACES),
    "repeat_interleave": (
        lambda x, t: torch.repeat_interleave(x, t, output_size=3),
        torch.ones_like(PLACES),
        torch.tensor([[-1, 1, 3]] * 2),  # behind others torch meets it where it has written too far
    ),
    "masked_scatter": (
        lambda x, m: x.masked_scatter(m > 0, x[:2]),
        torch.tensor([[0, 1, 1], [1, 1, 0]]),
        torch.ones_like(PLACES),
    ),
    "assertion": (lambda x, t: (torch._assert_async((t > 0).all()), x)[1], ONES, ZERO),
    "distribution": (
        lambda x, s: torch.distributions.Normal(x, s, validate_args=True).log_prob(x),
        HALVES,
        -HALVES,
    ),
    "linspace of whole numbers": (
        lambda x, e: torch.linspace(0, e[0], 3, dtype=torch.int64) * x,
        HALVES,
        HALVES * 1e30,
    ),
    "max_unpool": (
        lambda x, t: F.max_unpool1d(x[None, None], t[None, None], 1)[0, 0],
        PLACES,
        FAR,
    ),
}
DRAWN = {
    "normal": (lambda x, s: torch.normal(x, s), HALVES, -HALVES),
    "bernoulli": (lambda x, p: torch.bernoulli(p) * x, HALVES, 3 * HALVES),
    "multinomial": (lambda x, p: torch.multinomial(p, 1) * x, HALVES, -HALVES),
    "poisson": (lambda x, p: torch.poisson(p) * x, HALVES, -HALVES),
}
FORMS = {
    "its result": lambda f: f,
    "of no need": lambda f: lambda x, t: (f(x, t), x * 2)[1],
    "gradient": lambda f: grad(lambda x, t: f(x, t).sum() * x.sum()),
    "gradient, of no need": lambda f: grad(lambda x, t: (f(x, t), (x * x).sum())[1]),
    "tangent": lambda f: lambda x, t: jvp(lambda x: f(x, t), (x,), (x,))[1],
}
pytestmark = [
    pytest.mark.counted,
    pytest.mark.impure,
    pytest.mark.filterwarnings("ignore::forall.PerformanceWarning"),
]


def outcome(f, *given):
    """What a call gives, or the class of its error."""
    try:
        return f(*given)
    except Exception as error:
        return type(error)


def is_same(a, b):
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    return pytree.flatten(a)[1] == pytree.flatten(b)[1] and all(
        x.dtype == y.dtype and torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
        for x, y in zip(pytree.get_leaves(a), pytree.get_leaves(b), strict=True)
    )


def check(make, good, bad, monkeypatch, calls=5):
    """A call with bad numbers after some with good ones, replayed and by `jit`, and a good one."""
    monkeypatch.setattr(forall.config, "patience", 0)
    replayed, recorded, wanted = make(), jit(make()), []
    monkeypatch.setattr(forall.config, "replay", False)
    wanted = [outcome(make(), *given) for given in (bad, good)]
    monkeypatch.setattr(forall.config, "replay", True)
    assert isinstance(wanted[0], type), wanted
    assert not isinstance(wanted[1], type), wanted
    for made in (replayed, recorded):
        for _ in range(calls):
            made(*good)
        found = [outcome(made, *given) for given in (bad, good)]
        assert found[0] is wanted[0]
        assert is_same(found[1], wanted[1])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_error_of_each_call_is_the_first_ones(name, form, monkeypatch):
    f, good, bad = CASES[name]
    made = FORMS[form](f)
    check(lambda: vmap(made), (X, good), (X, bad), monkeypatch)
    ones = zip(X, bad, strict=True)
    row = next(row for row in ones if isinstance(outcome(f, *row), type))
    check(lambda: lambda x, t: made(x, t), (X[0], good[0]), row, monkeypatch)
    if form in ("its result", "of no need"):  # numbers that are one for all examples
        check(lambda: vmap(made, (0, None)), (X, good[0]), (X, row[1]), monkeypatch)


@pytest.mark.parametrize("fails", [3, -1])
@pytest.mark.parametrize("transform", [lambda f: f, jit])
def test_class_that_does_not_exist_is_an_error_along_a_tangent(transform, fails):
    made = transform(lambda x, t: jvp(lambda x: F.one_hot(t + 0 * x.long(), 3) * x, (x,), (x,)))
    for _ in range(3):
        made(X[0].expand(3, 3), PLACES[0])
    with pytest.raises(RuntimeError, match="Class values must be"):
        made(X[0].expand(3, 3), torch.tensor([0, 1, fails]))


@pytest.mark.parametrize("form", ["its result", "of no need"])
@pytest.mark.parametrize("name", DRAWN)
def test_error_of_a_draw_is_one_in_each_call(name, form, monkeypatch):
    f, good, bad = DRAWN[name]
    monkeypatch.setattr(forall.config, "patience", 0)
    made = vmap(FORMS[form](f), randomness="different")
    wanted = outcome(made, X, bad)
    assert isinstance(wanted, type)
    for call in (made, jit(made)):
        for _ in range(5):
            call(X, good)
        assert outcome(call, X, bad) is wanted


# --- torch's own samples -------------------------------------------------------------------------

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
_MOST = 1000  # entries of an operand that is tried


class _Calls(TorchDispatchMode):
    """Notes what operators are called with, some times for each combination of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = pytree.get_leaves((args, kwargs))
        key = func, tuple(x.dtype for x in leaves if isinstance(x, torch.Tensor))
        known = self.found.setdefault(key, [])
        if len(known) < 3:
            known.append(pytree.map_tensors(_copied, (args, kwargs)))
        return func(*args, **kwargs)


def _copied(t):
    return t.detach().clone() if t.layout is torch.strided else t


def _others(t):
    """Tensors like this one, of degenerate numbers."""
    if t.dtype is torch.bool:
        numbers = [0, 1]
    elif t.is_floating_point() or t.is_complex():
        numbers = [0.0, -1.0, 2.0, torch.nan, torch.inf, 1e4]
    else:
        info = torch.iinfo(t.dtype)
        numbers = [n for n in (0, -1, 3, 100_000, -1000) if info.min <= n <= info.max]
    return [torch.full_like(t, n) for n in numbers]


def tried(op, dtypes=DTYPES, samples=40):
    """Calls of operators that one of torch's functions makes, each with the bad numbers it knows.

    Yields the operator, the arguments with which it is fine, and those with which it is not.
    """
    seen = _Calls()
    for dtype in dtypes:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        for number, sample in enumerate(op.sample_inputs(HERE.type, dtype)):
            if number == samples:
                break
            try:
                with seen:
                    op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # noqa: S112 - of a sample that is not for this machine
                continue
    for (func, _), calls in seen.found.items():
        if func in _ASIDE or func.namespace == "profiler":
            continue
        for args, kwargs in calls:
            leaves, spec = pytree.flatten((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            if any(t.layout is not torch.strided or t.numel() > _MOST for t in tensors):
                continue
            if isinstance(_called(func, leaves, spec), type):
                continue
            bad = []
            for place, t in enumerate(leaves):
                if isinstance(t, torch.Tensor) and t.numel():
                    for other in _others(t):
                        given = [*leaves[:place], other, *leaves[place + 1 :]]
                        error = _called(func, given, spec)
                        if isinstance(error, type) and error is not NotImplementedError:
                            bad.append((given, error))
            if bad:
                yield func, leaves, spec, bad


def _called(func, leaves, spec):
    args, kwargs = pytree.unflatten([_copied(x) if _is_tensor(x) else x for x in leaves], spec)
    return outcome(lambda: func(*args, **kwargs))


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


_ASIDE = {  # these tell Python a number, or take memory as it is
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.allclose.default,
}


def wrong_in(op, **how):
    """What is wrong with the errors of operators that one of torch's functions makes."""
    wrong = []
    for func, leaves, spec, bad in tried(op, **how):

        def of_no_need(*tensors, func=func, leaves=leaves, spec=spec):
            given = iter(tensors)
            filled = [next(given).clone() if _is_tensor(x) else x for x in leaves]
            args, kwargs = pytree.unflatten(filled, spec)
            func(*args, **kwargs)
            return tensors[0] + 0

        recorded = jit(of_no_need)
        good = [x for x in leaves if _is_tensor(x)]
        for _ in range(3):
            recorded(*good)
        for given, error in bad:
            tensors = [x for x in given if _is_tensor(x)]
            args, kwargs = pytree.unflatten(given, spec)
            told = may_raise(
                func,
                args,
                kwargs,
                lambda a: [x.dtype for x in pytree.get_leaves(a) if _is_tensor(x)],
            )
            found = outcome(recorded, *tensors)
            if not told and not torch._C._dispatch_has_kernel_for_dispatch_key(
                func.name(), "CompositeImplicitAutograd"
            ):
                wrong.append(f"{op.name}: {func} raises {error.__name__} by its numbers")
            if found is not error:
                wrong.append(f"{op.name}: {func} raises {error.__name__}, recorded {found}")
    return sorted(set(wrong))


@pytest.mark.parametrize("op", random.Random(0).sample(op_db, 24), ids=lambda op: op.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_operators_of_torchs_samples_raise_once_recorded(op):
    if op.name in _CRASHES:
        pytest.skip("its kernel ends the process where its numbers are wrong")
    assert wrong_in(op, dtypes=DTYPES[:2], samples=6) == []


_CRASHES = {"linalg.ldl_solve"}


def main():
    """Try them all, each in a process of its own."""
    warnings.simplefilter("ignore")
    wrong = 0
    for op in op_db:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(120)
            found = outcome(wrong_in, op)
            found = [f"{op.formatted_name}: {found}"] if isinstance(found, type) else found
            print(*found, sep="\n", end="\n" * bool(found), flush=True)
            os._exit(len(found) > 0)
        status = os.waitpid(child, 0)[1]
        wrong += status != 0
        if os.WIFSIGNALED(status):
            print(f"{op.formatted_name}: ended by signal {os.WTERMSIG(status)}")
    print(f"{wrong} of {len(op_db)} with something wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
