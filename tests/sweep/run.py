"""Run the sweep, which writes docs/reference/coverage.md:
``python tests/sweep/run.py --json sweep.jsonl --resume --out docs/reference/coverage.md``.

Every verdict is written as it is reached, so a run that was cut short goes on with ``--resume``,
and machines that each take a ``--shard`` may put their files together.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    _tests = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_tests), str(_tests.parent / "src")]

import torch

from sweep.entries import dtypes_for
from sweep.forms import Form, entries
from sweep.report import markdown, summary
from sweep.words import FULL, PART, PART_WORDS, WORDS, WRITING_WORDS
from sweep.workers import Job, judge_all


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--engines", nargs="+", default=["forall", "torch.func"])
    p.add_argument("--dtypes", nargs="+", default=[*FULL, *PART])
    p.add_argument("--words", nargs="+", default=list(WORDS))
    p.add_argument("--samples", type=int, default=6, help="at most, for each entry and dtype")
    p.add_argument("--fraction", type=float, help="this part of the entries, drawn by --seed")
    p.add_argument("--only", nargs="+", metavar="NAME", help="entries, all their forms")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--shard", default="0/1", metavar="I/N", help="entries I, I+N, I+2N, ...")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    p.add_argument("--limit", type=float, default=60.0, help="seconds for one word of an entry")
    p.add_argument("--minutes", type=float, default=1e9, help="begin no verdict after so many")
    p.add_argument("--out", type=Path, help="markdown report")
    p.add_argument("--json", type=Path, help="verdicts, one a line, written as they are reached")
    p.add_argument("--resume", action="store_true", help="keep the verdicts --json already has")
    return p.parse_args(argv)


def chosen(ops: dict[str, Any], options: argparse.Namespace) -> list[str]:
    names = list(ops)
    if options.only:
        names = [n for n in names if {n, n.split(" ")[0], n.split(":")[0]} & set(options.only)]
        if not names:
            raise SystemExit(f"no entry is named {' or '.join(options.only)}")
    elif options.fraction is not None:
        count = max(1, round(options.fraction * len(names)))
        drawn = set(random.Random(options.seed).sample(names, count))
        names = [n for n in names if n in drawn]
    i, n = map(int, options.shard.split("/"))
    return names[i::n]


def jobs_of(ops: dict[str, Any], options: argparse.Namespace, done: set[tuple]) -> list[Job]:
    """One dtype after another: a run that is cut short has seen every entry in the first."""
    wanted = [getattr(torch, d) for d in options.dtypes]
    names = chosen(ops, options)
    taken = {n: [str(d).removeprefix("torch.") for d in dtypes_for(ops[n], wanted)] for n in names}
    order = dict.fromkeys([*options.dtypes, *(d for ds in taken.values() for d in ds)])
    found = []
    for dtype in order:
        for n in names:
            if dtype not in taken[n]:
                continue
            words = [w for w in options.words if w in words_of(ops[n], dtype)]
            parts = {w: [e for e in options.engines if (n, dtype, w, e) not in done] for w in words}
            parts = {w: e for w, e in parts.items() if e}
            if parts:
                found.append(Job(n, dtype, parts))
    return found


def words_of(op: Any, dtype: str) -> tuple[str, ...]:
    if dtype in PART:
        return PART_WORDS
    return WRITING_WORDS if isinstance(op, Form) else tuple(WORDS)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    ops = entries()
    verdicts: list[dict[str, Any]] = []
    if options.resume and options.json and options.json.exists():
        verdicts = [json.loads(line) for line in options.json.read_text().splitlines()]
    done = {(v["name"], v["dtype"], v["word"], v["engine"]) for v in verdicts}
    setting = {"samples": options.samples, "seed": options.seed}
    started = time.monotonic()
    lines = options.json.open("a" if options.resume else "w") if options.json else None
    for verdict in judge_all(jobs_of(ops, options, done), setting, options.jobs, options.limit):
        verdicts.append(verdict.as_dict())
        if lines:
            print(json.dumps(verdicts[-1]), file=lines, flush=True)
        if verdict.engine == "forall" and verdict.status in ("wrong", "error", "crash", "timeout"):
            where = f"{verdict.name} {verdict.dtype} {verdict.word}"
            print(f"{verdict.status}: {where}: {verdict.first[verdict.status]}", flush=True)
        if time.monotonic() - started > 60 * options.minutes:
            break
    if options.out:
        options.out.write_text(markdown(verdicts, len(ops)))
    print("\n".join(summary(verdicts)))
    print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
