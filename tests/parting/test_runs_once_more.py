"""Where examples part a function runs more than once; nothing that it did happens twice.

Each effect is made anew, once for the loop and once for vmap, and must be the same afterwards.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn

from forall import vmap
from oracle import difference, stack_trees
from parting.cases import D

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


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("where", ["before", "after", "in one branch"])
def test_running_statistics(where, momentum):
    def make():
        norm = nn.BatchNorm1d(2, momentum=momentum, dtype=D)
        data = torch.arange(6, dtype=D).reshape(3, 2)

        def f(x):
            if where == "before":
                y = norm(data * x).sum()
                return y + x if x > 0 else y
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


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("own", [lambda xs: xs, lambda xs: xs * 1, lambda xs: xs[[1, 0, 2, 3]]])
def test_a_gradient_left_on_what_is_mapped(own, held):
    def f(x):
        (x * x).backward(retain_graph=True)
        if x > 0 and x > 2:
            (3 * x).backward(retain_graph=True)
        return x * 5

    def run(mapped):
        xs = stack(requires_grad=True)
        if held:
            xs.grad = torch.ones_like(xs)
        out = mapped(own(xs))
        out.sum().backward()
        assert type(xs.grad) is torch.Tensor
        return out.detach(), xs.grad

    assert (found := difference(run(vmap(f)), run(lambda xs: looped(f, xs)))) is None, found


# --- Python's own state --------------------------------------------------------------------------


class Counts:
    of_all = 0

    def __init__(self):
        self.calls, self.log = 0, []

    def one(self, x):
        self.calls += 1
        self.log.append("one")
        Counts.of_all += 1
        if x > 0:
            self.log.append("above")
            return x
        return x * 2

    def __call__(self, x):
        return self.one(x) + 1


calls_of_all = 0
log_of_all: list[Any] = []
counts_of_all = Counts()


def named_by_the_function():
    global calls_of_all
    calls_of_all += 1
    log_of_all.append(calls_of_all)
    counts_of_all.calls += 1


def made_containers():
    return {
        "list": [0],
        "dict": {"n": 0},
        "set": {0},
        "deque": deque([0], maxlen=3),
        "bytearray": bytearray(b"a"),
        "counter": Counter(a=1),
        "ordered": OrderedDict(n=[0]),
        "nested": {"inner": [[0]]},
    }


def fill(c):
    c["list"].append(len(c["list"]))
    c["dict"]["n"] += 1
    c["set"].add(len(c["set"]))
    c["deque"].appendleft(len(c["deque"]))
    c["bytearray"].extend(b"b")
    c["counter"]["a"] += 1
    c["ordered"]["n"].append(1)
    c["nested"]["inner"][0].append(2)


def two_calls(run):
    """State after a loop over two examples, or a vmap of two groups of one example."""
    return run(torch.tensor([1.0, -1.0], dtype=D))


@pytest.mark.parametrize("way", ["argument", "closure", "partial", "default in a tuple"])
def test_containers(way):
    def states(mapped):
        c = made_containers()

        def of(c, x):
            fill(c)
            return x if x > 0 else x * 2

        if way == "argument":
            run = mapped(of, (None, 0)), (c,)
        elif way == "closure":
            run = mapped(lambda x: of(c, x), 0), ()
        elif way == "partial":
            run = mapped(functools.partial(of, c), 0), ()
        else:
            run = mapped(lambda t, x: of(t[0], x), (None, 0)), ((c, 1),)
        two_calls(lambda xs: run[0](*run[1], xs))
        return c

    def loop(f, _in_dims):
        return lambda *args: [f(*args[:-1], x) for x in args[-1]]

    assert states(vmap) == states(loop)


def test_nonlocal_names():
    def run(mapped):
        calls, late = 0, []

        def f(x):
            nonlocal calls, late
            calls += 1
            late = [*late, "call"]
            return x if x > 0 else x * 2

        two_calls(mapped(f))
        return calls, late

    assert run(vmap) == run(lambda f: lambda xs: [f(x) for x in xs]) == (2, ["call", "call"])


@pytest.mark.parametrize("what", ["method", "object"])
def test_attributes_of_the_object_that_is_called(what):
    Counts.of_all = 0
    counts = Counts()
    two_calls(vmap(counts.one if what == "method" else counts))
    assert (counts.calls, Counts.of_all) == (2, 2)
    assert sorted(counts.log) == ["above", "one", "one"]


def test_attributes_of_an_argument_and_of_the_function():
    counts = Counts()

    def f(counts, x):
        counts.calls += 1
        f.calls += 1
        return x if x > 0 else x * 2

    f.calls = 0
    two_calls(functools.partial(vmap(f, in_dims=(None, 0)), counts))
    assert (counts.calls, f.calls) == (2, 2)


def test_globals_of_a_function_that_is_called_by_name():
    global calls_of_all
    calls_of_all, counts_of_all.calls = 0, 0
    log_of_all.clear()

    def f(x):
        named_by_the_function()
        return x if x > 0 else x * 2

    two_calls(vmap(f))
    assert (calls_of_all, log_of_all, counts_of_all.calls) == (2, [1, 2], 2)


@pytest.mark.parametrize("run", [vmap, CHUNKED], ids=["all", "chunks"])
@pytest.mark.parametrize("name", EFFECTS)
def test_it_is_the_loops(name, run):
    assert_once(EFFECTS[name], run)
