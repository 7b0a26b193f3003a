"""Which tests run with replay as it is by default, which compared with each call, which without.

Every other one has torch's interpreter run its programs from the first, however short they are.

With FORALL_TESTS=jit, or fastmath, all of them make each transformed call by `jit` too, see
`by_jit`. With FORALL_DEVICE=cuda, or fakedev (see `device.fakedev`), their tensors lie there.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import pytest
import torch

import forall
from by_groups import GAPS
from device import fakedev
from forall._api.execution import converted_run
from forall._auto_replay import policy
from forall._jit import deadline
from forall._jit.backends import torchscript
from sampling import SAMPLED, is_in_sample

pytest.register_assert_rewrite("golden")  # which then shows how two texts differ
REPLAY = forall.config.replay
# What is measured would run one way today and another tomorrow.
forall.config.strategy = os.environ.get("FORALL_STRATEGY") or "together"
ONE_IN = 16  # tests whose replayed calls are compared with the calls themselves
BY_JIT = os.environ.get("FORALL_TESTS") in ("jit", "fastmath")
ASIDE = {"replay", "jit", "test_not_replayed.py"}  # that test the recording itself
PRODUCT = 40  # cases of a product of lists that is a sweep,
ONE_IN_PRODUCT = 4  # of which one in so many
ONE_OF = int(os.environ.get("FORALL_ONE_IN") or 1)
if DEVICE := os.environ.get("FORALL_DEVICE"):  # before the first test module makes a tensor
    if DEVICE == fakedev.NAME:
        fakedev.load()
    torch.set_default_device(DEVICE)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BY_JIT and hasattr(session.config, "workeroutput"):
        import by_jit

        session.config.workeroutput["by_jit"] = by_jit.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if BY_JIT:
        import by_jit

        by_jit.add(node.workeroutput["by_jit"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if BY_JIT:
        import by_jit

        for line in by_jit.summary():
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With FORALL_SAMPLED=1, leave out all but one in so many cases of the sweeps.

    A sweep is marked, or has many cases in a product of lists, so that each entry stays in some.
    With FORALL_ONE_IN, all but one in so many tests. Which ones is told by their names, so that it
    is the same ones each time.
    """
    if SAMPLED or ONE_OF > 1:
        cases = Counter(map(_function, items))
        out = [i for i in items if not _is_in_sample(i, cases)]
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if _is_in_sample(i, cases)]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _is_in_sample(item: pytest.Item, cases: Counter[str]) -> bool:
    if not is_in_sample(item.nodeid, _one_in(item, cases[_function(item)])):
        return False
    # Another order, or it would be cases of sweeps alone.
    return not crc32(item.nodeid.encode()[::-1]) % ONE_OF


def _one_in(item: pytest.Item, cases: int) -> int:
    if (sweep := item.get_closest_marker("sweep")) is not None:
        return sweep.args[0]
    is_product = cases >= PRODUCT and len([*item.iter_markers("parametrize")]) > 1
    return ONE_IN_PRODUCT if is_product else 1


def pytest_collection_finish() -> None:
    """Torch and the tests stay: to look for garbage among them takes most of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = forall.config.replay, torchscript.LENGTH, torchscript.CALLS
    slack = deadline.SECONDS_ALLOWED
    if item.get_closest_marker("timed") is None:
        deadline.SECONDS_ALLOWED = 1e6  # else it hangs on the machine's speed what is recorded
    forall.config.replay = _how(item, before[0])
    if crc32(item.nodeid.encode()) % 2:
        torchscript.LENGTH, torchscript.CALLS = 1, 0
    own = policy.AutoReplayCache
    failed: list[converted_run.Obstacle] = []
    warn, converted_run.warn_of_groups = converted_run.warn_of_groups, _heard(failed)
    if BY_JIT and not _is_aside(item):
        import by_jit

        policy.AutoReplayCache = by_jit.ByJit
    try:
        result = yield
        if not any(gap in item.nodeid for gap in GAPS):
            assert not failed, f"the conversion failed by an error of its own: {failed[0]}"
        return result
    finally:
        converted_run.warn_of_groups = warn
        deadline.SECONDS_ALLOWED = slack
        forall.config.replay, torchscript.LENGTH, torchscript.CALLS = before
        policy.AutoReplayCache = own


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A test that sets it puts back what it found, which may be what was set for it alone.

    What the tests of a file have imported and cached stays, as torch does.
    """
    try:
        return (yield)
    finally:
        forall.config.replay = REPLAY
        if DEVICE:
            torch.set_default_device(DEVICE)
        if nextitem is not None and nextitem.path != item.path:
            pytest_collection_finish()


def _heard(failed: list[converted_run.Obstacle]) -> Callable:
    """Return `warn_of_groups` that notes conversions given up for an error inside forall."""
    warn = converted_run.warn_of_groups

    def heard(call: Any, why: converted_run.Obstacle) -> None:
        if why.is_internal:
            failed.append(why)
        warn(call, why)

    return heard


def _folders(item: pytest.Item) -> set[str]:
    return {*item.path.relative_to(item.config.rootpath).parts}


def _is_aside(item: pytest.Item) -> bool:
    """True for a test whose calls are made as ever where all others are made by `jit` too."""
    return bool(ASIDE & _folders(item)) or item.get_closest_marker("impure") is not None


def _how(item: pytest.Item, before: bool | str) -> bool | str:
    if item.get_closest_marker("counted") is not None:
        return False
    if BY_JIT:
        return before if _is_aside(item) else "check"
    one_in_some = "replay" not in _folders(item) and not crc32(item.nodeid.encode()) % ONE_IN
    return "check" if before is True and one_in_some else before
