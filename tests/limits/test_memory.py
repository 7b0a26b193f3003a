"""`chunk_size="auto"`: all examples at once, and fewer from where memory does not suffice."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forall import hessian, jacfwd, jacobian, jacrev, per_example_grad_norm, random, vmap

D = torch.float64


class Little(TorchDispatchMode):
    """Memory for so many rows in a result of exp, and no more."""

    def __init__(self, rows, error=None, func=torch.ops.aten.exp.default):
        super().__init__()
        self.rows, self.func, self.sizes = rows, func, []
        self.error = error or torch.OutOfMemoryError("out of memory")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.func and args[0].dim() == 2:
            self.sizes.append(len(args[0]))
            if len(args[0]) > self.rows:
                raise self.error
        return func(*args, **(kwargs or {}))


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
]
XS = torch.linspace(-1, 1, 33, dtype=D).reshape(11, 3)


@pytest.mark.parametrize("error", ERRORS)
def test_a_chunk_that_does_not_fit_is_halved_and_those_before_it_are_kept(error):
    f = lambda x: (x * 2).exp().sum()  # noqa: E731
    with Little(3, error) as memory:
        found = vmap(f, chunk_size="auto")(XS)
    torch.testing.assert_close(found, vmap(f)(XS), rtol=0, atol=0)
    done = [n for n in memory.sizes if n <= 3]
    assert sum(done) == 11
    assert memory.sizes[0] == 11


def test_all_at_once_where_it_fits():
    with Little(11) as memory:
        vmap(torch.exp, chunk_size="auto")(XS)
    assert memory.sizes == [11]


def test_what_a_failed_run_did_is_undone():
    seen, total, kept = [], torch.zeros(3, dtype=D), XS.clone()

    def f(x):
        seen.append(1)
        total.add_(x)
        x.mul_(2)
        return x.exp()

    with Little(3) as memory:
        found = vmap(f, chunk_size="auto")(kept)
    torch.testing.assert_close(found, (XS * 2).exp())
    torch.testing.assert_close(kept, XS * 2)
    torch.testing.assert_close(total, XS.sum(0))
    assert len(seen) == len([n for n in memory.sizes if n <= 3])


@pytest.mark.parametrize("flag", ["different", "same", random.key(0)])
def test_draws(flag):
    f = lambda x: (x + torch.rand(3, dtype=D)).exp()  # noqa: E731
    torch.manual_seed(0)
    with Little(2):
        found = vmap(f, randomness=flag, chunk_size="auto")(XS)
    if flag == "same" or isinstance(flag, torch.Tensor):
        torch.manual_seed(0)
        torch.testing.assert_close(found, vmap(f, randomness=flag, chunk_size=2)(XS))
    assert found.unique(dim=0).shape == XS.shape


def test_examples_that_part():
    def f(x):
        n = 0
        while x[0] < 0.5 and n < 3:
            x = x + 0.2
            n += 1
        return x.exp() if x[1] > 0 else F.relu(x.exp() - n)

    expected = torch.stack([f(x) for x in XS])
    for _ in range(2):
        with Little(2):
            torch.testing.assert_close(vmap(f, chunk_size="auto")(XS), expected)
    with Little(2):
        g = lambda x: x.exp() if x.sum() > 9 else x  # noqa: E731
        found = vmap(g, chunk_size="auto", divergence="error")(XS.abs())
    torch.testing.assert_close(found, XS.abs())


def test_one_example_that_does_not_fit_is_an_error():
    with Little(0), pytest.raises(torch.OutOfMemoryError):
        vmap(torch.exp, chunk_size="auto")(XS)


def test_another_error_is_the_users():
    with Little(3, ValueError("mine")), pytest.raises(ValueError, match="mine"):
        vmap(torch.exp, chunk_size="auto")(XS)


def test_norms_of_gradients():
    loss = lambda w, x: (w * x).exp().sum()  # noqa: E731
    w = XS[0].cos()
    with Little(4):
        found = per_example_grad_norm(loss, chunk_size="auto")(w, XS)
    torch.testing.assert_close(found, per_example_grad_norm(loss)(w, XS))


@pytest.mark.parametrize("verb", [jacrev, jacfwd, hessian, jacobian])
def test_jacobians(verb):
    calls = []

    def f(x):
        calls.append(1)
        return (x * XS[0, 0]).sin() * x.roll(1)

    x = XS.flatten()[:9]
    expected, sizes = verb(f)(x), []
    for func in (torch.ops.aten.mul.Tensor, torch.ops.aten.sin.default):
        with Little(2, func=func) as memory:
            found = verb(f, chunk_size="auto")(x)
        torch.testing.assert_close(found, expected)
        sizes += memory.sizes
    assert max(sizes) > 2
    calls.clear()
    with Little(2, func=torch.ops.aten.mul.Tensor):
        jacrev(f, chunk_size="auto")(x)
    assert len(calls) == 1
