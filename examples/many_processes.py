"""Five programs over several processes, each compared with one process that has all the data.

    torchrun --nproc-per-node 2 examples/many_processes.py

Each program but one is a function of one example, or of one member of an ensemble. It is mapped
over this rank's examples, with the mesh. Without a mesh, the same function runs on all examples at
once. The other one is a Jacobian, of which each rank computes rows. The first rank shows a bar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from forall import Chunks, all_gather, axis_index, grad, jacrev, pmean, psum, random, vmap

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

EXAMPLES, FEATURES, CLASSES = 12, 5, 3
KEY = random.key(0)


def predict(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["hidden"]) @ params["out"]


def compute_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(predict(params, x), y)


def average_clipped_gradients(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """DP-SGD: the mean of all examples' gradients, of norm 1 at most, with noise."""
    gradients = grad(compute_loss)(params, x, y)
    flat = torch.cat([g.flatten() for g in gradients.values()])
    clipped = flat / flat.norm().clamp(min=1)
    noise = 0.1 * torch.randn(flat.shape)
    return pmean(clipped + noise, "examples")


def normalize(x: Tensor) -> Tensor:
    """Batch normalization: the mean and the variance are those of all examples."""
    mean = pmean(x, "examples")
    variance = pmean((x - mean) ** 2, "examples")
    return (x - mean) / (variance + 1e-5).sqrt()


def contrast(x: Tensor, other: Tensor) -> Tensor:
    """The loss of a pair: its second view has to be found among those of all examples."""
    others = all_gather(functional.normalize(other, dim=0), "examples")
    scores = others @ functional.normalize(x, dim=0) / 0.1
    return functional.cross_entropy(scores, axis_index("examples"))


def train_member(params: dict[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """An ensemble: one member's mean loss after ten steps, and that of all members."""
    for _ in range(10):
        gradients = grad(compute_loss)(params, xs, ys)
        params = {name: p - 0.5 * gradients[name] for name, p in params.items()}
    loss = compute_loss(params, xs, ys)
    return torch.stack([loss, psum(loss, "members")])


def make_data() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return parameters of four members, and examples with their classes: alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    members = {
        "hidden": torch.randn(4, FEATURES, 8, generator=generator),
        "out": torch.randn(4, 8, CLASSES, generator=generator),
    }
    xs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return members, xs, (xs[:, :CLASSES]).argmax(1)


def compare(
    name: str,
    run: Callable[[DeviceMesh | None, Callable[[Tensor], Tensor]], Tensor],
    mesh: DeviceMesh,
    *,
    is_same: bool = False,
) -> None:
    """Run a program on this rank's share, and compare it with that share of one process's result.

    ``is_same`` says that the result is the same for all examples.
    """
    rank, size = mesh.get_local_rank(), mesh.size()

    def take_share(x: Tensor) -> Tensor:
        return x.chunk(size)[rank]

    found, whole = run(mesh, take_share), run(None, lambda x: x)
    torch.testing.assert_close(found, whole if is_same else take_share(whole))
    if rank == 0:
        print(f"{name:30} equal on {size} processes, norm {whole.norm():.4f}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    members, xs, ys = make_data()
    params = {name: p[0] for name, p in members.items()}

    def run_private(mesh: DeviceMesh | None, share: Callable[[Tensor], Tensor]) -> Tensor:
        f = vmap(
            average_clipped_gradients, (None, 0, 0), None, KEY, axis_name="examples", mesh=mesh
        )
        return f(params, share(xs), share(ys))

    def run_norm(mesh: DeviceMesh | None, share: Callable[[Tensor], Tensor]) -> Tensor:
        return vmap(normalize, axis_name="examples", mesh=mesh)(share(xs))

    def run_contrast(mesh: DeviceMesh | None, share: Callable[[Tensor], Tensor]) -> Tensor:
        return vmap(contrast, axis_name="examples", mesh=mesh)(share(xs), share(xs.roll(1, 1)))

    def run_ensemble(mesh: DeviceMesh | None, share: Callable[[Tensor], Tensor]) -> Tensor:
        mine = {name: share(p) for name, p in members.items()}
        return vmap(train_member, (0, None, None), axis_name="members", mesh=mesh)(mine, xs, ys)

    def run_jacobian(mesh: DeviceMesh | None, _share: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's rows of d predictions / d weights, computed 4 at a time."""
        rows = Chunks(4, progress=mesh is not None and mesh.get_local_rank() == 0)
        jacobians = jacrev(predict, mesh=mesh, chunk_size=rows)(params, xs)
        return torch.cat([j.flatten(2) for j in jacobians.values()], 2)

    compare("clipped gradients with noise", run_private, mesh, is_same=True)
    compare("batch normalization", run_norm, mesh)
    compare("contrastive loss", run_contrast, mesh)
    compare("ensemble", run_ensemble, mesh)
    compare("Jacobian of a network", run_jacobian, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
