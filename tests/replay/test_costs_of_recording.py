"""What recording costs where it is for nothing, counted in looks and attempts, and by a clock.

Whatever is new with each call, a call comes to cost what it costs as it is: attempts become rare,
and most calls are not even looked at. What comes back among it is replayed all the same.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from io import StringIO
from threading import Thread
from types import FunctionType

import pytest
import torch

import forall
from forall import grad, hessian, jacfwd, jacrev, jvp, vmap
from forall._auto_replay import attempt_budget, policy
from forall._auto_replay.replayed_calls import get_transform_calls
from forall._jit import deadline
from forall._jit.cache import call_cache
from forall._jit.guards import build as guarding
from forall._jit.tracing import coverage, trace_call, tracer

pytestmark = pytest.mark.timed

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
def counted(at_once, monkeypatch):
    """The attempts and looks are counted, from the first call on."""
    counts = {"attempts": 0, "looks": 0}
    first, kind_of = policy.AutoReplayCache._try_recording, call_cache.make_call_key

    def attempted(self, *given):
        counts["attempts"] += 1
        return first(self, *given)

    def looked(*given):
        counts["looks"] += 1
        return kind_of(*given)

    monkeypatch.setattr(policy.AutoReplayCache, "_try_recording", attempted)
    monkeypatch.setattr(call_cache, "make_call_key", looked)
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
    most = attempt_budget.FREE_ATTEMPTS + 6 if name in ("objects with slots", "two classes") else 20
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
    assert counted["attempts"] <= attempt_budget.FREE_ATTEMPTS
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
        hits.append(get_transform_calls(g).replays.hits if get_transform_calls(g).replays else 0)
    assert hits[-1] >= 30
    assert counted["attempts"] <= 3


def test_a_kind_that_comes_back_later_is_replayed_later(counted):
    g, same = grad(_once(scaled)), Options(3.0)
    _calls(g, lambda i: (X[0], Options()), range(2000))
    assert counted["attempts"] == 0
    _calls(g, lambda i: (X[0], same), range(1500))
    assert get_transform_calls(g).replays.hits > 300


@pytest.mark.parametrize("count", [2, 5, 16, 30])
def test_kinds_in_turn_are_all_replayed(count, counted):
    g = grad(_once(by_length))
    kinds = [torch.ones(i + 1) for i in range(count)]
    _calls(g, lambda i: (kinds[i % count],), range(10 * count))
    assert counted["attempts"] <= count
    assert get_transform_calls(g).replays.hits >= 5 * count


@pytest.mark.parametrize(("count", "rounds"), [(100, 12), (300, 4)])
def test_more_kinds_in_turn_than_are_kept_do_not_push_each_other_out(count, rounds, counted):
    g = grad(_once(by_length))
    kinds = [torch.ones(i + 1) for i in range(count)]
    _calls(g, lambda i: (kinds[i % count],), range(rounds * count))
    limit = (
        attempt_budget.FREE_ATTEMPTS
        + get_transform_calls(g).replays.hits // attempt_budget.REPLAYS_PER_ATTEMPT
        + 10
    )
    assert counted["attempts"] <= limit
    before = counted["attempts"]
    _calls(g, lambda i: (kinds[i % count],), range(rounds * count))
    assert counted["attempts"] - before <= 24  # only those that find room


def test_objects_that_are_used_a_few_times_each_are_given_up(counted):
    g, made = grad(_once(scaled)), []

    def make(i):
        if not i % 4:
            made.append(Options(float(i)))
        return X[0], made[-1]

    _calls(g, make, range(1000))
    assert (
        counted["attempts"]
        <= attempt_budget.FREE_ATTEMPTS + 1000 // attempt_budget.REPLAYS_PER_ATTEMPT
    )
    before = counted["attempts"]
    _calls(g, make, range(1000, 2000))
    assert counted["attempts"] - before <= 1000 // attempt_budget.REPLAYS_PER_ATTEMPT


def test_kinds_that_all_see_what_changes_are_given_up(counted):
    class State:
        n = 0.0

    def f(x, changes):
        return (x * State.n).sum() if changes else (x * 2).sum()

    g = grad(f)
    for i in range(400):
        State.n = float(i)
        (found,) = {*g(X[0], i % 2).tolist()}
        assert found == (State.n if i % 2 else 2)
    assert counted["attempts"] <= attempt_budget.FREE_ATTEMPTS


def test_what_changes_rarely_is_recorded_anew_each_time(counted):
    class State:
        n = 0.0

    g = grad(lambda x: (x * State.n).sum())
    for i in range(1000):
        if not i % 100:
            State.n = float(i)
        assert {*g(X[0]).tolist()} == {State.n}
    assert get_transform_calls(g).replays.hits > 900


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
    assert (
        counted["attempts"]
        <= attempt_budget.FREE_ATTEMPTS
        + get_transform_calls(g).replays.hits // attempt_budget.REPLAYS_PER_ATTEMPT
        + 5
    )


def test_objects_are_not_held_for_having_been_seen(counted):
    from weakref import ref

    g, o = grad(_once(scaled)), Options()
    g(X[0], o)
    g(X[0], Options())
    g(X[0], o)
    gone = ref(o)
    g(X[0], Options())
    del o
    if get_transform_calls(g).replays.known:  # a program holds what it was recorded of
        gc.collect()
    else:
        assert gone() is None


# --- by a clock --------------------------------------------------------------------------------


class Clock:
    """Counts what recording does as its time, and what a call does besides as next to none."""

    def __init__(self, monkeypatch, cost):
        self.now = 0.0
        self.cost = cost
        for module in (deadline, guarding, coverage, tracer, trace_call, policy):
            monkeypatch.setattr(module, "clock", self)
        purity = sys.modules["forall._auto_replay.purity"]
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
    "grad": lambda: (grad(_once(chain)), (X[0],)),
    "vmap(grad)": lambda: (vmap(grad(perceptron)), (X,)),
    "hessian": lambda: (hessian(perceptron), (X[0],)),
    "vmap(jacfwd)": lambda: (vmap(jacfwd(perceptron)), (X,)),
    "jvp": lambda: (vmap(lambda x: jvp(perceptron, (x,), (x,))), (X,)),
    "nested": lambda: (vmap(grad(lambda x: vmap(grad(perceptron))(x[None]).sum())), (X,)),
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("cost", [1e-4, 1e-3, 1e-2, 0.2])
def test_no_call_records_for_longer_than_it_may(name, cost, at_once, monkeypatch):
    g, given = _CALLS[name]()
    forall.config.replay = False
    wanted = g(*given)
    forall.config.replay = True
    clock = Clock(monkeypatch, cost)
    # A call as it is takes the two looks at the clock around it; to find that it is late takes one.
    eager = 2 * cost
    for calls in range(60):
        before = clock.now
        torch.testing.assert_close(g(*given), wanted, rtol=0, atol=0)
        so_far = max(deadline.SECONDS_ALLOWED, calls * eager)
        assert clock.now - before <= deadline.EAGER_CALLS_ALLOWED * eager + so_far + 4 * cost
    assert get_transform_calls(g).replays.hits > 0 or cost > 1e-4


def test_what_takes_long_to_record_is_recorded_when_the_calls_have_taken_as_long(
    at_once, monkeypatch
):
    g, given = grad(_once(chain)), (X[0],)
    clock, cost = Clock(monkeypatch, 0.05), 0.05
    hits = 0
    for calls in range(1, 200):
        g(*given)
        hits = getattr(get_transform_calls(g).replays, "hits", 0)
        assert clock.now <= 3 * calls * 2 * cost + deadline.SECONDS_ALLOWED
    assert hits > 50


def test_what_takes_long_to_read_is_observed_instead(at_once, monkeypatch):
    read = policy.find_impurity

    def read_what_ran(guards, **how):
        return read(guards, **how) if guards.ran.seen else deadline.TOO_LONG

    monkeypatch.setattr(policy, "find_impurity", read_what_ran)
    g, x = grad(lambda x: x.sin().sum()), torch.randn(3)
    for _ in range(60):
        assert torch.equal(g(x), x.cos())
    assert get_transform_calls(g).hits


def test_a_recording_is_spread_over_calls(at_once, monkeypatch):
    g, given = grad(_once(perceptron)), (X[0],)
    Clock(monkeypatch, 6e-3)
    seen = []
    for _ in range(40):
        g(*given)
        replays = get_transform_calls(g).replays
        seen.append(replays and [type(k).__name__ for k in replays.known.values()])
    assert seen.count(["_UnfinishedReplay"]) >= 2
    assert seen[-1] == ["CacheEntry"]


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
        for i in range(1, 61):
            g(X[0])
            assert Runs.n == (i if func is f else 0)
    assert not get_transform_calls(g).replays.hits
    assert counted["attempts"] <= 16
    assert get_transform_calls(g).replays.why is not None


def test_a_backward_pass_that_takes_too_long_leaves_the_users_history(at_once, monkeypatch):
    w = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)

    def f(x):
        return chain(x * w)

    g = vmap(f)
    forall.config.replay = False
    (wanted,) = torch.autograd.grad(g(X).sum(), w)
    forall.config.replay = True
    clock = Clock(monkeypatch, 0.0)
    halted = []
    original = tracer.Tracer.halt_when_late

    def halting(self):
        clock.now += 1e6
        halted.append(self)
        return original(self)

    monkeypatch.setattr(tracer.Tracer, "halt_when_late", halting)
    for _ in range(12):
        (found,) = torch.autograd.grad(g(X).sum(), w)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert halted
    assert all(r.why == deadline.TOO_LONG for r in halted)


def test_garbage_is_collected_as_before_when_a_call_was_recorded(at_once, monkeypatch):
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


class Interrupted(BaseException):
    pass


def test_a_program_whose_making_was_interrupted_is_made_anew(at_once, monkeypatch):
    g = grad(_once(perceptron))
    original, times = trace_call.choose_calls, []

    def asking(program):
        times.append(1)
        if len(times) == 1:
            raise Interrupted
        yield from original(program)

    monkeypatch.setattr(trace_call, "choose_calls", asking)
    wanted, interrupted = None, 0
    for _ in range(30):
        try:
            found = g(X[0])
        except Interrupted:
            interrupted += 1
            continue
        wanted = found if wanted is None else wanted
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert interrupted == 1
    assert get_transform_calls(g).replays.hits > 10


def test_an_error_of_ours_in_a_later_step_is_not_the_users(at_once, monkeypatch):

    def asking(program):
        raise ZeroDivisionError("of ours")
        yield

    monkeypatch.setattr(trace_call, "choose_calls", asking)
    g = grad(_once(perceptron))
    for _ in range(12):
        g(X[0])
    assert get_transform_calls(g).replays.why == "its program cannot be made: of ours"


def test_threads_that_record_the_same_kinds_agree(at_once, monkeypatch):
    g = grad(_once(perceptron))
    points = [torch.linspace(0, 1, 3) * k for k in range(1, 5)]
    forall.config.replay = False
    wanted = [g(x) for x in points]
    forall.config.replay = True
    errors, before = [], sys.getswitchinterval()

    def calls():
        try:
            for i in range(40):
                found = g(points[i % 4])
                torch.testing.assert_close(found, wanted[i % 4], rtol=0, atol=0)
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-5)
    try:
        threads = [Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert gc.isenabled()


# --- what functions do besides ------------------------------------------------------------------


class Tally:
    n = 0


_LOG: list = []


def _effect(name):
    """Something that a function does besides, and how often that has happened."""
    box, told = {"n": 0}, StringIO()

    def by_class():
        Tally.n += 1

    def by_dict():
        box["n"] += 1

    def by_list():
        _LOG.append(1)

    def by_print():
        print("x", file=told)

    def by_attribute():
        vars(by_attribute)["n"] = vars(by_attribute).get("n", 0) + 1

    effects = {
        "class": (by_class, lambda: Tally.n),
        "dict": (by_dict, lambda: box["n"]),
        "list": (by_list, lambda: len(_LOG)),
        "print": (by_print, lambda: len(told.getvalue())),
        "attribute": (by_attribute, lambda: vars(by_attribute).get("n", 0)),
        "none": (lambda: None, lambda: 0),
    }
    return effects[name]


def _history(effect, raises, way, replay, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", replay)
    happen, count = _effect(effect)

    def f(x):
        happen()
        y = x.sin()
        if raises == "by value" and (x.sum() > 100).all():
            raise ValueError("large")
        if raises == "by shape" and x.shape[-1] == 4:
            raise ValueError("four")
        if raises == "an operator":
            y = y + torch.ones(3)
        happen()
        return y.cos().sum()

    g, found = way(f), []
    for i in range(16):
        x = torch.full((2, 3), 0.5) + i % 3
        if raises == "by value" and i in (3, 4, 7, 9, 12):
            x = x + 1000
        if raises in ("by shape", "an operator") and i in (2, 3, 5, 8, 11, 13):
            x = torch.ones(2, 4)
        before = count()
        try:
            result = g(x)
        except (ValueError, RuntimeError) as error:
            result = type(error).__name__
        found.append((count() - before, result))
    return found


_NESTS = {
    "vmap": vmap,
    "grad": lambda f: lambda x: grad(f)(x[0]),
    "vmap(grad)": lambda f: vmap(grad(f)),
    "vmap(hessian)": lambda f: vmap(hessian(f)),
    "jvp": lambda f: lambda x: jvp(f, (x[0],), (x[0],))[1],
    "anew": lambda f: lambda x: vmap(lambda x: f(x) * 2)(x),
    "vmap(jacrev(grad))": lambda f: vmap(jacrev(grad(f))),
}
_HISTORIES = [
    (effect, raises, nest)
    for i, effect in enumerate(["class", "dict", "list", "print", "attribute", "none"])
    for j, raises in enumerate(["never", "by value", "by shape", "an operator"])
    for k, nest in enumerate(_NESTS)
    if (i + j + k) % 4 == 0
]


@pytest.mark.parametrize("cost", [0.0, 3e-3])
@pytest.mark.parametrize(("effect", "raises", "nest"), _HISTORIES)
def test_effects_and_errors_happen_as_without_replay(
    effect, raises, nest, cost, at_once, monkeypatch
):
    wanted = _history(effect, raises, _NESTS[nest], False, monkeypatch)
    Clock(monkeypatch, cost)
    found = _history(effect, raises, _NESTS[nest], True, monkeypatch)
    for (times, result), (often, expected) in zip(found, wanted, strict=True):
        assert times == often
        if isinstance(expected, str):
            assert result == expected
        else:
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


class Ring:
    def __init__(self):
        self.own = self

    def __del__(self):
        Tally.n += 1


def test_what_garbage_runs_while_a_call_is_recorded_is_not_the_functions(at_once):
    def f(x):
        if x.shape[0] == 99:
            print("in doubt, so it has to be seen")
        return (x * 2).sum()

    g = grad(f)
    for _ in range(12):
        Ring()
        g(X[0])
    assert get_transform_calls(g).replays.unseen is not None
    assert get_transform_calls(g).replays.hits > 4
