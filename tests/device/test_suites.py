"""Tests that run on the device, each group in a process of its own: see fakedev.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from device import fakedev

ROOT = Path(__file__).parents[2]


def run_on_device(*args: str) -> None:
    fakedev.build()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args],
        cwd=ROOT,
        env={**os.environ, "FORALL_DEVICE": fakedev.NAME, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout[-20000:]}\n{ran.stderr[-5000:]}"


@pytest.mark.skipif(fakedev.why_not() is not None, reason=str(fakedev.why_not()))
def test_own_tests():
    run_on_device("tests/device", "--ignore=tests/device/test_suites.py")
