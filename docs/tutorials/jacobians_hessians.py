# %% [markdown]
# # Jacobians, Hessians and their products
#
# All first and second derivatives of a small network: as full matrices, and as products with
# vectors where the matrices would be too large.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes

from forall import (
    grad,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    laplacian,
    linearize,
    vjp,
    vmap,
)

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)
_ = torch.manual_seed(0)

# %% [markdown]
# ## A function of one patient
#
# The data are 442 patients with ten measurements each, and how far their diabetes went within a
# year. A network of ten numbers gives three.

# %%
data = load_diabetes(scaled=False)
patients = torch.tensor(data.data)
patients = (patients - patients.mean(0)) / patients.std(0)
first, second = torch.randn(10, 16) / 4, torch.randn(16, 3) / 4


def network(x):  # (10,) -> (3,)
    return torch.tanh(x @ first) @ second


# %% [markdown]
# ## Jacobians
#
# `jacrev` pulls one row back per output, `jacfwd` pushes one column per input. With ten inputs and
# three outputs, rows are fewer: `jacobian` chooses that.

# %%
x = patients[0]
by_rows, by_columns, chosen = jacrev(network)(x), jacfwd(network)(x), jacobian(network)(x)
torch.testing.assert_close(by_rows, by_columns)
torch.testing.assert_close(chosen, by_rows)
by_rows.shape

# %% [markdown]
# Mapped over all patients, in one call:

# %%
all_jacobians = vmap(jacobian(network))(patients)
all_jacobians.shape

# %% [markdown]
# Which measurement matters most for the first output? The mean size of the derivatives tells.

# %%
influence = all_jacobians[:, 0].abs().mean(0)
figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(data.feature_names, influence)
axes.set(ylabel="mean |d output 0 / d input|")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Products without the matrix
#
# A product $v^T J$ takes one backward pass (`vjp`), a product $J v$ one forward pass (`jvp`). If
# many products at the same point are wanted, `linearize` runs the function once and keeps what its
# derivative needs.

# %%
value, pull_back = vjp(network, x)
weights = torch.tensor([1.0, 0.0, -1.0])
torch.testing.assert_close(pull_back(weights)[0], weights @ by_rows)

value, push = linearize(network, x)
directions = torch.eye(10)
torch.testing.assert_close(vmap(push)(directions), by_rows.T)

# %% [markdown]
# ## Hessians
#
# The energy below is one number, so its second derivatives are a matrix. `hessian` makes it by
# forward mode over reverse mode.


# %%
def energy(x):  # (10,) -> ()
    return network(x).square().sum()


full = hessian(energy)(x)
torch.testing.assert_close(full, full.T)
torch.testing.assert_close(jacrev(grad(energy))(x), full)

# %% [markdown]
# For 442 patients the Hessians take 442 x 10 x 10 numbers. For a million inputs, a single one would
# take $10^{12}$. Often a part is enough: a product with a vector, the diagonal, or the trace. None
# of these makes the matrix.

# %%
v = torch.randn(10)
torch.testing.assert_close(hvp(energy)(x, v), full @ v)
torch.testing.assert_close(hessian_diag(energy)(x), full.diagonal())
torch.testing.assert_close(laplacian(energy)(x), full.trace())

# %% [markdown]
# ## Memory
#
# A Jacobian is made from many products at once, as many as memory takes. `chunk_size` sets how
# many; the values stay the same.

# %%
small = vmap(hessian(energy, chunk_size=2), chunk_size=50)(patients)
large = vmap(hessian(energy))(patients)
torch.testing.assert_close(small, large)

# %% [markdown]
# ## Curvature of the data
#
# Where is the energy convex? The smallest eigenvalue of each Hessian tells. The eigenvalues of a
# small matrix can be differentiated and mapped like anything else.

# %%
smallest = vmap(lambda x: torch.linalg.eigvalsh(hessian(energy)(x))[0])(patients)
figure, axes = plt.subplots(figsize=(6, 3))
axes.hist(smallest.numpy(), bins=40)
axes.axvline(0, color="tab:red", linestyle="--")
axes.set(xlabel="smallest eigenvalue of the Hessian", ylabel="patients")
figure.tight_layout()
plt.show()

# %% [markdown]
# At last a check that owes nothing to automatic differentiation: differences of the energy.

# %%
step = 1e-4
shifts = step * torch.eye(10)
differences = torch.stack(
    [(energy(x + s) - 2 * energy(x) + energy(x - s)) / step**2 for s in shifts]
)
error = (differences - full.diagonal()).abs().max().item()
print(f"largest error of the differences: {error:.1e}")
assert error < 1e-5
