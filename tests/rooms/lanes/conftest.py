"""The toy's words are for these tests alone."""

import pytest

from forall._lanes.state import thread
from forall._lanes.words import words


@pytest.fixture(autouse=True)
def _own_words():
    before = dict(vars(words))
    yield
    vars(words).update(before)
    thread.mixed.clear()
    thread.loose = False
