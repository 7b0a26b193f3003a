"""Programs over two processes of gloo, beside the same written by hand with torch.distributed."""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forall
from forall import grad, jacrev, per_example_grad_norm, pmean, psum, vmap
from measure import keep_memory

RANKS = 2
CALLS = 5  # of a contestant in each round
Program = Callable[[], Any]


class Row(NamedTuple):
    """A workload: the program by hand, forall's function, and its arguments."""

    name: str
    by_hand: Program
    func: Callable
    args: tuple


def clipped_gradients(mesh: DeviceMesh, *, by_norms: bool = False) -> Row:
    """Return the sum of clipped per-example gradients of an MLP, over the examples of all ranks."""
    torch.manual_seed(0)
    params = {
        "w1": torch.randn(256, 64) / 8,
        "b1": torch.zeros(256),
        "w2": torch.randn(10, 256) / 16,
        "b2": torch.zeros(10),
    }
    torch.manual_seed(1 + mesh.get_local_rank())
    xs, ys = torch.randn(1024, 64), torch.randint(10, (1024,))

    def loss(p: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ p["w1"].T + p["b1"])
        return torch.nn.functional.cross_entropy(h @ p["w2"].T + p["b2"], y)

    def clip(g: dict) -> dict:
        norm = torch.stack([t.square().sum() for t in g.values()]).sum().sqrt()
        return {k: t / norm.clamp(min=1) for k, t in g.items()}

    def by_hand() -> dict:
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, xs, ys)
        squares = sum(t.flatten(1).square().sum(1) for t in gradients.values())
        scale = 1 / squares.sqrt().clamp(min=1)
        sums = [torch.einsum("b,b...->...", scale, t) for t in gradients.values()]
        flat = torch.cat([t.flatten() for t in sums])
        dist.all_reduce(flat, group=mesh.get_group())
        parts = flat.split([t.numel() for t in sums])
        return {k: p.view_as(t) for k, p, t in zip(gradients, parts, sums, strict=True)}

    f = vmap(
        lambda p, x, y: psum(clip(grad(loss)(p, x, y)), "b"),
        (None, 0, 0),
        None,
        axis_name="b",
        mesh=mesh,
    )
    if not by_norms:
        return Row("clipped per-example gradients", by_hand, f, (params, xs, ys))

    def clip_by_norms(p: dict, xs: torch.Tensor, ys: torch.Tensor) -> dict:
        scale = 1 / per_example_grad_norm(loss)(p, xs, ys).clamp(min=1)
        total = grad(lambda p: (scale * vmap(loss, (None, 0, 0))(p, xs, ys)).sum())(p)
        return psum(total, "ranks")

    f = forall.shard_map(clip_by_norms, mesh)
    return Row("the same by per_example_grad_norm", by_hand, f, (params, xs, ys))


def clipped_by_norms(mesh: DeviceMesh) -> Row:
    """Return the same gradients, of which none is made for an example by itself."""
    return clipped_gradients(mesh, by_norms=True)


def sharded_jacobian(mesh: DeviceMesh) -> Row:
    """Return this rank's rows of the Jacobian of an MLP with 1024 outputs."""
    torch.manual_seed(0)
    w1, w2 = torch.randn(1024, 1024) / 32, torch.randn(1024, 1024) / 32
    x, half = torch.randn(1024), 1024 // RANKS
    rows = torch.eye(1024)[mesh.get_local_rank() * half :][:half]

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(w2 @ torch.tanh(w1 @ x))

    def by_hand() -> torch.Tensor:
        pull = torch.func.vjp(f, x)[1]
        return torch.func.vmap(pull)(rows)[0]

    return Row("sharded Jacobian", by_hand, jacrev(f, mesh=mesh), (x,))


def batch_norm(mesh: DeviceMesh, size: int = 8192, name: str = "batch norm by pmean") -> Row:
    """Return a batch normalized by the mean and the variance over the examples of all ranks."""
    torch.manual_seed(1 + mesh.get_local_rank())
    xs, count = torch.randn(size, 1024), size * RANKS

    def by_hand() -> torch.Tensor:
        mean = xs.sum(0) / count
        dist.all_reduce(mean, group=mesh.get_group())
        centered = xs - mean
        variance = centered.square().sum(0) / count
        dist.all_reduce(variance, group=mesh.get_group())
        return centered * (variance + 1e-5).rsqrt()

    def normalize(x: torch.Tensor) -> torch.Tensor:
        centered = x - pmean(x, "b")
        return centered * (pmean(centered.square(), "b") + 1e-5).rsqrt()

    return Row(name, by_hand, vmap(normalize, axis_name="b", mesh=mesh), (xs,))


def small_batch_norm(mesh: DeviceMesh) -> Row:
    """Return a batch so small that messages take most of the time."""
    return batch_norm(mesh, 512, "batch norm of few examples")


ROWS = (clipped_gradients, clipped_by_norms, sharded_jacobian, batch_norm, small_batch_norm)
SETTINGS = {
    "default": "each",
    "jit": "each",
    "jit, fastmath": "each",
    "jit, agree='call'": "call",
    "jit, 'never'": "never",
}


def count_messages(program: Program) -> int:
    """Return how many messages of the data a call of a program sends."""
    sent = 0
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def count(call: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += 1
            return call(*args, **kwargs)

        return counted

    try:
        for name, call in originals.items():
            setattr(dist, name, count(call))
        program()
    finally:
        for name, call in originals.items():
            setattr(dist, name, call)
    return sent


def time_calls(program: Program, agree: str) -> float:
    forall.config.agree = agree
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        program()
    return (time.perf_counter() - start) / CALLS


def measure(row: Row, rounds: int) -> list[str]:
    """Return a row of the table: median ratios to the program by hand, and messages of each."""
    jitted = forall.jit(row.func)
    ours = {name: jitted if name.startswith("jit") else row.func for name in SETTINGS}
    ours["jit, fastmath"] = forall.jit(row.func, fastmath=True)
    want = row.by_hand()
    for name, f in ours.items():
        found = [f(*row.args) for _ in range(4)][-1]
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5, msg=f"{row.name}, {name}")
    assert jitted.cache_info().hits > 0, f"{row.name} was not recorded"
    ratios: dict[str, list[float]] = {name: [] for name in SETTINGS}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        base = time_calls(row.by_hand, "each")
        for name, f in ours.items():
            ratios[name].append(time_calls(lambda f=f: f(*row.args), SETTINGS[name]) / base)
    forall.config.agree = "each"
    messages = [count_messages(p) for p in (row.by_hand, lambda: jitted(*row.args))]
    medians = (f"{statistics.median(r):.2f}" for r in ratios.values())
    return [row.name, *medians, " and ".join(map(str, messages))]


def serve(rank: int, store: str, rounds: int, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    keep_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ranks",))
    table = [measure(make(mesh), rounds) for make in ROWS]
    if not rank:
        Path(out).write_text("\n".join(f"| {' | '.join(cells)} |" for cells in table) + "\n")
    dist.destroy_process_group()


def section(rounds: int, device: torch.device) -> list[str]:
    title = ["", f"## Over {RANKS} processes", ""]
    if device.type != "cpu":
        return [*title, "Only on the CPU."]
    with tempfile.TemporaryDirectory() as folder:
        store, out = Path(folder) / "store", Path(folder) / "out"
        multiprocessing.spawn(serve, (str(store), rounds, str(out)), nprocs=RANKS)
        rows = out.read_text().splitlines()
    return [
        *title,
        f"Programs over {RANKS} processes of gloo on this machine: the time divided by that of the",
        "same by hand, with torch.func and `all_reduce`. By default ranks agree before each",
        "message; see `forall.config.agree`. The last column counts messages of the data, by hand",
        "and by forall, which sends a few kilobytes along with the agreement.",
        "",
        f"| program | {' | '.join(SETTINGS)} | messages |",
        f"|---|{'---|' * (len(SETTINGS) + 1)}",
        *rows,
    ]


if __name__ == "__main__":
    print("\n".join(section(11, torch.device("cpu"))))
