"""A failed check is an error of Python's: a kernel's own assertion would end the use of the device.

On CUDA no tensor of the device can be read after `torch._assert_async` has failed there.
"""

import pytest
import torch

import forall
from device import fakedev
from forall import jit, vmap

pytestmark = pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
D = fakedev.NAME
F = torch.nn.functional
TABLE = torch.randn(5, 2)
INF = float("inf")
# A call, and for each example what it is given: one of the examples is wrong.
WRONG = {
    "linspace": (lambda x: torch.linspace(0, x, 4, dtype=torch.int8), [1.0, 300.0, 2.0]),
    "masked_fill": (
        lambda v: torch.zeros(2, dtype=torch.int8, device=v.device).masked_fill(v > 0, v),
        [1, 300, 2],
    ),
    "repeat_interleave": (lambda n: n.repeat_interleave(n), [[2, 0], [3, -1], [1, 1]]),
    "bincount": (lambda x: torch.bincount(x, minlength=4), [[0, 2], [-1, 3], [1, 1]]),
    "histc": (lambda x: torch.histc(x, 4), [[0.0, 2.0], [INF, 3.0], [1.0, 1.0]]),
    "where bags begin": (
        lambda o: F.embedding_bag(torch.tensor([1, 2, 3], device=o.device), at(o), o, mode="sum"),
        [[0, 1], [1, 2], [0, 2]],
    ),
    "x[mask] = values": (
        lambda m: torch.zeros(3, device=m.device).index_put((m,), torch.ones(2, device=m.device)),
        [[True, True, False], [True, False, False], [False, True, True]],
    ),
    "lengths of segments": (
        lambda n: torch.segment_reduce(torch.ones(3, device=n.device), "sum", lengths=n),
        [[1, 2], [2, 2], [3, 0]],
    ),
}


def at(t):
    return TABLE.to(t.device)


def error_of(f, x):
    try:
        f(x)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    raise AssertionError("no error")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)


@pytest.mark.parametrize("way", ["vmap", "jit", "nested"])
@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_example_is_an_error(name, way):
    f, given = WRONG[name]
    mapped = {"vmap": vmap(f), "jit": jit(vmap(f)), "nested": vmap(vmap(f))}[way]
    lost = fakedev.lost()
    for _ in range(4):
        messages = set()
        for device in "cpu", D:
            xs = torch.tensor(given, device=device)
            right, wrong = xs[[0, 0, 2]], xs
            if way == "nested":
                right, wrong = right[None], wrong[None]
            mapped(right)
            messages.add(error_of(mapped, wrong))
        assert len(messages) == 1
    assert fakedev.lost() == lost


ASKED = {
    "a yes or no": lambda x: x * 2 if (x > 0).all() else x * 3,
    "whole numbers": lambda x: x.repeat(1, int((x > 0).any(0).sum())),
    "equal": lambda x: x * 2 if torch.equal(x, x.abs()) else x * 3,
    "a mask": lambda x: x[x.sum(1) > 0] * 2,
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_asserted_where_the_host_hears_of_them(name):
    f = ASKED[name]
    g, xs = jit(f), torch.rand(3, 2, device=D) + 1
    once = torch.ones(3, 2, device=D)
    once[0] = -1
    lost = fakedev.lost()
    for x in (*[xs] * 6, once, xs, xs, -xs, once, xs):
        torch.testing.assert_close(g(x), f(x))
    assert g.cache_info().hits > 3
    assert fakedev.lost() == lost
