# %% [markdown]
# # A generative model that needs one step: MeanFlow
#
# A small network learns to turn noise into data with a single evaluation. Its loss contains a
# derivative along a path, which `jvp` gives in one pass.
#
# The method is that of Geng and others, "Mean Flows for One-step Generative Modeling" (2025), here
# in two dimensions.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_circles

from forall import functional_call, grad, jit, jvp, vmap

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 144

# %% [markdown]
# ## The idea
#
# Take a data point $x$ and noise $e$, and mix them: $z_t = (1 - t)\, x + t\, e$. At $t = 0$ this is
# data, at $t = 1$ noise. The velocity of the mixture is $v = e - x$. Flow matching learns $v$, and
# makes a sample by following it in many steps. MeanFlow learns the *mean* velocity $u(z, r, t)$
# between two times $r < t$. Then one step is enough: $z_r = z_t - (t - r)\, u(z_t, r, t)$.
#
# Differentiate $(t - r)\, u = \int_r^t v$ with respect to $t$, along the path. What comes out is an
# equation that the network can be trained on:
#
# $$u = v - (t - r) \frac{d u}{d t}$$
#
# Along the path, $z$ moves with the velocity $v$, $t$ with 1, and $r$ stands still. So $du/dt$ is
# the derivative of $u$ in the direction $(v, 0, 1)$: a Jacobian-vector product.
#
# ## The loss of one example
#
# The data are points near a circle, which scikit-learn draws.

# %%
points, inner = make_circles(8000, noise=0.04, random_state=0)
data = torch.tensor(points[inner == 0], dtype=torch.float32)
data = (data - data.mean(0)) / data.std(0)
held_out, data = data[:2000], data[2000:]


class MeanVelocity(torch.nn.Module):
    """The mean velocity at the place z between the times r and t."""

    def __init__(self, width=128):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, 2),
        )

    def forward(self, z, r, t):
        times = torch.stack([t, t - r, (3 * t).cos(), (3 * (t - r)).cos()])
        return self.layers(torch.cat([z, times]))


model = MeanVelocity()
parameters = {name: p.detach() for name, p in model.named_parameters()}


def loss(parameters, x, e, r, t):
    def u(z, r, t):
        return functional_call(model, parameters, (z, r, t))

    z, v = (1 - t) * x + t * e, e - x
    value, change = jvp(u, (z, r, t), (v, torch.zeros(()), torch.ones(())))
    target = v - (t - r) * change
    return (value - target.detach()).square().sum()


# %% [markdown]
# All arguments are one example: `x`, `e` and `z` have the shape `(2,)`, `r` and `t` are numbers.
# The value of the network and its derivative come from one call of `jvp`. The target is detached:
# the network follows it, and not the other way round. Larger models use attention here. PyTorch's
# fused kernels for it have no forward mode, so `torch.func.jvp` fails on them; this `jvp` does not.
#
# ## Training
#
# This is the line that maps the loss over a batch and differentiates it. `jit` records the whole
# step, with the optimizer's arithmetic, and replays it without the Python above.


# %%
def mean_loss(parameters, *batch):
    return vmap(loss, in_dims=(None, 0, 0, 0, 0))(parameters, *batch).mean()


@jit
def train_step(parameters, first, second, rate, *batch):
    """One step of Adam."""
    slopes = grad(mean_loss)(parameters, *batch)
    new, first_new, second_new = {}, {}, {}
    for name, g in slopes.items():
        first_new[name] = 0.9 * first[name] + 0.1 * g
        second_new[name] = 0.99 * second[name] + 0.01 * g * g
        update = first_new[name] / (second_new[name].sqrt() + 1e-8)
        new[name] = parameters[name] - rate * update
    return new, first_new, second_new


def draw_batch(size=256):
    x = data[torch.randint(len(data), (size,))]
    times = torch.rand(2, size)
    t = times.max(0).values
    same = torch.rand(size) < 0.25  # a quarter of the batch: flow matching
    r = torch.where(same, t, times.min(0).values)
    return x, torch.randn(size, 2), r, t


# %%
STEPS = 5000  # fast: 1000
first = {name: torch.zeros_like(p) for name, p in parameters.items()}
second = {name: torch.zeros_like(p) for name, p in parameters.items()}
for step in range(STEPS):
    rate = torch.tensor(2e-3 * (1 - step / STEPS))
    parameters, first, second = train_step(parameters, first, second, rate, *draw_batch())
print(train_step.cache_info())

# %% [markdown]
# ## Samples from one step
#
# From $t = 1$ to $r = 0$ in one go:


# %%
def generate(e):
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    return e - functional_call(model, parameters, (e, zero, one))


noise = torch.randn(2000, 2)
samples = vmap(generate)(noise)


# %% [markdown]
# How close are they to the data? The *energy distance* of two sets of points is zero only if they
# have the same distribution. It needs nothing but mean distances. We compare with data that the
# training has not seen.


# %%
def energy_distance(a, b):
    between = torch.cdist(a, b).mean()
    return 2 * between - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()


distance = energy_distance(samples, held_out)
of_noise = energy_distance(noise, held_out)
print(f"samples: {distance:.4f}, noise: {of_noise:.4f}")

# %% [markdown]
# ## Is the derivative right?
#
# The derivative along the path, against a difference of two evaluations in double precision:

# %%
exact = {name: p.double() for name, p in parameters.items()}


def u(z, r, t):
    return functional_call(model, exact, (z, r, t))


z, v = torch.randn(2).double(), torch.randn(2).double()
r, t, h = torch.tensor(0.2).double(), torch.tensor(0.7).double(), 1e-5
_, change = jvp(u, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
difference = (u(z + h * v, r, t + h) - u(z - h * v, r, t - h)) / (2 * h)
print(change, difference)

# %% [markdown]
# ## The result

# %%
figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.2), sharex=True, sharey=True)
angle = torch.atan2(noise[:, 1], noise[:, 0])  # the color
axes[0].scatter(*noise.T, s=2, c=angle, cmap="twilight")
axes[1].scatter(*samples.T, s=2, c=angle, cmap="twilight")
axes[2].scatter(*held_out.T, s=2, c="gray")
for ax, title in zip(axes, ["noise", "samples, in one step", "data"], strict=True):
    ax.set(xlabel="first coordinate", title=title, xlim=(-3, 3), ylim=(-3, 3))
axes[0].set_ylabel("second coordinate")
figure.tight_layout()
plt.show()

# %% [markdown]
# The color of a sample is that of the noise which it came from: noise moves outwards or inwards to
# the circle. Some samples are left inside. The network is smooth, and so it cannot quite tear apart
# what was close together in the middle.
#
# What this costs: in each step, `jvp` is about as much work as one or two more evaluations of the
# network. Data of several parts, as the two half moons of scikit-learn, take a larger network and
# many more steps than this page.

# %%
assert torch.allclose(change, difference, rtol=1e-5, atol=1e-6)
assert distance < of_noise / 4
