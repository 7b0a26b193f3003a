"""Lanes that would have to part: the tests see it as an exception."""

from pathlib import Path

import pytest

from by_groups import EXPECTED, only_groups
from forall._vmap.active_set import active_mask

HERE = f"{Path(__file__).parent}/"


class Parted(Exception):  # noqa: N818 - it is named for what happened
    """One Python number was asked for, and the examples differ."""


@pytest.fixture
def parted(monkeypatch):
    def one_of(tensor):
        raise Parted

    monkeypatch.setattr(active_mask, "read_number", one_of)
    only_groups(monkeypatch)  # which parts by itself
    return Parted


def pytest_collection_modifyitems(items):
    """Numbers whose types differ, and what catches errors, run in groups: no surprise here."""
    for item in items:
        if str(item.path).startswith(HERE):  # the hook is given the items of all folders
            item.add_marker(EXPECTED)
