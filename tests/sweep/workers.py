"""Entries are judged in processes of their own: one may crash the interpreter or never return."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import torch

from .engines import Engine
from .forms import entries
from .judge import Entry, Verdict


@dataclass
class Job:
    """An entry in one dtype, and under which word which engines are still to be judged."""

    name: str
    dtype: str
    parts: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, word: str, engine: str) -> None:
        self.parts[word].remove(engine)
        if not self.parts[word]:
            del self.parts[word]


class _Worker:
    def __init__(self, context: Any, setting: dict[str, Any]):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setting), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.now = ("", "", "")  # word, engine and case that it said it would run next
        self.since = 0.0

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.now = (next(iter(job.parts)), job.parts[next(iter(job.parts))][0], "its samples")
        self.pipe.send(job)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, setting: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ops = entries()
    engines = {name: Engine(name) for name in ("forall", "torch.func")}

    def tell(*now: str) -> None:
        pipe.send(now)

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        dtype = getattr(torch, job.dtype)
        entry = Entry(job.name, ops[job.name], dtype, setting["samples"], setting["seed"])
        for word, names in job.parts.items():
            for verdict in entry.judge(word, [engines[n] for n in names], tell):
                pipe.send(verdict)
        pipe.send(None)


def judge_all(
    jobs: list[Job], setting: dict[str, Any], workers: int = 2, limit: float = 60.0
) -> Iterator[Verdict]:
    """The verdicts, in the order in which they are reached; ``limit`` is for one word."""
    # op_db takes seconds to import; forked workers have it at once, new ones after a crash too.
    torch.set_num_threads(1)
    entries()
    context = multiprocessing.get_context("fork")
    left = list(reversed(jobs))
    crew = [_Worker(context, setting) for _ in range(min(workers, len(jobs)))]
    try:
        while left or any(w.job for w in crew):
            for w in crew:
                if w.job is None and left:
                    w.give(left.pop())
            wait([w.pipe for w in crew if w.job], timeout=0.5)
            for i, w in enumerate(crew):
                yield from _collect(w)
                lost = _lost(w, limit)
                if lost is not None:
                    assert w.job is not None
                    yield lost
                    w.job.drop(lost.word, lost.engine)
                    if w.job.parts:
                        left.append(w.job)
                    w.stop()
                    crew[i] = _Worker(context, setting)
    finally:
        for w in crew:
            w.stop()


def _collect(worker: _Worker) -> Iterator[Verdict]:
    try:
        while worker.job is not None and worker.pipe.poll():
            said = worker.pipe.recv()
            if said is None:
                worker.job = None
            elif isinstance(said, Verdict):
                worker.job.drop(said.word, said.engine)
                worker.since = time.monotonic()
                if worker.job.parts:
                    word = next(iter(worker.job.parts))
                    worker.now = (word, worker.job.parts[word][0], "before its cases")
                yield said
            else:
                worker.now = said
    except (EOFError, ConnectionResetError):
        worker.process.join()


def _lost(worker: _Worker, limit: float) -> Verdict | None:
    """What has ended the process, or takes too long."""
    if worker.job is None:
        return None
    spent = time.monotonic() - worker.since
    status, text = "", ""
    if worker.process.exitcode is not None:
        status, text = "crash", f"the process ended with {worker.process.exitcode}"
    elif spent > limit:
        status, text = "timeout", f"not done after {limit:.0f} s"
    if not status:
        return None
    word, engine, case = worker.now
    found = Verdict(worker.job.name, worker.job.dtype, word, engine, seconds=spent)
    found.add(None, status, f"{case}: {text}")
    return found.done()
