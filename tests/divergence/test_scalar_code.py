"""Statements that compute with Python's own values: each example runs them as in the loop."""

from __future__ import annotations

import bisect
import heapq
import math
import statistics

import pytest
import torch

from forall import config, explain, grad, jacfwd, jvp, vmap
from forall._divergence import scalar_calls
from forall._divergence.frame import Frame
from oracle import loop, stack_trees

XS = torch.tensor([0.5, -1.25, 3.0, 2.0, -0.75, 3.0])
NS = torch.tensor([1, 6, 7, 0, 12, 6])
ROWS = torch.linspace(-2, 2, 24).sin().reshape(6, 4)
EDGES = [-1.0, 0.0, 1.0]
NAMES = {0: "zero", 1: "one", 6: "six"}
seen: list = []


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The names of the functions for one example that gave a result."""
    names = []

    def run(function, *args):
        found = scalar_calls.run_scalar_code(function, *args)
        if found is not None:
            names.append(function.__name__)
        return found

    monkeypatch.setattr(config, "strategy", "together")
    monkeypatch.setattr(Frame, "scalar", staticmethod(run))
    monkeypatch.setattr(scalar_calls, "_tries", {})
    return names


def by_loop(f, *args):
    return loop(f)(*args)


def agree(found, truth):
    if isinstance(truth, torch.Tensor):
        assert found.dtype == truth.dtype
        assert found.shape == truth.shape
        assert torch.equal(found.nan_to_num(9.25), truth.nan_to_num(9.25))
    elif isinstance(truth, dict):
        assert [*found] == [*truth]
        for key in truth:
            agree(found[key], truth[key])
    else:
        assert type(found) is type(truth)
        assert len(found) == len(truth)
        for a, b in zip(found, truth, strict=True):
            agree(a, b)


# --- what runs for one example after another ------------------------------------------------------


def collatz(x, n):
    n, steps = int(n) + 1, 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return torch.tensor(float(steps)) + x


def path(x, n):
    m, path = int(n) + 1, []
    while m != 1:
        m = m // 2 if m % 2 == 0 else 3 * m + 1
        path.append(m)
    return x + sum(path) / (len(path) + 1)


def largest(x, n):
    return torch.tensor(sorted(x.tolist())[-2:]) * 2 + n


def counted(x, n):
    counts = {}
    for value in x.tolist():
        sign = "up" if value > 0 else "down"
        counts[sign] = counts.get(sign, 0) + 1
    best = max(counts, key=lambda k: (counts[k], k))
    return torch.tensor([float(counts[best]), float(len(best))])


def bits(x, n):
    text = f"{n.item():05b}"
    return torch.tensor([float(c == "1") for c in text]) * x[0]


def texts(x, n):
    word = "".join(chr(97 + abs(int(v * 20)) % 26) for v in x.tolist())
    return x.sum() + float(sum(c in "aeiou" for c in word))


def root(x, n):
    try:
        return torch.tensor(math.sqrt(x.item()))
    except ValueError:
        return torch.tensor(-1.0)


def guarded_division(x, n):
    try:
        q = 12 / n.item()
    except ZeroDivisionError:
        q = 0.5
    else:
        q = q + 1
    finally:
        side = 2.0
    return x * q * side


def searched(x, n):
    for i, v in enumerate(x.tolist()):
        if v > 0.5:
            return x * i + v
    return -x


def left_early(x, n):
    total = 0.0
    for v in x.tolist():
        if v < -0.9:
            continue
        if total > 0.8:
            break
        total += v
    else:
        total = total * 10
    return x - total


def by_key(x, n):
    key = "abc"[min(int(n), 2)]
    scale = {"a": 1.0, "b": 2.0, "c": 0.5}[key]
    return x * scale + len(key)


def with_functions(x, n):
    def between(low, high):
        middle = (low + high) / 2
        if high - low < 0.25:
            return middle * weight
        return between(low, middle) + between(middle, high)

    top = abs(x.item())
    weight = 2.0
    return torch.tensor(between(0.0, top))


def recursive(x, n):
    return torch.tensor(float(_staircases(n.item())))


def _staircases(n):
    return 1 if n < 2 else _staircases(n - 1) + _staircases(n - 2)


def of_libraries(x, n):
    values = x.tolist()
    best = heapq.nlargest(2, values)
    return x - statistics.median(values) + bisect.bisect(EDGES, best[0]) + torch.tensor(best).sum()


def looked_up(x, n):
    name = NAMES.get(n.item(), "many")
    return {"zero": torch.sin, "one": torch.cos, "six": torch.exp, "many": torch.abs}[name](x)


def in_a_loop(x, n):
    y, k = x, int(n)
    for _ in range(3):
        if k % 2:
            k = 3 * k + 1
        else:
            k = k // 2
        y = y * 0.5 + k
    return y


def shapes(x, n):
    sizes = [s for s in x.shape if s > 1]
    weights = [v / len(sizes) for v in x.tolist() if v > 0] + [0.0]
    return x * sum(weights) + x.dim() + len(x)


def walrus(x, n):
    found = 0
    while (m := n.item() - found) > 3:
        found += 2
    return x * m + found


def two_lists(x, n):
    low, high = [], []
    for v in x.tolist():
        (low if v < 0 else high).append(v)
    return x * len(low) + sum(high)


def nested_lists(x, n):
    rows = [[v * k for k in range(3)] for v in x.tolist()]
    return torch.tensor(rows).sum(1)


def tuples(x, n):
    pairs = tuple((v, i) for i, v in enumerate(x.tolist()))
    value, place = max(pairs)
    return x * value + place


def texts_that_branch(x, n):
    mode = "up" if x[0] > 0 else "down"
    if mode.startswith("u"):
        return x.exp()
    return x * x


def conditional_texts(x, n):
    kind = "small" if abs(n.item()) < 7 else "large"
    note = kind.upper() + "!"
    return (x * len(note), n + len(kind))


def trees_of_results(x, n):
    values = sorted(x.tolist())
    return {"low": x * values[0], "middle": (torch.tensor(values), n * 2)}


def not_a_number(x, n):
    best = math.nan
    for v in x.tolist():
        if not v > 0.3:
            best = v if math.isnan(best) else min(best, v)
    return torch.tensor(best) + x


def infinite(x, n):
    bound = math.inf
    for v in x.tolist():
        bound = min(bound, v) if v > 0 else bound
    return x.clamp(max=bound)


def booleans(x, n):
    flags = [v > 0 for v in x.tolist()]
    every = all(flags) or not any(flags)
    return torch.tensor(flags) & torch.tensor(every)


def complex_numbers(x, n):
    z = complex(x[0].item(), x[1].item())
    for _ in range(3):
        z = z * z + 0.25 if abs(z) < 1 else z
    return torch.tensor(z)


def drawn_in(x, n):
    values = x.tolist()
    values.sort()
    values[0] = 5.0
    del_me = [*values, n.item()]
    return torch.tensor(del_me) + x.sum()


def nothing_left(x, n):
    names = [str(v) for v in x.tolist()]
    return x if names else -x


def of_one_row(x, n):
    return torch.tensor([v if v > 0 else -v for v in x.tolist()])


def sets(x, n):
    kinds = {int(v * 2) for v in x.tolist()}
    return x * len(kinds) + max(kinds)


ARE_ONE = [
    collatz, path, root, guarded_division, by_key, with_functions, recursive, in_a_loop, walrus,
    conditional_texts,
]  # fmt: skip
ARE_ROWS = [
    largest, counted, bits, texts, searched, left_early, of_libraries, looked_up, shapes,
    two_lists, nested_lists, tuples, texts_that_branch, trees_of_results, not_a_number, infinite,
    booleans, complex_numbers, drawn_in, nothing_left, of_one_row, sets,
]  # fmt: skip
CASES = [*[(f, XS) for f in ARE_ONE], *[(f, ROWS) for f in ARE_ROWS]]


@pytest.mark.parametrize(("f", "xs"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_is_the_loops(f, xs, ran):
    truth = by_loop(f, xs, NS)
    for _ in range(3):
        agree(vmap(f)(xs, NS), truth)
    assert ran, "the code did not run for one example after another"


@pytest.mark.parametrize(("f", "xs"), CASES, ids=[f.__name__ for f, _ in CASES])
@pytest.mark.parametrize("replay", [False, True])
def test_is_the_loops_in_any_way(f, xs, replay, monkeypatch):
    truth = by_loop(f, xs, NS)
    monkeypatch.setattr(config, "replay", replay)
    for strategy in ("measured", "loop", "together"):
        monkeypatch.setattr(config, "strategy", strategy)
        mapped = vmap(f)
        for _ in range(6):
            agree(mapped(xs, NS), truth)


@pytest.mark.parametrize("f", [of_libraries, searched, left_early, infinite, shapes])
def test_derivatives(f, ran):
    def loss(x, n):
        return (f(x, n) ** 2).sum()

    agree(vmap(grad(loss))(ROWS, NS), by_loop(grad(loss), ROWS, NS))
    agree(
        grad(lambda x: vmap(loss)(x, NS).sum())(ROWS),
        grad(lambda x: by_loop(loss, x, NS).sum())(ROWS),
    )
    both = vmap(lambda x, n: jvp(lambda y: f(y, n), (x,), (x.cos(),)))(ROWS, NS)
    agree(both, by_loop(lambda x, n: jvp(lambda y: f(y, n), (x,), (x.cos(),)), ROWS, NS))
    slopes = vmap(lambda x, n: jacfwd(lambda y: f(y, n))(x))(ROWS, NS)
    agree(slopes, by_loop(lambda x, n: jacfwd(lambda y: f(y, n))(x), ROWS, NS))
    assert ran


@pytest.mark.parametrize("f", [largest, searched, looked_up, counted])
def test_inside_of_another_vmap(f):
    xs, ns = torch.stack([ROWS, ROWS.flip(0)]), torch.stack([NS, NS.flip(0)])
    truth = stack_trees([by_loop(f, x, n) for x, n in zip(xs, ns, strict=True)])
    agree(vmap(vmap(f))(xs, ns), truth)


def test_where_only_some_examples_run(ran):
    def f(x, n):
        if x.sum() > 0:
            x = x * 2
            best = sorted(x.tolist())[2]
            return x / best
        return searched(x, n)

    agree(vmap(f)(ROWS, NS), by_loop(f, ROWS, NS))
    assert ran


# --- what is given back, and to whom --------------------------------------------------------------


def test_types_are_the_loops():
    kinds = []

    def f(x):
        n = int(x) if x > 0 else 0
        names = ["a", "b"][n % 2 == 0 : 2]
        kinds.append((type(n), type(names)))
        return x * len(names) + n

    agree(vmap(f)(XS), by_loop(f, XS))
    assert {*kinds} == {(int, list)}


def test_lists_of_other_lengths():
    def f(x):
        kept = [v for v in x.tolist() if v > 0]
        return torch.tensor(sum(kept)) + len(kept), x

    def returns(x):
        kept = [v for v in x.tolist() if v > 0]
        y = x * 2
        return y.sum() + torch.tensor([*kept, 0.0]).sum()

    agree(vmap(f)(ROWS), by_loop(f, ROWS))
    agree(vmap(returns)(ROWS), by_loop(returns, ROWS))


def test_numbers_of_two_types():
    def f(x):
        n = 0
        for v in x.tolist():
            n = max(n, v)
        return x * n, x.long() * n

    agree(vmap(lambda x: f(x)[0])(ROWS), by_loop(lambda x: f(x)[0], ROWS))


def test_ints_of_more_than_64_bits():
    def f(x, n):
        m = 1
        for k in range(int(n) + 60):
            m = m * 2 + k % 2
        return x * float(m)

    agree(vmap(f)(XS, NS), by_loop(f, XS, NS))

    def remainder(x, n):
        m = 3 ** (int(n) * 5)
        rest = [d for d in (7, 11) if m % d]
        return x * (m % 1000) + len(rest)

    agree(vmap(remainder)(XS, NS), by_loop(remainder, XS, NS))


def test_one_list_under_two_names():
    def f(x):
        a = b = [v for v in x.tolist() if v < 9]
        y = x * 2
        a.append(1.0)
        return y + len(b)

    agree(vmap(f)(ROWS), by_loop(f, ROWS))


def test_a_list_from_before_that_changes():
    def f(x):
        values = []
        y = x.exp()
        for v in x.tolist():
            values.insert(0, v if v > 0 else -v)
        z = y * 2
        return z + sum(values) + len(values)

    def given(x, values):
        y = x.exp()
        for v in x.tolist():
            values.insert(0, v if v > 0 else -v)
        return y + sum(values)

    agree(vmap(f)(ROWS), by_loop(f, ROWS))
    agree(vmap(lambda x: given(x, []))(ROWS), by_loop(lambda x: given(x, []), ROWS))


def test_what_others_see_is_left_as_it_is(ran):
    seen.clear()

    def f(x):
        n = 0
        while n < int(abs(x) * 2):
            n += 1
            seen.append(n)
        return x * n

    truth = by_loop(f, XS)
    assert seen
    agree(vmap(f)(XS), truth)
    assert not ran


def test_names_of_functions_around():
    def f(x):
        n = 0

        def step():
            nonlocal n
            n += 1
            return n

        while step() < int(abs(x) * 3):
            pass
        return x * n

    agree(vmap(f)(XS), by_loop(f, XS))


def test_a_function_that_reads_a_name_later():
    def f(x):
        k = 1

        def times(v):
            return v * k

        y = x * 2
        k = 3 if x > 0 else 5
        total = times(y)
        k = [7, 8][x > 1]
        return total + times(x)

    agree(vmap(f)(XS), by_loop(f, XS))


def test_a_name_that_only_some_examples_have():
    def f(x):
        for v in [1.0, 2.0, 3.0]:
            if v > x.item():
                first = v
                break
        y = x * 2
        return y + first if x < 3 else y  # pyright: ignore[reportPossiblyUnboundVariable]

    agree(vmap(f)(XS), by_loop(f, XS))

    def never(x):
        for v in [1.0, 2.0]:
            if v > x.item():
                first = v
        return x + first  # pyright: ignore[reportPossiblyUnboundVariable]

    with pytest.raises(UnboundLocalError):
        by_loop(never, XS)
    with pytest.raises(UnboundLocalError):
        vmap(never)(XS)


def test_errors_are_the_loops():
    def f(x):
        values = [1.0, 2.0, 3.0, 4.0]
        n = [int(x * 2), 0][x < 0]
        return x * values[n]

    with pytest.raises(IndexError, match="list index out of range"):
        by_loop(f, XS)
    with pytest.raises(IndexError, match="list index out of range"):
        vmap(f)(XS)
    agree(vmap(f)(XS.clamp(max=1.5)), by_loop(f, XS.clamp(max=1.5)))

    def raised(x):
        if [v for v in x.tolist() if v > 0.95]:
            raise KeyError("large")
        return x

    with pytest.raises(KeyError, match="large"):
        vmap(raised)(ROWS)


def test_captured_tensors_and_what_changes():
    scale = torch.tensor(2.0)
    factors = [1.0, 2.0]

    def f(x):
        total = 0.0
        for v in x.tolist():
            total += v * scale.item() if v > 0 else factors[0]
        return x + total

    agree(vmap(f)(ROWS), by_loop(f, ROWS))
    scale.fill_(3.0)
    factors[0] = 5.0
    agree(vmap(f)(ROWS), by_loop(f, ROWS))


def test_tensors_that_are_written_meanwhile():
    def f(x):
        y = x.clone()
        first = max(y.tolist())
        y[0] = 10.0
        second = max([v for v in y.tolist() if v > 1])
        return x * first + second

    agree(vmap(f)(ROWS), by_loop(f, ROWS))


def test_tensors_that_are_written_in_the_same_statement():
    def f(x):
        x = x.clone()
        return x.mul_(2) + float(f"{x[0].item():.3f}")

    def doubled(x):
        return x.mul_(2).sum()

    def g(x):
        x = x.clone()
        return doubled(x) + len(f"{x[0].item():.3f}") + max([v for v in x.tolist() if v < 9])

    agree(vmap(f)(ROWS), by_loop(f, ROWS))
    agree(vmap(g)(ROWS), by_loop(g, ROWS))


def test_what_is_returned_out_of_a_loop(ran):
    def sliced(x):
        i = v = 99
        for i, v in enumerate(x.tolist()):
            if v > 0.4:
                return x[i : i + 1].sum() + x.narrow(0, start=i, length=1)[0]
        return x.sum()

    def chosen(x):
        i = v = 1
        y = x * 2
        for i, v in enumerate(x.tolist()):
            if v > 0.4:
                return y * i if v > 0.7 else y + v
        return y - i

    def keyed(x):
        i = v = 0
        for i, v in enumerate(x.tolist()):
            if v < -0.4:
                return x[None, i : i + 2].sum(dim=-1).clamp(max=v)[0]
        return x[0] * v * i

    for f in (sliced, chosen, keyed):
        agree(vmap(f)(ROWS), by_loop(f, ROWS))
    assert ran


def test_an_argument_bound_anew_and_by_other_means():
    def f(x, e):
        e = int(e)
        try:
            k = [1, 2, 3][e]
        except IndexError as e:
            k = len(str(e))
        return x * k

    def g(x, n):
        n = [n.item(), 2]
        while n[0] > 2:
            n[0] = n[0] // 2
        n = n[0]
        return x * n

    agree(vmap(f)(XS, NS), by_loop(f, XS, NS))
    agree(vmap(g)(XS, NS), by_loop(g, XS, NS))


def test_slices_of_lists(ran):
    def f(x):
        values = x.tolist()
        n = 0
        while n < 3 and values[n] > -0.3:
            n += 1
        return torch.tensor([*values[n:], *values[:n]]) * len(values[: n + 1])

    agree(vmap(f)(ROWS), by_loop(f, ROWS))
    assert ran


def test_a_matrix_row_by_row():
    def f(a):
        rows = a.tolist()
        order = sorted(range(len(rows)), key=lambda i: rows[i][0])
        return a[torch.tensor(order)]

    stacks = ROWS.reshape(2, 3, 4)
    agree(vmap(f)(stacks), by_loop(f, stacks))


@pytest.mark.parametrize("dim", [0, 1])
def test_examples_along_any_axis(dim, ran):
    agree(vmap(largest, (dim, 0))(ROWS.movedim(0, dim), NS), by_loop(largest, ROWS, NS))
    assert ran


def test_one_example_and_none():
    agree(vmap(largest)(ROWS[:1], NS[:1]), by_loop(largest, ROWS[:1], NS[:1]))


def test_chunks():
    agree(vmap(largest, chunk_size=4)(ROWS, NS), by_loop(largest, ROWS, NS))


def test_explain_tells_of_it():
    told = explain(vmap(collatz))(XS, NS)
    agree(told.result, by_loop(collatz, XS, NS))
    assert [place.text() for place in told.scalar] == ["n, steps = int(n) + 1, 0"]
    assert "otherwise for one example after another" in str(told)
