"""What goes through a list sees what the list has by then, also where examples change it.

An iterator of Python's is at a place in a list. While the list is another one for some examples it
would see that of none.
"""

import itertools

import pytest
import torch

from divergence.programs import compiled
from divergence.test_random_programs import obstacles
from draws import make_generator
from forall import config, vmap
from forall._divergence import scalar_calls
from oracle import difference, loop

XS = torch.tensor([0.1, 2.0, 0.3, 1.5, -1.0], dtype=torch.float64)
BEFORE = {
    "as it is": "",
    "longer for some": "if a > 0.4: s.append(a)",
    "of another type for some": "s[0] = a * 2 if a > 0 else 7",
    "filtered": "s = [q for q in s if q > 0.2] or [1.0]",
    "a key of some": "if a > 0.4: d[7] = a",
    "one of two": "s = [a] if a > 0 else [a + 1, a]",
    "a new one for some": "if a > 0.4: s = [a, 1.0]",
    "filtered or another": "s = [q for q in s if q > 0.7] or [a]",
}
THROUGH = """
    e in s
    i, e in enumerate(s)
    e, _ in zip(s, range(9))
    _, e in zip(range(9), s)
    e in map(abs, s)
    e in reversed(s)
    e in list(s)
    e in filter(None, s)
    e in itertools.chain(s, [1.0])
    e in itertools.islice(s, 5)
    e in [q for q in s]
    e in d
    e in d.values()
    k, e in d.items()
    e in iter(s)
    e, _ in zip(itertools.cycle(s), range(5))
    e in itertools.accumulate(s)
    e in sorted(s)
    e in s[:]
    e, _ in itertools.pairwise(s)
    e, _ in itertools.zip_longest(s, d, fillvalue=2.0)
"""
CHANGES = [
    "s.append(0.5)", "s.append(a)", "len(s) > 1 and s.pop()", "s[-1] = a * 2", "s.clear()",
    "s.insert(0, a)", "d[0] = a * 3", "d[99] = 1.0; break", "d.pop(1, 0); break", "t = t + 1",
]  # fmt: skip
WHERE = ["if a > 0.5 and len(s) < 6:", "if len(s) < 7:", "if n == 1:"]
PROGRAM = """
import itertools
def f(a):
    a = a.item()
    s, t, n = [a, 0.5, a + 1], 0.0, 0
    d = dict(enumerate(s))
    {before}
    for {through}:
        e = e if isinstance(e, (int, float)) else e[0]
        t = t * 0.5 + e
        n += 1
        if n > 12: break
        {where}
            {change}
            a = a - 0.01
    return t, float(n), float(len(s)), sum(s), sum(d.values())
"""


def ends(f):
    try:
        return loop(f)(XS)
    except Exception:
        return None


@pytest.mark.sweep(16)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("through", [line.strip() for line in THROUGH.strip().splitlines()])
@pytest.mark.parametrize("is_scalar", [True, False], ids=["by example", "as written"])
def test_is_the_loops(through, before, is_scalar, monkeypatch):
    monkeypatch.setattr(config, "strategy", "together")
    if not is_scalar:
        monkeypatch.setattr(scalar_calls, "_may_diverge", lambda: False)
    for change, where in itertools.product(CHANGES, WHERE):
        parts = {"through": through, "before": BEFORE[before], "change": change, "where": where}
        text = PROGRAM.format(**parts)
        f = compiled(text, f"{parts}")
        truth = ends(f)
        if truth is not None:
            told = difference(vmap(f)(XS), truth)
            assert told is None, f"{told}\n{text}"


def test_what_is_caught_within_forall_leaves_lists_as_they_are(monkeypatch):
    monkeypatch.setattr(config, "strategy", "together")
    f = compiled(
        """
def f(a):
    a = a.item()
    s, t = [a, 0.5, a + 1], 0.0
    s[0] = a * 2 if a > 0 else 7
    for e in sorted(s):
        e = e if isinstance(e, (int, float)) else e[0]
        t = t + e
    return t, sum(s)
""",
        "numbers of two types",
    )
    assert difference(vmap(f)(XS), loop(f)(XS)) is None


# --- what nobody changes is gone through together, however long it is for each example


def _of_several_lengths(x):
    total = x
    for k in [i for i in range(4) if x > i - 1]:
        total = total + k * x
    return total


def _until_a_break(x):
    total = x
    for i, k in [(i, k) for i in range(4) for k in (1, 2) if x > i - k]:
        total = total + k * i
        if total > 2:
            break
    return total


def _two_at_once(x):
    steps, total = [x], x
    while steps[-1] < 3 and len(steps) < 6:
        steps.append(steps[-1] * 2 + 1)
    for n, (a, b) in enumerate(zip(steps, reversed(steps), strict=True)):
        total = total + n * a * b
    return total


def _moves(piles):
    return [(i, k) for i in range(len(piles)) for k in (1, 2) if piles[i] >= k]


def _play(piles, gain, low, high):
    moves = _moves(piles)
    if not moves:
        return gain, 1
    best, calls = -9.0, 1
    for i, k in moves:
        after = list(piles)
        after[i] -= k
        value, inner = _play(after, -gain * (i + 1), -high, -low)
        calls += inner
        if k * gain - value > best:  # noqa: PLR1730 - an `if` that parts
            best = k * gain - value
        if best > low:  # noqa: PLR1730
            low = best
        if low >= high:
            break
    return best, calls


def _game(x):
    piles = [int(x.item() > 0) + 1, int(x.item() > 1) + 1]
    best, calls = _play(piles, x, -9.0, 9.0)
    return best + calls


def _beams(x, width=2):
    beams, done = [(0.0, [1], x)], []
    while beams and len(done) < 2:
        found = []
        for score, path, y in beams:
            for step, (loss, z) in enumerate([(0.3, y.sin()), (0.2, y.cos() * 2)]):
                found.append((score - loss * abs(z.item()), [*path, step], z))
        found.sort(key=lambda entry: -entry[0])
        beams = []
        for entry in found[:width]:
            if entry[2] < 0.3 or len(entry[1]) > 4:
                done.append(entry)
            else:
                beams.append(entry)
    score, path, y = max(done, key=lambda entry: entry[0])
    return score * y + len(path) + sum(path)


TOGETHER = [_of_several_lengths, _until_a_break, _two_at_once, _game, _beams]


@pytest.mark.parametrize("f", TOGETHER, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_lists_of_several_lengths_are_gone_through_in_one_run(f, seed, monkeypatch):
    monkeypatch.setattr(config, "strategy", "together")
    xs = 3 * torch.rand(9, generator=make_generator(seed), dtype=torch.float64) - 1
    with obstacles() as met:
        assert difference(vmap(f)(xs), loop(f)(xs)) is None
    assert met == []
