"""DP-SGD over several processes, which goes on from its last checkpoint if a process dies.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 \
        examples/training_with_restarts.py checkpoints --wait 0.5

The options make a new store for each attempt: in a shared one, new processes may find the addresses
of those that have ended.

Each process prints its number: `kill -9` one of them, and torchrun starts all again. Or stop
everything, and start with another `--nproc-per-node`. The losses are those of a run that nothing
happened to: batches and noise are drawn by keys, which count examples and not processes. Only sums
over processes may differ by a rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from forall import grad_and_value, pmean, random, vmap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

EXAMPLES, FEATURES, CLASSES, BATCH = 256, 5, 3, 32
CLIP, NOISE, MOMENTUM, RATE = 1.0, 0.3, 0.9, 0.2
BATCHES, DRAWS = random.split(random.key(0))


def compute_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(torch.tanh(x @ params["hidden"]) @ params["out"], y)


def average_private_gradients(
    params: dict[str, Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss, and the mean of all examples' clipped gradients with noise."""
    gradients, loss = grad_and_value(compute_loss)(params, x, y)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    scale = (CLIP / norm).clamp(max=1)
    private = {name: scale * g + NOISE * torch.randn_like(g) for name, g in gradients.items()}
    return pmean((loss, private), "examples")


def make_data() -> tuple[Tensor, Tensor]:
    """Return all examples and their classes, which each process makes for itself."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return xs, xs[:, :CLASSES].argmax(1)


def make_state() -> dict[str, Any]:
    """Return the state before the first step; ``losses`` has an entry for each step made."""
    generator = torch.Generator().manual_seed(1)
    params = {
        "hidden": 0.5 * torch.randn(FEATURES, 16, generator=generator),
        "out": 0.5 * torch.randn(16, CLASSES, generator=generator),
    }
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    return {"params": params, "momentum": momentum, "losses": torch.empty(0)}


def load_newest(folder: Path, state: dict) -> None:
    """Fill the state from the newest checkpoint of the folder that is complete."""
    complete = [path.parent for path in folder.glob("step_*/.metadata")]  # it is written last
    if complete:
        newest = max(complete, key=lambda path: int(path.name.removeprefix("step_")))
        state["losses"] = torch.empty(int(newest.name.removeprefix("step_")))
        dcp.load(state, checkpoint_id=newest)


def make_step(state: dict, mesh: DeviceMesh | None, xs: Tensor, ys: Tensor) -> None:
    """Change the state by one step, on a batch of which this process has its share."""
    step = len(state["losses"])
    batch = random.permutation(random.fold_in(BATCHES, step), EXAMPLES)[:BATCH]
    if mesh is not None:
        batch = batch.tensor_split(mesh.size())[mesh.get_local_rank()]
    find_gradients = vmap(
        average_private_gradients,
        (None, 0, 0),
        None,
        random.fold_in(DRAWS, step),
        axis_name="examples",
        mesh=mesh,
    )
    loss, gradients = find_gradients(state["params"], xs[batch], ys[batch])
    for name, g in gradients.items():
        state["momentum"][name] = MOMENTUM * state["momentum"][name] + g
        state["params"][name] = state["params"][name] - RATE * state["momentum"][name]
    state["losses"] = torch.cat([state["losses"], loss[None]])


def show_progress(steps: range, is_shown: bool) -> Iterable[int]:
    """Return the steps, which a bar of tqdm counts where it is installed."""
    if not is_shown or importlib.util.find_spec("tqdm") is None:
        return steps
    from tqdm import tqdm

    return tqdm(steps, initial=steps.start, total=steps.stop, unit="step")


def train(
    folder: Path, steps: int, mesh: DeviceMesh | None = None, every: int = 4, wait: float = 0.0
) -> Tensor:
    """Return the loss of each step from the first, also of those before a restart.

    Every few steps the state is saved in the folder. ``wait`` is in seconds, after each step.
    """
    xs, ys = make_data()
    state = make_state()
    load_newest(folder, state)
    first, is_first_rank = len(state["losses"]), mesh is None or mesh.get_local_rank() == 0
    print(f"process {os.getpid()} begins at step {first}", flush=True)
    for step in show_progress(range(first, steps), is_shown=is_first_rank):
        make_step(state, mesh, xs, ys)
        if (step + 1) % every == 0 or step + 1 == steps:
            dcp.save(state, checkpoint_id=folder / f"step_{step + 1}")
        time.sleep(wait)
    return state["losses"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="DP-SGD that goes on after a process has died")
    parser.add_argument("folder", type=Path, help="where the checkpoints are, or will be")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds after each step")
    given = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    losses = train(given.folder, given.steps, mesh, wait=given.wait)
    if dist.get_rank() == 0:
        print("losses", *[f"{loss:.6f}" for loss in losses.tolist()], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
