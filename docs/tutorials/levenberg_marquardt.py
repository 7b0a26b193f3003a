# %% [markdown]
# # Fit many curves at once
#
# The method of Levenberg and Marquardt, written for one curve, fits a batch of curves that stop at
# different steps. Each fit keeps its own damping, and leaves the loop when it is done.
#
# A fit repeats until its steps are small. How many steps that takes depends on the curve, so
# `torch.func.vmap` cannot map such a loop: it would have to run every fit for a fixed number of
# steps.

# %%
import matplotlib.pyplot as plt
import torch
from scipy.optimize import least_squares

from forall import explain, jacfwd, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(0)

# %% [markdown]
# ## The data: peaks with noise
#
# Each curve is one peak on a constant background, as a spectrometer shows it. Its four parameters
# are height, center, width and background.

# %%
COUNT = 200  # fast: 40
xs = torch.linspace(-4, 4, 60)


def peak(parameters):
    height, center, width, background = parameters
    return height * torch.exp(-(((xs - center) / width) ** 2)) + background


low, high = torch.tensor([1.0, -2.0, 0.4, -1.0]), torch.tensor([3.0, 2.0, 1.5, 1.0])
truth = low + (high - low) * torch.rand(COUNT, 4, generator=generator)
curves = vmap(peak)(truth) + 0.1 * torch.randn(COUNT, len(xs), generator=generator)

# %% [markdown]
# ## One fit
#
# With the residuals $r(p)$ and their Jacobian $J$, a step solves $(J^T J + \mu D)\,s = -J^T r$,
# where $D$ is the diagonal of $J^T J$. A small damping $\mu$ gives the step of Gauss and Newton. A
# large one gives a short step downhill. A step that makes the fit better is taken, and $\mu$ falls.
# A step that makes it worse is dropped, and $\mu$ grows.


# %%
def first_guess(curve):
    background = curve.median()
    width = torch.tensor(2.5)  # too wide: the first steps are often too long
    return torch.stack([curve.max() - background, xs[curve.argmax()], width, background])


def fit(curve):
    def residuals(parameters):
        return peak(parameters) - curve

    p, damping, steps = first_guess(curve), 1e-3, 0
    r = residuals(p)
    step = torch.ones(4)
    while step.abs().max() > 1e-7:
        jacobian = jacfwd(residuals)(p)
        slope, normal = jacobian.T @ r, jacobian.T @ jacobian
        damped = normal + damping * torch.diag(normal.diagonal())
        step = torch.linalg.solve(damped, -slope)
        r_new = residuals(p + step)
        if r_new @ r_new <= r @ r:
            p, r, damping = p + step, r_new, damping / 10
        else:
            damping = damping * 10
        steps += 1
    return p, steps


print(fit(curves[0]))

# %% [markdown]
# The function reads as a textbook does. The damping and the count of steps are Python numbers. The
# Jacobian is taken with `jacfwd`, since a curve has 60 residuals and 4 parameters.
#
# ## All fits
#
# This is the line that maps it:

# %%
parameters, steps = vmap(fit)(curves)
print(parameters.shape, f"steps: {steps.min()} to {steps.max()}")

# %% [markdown]
# Inside, `fit` calls `jacfwd`, which maps over the four parameters. Transforms nest, also in a loop
# that some examples have left.
#
# The damping differs between the curves too. It is a number of Python in the source, and each
# example has its own. `explain` makes the call and tells what happened. Here are the lines where
# curves parted, and into how many on each side:

# %%
report = explain(vmap(fit))(curves[:40])
for divergence in report.divergences:
    print(f"{divergence.place.text():35}", divergence.sizes)

# %% [markdown]
# Rejected steps are made by the curves that rejected them. A curve that has converged costs nothing
# more.
#
# ## Is it right?
#
# The loop over the curves gives the same fits. The counts of steps agree since the tests are far
# above rounding; a test near it may be decided by the last digit.

# %%
for curve, p, n in zip(curves[:10], parameters, steps, strict=False):
    p_alone, n_alone = fit(curve)
    assert torch.allclose(p_alone, p, rtol=1e-6, atol=1e-8)
    assert n_alone == n

# %% [markdown]
# At a minimum the slope $J^T r$ is zero. And SciPy's solver, started at the same guesses, is an
# independent judge: it is not to find a smaller sum of squares.


# %%
def sum_of_squares(p, curve):
    return (peak(p) - curve).square().sum()


def fit_by_scipy(curve):
    found = least_squares(
        lambda p: (peak(torch.tensor(p)) - curve).numpy(),
        first_guess(curve).numpy(),
        xtol=1e-12,
        ftol=1e-12,
    )
    return torch.tensor(found.x)


compared = curves[:40]
ours = vmap(sum_of_squares)(parameters[:40], compared)
by_scipy = torch.stack([fit_by_scipy(c) for c in compared])
theirs = vmap(sum_of_squares)(by_scipy, compared)
print(f"largest difference of the sums of squares: {(ours - theirs).max():.1e}")

# %% [markdown]
# ## The result

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.6))
for i, color in zip([0, 1, 2], ["C0", "C1", "C2"], strict=True):
    left.plot(xs, curves[i], ".", color=color, markersize=4)
    left.plot(xs, peak(parameters[i]), color=color, label=f"{steps[i]} steps")
left.set(xlabel="x", ylabel="signal", title="three of the fits")
left.legend(fontsize=8)
right.hist(steps, bins=range(int(steps.min()), int(steps.max()) + 2), align="left")
right.set(xlabel="steps until done", ylabel="curves", title="each fit stops by itself")
figure.tight_layout()
plt.show()

# %% [markdown]
# What this costs: the batch takes as many steps as its slowest curve, and the last steps are made
# for few curves. If a hopeless curve might keep the batch busy, end the loop after a number of
# steps, or call `vmap(fit, max_steps=200)`, which raises an error that names the curve.

# %%
slopes = vmap(lambda p, c: jacfwd(peak)(p).T @ (peak(p) - c))(parameters, curves)
print(f"largest slope at the minima: {slopes.abs().max():.1e}")
assert slopes.abs().max() < 1e-5
assert (ours <= theirs * (1 + 1e-6)).all()
