"""That the checks of `make gpu` hold on the CPU, and tell what does not hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forall
from gpu import draws, nesting, run, threads
from gpu.checks import Check, Skipped, Slow, Waits, assert_same, judge

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def raises(error: Exception) -> Check:
    def check() -> None:
        raise error

    return Check("raises", check)


def loops() -> None:
    """What has no rule warns that it runs once per example."""
    forall.vmap(torch.ops.gpu_test.twice)(torch.ones(2))


@pytest.fixture
def twice():
    with torch.library._scoped_library("gpu_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        yield


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (Check("right", lambda: assert_same(torch.ones(2), torch.ones(2))), "ok"),
        (Check("off", lambda: assert_same(torch.ones(2), torch.zeros(2))), "wrong"),
        (Check("shape", lambda: assert_same(torch.ones(2), torch.ones(3))), "wrong"),
        (
            Check("device", lambda: assert_same(torch.ones(2), torch.ones(2, device="meta"))),
            "wrong",
        ),
        (raises(ValueError("no")), "error"),
        (raises(Skipped("not here")), "skipped"),
        (raises(Waits("once")), "waits"),
        (raises(Slow("by a loop")), "slow"),
        (Check("loops", loops), "slow"),
        (Check("loops, as it may", loops, may_be_slow=True), "ok"),
    ],
    ids=lambda x: x.name if isinstance(x, Check) else x,
)
@pytest.mark.usefixtures("twice")
def test_what_happens_in_a_check_is_its_status(check, status):
    assert judge("section", check, CPU).status == status


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("section", "every"), [(nesting, 30), (threads, 23), (draws, 1)])
def test_checks_hold_on_the_cpu(section, every):
    results = [judge("section", check, CPU) for check in section.checks(CPU)[::every]]
    assert len(results) > 5
    assert {r.status for r in results} <= {"ok", "skipped"}, results
    assert any(r.status == "ok" for r in results)


def test_what_there_is_no_time_for_is_told(capsys):
    assert run.main(["--device", "cpu", "--only", "nesting", "operators", "--seconds", "0"]) == 0
    told = capsys.readouterr().out
    assert "not run nesting: all checks  the time was over" in told
    assert told.count("not run operators") == run.SHARDS["operators"]


BROKEN = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
import gpu.draws
from gpu.checks import Check, assert_same

gpu.draws.checks = lambda device: [
    Check("off", lambda: assert_same(torch.ones(2), torch.zeros(2))),
    Check("dies", os.abort),
    Check("right", lambda: "a text"),
]
"""


def test_a_crash_ends_one_check_and_the_exit_code_tells(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN.format(tests=str(ROOT / "tests")))
    out = tmp_path / "out.json"
    options = ["--device", "cpu", "--only", "draws", "--preload", "broken", "--json", str(out)]
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), *options],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    results = json.loads(out.read_text())["results"]
    found = {r["name"]: r["status"] for r in results}
    assert found == {"off": "wrong", "dies": "crash", "right": "ok"}
    assert "| draws | 1 | 1 |  | 1 |" in done.stdout
