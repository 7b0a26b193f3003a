"""`Chunks`: as much at once as a budget of memory allows, with the same numbers."""

import contextlib
import gc
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

import forall
from forall import (
    Chunks,
    grad,
    hessian,
    hessian_diag,
    jacfwd,
    jacobian,
    jacrev,
    laplacian,
    per_example_grad_norm,
    vmap,
)
from forall._api.memory_budget import MemoryBudgetMode

D = torch.float64
XS = torch.linspace(-1, 1, 300, dtype=D).reshape(100, 3)
W = torch.linspace(0, 1, 3000, dtype=D).reshape(1000, 3)


def wide(x):  # (3,) -> (): 8 kB per example, several times
    return (W @ x).sin().exp().sum()


class Bar:
    """In the place of tqdm's."""

    seen: list[tuple]

    def __init__(self, total, unit):
        Bar.seen = [(total, unit)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        Bar.seen.append(("closed",))

    def update(self, n):
        Bar.seen.append((n,))


@pytest.fixture
def bar(monkeypatch):
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    return Bar


@pytest.mark.parametrize("transform", [lambda f, c: vmap(f, chunk_size=c), None])
def test_examples(transform, bar):
    transform = transform or (lambda f, c: vmap(grad(f), chunk_size=c))
    budget = 200_000  # 100 examples take 800 kB a tensor
    found = transform(wide, Chunks(memory_budget=budget, progress=True))(XS)
    torch.testing.assert_close(found, transform(wide, None)(XS))
    sizes = [n for (n,) in bar.seen[1:-1]]
    assert bar.seen[0] == (100, "example")
    assert bar.seen[-1] == ("closed",)
    assert sum(sizes) == 100
    assert 1 < max(sizes) <= 25
    assert transform(wide, Chunks(memory_budget=2**30, progress=True))(XS).shape == found.shape
    assert bar.seen[1:-1] == [(100,)]


def test_what_is_freed_is_not_counted():
    def f(x):
        for _ in range(50):
            x = x + 1
        return x

    with pytest.raises(MemoryError):
        vmap(f, chunk_size=Chunks(memory_budget=2 * 24 - 1))(XS)
    for budget in (4 * 24, 4 * 2400):
        found = vmap(f, chunk_size=Chunks(memory_budget=budget))(XS)
        torch.testing.assert_close(found, XS + 50)


def test_views_of_what_is_given_are_not_counted():
    xs = torch.ones(4, 1000)
    found = vmap(lambda x: x.view(10, 100)[0, :3] * 2, chunk_size=Chunks(memory_budget=24))(xs)
    torch.testing.assert_close(found, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("verb", [jacrev, jacfwd, hessian, jacobian])
def test_a_jacobian_that_does_not_fit(verb):
    f = lambda x: (x.exp() * XS[:, 0]).cos() * x.roll(1)  # noqa: E731
    x = XS.flatten()[:100]
    every = verb(f)(x)
    fits = Chunks(memory_budget=every.numel() * every.element_size() // 2)
    torch.testing.assert_close(verb(f, chunk_size=fits)(x), every)


def rolled(x):  # (*I) -> (2,): the Hessian is sparse, and its columns are not
    y = x.flatten().roll(1)
    return torch.stack([(y * x.flatten() ** 2).sum(), y.exp().sum()])


@pytest.mark.parametrize("verb", [laplacian, hessian_diag])
@pytest.mark.parametrize("shape", [(100,), (10, 10)])
def test_parts_of_a_hessian_that_do_not_fit(verb, shape, bar):
    x = XS.flatten()[:100].reshape(shape)
    column = 2 * 100 * x.element_size()
    expected = verb(rolled)(x)
    fits = Chunks(memory_budget=200 * column, progress=True)
    torch.testing.assert_close(verb(rolled, chunk_size=fits)(x), expected)
    sizes = [n for (n,) in bar.seen[1:-1]]
    assert bar.seen[0] == (100, "column")
    assert sum(sizes) == 100
    assert 1 < max(sizes) < 100
    for chunk in ("auto", 7, Chunks(7)):
        torch.testing.assert_close(verb(rolled, chunk_size=chunk)(x), expected)
    torch.testing.assert_close(vmap(verb(rolled, chunk_size=fits))(x[None]), expected[None])
    with pytest.raises(MemoryError, match="may take 100 B"):
        verb(rolled, chunk_size=Chunks(memory_budget=100))(x)


@pytest.mark.parametrize("verb", [laplacian, hessian_diag])
def test_columns_that_are_done_are_dropped(verb):
    class Most(MemoryBudgetMode):
        most = 0

        def _check_limit(self):
            with contextlib.suppress(MemoryError):
                super()._check_limit()
            self.most = max(self.most, self._bytes)

    x = XS.flatten()[:100]
    gc.disable()
    try:
        with Most(0, "") as most:
            verb(rolled, chunk_size=1)(x)
    finally:
        gc.enable()
    whole = 2 * x.numel() ** 2 * x.element_size()
    assert most.most < whole / 2


def counted(x, count):
    count.add_(1)
    return x.sin()


def normed(x, mean):
    return F.batch_norm(x, mean, torch.ones(3, dtype=D), None, None, True)


@pytest.mark.parametrize("verb", [jacfwd, hessian])
@pytest.mark.parametrize("f", [counted, normed])
def test_what_a_chunk_wrote_that_did_not_fit_is_undone(verb, f, bar):
    x, once, ours = XS[:5].clone(), torch.zeros(3, dtype=D), torch.zeros(3, dtype=D)
    f(x, once)
    fits = Chunks(memory_budget=60_000, progress=True)
    verb(lambda x: (f(x, ours).sin().sum() * W[:, 0]).exp().sum(), chunk_size=fits)(x)
    assert len(bar.seen) > 3
    torch.testing.assert_close(ours, once)


@pytest.mark.parametrize("divergence", ["split", "error"])
def test_what_examples_wrote_that_did_not_fit_is_undone(divergence, bar):
    def f(x, total):
        total.add_(1)
        count.zero_().add_(3)
        return wide(x)

    totals, count = torch.zeros(100, dtype=D), torch.zeros((), dtype=D)
    fits = Chunks(memory_budget=200_000, progress=True)
    vmap(f, chunk_size=fits, divergence=divergence)(XS, totals)
    assert len(bar.seen) > 3
    torch.testing.assert_close(totals, torch.ones(100, dtype=D))
    assert count == 3


def test_norms():
    loss = lambda w, x: (w * x).exp().sum()  # noqa: E731
    found = per_example_grad_norm(loss, chunk_size=Chunks(memory_budget=500))(XS[0].cos(), XS)
    torch.testing.assert_close(found, per_example_grad_norm(loss)(XS[0].cos(), XS))


def test_inside_another_transform(bar):
    fits = Chunks(memory_budget=400_000, progress=True)
    inner = lambda x: jacrev(lambda x: (W @ x).sin()[:50], chunk_size=fits)(x)  # noqa: E731
    expected = torch.stack([inner(x) for x in XS[:10]])
    torch.testing.assert_close(vmap(inner)(XS[:10]), expected)
    assert bar.seen[0] == (50, "row")
    assert len(bar.seen) > 3
    f = lambda x: vmap(wide, chunk_size=fits)(x[None] * XS[:20, :1]).sum()  # noqa: E731
    for outer in (grad(f), jacfwd(f)):
        torch.testing.assert_close(
            outer(XS[3]), grad(lambda x: vmap(wide)(x * XS[:20, :1]).sum())(XS[3])
        )


def test_one_example_that_does_not_fit(bar):
    before = modes()
    call = vmap(wide, chunk_size=Chunks(memory_budget=100, progress=True))
    with pytest.raises(MemoryError) as caught:
        call(XS)
    assert "Chunks(size='auto', memory_budget=100, progress=True)" in str(caught.value)
    assert "may take 100 B" in str(caught.value)
    assert modes() == before
    assert bar.seen[-1] == ("closed",)


def test_a_bar_for_chunks_of_a_size(bar):
    vmap(wide, chunk_size=Chunks(30, progress=True))(XS)
    assert bar.seen == [(100, "example"), (30,), (30,), (30,), (10,), ("closed",)]
    torch.testing.assert_close(vmap(wide, chunk_size=Chunks(30))(XS), vmap(wide)(XS))


def test_a_bar_of_a_jacobian_by_columns_counts_columns(bar):
    x = torch.linspace(0, 1, 50)
    found = forall.jacfwd(torch.sin, chunk_size=Chunks(30, progress=True))(x)
    assert bar.seen == [(50, "column"), (30,), (20,), ("closed",)]
    torch.testing.assert_close(found, x.cos().diag())


def test_the_bar_counts_in_the_users_unit(bar):
    vmap(wide, chunk_size=Chunks(60, progress=True, unit="sample"))(XS)
    assert bar.seen[0] == (100, "sample")


def test_no_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"forall\[progress\]"):
        vmap(wide, chunk_size=Chunks(3, progress=True))(XS)


@pytest.mark.parametrize(
    "given", [{"size": 0}, {"size": "all"}, {"memory_budget": 0}, {"memory_budget": 1.5}]
)
def test_unfit(given):
    with pytest.raises(ValueError, match="Pass an int above 0"):
        Chunks(**given)


def test_a_size_and_a_budget():
    with pytest.raises(ValueError, match="one of the two"):
        Chunks(3, memory_budget=3)


def test_recorded():
    f = vmap(wide, chunk_size=Chunks(memory_budget=200_000))
    g = forall.jit(f)
    for _ in range(3):
        torch.testing.assert_close(g(XS), f(XS))
