"""Collectives where examples diverge: right before and after, an error where some alone come."""

import pytest
import torch

import forall
from forall import (
    all_gather,
    axis_index,
    axis_size,
    cond,
    fori_loop,
    grad,
    jit,
    pmax,
    ppermute,
    psum,
    scan,
    switch,
    vmap,
    while_loop,
)
from forall._core.errors import AxisError

XS = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)
UP = XS > 0


def before(x):
    total = psum(x, "b")
    if x > 0:
        return x * total
    return total - x * x


def after(x):
    if x > 0:
        y = x * x
    else:
        y = -3 * x
    return psum(y, "b") * x


def between(x):
    a = psum(x, "b")
    y = a * x if x > 0 else x
    z = pmax(y, "b")
    if y > 1:
        z = z + y
    return z * psum(y * z, "b")


def after_a_loop(x):
    while x.abs() > 0.5:
        x = x / 2
    return psum(x, "b") * x


def loop_in_step(x):
    while psum(x * x, "b") > 1e-2:
        x = x / 2
    return x


def by_operators(x):
    total = psum(x, "b")
    return cond(x > 0, lambda: x * total, lambda: total - x * x)


def in_both_ways_of_the_same(x):
    return cond(psum(x, "b") < 0, lambda: psum(x * x, "b") * x, lambda: x)


def by_while_loop(x):
    return while_loop(lambda x: psum(x * x, "b") > 1e-2, lambda x: x / 2, x)


def by_scan(x):
    return scan(lambda c, t: (c + psum(c * t, "b") / 9, c), x, torch.arange(3.0).to(x))[0]


def by_fori_loop(x):
    return fori_loop(0, 3, lambda i, x: x + psum(x * x, "b") / 99, x)


def by_map(x):
    return forall.map(lambda t: psum(x * t, "b") * x, torch.arange(1.0, 3.0).to(x)).sum(0)


def put(condition, yes, no):
    return torch.where(condition, yes, no)


def explicit_between(x):
    y = put(x > 0, x.sum() * x, x)
    z = y.amax()
    z = put(y > 1, z + y, z)
    return z * (y * z).sum()


def explicit_after_a_loop(x):
    for _ in range(10):
        x = put(x.abs() > 0.5, x / 2, x)
    return x.sum() * x


def halved(x):
    while (x * x).sum() > 1e-2:
        x = x / 2
    return x


def scanned(x):
    for t in range(3):
        x = x + (x * t).sum() / 9
    return x


def counted(x):
    for _ in range(3):
        x = x + (x * x).sum() / 99
    return x


PROGRAMS = [
    (before, lambda x: put(x > 0, x * x.sum(), x.sum() - x * x)),
    (after, lambda x: put(x > 0, x * x, -3 * x).sum() * x),
    (between, explicit_between),
    (after_a_loop, explicit_after_a_loop),
    (loop_in_step, halved),
    (by_operators, lambda x: put(x > 0, x * x.sum(), x.sum() - x * x)),
    (in_both_ways_of_the_same, lambda x: (x * x).sum() * x),
    (by_while_loop, halved),
    (by_scan, scanned),
    (by_fori_loop, counted),
    (by_map, lambda x: 3 * x.sum() * x),
]


@pytest.mark.parametrize(("f", "explicit"), PROGRAMS, ids=lambda f: f.__name__)
def test_a_collective_that_all_come_to(f, explicit):
    torch.testing.assert_close(vmap(f, axis_name="b")(XS), explicit(XS))
    want = grad(lambda x: explicit(x).sum())(XS)
    torch.testing.assert_close(vmap(grad(f), axis_name="b")(XS), want)
    torch.testing.assert_close(grad(lambda x: vmap(f, axis_name="b")(x).sum())(XS), want)
    weights = torch.arange(1.0, 5).to(XS)
    torch.testing.assert_close(
        grad(lambda x: weights @ vmap(f, axis_name="b")(x))(XS),
        grad(lambda x: weights @ explicit(x))(XS),
    )


@pytest.mark.parametrize("f", [by_scan, by_map])
def test_under_jit(f):
    fast = jit(vmap(f, axis_name="b"))
    for x in (XS, XS / 2, XS.abs(), XS):
        torch.testing.assert_close(fast(x), vmap(f, axis_name="b")(x))


def python_branch(x):
    if x > 0:
        return psum(x, "b")
    return x


def python_loop(x):
    while x.abs() > 0.1:
        x = x / 2 + 0 * psum(x, "b")
    return x


def early_return(x):
    if x < 0:
        return x
    return all_gather(x, "b").sum()


def operator_branch(x):
    return cond(x > 0, lambda: ppermute(x, "b", [(0, 1)]), lambda: x)


def switch_branch(x):
    return switch((x > 0).long(), [lambda: x, lambda: psum(x, "b")])


def operator_loop(x):
    return while_loop(lambda x: x.abs() > 0.1, lambda x: x / 2 + 0 * psum(x, "b"), x)


def pass_in_a_branch(x):
    x = x.clone().requires_grad_()
    total = psum(x * x, "b")
    if x > 0:
        return torch.autograd.grad(total * x, x)[0]
    return x


SOME = [
    python_branch,
    python_loop,
    early_return,
    operator_branch,
    switch_branch,
    operator_loop,
    pass_in_a_branch,
]


@pytest.mark.parametrize(
    ("f", "transform"),
    [(f, t) for f in SOME for t in (lambda f: f, grad) if (f, t) != (pass_in_a_branch, grad)],
    ids=lambda f: f.__name__,
)
def test_a_collective_that_some_come_to_is_an_error(f, transform):
    calls = []

    def counted(x):
        calls.append(1)
        return transform(f)(x)

    for _ in range(3):
        with pytest.raises(AxisError, match=r"\d of 4 examples of axis 'b' come here") as caught:
            vmap(counted, axis_name="b")(XS)
        assert "\n    diverged   " in str(caught.value)
        assert f"{__file__}:" in str(caught.value)
    # At once: the first run of each call ends where they diverge, the second is the converted one.
    assert len(calls) <= 2 * 3
    torch.testing.assert_close(vmap(before, axis_name="b")(XS), PROGRAMS[0][1](XS))


def test_all_may_come_to_a_branch():
    torch.testing.assert_close(
        vmap(python_branch, axis_name="b")(XS.abs()), torch.full_like(XS, 10)
    )


def test_numbers_and_sizes_are_no_collectives():
    def f(x):
        if x > 0:
            number = axis_index("b")
            number += 10
            return x * number
        return x * axis_size("b")

    assert vmap(f, axis_name="b")(XS).tolist() == [10.0, -8.0, 36.0, -16.0]


def test_a_collective_over_an_axis_further_out_in_a_branch_of_an_inner_one():
    def f(x, y):
        total = psum(x, "out")
        if y > 0:
            return total * y + psum(x * y, "out")
        return y

    ys = torch.tensor([1.0, -1.0, 2.0]).to(XS)
    got = vmap(lambda x: vmap(lambda y: f(x, y))(ys), axis_name="out")(XS)
    want = torch.where(ys > 0, XS.sum() * ys * 2, ys).expand(4, 3)
    torch.testing.assert_close(got, want)


def test_a_python_number_of_each_example():
    def f(x):
        n = int(x.item())
        return psum(n, "b"), psum((n, x), "b")[1], pmax(n, "b")

    total, other, most = vmap(f, axis_name="b")(XS)
    assert total.tolist() == [-2] * 4
    assert other.tolist() == [-2.0] * 4
    assert most.tolist() == [3] * 4


def test_steps_of_each_example():
    def f(x):
        steps = 0
        while x.abs() > 0.5:
            x, steps = x / 2, steps + 1
        return psum(steps, "b")

    assert vmap(f, axis_name="b")(XS).tolist() == [9] * 4


# --- chunks and groups -------------------------------------------------------------------------


def test_chunks_refuse_collectives_and_count_over_the_whole_call():
    for size in (1, 2, 3):
        with pytest.raises(AxisError, match=f"chunk_size={size} runs so many at once"):
            vmap(lambda x: psum(x, "b"), axis_name="b", chunk_size=size)(XS)
        f = vmap(lambda x: (axis_index("b"), x * axis_size("b")), axis_name="b", chunk_size=size)
        numbers, scaled = f(XS)
        assert numbers.tolist() == [0, 1, 2, 3]
        assert torch.equal(scaled, XS * 4)
    for size in (4, 9, "auto"):
        got = vmap(lambda x: psum(x, "b"), axis_name="b", chunk_size=size)(XS)
        assert torch.equal(got, torch.full_like(XS, -2.0))


def test_chunks_of_another_axis():
    f = vmap(vmap(lambda x: psum(x, "in"), axis_name="in"), chunk_size=1)
    assert torch.equal(f(torch.stack([XS, 2 * XS])), torch.tensor([[-2.0] * 4, [-4.0] * 4]).to(XS))
    f = vmap(lambda x: vmap(lambda y: psum(x * y, "out"), chunk_size=2)(XS), axis_name="out")
    torch.testing.assert_close(f(XS), XS.sum() * XS.expand(4, 4))


def without_source(text):
    names = {"psum": psum, "axis_index": axis_index}
    exec(text, names)  # noqa: S102
    return names["f"]


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_groups_refuse_collectives_and_count_over_the_whole_call():
    f = without_source("def f(x):\n  if x > 0:\n    return x\n  return psum(x, 'b')")
    with pytest.raises(AxisError, match="run in groups: they have diverged in code that could"):
        vmap(f, axis_name="b")(XS)
    f = without_source(
        "def f(x):\n  if x > 0:\n    return axis_index('b')\n  return -axis_index('b')"
    )
    assert vmap(f, axis_name="b")(XS).tolist() == [0, -1, 2, -3]


@pytest.mark.parametrize("strategy", ["together", "measured", "loop"])
def test_no_call_with_an_axis_runs_as_the_loop(strategy, monkeypatch):
    monkeypatch.setattr(forall.config, "strategy", strategy)
    for _ in range(10):
        torch.testing.assert_close(vmap(before, axis_name="b")(XS), PROGRAMS[0][1](XS))
        torch.testing.assert_close(vmap(before, axis_name="b")(XS[:1]), XS[:1])
