"""Examples that part: values, derivatives and writes are the loop's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forall import grad, jvp, vmap
from forall._core.levels import stack
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.mutation.view_copies import view_copies
from oracle import loop
from unit.vmap.by_hand import check, choose, repeat

D = torch.float64
XS = torch.tensor(
    [[0.3, -1.2, 0.7], [1.5, 0.4, -0.2], [-0.6, 0.9, 2.0], [0.8, 0.8, -0.8], [-1.0, -0.3, 0.1]],
    dtype=D,
)
P = torch.tensor([0.5, -0.7, 1.1], dtype=D)


# --- values and derivatives ----------------------------------------------------------------------


def before_in_and_after(x: Tensor) -> Tensor:
    h = (x * P).tanh()
    y = choose(x[0] > 0, lambda: h * x.exp(), lambda: h.cos() + x[1])
    z = choose(y.sum() > 0, lambda: (y * h).sum(), lambda: (x / (1 + y * y)).sum())
    return z * y.prod()


def three_deep(x: Tensor) -> Tensor:
    h, t = x * x, x[2] > 0

    def yes() -> Tensor:
        k = h.sin()
        deeper = lambda: choose(t, lambda: (k * h).sum(), lambda: (x * k).prod())  # noqa: E731
        return choose(x[1] > 0, deeper, lambda: k.sum() * h[0])

    no = lambda: choose(x[2] > 0.5, lambda: h.exp().sum(), lambda: x.sum() ** 3)  # noqa: E731
    return choose(x[0] > 0, yes, no) * h.mean()


def one_after_another(x: Tensor) -> Tensor:
    h = x.cos()
    n, s = repeat(
        lambda n, s: s.sum() < 6,
        lambda n, s: (n + 1, s + h * h + x.sin().abs() * n),
        torch.zeros((), dtype=D),
        x * x,
    )
    return (s * h).sum() * (1 + n)


def never_computed(x: Tensor) -> Tensor:
    """Derivatives that are inf or nan for the examples of the other side."""
    s, y = x.sum(), x - XS[1]
    a = choose(s > 0.5, lambda: s.sqrt() + s.log() + 1 / s + s**0.5, lambda: (x**3).sum())
    return a * choose((y == 0).all(), lambda: (x * x).sum(), lambda: y.norm() * x.sum())


def lists_of_both(x: Tensor) -> Tensor:
    h = x.sin()

    def yes() -> tuple:
        return torch.cat([h[:1], x.cos(), P]), torch.stack([h, x])

    def no() -> tuple:
        return torch.cat([x[1:2] * h[:1], h, h]), torch.stack([x, h * h])

    a, b = choose(x[0] > 0, yes, no)
    return (a[:3] * b[1]).sum() * a.sum() + (b[0] * h).sum()


def several_results(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(torch.outer(x, x) + torch.diag(P.abs()))
    a, b, c = x.exp().unbind()
    y = choose(x[0] > 0, lambda: values.prod() * a, lambda: vectors[0, 1] ** 2 * b)
    return y + choose(x[1] > 0, lambda: a * c, lambda: b * values[2])


def complex_numbers(x: Tensor) -> Tensor:
    z = torch.complex(x, x.sin())
    yes = lambda: (z * z.conj()).real.sum() + (z * z).imag.sum()  # noqa: E731
    return choose(x[0] > 0, yes, lambda: z.abs().sum()) + z.angle().sum()


def places(x: Tensor) -> Tensor:
    h, i = x.exp(), (x > 0.2).long()

    def yes() -> Tensor:
        k = h.clone()
        k[i[0]] = x[1]
        k.index_put_((i[1],), x[2] * x[0], accumulate=True)
        return k.prod() + h[i[2]]

    def no() -> Tensor:
        k = h.scatter(0, i[:1], x[1:2])
        return (k * k).sum() + h.scatter_add(0, i, x).prod() + torch.where(i > 0, h, x).prod()

    return choose(x[0] > 0, yes, no) * h.sum()


def without_history(x: Tensor) -> Tensor:
    h = x.sin()

    def yes() -> Tensor:
        with torch.no_grad():
            k = h.detach() * 2
        return (k * h).sum()

    return choose(x[0] > 0, yes, lambda: (h.detach() * x).sum() + h.sum() ** 2)


def derivative_in_one_side(x: Tensor) -> Tensor:
    h = x.exp()

    def inner(y: Tensor) -> Tensor:
        z = y * h
        return choose(z.sum() > 1.5, lambda: (z * h * z).sum(), lambda: (y**3 * x).sum())

    yes = lambda: (grad(inner)(x) * x).sum()  # noqa: E731
    return choose(x[1] > 0, yes, lambda: jvp(inner, (x,), (h,))[1])


def run_again(x: Tensor) -> Tensor:
    h = x.sin()

    def body(h: Tensor) -> Tensor:
        return choose(h.sum() > 0.5, lambda: (h.exp() * x).sum(), lambda: (h * h).sum())

    return choose(
        x[0] > 0,
        lambda: checkpoint(body, h, use_reentrant=False),  # pyright: ignore[reportArgumentType]
        lambda: (h * x).sum() ** 2,
    )


def losses(x: Tensor) -> Tensor:
    s = x * 2
    yes = lambda: (F.softmax(s, 0) * x).sum() + s.cumsum(0).cumprod(0).sum()  # noqa: E731
    return choose(x[0] > 0, yes, lambda: F.cross_entropy(s, torch.tensor(1)) + F.huber_loss(s, x))


FUNCTIONS = [
    before_in_and_after, three_deep, one_after_another, never_computed, lists_of_both,
    several_results, complex_numbers, places, without_history, derivative_in_one_side, run_again,
    losses,
]  # fmt: skip


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_derivative(f):
    check(f, XS)


# --- nested levels -------------------------------------------------------------------------------

CS = torch.tensor([[1.0, 2.0, 0.5], [-1.0, 0.3, 0.2], [0.1, -0.4, 3.0]], dtype=D)


def rows(f: Any, x: Tensor) -> Tensor:
    """f of each row of CS; in a loop where x is of the loop."""
    return vmap(f)(CS) if type(x) is not Tensor else loop(f)(CS)


def both_levels(x: Tensor) -> Tensor:
    def row(r: Tensor) -> Tensor:
        h = r.sin() * x
        z = h * h
        yes = lambda: choose(r[0] > 0, lambda: (h * r).sum(), lambda: (z * h).sum())  # noqa: E731
        no = lambda: choose(r[1] > 0, lambda: (h.exp() * x).prod(), lambda: z.sum())  # noqa: E731
        return choose(x[0] > 0, yes, no) * h.sum() + z[0]

    return rows(row, x).prod() * x.sum()


def within_a_part(x: Tensor) -> Tensor:
    q = x.cos()

    def row(r: Tensor) -> Tensor:
        h = r.sin() * q
        yes = lambda: choose(x[1] > 0, lambda: (h * r).sum(), lambda: (h * h).sum())  # noqa: E731
        return choose(r[0] > 0, yes, lambda: h.sum() * q.prod())

    return choose(
        x[0] > 0, lambda: rows(row, x).prod(), lambda: rows(lambda r: (r * q).sum(), x).sum() ** 2
    )


def writes_at_both_levels(x: Tensor) -> Tensor:
    def row(r: Tensor) -> Tensor:
        h = (r.sin() * x).clone()
        v = h[1:]

        def yes() -> Tensor:
            return choose(
                r[0] > 0, lambda: v.mul_(r[0]).sum() + h.sum(), lambda: h.add_(x).sum() * v.prod()
            )

        def no() -> Tensor:
            k = h[:2]
            return choose(r[1] > 0, lambda: k.mul_(r[0]).sum() + h.sum(), lambda: k.sum())

        return choose(x[0] > 0, yes, no) * h.prod() + v.sum()

    return rows(row, x).prod() * x.sum()


@pytest.mark.parametrize("f", [both_levels, within_a_part, writes_at_both_levels])
def test_nested_levels(f):
    check(f, XS)


# --- captured ------------------------------------------------------------------------------------


def captured(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = (w @ x + b).tanh()
    z = choose(x[0] > 0, lambda: w @ h, lambda: b * h + w[0])
    y = choose(x[1] > 0, lambda: (b * z).sum(), lambda: (x * z).sum())
    return torch.einsum("ij,j->i", w, z).sum() * y


def test_captured_tensors_that_require_grad():
    def run(mapped: Any) -> list:
        w, b = CS.clone().requires_grad_(), P.clone().requires_grad_()
        ys = mapped(lambda x: captured(x, w, b * 1.5))(XS)
        first = torch.autograd.grad(ys.cos().sum(), (w, b), create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), (w, b))

        def each(x: Tensor) -> tuple:
            return torch.autograd.grad(captured(x, w, b), (w, b))

        mapped(lambda x: captured(x, w, b))(XS).sum().backward()
        return [ys, *first, *second, *mapped(each)(XS), w.grad, b.grad]

    torch.testing.assert_close(run(vmap), run(loop))


def test_a_gradient_taken_inside_is_one_of_all_that_run():
    def f(x: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_()
        z = y * 1
        z.retain_grad()
        out = choose(x[0] > 0, lambda: (z * z).sum(), lambda: y.sum())
        (g,) = torch.autograd.grad(
            out, z, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        out.backward()
        kept = torch.zeros_like(y) if z.grad is None else z.grad
        return g.exp() * choose(x[1] > 0, lambda: g.cos(), lambda: g + 1) + kept.exp()

    torch.testing.assert_close(vmap(f)(XS), loop(f)(XS))


# --- writes --------------------------------------------------------------------------------------


def through_views(x: Tensor) -> Tensor:
    h = x.exp().clone()
    v = h[1:]

    def yes() -> Tensor:
        k = h[:2]
        v.mul_(x[0])
        r = k.sum()
        more = lambda: h.add_(1).sum() + (k * k).sum() * v[0]  # noqa: E731
        return r * choose(x[1] > 0, more, lambda: k.mul_(2).sum()) + k.sum() * v.prod()

    return choose(x[0] > 0, yes, lambda: h.mul_(x).sum()) * (v * h[:2]).sum()


def into_zeros(x: Tensor) -> Tensor:
    h = torch.zeros(3, dtype=D)

    def yes() -> Tensor:
        h[1:] = x[:2]
        h.add_(1)
        return x.sum()

    return choose(x[0] > 0, yes, lambda: x.prod()) + (h * x * x).sum()


def by_any_call(x: Tensor) -> Tensor:
    h = x.detach().exp()

    def yes() -> Tensor:
        torch.mul(h, h, out=h)
        torch._foreach_add_([h], 1.0)
        return h.sum()

    def no() -> Tensor:
        F.threshold(h, 0.5, 0.1, inplace=True)
        torch.nn.init.constant_(h[:1], 0.5)
        h[1:].detach().mul_(3)
        return h.prod()

    return choose(x[0] > 0, yes, no) * (h * x * x).sum()


def behind_autograd(x: Tensor) -> Tensor:
    h = x.exp().clone()

    def yes() -> Tensor:
        with torch.no_grad():
            h.mul_(2)
        h[:2].detach().add_(1)
        return (h * x).sum()

    return choose(x[0] > 0, yes, lambda: h.sum()) * h.prod()


WRITES = [through_views, into_zeros, by_any_call]


@pytest.mark.parametrize("f", WRITES, ids=lambda f: f.__name__)
def test_writes(f):
    check(f, XS)


def test_writes_behind_autograds_back():
    torch.testing.assert_close(vmap(behind_autograd)(XS), loop(behind_autograd)(XS))
    torch.testing.assert_close(vmap(grad(behind_autograd))(XS), vmap_by_grad(behind_autograd))


def vmap_by_grad(f: Any) -> Tensor:
    def one(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return loop(one)(XS)


def test_writes_into_an_argument():
    def f(x: Tensor) -> Tensor:
        y = choose(x[0] > 0, lambda: x.mul_(2).sum(), lambda: x[1:].add_(1).clone().prod())
        return y * x.sum()

    ours, theirs = XS.clone(), XS.clone()
    torch.testing.assert_close(vmap(f)(ours), loop(f)(theirs))
    torch.testing.assert_close(ours, theirs)


def test_other_memory_for_some_examples_is_refused():
    def f(x: Tensor) -> Tensor:
        h = x.exp()

        def yes() -> Tensor:
            h.data = x.cos()
            return h.sum()

        return choose(x[0] > 0, yes, lambda: h.sum())

    with pytest.raises(NotImplementedError, match="copy_"):
        vmap(f)(XS)


# --- afterwards ----------------------------------------------------------------------------------


def test_nothing_is_kept_alive():
    kept: list = []

    def f(x: Tensor) -> Tensor:
        h, s = x.sin(), x
        k = h.clone()
        for n in range(100):
            k.mul_(0.99)
            s = choose(s[0] > 0, lambda s=s: s - h * 0.1, lambda s=s: s + k[:1] * 0.2)
            if n % 10 == 0:
                kept.append(weakref.ref(s))
        assert sum(r() is not None for r in kept) < 3
        return s.sum()

    gc.collect()
    gc.disable()
    try:
        vmap(f)(XS)
        assert not any(r() is not None for r in kept)
    finally:
        gc.enable()


def test_an_error_in_one_side_leaves_everything_as_it_was():
    def f(x: Tensor) -> Tensor:
        h = x.sin()

        def fails() -> Tensor:
            h.mul_(2)
            raise ValueError("here")

        def inner() -> Tensor:
            return choose(x[1] > 0, fails, lambda: h.sum())

        try:
            choose(x[0] > 0, inner, lambda: h.sum())
        except ValueError:
            assert stack.diverged == 0
            assert type(h) is not BatchedTensor or h.narrowed is None
            raise
        return h.sum()

    with pytest.raises(ValueError, match="here"):
        vmap(f)(XS)
    assert stack.diverged == 0
    assert stack.top is None
    assert not [r for r in view_copies.found or [] if r() is not None]
