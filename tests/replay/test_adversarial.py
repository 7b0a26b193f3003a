"""No one has said of these functions that they are pure: six calls, side effects and all."""

from __future__ import annotations

import pytest

from forall._transforms.replaying import replaying
from jit.cases import CASES
from jit.conftest import globals_as_before  # noqa: F401 - a fixture that all tests here use
from jit.test_adversarial import six_calls

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_the_function(name):
    told = six_calls(name, lambda f: replaying(f)(f))
    assert not any("not recorded" in text for text in told)
