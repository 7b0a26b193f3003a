"""Where examples diverge a joined tensor is a copy; in the loop it is one of before, by any name.

Whatever way something is written by, it is seen under each name that the loop has for it.
"""

from __future__ import annotations

import operator
import types

import pytest
import torch
from torch.nn import functional as F

from forall import grad, jvp, vmap
from oracle import difference, loop

D = torch.float64
XS = torch.tensor([[3.0, 1.0, 1.0], [1.0, -3.0, 1.5], [1.0, 2.0, 3.0], [-1.0, -2.0, 3.5]], dtype=D)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.mark_dirty(a)
        return a.mul_(3)

    @staticmethod
    def backward(_, g):
        return g * 3


def by_rows(u):
    for row in u:
        row.add_(1)


def without_history(u):
    with torch.no_grad():
        u.mul_(2)


def as_attribute(u):
    held = types.SimpleNamespace(u=u)
    held.u[0] += 1
    held.u.neg_()


# Each writes into its argument, or a part of it.
WRITES = {
    "add_": lambda u: u.add_(1),
    "+=": lambda u: operator.iadd(u, 1),
    "u[0] =": lambda u: operator.setitem(u, 0, 7.0),
    "u[mask] =": lambda u: operator.setitem(u, u > 1, 7.0),
    "masked_fill_": lambda u: u.masked_fill_(u > 1, 0.0),
    "row": lambda u: u[0].add_(10),
    "slice": lambda u: u[1:].mul_(2),
    "all of it": lambda u: u[:].add_(1),
    "turned": lambda u: u.unsqueeze(0).T[0].mul_(5),
    "reshaped": lambda u: u.view(3, 1).neg_(),
    "diagonal": lambda u: u.expand(3, 3).T.diagonal()[:1].add_(4),
    "unbind": lambda u: u.unbind()[1].add_(4),
    "split": lambda u: u.split(1)[2].zero_(),
    "narrow": lambda u: u.narrow(0, 0, 2).zero_(),
    "rows": by_rows,
    "function in place": torch.sin_,
    "out=": lambda u: torch.sin(u, out=u),
    "out= of a view": lambda u: torch.cos(u[:2].clone(), out=u[:2]),
    "F.relu": lambda u: F.relu(u, inplace=True),
    "F.relu, by place": lambda u: F.relu(u, True),
    "F.relu_": lambda u: F.relu_(u),
    "clamp_": lambda u: torch.clamp_(u, 0, 1),
    "overload": lambda u: torch.ops.aten.add_(u, 1),
    "foreach": lambda u: torch._foreach_mul_([u], 2.0),
    "init": lambda u: torch.nn.init.constant_(u, 3.0),
    "Function": Tripled.apply,
    "detached": lambda u: u.detach().mul_(2),
    "data": lambda u: u.data.mul_(2),
    "new data": lambda u: setattr(u, "data", u * 2),
    "without history": without_history,
    "attribute": as_attribute,
}


def check(f, xs=XS):
    mine, theirs = xs.clone(), xs.clone()
    told = difference((vmap(f)(mine), mine), (loop(f)(theirs), theirs))
    assert told is None, told


# --- ways to write --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WRITES)
def test_into_the_one_that_was_chosen(way):
    def f(x):
        a, b = x * 1, x * 2
        u = a if x.sum() > 0 else b
        WRITES[way](u)
        return a, b, u

    check(f)


@pytest.mark.parametrize("way", WRITES)
def test_into_one_that_may_have_been_chosen(way):
    def f(x):
        a, b = x * 1, x * 2
        u = a if x.sum() > 0 else b
        WRITES[way](b)
        return a, b, u

    check(f)


@pytest.mark.parametrize("way", [w for w in WRITES if w != "new data"])  # which is no write
def test_into_the_argument_by_some(way):
    def f(x):
        u, v = x, x[:2]
        if x.sum() > 4:
            u = u * 2
        WRITES[way](u)
        return u, v

    check(f)


@pytest.mark.parametrize("way", WRITES)
def test_in_a_branch(way):
    def f(x):
        a, b = x * 1, x * 2
        u = a if x.sum() > 0 else b
        if x[0] > 1:
            WRITES[way](u)
        return a, b, u

    check(f)


# Some have no derivative, or one in reverse alone.
FORWARD = [
    w
    for w in WRITES
    if w not in ("new data", "Function", "out=", "out= of a view", "data", "detached")
]
REVERSE = [w for w in FORWARD if w not in ("unbind", "split", "rows")]


@pytest.mark.parametrize("way", FORWARD)
def test_with_its_tangent(way):
    def f(x):
        a, b = x * 1, x * 2
        u = a if x.sum() > 0 else b
        WRITES[way](u)
        return a * a, b * b, u

    check(lambda x: jvp(f, (x,), (torch.ones_like(x),)))


@pytest.mark.parametrize("way", REVERSE)
def test_with_its_history(way):
    def f(x):
        a, b = x * 1, x * 2
        u = a if x.sum() > 0 else b
        WRITES[way](u)
        return (a * a + b * 3).sum() + u.sin().sum()

    check(grad(f))


# --- names ----------------------------------------------------------------------------------------


def base_of_a_view(x):
    t = x.clone()
    v = t[:1]
    if x.sum() > 0:
        t = t + 1
    v.add_(10)
    return t


def two_joins(x):
    x = x.clone()
    t = x[0]
    if x[1] > x[0]:
        t = x[1]
    if x[2] > x.mean():
        t = x[2]
    t.mul_(10)
    return x


def join_of_a_join(x):
    a, b, c = x * 1, x * 2, x * 3
    u = a if x[0] > 0 else b
    w = u if x[1] > 0 else c
    w[0].add_(5)
    u[1:].add_(7)
    return a, b, c, u, w


def part_of_a_join(x):
    a, b = x * 1, x * 2
    u = a if x[0] > 0 else b
    w = u[:1] if x[1] > 0 else x[1:2] * 1
    w[0].add_(5)
    b.add_(1)
    return a, b, u, w


def turned_or_not(x):
    x = torch.outer(x, x + 1)
    t = x.T
    u, w = (t, x) if x.sum() > 0 else (x, t)
    u += 1
    return w


def best_of_a_loop(x):
    rows = torch.outer(x, x + 1)
    best = rows[0]
    for r in rows:
        if r.sum() > best.sum():
            best = r
    best[1:].mul_(100)
    rows[0].add_(1)
    return rows, best


def swapped(x):
    a, b = x * 1, x * 2
    v = a[:1]
    if x.sum() > 0:
        a, b = b, a
    v.add_(100)
    b[1:].add_(200)
    return a, b


def by_early_return(x):
    a, b = x * 1, x * 2

    def chosen():
        if x.sum() > 0:
            return a
        return b

    chosen()[0].add_(1)
    return a, b


def in_a_dict(x):
    held = {"a": x * 1, "b": x * 2}
    k = "a" if x.sum() > 0 else "b"
    held[k][0].add_(10)
    return held["a"], held["b"]


def in_a_list(x):
    held = [x * 1, x * 2]
    one = held[int(x.sum() > 0)]
    one[1:].add_(10)
    return held


def as_an_attribute(x):
    h = types.SimpleNamespace(a=x * 1, b=x * 2)
    h.c = h.a if x.sum() > 0 else h.b
    h.c[1:].mul_(5)
    return h.a, h.b


def two_buffers(x):
    now, then = torch.zeros(3, dtype=D), x * 1
    for i in range(3):
        if x[0] > i - 1:
            now, then = then, now
        now[i].add_(1)
        then[0].mul_(2)
    return now, then


def the_argument(x):
    u = x
    if x.sum() > 4:
        u = u * 2
    v = x.detach()
    v[0].add_(3)
    return u


NAMES = [
    base_of_a_view,
    two_joins,
    join_of_a_join,
    part_of_a_join,
    turned_or_not,
    best_of_a_loop,
    swapped,
    by_early_return,
    in_a_dict,
    in_a_list,
    as_an_attribute,
    two_buffers,
    the_argument,
]


@pytest.mark.parametrize("f", NAMES)
def test_each_name_sees_it(f):
    check(f)


@pytest.mark.parametrize("f", NAMES)
def test_in_both_of_two_levels(f):
    check(vmap(f), torch.stack([XS, XS.flip(0) - 0.5]))


def test_two_levels_against_two_loops():
    xs = torch.stack([XS, XS.flip(0) - 0.5])
    told = difference(vmap(vmap(two_joins))(xs), loop(loop(two_joins))(xs))
    assert told is None, told


@pytest.mark.parametrize("f", [f for f in NAMES if f is not best_of_a_loop])
def test_each_name_has_its_derivatives(f):
    def total(x):
        out = f(x * 1)
        return sum(
            (t.sin() * (n + 1)).sum()
            for n, t in enumerate(out if type(out) in (tuple, list) else [out])
        )

    check(grad(total))
    check(lambda x: jvp(total, (x,), (torch.ones_like(x),)))


# --- what a tensor is -----------------------------------------------------------------------------


def turned_in_place(x):
    y = torch.outer(x, x + 1)
    if x.sum() > 0:
        y.t_()
    return y


def transposed_in_place(x):
    y = torch.outer(x, x + 1)
    if x.sum() > 0:
        y.swapaxes_(0, 1)
        y[0].add_(1)
    else:
        y.transpose_(1, 0).mul_(3)
    return y


def cut_short(x):
    y = x * 1
    if x.sum() > 0:
        y.resize_(1)
    return y.sum()


def one_more_dim(x):
    y = x * 1
    if x.sum() > 0:
        y.unsqueeze_(0).unsqueeze_(1)
    return y.sum(0).sum()


def chosen_and_turned(x):
    a, b = torch.outer(x, x), torch.outer(x, x + 1)
    u = a if x.sum() > 0 else b
    u.t_()
    u[0] = 5.0
    return a, b


@pytest.mark.parametrize(
    "f", [turned_in_place, transposed_in_place, cut_short, one_more_dim, chosen_and_turned]
)
def test_who_becomes_another_view_of_itself(f):
    check(f)


def test_who_loses_its_history():
    def f(x):
        a, b = x * 1, x * 2
        if x[0] > 1:
            b.detach_()
        u = a if x.sum() > 0 else b
        u.detach_()
        return (a * a + b * 3).sum() + x.sum()

    check(grad(f))


# --- memory that all examples share ---------------------------------------------------------------


@pytest.mark.parametrize(
    "write", [lambda w: w.zero_(), lambda w: operator.setitem(w, 1, 4.0)], ids=["zero_", "w[1] ="]
)
def test_a_captured_tensor_that_some_have_chosen(write):
    def of(w):
        def f(x):
            u = w if x.sum() > 0 else x * 2
            write(w)
            return u * 1

        return f

    mine, theirs = torch.arange(3.0, dtype=D), torch.arange(3.0, dtype=D)
    told = difference((vmap(of(mine))(XS), mine), (loop(of(theirs))(XS), theirs))
    assert told is None, told


def test_adding_to_a_captured_tensor_that_some_have_chosen_is_an_error():
    w = torch.arange(3.0, dtype=D)

    def f(x):
        u = w if x.sum() > 0 else x * 2
        w.add_(1)
        return u * 1

    with pytest.raises(RuntimeError, match="from before the call"):
        vmap(f)(XS)


class OfSeven(Tripled):
    @staticmethod
    def backward(_, g):
        return g * 7


def test_a_function_that_writes_decides_the_derivative_by_the_argument_s_name():
    def f(x):
        h = x * 2
        if x[0] > 1:
            OfSeven.apply(h)
        return (h * x).sum()

    found = vmap(grad(f))(XS)
    assert difference(found, torch.stack([grad(f)(x) for x in XS])) is None
    twice = vmap(vmap(grad(f)))(XS.reshape(2, 2, 3))
    assert difference(twice.flatten(0, 1), found) is None
