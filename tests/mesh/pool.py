"""A pool of processes, each a rank of one gloo group on the loopback, that call functions by name.

A function of `rank_programs` is called on the ranks of a subgroup, with a mesh of one dim over
them. The pool returns what each rank returned, or the text of what it raised.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

SECONDS = 300.0  # that a function may take on all ranks; a machine may be busy


@dataclass
class Raised:
    """What a rank raised."""

    kind: str
    text: str
    trace: str


class RanksLostError(Exception):
    """Some ranks gave no answer in time, or their processes have ended."""


@functools.cache
def _start_server() -> Any:
    """Start a server that imports torch and the programs once, and is copied for each process.

    Some releases of Python give it no other path than that of the environment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mesh.rank_programs", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


class Pool:
    """Processes that are started once, and answer calls until one of them is lost."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        context = _start_server()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.lost: str | None = None  # why no more calls can be answered
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, self.folder.name, timeout), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(
        self, name: str, *args: Any, size: int | None = None, seconds: float = SECONDS
    ) -> list[Any]:
        """Return what ``name(mesh, *args)`` returns on each of the first ranks.

        It is a function of `rank_programs`, or one of another module here by ``"module.name"``.
        """
        if self.lost is not None:
            raise RanksLostError(f"an earlier call was not answered: {self.lost}")
        size = size or self.size
        for pipe in self.pipes[:size]:
            pipe.send((name, size, args))
        answers: dict[int, Any] = {}
        while len(answers) < size:
            left = [r for r in range(size) if r not in answers]
            ready = wait([self.pipes[r] for r in left], timeout=seconds)
            if not ready:
                self.lost = f"{name}: no answer of ranks {left} in {seconds:.0f} s"
                raise RanksLostError(self.lost)
            for rank in left:
                if self.pipes[rank] in ready:
                    try:
                        answers[rank] = self.pipes[rank].recv()
                    except (EOFError, ConnectionResetError):
                        answers[rank] = Raised("Ended", "the process has ended", "")
        return [answers[rank] for rank in range(size)]

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def ask(pool: Pool, name: str, *args: Any, size: int, **options: Any) -> list[Any]:
    """Return what the ranks return; fail with the first error that is not theirs to return."""
    answers = pool.call(name, *args, size=size, **options)
    for answer in answers:
        if isinstance(answer, Raised):
            pytest.fail(answer.trace or answer.text)
    return answers


def join(answers: list[Any]) -> list[Any]:
    """Return the rows of all ranks, for each tensor in their answers."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [torch.cat(rows) for rows in zip(*map(tree_leaves, answers), strict=True)]


def _serve(pipe: Connection, rank: int, size: int, folder: str, timeout: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    groups = [dist.new_group([*range(count)]) for count in range(1, size + 1)]
    meshes: dict[int, DeviceMesh] = {}
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        name, among, args = job
        if among not in meshes:
            group = groups[among - 1]
            meshes[among] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
        try:
            module, _, function = name.rpartition(".")
            programs = importlib.import_module(f"mesh.{module or 'rank_programs'}")
            answer = getattr(programs, function)(meshes[among], *args)
        except BaseException as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
    dist.destroy_process_group()
