"""Where examples diverge a function runs more than once; nothing that it did happens twice.

Each effect is made anew, once for the loop and once for vmap, and must be the same afterwards.
"""

from __future__ import annotations

import functools
import heapq

import pytest
import torch
from torch import nn

from by_groups import only_groups
from divergence.cases import D
from forall import vmap
from oracle import difference, stack_trees


@pytest.fixture
def floor(monkeypatch):
    """Groups alone, as for a function whose source cannot be had."""
    only_groups(monkeypatch)


@pytest.fixture(params=["groups", "converted"])
def way(request):
    if request.param == "groups":
        request.getfixturevalue("floor")
    return request.param


XS = (1.0, -2.0, 3.0, -4.0, 5.0, 0.5)


def stack(requires_grad=False):
    return torch.tensor(XS, dtype=D, requires_grad=requires_grad)


def looped(f, xs):
    return stack_trees([f(xs[i]) for i in range(len(xs))])


def number(value=0.0, requires_grad=False):
    return torch.tensor(value, dtype=D, requires_grad=requires_grad)


def assert_once(make, run=vmap, stacks=stack):
    """``make()`` gives a function and a look at what it changes besides."""
    f, look = make()
    xs = stacks()
    truth = looped(f, xs), xs, look()
    f, look = make()
    xs = stacks()
    mine = run(f)(xs), xs, look()
    assert (found := difference(mine, truth)) is None, found


EFFECTS = {}
CHUNKED = functools.partial(vmap, chunk_size=4)


def effect(make):
    EFFECTS[make.__name__] = make
    return make


# --- tensors from before the call ----------------------------------------------------------------


@effect
def added_before():
    acc = number()

    def f(x):
        acc.add_(x)
        return x * 2 if x > 0 else x - 1

    return f, lambda: acc


@effect
def added_in_both_branches():
    acc = number()

    def f(x):
        if x > 0:
            acc.sub_(x)
        else:
            acc.add_(x * 3)
        return acc.shape[0:1].numel() * x

    return f, lambda: acc


@effect
def counted():
    count = torch.zeros(2, dtype=torch.int64)

    def f(x):
        count[0] += 1
        if x > 2:
            count[1] += 2
        return x

    return f, lambda: count


@effect
def overwritten_before():
    kept = number()

    def f(x):
        kept.copy_(number(3.0))
        return x * kept if x > 0 else x - kept

    return f, lambda: kept


@effect
def overwritten_differently():
    kept = number()

    def f(x):
        kept.fill_(1.0 if x > 0 else 2.0)
        return x * kept

    return f, lambda: kept


@effect
def overwritten_in_branches():
    kept = torch.zeros(3, dtype=D)

    def f(x):
        if x > 0:
            kept[0] = 1.0
        else:
            kept[0] = 2.0
        return x * kept[0]

    return f, lambda: kept


@effect
def overwritten_by_all_and_then_by_some():
    kept = number(7.0)

    def f(x):
        kept.zero_()
        if x > 0:
            kept.fill_(3.0)
        return x - kept

    return f, lambda: kept


@effect
def a_moving_average():
    mean = number(1.0)

    def f(x):
        mean.mul_(0.5).add_(x)
        return x if x > 0 else x * 2

    return f, lambda: mean


@effect
def a_moving_average_of_branches():
    mean = number(1.0)

    def f(x):
        if x > 0:
            mean.mul_(0.5).add_(x)
        else:
            mean.mul_(0.25)
        return x

    return f, lambda: mean


@effect
def some_add_what_others_read():
    acc = number()

    def f(x):
        if x > 0:
            acc.add_(x)
            return x
        return x * acc

    return f, lambda: acc


@effect
def some_read_what_others_add():
    acc = number()

    def f(x):
        if x < 0:
            acc.add_(x)
            return x
        return x * acc

    return f, lambda: acc


@effect
def an_uneven_question_about_what_others_wrote():
    acc = number()

    def f(x):
        if x > 0:
            acc.add_(x)
            return x
        return x - 1 if acc > 2 else x

    return f, lambda: acc


@effect
def added_with_a_derivative():
    acc, w = number(), number(2.0, requires_grad=True)

    def f(x):
        acc.add_(w * x)
        if x > 0:
            acc.add_(w * w)
        return x

    def look():
        acc.backward()
        return acc.detach(), w.grad

    return f, look


@effect
def added_to_what_has_a_history():
    w = number(2.0, requires_grad=True)
    acc = w * 3

    def f(x):
        acc.add_(w * x)
        return x if x > 0 else x * 2

    def look():
        acc.backward()
        return acc.detach(), w.grad

    return f, look


@effect
def the_stack_that_is_mapped():
    box = []

    def f(x):
        box[:] = [x]
        x.mul_(2)
        if x > 0:
            x.add_(1)
            return x * 1
        return x - 1

    return f, lambda: len(box)


class Ordered:
    """A comparison with an effect, called by code of Python's that has no converted form."""

    def __init__(self, x, effect):
        self.x, self.effect = x, effect

    def __lt__(self, other):
        self.effect(torch.stack([self.x, other.x]).unsqueeze(-1).expand(2, 2))
        return bool(self.x < other.x)


@pytest.mark.parametrize("momentum", [0.1, None, "a sum"])
@pytest.mark.parametrize(
    "sort", [sorted, lambda xs: heapq.nsmallest(2, xs), lambda xs: [min(xs), max(xs)]]
)
def test_what_adds_up_in_code_that_is_run_again_on_the_spot(sort, momentum):
    def make():
        count = torch.zeros(2, dtype=D)
        norm = None if momentum == "a sum" else nn.BatchNorm1d(2, momentum=momentum, dtype=D)
        effect = norm or (lambda both: count.add_(both[0] + 1))

        def f(x):
            found = sort([Ordered(v, effect) for v in (x, -x, 3 * x)])
            return found[0].x + 2 * found[1].x

        return f, lambda: [count, *(norm.buffers() if norm else ())]

    assert_once(make, run=lambda f: lambda xs: vmap(f)(xs).detach())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("where", ["before", "after", "in one branch", "in both", "twice"])
def test_running_statistics(where, momentum):
    def make():
        norm = nn.BatchNorm1d(2, momentum=momentum, dtype=D)
        data = torch.arange(6, dtype=D).reshape(3, 2)

        def f(x):
            if where == "before":
                y = norm(data * x).sum()
                return y + x if x > 0 else y
            if where == "in both":
                y = norm(data * x) if x > 0 else norm(data - x)
                return y.sum()
            if where == "twice":
                y = norm(data * x)
                if x > 0:
                    y = norm(y + x)
                return y.sum()
            if x > 0 and where == "in one branch":
                return x
            if x > 0:
                x = x * 2
            return norm(data * x).sum() + x

        return f, lambda: [*norm.buffers()]

    assert_once(make, run=lambda f: lambda xs: vmap(f)(xs).detach())


# --- gradients -----------------------------------------------------------------------------------


@effect
def a_gradient_left_on_a_captured_leaf():
    w = number(2.0, requires_grad=True)

    def f(x):
        (w * x).sin().backward()
        if x > 0:
            return x * 1
        (w * x).backward()
        return x * 2

    return f, lambda: w.grad


@effect
def a_gradient_added_to_another():
    w = number(2.0, requires_grad=True)
    held = w.grad = number(7.0)

    def f(x):
        (w * w * x).backward()
        return x * 1 if x > 0 else x

    def look():
        assert w.grad is held
        return w.grad

    return f, look


@effect
def a_gradient_left_behind_a_captured_result():
    leaf = number(2.0, requires_grad=True)
    w = leaf * 3

    def f(x):
        (w * x).backward(retain_graph=True)
        if x > 0 and x > 2:
            (w * w * x).backward(retain_graph=True)
        return x

    return f, lambda: leaf.grad


@effect
def a_gradient_that_others_read():
    w = number(2.0, requires_grad=True)

    def f(x):
        if x > 0:
            (w * x).sin().backward()
            return x
        return x * w.grad

    return f, lambda: w.grad


@effect
def a_gradient_taken_away():
    w = number(2.0, requires_grad=True)

    def f(x):
        if x > 0:
            (w * x).sin().backward()
        else:
            w.grad = None
        return x

    return f, lambda: w.grad


@effect
def a_step_of_an_optimizer_of_its_own():
    def f(x):
        w = nn.Parameter(x.detach().clone().reshape(1))
        optimizer = torch.optim.Adam([w], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (w * w).sum().backward()
            optimizer.step()
        return w.detach() * 2 if w[0] > 0 else w.detach()

    return f, lambda: None


OWN = {"itself": lambda xs: xs, "a result": lambda xs: xs * 1, "rows": lambda xs: xs[[1, 0, 2, 3]]}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("own", OWN)
def test_a_gradient_left_on_what_is_mapped(own, held, way):
    def f(x):
        (x * x).backward(retain_graph=True)
        if x > 0 and x > 2:
            (3 * x).backward(retain_graph=True)
        return x * 5

    def run(mapped):
        xs = stack(requires_grad=True)
        if held:
            xs.grad = torch.ones_like(xs)
        out = mapped(OWN[own](xs))
        out.sum().backward()
        assert type(xs.grad) is torch.Tensor
        return out.detach(), xs.grad

    assert (found := difference(run(vmap(f)), run(lambda xs: looped(f, xs)))) is None, found


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("run", [vmap, CHUNKED], ids=["all", "chunks"])
@pytest.mark.parametrize("name", EFFECTS)
def test_it_is_the_loops(name, run):
    assert_once(EFFECTS[name], run)
