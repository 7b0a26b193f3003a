"""What does nothing but compute runs on bare stacks; what does more never does."""

import pytest
import torch

from forall import config, explain, grad, vmap
from forall._ast_rewrite import find_template
from forall._compat.tensor_subclass import posing
from forall._divergence import predicated_if, pure_call
from forall._vmap.fast_path import api_calls
from oracle import difference, loop

D = torch.float64
X = torch.linspace(-2, 2, 11, dtype=D)
MATRIX = torch.linspace(-1, 1, 9, dtype=D).reshape(3, 3)


@pytest.fixture(autouse=True)
def nobody_else_has_a_say(monkeypatch):
    """As in a new process: a class or a rule of the user's would need wrappers."""
    monkeypatch.setattr(config, "strategy", "together")
    monkeypatch.setattr(posing, "used", False)
    monkeypatch.setattr(api_calls, "_overruled", set())


@pytest.fixture
def ran(monkeypatch):
    """How often a function, or an `if`, has run on bare stacks, and how often it was left."""
    counts = {"functions": 0, "ifs": 0, "left": 0}

    def counting(kind, home, name, nothing):
        before = getattr(home, name)

        def counted(*args):
            found = before(*args)
            counts[kind if found is not nothing else "left"] += 1
            return found

        monkeypatch.setattr(home, name, counted)

    counting("functions", pure_call, "call_pure", pure_call.NOTHING)
    counting("ifs", predicated_if, "_run_on_rows", None)
    return counts


def cubed(x):
    y = x * x
    return y * x


def calls(x):
    while x < 1:
        x = cubed(x).abs() + 0.9
    return x


def chooses(x):
    for _ in range(3):
        if x > 0:
            x = x - 1
        else:
            x = x * x
    return x


@pytest.mark.counted
@pytest.mark.parametrize(("f", "kind"), [(calls, "functions"), (chooses, "ifs")])
def test_what_only_computes_runs_on_bare_stacks(f, kind, ran):
    assert difference(vmap(f)(X), loop(f)(X)) is None
    assert ran[kind] >= 2


@pytest.mark.parametrize("f", [calls, chooses])
def test_a_derivative_takes_the_long_way(f, ran):
    assert difference(vmap(grad(f))(X), loop(grad(f))(X)) is None
    assert not ran["functions"]
    assert not ran["ifs"]


def test_who_parted_where_is_still_told(ran):
    report = explain(vmap(chooses))(X)
    assert not ran["ifs"]
    assert "x > 0" in str(report)


def viewed(x):
    return torch.stack([x, x])[0]


@pytest.mark.counted
def test_what_turns_out_to_need_wrappers_is_left_some_times_only():
    def f(x):
        for _ in range(9):
            row = viewed(x)
            row.add_(0.1)
            if x < 1:
                x = x + row
        return x

    assert difference(vmap(f)(X), loop(f)(X)) is None
    assert find_template(viewed).tries == 0


def test_a_draw_is_made_once():
    def noisy(x):
        return x + torch.rand((), dtype=D)

    def f(x):
        if x > 0:
            x = noisy(x)
        return x

    torch.manual_seed(0)
    found = vmap(f, randomness="same")(X)
    torch.manual_seed(0)
    draw = torch.rand((), dtype=D)
    assert difference(found, torch.where(X > 0, X + draw, X)) is None


def test_an_error_is_that_of_the_loop():
    def f(n):
        if n > 3:
            n = n // (n - 5)
        return n

    n = torch.arange(8)
    with pytest.raises(RuntimeError) as ours:
        vmap(f)(n)
    with pytest.raises(RuntimeError) as theirs:
        loop(f)(n)
    assert str(theirs.value) in str(ours.value)
    assert any("example 5 of 8" in note for note in ours.value.__notes__)


def test_inside_another_vmap():
    def f(x, y):
        return vmap(lambda z: chooses(z + x))(y)

    ys = torch.linspace(-1, 1, 33, dtype=D).reshape(11, 3)
    assert difference(vmap(f)(X, ys), loop(f)(X, ys)) is None


@pytest.mark.parametrize("records", [False, True])
def test_a_matrix_that_all_share(records):
    weight = MATRIX.clone().requires_grad_(records)

    def f(x, n):
        for _ in range(3):
            if n > x.sum():
                x = torch.tanh(weight @ x) - x @ weight
        return x

    xs = torch.linspace(-2, 2, 33, dtype=D).reshape(11, 3)
    ours, theirs = vmap(f)(xs, X), loop(f)(xs, X)
    assert difference(ours, theirs) is None
    if records:
        (mine,) = torch.autograd.grad(ours.sum(), weight)
        (its,) = torch.autograd.grad(theirs.sum(), weight)
        assert difference(mine, its) is None


def test_a_matrix_that_was_written_to_is_not_read():
    weight = MATRIX.clone()

    def f(x, n):
        if n > 0:
            weight.add_(1)
            x = weight @ x
        return x

    def run():
        return vmap(f)(X.reshape(11, 1).expand(11, 3).clone(), X)

    with pytest.raises(Exception, match="written to"):
        run()
    assert difference(weight, MATRIX) is None


def test_one_that_runs_on_alone():
    weight = MATRIX / 2

    def f(x, n):
        k, seen = 0, []
        while k < n:
            x = torch.tanh(weight @ x)
            k += 1
            seen.append(x.sum())
        return x, sum(seen, torch.zeros((), dtype=D)), k

    xs = torch.linspace(-2, 2, 33, dtype=D).reshape(11, 3)
    n = torch.ones(11, dtype=torch.long)
    n[4] = 30
    assert difference(vmap(f)(xs, n), loop(f)(xs, n)) is None
