"""Run the suites on a device that is not the CPU, and compare what fails with known.toml.

Each suite has processes of its own, with FORALL_DEVICE=fakedev. The table counts for each what
passed, what failed, and how many of the failures are listed, with a reason each. The exit code is 1
where another test failed, or where a process crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "fakedev"
GO_ON = ("--continue-on-collection-errors",)  # a file that cannot be read is one failure of many
SUITES = ("laws", "limits", "divergence", "control", "replay", "jit")


class Ran(NamedTuple):
    counts: dict[str, int]
    failed: list[str]
    unexpected: list[str]  # failures that are not listed
    trouble: str  # a crash, or what kept the tests from running
    output: str
    seconds: float


def known() -> dict[str, re.Pattern[str]]:
    """Return a pattern for each listed beginning of tests' names, where ``*`` is any text."""
    entries = tomllib.loads((HERE / "known.toml").read_text())["failure"]
    assert all(entry["reason"] for entry in entries)
    names = [begins for entry in entries for begins in entry["tests"]]
    return {x: re.compile(re.escape(x).replace(r"\*", ".*"), re.DOTALL) for x in names}


def run_tests(*paths: str, one_in: int = 1, sampled: bool = False, jobs: int = 1) -> Ran:
    """Run tests on the device; with ``one_in``, those that the names choose, always the same."""
    begun = time.monotonic()
    env = {
        **os.environ,
        "FORALL_DEVICE": NAME,
        "FORALL_ONE_IN": str(one_in),
        "OMP_NUM_THREADS": "1",
    }
    if sampled:
        env["FORALL_SAMPLED"] = "1"
    workers = ("-n", str(jobs), "--dist", "worksteal") if jobs > 1 else ("-p", "no:xdist")
    with tempfile.TemporaryDirectory() as cache:
        command = (sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "--tb=short")
        done = subprocess.run(
            [*command, *workers, *GO_ON, "-o", f"cache_dir={cache}", *paths],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        found = Path(cache) / "v" / "cache" / "lastfailed"
        failed = list(json.loads(found.read_text())) if found.exists() else []
    output = done.stdout + done.stderr
    last = (done.stdout.splitlines() or ["no output"])[-1]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last.split(" in ")[0])}
    crashed = re.search(r"crashed while running .*|Fatal Python error: .*", output)
    trouble = crashed.group() if crashed else "" if done.returncode in (0, 1, 5) else output[-2000:]
    listed = known().values()
    unexpected = [name for name in failed if not any(x.match(name) for x in listed)]
    return Ran(counts, failed, unexpected, trouble, output[-20000:], time.monotonic() - begun)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--suites", nargs="+", default=SUITES, help="folders of tests")
    p.add_argument("--one-in", type=int, default=1, help="tests of which one runs")
    p.add_argument("--sampled", action="store_true", help="of the longest sweeps a sample")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = p.parse_args()
    print(f"{'suite':<9}{'passed':>7}{'failed':>7}{'listed':>7}{'seconds':>9}")
    is_wrong, failed = False, []
    for suite in options.suites:
        how = {"one_in": options.one_in, "sampled": options.sampled, "jobs": options.jobs}
        ran = run_tests(f"tests/{suite}", **how)
        numbers = ran.counts.get("passed", 0), len(ran.failed)
        line = (*numbers, len(ran.failed) - len(ran.unexpected))
        print(f"{suite:<9}" + "".join(f"{n:>7}" for n in line), end="")
        print(f"{ran.seconds:>9.0f}  {ran.trouble}".rstrip(), flush=True)
        for name in ran.unexpected:
            print(f"    {name}")
        is_wrong |= bool(ran.unexpected or ran.trouble)
        failed += ran.failed
    if options.one_in == 1 and set(options.suites) == {*SUITES} and not options.sampled:
        for begins, listed in known().items():
            if not any(map(listed.match, failed)):
                print(f"listed, but none of them fails: {begins}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
