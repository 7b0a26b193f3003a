"""Lanes that would have to part: the tests see it as an exception."""

import pytest

from forall._batching import worlds
from forall._transforms import apart


class Parted(Exception):  # noqa: N818 - it is named for what happened
    """One Python number was asked for, and the examples differ."""


@pytest.fixture
def parted(monkeypatch):
    def one_of(tensor):
        raise Parted

    monkeypatch.setattr(worlds, "one_of", one_of)
    monkeypatch.setattr(apart, "convert", lambda *_, **__: None)  # which parts by itself
    return Parted
