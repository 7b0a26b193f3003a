"""Run a fixed sample of the tests on each release of torch and each Python that can be had.

For each pair there is an environment of its own, in which ``pip install`` of this checkout comes
first, then a script of twenty lines, then the sample: the tests that FORALL_ONE_IN chooses by their
names, always the same. The table at the end counts what passed and failed. The exit code is 1 if
something failed that known.toml does not list, with a reason, or if a pair could not be tried.
With --reachable that is no failure where the package index cannot be reached; the table says so.

A release for CUDA is installed without CUDA's libraries: see `stand_ins`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import stand_ins

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")
# Of the extra "dev".
TOOLS = ("cloudpickle", "expecttest", "hypothesis", "numpy", "pytest", "pytest-xdist")
# Torch's own requirements that a machine without a GPU does without.
_OF_CUDA = re.compile("nvidia|cuda|triton|pytorch-triton")
# What pip says of a connection that failed, and not of a release that the index does not have.
_UNREACHED = re.compile(r"WARNING: Retrying|ConnectionPool|Connection broken|Read timed out")
_REQUIRED = "import importlib.metadata as m; print(*(m.requires('torch') or []), sep='\\n')"


class UnreachableError(Exception):
    """An environment could not be made here: the index is not reached, or the disk is full."""


class Ran(NamedTuple):
    torch: str
    python: str
    counts: dict[str, int]
    unexpected: list[str]
    trouble: str  # what kept the sample from running
    is_reached: bool  # the package index, where it was asked
    seconds: float


def releases() -> list[str]:
    """The releases of torch that pyproject.toml asks for, as in "2.13"."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    low, high = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", asked[0]).groups())  # pyright: ignore[reportOptionalMemberAccess]
    return [f"2.{minor}" for minor in range(low, high)]


def interpreter(version: str) -> str | None:
    """The interpreter of this version on the path, or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = sys.executable if version == "{}.{}".format(*sys.version_info) else ""
    places = [own, f"python{version}", *pyenv.glob(f"{version}.*/bin/python{version}")]
    for place in places:
        found = shutil.which(place)
        if (
            found
            and not subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode
        ):
            return found
    return None


def pairs(torchs: list[str], pythons: list[str], *, every: bool) -> list[tuple[str, str]]:
    """All releases on the first Python and the last release on all, or every pair."""
    return [(t, p) for p in pythons for t in torchs if every or p == pythons[0] or t == torchs[-1]]


def run(*command: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    words = list(map(str, command))
    return subprocess.run(words, check=False, cwd=cwd, env=environ, capture_output=True, text=True)


def install(folder: Path, torch: str, python: str) -> str:
    """Make the environment if it is not there, and install this checkout in it.

    Return what went wrong, or "".

    Raises:
        UnreachableError: if the package index could not be reached.
    """
    of_env = folder / "bin" / "python"
    # The release is the one asked for, whatever a file of constraints would have it be.
    pip = of_env, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-compile"
    free = {"PIP_CONSTRAINT": os.devnull}
    if not (folder / "made").exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        dev = project["optional-dependencies"]["dev"]
        tools = [d for d in dev if d.split("==")[0] in TOOLS]
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            (python, "-m", "venv", folder),
            (*pip, "--no-cache-dir", "--no-deps", f"torch=={torch}.*"),
        ):
            if (done := run(*command, **free)).returncode:
                return _trouble(done.stderr)
        required = run(of_env, "-c", _REQUIRED).stdout.splitlines()
        needs = [r for r in required if "extra ==" not in r and not _OF_CUDA.match(r)]
        if (done := run(*pip, *needs, *tools, "tqdm", **free)).returncode:
            return _trouble(done.stderr)
        if run(of_env, "-c", "import torch", cwd=folder).returncode:
            stand_ins.write(next(folder.glob("lib/python3*/site-packages")))
        (folder / "made").touch()
    (folder / "ready").unlink(missing_ok=True)
    if (done := run(*pip, "--no-deps", "--force-reinstall", ROOT, **free)).returncode:
        return _trouble(done.stderr)
    done = run(of_env, "-W", "error", HERE / "first_steps.py", cwd=folder)
    if done.stdout != "ok\n":
        return f"first_steps.py: {_last_line(done.stderr)}"
    (folder / "ready").touch()
    return ""


def _trouble(text: str) -> str:
    """Return the line of pip's output that says what went wrong."""
    if "No space left on device" in text:
        raise UnreachableError("the disk is full")
    if _UNREACHED.search(text):
        raise UnreachableError(f"the package index cannot be reached: {_last_line(text)}")
    return _last_line(text)


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    return (errors or text.splitlines() or ["no output"])[-1]


def sample(folder: Path, options: argparse.Namespace) -> tuple[dict[str, int], list[str], str]:
    """Run the sample; return the counts, the tests that failed, and the last line."""
    cache = folder / "cache"
    done = run(
        *(folder / "bin" / "python", "-m", "pytest", "-q", "--tb=short", "-n", options.jobs),
        *("--cache-clear", "-o", f"cache_dir={cache}", "--deselect", "tests/architecture"),
        *options.tests,
        FORALL_ONE_IN=str(options.one_in),
        FORALL_SAMPLED="1",
        OMP_NUM_THREADS="1",
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    last = (done.stdout.splitlines() or ["no output"])[-1]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last.split(" in ")[0])}
    failed = cache / "v" / "cache" / "lastfailed"
    names = list(json.loads(failed.read_text())) if failed.exists() else []
    return counts, names, "" if done.returncode in (0, 1) else _last_line(done.stdout)


def known(torch: str, version: str) -> tuple[str, ...]:
    """How the names of tests begin that known.toml lists for a release and a Python."""
    entries = tomllib.loads((HERE / "known.toml").read_text()).get("failure", [])
    assert all(entry["reason"] for entry in entries)
    of_pair = (
        entry
        for entry in entries
        if torch in entry.get("torch", [torch]) and version in entry.get("python", [version])
    )
    return tuple(begins for entry in of_pair for begins in entry["tests"])


def try_pair(torch: str, version: str, options: argparse.Namespace) -> Ran:
    begun = time.monotonic()
    folder = options.folder.resolve() / f"torch{torch}-python{version}"
    counts, failed, trouble, is_reached = {}, [], "", True
    try:
        if options.made and not (folder / "ready").exists():
            raise UnreachableError("no environment was made")
        if not options.made:
            trouble = install(folder, torch, str(interpreter(version)))
    except UnreachableError as why:
        trouble, is_reached = f"NOT TRIED: {why}", False
    if not trouble and not options.install:
        counts, failed, trouble = sample(folder, options)
    unexpected = [name for name in failed if not name.startswith(known(torch, version))]
    if options.delete:
        shutil.rmtree(folder)
    seconds = time.monotonic() - begun
    return Ran(torch, version, counts, unexpected, trouble, is_reached, seconds)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--torch", nargs="+", default=releases(), help="as in 2.13")
    p.add_argument("--python", nargs="+", default=list(PYTHONS), help="as in 3.12")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--every", action="store_true", help="every pair, not all of one kind only")
    which.add_argument("--ends", action="store_true", help="oldest and newest, on one Python")
    part = p.add_mutually_exclusive_group()
    part.add_argument("--install", action="store_true", help="make environments, and no more")
    part.add_argument(
        "--made", action="store_true", help="run in those of --install, and no others"
    )
    p.add_argument("--reachable", action="store_true", help="go on where the index is not reached")
    p.add_argument("--one-in", type=int, default=40, help="tests of which one runs")
    p.add_argument("--tests", nargs="+", default=["tests"], help="files or folders")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    p.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    p.add_argument("--delete", action="store_true", help="environments that have been used")
    options = p.parse_args()
    had = [version for version in options.python if interpreter(version)]
    for version in options.python:
        if version not in had:
            print(f"no Python {version} here")
    if options.ends:
        options.torch, had = [options.torch[0], options.torch[-1]], had[:1]
    print(f"{'torch':<7}{'Python':<8}{'passed':>7}{'failed':>7}{'known':>7}{'seconds':>9}")
    wrong = False
    for torch, version in pairs(options.torch, had, every=options.every):
        ran = try_pair(torch, version, options)
        failed = ran.counts.get("failed", 0) + ran.counts.get("errors", 0)
        failed += ran.counts.get("error", 0)
        numbers = ran.counts.get("passed", 0), failed, failed - len(ran.unexpected)
        print(f"{torch:<7}{version:<8}" + "".join(f"{n:>7}" for n in numbers), end="")
        print(f"{ran.seconds:>9.0f}  {ran.trouble}".rstrip(), flush=True)
        print(
            *(f"    {name}" for name in ran.unexpected), sep="\n", end="\n"[: len(ran.unexpected)]
        )
        was_tried = ran.is_reached or not options.reachable
        wrong |= bool(ran.unexpected or (ran.trouble and was_tried))
    return int(wrong or not had)


if __name__ == "__main__":
    sys.exit(main())
