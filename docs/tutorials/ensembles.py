# %% [markdown]
# # An ensemble in one call
#
# Twenty networks, trained side by side by one program that was written for one network. Where they
# disagree, the ensemble is unsure.
#
# A loop over models leaves the hardware idle: each model is small. `stack_module_state` stacks the
# parameters of all models, and `vmap` maps the training step of one model over them.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from forall import functional_call, grad_and_value, stack_module_state, vmap

plt.rcParams["figure.dpi"] = 144
_ = torch.manual_seed(0)

# %% [markdown]
# ## The data
#
# A sine with noise, measured on two intervals. Between and beyond them nothing is known.

# %%
xs = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(0.5, 2.5, 40)])[:, None]
ys = torch.sin(2 * xs) + 0.1 * torch.randn_like(xs)

# %% [markdown]
# ## One model
#
# The loss and one step of gradient descent with momentum, for the parameters of *one* model.

# %%
MODELS = 20
STEPS = 1500  # fast: 400


def make_network():
    return nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


networks = [make_network() for _ in range(MODELS)]
skeleton = networks[0]


def loss(parameters, rows):
    return (functional_call(skeleton, parameters, (xs[rows],)) - ys[rows]).square().mean()


def step(parameters, speed, rows):
    gradients, value = grad_and_value(loss)(parameters, rows)
    speed = {name: 0.9 * speed[name] + g for name, g in gradients.items()}
    return {name: p - 0.02 * speed[name] for name, p in parameters.items()}, speed, value


# %% [markdown]
# ## All models
#
# The stacked parameters have the models along dim 0, and so have the rows that each model trains
# on: every model draws its own sample of the data (bagging).

# %%
stacked, _ = stack_module_state(networks)
parameters = {name: p.detach() for name, p in stacked.items()}
speed = {name: torch.zeros_like(p) for name, p in parameters.items()}
rows = torch.randint(len(xs), (MODELS, len(xs)))
losses = []
for _ in range(STEPS):
    parameters, speed, values = vmap(step)(parameters, speed, rows)
    losses.append(values)
losses = torch.stack(losses)
losses.shape

# %% [markdown]
# Each model has trained as it would have alone. The first one, in a plain loop:

# %%
alone = {name: p.detach() for name, p in networks[0].named_parameters()}
still = {name: torch.zeros_like(p) for name, p in alone.items()}
for _ in range(50):
    alone, still, value = step(alone, still, rows[0])
torch.testing.assert_close(value, losses[49, 0], rtol=1e-3, atol=1e-5)

# %% [markdown]
# ## By an optimizer
#
# `stack_module_state` returns leaves, and an optimizer of `torch.optim` works number by number. So
# it trains all models, if it is given the stacks. Each loss depends on one model alone. So the
# gradient of their sum holds the gradient of each. Where all models train on the same data, map the
# parameters alone: `vmap(loss, in_dims=(0, None, None))`.

# %%
leaves, _ = stack_module_state(networks)
optimizer = torch.optim.SGD(leaves.values(), lr=0.02, momentum=0.9)
for _ in range(50):
    values = vmap(loss)(leaves, rows)
    optimizer.zero_grad()
    values.sum().backward()
    optimizer.step()
torch.testing.assert_close(values.detach(), losses[49], rtol=1e-3, atol=1e-5)

# %% [markdown]
# ## What the ensemble knows
#
# The parameters are mapped, and the inputs are shared between the models: `in_dims=(0, None)`.

# %%
grid = torch.linspace(-4, 4, 200)[:, None]
predictions = vmap(lambda p, x: functional_call(skeleton, p, (x,)), in_dims=(0, None))(
    parameters, grid
)[..., 0]
mean, spread = predictions.mean(0), predictions.std(0)

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
axes.plot(grid, predictions.T, color="tab:blue", alpha=0.2, linewidth=0.8)
axes.fill_between(
    grid[:, 0], mean - 2 * spread, mean + 2 * spread, alpha=0.2, label="mean +- 2 spreads"
)
axes.plot(grid, mean, color="tab:blue", label="mean of the models")
axes.plot(grid, torch.sin(2 * grid), "k--", linewidth=1, label="truth")
axes.plot(xs, ys, ".", color="tab:orange", label="data")
axes.set(xlabel="x", ylabel="y", ylim=(-3, 3))
axes.legend(loc="lower right", fontsize=7)
figure.tight_layout()
plt.show()

# %% [markdown]
# Where there are data the models agree. Where there are none they diverge:

# %%
near = ((grid > -3) & (grid < -1) | (grid > 0.5) & (grid < 2.5))[:, 0]
inside, outside = spread[near].mean().item(), spread[~near].mean().item()
print(f"spread near the data: {inside:.3f}, elsewhere: {outside:.3f}")
assert outside > 2 * inside
