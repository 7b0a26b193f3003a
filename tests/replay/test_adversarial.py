"""No one has said of these functions that they are pure: six calls, side effects and all."""

from __future__ import annotations

import warnings

import pytest

import forall
from forall._torch import trees
from forall._transforms.replaying import replaying
from jit.cases import CASES
from jit.test_adversarial import globals_as_before, plainly, same  # noqa: F401


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)


def as_a_transform(f):
    return replaying(f)(f)


@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_the_function(name):
    warnings.simplefilter("ignore")  # torch's, of lists of arrays
    replayed, plain = CASES[name](as_a_transform), CASES[name](plainly)
    for i in range(6):
        found, tree = trees.flatten(replayed(i))
        expected, wanted = trees.flatten(plain(i))
        assert tree == wanted
        for a, b in zip(found, expected, strict=True):
            assert same(a, b), f"call {i}: {a} and not {b}"
