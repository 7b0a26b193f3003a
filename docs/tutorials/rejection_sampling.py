# %% [markdown]
# # Rejection sampling with keys
#
# A loop that draws until it accepts, written for one sample and mapped over many. Each sample draws
# from a key of its own, so a sample can be made again alone.
#
# Rejection sampling needs a different number of draws for each sample. `torch.func.vmap` refuses
# such a loop. And where it draws random numbers for each example, they depend on the size of the
# batch.

# %%
import math

import matplotlib.pyplot as plt
import torch

from forall import random, vmap

plt.rcParams["figure.dpi"] = 144

# %% [markdown]
# ## A density on the circle
#
# The density of von Mises, $p(\theta) \propto e^{\kappa \cos\theta}$, is the normal distribution's
# relative for angles. A large $\kappa$ means that angles lie close to 0. Its inverse distribution
# function has no closed form, but its density is bounded by $e^{\kappa}$. So we draw an angle
# uniformly, and accept it with the probability $e^{\kappa (\cos\theta - 1)}$.
#
# ## One sample
#
# The functions of `forall.random` draw from a *key*, and keep no state. The same key gives the same
# numbers. Use a key once; `split` makes new ones.


# %%
def sample(key, kappa):
    tries = 0
    while True:
        key, for_angle, for_coin = random.split(key, 3)
        angle = random.uniform(for_angle, minval=-math.pi, maxval=math.pi)
        tries += 1
        if random.uniform(for_coin).log() < kappa * (angle.cos() - 1):
            return angle, tries


print(sample(random.key(7), torch.tensor(2.0)))

# %% [markdown]
# ## Many samples
#
# The keys are the rows of one tensor. This is the line that maps `sample` over them:

# %%
COUNT = 4000  # fast: 1000
keys = random.split(random.key(0), COUNT)
angles, tries = vmap(sample, in_dims=(0, None))(keys, torch.tensor(2.0))
print(angles[:4], tries[:8])

# %% [markdown]
# An example that has accepted leaves the loop. In step 10 the draws are made only for those that
# are still without a sample. Nothing is drawn and thrown away.
#
# ## The same sample, alone
#
# A sample depends on its key, and on nothing else: not on the batch around it, on its size or on
# the order. So any sample of a large run can be made again, under a debugger if need be.

# %%
angle, count = sample(keys[42], torch.tensor(2.0))
assert torch.allclose(angle, angles[42], atol=1e-6)
assert count == tries[42]

few, _ = vmap(sample, in_dims=(0, None))(keys[:10], torch.tensor(2.0))
assert torch.allclose(few, angles[:10], atol=1e-6)

# %% [markdown]
# With `torch.rand` in the place of `random.uniform` the function draws from a generator, and `vmap`
# asks what that is to mean. A key in the place of the flag gives the same promise as above, and the
# function need not know about keys:


# %%
def sample_by_generator(kappa):
    while True:
        angle = (2 * torch.rand(()) - 1) * math.pi
        if torch.rand(()).log() < kappa * (angle.cos() - 1):
            return angle


kappas = torch.tensor([0.5, 1.0, 2.0, 4.0])
print(vmap(sample_by_generator, randomness=random.key(1))(kappas))
print(vmap(sample_by_generator, randomness=random.key(1))(kappas[:2]))

# %% [markdown]
# ## Another density for each sample
#
# Nothing so far says that all examples have the same $\kappa$. With two nested `vmap` we draw many
# samples for each of several values.

# %%
EACH = 2000  # fast: 400
grid = torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])
grid_keys = random.split(random.key(2), len(grid) * EACH).reshape(len(grid), EACH, 2)
many = vmap(vmap(sample, in_dims=(0, None)))
grid_angles, grid_tries = many(grid_keys, grid)
print(grid_angles.shape)

# %% [markdown]
# ## Is it right?
#
# Two numbers are known. The mean of $\cos\theta$ is $I_1(\kappa) / I_0(\kappa)$, with Bessel
# functions that torch has. And the mean number of tries is one over the probability to accept,
# which is $I_0(\kappa)\, e^{-\kappa}$.

# %%
accept = torch.special.i0(grid) * torch.exp(-grid)
mean_cos = torch.special.i1(grid) / torch.special.i0(grid)
print(torch.stack([grid_angles.cos().mean(1), mean_cos]))
print(torch.stack([grid_tries.double().mean(1), 1 / accept]))

# %% [markdown]
# ## The result

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.6))
theta = torch.linspace(-math.pi, math.pi, 200)
for i, color in zip([0, 3, 5], ["C0", "C1", "C2"], strict=True):
    kappa = grid[i]
    density = torch.exp(kappa * theta.cos()) / (2 * math.pi * torch.special.i0(kappa))
    left.hist(grid_angles[i], bins=50, density=True, alpha=0.4, color=color)
    left.plot(theta, density, color=color, label=f"kappa = {kappa:.0f}")
left.set(xlabel="angle", ylabel="density", title="samples, and the exact density")
left.legend()
right.plot(grid, 1 / accept, label="exact")
right.plot(grid, grid_tries.double().mean(1), "o", label="mean of the samples")
right.plot(grid, grid_tries.max(1).values, "^", label="largest of the samples")
right.set(
    xlabel="kappa",
    ylabel="tries for a sample",
    title="the loops end at different steps",
)
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# What this costs: each step of the loop is some dozens of operators, however many examples are
# left. The last examples take many steps for few samples. Where that matters, choose a better
# proposal: the mean number of tries grows with $\sqrt\kappa$ here.
#
# Derivatives: `grad` of an accepted angle with respect to $\kappa$ is zero, as in the loop. The
# angle itself does not depend on $\kappa$, only the choice does, and a choice has no derivative.
#
# The check at the end allows five standard errors. For independent samples a deviation that large
# has a probability of about one in a million. The keys are fixed, so a run can be repeated.

# %%
error = grid_angles.cos().mean(1) - mean_cos
allowed = 5 * grid_angles.cos().std(1) / math.sqrt(EACH)
print(f"largest error of the mean cosine: {error.abs().max():.3f}")
assert (error.abs() < allowed).all()

error = grid_tries.double().mean(1) - 1 / accept
allowed = 5 * torch.sqrt(1 - accept) / accept / math.sqrt(EACH)  # a geometric distribution
assert (error.abs() <= allowed).all()
