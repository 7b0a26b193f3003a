"""Examples that part run in groups, as a test wants it or because of what it is about."""

from __future__ import annotations

from typing import Any

import pytest

from forall._api.execution import converted_run
from forall._divergence import Refusal

# The mark of tests about code that has no converted form.
EXPECTED = pytest.mark.filterwarnings(
    "ignore:vmap.*could not be converted:forall.PerformanceWarning"
)

# Programs whose conversion does fail by an error of its own: see tests/gaps/test_conversions.py.
GAPS = ("attribute_written_in_a_branch", "transforms_inside")


def only_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no function be converted, which then is nothing to warn of."""

    def convert(*_: Any, **__: Any) -> Refusal:
        return Refusal("a test wants groups", f"{__file__}:1")

    monkeypatch.setattr(converted_run, "convert", convert)
    monkeypatch.setattr(converted_run, "warn_of_groups", lambda *_: None)
