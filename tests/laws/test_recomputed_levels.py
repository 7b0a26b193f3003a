"""What runs once more in a backward pass enters its levels again: beside whatever runs then."""

import operator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import forall
from forall import grad, jacfwd, jit, jvp, vmap
from forall._api.execution.transform_decorator import replay_transform

D = torch.float64
X = torch.linspace(0.1, 1, 3, dtype=D)
W = torch.linspace(1, 2, 3, dtype=D)

FUNCTIONS = {
    "vmap": vmap(lambda x, w: x.sin() * x * w),
    "vmap of vmap": lambda x, w: vmap(vmap(lambda a, b: (a * b).sin(), (None, 0)), (0, None))(x, w),
    "vmap of grad": vmap(grad(lambda x, w: x.sin() * x * w)),
    "grad": grad(lambda x, w: (x.sin() * x * w).prod()),
    "jacfwd": lambda x, w: jacfwd(lambda x: x.sin() * x.sum() * w)(x).sum(0),
    "jvp": lambda x, w: jvp(lambda x: x.sin() * x.sum() * w, (x,), (w,))[1],
    "checkpoint in vmap": vmap(
        lambda x, w: checkpoint(lambda a: vmap(torch.sin)(a * W).sum() * w, x, use_reentrant=False)
    ),
}
WAYS = {
    "checkpoint": lambda f: lambda x, w: checkpoint(f, x, w, use_reentrant=False),
    "jit": jit,
    "replayed": lambda f: replay_transform(f)(operator.call),
}


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:.*is kept, not computed again:forall.PerformanceWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_many_pull_backs_at_once(name, way, create_graph, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    f = FUNCTIONS[name]
    again, x, w = WAYS[way](f), X.clone().requires_grad_(), W.clone().requires_grad_()

    def rows(y):
        def pulled(v):
            return torch.autograd.grad(y, (x, w), v, retain_graph=True, create_graph=create_graph)

        cotangents = torch.eye(y.numel(), dtype=D).reshape(-1, *y.shape)
        single = [pulled(v) for v in cotangents]
        return vmap(pulled)(cotangents), vmap(vmap(pulled))(torch.stack([cotangents] * 2)), single

    for _ in range(5):
        found, twice, single = rows(again(x, w))
        wanted = [torch.stack(g) for g in zip(*rows(f(x, w))[2], strict=True)]
        torch.testing.assert_close([*found], wanted)
        torch.testing.assert_close([torch.stack(g) for g in zip(*single, strict=True)], wanted)
        torch.testing.assert_close([*twice], [torch.stack([g, g]) for g in wanted])


def test_order_is_kept_however_deep():
    from forall._core.levels import EntryPoint

    first, since, later = (EntryPoint(None, None) for _ in range(3))
    again = [EntryPoint(None, since) for _ in range(3)]
    deeper = [EntryPoint(None, again[1]) for _ in range(3)]
    deepest = EntryPoint(None, deeper[2])
    order = [first, again[0], *deeper[:2], deepest, deeper[2], *again[1:], since, later]
    assert order == sorted(order, key=lambda entry: entry.number)
    assert len({entry.number for entry in order}) == len(order)


def test_what_a_checkpoint_keeps_it_says():
    calls = []

    def f(x):
        calls.append(1)
        return (x.sin() * x).sum()

    x = torch.ones(4, 3, dtype=D, requires_grad=True)
    with pytest.warns(forall.PerformanceWarning, match="Put the checkpoint inside"):
        y = checkpoint(vmap(f), x, use_reentrant=False)
    assert len(calls) == 1
    wanted = torch.cos(x) * x + torch.sin(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], wanted)
    y = vmap(lambda x: checkpoint(f, x, use_reentrant=False))(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_zeros_without_memory_are_zeros_there_too():
    """Such zeros pass by their own kernel while many cotangents are pulled back: a crash here."""
    from forall._compat.lazy_bits import pass_lazy_zeros
    from forall._core.recompute import bind_original_context

    zeros = torch._efficientzerotensor(3, dtype=D)
    again = bind_original_context(lambda: zeros * X + X)
    with pass_lazy_zeros():
        found = again()
    assert found.equal(X)
