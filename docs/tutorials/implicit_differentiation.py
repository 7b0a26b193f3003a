# %% [markdown]
# # Differentiate an optimum
#
# How does the solution of an optimisation depend on its settings? The implicit function theorem
# answers with one linear solve. Here it becomes a rule around a solver, and tunes a penalty.
#
# The solver is a `while` loop that stops when it is done. We could differentiate its steps one by
# one. That costs memory for each step, and gives the derivative of the steps, not of the solution.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer

from forall import grad, hessian, vjp, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The inner problem
#
# Logistic regression with a penalty: the data say whether a tumor is benign, by ten measurements of
# cell nuclei. The setting is $\theta$, the logarithm of the strength of the penalty.

# %%
measured, benign = (torch.tensor(a) for a in load_breast_cancer(return_X_y=True))
measured = measured[:, 20:].to(torch.float64)  # the ten columns of the largest cells
measured = (measured - measured.mean(0)) / measured.std(0)
benign = benign.to(torch.float64)
FEATURES = measured.shape[1]


def loss(w, x, y):
    return torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y)


def objective(w, theta, x, y):
    return loss(w, x, y) + theta.exp() * w.square().sum()


# %% [markdown]
# ## The solver
#
# Newton's method, for one setting and one data set. A step that is too long is halved. It stops
# when the gradient is zero.


# %%
def solve(theta, x, y):
    w = torch.zeros(FEATURES)
    slope = grad(objective)(w, theta, x, y)
    while slope.norm() > 1e-10:
        step = -torch.linalg.solve(hessian(objective)(w, theta, x, y), slope)
        before = objective(w, theta, x, y)
        while objective(w + step, theta, x, y) > before + 1e-12:
            step = step / 2
        w = w + step
        slope = grad(objective)(w, theta, x, y)
    return w


# %% [markdown]
# ## The rule
#
# At the solution $w^*(\theta)$ the gradient $g(w, \theta)$ of the objective is zero. So a small
# change of $\theta$ moves the solution by $dw = -H^{-1}\, \partial_\theta g\; d\theta$, with the
# Hessian $H$. The backward pass solves $H u = v$ for the gradient $v$ that arrives, and pulls $-u$
# back through $g$ as a function of $\theta$. Whatever the solver did does not matter.
#
# `torch.autograd.Function` holds such a rule. The solver runs before it, apart from any derivative:
# `theta.detach()` sees to that. This is the older form of a `Function`, which `torch.func` refuses.
# It has no rule for `vmap` either, and needs none: both methods are run for the batch.
#
# It saves its result, not its argument. The result carries the derivative, so that a Hessian
# through the rule is right too. The argument was detached, and would count as a constant.


# %%
class AtOptimum(torch.autograd.Function):
    """Passes a solution on, and gives it the derivative of the implicit function."""

    @staticmethod
    def forward(ctx, w, theta, x, y):
        out = w.clone()
        ctx.save_for_backward(out, theta, x, y)
        return out

    @staticmethod
    def backward(ctx, v):
        w, theta, x, y = ctx.saved_tensors
        u = torch.linalg.solve(hessian(objective)(w, theta, x, y), v)
        _, pull = vjp(lambda theta: grad(objective)(w, theta, x, y), theta)
        return None, pull(-u)[0], None, None


def optimum(theta, x, y):
    return AtOptimum.apply(solve(theta.detach(), x, y), theta, x, y)


# %% [markdown]
# ## The outer problem
#
# Suppose a small study, with 100 of the patients. Five-fold cross validation cuts them in five
# parts. Each part judges what the other four have taught. We want the gradient of that judgement
# with respect to $\theta$.

# %%
FOLDS = 5
order = torch.randperm(len(benign), generator=torch.Generator().manual_seed(0))
order = order[:100].reshape(FOLDS, -1)  # the patients of each part
train = torch.stack([order[torch.arange(FOLDS) != k].flatten() for k in range(FOLDS)])


def judge(theta, train, test):
    w = optimum(theta, measured[train], benign[train])
    return loss(w, measured[test], benign[test])


theta = torch.tensor(-3.0)
print(grad(judge)(theta, train[0], order[0]))

# %% [markdown]
# For all folds at once, this is the line. Each fold's solver stops by itself.

# %%
by_fold = vmap(grad(judge), in_dims=(None, 0, 0))(theta, train, order)
print(by_fold)

# %% [markdown]
# ## Is it right?
#
# Three ways to the same number: the rule, the derivative through all steps of the solver, and a
# difference of two solutions.


# %%
def judge_unrolled(theta, train, test):
    w = solve(theta, measured[train], benign[train])
    return loss(w, measured[test], benign[test])


unrolled = vmap(grad(judge_unrolled), in_dims=(None, 0, 0))(theta, train, order)


def judge_all(theta):
    return vmap(judge, in_dims=(None, 0, 0))(theta, train, order)


difference = (judge_all(theta + 1e-4) - judge_all(theta - 1e-4)) / 2e-4
for name, values in [
    ("rule", by_fold),
    ("unrolled", unrolled),
    ("difference", difference),
]:
    print(f"{name:11}", values)

# %% [markdown]
# The rule has a second derivative as well. The difference is that of two slopes.

# %%
curvature = vmap(hessian(judge), in_dims=(None, 0, 0))(theta, train, order)


def slopes(theta):
    return vmap(grad(judge), in_dims=(None, 0, 0))(theta, train, order)


by_slopes = (slopes(theta + 1e-4) - slopes(theta - 1e-4)) / 2e-4
print(curvature)
torch.testing.assert_close(curvature, by_slopes, rtol=1e-5, atol=1e-8)

# %% [markdown]
# Unrolling agrees here because Newton's method ends exactly. With a solver that stops early it is
# off, and so is the rule: both need a solution. Unrolling needs memory for each step, the rule does
# not.
#
# ## Tune the penalty
#
# The mean over the folds is a function of one number. We go downhill with the gradient's sign and a
# step that halves when the sign changes.


# %%
def mean_slope(theta):
    return vmap(grad(judge), in_dims=(None, 0, 0))(theta, train, order).mean()


STEPS = 30  # fast: 14
path, step = [torch.tensor(-1.0)], -1.0
for _ in range(STEPS):
    if mean_slope(path[-1]) * step > 0:
        step = -step / 2
    path.append(path[-1] + step)
path = torch.stack(path)
print(path[-1], mean_slope(path[-1]))

# %% [markdown]
# ## The result


# %%
def judge_each(thetas):
    """The mean loss for each of several settings: all pairs of setting and fold in one map."""
    times = len(thetas)
    pairs = (
        thetas.repeat_interleave(FOLDS),
        train.repeat(times, 1),
        order.repeat(times, 1),
    )
    return vmap(judge)(*pairs).reshape(times, FOLDS).mean(1)


thetas = torch.linspace(-9, 0, 28)
curve, on_path = judge_each(thetas), judge_each(path)

figure, axes = plt.subplots(figsize=(7, 4))
axes.plot(thetas, curve, color="gray", label="loss on the parts left out")
axes.plot(path, on_path, "o-", markersize=4, linewidth=0.6, label="path of the gradient")
axes.plot(path[-1], on_path[-1], "*", markersize=14, color="C3", label="found")
axes.set(xlabel="theta, the logarithm of the penalty", ylabel="mean loss of five folds")
axes.legend()
plt.show()

# %% [markdown]
# Each point of the curve is a mean of five solvers, and each solver has a `while` loop of its own.
#
# What this costs: the rule makes one Hessian and one linear solve, as much as one step of the
# solver. For many parameters, solve $H u = v$ by conjugate gradients with `forall.hvp` instead, so
# that the matrix is never made.

# %%
gap = (by_fold - unrolled).abs().max() / by_fold.abs().max()
print(f"rule against unrolling: relative difference {gap:.1e}")
assert gap < 1e-6
assert torch.allclose(by_fold, difference, rtol=1e-4, atol=1e-7)
assert on_path[-1] <= curve.min() + 1e-4
