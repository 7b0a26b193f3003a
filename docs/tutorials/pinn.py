# %% [markdown]
# # A physics-informed network
#
# A network solves Poisson's equation on a square: its Laplacian is part of the loss. The solution
# is known, so the error can be told.
#
# A physics-informed network (Raissi, Perdikaris and Karniadakis, 2019) is trained so that it
# satisfies an equation at sampled points. That takes second derivatives in the *inputs*, and then a
# gradient of these in the *parameters*.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

from forall import functional_call, grad_and_value, hessian, laplacian, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)
_ = torch.manual_seed(0)

# %% [markdown]
# ## The equation
#
# On the unit square, $\Delta u = -2 \pi^2 \sin(\pi x) \sin(\pi y)$ with $u = 0$ at the border. The
# solution is $u = \sin(\pi x) \sin(\pi y)$.


# %%
def source(p):
    return -2 * math.pi**2 * torch.sin(math.pi * p[0]) * torch.sin(math.pi * p[1])


def solution(p):
    return torch.sin(math.pi * p[0]) * torch.sin(math.pi * p[1])


# %% [markdown]
# ## The network, at one point
#
# The factor $16\, x (1 - x) y (1 - y)$, which is 1 in the middle, makes it zero at the border. So
# no loss is needed there.

# %%
network = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))


def u(parameters, p):  # one point (2,) -> ()
    x, y = p
    return 16 * x * (1 - x) * y * (1 - y) * functional_call(network, parameters, (p,))[0]


# %% [markdown]
# ## The residual, at one point
#
# `laplacian` sums the second derivatives without making the Hessian. Its `argnums` says that the
# derivatives are those in the point, not in the parameters.


# %%
def residual(parameters, p):
    return laplacian(u, argnums=1)(parameters, p) - source(p)


def loss(parameters, points):
    return vmap(residual, in_dims=(None, 0))(parameters, points).square().mean()


# %% [markdown]
# The trace of the Hessian is the same number, at the cost of all its entries:

# %%
parameters = {name: p.detach() for name, p in network.named_parameters()}
point = torch.tensor([0.3, 0.6])
torch.testing.assert_close(
    laplacian(u, argnums=1)(parameters, point), hessian(u, argnums=1)(parameters, point).trace()
)

# %% [markdown]
# ## Training
#
# Points are drawn anew in each step. The gradient goes through the Laplacian. (`.backward()` on the
# loss would do as well: the parameters are leaves.)

# %%
STEPS = 3000  # fast: 400
leaves = [p.requires_grad_() for p in parameters.values()]
optimizer = torch.optim.Adam(leaves, lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
curve = []
for _ in range(STEPS):
    gradients, value = grad_and_value(loss)(parameters, torch.rand(128, 2))
    for p, g in zip(leaves, gradients.values(), strict=True):
        p.grad = g.detach()
    optimizer.step()
    schedule.step()
    curve.append(value.item())

# %% [markdown]
# ## The solution

# %%
side = torch.linspace(0, 1, 41)
grid = torch.cartesian_prod(side, side)
with torch.no_grad():
    found = vmap(u, in_dims=(None, 0))(parameters, grid).reshape(41, 41)
exact = vmap(solution)(grid).reshape(41, 41)
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
axes[0].semilogy(curve, linewidth=0.6)
axes[0].set(xlabel="step", ylabel="mean square of the residual")
for ax, values, title in zip(axes[1:], (found, found - exact), ("u", "error"), strict=True):
    shown = ax.imshow(values.T, origin="lower", extent=(0, 1, 0, 1))
    ax.set(title=title, xlabel="x", ylabel="y")
    figure.colorbar(shown, ax=ax)
figure.tight_layout()
plt.show()

# %%
error = (found - exact).abs().max().item()
print(f"largest error: {error:.1e}")
assert error < 0.05
