# %% [markdown]
# # An adaptive ODE solver for many orbits
#
# A solver that chooses its own step size, written for one initial value with a `while` loop. `vmap`
# maps it over many initial values, and each one takes as many steps as it needs.
#
# An adaptive solver compares two results of different order in each step. Where they differ by more
# than a tolerance, it repeats the step with a smaller one. So the number of steps depends on the
# data, and `torch.func.vmap` refuses such a loop.

# %%
import math

import matplotlib.pyplot as plt
import torch

from forall import grad, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The problem: one planet
#
# The state of a planet is its place and its velocity in the plane: a tensor of shape `(4,)`. The
# sun is at the origin, and the force falls with the square of the distance. With the right units,
# an orbit whose longer radius is 1 takes the time $2\pi$, whatever its shape. So the exact solution
# after $2\pi$ is the initial value. So the error can be measured.


# %%
def velocity_and_acceleration(state):
    place, velocity = state[:2], state[2:]
    return torch.cat([velocity, -place / place.norm() ** 3])


def start(eccentricity):
    """The state nearest to the sun, for an orbit whose longer radius is 1."""
    speed = torch.sqrt((1 + eccentricity) / (1 - eccentricity))
    zero = torch.zeros_like(speed)
    return torch.stack([1 - eccentricity, zero, zero, speed])


# %% [markdown]
# An eccentricity of 0 is a circle. Near 1 the orbit is long and thin: the planet is slow for most
# of the time, and very fast near the sun. A fixed step size that suits the fast part wastes work in
# the slow one.
#
# ## The solver, for one initial value
#
# One step of the method of Bogacki and Shampine (1989) gives a result of order 3 and an estimate of
# its error.


# %%
def try_step(state, h):
    k1 = velocity_and_acceleration(state)
    k2 = velocity_and_acceleration(state + h * k1 / 2)
    k3 = velocity_and_acceleration(state + h * k2 * 3 / 4)
    new = state + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
    k4 = velocity_and_acceleration(new)
    lower_order = state + h * (7 * k1 + 6 * k2 + 8 * k3 + 3 * k4) / 24
    return new, (new - lower_order).norm()


def solve(state, duration, tolerance=1e-5):
    t, h = torch.tensor(0.0), torch.tensor(0.01)
    steps = 0
    while t < duration:
        h = torch.minimum(h, duration - t)
        new, error = try_step(state, h)
        if error < tolerance:  # else: the step is tried again with a smaller h
            t, state = t + h, new
        h = h * (0.9 * (tolerance / error) ** (1 / 3)).clamp(0.2, 5.0)
        steps = steps + 1
    return state, steps


state, steps = solve(start(torch.tensor(0.5)), 2 * math.pi)
print(state, steps)

# %% [markdown]
# This is ordinary PyTorch. It has a loop whose end depends on values, an `if` inside it, and a
# Python number that counts.
#
# ## Many initial values
#
# This is the line that maps it:

# %%
COUNT = 64  # fast: 12
eccentricities = torch.linspace(0.0, 0.9, COUNT)
ends, steps = vmap(lambda e: solve(start(e), 2 * math.pi))(eccentricities)
print(f"{steps[0]} steps for the circle, {steps[-1]} for the thinnest orbit")

# %% [markdown]
# The count comes back as a tensor with one number for each orbit. An orbit that is done leaves the
# loop: the steps after that are made for the others alone.
#
# The loop over the examples is the specification of `vmap`. Here it is for some of them:

# %%
for i in range(0, COUNT, 4):
    end, count = solve(start(eccentricities[i]), 2 * math.pi)
    assert torch.allclose(end, ends[i], rtol=1e-9, atol=1e-9)
    assert count == steps[i]

# %% [markdown]
# ## Paths of different lengths
#
# To draw an orbit we want the places that the solver visited. Each orbit has another number of
# them. With `ragged=True`, results of several shapes come back as one nested tensor, and `unbind`
# gives one tensor for each example.


# %%
def trace(eccentricity, tolerance=1e-4):
    state = start(eccentricity)
    t, h = torch.tensor(0.0), torch.tensor(0.01)
    places = [state[:2]]
    while t < 2 * math.pi:
        h = torch.minimum(h, 2 * math.pi - t)
        new, error = try_step(state, h)
        if error < tolerance:
            t, state = t + h, new
            places.append(state[:2])
        h = h * (0.9 * (tolerance / error) ** (1 / 3)).clamp(0.2, 5.0)
    return torch.stack(places)


drawn = torch.tensor([0.0, 0.3, 0.6, 0.8])
paths = vmap(trace, ragged=True)(drawn).unbind()
print([tuple(path.shape) for path in paths])

# %% [markdown]
# ## Derivatives through the solver
#
# How does the height $y$ after the time $2\pi$ depend on the initial state? That is a gradient
# through the whole loop. The exact answer is known here as well. A small change of the state
# changes the period $T$, so that after $2\pi$ the planet has not quite returned. With $v$ the speed
# at the start, the gradient is $e_y - v \nabla T$, and Kepler's third law gives $T$.


# %%
def height(state):
    return solve(state, 2 * math.pi)[0][1]


def period(state):
    return 2 * math.pi * (2 / state[:2].norm() - state[2:].square().sum()) ** -1.5


starts = vmap(start)(eccentricities[:: COUNT // 4])
gradients = vmap(grad(height))(starts)
exact = torch.eye(4)[1] - starts[:, 3:] * vmap(grad(period))(starts)
print(gradients[:, 3], exact[:, 3], sep="\n")

# %% [markdown]
# Each gradient has been taken through as many steps as its orbit needed. The thin orbits are very
# sensitive: a small change of the speed near the sun moves the planet far.
#
# The derivative goes through the choice of the step size too, since `h` depends on the state. Write
# `h = h.detach()` in the loop if you want the step sizes held fixed.
#
# ## The result

# %%
errors = (ends - vmap(start)(eccentricities)).norm(dim=1)

figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 4))
for e, path in zip(drawn.tolist(), paths, strict=True):
    left.plot(*path.T, ".-", markersize=4, linewidth=0.8, label=f"eccentricity {e:.1f}")
left.plot(0, 0, "*", color="orange", markersize=12)
left.set(xlabel="x", ylabel="y", aspect="equal", ylim=(-1.2, 2.4))
left.set_title("where each solver stepped")
left.legend(fontsize=8, loc="upper left")
right.plot(eccentricities, steps, ".-")
right.set(
    xlabel="eccentricity",
    ylabel="steps tried",
    ylim=(0, None),
    title="steps of each orbit",
)
figure.tight_layout()
plt.show()

# %% [markdown]
# What this costs: `vmap` makes as many steps as the slowest orbit, each for the orbits that are
# still at work. A batch where one example takes a thousand steps and all others ten is a thousand
# small steps long. `vmap(solve, max_steps=10_000)` ends a loop that would not end by itself, with
# an error that names the examples. A dozen orbits gain little over the loop; hundreds do.

# %%
relative = (gradients - exact).norm(dim=1) / exact.norm(dim=1)
print(f"after one period, distance from the start: at most {errors.max():.1e}")
print(f"relative error of the gradients: at most {relative.max():.1e}")
assert errors.max() < 0.05
assert relative.max() < 0.01
