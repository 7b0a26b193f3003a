"""Tests on the device run where it is, in the process that `test_suites` starts; else it alone."""

from collections.abc import Iterator

import pytest
import torch

from device import fakedev

if not fakedev.is_asked_for():
    collect_ignore_glob = ["test_[!s]*.py"]


@pytest.fixture(autouse=fakedev.is_asked_for())
def no_default_device() -> Iterator[None]:
    """Tests of this folder name the device of each tensor."""
    was = torch.get_default_device()
    torch.set_default_device(None)
    try:
        yield
    finally:
        torch.set_default_device(was)
