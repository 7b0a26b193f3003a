"""No one has said of these functions that they are pure: six calls, side effects and all."""

from __future__ import annotations

import operator
from types import FunctionType

import pytest

from forall._api.execution.transform_decorator import replay_transform
from jit.cases import CASES
from jit.conftest import globals_as_before  # noqa: F401 - a fixture that all tests here use
from jit.test_adversarial import six_calls

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_the_function(name):
    told = six_calls(name, lambda f: replay_transform(f)(operator.call))
    assert not any("not recorded" in text for text in told)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_a_function_that_captures_what_it_holds(name):
    def of_its_own(f):
        if isinstance(f, FunctionType):
            vars(f)["own"] = True  # so it is not one of many that are made anew
        return replay_transform(f)(operator.call)

    told = six_calls(name, of_its_own)
    assert not any("not recorded" in text for text in told)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_functions_that_are_made_anew(name):
    def one_of_many(f):
        return lambda *args, **kwargs: replay_transform(f)(operator.call)(*args, **kwargs)

    told = six_calls(name, one_of_many)
    assert not any("not recorded" in text for text in told)
