# %% [markdown]
# # Forces between atoms
#
# The energy of a cluster of atoms is a short function. Its gradient gives the forces, its Hessian
# the vibrations, and a `while` loop that relaxes one cluster is mapped over many.

# %%
import math

import matplotlib.pyplot as plt
import torch

from forall import grad, hessian, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(0)

# %% [markdown]
# ## One energy
#
# Lennard and Jones's potential is a model of atoms of a noble gas. Each pair at distance $r$ has
# the energy $4 (r^{-12} - r^{-6})$, in units of the depth and the size of one bond. The argument is
# one cluster: a tensor of shape `(7, 3)`.

# %%
ATOMS = 7
first, second = torch.triu_indices(ATOMS, ATOMS, offset=1)


def energy(positions):
    squared = (positions[first] - positions[second]).square().sum(-1)
    attraction = squared**-3
    return 4 * (attraction**2 - attraction).sum()


slope = grad(energy)  # the forces are its negative

# %% [markdown]
# Forces by hand are a good check of `grad`, and a reason not to write them by hand:


# %%
def slope_by_hand(positions):
    difference = positions[:, None] - positions[None, :]
    squared = difference.square().sum(-1) + torch.eye(ATOMS)
    factor = 24 * (squared**-4 - 2 * squared**-7)
    factor = factor - torch.diag(factor.diagonal())
    return (factor[..., None] * difference).sum(1)


some = 1.5 * torch.randn(ATOMS, 3, generator=generator)
print(torch.allclose(slope(some), slope_by_hand(some)))
print(slope(some).sum(0))  # no force on the cluster as a whole

# %% [markdown]
# ## Relax one cluster
#
# From a random start, the cluster falls into some minimum of the energy. Newton's method uses the
# Hessian, of shape `(7, 3, 7, 3)`. Far from a minimum it has negative eigenvalues. We take their
# magnitudes, so that each step goes downhill, and limit the length of a step. The loop ends when
# the forces vanish.


# %%
def relax(positions):
    steps = 0
    while slope(positions).abs().max() > 1e-9:
        matrix = hessian(energy)(positions).reshape(3 * ATOMS, 3 * ATOMS)
        curvature, modes = torch.linalg.eigh(matrix)
        along = modes.T @ slope(positions).flatten()
        step = -(modes @ (along / curvature.abs().clamp(min=1e-2))).reshape(ATOMS, 3)
        step = step * (0.3 / step.norm()).clamp(max=1.0)
        while energy(positions + step) > energy(positions) + 1e-12:
            step = step / 4
        positions = positions + step
        steps += 1
    return positions, steps


def random_start(seed):
    return 0.9 * torch.randn(ATOMS, 3, generator=torch.Generator().manual_seed(seed))


relaxed, steps = relax(random_start(0))
print(energy(relaxed), steps)

# %% [markdown]
# ## Relax many clusters
#
# Each start needs another number of steps, and another number of tries in the inner loop. This is
# the line that maps it. `torch.func.vmap` maps the gradient and the Hessian, but not the two loops.

# %%
COUNT = 48  # fast: 8
starts = torch.stack([random_start(seed) for seed in range(COUNT)])
clusters, steps = vmap(relax)(starts)
energies = vmap(energy)(clusters)
print(f"steps: {steps.min()} to {steps.max()}")
print(energies.mul(1e6).round().div(1e6).unique(return_counts=True))

# %% [markdown]
# Seven such atoms have four stable shapes, which are known from the literature. The lowest, two
# pyramids on a pentagon, has the energy -16.505384.
#
# ## Vibrations
#
# At a minimum the eigenvalues of the Hessian are the squares of the frequencies. Six of them are
# zero: three directions in which the cluster moves as a whole, and three in which it turns. All
# others are positive, or it would not be a minimum. We take them for all clusters at once, and
# print those of the first:

# %%
hessians = vmap(hessian(energy))(clusters).reshape(COUNT, 3 * ATOMS, 3 * ATOMS)
eigenvalues = torch.linalg.eigvalsh(hessians)
print(eigenvalues[0])

# %% [markdown]
# ## A trajectory
#
# The method of Verlet moves the atoms by their forces. It does not keep the energy exactly. Its
# error stays bounded, and falls with the square of the time step. We give the first cluster random
# velocities, and compare three time steps.

# %%
DURATION = 4.0  # fast: 1.0
velocities = 0.5 * torch.randn(ATOMS, 3, generator=generator)


def simulate(positions, velocities, dt):
    """The total energy at each of the times."""
    energies = []
    force = -slope(positions)
    for _ in range(round(DURATION / dt)):
        velocities = velocities + dt / 2 * force
        positions = positions + dt * velocities
        force = -slope(positions)
        velocities = velocities + dt / 2 * force
        energies.append(energy(positions) + velocities.square().sum() / 2)
    return torch.stack(energies)


time_steps = [0.01, 0.005, 0.0025]
before = energy(clusters[0]) + velocities.square().sum() / 2
drifts = [simulate(clusters[0], velocities, dt) - before for dt in time_steps]
print([f"{drift.abs().max():.1e}" for drift in drifts])

# %% [markdown]
# The same function runs for many trajectories. Velocities of several temperatures, one line:

# %%
scales = torch.linspace(0.2, 1.0, 5)
hot = vmap(lambda scale: simulate(clusters[0], scale * velocities, 0.01))(scales)
print(hot.shape)

# %% [markdown]
# ## The result

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.6))
for dt, drift in zip(time_steps, drifts, strict=True):
    left.plot(dt * torch.arange(1, len(drift) + 1), drift, label=f"time step {dt}")
left.set(
    xlabel="time",
    ylabel="change of the total energy",
    title="energy is nearly conserved",
)
left.legend(fontsize=8)
order = energies.argsort()
for i in (order[0], order[-1]):
    frequencies = eigenvalues[i].clamp(min=0).sqrt() / (2 * math.pi)
    right.plot(frequencies, "o-", markersize=3, label=f"energy {energies[i]:.3f}")
right.set(xlabel="mode", ylabel="frequency", title="six modes have frequency 0")
right.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# What this costs: `hessian` makes all $21^2$ entries, which is fine for small clusters. For large
# ones use `forall.hvp`, the product of the Hessian and a vector, which never makes the matrix.
#
# The checks: all clusters are at minima, with six free directions and no other. Half the time step
# gives a quarter of the error of the energy.

# %%
ratio = drifts[1].abs().max() / drifts[2].abs().max()
print(f"half the time step, error smaller by a factor of {ratio:.2f}")
assert vmap(slope)(clusters).abs().max() < 1e-8
assert (eigenvalues[:, :6].abs() < 1e-5).all()
assert (eigenvalues[:, 6:] > 0.1).all()
assert 3.5 < ratio < 4.5
