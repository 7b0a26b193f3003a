"""Programs that torch's own interpreter runs are those that Python ran."""

import gc
import threading
import weakref

import pytest
import torch

from draws import HERE
from forall import grad, jit, vmap
from forall._jit.backends import torchscript
from jit.cases import CASES
from jit.test_adversarial import AS_IT_IS, six_calls

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


@pytest.fixture(autouse=True)
def lines(monkeypatch):
    """Every program goes over at once. The lines that were written, None for what cannot be."""
    written, real = [], torchscript.compile_torchscript

    def noted(*args):
        written.append(real(*args))
        return written[-1]

    monkeypatch.setattr(torchscript, "compile_torchscript", noted)
    monkeypatch.setattr(torchscript, "LENGTH", 1)
    monkeypatch.setattr(torchscript, "CALLS", 0)
    return written


# A number in the place of a tensor has no line of its own, unless a pass has made it a tensor.
NUMBERS = {
    "conjugates",
    "shapes_changed_in_place",
    "dtypes_asked_for",
    "a_truth_taken_for_a_number",
    "memory_of_its_own_written_before_a_branch",
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_the_function(name, lines):
    told = six_calls(name, jit)
    assert any("not recorded" in text for text in told) == (name in AS_IT_IS), told
    assert all(lines) or name in NUMBERS or HERE.type != "cpu"  # where no pass does so


def several(x, w):
    first, second = x.split([1, 2], 1)
    low, high = torch.aminmax(x, dim=1)
    ordered, places = x.sort(descending=True)
    y = torch.cat([second, first], 1)[:, [2, 0]] * w
    z = torch.where(y > 0, y, 2.0).clone(memory_format=torch.contiguous_format)
    z[:, 0] = low
    return {"z": z, "x": x, "places": places, "all": [ordered.to(torch.float32), high, y.T]}


def test_results_are_the_same_to_the_last_bit_and_stride(lines):
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    f, g = lambda x: several(x, w), jit(lambda x: several(x, w))
    for i in range(5):
        x = X + i
        found, wanted = g(x), f(x)
        assert found["x"] is x
        pairs = [*zip(found.pop("all"), wanted.pop("all"), strict=True)]
        for a, b in [*zip(found.values(), wanted.values(), strict=True), *pairs]:
            assert a.stride() == b.stride()
            assert a.dtype == b.dtype
            assert a.equal(b)
        w.add_(1)
    assert lines == [lines[0]]
    assert lines[0] is not None


def test_nothing_is_rewritten(lines):
    g = jit(lambda x: (x + 0, x * 1, x - x, 0 * x, x.pow(1), (-x).neg() / 1))
    x = torch.tensor([-0.0, 0.0, torch.inf, torch.nan, -1.0])
    wanted = (x + 0, x * 1, x - x, 0 * x, x.pow(1), (-x).neg() / 1)
    for _ in range(4):
        for a, b in zip(g(x), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert a.signbit().equal(b.signbit())
    assert len(lines) == 1


def test_whole_numbers_stay_whole(lines):
    n = torch.arange(6)
    f = lambda n: (n * 2, n / 2, n * 2.5, n + True, n.float() * 3, n.half() * 0.1)  # noqa: E731
    g = jit(f)
    for _ in range(4):
        for a, b in zip(g(n), f(n), strict=True):
            assert a.dtype == b.dtype
            assert a.equal(b)


def test_errors_are_those_of_the_function():
    f = vmap(lambda a: torch.linalg.solve(a, torch.ones(2, dtype=a.dtype)).sin().exp())
    g = jit(f)
    good, bad = torch.eye(2).expand(3, 2, 2), torch.zeros(3, 2, 2)
    for _ in range(3):
        assert g(good).equal(f(good))
        with pytest.raises(torch.linalg.LinAlgError) as told:
            g(bad)
        with pytest.raises(torch.linalg.LinAlgError) as wanted:
            f(bad)
        assert str(told.value).splitlines()[0] == str(wanted.value).splitlines()[0]
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_what_outlasts_a_call_is_left_to_python(lines):
    state = torch.zeros(3)
    for f in (
        lambda x: x.mul_(2).sin(),
        lambda x: state.add_(x).cos(),
        lambda x: x + x.bernoulli(),
    ):
        g = jit(f)
        for _ in range(4):
            g(torch.ones(3))
    assert not lines


def test_both_halves_of_a_derivative(lines):
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    f = lambda x: (x * w).sin().exp().sum()  # noqa: E731
    g = jit(f)
    for i in range(5):
        x = (X + i).requires_grad_()
        found, wanted = (torch.autograd.grad(h(x), (x, w)) for h in (g, f))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(lines) == 2


def test_an_interpreter_that_cannot_do_it_is_not_asked_again(monkeypatch):
    asked = []

    def line(*args):
        def run(*tensors):
            asked.append(len(tensors))
            raise RuntimeError("no such operator")

        return run

    monkeypatch.setattr(torchscript, "compile_torchscript", line)
    g = jit(lambda x: x.sin().exp())
    for _ in range(6):
        assert g(X).equal(X.sin().exp())
    assert asked == [1]


def test_without_an_interpreter_python_runs_all(monkeypatch):
    class Gone:
        def __init__(self):
            raise AttributeError("torch._C has no Graph")

    monkeypatch.setattr(torchscript, "ScriptBuilder", Gone)
    g = jit(lambda x: x.sin().exp())
    for _ in range(4):
        assert g(X).equal(X.sin().exp())


def test_nothing_is_kept(lines):
    class Known:
        w = torch.ones(1000)

    known = weakref.ref(Known.w)
    g = jit(vmap(grad(lambda x, w=Known.w: (x * w).sin().sum())))
    for _ in range(4):
        g(torch.ones(2, 1000))
    assert lines[0] is not None
    lines.clear()
    del Known, g
    gc.collect()
    assert known() is None


def test_settings_of_torch_are_as_before(lines):
    before = torch._C._get_graph_executor_optimize()
    g = jit(lambda x: x.sin().exp())
    for on in (True, False):
        torch._C._set_graph_executor_optimize(on)
        try:
            for _ in range(3):
                g(X)
            assert torch._C._get_graph_executor_optimize() is on
        finally:
            torch._C._set_graph_executor_optimize(before)
    assert lines


def test_threads_share_a_line(lines):
    w = torch.linspace(1, 2, 3, dtype=torch.float64)
    f = vmap(grad(lambda x: (x * w).sin().exp().sum()))
    g, wanted, found = jit(f), [f(X + i) for i in range(4)], {}

    def work(i):
        found[i] = all(g(X + i).equal(wanted[i]) for _ in range(50))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == dict.fromkeys(range(4), True)
    assert all(lines)
