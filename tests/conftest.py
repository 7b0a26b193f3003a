"""Which tests run with replay as it is by default, which compared with each call, which without."""

import gc
from collections.abc import Iterator
from zlib import crc32

import pytest

import forall

ONE_IN = 16  # tests whose replayed calls are compared with the calls themselves


def pytest_collection_finish() -> None:
    """Torch and the tests stay: to look for garbage among them takes most of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = forall.config.replay
    if item.get_closest_marker("counted") is not None:
        forall.config.replay = False
    elif (
        before is True
        and "replay" not in item.path.parts
        and crc32(item.nodeid.encode()) % ONE_IN == 0
    ):
        forall.config.replay = "check"
    try:
        return (yield)
    finally:
        forall.config.replay = before
