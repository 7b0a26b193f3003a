# %% [markdown]
# # Neural tangent kernels
#
# How similar are two inputs to a network? The inner product of their gradients tells, and predicts
# what training does. It is one line, and a second line makes it without the gradients.
#
# The kernel of Jacot et al. (2018) is $K(x, y) = J(x)\,J(y)^T$, where $J(x)$ is the Jacobian of
# the network's outputs in all its parameters.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from forall import functional_call, jacrev, jvp, vjp, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)
_ = torch.manual_seed(0)

# %% [markdown]
# ## The data and the network
#
# Sixes and nines, and a network with one output.

# %%
COUNT = 60  # fast: 30
digits = load_digits()
chosen = (digits.target == 6) | (digits.target == 9)
images = torch.tensor(digits.images[chosen]).flatten(1) / 16
signs = torch.tensor(digits.target[chosen] == 9) * 2.0 - 1
train_x, train_y = images[:COUNT], signs[:COUNT]
test_x, test_y = images[COUNT : 2 * COUNT], signs[COUNT : 2 * COUNT]
network = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
parameters = {name: p.detach() for name, p in network.named_parameters()}


def output(parameters, x):  # one image -> ()
    return functional_call(network, parameters, (x,))[0]


# %% [markdown]
# ## By Jacobians
#
# The Jacobian for one image is a dict of tensors, one for each parameter. `vmap` gives it for all
# images, and products of all pairs are sums over the parameters.


# %%
def jacobians(x):
    rows = vmap(jacrev(output), in_dims=(None, 0))(parameters, x)
    return torch.cat([r.flatten(1) for r in rows.values()], dim=1)


J = jacobians(train_x)
kernel = J @ J.T
J.shape, kernel.shape

# %% [markdown]
# ## Without Jacobians
#
# With more parameters, $J$ does not fit into memory. An entry of the kernel is a cotangent pulled
# back at one image and pushed forward at another: `vjp`, then `jvp`. Two nested `vmap`s make the
# table of all pairs. As it stands, the table still holds one direction for each image, as many
# numbers as $J$. Give both calls of `vmap` a `chunk_size=n`, and only `n` are held at a time.


# %%
def entry(x, y):
    _, pull_back = vjp(lambda p: output(p, y), parameters)
    (direction,) = pull_back(torch.ones(()))
    return jvp(lambda p: output(p, x), (parameters,), (direction,))[1]


table = vmap(vmap(entry, in_dims=(None, 0)), in_dims=(0, None))(train_x[:8], train_x[:8])
torch.testing.assert_close(table, kernel[:8, :8])

# %% [markdown]
# ## Several outputs
#
# A network with three outputs has a 3 by 3 block for each pair of images. Each unit vector is
# pulled back and pushed forward, and gives one column. (A cotangent of ones would add them up.)

# %%
OUTPUTS = 3
classifier = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, OUTPUTS))
weights = {name: p.detach() for name, p in classifier.named_parameters()}


def scores(weights, x):  # one image -> (3,)
    return functional_call(classifier, weights, (x.reshape(1, 1, 8, 8),))[0]


def block(x, y):  # -> (3, 3)
    _, pull_back = vjp(lambda w: scores(w, y), weights)

    def column(unit):
        return jvp(lambda w: scores(w, x), (weights,), pull_back(unit))[1]

    return vmap(column, out_dims=1)(torch.eye(OUTPUTS))


blocks = vmap(vmap(block, in_dims=(None, 0)), in_dims=(0, None))(train_x[:6], train_x[:6])
blocks.shape

# %% [markdown]
# By Jacobians it is a product, summed over the parameters. Often only the trace of each block is
# wanted:

# %%
rows = vmap(jacrev(scores), in_dims=(None, 0))(weights, train_x[:6])
flat = torch.cat([r.flatten(2) for r in rows.values()], dim=2)  # (6, 3, parameters)
torch.testing.assert_close(blocks, torch.einsum("nop,mqp->nmoq", flat, flat))
traces = blocks.diagonal(dim1=2, dim2=3).sum(2)
torch.testing.assert_close(traces, torch.einsum("nop,mop->nm", flat, flat))

# %% [markdown]
# ## What the kernel predicts
#
# A wide network that is trained by gradient descent on the squared error moves little in its
# parameters. Its outputs then follow the kernel: after long training they are
# $f(x) + K(x, X)\,K(X, X)^{-1}(y - f(X))$. That is kernel regression with this kernel.

# %%
before_train = vmap(output, in_dims=(None, 0))(parameters, train_x)
before_test = vmap(output, in_dims=(None, 0))(parameters, test_x)
cross = jacobians(test_x) @ J.T
predicted = before_test + cross @ torch.linalg.solve(kernel, train_y - before_train)

# %% [markdown]
# The same by gradient descent on the linearized network, whose tangents are again products with
# $J$:

# %%
rate = 1 / torch.linalg.eigvalsh(kernel)[-1]
change = torch.zeros(J.shape[1])
STEPS = 3000  # fast: 1500
for _ in range(STEPS):
    change -= rate * (before_train + J @ change - train_y) @ J
trained = before_test + jacobians(test_x) @ change

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4))
order = train_y.argsort()
shown = left.imshow(kernel[order][:, order])
left.set(title="kernel, sixes before nines", xlabel="image", ylabel="image")
figure.colorbar(shown, ax=left)
right.plot(predicted, trained, ".")
right.axline((0, 0), slope=1, color="gray", linewidth=0.8)
right.set(xlabel="predicted by the kernel", ylabel="after gradient descent")
figure.tight_layout()
plt.show()

# %%
accuracy = (predicted.sign() == test_y).double().mean().item()
difference = (predicted - trained).abs().max().item()
print(f"test accuracy {accuracy:.2f}, largest difference {difference:.2f}")
assert accuracy > 0.9
assert (predicted.sign() == trained.sign()).double().mean() > 0.95
