"""What most tests here begin with, and a fixture that the tests of jit have too."""

import pytest

import forall
from forall._transforms import anew
from jit.conftest import recorded  # noqa: F401 - pytest finds it here


@pytest.fixture
def at_once(monkeypatch):
    """Calls are replayed as soon as they can be, and those of other tests are forgotten."""
    monkeypatch.setattr(anew, "table", {})
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
