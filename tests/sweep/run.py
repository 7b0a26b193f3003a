"""Run the sweep: ``python tests/sweep/run.py --engine forall --full --out report.md``."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    _tests = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_tests), str(_tests.parent / "src")]

import torch

from sweep.entries import all_ops, dtypes_for
from sweep.report import markdown, merged, totals
from sweep.workers import Task, judge_all


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--engine", choices=("forall", "torch.func"), default="forall")
    p.add_argument("--dtypes", nargs="+", default=["float64", "float32"])
    p.add_argument("--samples", type=int, default=4, help="at most, for each entry and dtype")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="all entries (the default)")
    which.add_argument("--fraction", type=float, help="this part of the entries, drawn by --seed")
    which.add_argument(
        "--only", nargs="+", metavar="NAME", help="entries, with or without :variant"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--shard", default="0/1", metavar="I/N", help="entries I, I+N, I+2N, ...")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--limit", type=float, default=60.0, help="seconds for one entry and dtype")
    p.add_argument("--out", type=Path, help="markdown report")
    p.add_argument("--json", type=Path, help="verdicts, one a line, written as they are reached")
    p.add_argument("--resume", action="store_true", help="keep the verdicts --json already has")
    return p.parse_args(argv)


def chosen(ops: dict[str, Any], options: argparse.Namespace) -> list[str]:
    names = list(ops)
    if options.only:
        names = [n for n in names if {n, n.split(":")[0]} & set(options.only)]
        if not names:
            raise SystemExit(f"no entry is named {' or '.join(options.only)}")
    elif options.fraction is not None:
        count = max(1, round(options.fraction * len(names)))
        drawn = set(random.Random(options.seed).sample(names, count))
        names = [n for n in names if n in drawn]
    i, n = map(int, options.shard.split("/"))
    return names[i::n]


def tasks_of(ops: dict[str, Any], names: list[str], dtypes: list[str]) -> list[Task]:
    wanted = [getattr(torch, d) for d in dtypes]
    return [(n, str(d).removeprefix("torch.")) for n in names for d in dtypes_for(ops[n], wanted)]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    ops = all_ops()
    tasks = tasks_of(ops, chosen(ops, options), options.dtypes)
    verdicts: list[dict[str, Any]] = []
    if options.resume and options.json and options.json.exists():
        verdicts = [json.loads(line) for line in options.json.read_text().splitlines()]
        done = {(v["name"], v["dtype"]) for v in verdicts}
        tasks = [t for t in tasks if t not in done]
    setting = {"engine": options.engine, "samples": options.samples, "seed": options.seed}
    started = time.monotonic()
    lines = options.json.open("a" if options.resume else "w") if options.json else None
    for verdict in judge_all(tasks, setting, options.jobs, options.limit):
        verdicts.append(verdict.as_dict())
        if lines:
            print(json.dumps(verdicts[-1]), file=lines, flush=True)
        if verdict.status in ("wrong", "crash", "timeout"):
            print(f"{verdict.status}: {verdict.name} {verdict.first[verdict.status]}", flush=True)
    title = f"{options.engine} on torch {torch.__version__}: {', '.join(options.dtypes)}"
    if options.out:
        options.out.write_text(markdown(verdicts, title))
    print(f"{title}, {time.monotonic() - started:.0f} s")
    for key, value in totals(merged(verdicts)).items():
        print(f"  {key}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
