"""A library whose examples diverge where it cannot be run again for each group on the spot."""

import importlib
import sys

import pytest
import torch

import forall
from forall import grad, vmap
from forall._divergence import user_code
from oracle import same

SOLVER = """
import torch

class Solver:
    def __init__(self, f, tolerance):
        self.f, self.tolerance, self.steps = f, tolerance, 0

    def run(self, y, end):
        t, h = torch.zeros(()), torch.tensor(0.5)
        seen = torch.zeros(2)
        while t < end:
            h = torch.minimum(h, end - t)
            one = y + h * self.f(y)
            half = y + h / 2 * self.f(y)
            two = half + h / 2 * self.f(half)
            seen += 1  # which cannot be done once more
            self.steps += 1
            if (two - one).abs().max() < self.tolerance:
                t, y, h = t + h, two, h * 1.5
            else:
                h = h / 2
        return y, seen, self.steps

def solve(f, y, end):
    return Solver(f, 0.05).run(y, end)
"""


@pytest.fixture
def solve(tmp_path, monkeypatch):
    """A function of a library that pip has installed."""
    (tmp_path / "installed_solver").mkdir()
    (tmp_path / "installed_solver" / "__init__.py").write_text(SOLVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "installed_solver", raising=False)  # it is written anew
    monkeypatch.setattr(user_code, "_find_site_folders", lambda: (str(tmp_path),))
    user_code._find_owner.cache_clear()
    found = importlib.import_module("installed_solver").solve
    assert user_code.find_owner(found.__code__) is user_code.OTHERS
    yield found
    user_code._find_owner.cache_clear()


def by_loop(f, *stacks):
    return tuple(map(torch.stack, zip(*map(f, *stacks), strict=True)))


def test_it_is_converted_where_nothing_else_keeps_examples_together(solve):
    ys, ends = torch.linspace(0.5, 3, 6).reshape(3, 2), torch.tensor([0.4, 1.0, 2.0])

    def f(y, end):
        y, seen, steps = solve(lambda y: -y * y, y, end)
        return y, seen, torch.tensor(1.0) * steps

    for _ in range(3):
        assert same(vmap(f)(ys, ends), by_loop(f, ys, ends))
    told = str(forall.explain(vmap(f))(ys, ends))
    assert "converted, all examples in one run" in told
    assert "groups of" in told
    assert "one after another" not in told


def test_its_derivative(solve):
    ys, ends = torch.linspace(0.5, 3, 6).reshape(3, 2), torch.tensor([0.4, 1.0, 2.0])
    f = grad(lambda y, end: solve(lambda y: -y * y, y, end)[0].sum())
    wanted = torch.stack([f(y, end) for y, end in zip(ys, ends, strict=True)])
    assert same(vmap(f)(ys, ends), wanted)


def test_what_it_cannot_hold_apart_runs_in_groups(solve):
    ys, ends = torch.linspace(0.5, 3, 6).reshape(3, 2), torch.tensor([0.4, 1.0, 2.0])
    known = []

    def f(y, end):
        y, _, steps = solve(lambda y: -y * y, y, end)
        known[:] = [steps]  # which outlives the call
        return y

    assert same(vmap(f)(ys, ends), torch.stack([f(*row) for row in zip(ys, ends, strict=True)]))
    assert known == [solve(lambda y: -y * y, ys[-1], ends[-1])[2]]


def test_an_error_in_it_is_the_loops(solve):
    def f(y, end):
        return solve(lambda y: -y.reshape(3) if end > 1 else -y, y, end)[0]

    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        vmap(f)(torch.ones(3, 2), torch.tensor([0.4, 1.0, 2.0]))


@pytest.mark.parametrize("package", ["forall", "torch", "numpy"])
def test_what_is_never_converted_wherever_it_is_installed(package):
    for home in user_code._find_site_folders():
        assert user_code._find_owner(f"{home}/{package}/inside.py", "f") is user_code.NEVER
