"""The toy's words are for these tests alone."""

import pytest

from forall._divergence.thread_state import thread
from forall._divergence.vmap_interface import words


@pytest.fixture(autouse=True)
def _own_words():
    before = dict(vars(words))
    yield
    vars(words).update(before)
    thread.mixed.clear()
    thread.loose = False
