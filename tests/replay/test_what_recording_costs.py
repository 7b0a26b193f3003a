"""What recording costs where it is for nothing, counted in looks and attempts, and by a clock.

Whatever is new with each call, a call comes to cost what it costs as it is: attempts become rare,
and most calls are not even looked at. What comes back among it is replayed all the same.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from types import FunctionType

import pytest
import torch

import forall
from forall import grad, hessian, jacfwd, jacrev, jvp, vmap
from forall._programs import attempts, ran, recorder, recording, replay
from forall._programs import guards as guarding
from forall._transforms.replaying import calls_of

X = torch.linspace(0.1, 1, 6).reshape(2, 3)


@dataclasses.dataclass
class Options:
    k: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    k: float = 2.0


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 2.0


def scaled(x, o):
    return (x * o.k).sum()


def by_function(x, f):
    return f(x).sum()


def by_dict(x, d):
    return sum((x * v).sum() for v in d.values())


def by_length(x):
    return (x * x).sum()


class Holder:
    w = torch.ones(3)


def by_captured(x):
    return (x * Holder.w).sum()


def _fresh(i):
    Holder.w = torch.full((3,), float(i))
    return (X[0],)


_EVER_NEW = {
    "objects": (scaled, lambda i: (X[0], Options())),
    "objects with slots": (scaled, lambda i: (X[0], Slotted())),
    "objects that live on": (scaled, lambda i, kept=[]: (X[0], kept.append(Options()) or kept[-1])),
    "modules": (scaled, lambda i: (X[0], Scale())),
    "lambdas": (by_function, lambda i: (X[0], lambda x: x * 2)),
    "numbers": (lambda x, k: (x * k).sum(), lambda i: (X[0], float(i))),
    "texts": (lambda x, s: (x * len(s)).sum(), lambda i: (X[0], f"s{i}")),
    "keys": (by_dict, lambda i: (X[0], {f"k{i}": 2.0})),
    "tensors in a dict": (by_dict, lambda i: (X[0], {f"k{i}": X[1]})),
    "shapes": (by_length, lambda i: (torch.ones(i + 1),)),
    "captured tensors": (by_captured, _fresh),
    "two classes": (scaled, lambda i: (X[0], Options() if i % 2 else Slotted())),
}
_WAYS = {
    "grad": grad,
    "vmap(grad)": lambda f: lambda x, o: vmap(lambda x: grad(f)(x, o))(x[None]),
    "jacrev": jacrev,
}


@pytest.fixture
def counted(monkeypatch):
    """Replay is on from the first call, and its attempts and looks are counted."""
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    counts = {"attempts": 0, "looks": 0}
    first, kind_of = replay.Replays._first, replay.kind_of

    def attempted(self, *given):
        counts["attempts"] += 1
        return first(self, *given)

    def looked(*given):
        counts["looks"] += 1
        return kind_of(*given)

    monkeypatch.setattr(replay.Replays, "_first", attempted)
    monkeypatch.setattr(replay, "kind_of", looked)
    return counts


def _once(f):
    """The same function, of which nobody has seen a call."""
    return FunctionType(f.__code__, f.__globals__, f.__name__)


def _calls(g, make, count):
    for i in count:
        g(*make(i))


@pytest.mark.parametrize("name", _EVER_NEW)
def test_what_is_new_with_each_call_is_given_up(name, counted):
    f, make = _EVER_NEW[name]
    g = grad(_once(f))
    _calls(g, make, range(800))
    before = dict(counted)
    _calls(g, make, range(800, 2600))
    assert counted["looks"] - before["looks"] <= 1800 // 5
    # What has slots and no weak references cannot be told from what lived where it lives.
    most = attempts.ALLOWED + 6 if name in ("objects with slots", "two classes") else 14
    assert counted["attempts"] <= most
    _calls(g, make, range(2600, 3400))
    assert counted["attempts"] <= most


@pytest.mark.parametrize("way", _WAYS)
def test_new_objects_are_given_up_under_each_transform(way, counted):
    g = _WAYS[way](_once(scaled))
    _calls(g, lambda i: (X[0], Options()), range(300))
    assert counted["attempts"] == 0
    assert counted["looks"] <= 200


@pytest.mark.parametrize("name", ["objects", "lambdas", "shapes", "keys", "captured tensors"])
def test_functions_made_anew_of_what_is_new_are_given_up(name, counted):
    f, make = _EVER_NEW[name]

    def called(*given):
        return grad(lambda x, *rest: f(x, *rest))(*given)

    _calls(called, make, range(600))
    assert counted["attempts"] <= attempts.ALLOWED
    before = counted["attempts"]
    _calls(called, make, range(600, 1200))
    assert counted["attempts"] - before <= 2


@pytest.mark.parametrize("each", [2, 3, 10, 40])
def test_a_kind_that_comes_back_among_new_ones_is_replayed(each, counted):
    g, same = grad(_once(scaled)), Options(3.0)
    hits = []
    for i in range(40 * each):
        o = Options(float(i)) if i % each else same
        (found,) = {*g(X[0], o).tolist()}
        assert found == o.k
        hits.append(calls_of(g).replays.hits if calls_of(g).replays else 0)
    assert hits[-1] >= 30
    assert counted["attempts"] <= 3


def test_a_kind_that_comes_back_later_is_replayed_later(counted):
    g, same = grad(_once(scaled)), Options(3.0)
    _calls(g, lambda i: (X[0], Options()), range(2000))
    assert counted["attempts"] == 0
    _calls(g, lambda i: (X[0], same), range(1500))
    assert calls_of(g).replays.hits > 300


@pytest.mark.parametrize("count", [2, 5, 16, 30])
def test_kinds_in_turn_are_all_replayed(count, counted):
    g = grad(_once(by_length))
    kinds = [torch.ones(i + 1) for i in range(count)]
    _calls(g, lambda i: (kinds[i % count],), range(10 * count))
    assert counted["attempts"] <= count
    assert calls_of(g).replays.hits >= 5 * count


@pytest.mark.parametrize("count", [100, 300])
def test_more_kinds_in_turn_than_are_kept_do_not_push_each_other_out(count, counted):
    g = grad(_once(by_length))
    kinds = [torch.ones(i + 1) for i in range(count)]
    _calls(g, lambda i: (kinds[i % count],), range(12 * count))
    limit = attempts.ALLOWED + calls_of(g).replays.hits // attempts.WORTH + 10
    assert counted["attempts"] <= limit
    before = counted["attempts"]
    _calls(g, lambda i: (kinds[i % count],), range(12 * count))
    assert counted["attempts"] - before <= 24  # only those that find room


def test_objects_that_are_used_a_few_times_each_are_given_up(counted):
    g, made = grad(_once(scaled)), []

    def make(i):
        if not i % 4:
            made.append(Options(float(i)))
        return X[0], made[-1]

    _calls(g, make, range(2000))
    assert counted["attempts"] <= attempts.ALLOWED + 2000 // attempts.WORTH
    before = counted["attempts"]
    _calls(g, make, range(2000, 4000))
    assert counted["attempts"] - before <= 2000 // attempts.WORTH


def test_one_kind_that_changes_leaves_another_alone(counted):
    class State:
        n = 0.0

    def f(x, changes):
        return (x * State.n).sum() if changes else (x * 2).sum()

    g = grad(f)
    for i in range(400):
        State.n = float(i)
        (found,) = {*g(X[0], i % 2).tolist()}
        assert found == (State.n if i % 2 else 2)
    assert counted["attempts"] <= 16 + calls_of(g).replays.hits // 8


def test_what_changes_rarely_is_recorded_anew_each_time(counted):
    class State:
        n = 0.0

    g = grad(lambda x: (x * State.n).sum())
    for i in range(1000):
        if not i % 100:
            State.n = float(i)
        assert {*g(X[0]).tolist()} == {State.n}
    assert calls_of(g).replays.hits > 900


def test_functions_that_raise_at_times_are_not_recorded_for_ever(counted):
    def f(x, n):
        if n % 2:
            raise ValueError(n)
        return (x * n).sum()

    g = grad(f)
    for i in range(600):
        n = i % 2
        try:
            g(X[0], n)
        except ValueError:
            assert n
    assert counted["attempts"] <= attempts.ALLOWED + calls_of(g).replays.hits // attempts.WORTH + 5


def test_objects_are_not_held_for_having_been_seen(counted):
    from weakref import ref

    g, o = grad(_once(scaled)), Options()
    g(X[0], o)
    g(X[0], Options())
    g(X[0], o)
    gone = ref(o)
    g(X[0], Options())
    del o
    if calls_of(g).replays.known:  # a program holds what it was recorded of
        gc.collect()
    else:
        assert gone() is None


# --- by a clock --------------------------------------------------------------------------------


class Clock:
    """Counts what recording does as its time, and what a call does besides as next to none."""

    def __init__(self, monkeypatch, cost):
        self.now = 0.0
        self.cost = cost
        for module in (attempts, guarding, ran, recorder, recording, replay):
            monkeypatch.setattr(module, "clock", self)
        purity = sys.modules["forall._programs.purity"]
        monkeypatch.setattr(purity, "clock", self)

    def __call__(self):
        self.now += self.cost  # whoever asks has done some work
        return self.now


def chain(x):
    for _ in range(300):
        x = (x * 1.001 + 0.1).sin()
    return x.sum()


def perceptron(x):
    for w in WEIGHTS:
        x = (w @ x).tanh()
    return x.sum()


WEIGHTS = [torch.eye(3) * 0.9 for _ in range(4)]
_CALLS = {
    "grad": lambda: (grad(chain), (X[0],)),
    "vmap(grad)": lambda: (vmap(grad(perceptron)), (X,)),
    "hessian": lambda: (hessian(perceptron), (X[0],)),
    "vmap(jacfwd)": lambda: (vmap(jacfwd(perceptron)), (X,)),
    "jvp": lambda: (vmap(lambda x: jvp(perceptron, (x,), (x,))), (X,)),
    "nested": lambda: (vmap(grad(lambda x: vmap(grad(perceptron))(x[None]).sum())), (X,)),
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("cost", [1e-4, 1e-3, 1e-2, 0.2])
def test_no_call_records_for_longer_than_it_may(name, cost, monkeypatch):
    g, given = _CALLS[name]()
    forall.config.replay = False
    wanted = g(*given)
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    clock = Clock(monkeypatch, cost)
    spent = []
    for _ in range(60):
        before = clock.now
        torch.testing.assert_close(g(*given), wanted, rtol=0, atol=0)
        spent.append(clock.now - before)
    # A call as it is takes the two looks at the clock around it; to find that it is late takes one.
    eager = 2 * cost
    assert max(spent) <= attempts.CALLS * eager + attempts.SLACK + 4 * cost


def test_a_recording_is_spread_over_calls(monkeypatch):
    g, given = grad(_once(perceptron)), (X[0],)
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    Clock(monkeypatch, 3e-3)
    seen = []
    for _ in range(40):
        g(*given)
        replays = calls_of(g).replays
        seen.append(replays and [type(k).__name__ for k in replays.known.values()])
    assert seen.count(["_Begun"]) >= 2
    assert seen[-1] == ["Recorded"]


def test_a_long_recording_is_given_up_and_each_call_is_the_functions(monkeypatch, counted):
    class Runs:
        n = 0

    def f(x):
        Runs.n += 1
        return chain(x)

    for func in (f, chain):
        g = grad(_once(func) if func is chain else f)
        Runs.n = 0
        Clock(monkeypatch, 1.0)
        for i in range(1, 101):
            g(X[0])
            assert Runs.n == (i if func is f else 0)
    assert not calls_of(g).replays.hits
    assert counted["attempts"] <= 16
    assert calls_of(g).replays.why is not None


def test_a_backward_pass_that_takes_too_long_leaves_the_users_history(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    w = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)

    def f(x):
        return chain(x * w)

    g = vmap(f)
    forall.config.replay = False
    (wanted,) = torch.autograd.grad(g(X).sum(), w)
    forall.config.replay = True
    clock = Clock(monkeypatch, 0.0)
    halted = []
    original = recorder.Recorder.halting

    def halting(self):
        clock.now += 1e6
        halted.append(self)
        return original(self)

    monkeypatch.setattr(recorder.Recorder, "halting", halting)
    for _ in range(12):
        (found,) = torch.autograd.grad(g(X).sum(), w)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert halted
    assert all(r.why == attempts.TOO_LONG for r in halted)


def test_garbage_is_collected_as_before_when_a_call_was_recorded(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    g = grad(perceptron)
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            for _ in range(6):
                g(X[0])
                assert gc.isenabled() is on
        finally:
            gc.enable()
        g = grad(lambda x: perceptron(x) * 2)
