"""Entries are judged in processes of their own: one may crash the interpreter or never return."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .engines import Engine
from .entries import all_ops
from .judge import Verdict, judge

Task = tuple[str, str]  # entry, dtype


class _Worker:
    def __init__(self, context: Any, setting: dict[str, Any]):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setting), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.since = 0.0

    def give(self, task: Task) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, setting: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ops = all_ops()
    engine = Engine(setting["engine"])
    while True:
        try:
            name, dtype = pipe.recv()
        except EOFError:
            return
        try:
            found = judge(
                engine,
                name,
                ops[name],
                getattr(torch, dtype),
                setting["samples"],
                setting["seed"],
            )
        except Exception as error:  # a fault of the sweep, not of the engine; it must be seen
            found = Verdict(name, dtype, "crash", first={"crash": f"the sweep raised {error!r}"})
        pipe.send(found)


def judge_all(
    tasks: list[Task], setting: dict[str, Any], jobs: int = 2, limit: float = 60.0
) -> Iterator[Verdict]:
    """A verdict per task, in the order in which they are reached."""
    # op_db takes seconds to import; forked workers have it at once, new ones after a crash too.
    torch.set_num_threads(1)
    all_ops()
    context = multiprocessing.get_context("fork")
    left = list(reversed(tasks))
    workers = [_Worker(context, setting) for _ in range(min(jobs, len(tasks)))]
    try:
        while left or any(w.task for w in workers):
            for w in workers:
                if w.task is None and left:
                    w.give(left.pop())
            wait([w.pipe for w in workers if w.task], timeout=0.5)
            for i, w in enumerate(workers):
                verdict = _collect(w, limit)
                if verdict is None:
                    continue
                w.task = None
                if verdict.status in ("crash", "timeout"):
                    w.stop()
                    workers[i] = _Worker(context, setting)
                yield verdict
    finally:
        for w in workers:
            w.stop()


def _collect(worker: _Worker, limit: float) -> Verdict | None:
    if worker.task is None:
        return None
    name, dtype = worker.task
    spent = time.monotonic() - worker.since
    try:
        if worker.pipe.poll():
            return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        text = f"the process ended with {worker.process.exitcode}"
        return Verdict(name, dtype, "crash", first={"crash": text}, seconds=round(spent, 2))
    if spent > limit:
        text = f"not done after {limit:.0f} s"
        return Verdict(name, dtype, "timeout", first={"timeout": text}, seconds=round(spent, 2))
    return None
