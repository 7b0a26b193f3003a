"""The toy's interface is for these tests alone."""

import pytest

from forall._divergence.thread_state import thread
from forall._divergence.vmap_interface import interface


@pytest.fixture(autouse=True)
def _own_interface():
    before = dict(vars(interface))
    yield
    vars(interface).update(before)
    thread.mixed.clear()
    thread.loose = False
