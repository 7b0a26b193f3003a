"""Tests of this room put toy words in the place of the real ones, for their own time alone."""

import pytest

from forall._lanes.words import words


@pytest.fixture(autouse=True)
def real_words_afterwards():
    real = dict(vars(words))
    yield
    vars(words).clear()
    vars(words).update(real)
