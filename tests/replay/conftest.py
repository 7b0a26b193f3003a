"""What most tests here begin with, and a fixture that the tests of jit have too."""

import pytest

import forall
from forall._auto_replay import fresh_closures
from forall._auto_replay.policy import AutoReplayCache
from forall._auto_replay.replayed_calls import _call_template
from jit.conftest import recorded  # noqa: F401 - pytest finds it here


@pytest.fixture
def at_once(monkeypatch):
    """Calls are replayed as soon as they can be, and those of other tests are forgotten."""
    monkeypatch.setattr(fresh_closures, "table", {})
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)


@pytest.fixture
def hits(monkeypatch):
    """The name of the function of each replayed call; to count calls, take the length.

    The function is the one that is recorded: the user's, its module's class, or one of forall's, as
    `compute_jacobian` of `jacrev`.
    """
    found, original = [], AutoReplayCache.replay_entry

    def noted(self, *args):
        func = self.eager.args[0] if self.eager.func is _call_template else self.eager.func
        found.append(getattr(func, "__name__", type(func).__name__))
        return original(self, *args)

    monkeypatch.setattr(AutoReplayCache, "replay_entry", noted)
    return found


@pytest.fixture(params=[True, "check"])
def either_way(request, monkeypatch):
    """In half of the tests each replayed call is compared."""
    monkeypatch.setattr(forall.config, "replay", request.param)
