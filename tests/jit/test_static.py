"""Static arguments are part of a kind by value: an equal one is replayed, another is recorded."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from forall import jit

X = torch.tensor([1.0, 2.0])


@dataclass(frozen=True)
class Settings:
    factor: float
    name: str = "a"


class ByName:
    """Equal to another of its name."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, ByName) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


def test_an_equal_object_is_replayed_and_another_recorded(capsys):
    def f(x, settings):
        print("ran")
        return x * settings.factor

    g = jit(f, static_argnums=1)
    for factor, runs in [(2.0, 1), (2.0, 0), (3.0, 1), (2.0, 0), (3.0, 0)]:
        assert g(X, Settings(factor)).equal(factor * X)
        assert capsys.readouterr().out.count("ran") == runs


def test_it_is_static_however_it_is_passed(capsys):
    def f(x, settings=Settings(5.0), *, mode=ByName("plain")):  # noqa: B008 - as a user may
        print("ran")
        return x * settings.factor + len(mode.name)

    for options in (
        {"static_argnums": 1, "static_argnames": "mode"},
        {"static_argnums": (-1,), "static_argnames": ["mode"]},
        {"static_argnames": ("settings", "mode")},
    ):
        g = jit(f, **options)
        for _ in range(2):
            assert g(X, Settings(2.0)).equal(2 * X + 5)
            assert g(X, settings=Settings(3.0)).equal(3 * X + 5)
            assert g(X, mode=ByName("of a name")).equal(5 * X + 9)
            assert g(X).equal(5 * X + 5)
        assert capsys.readouterr().out.count("ran") == 4


def test_numbers_of_other_types_are_other_kinds():
    g = jit(lambda x, s: x * s, static_argnums=1)
    whole = torch.tensor([1, 2])
    for s in (1, 1.0, True, 1j):
        assert g(whole, s).dtype == (whole * s).dtype
    for s in (0.0, -0.0, float("nan")):
        assert str(g(X, s)) == str(X * s)


def test_numbers_within_a_tuple_or_a_dataclass_are_other_kinds():
    g = jit(lambda x, s: x * s[0] * s[1].factor, static_argnums=1)
    whole = torch.tensor([1, 2])
    for s in [(1, Settings(1)), (1.0, Settings(1)), (1, Settings(1.0)), (1, Settings(True))]:
        assert g(whole, s).dtype == (whole * s[0] * s[1].factor).dtype


def test_an_object_that_changes_is_noticed():
    class Scale:
        factor = 2.0

    scale = Scale()
    g = jit(lambda x, s: x * s.factor, static_argnums=1)
    for factor in (2.0, 3.0, 2.0, 4.0):
        scale.factor = factor
        assert g(X, scale).equal(factor * X)


@pytest.mark.parametrize("inner", [torch.sin, torch.Tensor.cos, lambda x: x**2])
def test_a_function(inner):
    g = jit(lambda f, x: f(x), static_argnums=0)
    for x in (X, 2 * X, 3 * X):
        assert g(inner, x).equal(inner(x))
        assert g(torch.exp, x).equal(x.exp())


def test_a_string_and_none():
    def f(x, mode=None):
        return x if mode is None else getattr(x, mode)()

    g = jit(f, static_argnames="mode")
    for _ in range(2):
        assert g(X).equal(X)
        assert g(X, None).equal(X)
        assert g(X, mode="sin").equal(X.sin())
        assert g(X, "cos").equal(X.cos())


class Model:
    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return isinstance(other, Model) and self.factor == other.factor

    def __hash__(self):
        return hash(self.factor)

    @functools.partial(jit, static_argnums=(0, 2))
    def step(self, x, settings=Settings(1.0)):
        print("ran")
        return self.factor * x + settings.factor


def test_a_method(capsys):
    for factor in (2.0, 3.0, 2.0):
        assert Model(factor).step(X).equal(factor * X + 1)
        assert Model(factor).step(X, Settings(2.0)).equal(factor * X + 2)
    assert capsys.readouterr().out.count("ran") == 4


def test_a_bound_method_counts_without_self():
    class Plain:
        def step(self, x, settings):
            return 2 * x + settings.factor

    g = jit(Plain().step, static_argnums=1)
    assert g(X, Settings(4.0)).equal(2 * X + 4)
    assert g(3 * X, Settings(4.0)).equal(6 * X + 4)


def test_places_among_any_number_of_arguments():
    g = jit(lambda *xs: sum(xs[:-1]) * xs[-1].factor, static_argnums=(-1, 5))
    for xs in ([X], [X, X], [X]):
        assert g(*xs, Settings(2.0)).equal(sum(xs) * 2.0)


def test_names_among_any_number_of_arguments():
    g = jit(lambda x, **options: x * options["s"].factor, static_argnames="s")
    for factor in (2.0, 3.0, 2.0):
        assert g(X, s=Settings(factor)).equal(factor * X)


def test_a_static_tuple_holds_tensors_that_are_read_anew():
    weights = (torch.ones(2), torch.ones(2))
    g = jit(lambda x, ws: x * ws[0] + ws[1], static_argnums=1)
    for i in range(3):
        weights[0].fill_(i)
        assert g(X, weights).equal(i * X + 1)


def test_derivatives_outside():
    g = jit(lambda x, s: (x * s.factor).sin().sum(), static_argnums=1)
    for i in range(3):
        x = (X + i).requires_grad_()
        (found,) = torch.autograd.grad(g(x, Settings(2.0)), x)
        assert found.allclose(2 * (2 * x).cos())


def test_a_module_counts_the_arguments_of_forward():
    class Scaled(torch.nn.Module):
        def forward(self, x, settings):
            return x * settings.factor

    g = jit(Scaled(), static_argnames="settings")
    for factor in (2.0, 3.0, 2.0):
        assert g(X, Settings(factor)).equal(factor * X)
        assert g(X, settings=Settings(factor)).equal(factor * X)
