"""Tests that run on the device, each group in a process of its own: see fakedev.py."""

import pytest

from device import fakedev
from device.run import run_tests
from sampling import SAMPLED

pytestmark = pytest.mark.skipif(fakedev.why_not() is not None, reason=str(fakedev.why_not()))

# Of each suite the files that say most about a device, and of how many of their tests one runs.
SAMPLES = {
    "laws": (["vmap_is_the_loop", "transforms_nest", "recurrent"], 24),
    "limits": (["functions", "autograd_inside", "in_place"], 100),
    "divergence": (["values", "nested", "calls_of_groups"], 50),
    "control": (["matrix", "operators"], 24),
    "replay": (["fresh_functions_of_tensors", "modules", "linearize"], 24),
    "jit": (["adversarial", "derivatives_outside"], 20),
}


def check(*paths: str, one_in: int = 1) -> None:
    fakedev.build()
    ran = run_tests(*paths, one_in=one_in, sampled=one_in > 1)
    assert not ran.trouble, ran.trouble
    assert not ran.unexpected, f"{ran.unexpected}\n{ran.output}"
    assert ran.counts["passed"] > 5


def test_own_tests():
    check("tests/device", "--ignore=tests/device/test_suites.py", one_in=2 if SAMPLED else 1)


@pytest.mark.parametrize("suite", SAMPLES)
def test_suite(suite):
    names, one_in = SAMPLES[suite]
    check(*(f"tests/{suite}/test_{name}.py" for name in names), one_in=one_in)
