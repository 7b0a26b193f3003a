"""Modules that ranks share, by DistributedDataParallel or FSDP2, in vmap and around it.

Each is trained for a few steps. `train` does the same on two ranks and in one process.
"""

import functools
import traceback

import torch
from torch import nn

from forall import grad, jvp, pmean, vmap

XS = torch.linspace(-1.0, 1.4, 15, dtype=torch.float64).view(5, 3).sin()
SHARES = [3, 2]
STEPS = 3


class Scale(nn.Module):
    """A module with a buffer, which only rank 0 has right before the others are sent it."""

    def __init__(self, rank=0):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5 if rank == 0 else 100.0).double())

    def forward(self, x):
        return x * self.scale


def make_network(rank=0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(rank), nn.Linear(4, 2)).double()


class Mapped(nn.Module):
    """A module whose forward is a call of vmap over the examples of all ranks."""

    def __init__(self, network, mesh=None):
        super().__init__()
        self.network = network
        self.mesh = mesh

    def forward(self, xs):
        return vmap(normalized(self.network), axis_name="b", mesh=self.mesh)(xs)


def normalized(network):
    def f(x):
        y = network(x[None])[0]
        return y * pmean(y, "b")

    return f


def local(network):
    return lambda x: network(x[None])[0].sin()


def gradient_of(network):
    return grad(lambda x: network(x[None])[0].sin().sum())


def tangent_of(network):
    return lambda x: jvp(local(network), (x,), (x.cos(),))[1]


USES = {  # the result of all examples
    "in vmap": lambda m, xs, mesh: vmap(normalized(m), axis_name="b", mesh=mesh)(xs),
    "in vmap without a mesh": lambda m, xs, mesh: vmap(local(m))(xs),
    "in grad in vmap": lambda m, xs, mesh: vmap(gradient_of(m), mesh=mesh)(xs),
    "in grad alone": lambda m, xs, mesh: vmap(gradient_of(m), mesh=mesh)(xs).detach(),
    "in jvp in vmap": lambda m, xs, mesh: vmap(tangent_of(m), mesh=mesh)(xs),
    "in vmap in jvp": lambda m, xs, mesh: jvp(vmap(local(m), mesh=mesh), (xs,), (xs.cos(),))[1],
    "around vmap": lambda m, xs, mesh: m(xs),
}


def with_ddp(mesh, **options):
    def wrap(network):
        return nn.parallel.DistributedDataParallel(
            network, process_group=mesh.get_group(), **options
        )

    return wrap


def with_fsdp(mesh, *, each_layer):
    from torch.distributed.fsdp import fully_shard

    def wrap(network):
        for layer in [m for m in network.modules() if isinstance(m, nn.Linear) and each_layer]:
            fully_shard(layer, mesh=mesh)
        for scale in [m for m in network.modules() if isinstance(m, Scale)]:
            scale.scale.fill_(1.5)  # buffers are not FSDP2's
        return fully_shard(network, mesh=mesh)

    return wrap


WRAPPERS = {
    "DDP": with_ddp,
    "DDP, unused parameters": lambda mesh: with_ddp(mesh, find_unused_parameters=True),
    "DDP, static graph": lambda mesh: with_ddp(mesh, static_graph=True),
    "FSDP2": lambda mesh: with_fsdp(mesh, each_layer=False),
    "FSDP2, each layer": lambda mesh: with_fsdp(mesh, each_layer=True),
}
CASES = [(wrapper, use) for wrapper in WRAPPERS for use in USES]
# A static graph is reduced in the first backward pass, also if that is one inside. When a backward
# pass has ended, FSDP2 frees the parameters, which the backward pass of a gradient needs.
REFUSED = [
    ("DDP, static graph", "in grad alone"),
    ("DDP, static graph", "in grad in vmap"),
    ("FSDP2", "in grad in vmap"),
    ("FSDP2, each layer", "in grad in vmap"),
]


def train(use, wrap=lambda network: network, mesh=None, parts=1):
    """Return the results of each step, and the parameters after the last one.

    A step goes along the mean over so many parts of the sum of all results: each rank is a part.
    """
    rank = 0 if mesh is None else mesh.get_local_rank()
    xs = XS if mesh is None else XS.split(SHARES)[rank]
    network = make_network(rank)
    module = wrap(Mapped(network, mesh) if use == "around vmap" else network)
    results = []
    for _ in range(STEPS):
        result = USES[use](module, xs, mesh)
        results.append(result.detach().clone())
        if result.requires_grad:
            (result.sum() / parts).backward()
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        module.zero_grad()
    parameters = [p.detach() for p in module.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return results, [p.clone() for p in whole]


def train_all(mesh, cases):
    """Return what each case gives on this rank, or the text of its error."""
    found = {}
    for wrapper, use in cases:
        try:
            found[wrapper, use] = train(use, WRAPPERS[wrapper](mesh), mesh)
        except Exception:
            found[wrapper, use] = traceback.format_exc()
    return found


def compile_calls(mesh):
    """Return what torch.compile around a call over ranks gives, and compiled code in one."""
    xs = XS.split(SHARES)[mesh.get_local_rank()]
    network = make_network()

    def map_all(f):
        return vmap(f, axis_name="b", mesh=mesh)

    def around(xs, network=network):
        return 2 * map_all(normalized(network))(xs)

    compiled = functools.partial(torch.compile, backend="eager")
    calls = {
        "around": compiled(around),
        "around, in one graph": compiled(around, fullgraph=True),
        "a module inside": lambda xs: around(xs, compiled(network)),
        "a function of an example": lambda xs: 2 * map_all(compiled(normalized(network)))(xs),
    }
    found = {}
    for name, f in calls.items():
        try:
            found[name] = [f(xs).detach() for _ in range(2)]
        except Exception as error:
            found[name] = type(error).__name__
    return found
