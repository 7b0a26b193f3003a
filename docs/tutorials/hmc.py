# %% [markdown]
# # Hamiltonian Monte Carlo, many chains at once
#
# A sampler written for one chain: a Python loop of steps, each accepted or not by an `if`. `vmap`
# runs many chains, and each has random numbers of its own.
#
# Other libraries ask you to write the sampler for all chains, with `where` in the place of `if`.
# Here you write what the textbook says.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes

from forall import grad, random, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The model
#
# Bayesian linear regression on three measurements of 442 patients: body mass, blood pressure and
# one blood value. The prior of each weight is normal with variance 1, and the noise has variance 1
# in units of the data. The posterior is known, so the samples can be checked.

# %%
data = load_diabetes(scaled=False)
inputs = torch.tensor(data.data[:, [2, 3, 8]])
inputs = (inputs - inputs.mean(0)) / inputs.std(0)
target = torch.tensor(data.target)
target = (target - target.mean()) / target.std()


def energy(weights):  # minus the logarithm of the posterior density, up to a constant
    misfit = (inputs @ weights - target).square().sum() / 2
    return misfit + weights.square().sum() / 2


precision = inputs.T @ inputs + torch.eye(3)
exact_mean = torch.linalg.solve(precision, inputs.T @ target)
exact_covariance = torch.linalg.inv(precision)

# %% [markdown]
# ## One chain
#
# A step draws a momentum, follows the dynamics of a particle for some leapfrog steps, and accepts
# the end with the probability that makes the posterior stationary. Draws inside the function are
# ordinary draws of torch.

# %%
LEAPFROGS, SIZE = 8, 0.02
SAMPLES = 300  # fast: 100
slope = grad(energy)


def move(position):
    momentum = torch.randn(3)
    before = energy(position) + momentum.square().sum() / 2
    new = position
    momentum = momentum - SIZE / 2 * slope(new)
    for n in range(LEAPFROGS):
        new = new + SIZE * momentum
        if n < LEAPFROGS - 1:
            momentum = momentum - SIZE * slope(new)
    momentum = momentum - SIZE / 2 * slope(new)
    after = energy(new) + momentum.square().sum() / 2
    if torch.rand(()) < torch.exp(before - after):
        return new, torch.ones(())
    return position, torch.zeros(())


def chain(start):
    position, samples, accepted = start, [], 0
    for _ in range(SAMPLES):
        position, was_accepted = move(position)
        samples.append(position)
        accepted = accepted + was_accepted
    return torch.stack(samples), accepted / SAMPLES


# %% [markdown]
# ## Many chains
#
# With a key as `randomness`, the draws of a chain depend on the key and on the number of the chain
# alone: chain 3 is the same whether 4 or 400 chains run.

# %%
CHAINS = 64
starts = 0.5 * random.normal(random.key(1), (CHAINS, 3))
samples, rates = vmap(chain, randomness=random.key(0))(starts)
samples.shape, rates.mean()

# %%
few, _ = vmap(chain, randomness=random.key(0))(starts[:4])
torch.testing.assert_close(few, samples[:4])

# %% [markdown]
# `random.scope` runs one chain alone, outside of `vmap`, with the same draws. That is how to look
# into a chain that went wrong, with a debugger:

# %%
with random.scope(random.key(0), 3):
    alone, _ = chain(starts[3])
torch.testing.assert_close(alone, samples[3])

# %% [markdown]
# ## The posterior

# %%
kept = samples[:, SAMPLES // 4 :].flatten(0, 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
for positions in samples[:5]:
    left.plot(positions[:, 0], linewidth=0.7)
left.axhline(exact_mean[0], color="black", linestyle="--", linewidth=0.8)
left.set(xlabel="step", ylabel="weight of body mass, five chains")
right.hist(kept[:, 0].numpy(), bins=60, density=True, alpha=0.5, label="samples")
deviation = exact_covariance[0, 0].sqrt()
grid = exact_mean[0] + deviation * torch.linspace(-4, 4, 200)
density = torch.distributions.Normal(exact_mean[0], deviation).log_prob(grid).exp()
right.plot(grid, density, label="exact")
right.set(xlabel="weight of body mass", ylabel="density")
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The means of the chains are independent, so their spread tells how exact the mean of all is.

# %%
means = samples[:, SAMPLES // 4 :].mean(1)
standard_error = means.std(0) / CHAINS**0.5
distance = ((means.mean(0) - exact_mean) / standard_error).abs().max().item()
print(f"accepted {rates.mean():.2f}, distance {distance:.1f} standard errors")
assert distance < 4
torch.testing.assert_close(kept.T.cov(), exact_covariance, rtol=0.2, atol=2e-4)
