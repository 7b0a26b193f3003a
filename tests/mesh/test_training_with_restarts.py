"""A training run of which a process is killed has the losses of one that nothing happened to."""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 120.0
# Else new processes may read the addresses of those that have ended.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by one process


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("training_with_restarts")


@contextmanager
def launch(folder: Path, ranks: int, *options: str) -> Iterator[subprocess.Popen]:
    """Start the example by torchrun; it and its processes end with this context."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [*RENDEZVOUS, "--max-restarts=1"]
    with (folder.parent / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, str(EXAMPLES / "training_with_restarts.py"), str(folder), *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
    alarm = threading.Timer(SECONDS, process.terminate)
    alarm.start()
    try:
        yield process
    finally:
        alarm.cancel()
        process.terminate()  # torchrun ends its processes
        process.communicate()


def read_starts(process: subprocess.Popen, ranks: int) -> list[tuple[int, int]]:
    """Return the number of each process that begins, and the step at which it does."""
    found: list[tuple[int, int]] = []
    while len(found) < ranks and (line := process.stdout.readline()):  # may have two of them
        found += [
            (int(a), int(b)) for a, b in re.findall(r"process (\d+) begins at step (\d+)", line)
        ]
    return found


def read_losses(training, folder: Path) -> torch.Tensor:
    state = training.make_state()
    training.load_newest(folder, state)
    return state["losses"]


def test_the_losses_are_those_of_a_run_that_nothing_happened_to(training, tmp_path):
    folder = tmp_path / "checkpoints"
    with launch(folder, 2, "--steps=12", "--wait=0.2") as process:
        starts = read_starts(process, 2)
        assert [step for _, step in starts] == [0, 0]
        while process.poll() is None and not (folder / "step_4" / ".metadata").exists():
            time.sleep(0.02)
        os.kill(starts[1][0], signal.SIGKILL)
        again = read_starts(process, 2)
        assert {number for number, _ in starts}.isdisjoint(number for number, _ in again)
        assert {step for _, step in again} in ({4}, {8})
        assert process.wait() == 0, (tmp_path / "errors").read_text()[-3000:]
    assert len(read_losses(training, folder)) == 12

    with launch(folder, 3, "--steps=16") as process:
        assert [step for _, step in read_starts(process, 3)] == [12] * 3
        assert process.wait() == 0, (tmp_path / "errors").read_text()[-3000:]
    assert len(read_losses(training, folder)) == 16

    losses = training.train(folder, 20)  # one process
    torch.testing.assert_close(losses, training.train(tmp_path / "undisturbed", 20))
