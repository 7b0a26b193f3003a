"""Check forall on this machine's accelerator, then compare its speed: see --help.

Sections run in processes of their own, so that a crash ends one section only. Every status:

    ok       as the loop over examples, or as plain torch
    wrong    another value, shape, dtype or device
    error    the plain program runs, forall's raises
    crash    the process ended, or did not come back
    slow     right, with a PerformanceWarning: a loop over examples, or a call not recorded
    waits    right, but the host waited for the device where nothing asks for it
    skipped  this machine or this release of torch lacks what the check is about
    not run  the time was over

The exit code is 1 where anything is wrong, an error or a crash.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
TESTS, ROOT = HERE.parents[1], HERE.parents[2]
# A program's own folder comes first, whose `divergence` is a section. The folder of tests is meant.
sys.path[:] = [str(TESTS), *(p for p in sys.path if p not in (str(TESTS), str(HERE.parent)))]

SECTIONS = {  # in the order in which they begin, and what each is about
    "threads": "derivatives taken by the engine's threads: hooks, custom Functions, checkpoints",
    "nesting": "every pair of transforms, and triples",
    "limitations": "the table of what torch.func cannot do",
    "divergence": "if, while, .item(), masks: examples that diverge",
    "control": "cond, switch, while_loop, fori_loop, scan, map, associative_scan",
    "draws": "random numbers, generators, keys",
    "recurrent": "LSTM, GRU, RNN and their cells",
    "attention": "scaled dot products by each kernel",
    "layers": "convolutions, norms, pooling, losses, indexing, linear algebra",
    "precision": "autocast, GradScaler, TF32, deterministic algorithms",
    "devices": "default devices, CPU numbers beside the device's, a second device",
    "recording": "jit, CUDA graphs, and calls that are replayed unasked",
    "inductor": "jit by torch's compiler",
    "streams": "side streams, CUDA graphs of the caller's own",
    "memory": "out of memory, budgets, what is left behind",
    "waiting": "no synchronisation without data-dependent control flow",
    "operators": "torch's own database of operators",
    "programs": "random programs of writes, views and autograd",
    "autograd": "torch.autograd inside every transform",
    "functions": "custom Functions under every transform",
}
SHARDS = {
    "operators": 6,
    "inductor": 3,
    "autograd": 2,
    "functions": 2,
}  # that are spread over processes
TIMES = "times"  # the ratios: alone on the device, after all else
BEYOND_USE = 3  # exit code of a process whose device takes no more calls
MOST_SHOWN = 12  # of one status in one section; --json has all
PATIENCE = 45.0  # seconds that a check in progress may go on after the time is over


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    names = ", ".join((*SECTIONS, TIMES))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    p.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu, ... (cuda)")
    p.add_argument("--quick", action="store_true", help="fewer checks, in 150 seconds")
    p.add_argument("--only", nargs="+", metavar="SECTION", help=f"some of: {names}")
    p.add_argument("--seconds", type=float, help="for all together (450; quick: 150)")
    p.add_argument("--processes", type=int, help="that check at a time (by cores and memory)")
    p.add_argument("--json", type=Path, help="every result, and every ratio")
    p.add_argument("--write", action="store_true", help="benchmarks/results_<device>.md")
    p.add_argument("--verbose", action="store_true", help="every check, not only those to look at")
    p.add_argument("--preload", help="a module to import first, that brings a device along")
    p.add_argument("--child", help=argparse.SUPPRESS)  # section, shard, of so many
    p.add_argument("--until", type=float, help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = p.parse_args(argv)
    unknown = set(options.only or ()) - {*SECTIONS, TIMES}
    if unknown:
        p.error(f"no section is called {', '.join(sorted(unknown))}; there are {names}")
    if options.seconds is None:
        options.seconds = 150.0 if options.quick else 450.0
    return options


class Job(NamedTuple):
    """A section, or a shard of it, from the check at place `first`."""

    section: str
    shard: int = 0
    shards: int = 1
    first: int = 0

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Job:
        section, *places = text.split("/")
        return cls(section, *map(int, places))

    def after(self, place: int) -> Job:
        return self._replace(first=place + 1)


# --- in a process of a section's own --------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
    """Run the checks of one section, and write each as it begins and as it ends."""
    from gpu.checks import Check, Result, judge

    job = Job.parse(options.child)
    device = prepare(options)
    checks: list[Check] = []

    def load() -> None:
        module = importlib.import_module(f"gpu.{job.section}")
        every = getattr(module, "QUICK" if options.quick else "EVERY", 1)
        checks[:] = module.checks(device)[::every][job.shard :: job.shards]

    with options.out.open("w") as lines:

        def tell(entry: dict[str, Any]) -> None:
            print(json.dumps(entry), file=lines, flush=True)

        tell({"begun": "the section itself", "left": 0})
        made = judge(job.section, Check("the section itself", load), device)
        if made.status != "ok":
            tell(made.as_dict())
        for i, check in enumerate(checks[job.first :], job.first):
            left = len(checks) - i
            if time.time() > options.until:
                result = Result(job.section, f"{left} checks", "not run", "the time was over")
                tell(result.as_dict() | {"count": left})
                break
            tell({"begun": check.name, "place": i, "left": left - 1})
            result = judge(job.section, check, device)
            tell(result.as_dict())
            if is_beyond_use(result.text):
                return BEYOND_USE  # and another process goes on
    return 0


def is_beyond_use(text: str) -> bool:
    """Whether an error of the device stays: every later call of the process raises it too."""
    marks = ("device-side assert", "illegal memory access", "unspecified launch failure")
    return any(mark in text for mark in marks)


def prepare(options: argparse.Namespace) -> Any:
    if options.preload:
        importlib.import_module(options.preload)
    stand_in_for_expecttest()
    import torch

    if not options.child.startswith(TIMES):
        torch.set_num_threads(1)
    # The loop and the call of all examples take other kernels: rounding alone is to differ.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(options.device)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def stand_in_for_expecttest() -> None:
    """Torch's database of operators imports it, and nothing that is used here needs it."""
    if importlib.util.find_spec("expecttest") is None:
        import types
        import unittest

        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module


# --- the process that starts them -----------------------------------------------------------------


class Child:
    """A process that runs one section, or a shard of it, and the file that it writes to."""

    def __init__(self, job: Job, options: argparse.Namespace, until: float, folder: Path) -> None:
        self.job, self.until = job, until
        self.out = folder / f"{str(job).replace('/', '-')}.jsonl"
        self.log = self.out.with_suffix(".log").open("w+")
        program = ROOT / "benchmarks" / "on_a_gpu.py" if job.section == TIMES else HERE
        command = [sys.executable, str(program), "--child", str(job), "--device", options.device]
        command += ["--until", str(until), "--out", str(self.out)]
        command += ["--quick"] * options.quick
        command += ["--preload", options.preload] if options.preload else []
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, cwd=ROOT, env=with_whole_paths()
        )

    def is_done(self) -> bool:
        """Whether the process has ended; it is ended where it does not come back."""
        if self.process.poll() is None and time.time() > self.until + PATIENCE:
            self.process.kill()
            self.process.wait()
        return self.process.poll() is not None

    def entries(self) -> tuple[list[dict[str, Any]], Job | None]:
        """What it wrote, and what is left for another process where it ended in a check."""
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        code = self.process.returncode
        if code == 0:
            return entries, None
        begun = next((e for e in reversed(entries) if "begun" in e), {"begun": "the process"})
        if code != BEYOND_USE:
            text = f"exit code {code}: {self.last_words()}"
            entry = {"section": self.job.section, "name": begun["begun"], "status": "crash"}
            entries.append(entry | {"text": text, "seconds": 0.0})
        return entries, self.job.after(begun["place"]) if begun.get("left") else None

    def last_words(self) -> str:
        self.log.seek(0)
        return " ".join(self.log.read().split())[-300:]


def with_whole_paths() -> dict[str, str]:
    """The environment, with no path that hangs on the folder that this was started in."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}


def run_all(
    jobs: list[Job], options: argparse.Namespace, until: float, processes: int, folder: Path
) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
    """Run the jobs, so many at a time; each with its entries, as they end."""
    waiting, running = list(jobs), []
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop(0)
            if time.time() > until:
                entry = {"section": job.section, "name": "all checks", "status": "not run"}
                yield job, [entry | {"text": "the time was over", "seconds": 0.0}]
                continue
            running.append(Child(job, options, until, folder))
        for child in [c for c in running if c.is_done()]:
            running.remove(child)
            entries, rest = child.entries()
            if rest is not None:
                waiting.insert(0, rest)
            yield child.job, entries
        time.sleep(0.05)


def processes_for(options: argparse.Namespace) -> int:
    """One for two cores and 8 GB of the device's memory, at most 8."""
    if options.processes:
        return options.processes
    found = max(1, min(8, (os.cpu_count() or 1) // 2))
    if options.device.startswith("cuda"):
        import torch

        whole = torch.cuda.get_device_properties(torch.device(options.device)).total_memory
        found = max(1, min(found, whole // (8 << 30)))
    return found


def described(options: argparse.Namespace) -> list[str]:
    import torch

    import forall

    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    release = f"torch {torch.__version__}, Python {platform.python_version()}"
    return [
        f"{release}, forall from {Path(forall.__file__).parent}",
        f"device {device} ({name}), {os.cpu_count()} cores",
    ]


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.child:
        return work(options)
    if options.preload:
        importlib.import_module(options.preload)
    started = time.time()
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here: --device cpu runs the checks without.")
        return 2
    header = described(options)
    print(*header, sep="\n", flush=True)
    chosen = [s for s in (*SECTIONS, TIMES) if not options.only or s in options.only]
    jobs = [
        Job(s, i, n) for s in chosen if s != TIMES for n in (SHARDS.get(s, 1),) for i in range(n)
    ]
    processes = processes_for(options)
    with_times = TIMES in chosen
    end = started + options.seconds
    checked_by = started + options.seconds * (0.6 if with_times else 0.95)
    results: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder)
        for job, entries in run_all(jobs, options, checked_by, processes, given):
            mine = [e for e in entries if "status" in e]
            results += mine
            counts = Counter(e["status"] for e in mine)
            text = ", ".join(f"{n} {status}" for status, n in counts.items())
            print(f"{time.time() - started:4.0f} s  {job.section:12} {text}", flush=True)
            for e in mine if options.verbose else ():
                print(shown(e), flush=True)
        if with_times:
            for _, entries in run_all([Job(TIMES, 0, 1)], options, end, 1, given):
                results += [e for e in entries if "status" in e]
                ratios += [e for e in entries if "ratios" in e]
    lines = report(chosen, results, ratios)
    print(*lines, sep="\n")
    seconds = time.time() - started
    print(f"{seconds:.0f} s in all, {processes} processes")
    if options.json:
        found = {"header": header, "results": results, "ratios": ratios, "seconds": seconds}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        write(options, header, lines)
    return int(any(e["status"] in ("wrong", "error", "crash") for e in results))


# --- the report -----------------------------------------------------------------------------------


def shown(entry: dict[str, Any]) -> str:
    text = entry["text"][:220]
    return f"  {entry['status']:8}{entry['section']}: {entry['name']}  {text}".rstrip()


def report(
    chosen: list[str], results: list[dict[str, Any]], ratios: list[dict[str, Any]]
) -> list[str]:
    """The sections, what is to be looked at, and the ratios."""
    columns = ("ok", "wrong", "error", "crash", "slow", "waits", "skipped", "not run")
    lines = ["", "| section | " + " | ".join(columns) + " | seconds |", "|---" * 10 + "|"]
    lines[2] = "| --- |" + " ---: |" * (len(columns) + 1)
    for section in chosen:
        mine = [e for e in results if e["section"] == section]
        if section == TIMES and not mine:
            continue
        counts = Counter()
        for e in mine:
            counts[e["status"]] += e.get("count", 1)
        seconds = sum(e["seconds"] for e in mine)
        cells = " | ".join(str(counts[c] or "") for c in columns)
        lines.append(f"| {section} | {cells} | {seconds:.0f} |")
    order = ("wrong", "crash", "error", "waits", "slow", "not run")
    noted = sorted(
        (e for e in results if e["status"] in order), key=lambda e: order.index(e["status"])
    )
    if noted:
        lines += ["", "To look at:", ""]
        told: Counter[tuple[str, str]] = Counter()
        for e in noted:
            kind = e["section"], e["status"]
            told[kind] += 1
            if told[kind] <= MOST_SHOWN:
                lines.append(f"- {shown(e).strip()}")
        left = {kind: n - MOST_SHOWN for kind, n in told.items() if n > MOST_SHOWN}
        lines += [f"- {status} in {section}: {n} more" for (section, status), n in left.items()]
    lines += table_of_ratios(ratios)
    return lines


def table_of_ratios(ratios: list[dict[str, Any]]) -> list[str]:
    """Forall's time, or peak memory, divided by another's: what each column is, on_a_gpu tells."""
    if not ratios:
        return []
    found = [c for e in ratios for c in e["ratios"]]
    order = ("func", "loop", "hand", "share")
    columns = [c for o in order for c in dict.fromkeys(found) if c.endswith(o) and "mem" not in c]
    columns += sorted({c for c in found if "mem" in c})
    lines = ["", "| program | " + " | ".join(columns) + " | by hand |"]
    lines.append("| --- |" + " ---: |" * (len(columns) + 1))
    for e in ratios:
        cells = " | ".join(number(e["ratios"].get(c)) for c in columns)
        lines.append(f"| {e['name']} | {cells} | {e['by hand']} |")
    means = [
        statistics.geometric_mean([e["ratios"][c] for e in ratios if e["ratios"].get(c)] or [1.0])
        for c in columns
    ]
    return [*lines, f"| geometric mean | {' | '.join(map(number, means))} | |"]


def number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.2f}"  # noqa: PLR0124 - nan


def write(options: argparse.Namespace, header: list[str], lines: list[str]) -> None:
    device = options.device.replace(":", "")
    path = ROOT / "benchmarks" / f"results_{device}.md"
    about = [header[0].split(", forall from")[0], header[1]]
    path.write_text(
        "\n".join([f"# On {device}", "", "Written by `make gpu`.", "", *about, *lines]) + "\n"
    )
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
