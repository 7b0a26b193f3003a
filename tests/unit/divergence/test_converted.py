"""Converted functions give what the loop gives, lanes apart or not; refusals say where and why."""

import linecache
import traceback
from pathlib import Path
from runpy import run_path

import pytest

TOY = run_path(str(Path(__file__).parent / "toy.py"))
runtime = TOY["runtime"]
X = [0.7, -0.5, 0.3, 0.1, -1.7, 3.2]


def collatz(n):
    path = []
    while n != 1:
        path.append(n)
        n = n // 2 if n % 2 == 0 else 3 * n + 1
    return len(path), path


def alias_of_a_tensor(x):
    y = x
    if x > 0:
        y = 2 * x
    y += 1
    return x, y


def alias_of_a_list(x):
    low, high = [], []
    target = high if x > 0.2 else low
    target.append(x)
    if x > 1:
        high.append(x * 2)
    return low, high, len(high)


def for_else(x):
    for k in range(5):  # noqa: B007 - read after the loop
        if x > 2:
            break
        if x < -1:
            return x
        x = x + 0.5
    else:
        x = x * 10
    return x, k  # pyright: ignore[reportPossiblyUnboundVariable]


def nonlocal_counter(x):
    count = 0

    def step(v):
        nonlocal count
        if v > 0.2:
            count += 1
        return v * 0.5

    while x > 0.05:
        x = step(x)
    return x, count


def filtered(x):
    return sum(filter(lambda y: y > 0.4, [x, x * x])) + sum(y for y in [x, x + 1] if y > 0.2)


@pytest.mark.parametrize(
    "f", [alias_of_a_tensor, alias_of_a_list, for_else, nonlocal_counter, filtered]
)
def test_lanes_part_and_meet(f):
    assert TOY["close"](TOY["together"](f, X), TOY["each"](f, X))


def test_lists_of_differing_length():
    n = [1, 2, 3, 7, 6, 27]
    assert TOY["together"](collatz, n) == TOY["each"](collatz, n)


def caught(x):
    try:
        return 1 / x
    except ZeroDivisionError:
        return x


def test_a_refusal_says_where_and_why():
    TOY["use_toy"]()
    refused = runtime.convert(caught)
    assert isinstance(refused, runtime.Refusal)
    assert refused.reason == "try .. except"
    line = caught.__code__.co_firstlineno + 1
    assert refused.place == f"{__file__}:{line}"


def fails(x):
    if x > 1:
        y = x * 2
        raise ValueError(y)
    return x


def test_a_traceback_shows_the_users_line():
    with pytest.raises(ValueError) as raised:
        TOY["together"](fails, X)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (__file__, "fails", "raise ValueError(y)")
    assert runtime.thread.failed.ids == (5,)
    TOY["forget"]()


def test_the_report_names_lines_and_groups():
    report = runtime.thread.report = runtime.Report()
    try:
        TOY["together"](for_else, X)
    finally:
        runtime.thread.report = None
    first = report.divergences[0]
    assert (first.construct, first.sizes) == ("if", (1, 5))
    assert linecache.getline(first.file, first.line).strip() == "if x > 2:"


def state(thread):
    return thread.top, thread.entered, thread.diverged, thread.mixed, thread.loose, thread.runs


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, runtime.Unsplittable])
def test_whatever_ends_a_run_the_thread_is_as_it_was(error):
    def ends(x):
        kept = []
        if x > 1:
            kept.append(x)
        for _ in range(3):
            if x > 2:
                raise error
            x = x + 1
        return kept

    before = state(runtime.thread)
    with pytest.raises(error):
        TOY["together"](ends, X)
    assert state(runtime.thread) == before
    assert before[:4] == (None, [], 0, {})
