"""Examples that part, run one after another as in the loop: results, errors and state are its."""

from __future__ import annotations

import bisect
import collections
import copy
import heapq
import itertools
import math
import operator
import random
import statistics
import time
import warnings
import weakref
from math import inf

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import forall
from draws import HERE
from forall import (
    config,
    explain,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from forall._api.execution import loop_or_batch, python_loop
from forall._api.execution.side_effect_free import find_pure_bindings
from forall._auto_replay.replayed_calls import get_transform_calls
from forall._core.divergence import TimeExceeded
from forall._core.levels import stack

XS = torch.tensor([0.5, -1.25, 3.0, 2.0, -0.75])
ROWS = torch.linspace(-2, 2, 20).sin().reshape(5, 4)
SHIFT = torch.tensor([1.0, 2.0, 3.0, 4.0])
SCALES = {"low": 2.0, "high": (3.0, torch.tensor(0.5))}


@pytest.fixture(autouse=True, params=["loop", "measured", "together"])
def _ways(request, monkeypatch):
    monkeypatch.setattr(config, "strategy", request.param)
    monkeypatch.setattr(loop_or_batch, "_times", type(loop_or_batch._times)())


@pytest.fixture(autouse=True)
def _ticks(monkeypatch):
    """Calls are timed by a clock that moves with each reading, however busy the machine is."""
    readings = itertools.count()
    for module in (loop_or_batch, python_loop):
        monkeypatch.setattr(module, "perf_counter", lambda: next(readings) * 1e-4)


def by_loop(f, *args):
    return torch.stack([torch.as_tensor(f(*each)) for each in zip(*args, strict=True)])


def collatz(x):
    n, path = int(abs(x) * 4) + 1, []
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        path.append(n)
    return len(path) + x


def halved(x):
    while x.abs() > 1:
        x = x / 2
    return x


def helped(x):
    return _helper(x) if x > 0 else -_helper(-x)


def _helper(x):
    return math.sqrt(x) * torch.ones(2)


def recursive(x):
    return x if x < 1 else recursive(x - 1) * 2


def caught(x):
    try:
        if x > 1:
            raise ValueError("too large")
        return x.exp()
    except ValueError:
        return -x


def looked_up(x):
    found = SCALES["high" if x > 0 else "low"]
    return x * found if isinstance(found, float) else x * found[0] + found[1]


def of_rows(row):
    best = sorted(row.tolist())[-2:]
    return torch.tensor(best) * 2 + SHIFT[: len(best)]


def written(row):
    row = row.clone()
    if row[0] > 0:
        row[1:] *= 2
    row[int(row.argmax())] = 7
    return row


def softened(row):
    return functional.softmax(row, 0) if row.sum() > 0 else torch.nn.functional.relu(row)


ON_NUMBERS = [collatz, halved, helped, recursive, caught, looked_up]
ON_ROWS = [of_rows, written, softened]
CASES = [(f, XS) for f in ON_NUMBERS] + [(f, ROWS) for f in ON_ROWS]
NAMES = [f.__name__ for f, _ in CASES]


@pytest.mark.parametrize(("f", "xs"), CASES, ids=NAMES)
def test_each_call_is_the_loops(f, xs):
    assert find_pure_bindings(f) is not None
    mapped = vmap(f)
    for size in (5, 5, 5, 1, 2, 5):
        torch.testing.assert_close(mapped(xs[:size]), by_loop(f, xs[:size]))


@pytest.mark.parametrize(("f", "xs"), CASES, ids=NAMES)
def test_as_the_loop_each_bit_is_the_loops(f, xs):
    if config.strategy == "loop":
        torch.testing.assert_close(vmap(f)(xs), by_loop(f, xs), rtol=0, atol=0)


# Torch says so once in a process, in the loop.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize(("f", "xs"), CASES, ids=NAMES)
def test_derivatives_outside_are_the_loops(f, xs):
    def gradient(run):
        leaf = xs.clone().requires_grad_()
        y = run(f, leaf)
        return torch.autograd.grad(y.sum(), leaf)[0] if y.requires_grad else None

    for _ in range(3):
        found = gradient(lambda f, leaf: vmap(f)(leaf))
        expected = gradient(lambda f, leaf: by_loop(f, leaf))
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("f", "xs"), CASES, ids=NAMES)
def test_inside_and_around_other_transforms(f, xs):
    def number(x):
        return f(x).sum()

    if f not in (of_rows, helped):
        torch.testing.assert_close(vmap(grad(number))(xs), by_loop(grad(number), xs))

        def mapped(xs):
            return vmap(number)(xs).sum()

        torch.testing.assert_close(grad(mapped)(xs), by_loop(grad(number), xs))
    both = torch.stack([xs, 2 * xs])
    found = vmap(vmap(f))(both)
    torch.testing.assert_close(found, torch.stack([by_loop(f, row) for row in both]))


def test_arguments_may_lie_anywhere():
    def f(x, y, *, z):
        return x + y * z if x.sum() > 0 else x - z

    ys, z = torch.arange(4.0), torch.ones(4)
    for _ in range(3):
        found = vmap(f, {"x": -1, "y": None}, out_dims=1)(ROWS.T, ys, z=z)
        expected = torch.stack([f(x, ys, z=z) for x in ROWS], 1)
        torch.testing.assert_close(found, expected)
        found = vmap(f, {"x": -1, "y": None}, chunk_size=2)(ROWS.T, ys, z=z)
        torch.testing.assert_close(found, expected.T)


def test_results_may_be_trees_and_numbers():
    def f(x):
        if x > 0:
            return {"a": (x, 1), "b": [None, "text", True]}
        return {"a": (2 * x, 2), "b": [None, "text", False]}

    for _ in range(3):
        found = vmap(f, out_dims={"a": (0, 0), "b": [None, None, 0]})(XS)
        torch.testing.assert_close(found["a"][0], torch.where(XS > 0, XS, 2 * XS))
        assert found["a"][1].tolist() == [1, 2, 1, 1, 2]
        assert found["b"][:2] == [None, "text"]
        assert found["b"][2].tolist() == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("f", "error"),
    [
        (lambda x: x if x > 0 else 1 / 0, ZeroDivisionError),
        (lambda x: x[:3] if x > 2 else x, IndexError),
        (lambda x: x.expand(2) if x > 0 else x, ValueError),
        (lambda x: "a" if x > 0 else "b", ValueError),
        (lambda x: (x, x) if x > 0 else x, ValueError),
    ],
    ids=["fails", "fails in torch", "another shape", "another text", "another tree"],
)
def test_errors_are_those_of_the_other_way(f, error):
    for _ in range(3):
        with pytest.raises(error) as found:
            vmap(f)(XS)
        assert "example" in "".join([str(found.value), *getattr(found.value, "__notes__", [])])


def test_what_a_failed_call_has_written_is_as_it_was():
    def f(x):
        x[0] = 9
        if x[1] > 0.5:
            raise ValueError("no")
        return x.sum()

    rows = ROWS.clone()
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            vmap(f)(rows)
        torch.testing.assert_close(rows, ROWS, rtol=0, atol=0)


WRITES_BY_ARGUMENTS = {
    "keywords in a dict": lambda t: torch.mul(t, 2.0, **{"out": t}),  # noqa: PIE804
    "in place by position": lambda t: functional.elu(t, 1.0, True),
    "in place by a tuple": lambda t: functional.threshold(*(t, 0.0, 1.0, True)),
    "in place by a map": lambda t: [*map(functional.leaky_relu, [t], [0.1], [True])],
}


@pytest.mark.parametrize("case", WRITES_BY_ARGUMENTS)
def test_what_a_refused_write_of_a_function_of_torchs_has_changed_is_as_it_was(case):
    write, captured = WRITES_BY_ARGUMENTS[case], torch.tensor([1.0, -2.0])

    def f(x):
        write(captured)
        return captured.sum() if x > 0 else x

    for _ in range(3):
        with pytest.raises(RuntimeError, match="from before the call"):
            vmap(f)(XS)
        assert captured.tolist() == [1.0, -2.0]


def test_what_an_example_writes_into_its_row_stays():
    def f(x):
        if x[0] > 0:
            x[1] = 5
        return x.sum()

    for _ in range(3):
        rows, expected = ROWS.clone(), ROWS.clone()
        torch.testing.assert_close(vmap(f)(rows), by_loop(f, expected))
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)


def test_what_all_share_is_not_written_to():
    total = torch.zeros(4)

    def into_closure(x):
        if x[0] > 0:
            total[0] = x[1]
        return x.sum()

    def into_argument(x, y):
        if x[0] > 0:
            y[0] = x[1]
        return x.sum()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="all examples share"):
            vmap(into_closure)(ROWS)
        with pytest.raises(RuntimeError, match="all examples share"):
            vmap(into_argument, (0, None))(ROWS, total)
        assert total.tolist() == [0, 0, 0, 0]


def test_what_adds_up_does():
    def f(x, y):
        if x[0] > 0:
            y += x
        return x.sum()

    total, expected = torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        vmap(f, (0, None))(ROWS, total)
        for row in ROWS:
            f(row, expected)
        torch.testing.assert_close(total, expected)


def test_draws_need_the_word():
    def f(x):
        return x + torch.rand(()) if x > 0 else x

    for _ in range(3):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(f)(XS)


def test_names_are_looked_up_with_each_call(monkeypatch):
    mapped = vmap(helped)
    for factor in (1, 2, 3):
        monkeypatch.setitem(globals(), "_helper", lambda x, factor=factor: factor * x)
        for _ in range(2):
            torch.testing.assert_close(mapped(XS), factor * XS)


def test_what_a_closure_holds_may_change():
    scale, table = 1.0, [1.0, 2.0]

    def f(x):
        return x * scale if x > 0 else x * table[1]

    mapped = vmap(f)
    for factor in (1.0, 2.0, 3.0):
        scale, table[1] = factor, -factor
        for _ in range(2):
            torch.testing.assert_close(mapped(XS), by_loop(f, XS))


def test_what_a_captured_list_holds_may_change():
    told, uses = [], [torch.sin]

    def f(x):
        return uses[0](x) if x > 0 else x

    def tells(x):
        told.append(x)
        return 2 * x

    mapped = vmap(f)
    for use in (torch.cos, torch.tanh, tells, torch.sin):
        uses[0] = use
        for _ in range(2):
            torch.testing.assert_close(mapped(XS), by_loop(f, XS))


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    def f(x):
        x[0] = 9
        return x.sum() if x[1] > 0 else x[1]

    def interrupted(*given):
        results(*given)
        raise KeyboardInterrupt

    results, rows = python_loop._call_each, ROWS.clone()
    monkeypatch.setattr(config, "strategy", "loop")
    vmap(f)(ROWS.clone())
    with monkeypatch.context() as patched:
        patched.setattr(python_loop, "_call_each", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vmap(f)(rows)
    torch.testing.assert_close(rows, ROWS, rtol=0, atol=0)
    torch.testing.assert_close(vmap(f)(rows), by_loop(f, ROWS.clone()))


# --- which functions only compute ---------------------------------------------------------------

KEPT: list = []


def keeps(x):
    KEPT.append(x)
    return x


def draws(x):
    return functional.dropout(x)


def writes_attributes(x):
    x.tag = 1
    return x


def writes_in_place(x):
    return x.add_(1)


def rebinds(x):
    global KEPT  # noqa: PLW0603 - what is not to be run as a loop
    KEPT = x
    return x


def prints(x):
    print(x)
    return x


def asks_memory(x):
    return x.data_ptr()


def yields(x):
    yield x


def imports(x):
    import os

    return x * len(os.sep)


def out(x):
    return torch.sin(x, out=x)


@pytest.mark.parametrize(
    "f",
    [
        keeps,
        draws,
        writes_attributes,
        writes_in_place,
        rebinds,
        prints,
        asks_memory,
        yields,
        imports,
        out,
        torch.nn.Linear(2, 2),
        torch.sin,
        vmap(draws),
        vmap(halved, randomness="different"),
        vmap(halved, randomness="same"),
        grad(writes_attributes),
        lambda x: vmap(prints)(x),
        lambda x: vmap(halved, randomness="different")(x),
        lambda x: vjp(halved, x),
        lambda x: torch.rand(()) + x,
        lambda x: torch.manual_seed(0),
        lambda x: torch.batch_norm,
        lambda x: torch.svd_lowrank(x),
        lambda x: operator.iadd(x, 1),
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: torch.sin(x, out=x),
        lambda x: torch.sin(x, **{"out": x}),  # noqa: PIE804
        lambda x: torch.sin(x, **SCALES),
        lambda x: functional.relu(x, True),
        lambda x: functional.relu(*(x, True)),
        lambda x: functional.elu(functional.relu(x), 1.0, True),
        lambda x: functional.threshold(functional.relu(x), 0.0, 1.0, True),
        lambda x: list(map(functional.relu, [x], [True])),
        lambda x: functional.embedding(x, SHIFT, None, 1.0),
        lambda x: torch.Generator(HERE).manual_seed(0),
        lambda x: x.new(1),
        lambda x: x.numpy(),
        lambda x: x.__class__,
        lambda x: compile(x, "", "eval"),
        lambda x: test_draws_need_the_word,
    ],
    ids=lambda f: getattr(f, "__name__", "module"),
)
def test_what_may_do_more_is_not_said_to_compute_only(f):
    assert find_pure_bindings(f) is None


# --- which way is taken ---------------------------------------------------------------------------


def ways(times, looped, together, calls):
    """Which way each call goes, where the loop takes so long and all together so long."""
    taken = []
    for _ in range(calls):
        goes_on = times.prefers_loop()
        is_loop = times.loops()
        taken.append("loop" if is_loop else "together")
        seconds = looped if is_loop else together
        times.note_seconds(seconds, together=not is_loop)
        if is_loop != goes_on:
            times.note_try(seconds)
    return taken


def test_the_faster_way_stays_and_the_slower_one_is_tried_ever_more_seldom():
    for looped, together, fast, slow in (
        (0.01, 0.1, "loop", "together"),
        (0.1, 0.01, "together", "loop"),
    ):
        taken = ways(loop_or_batch.CallTimes(), looped, together, 1000)
        assert taken[0] == "loop"
        assert "together" in taken[:4]
        seconds = {"loop": looped, "together": together}
        spent = {way: taken.count(way) * seconds[way] for way in seconds}
        assert 1 < taken.count(slow) < 120
        assert spent[slow] < 0.05 * spent[fast] + 2 * seconds[slow]


def test_what_takes_no_time_is_not_tried_in_other_ways():
    assert set(ways(loop_or_batch.CallTimes(), 1e-6, 1e-3, 900)) == {"loop"}


def never_together(monkeypatch):
    """Let the loop be the faster way."""
    monkeypatch.setattr(config, "strategy", "measured")
    monkeypatch.setattr(loop_or_batch, "_WORTH", 0.0)
    monkeypatch.setattr(loop_or_batch, "_CONVERTING", 0.0)
    monkeypatch.setattr(loop_or_batch, "_MUCH", 0.0)


def test_a_try_that_takes_long_ends(monkeypatch):
    never_together(monkeypatch)

    def f(x):
        while x.abs() > 1:
            x = x / 2
        return x

    mapped = vmap(f)
    for _ in range(4):
        torch.testing.assert_close(mapped(XS), by_loop(f, XS))
    (times,) = loop_or_batch._times[f.__code__].values()
    assert times.was_late
    assert times.together is None
    times.next = times.spent  # of the first try most may have been what is done once
    torch.testing.assert_close(mapped(XS), by_loop(f, XS))
    assert times.together == inf


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_that_was_broken_off_for_what_is_done_once_is_timed_again(monkeypatch, again):
    """The first example may import something, which no other one does."""
    monkeypatch.setattr(config, "strategy", "measured")
    original, starts = python_loop._call_each, []

    def call_each(func, args, bindings, seconds):
        starts.append(seconds)
        if len(starts) == 1 or (again and len(starts) == 2):
            raise python_loop.TooLongError(1000.0)
        return original(func, args, bindings, seconds)

    monkeypatch.setattr(python_loop, "_call_each", call_each)

    def f(x):
        while x.abs() > 1:
            x = x / 2
        return x

    mapped = vmap(f)
    for _ in range(8):
        torch.testing.assert_close(mapped(XS), by_loop(f, XS))
    (times,) = loop_or_batch._times[f.__code__].values()
    assert starts[0] == loop_or_batch._FIRST
    if again:  # it is as slow as it seemed, so not tried in each call
        assert len(starts) == 2
        assert times.looped == 1000
    else:
        assert (times.looped or 0) < 1
        assert len(starts) >= 2
    assert 0 < starts[1] < 1  # no longer than the call together took


@pytest.mark.impure("reads the times of a loop, which a program does without")
def test_a_loop_is_timed_when_the_calls_in_it_are_recorded(monkeypatch):
    monkeypatch.setattr(config, "strategy", "measured")
    monkeypatch.setattr(config, "patience", 0.0)
    monkeypatch.setattr(loop_or_batch, "_WARMING", inf)

    def f(x):
        y = x if x > 0 else -x
        return y.log() + 1 if y > 1 else y

    derivative = jacfwd(f)
    mapped = vmap(derivative)
    wanted = by_loop(jacfwd(f), XS)
    for _ in range(loop_or_batch._LOOPS_TO_WARM + 1):
        torch.testing.assert_close(mapped(XS), wanted)
    (times,) = loop_or_batch._times[f.__code__].values()
    assert not times.warming
    assert get_transform_calls(derivative).hits >= len(XS)


def test_a_loop_that_may_get_faster_is_tried_before_all_together():
    times = loop_or_batch.CallTimes(warming=8)
    assert not times.may_get_faster()
    times.note_seconds(0.1)
    assert times.may_get_faster()
    assert times.get_loop_limit() == loop_or_batch._FIRST
    times.note_seconds(0.05, together=True)
    assert times.may_get_faster()
    assert times.get_loop_limit() == inf
    times.together = 0.01
    assert not times.may_get_faster()
    assert times.get_loop_limit() == 0.01
    times.spent = loop_or_batch._LOOPS_TO_WARM * 0.1  # by now it is little to try
    assert times.may_get_faster()
    times.note_warming(is_over=True)
    assert not times.may_get_faster()


WITHOUT_SOURCE = """
def f(x):
    x += 1
    while x.norm() > 1:
        x = x * 0.5
    return x
"""


def test_a_loop_that_takes_long_is_given_up(monkeypatch):
    monkeypatch.setattr(config, "strategy", "measured")
    monkeypatch.setattr(loop_or_batch, "_FIRST", 0.0)

    def f(x):
        x += 1
        return x * 2 if x[0] > 1 else x

    for _ in range(3):
        rows, expected = ROWS.clone(), ROWS.clone()
        torch.testing.assert_close(vmap(f)(rows), by_loop(f, expected))
        torch.testing.assert_close(rows, expected)
    (times,) = loop_or_batch._times[f.__code__].values()
    assert None not in (times.looped, times.together)


def test_a_try_that_takes_long_is_undone(monkeypatch):
    monkeypatch.setattr(config, "strategy", "measured")
    monkeypatch.setattr(loop_or_batch, "_WORTH", 0.0)
    for much, converting in ((0.0, 0.0), (0.0, 0.0005), (0.0, 0.002), (2.0, 0.05)):
        monkeypatch.setattr(loop_or_batch, "_MUCH", much)
        monkeypatch.setattr(loop_or_batch, "_CONVERTING", converting)
        names: dict = {}
        exec(WITHOUT_SOURCE, names)  # noqa: S102
        mapped = vmap(names["f"])
        for _ in range(4):
            rows, expected = ROWS.clone(), ROWS.clone()
            torch.testing.assert_close(mapped(rows), by_loop(names["f"], expected))
            torch.testing.assert_close(rows, expected)


def test_what_a_function_is_made_of_is_compared(monkeypatch):
    def f(x, *, scale=1.0):
        return x * scale if x > 0 else -x

    def other(x, *, scale=1.0):
        return x + scale if x > 0 else x

    mapped = vmap(f)
    mapped(XS)
    monkeypatch.setattr(f, "__kwdefaults__", {"scale": 3.0})
    torch.testing.assert_close(mapped(XS), by_loop(f, XS))
    monkeypatch.setattr(f, "__code__", other.__code__)
    for _ in range(2):
        torch.testing.assert_close(mapped(XS), by_loop(f, XS))


def test_a_function_that_is_dropped_goes_at_once():
    def make():
        def f(x):
            return x * 2 if x > 0 else x

        return f

    f = make()
    for _ in range(3):
        vmap(f)(XS)
    gone = weakref.ref(f)
    del f
    assert gone() is None


def test_what_cannot_be_the_loop_is_not(monkeypatch):
    ran = []
    run = python_loop.run_loop
    monkeypatch.setattr(python_loop, "run_loop", lambda *args: ran.append(args) or run(*args))
    monkeypatch.setattr(config, "strategy", "loop")
    monkeypatch.setattr(config, "replay", False)
    kept = []
    vmap(halved, max_steps=9)(XS)
    vmap(lambda row: (kept.append(0), vmap(halved)(row))[1])(XS[None])
    assert not ran
    vmap(halved)(XS)
    grad(lambda xs: vmap(halved)(xs).sum())(XS)
    jvp(vmap(halved), (XS,), (XS,))
    vmap(vmap(halved))(XS[None])
    assert len(ran) == 5


def test_explain_tells_which_way_is_taken(monkeypatch):
    monkeypatch.setattr(config, "strategy", "measured")
    monkeypatch.setattr(config, "replay", False)
    monkeypatch.setattr(loop_or_batch, "_FIRST", inf)
    mapped = vmap(halved)
    assert not explain(mapped)(XS).measured
    mapped(XS)
    assert not explain(mapped)(XS).measured  # together was not tried yet
    (times,) = loop_or_batch._times[halved.__code__].values()
    times.looped, times.together = 0.002, 0.00001
    assert explain(mapped)(XS).measured == "together, in 10 us; the loop takes 2 ms"
    times.together = inf
    assert explain(mapped)(XS).measured == "as the loop, in 2 ms; together takes much longer"
    times.together = 5.0
    found = explain(mapped)(XS)
    assert found.measured == "as the loop, in 2 ms; together takes 5 s"
    assert "how such calls run\n" in str(found)


@pytest.mark.parametrize(
    "f",
    [
        vmap(halved),
        grad(halved),
        vmap(grad(grad(halved))),
        jacfwd(halved),
        lambda x: vmap(halved)(x),
        lambda x: grad(lambda y: halved(y) * x)(x),
        lambda x: forall.jvp(halved, (x,), (x,)),
    ],
    ids=["vmap", "grad", "three", "jacfwd", "calls", "nested", "jvp"],
)
def test_transforms_of_what_only_computes_only_compute(f):
    assert find_pure_bindings(f) is not None


@pytest.mark.parametrize("word", [grad, jacfwd, jacrev, hessian], ids=lambda f: f.__name__)
def test_derivatives_of_examples_are_the_loops(word):
    for _ in range(4):
        torch.testing.assert_close(vmap(word(halved))(XS), by_loop(word(halved), XS))


@pytest.mark.parametrize("word", [jacfwd, jacrev, hessian], ids=lambda f: f.__name__)
def test_derivatives_of_all_examples_are_the_loops(word):
    def squares(y):
        return (y * y).sum() if word is hessian else y * y

    for _ in range(4):
        found = word(lambda xs: squares(vmap(halved)(xs)))(XS)
        torch.testing.assert_close(found, word(lambda xs: squares(by_loop(halved, xs)))(XS))


def test_under_forward_mode_the_tangent_is_the_loops():
    for _ in range(4):
        found = jvp(vmap(halved), (XS,), (XS.sin(),))
        torch.testing.assert_close(found, jvp(lambda xs: by_loop(halved, xs), (XS,), (XS.sin(),)))


def test_examples_of_examples_that_part():
    both = torch.stack([XS, 3 * XS, -XS])
    expected = torch.stack([by_loop(halved, row) for row in both])
    for mapped in (vmap(vmap(halved)), vmap(lambda row: vmap(halved)(row))):
        for _ in range(4):
            torch.testing.assert_close(mapped(both), expected)


def asks(x):
    return x * 2 if x.item() > -10 else x


def test_questions_that_all_answer_alike_count_too(monkeypatch):
    """Python's questions cost, whether examples diverge or not."""
    looped = []
    original = python_loop.run_each_example
    monkeypatch.setattr(
        python_loop, "run_each_example", lambda *args: looped.append(1) or original(*args)
    )
    mapped = vmap(asks)
    for _ in range(5):
        torch.testing.assert_close(mapped(XS), XS * 2)
    assert bool(looped) == (config.strategy != "together")


def test_what_asks_nothing_runs_at_once(monkeypatch):
    monkeypatch.setattr(
        python_loop, "run_each_example", lambda *args: pytest.fail("run as the loop")
    )
    mapped = vmap(lambda x: x * 2)
    for _ in range(5):
        torch.testing.assert_close(mapped(XS), XS * 2)


@pytest.mark.impure("of calls that stay with the loop, and none that is recorded does")
class TestSettled:
    """Calls that stay with the loop without being looked at anew are told from all others."""

    @pytest.fixture(autouse=True)
    def _measured(self, monkeypatch):
        monkeypatch.setattr(config, "strategy", "measured")
        monkeypatch.setattr(config, "replay", True)  # "check" records the first call
        # However slow the machine is, the first calls are neither run together nor recorded.
        monkeypatch.setattr(config, "patience", inf)
        monkeypatch.setattr(loop_or_batch, "_WORTH", inf)
        monkeypatch.setattr(loop_or_batch, "_FIRST", inf)

    @staticmethod
    def settled(f, *stacks, word=lambda f: f, **options):
        """A mapped function, or a mapped derivative of it, whose calls stay with the loop."""
        mapped = vmap(word(f), **options)
        for _ in range(3):
            mapped(*stacks)
        for times in loop_or_batch._times[f.__code__].values():
            times.looped, times.together, times.next, times.warming = 1e-9, inf, inf, 0
        return mapped

    @pytest.mark.counted
    def test_they_are_the_loops(self, monkeypatch):
        mapped = self.settled(lambda x: asks(x), XS)  # without calls that other tests recorded
        monkeypatch.setattr("forall._api.vmap.VmapSpec.run", lambda *_: pytest.fail("looked at"))
        torch.testing.assert_close(mapped(XS), XS * 2)

    def test_other_sizes_and_places_are_looked_at(self):
        def f(x, y):
            return x + y.sum() if x.sum().item() > 0 else x

        xs, ys = torch.ones(3, 4), torch.ones(3, 5)
        mapped = self.settled(f, xs, ys)
        with pytest.raises(ValueError, match="differ in size"):
            mapped(xs, torch.ones(4, 5))
        with pytest.raises(TypeError, match="missing 1 required"):
            mapped(xs)
        torch.testing.assert_close(mapped(xs[:2], ys[:2]), xs[:2] + 5)
        torch.testing.assert_close(vmap(f, (1, None))(torch.ones(3, 3), ys), torch.ones(3, 3) + 15)

    def test_names_that_are_bound_anew_are_seen(self, monkeypatch):
        mapped = self.settled(of_rows, ROWS)
        monkeypatch.setitem(of_rows.__globals__, "SHIFT", SHIFT + 1)
        torch.testing.assert_close(mapped(ROWS), by_loop(of_rows, ROWS))

    def test_history_is_the_loops(self):
        mapped = self.settled(asks, XS)
        xs = XS.clone().requires_grad_()
        (found,) = torch.autograd.grad(mapped(xs).sum(), xs)
        torch.testing.assert_close(found, torch.full((5,), 2.0))
        with torch.no_grad():
            assert not mapped(xs).requires_grad

    def test_results_go_where_they_are_to(self):
        def f(row):
            return row * 2 if row[0].item() > -10 else row

        mapped = self.settled(f, ROWS, out_dims=1)
        torch.testing.assert_close(mapped(ROWS), (ROWS * 2).T)
        with pytest.raises(IndexError, match="out_dims"):
            vmap(f, out_dims=5)(ROWS)

    def test_errors_are_of_the_example(self):
        def f(x):
            if x.item() > 2.5:
                raise ValueError("too large")
            return x

        mapped = self.settled(f, XS.clamp(max=2))
        with pytest.raises(ValueError, match="too large") as told:
            mapped(XS.clamp(max=2) + 1)
        assert "example" in "".join(told.value.__notes__)

    def test_other_ways_to_call_stay_theirs(self):
        mapped = self.settled(asks, XS)
        expected = XS * 2
        torch.testing.assert_close(explain(mapped)(XS).result, expected)
        torch.testing.assert_close(jvp(mapped, (XS,), (XS,))[1], expected)
        torch.testing.assert_close(vmap(mapped)(XS[None]), expected[None])
        with pytest.raises(RuntimeError, match="item"):  # torch's own does it then
            torch.func.vmap(mapped)(XS[None])
        config.strategy = "together"
        torch.testing.assert_close(mapped(XS), expected)

    def test_results_of_two_types_are_promoted(self):
        def f(x):
            return x.double() if x.item() > 2 else x

        xs = torch.linspace(0, 4, 5)
        mapped = self.settled(f, xs)
        torch.testing.assert_close(mapped(xs), xs.double())

    def test_results_of_other_shapes_are_an_error(self):
        def f(row):
            return row if row[0].item() > -10 else row[:1]

        mapped = self.settled(f, ROWS)
        with pytest.raises(ValueError, match="shape"):
            mapped(torch.cat([ROWS, ROWS[:1] - 20]))

    def test_tensors_of_inference_mode(self):
        mapped = self.settled(asks, XS)
        with torch.inference_mode():
            xs = XS.clone()
            torch.testing.assert_close(mapped(xs), XS * 2)
        torch.testing.assert_close(mapped(xs), XS * 2)

    def test_tangents_of_the_users_own(self):
        mapped = self.settled(asks, XS)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(mapped(forward_ad.make_dual(XS, XS + 1)))
        torch.testing.assert_close(found.tangent, (XS + 1) * 2)

    def test_numbers_that_add_up_beside_rows_that_are_written(self):
        def f(row):
            total = 0
            for x in row.tolist():
                total += x
            if total > 0:
                row[0] = total
            return row * total

        mapped = self.settled(f, ROWS.clone())
        rows, expected = ROWS.clone(), ROWS.clone()
        results = torch.stack([f(row) for row in expected])
        torch.testing.assert_close(mapped(rows), results)
        torch.testing.assert_close(rows, expected)

    def test_what_is_written_with_a_history(self):
        weight = torch.ones(ROWS.shape[1], requires_grad=True)

        def f(row):
            if row[0].item() > -10:
                row = row.clone()
                row += weight
            return row

        mapped = self.settled(f, ROWS)
        (found,) = torch.autograd.grad(mapped(ROWS).sum(), weight)
        torch.testing.assert_close(found, torch.full_like(weight, len(ROWS)))

    @pytest.mark.counted
    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("word", [grad, grad_and_value])
    def test_gradients_are_those_of_autograd(self, word, number, monkeypatch):
        def f(x, y):
            if y.sum().item() > 1:
                return x * x * y.prod()
            return x * 3 if x.item() > 0.6 else torch.tensor(2.0)  # without history for some

        def one(x, y):
            given = [x, y]
            given[number] = own = given[number].clone().requires_grad_()
            value = f(*given)
            if not value.requires_grad:
                return torch.zeros_like(own), value
            (found,) = torch.autograd.grad(value, own, allow_unused=True)
            return torch.zeros_like(own) if found is None else found, value.detach()

        xs = torch.linspace(-2, 2, 5)
        truth = [*zip(*map(one, xs, ROWS), strict=True)]
        mapped = self.settled(f, xs, ROWS, word=lambda f: word(f, number))
        with monkeypatch.context() as patched:
            patched.setattr("forall._api.vmap.VmapSpec.run", lambda *_: pytest.fail("looked at"))
            found = mapped(xs, ROWS)
        with torch.no_grad():
            again = mapped(xs, ROWS)
        with torch.inference_mode():
            inferred = mapped(xs, ROWS)
        with torch.inference_mode(), torch.enable_grad():
            both = mapped(xs, ROWS)
        for results in (found, again, inferred, both):
            for result, column in zip(tree_leaves(results), truth, strict=False):
                torch.testing.assert_close(result, torch.stack(column))
                assert not result.requires_grad

    def test_gradients_of_what_has_history_keep_it(self):
        def f(x):
            return x * x * x if x.item() > 0 else x * x

        mapped = self.settled(f, XS, word=grad)
        xs = XS.clone().requires_grad_()
        mapped(xs)
        (found,) = torch.autograd.grad(mapped(xs).sum(), xs)
        torch.testing.assert_close(found, torch.where(XS > 0, 6 * XS, 2.0))

    def test_values_that_have_no_gradient_are_told(self):
        def f(x, shape):
            value = x * 2 if x.item() > -10 else x
            return value.reshape(shape) if shape else value

        mapped = self.settled(f, XS, 0, word=grad, in_dims=(0, None))
        with pytest.raises(RuntimeError, match="must return a scalar"):
            mapped(XS, 1)
        with pytest.raises(RuntimeError, match="only floating"):
            mapped(XS.long(), 0)

    def test_a_word_among_the_arguments(self):
        def f(x, how, scale):
            return x * scale if how == "scaled" and x.item() > -10 else x

        mapped = self.settled(f, XS, "scaled", 2.0, in_dims=(0, None, None))
        torch.testing.assert_close(mapped(XS, "scaled", 3.0), XS * 3)
        torch.testing.assert_close(mapped(XS, "not", 3.0), XS)


def listed(row):
    best = sorted(row.tolist())[-2:]
    return torch.tensor(best) * 2


def test_many_examples_that_stay_with_the_loop_are_told_once(monkeypatch):
    never_together(monkeypatch)
    monkeypatch.setattr(loop_or_batch, "_WORTH_A_WORD", 0.0)
    monkeypatch.setattr(loop_or_batch, "_SHARE", 1e-6)  # a try that was late is soon made again
    monkeypatch.setattr(loop_or_batch, "_told", weakref.WeakSet())
    many = ROWS.repeat(10, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            torch.testing.assert_close(vmap(listed)(many), by_loop(listed, many))
    (text,) = [str(w.message) for w in told if w.category is forall.PerformanceWarning]
    assert "vmap(listed)" in text
    assert "examples   50" in text
    assert "best = sorted(row.tolist())[-2:]" in text
    assert "torch.where" in text


def test_few_examples_that_stay_with_the_loop_are_no_concern(monkeypatch):
    never_together(monkeypatch)
    monkeypatch.setattr(loop_or_batch, "_told", weakref.WeakSet())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            vmap(listed)(ROWS)
    assert listed.__code__ not in loop_or_batch._told


def test_what_records_calls_leaves_those_alone_that_are_faster_as_the_loop(monkeypatch):
    """A recorder would have them run together, however long that takes."""
    monkeypatch.setattr(config, "strategy", "measured")
    monkeypatch.setattr(config, "replay", True)
    monkeypatch.setattr(config, "patience", 0.0)
    monkeypatch.setattr(loop_or_batch, "_WORTH", inf)
    mapped = vmap(listed)
    mapped(ROWS)
    ran = []
    original = loop_or_batch._try_together
    monkeypatch.setattr(loop_or_batch, "_try_together", lambda *a: ran.append(1) or original(*a))
    monkeypatch.setattr(
        "forall._api.execution.strategy._run_diverging",
        lambda *_, **__: pytest.fail("run together"),
    )
    for _ in range(20):
        torch.testing.assert_close(mapped(ROWS), by_loop(listed, ROWS))
    assert not ran


def test_replay_gives_way_to_a_loop_that_is_faster():
    times = loop_or_batch.CallTimes()
    times.note_seconds(1e-6)
    assert not times.is_slow_to_replay()
    times.note_replay(1e-3)
    assert times.is_slow_to_replay()
    times.note_replay(1e-7)
    assert not times.is_slow_to_replay()


def of_pythons_library(x):
    a = x.item()
    edges = [-1.0, 0.0, 1.5]
    heap = [a, 2 * a, 0.5]
    heapq.heapify(heap)
    counts = collections.Counter(int(a) for _ in range(3))
    queue = collections.deque([a])
    queue.appendleft(heapq.heappop(heap))
    middle = statistics.median(queue)
    word = "".join(chr(97 + c) for c in range(bisect.bisect(edges, a)))
    return x * middle + len(word) + counts[int(a)] + sum(itertools.chain(heap, [1.0]))


KEPT_HEAP = [1.0, 2.0]


@pytest.mark.parametrize("f", [of_pythons_library], ids=lambda f: f.__name__)
def test_pythons_own_library_only_computes(f):
    assert find_pure_bindings(f) is not None
    for _ in range(3):
        torch.testing.assert_close(vmap(f)(XS), by_loop(f, XS))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: heapq.heappush(KEPT_HEAP, x.item()),
        lambda x: bisect.insort(KEPT_HEAP, x.item()),
        lambda x: random.random() * x,
        lambda x: time.time() * x,
        lambda x: collections.ChainMap({}),
    ],
    ids=["heap", "insort", "random", "time", "other"],
)
def test_what_of_pythons_library_does_more_is_told_apart(f):
    assert find_pure_bindings(f) is None


def test_a_function_of_the_library_that_was_replaced_is_not_trusted(monkeypatch):
    kept = []
    monkeypatch.setattr(heapq, "nlargest", lambda n, values: kept.append(n) or sorted(values)[-n:])
    assert find_pure_bindings(lambda x: torch.tensor(heapq.nlargest(2, x.tolist()))) is None


torch.manual_seed(0)
NET = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.5)
).eval()


def by_layers(row):
    hidden = NET(row[None])[0]
    return hidden * 2 if hidden.sum() > 0 else hidden - NET[0].bias


def by_attribute(row):
    return NET._modules["0"](row) if row.sum() > 0 else row


def test_layers_that_do_not_train_only_compute():
    assert find_pure_bindings(by_layers) is not None
    for _ in range(3):
        torch.testing.assert_close(vmap(by_layers)(ROWS), by_loop(by_layers, ROWS))

    def gradients(run):
        return torch.autograd.grad(run(by_layers, ROWS).sum(), [*NET.parameters()])

    for _ in range(3):
        found = gradients(lambda f, rows: vmap(f)(rows))
        torch.testing.assert_close(found, gradients(by_loop))


def trains():
    NET.train()


def is_hooked():
    NET[0].register_forward_hook(lambda *_: None)


def is_pre_hooked():
    NET[2].register_forward_pre_hook(lambda *_: None)


def has_another_forward():
    NET[2].forward = lambda x: x


def grows():
    NET.append(torch.nn.Dropout())


def has_another_layer():
    NET[2] = torch.nn.ReLU(inplace=True)


@pytest.mark.parametrize(
    "change",
    [trains, is_hooked, is_pre_hooked, has_another_forward, grows, has_another_layer],
    ids=lambda f: f.__name__,
)
def test_layers_that_come_to_do_more_are_seen(change, monkeypatch):
    net = copy.deepcopy(NET)
    monkeypatch.setitem(by_layers.__globals__, "NET", net)
    bindings = find_pure_bindings(by_layers)
    assert bindings.hold(by_layers)
    change()
    if change is not grows:
        assert find_pure_bindings(by_layers) is None
    assert not bindings.hold(by_layers)


def test_hooks_of_all_modules_are_seen():
    bindings = find_pure_bindings(by_layers)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not bindings.hold(by_layers)
        assert find_pure_bindings(by_layers) is None
    finally:
        handle.remove()
    assert bindings.hold(by_layers)


class Own(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Dropout(),
        torch.nn.BatchNorm1d(4),
        torch.nn.LSTM(4, 4).eval(),
        torch.nn.LazyLinear(4),
        torch.nn.ReLU(inplace=True),
        torch.nn.Embedding(3, 4, max_norm=1.0),
        torch.nn.RReLU(),
        Own(4, 4),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_layers_that_do_more_are_told_apart(module):
    assert find_pure_bindings(lambda x: module(x)) is None


def _ask_the_time():
    assert stack.late is not None
    stack.late()


def test_of_two_deadlines_each_is_kept():
    with loop_or_batch._TimeLimit(inf):
        assert stack.late is None
        with pytest.raises(TimeExceeded), loop_or_batch._TimeLimit(-1):
            with loop_or_batch._TimeLimit(1000):
                _ask_the_time()
        with loop_or_batch._TimeLimit(1000):
            outer = stack.late
            with loop_or_batch._TimeLimit(inf):
                assert stack.late == outer
            with pytest.raises(TimeExceeded), loop_or_batch._TimeLimit(-1):
                _ask_the_time()
            assert stack.late == outer
            _ask_the_time()
    assert stack.late is None
