"""`explain` of every transform: how a call ran, whether it was replayed, and why not."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import forall
from draws import HERE
from forall import explain, grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap
from forall._core import looped_operators
from oracle import same

X = torch.arange(1.0, 4.0)
REPLAYED = "replayed: the recorded program ran in the place of the function"


class Counter:
    def __init__(self):
        self.calls = 0
        self.shapes = []

    def count(self, x):
        self.calls += 1
        return x.sum()

    def note(self, x):
        self.shapes.append(x.shape)
        return x.sum()


HISTORY, LOG, CALLS, COUNTER = [], {"losses": []}, 0, Counter()


def scalar(x):
    return x.square().sum() * x[0]


def printing(x):
    print(end="")
    return x.square().sum()


def explain_often(transformed, *args):
    """Explain calls until they are replayed, and return the last explanation."""
    return [explain(transformed)(*args) for _ in range(8)][-1]


RETURNED = {
    "grad": grad,
    "grad_and_value": forall.grad_and_value,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "jacobian": forall.jacobian,
    "hessian": hessian,
    "hessian_diag": forall.hessian_diag,
    "laplacian": forall.laplacian,
    "per_example_grad_norm": lambda f: forall.per_example_grad_norm(f, in_dims=(0,)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_transform_is_explained_with_its_result(name, at_once):
    f = RETURNED[name](scalar)
    x = X.repeat(2, 1) if name == "per_example_grad_norm" else X
    wanted = f(x)
    e = explain(f)(x)
    same(e.result, wanted)
    assert e.ways == ("as it is",)
    e = explain_often(f, x)
    same(e.result, wanted)
    assert e.call == f"{name}(scalar)"
    assert (e.examples, e.divergences, e.groups) == (0, (), ())
    assert e.ways == (REPLAYED,)
    assert e.replay.endswith("calls so far")
    under = "" if HERE.type == "cpu" else f"; under default device {HERE.type}"
    assert f"{name}(scalar)(float32{[*x.shape]}{under}): " in e.program
    assert str(e).startswith(f"{name}(scalar)\n\nhow it ran\n    {REPLAYED}\n\nreplayed\n    ")


@pytest.mark.parametrize("name", sorted({*RETURNED} - {"per_example_grad_norm"}))
def test_a_call_that_is_not_replayed_tells_why_and_where(name, at_once):
    e = explain_often(RETURNED[name](printing), X)
    assert e.ways == ("as it is",)
    assert e.replay.startswith("no: printing uses print (")
    assert e.replay.endswith(f"test_explained_calls.py:{printing.__code__.co_firstlineno + 1})")
    assert e.program == ""


def append_to_a_list(x):
    HISTORY.append(len(HISTORY))
    return x.sum()


def append_to_a_list_in_a_dict(x):
    LOG["losses"].append(1)
    return x.sum()


def count_in_a_global(x):
    global CALLS  # noqa: PLW0603 - this is what is tested
    CALLS += 1
    return x.sum()


def count_in_an_attribute(x):
    COUNTER.calls += 1
    return x.sum()


def close_over_counts():
    calls, noted = 0, []

    def count(x):
        nonlocal calls
        calls += 1
        return x.sum()

    def note(x):
        noted.append(len(noted))
        return x.sum()

    return count, note


def count_in_an_own_attribute(x):
    own = count_in_an_own_attribute
    setattr(own, "calls", getattr(own, "calls", 0) + 1)  # noqa: B010 - else unknown to pyright
    return x.sum()


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (append_to_a_list, "the list HISTORY"),
        (append_to_a_list_in_a_dict, "the list LOG['losses']"),
        (count_in_a_global, "the global CALLS"),
        (count_in_an_attribute, "the attribute COUNTER.calls"),
        (close_over_counts()[0], "the variable calls"),
        (count_in_an_own_attribute, "an attribute of count_in_an_own_attribute"),
        (Counter().count, "the attribute .calls of a Counter"),
        (Counter().note, "the list .shapes of a Counter"),
    ],
)
def test_a_function_that_changes_state_tells_which(f, what, at_once):
    for transformed, x in ((grad(f), X), (vmap(grad(f)), X.repeat(2, 1))):
        for _ in range(8):
            transformed(x)
        assert explain(transformed)(x).replay == f"no: it changes Python's state: {what}"


def test_an_argument_that_no_key_can_have_is_told(at_once):
    f, x = grad(lambda x: x.to_dense().square().sum()), torch.eye(3).to_sparse()
    for _ in range(80):
        f(x)
    assert explain(f)(x).replay == "no: an argument of layout torch.sparse_coo"


def test_calls_of_which_no_two_are_alike_tell_so(at_once):
    """What a closure holds counts as given, so a list that grows makes each call one of a kind."""
    note = close_over_counts()[1]
    for transformed, xs in (
        (vmap(grad(note)), [X.repeat(2, 1)] * 80),
        (grad(lambda x: scalar(x)), [torch.ones(n) for n in range(1, 80)]),
    ):
        for x in xs:
            transformed(x)
        assert explain(transformed)(xs[-1]).replay == (
            "no: no two calls are alike: what it is given, or closes over, is new in each"
        )


@pytest.mark.parametrize(
    ("transform", "point"), [(vjp, (X,)), (jvp, ((X,), (X,))), (linearize, (X,))]
)
def test_a_transform_at_a_point_is_explained(transform, point, at_once):
    for f, is_replayed in ((scalar, True), (printing, False)):
        e = explain_often(transform, f, *point)
        same(e.result[0], f(X))
        assert e.call == f"{transform.__name__}({f.__name__})"
        assert (e.ways == (REPLAYED,)) is is_replayed
        assert ("calls so far" if is_replayed else "printing uses print (") in e.replay
        assert bool(e.program) is is_replayed


def test_options_of_a_transform_at_a_point_count_for_what_is_explained(at_once):
    def with_aux(x):
        return x.sin(), x

    for _ in range(8):
        jvp(with_aux, (X,), (X,), has_aux=True)
    assert explain(jvp)(with_aux, (X,), tangents=(X,), has_aux=True).ways == (REPLAYED,)
    assert explain(jvp)(with_aux, (X,), (X,)).ways == ("as it is",)


def test_a_jitted_function_is_explained():
    f = jit(scalar)
    e = explain(f)(X)
    assert (e.call, e.ways) == ("jit(scalar)", ("as it is, and recorded for later calls",))
    e = explain(f)(X)
    assert e.result.equal(scalar(X))
    assert (e.ways, e.replay) == ((REPLAYED,), "1 calls so far")
    assert e.program == str(f.kinds()[0])


def test_a_jitted_function_that_is_not_recorded_tells_why():
    f = jit(lambda x: x * x.mean().item())
    with pytest.warns(forall.PerformanceWarning):
        f(X)
    e = explain(f)(X)
    assert e.ways == ("as it is",)
    assert e.replay == f"no: {f.kinds()[0].why}"
    assert e.program == ""


def test_nested_transforms_are_explained_by_all_their_names():
    assert explain(grad(grad(lambda x: x**3)))(X[0]).call == "grad(grad(<lambda>))"
    assert explain(jit(vmap(grad(scalar))))(X[None]).call == "jit(vmap(grad(scalar)))"
    e = explain(vmap(grad(scalar)))(X[None])
    assert (e.call, e.examples) == ("vmap(grad(scalar))", 1)
    assert explain(grad(lambda w: vmap(jit(scalar))(w[None]).sum()))(X).result.equal(
        grad(scalar)(X)
    )


def test_an_explained_call_is_made_once():
    calls = []

    def f(x):
        calls.append(1)
        return x.sum()

    for number, explained in enumerate((grad(f), hessian(f), jacrev(f)), 1):
        explain(explained)(X)
        assert len(calls) == number


def test_what_a_call_raises_is_raised():
    with pytest.raises(RuntimeError, match="must return a scalar"):
        explain(grad(torch.sin))(X)


def test_without_replay_nothing_is_told_of_it(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", False)
    e = explain(grad(scalar))(X)
    assert (e.ways, e.replay, e.program) == (("as it is",), "", "")


def test_no_reference_to_none_is_lost():
    """Python before 3.12 ends the process when all of them are."""

    def f(x):
        for _ in range(100):
            x = x + x.sin()
        return x.sum()

    mapped, xs = vmap(grad(f)), torch.ones(4, 2)
    explain(mapped)(xs)
    before = sys.getrefcount(None)
    for _ in range(3):
        explain(mapped)(xs)
    assert abs(sys.getrefcount(None) - before) < 150  # 500 for each call


# --- operators without a batching rule -----------------------------------------------------------


@torch.library.custom_op("explained::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("explained::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def slowly(x):
    return twice(x) + twice(thrice(x).sin())


SLOW = (("explained.twice.default", 2), ("explained.thrice.default", 1))
LOOPED = "once per example, without a batching rule"


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("operators", [True, False])
def test_operators_that_run_once_per_example_are_counted(operators):
    xs = X.repeat(4, 1)
    e = explain(vmap(slowly), operators=operators)(xs)
    same(e.result, torch.stack([slowly(x) for x in xs]))
    assert sorted(e.looped) == sorted(SLOW)
    text = str(e).partition(f"{LOOPED}\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in text] == [[n, str(k), *_calls(k)] for n, k in e.looped]
    assert all(f"<code>{name}</code>: {k} " in e.to_html() for name, k in SLOW)


def _calls(n):
    return ["call" if n == 1 else "calls"]


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_they_are_counted_in_any_transform_and_for_one_call_alone():
    def loss(xs):
        return xs.square().sum() * vmap(slowly)(xs.detach()).sum()

    assert sorted(explain(grad(loss))(X.repeat(4, 1)).looped) == sorted(SLOW)
    assert sorted(explain(jit(vmap(slowly)))(X.repeat(4, 1)).looped) == sorted(SLOW)
    assert explain(vmap(torch.sin))(X).looped == ()
    assert LOOPED not in str(explain(vmap(torch.sin))(X))
    with pytest.raises(ZeroDivisionError):
        explain(vmap(lambda x: slowly(x) / (1 // 0)))(X.repeat(4, 1))
    assert looped_operators._counters.now == []


def test_what_is_counted_is_what_is_warned_of():
    with pytest.warns(forall.PerformanceWarning) as caught:
        e = explain(vmap(lambda x: torch.as_tensor(np.fft.fft(x)).abs().sin()))(X.repeat(4, 1))
    assert [name for name, _ in e.looped] == ["np.fft"]
    assert any("numpy runs np.fft once per example" in str(w.message) for w in caught)
