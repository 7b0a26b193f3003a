# %% [markdown]
# # Beyond one machine
#
# A training step, written for one example, runs on one process, on two, and on three. The losses
# are the same numbers each time.
#
# What examples have to know of each other goes through a *named axis*: `pmean(g, "examples")` is
# the mean of `g` over all examples. On one process that is a mean over a batch. With a mesh of
# `torch.distributed` it is a mean over the examples of all processes, on one machine or on many.

# %%
import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from forall import grad, grad_and_value, pmean, random, vmap

plt.rcParams["figure.dpi"] = 144

# %% [markdown]
# ## One example
#
# The data are images of handwritten digits, 8 x 8 pixels. The network has one hidden layer, whose
# values are normalized by their mean and variance over the batch. That is batch normalization: it
# is the part of a network that sees other examples, and that goes wrong when a batch is split over
# processes.


# %%
def make_data():
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(64, 32, generator=generator) / 8,
        "scale": torch.ones(32),
        "out": torch.randn(32, 10, generator=generator) / 6,
    }


def compute_loss(parameters, x, y, rate=0.1):
    h = x @ parameters["hidden"]
    centered = h - pmean(h, "examples")
    h = centered * (pmean(centered.square(), "examples") + 1e-5).rsqrt()
    h = functional.dropout(torch.tanh(parameters["scale"] * h), rate)
    return functional.cross_entropy(h @ parameters["out"], y)


# %% [markdown]
# A training step is the mean of all examples' gradients, in one message for the whole dict:


# %%
def compute_gradient(parameters, x, y):
    gradients, value = grad_and_value(compute_loss)(parameters, x, y)
    return pmean((gradients, value), "examples")


# %% [markdown]
# ## All examples, on one process or on many
#
# `train` maps that function over the examples of this process. Everything else is what a program
# for one process has. Three things deserve a look:
#
# - `mesh=None` is one process. With a mesh, each process passes its own examples.
# - The result of `pmean` is the same for all examples, so `out_dims=None` returns it once.
# - The dropout draws by a *key*, and by the number of an example over all processes. So each
#   example has the same dropout, wherever it is computed.
#
# `torch.chunk` gives the processes unlike numbers of examples here: 100 for one, 50 and 50 for two,
# 34, 34 and 32 for three. The means are those of all examples all the same.

# %%
STEPS = 60  # fast: 10


def train(steps, mesh=None):
    xs, ys = make_data()
    parameters, losses = make_parameters(), []
    rank, count = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
    step = vmap(
        compute_gradient,
        in_dims=(None, 0, 0),
        out_dims=None,
        randomness=random.key(1),
        axis_name="examples",
        mesh=mesh,
    )
    for n in range(steps):
        batch = random.permutation(random.fold_in(random.key(0), n), len(xs))[:100]
        mine = batch.chunk(count)[rank]
        gradients, loss = step(parameters, xs[mine], ys[mine])
        parameters = {name: p - gradients[name] for name, p in parameters.items()}
        losses.append(loss.item())
    return losses


alone = train(STEPS)
print(f"loss at first {alone[0]:.3f}, at last {alone[-1]:.3f}")

# %% [markdown]
# ## More processes
#
# `torchrun` starts the processes, and each runs the same file. `init_process_group` and
# `init_device_mesh` are torch's own. Here the file is made of the functions above. In a project it
# is a module.

# %%
program = """
import json, sys
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from forall import grad_and_value, pmean, random, vmap
"""
for function in (make_data, make_parameters, compute_loss, compute_gradient, train):
    program += "\n" + inspect.getsource(function)
program += """
dist.init_process_group("gloo")  # "nccl" for GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
losses = train(int(sys.argv[1]), mesh["data"])
if dist.get_rank() == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


def run_on(count):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(program)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        found = subprocess.run(
            [*torchrun, f"--nproc-per-node={count}", str(file), str(STEPS)],
            capture_output=True,
            text=True,
            check=False,
        )
    if found.returncode:
        raise RuntimeError(found.stderr[-2000:])
    return torch.tensor(json.loads(found.stdout))


COUNTS = (2, 3)  # fast: (2,)
losses = {count: run_on(count) for count in COUNTS}

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
axes.plot(alone, linewidth=5, color="lightgray", label="one process")
for count, line in zip(COUNTS, ("-", ":"), strict=False):
    axes.plot(losses[count], line, color="black", label=f"{count} processes")
axes.set(xlabel="step", ylabel="loss", yscale="log")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The curves lie on each other. They differ by the rounding of sums, which have another order:

# %%
for count in COUNTS:
    difference = (losses[count] - torch.tensor(alone)).abs().max().item()
    print(f"{count} processes: the losses differ by {difference:.1e} at most")
    assert difference < 1e-3

# %% [markdown]
# ## Where the mean goes matters
#
# The usual way to train on many processes averages gradients *after* each process has computed its
# own, with batch statistics of its own. That is another function. Here are two halves of a batch,
# each by itself, beside the whole batch, all without dropout:

# %%
xs, ys = make_data()
halves = slice(50), slice(50, 100)
step = vmap(
    lambda p, x, y: pmean(grad(compute_loss)(p, x, y, 0.0), "examples"),
    in_dims=(None, 0, 0),
    out_dims=None,
    axis_name="examples",
)
whole = step(make_parameters(), xs[:100], ys[:100])["hidden"]
apart = torch.stack([step(make_parameters(), xs[part], ys[part])["hidden"] for part in halves])
error = (apart.mean(0) - whole).norm() / whole.norm()
print(f"the average of the two gradients is off by {error:.0%}")

# %% [markdown]
# [Over several processes](../guides/many_processes.md) goes on from here: what happens when a
# process fails, how to go on from a checkpoint, DTensors, Jacobians whose rows are split, and
# programs with one value per process.
