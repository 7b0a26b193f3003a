# %% [markdown]
# # Learning to learn: MAML
#
# A network that can be fitted to a new sine wave by five gradient steps on ten points. Its starting
# parameters are trained through those steps, for many waves at once.
#
# Model-agnostic meta-learning (Finn, Abbeel and Levine, 2017) differentiates the loss *after* a few
# steps of training with respect to the parameters *before* them. So it takes a gradient of
# gradients. Written for one task, it is a few lines.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

from forall import functional_call, grad, grad_and_value, vmap

plt.rcParams["figure.dpi"] = 144
_ = torch.manual_seed(0)

# %% [markdown]
# ## The tasks
#
# Each task is a sine wave of its own amplitude and phase. Ten points are given, and ten others
# test the fit.


# %%
def make_tasks(count):
    amplitude, phase = 0.5 + 4.5 * torch.rand(count, 1, 1), math.pi * torch.rand(count, 1, 1)
    x = 10 * torch.rand(count, 20, 1) - 5
    y = amplitude * torch.sin(x + phase)
    return x[:, :10], y[:, :10], x[:, 10:], y[:, 10:]


network = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def loss(parameters, x, y):
    return (functional_call(network, parameters, (x,)) - y).square().mean()


# %% [markdown]
# ## One task
#
# `adapt` is plain training. `loss_after` is what MAML makes small. The steps are written out, since
# no derivative goes through an optimizer of `torch.optim`. `torch.autograd.grad(...,
# create_graph=True)` would do in the place of `grad`.


# %%
def adapt(parameters, x, y, steps=1):
    for _ in range(steps):
        gradients = grad(loss)(parameters, x, y)
        parameters = {name: p - 0.02 * gradients[name] for name, p in parameters.items()}
    return parameters


def loss_after(parameters, x, y, test_x, test_y):
    return loss(adapt(parameters, x, y), test_x, test_y)


# %% [markdown]
# ## All tasks, and the outer gradient
#
# `vmap` runs all tasks of a batch, with the parameters shared between them. `grad_and_value` goes
# through the tasks, through their inner steps, and through the gradients in these.


# %%
def batch_loss(parameters, tasks):
    return vmap(loss_after, in_dims=(None, 0, 0, 0, 0))(parameters, *tasks).mean()


STEPS = 3000  # fast: 400
parameters = {name: p.detach().clone() for name, p in network.named_parameters()}
leaves = [p.requires_grad_() for p in parameters.values()]
optimizer = torch.optim.Adam(leaves, lr=2e-3)
curve = []
for _ in range(STEPS):
    gradients, value = grad_and_value(batch_loss)(parameters, make_tasks(25))
    for p, g in zip(leaves, gradients.values(), strict=True):
        p.grad = g.detach()
    optimizer.step()
    curve.append(value.item())

# %% [markdown]
# The derivative through an inner step is a second derivative. A difference of the loss confirms it,
# along the direction of the gradient itself:

# %%
tasks = make_tasks(5)
point = {name: p.detach().double() for name, p in parameters.items()}
tasks = tuple(t.double() for t in tasks)
slope = grad(batch_loss)(point, tasks)
size = torch.stack([g.square().sum() for g in slope.values()]).sum()
moved = [
    batch_loss({name: p + s * slope[name] for name, p in point.items()}, tasks)
    for s in (1e-5, -1e-5)
]
torch.testing.assert_close((moved[0] - moved[1]) / 2e-5, size, rtol=1e-3, atol=1e-6)

# %% [markdown]
# ## A new task
#
# Five steps on ten points, from the trained start and from a fresh one.

# %%
_ = torch.manual_seed(1)
for layer in network:
    if isinstance(layer, nn.Linear):
        layer.reset_parameters()
fresh = {name: p.detach().clone() for name, p in network.named_parameters()}
learned = {name: p.detach() for name, p in parameters.items()}
tasks = make_tasks(100)


def test_losses(parameters, steps):
    def one(x, y, test_x, test_y):
        return loss(adapt(parameters, x, y, steps), test_x, test_y)

    return vmap(one)(*tasks)


counts = range(6)
from_learned = [test_losses(learned, n).mean().item() for n in counts]
from_fresh = [test_losses(fresh, n).mean().item() for n in counts]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
left.semilogy(curve, linewidth=0.6)
left.set(xlabel="outer step", ylabel="loss after one inner step")
right.plot(counts, from_learned, marker="o", label="trained start")
right.plot(counts, from_fresh, marker="o", label="fresh start")
right.set(xlabel="inner steps on a new task", ylabel="loss on its test points", ylim=(0, None))
right.legend()
figure.tight_layout()
plt.show()

# %%
print(f"after five steps: {from_learned[5]:.2f} from the trained start, {from_fresh[5]:.2f} fresh")
assert from_learned[5] < from_fresh[5]
