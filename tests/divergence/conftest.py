"""Much here is about code that has no converted form, so that it runs in groups: no surprise.

An error of the conversion itself still fails a test, see `tests/conftest.py`.
"""

from pathlib import Path

import pytest

from by_groups import EXPECTED

HERE = f"{Path(__file__).parent}/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):  # the hook is given the items of all folders
            item.add_marker(EXPECTED)
