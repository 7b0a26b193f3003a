# %% [markdown]
# # Influence functions
#
# Which training images made the network believe what it believes about a test image? One linear
# solve with the Hessian of the training loss answers for all of them, without training again.
#
# If training image $i$ were left out, the parameters would move by about
# $\frac{1}{n} H^{-1} g_i$, where $g_i$ is the gradient of its loss and $H$ the Hessian of the mean
# loss. So the loss of a test image with gradient $g$ would change by
# $\frac{1}{n}\, g^T H^{-1} g_i$ (Koh and Liang, 2017).

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from forall import grad, hessian, linearize, vmap

plt.rcParams["figure.dpi"] = 144
torch.set_default_dtype(torch.float64)
_ = torch.manual_seed(0)

# %% [markdown]
# ## The model
#
# Logistic regression on images of threes and eights, some of which carry the wrong label.

# %%
COUNT, WRONG = 200, 15
digits = load_digits()
chosen = (digits.target == 3) | (digits.target == 8)
images = torch.tensor(digits.images[chosen]).flatten(1) / 16
labels = torch.tensor(digits.target[chosen] == 8).long()
train_x, true_y = images[:COUNT], labels[:COUNT]
test_x, test_y = images[COUNT:], labels[COUNT:]
flipped = torch.randperm(COUNT)[:WRONG]
train_y = true_y.clone()
train_y[flipped] = 1 - train_y[flipped]


def loss(weights, x, y):  # of one image
    return cross_entropy(x @ weights.reshape(64, 2), y)


def total(weights, keep):  # the mean loss, with a weight for each image, and a penalty
    losses = vmap(loss, in_dims=(None, 0, 0))(weights, train_x, train_y)
    return (keep * losses).sum() / COUNT + 0.01 * weights.square().sum()


# %% [markdown]
# ## Training
#
# The loss is convex. Newton's method finds the minimum in a few steps, with the Hessian itself: 128
# parameters are few.


# %%
def fit(keep):
    weights = torch.zeros(128)
    for _ in range(6):
        slope = grad(total)(weights, keep)
        weights = weights - torch.linalg.solve(hessian(total)(weights, keep), slope)
    return weights


everyone = torch.ones(COUNT)
weights = fit(everyone)
print(f"slope at the end: {grad(total)(weights, everyone).norm():.1e}")

# %% [markdown]
# ## Influence of every training image on the test loss
#
# `vmap(grad(loss))` gives all $g_i$ at once.


# %%
def test_loss(weights):
    return vmap(loss, in_dims=(None, 0, 0))(weights, test_x, test_y).mean()


gradients = vmap(grad(loss), in_dims=(None, 0, 0))(weights, train_x, train_y)
H = hessian(total)(weights, everyone)
direction = torch.linalg.solve(H, grad(test_loss)(weights))
influence = gradients @ direction / COUNT

# %% [markdown]
# For a network with millions of parameters $H$ cannot be made. Its products with vectors can.
# Conjugate gradients then solve the system, and stop when the residual is small. All products are
# at the same weights, so `linearize` computes what they share once. (`hvp` is for a single one.)


# %%
def conjugate_gradients(product, right_side):
    x, residual = torch.zeros_like(right_side), right_side
    step, size = residual, residual @ residual
    while size.sqrt() > 1e-10:
        image = product(step)
        length = size / (step @ image)
        x, residual = x + length * step, residual - length * image
        step, size = residual + residual @ residual / size * step, residual @ residual
    return x


slope, hessian_product = linearize(lambda w: grad(total)(w, everyone), weights)
solved = conjugate_gradients(hessian_product, grad(test_loss)(weights))
torch.testing.assert_close(solved, direction, rtol=1e-6, atol=1e-8)

# %% [markdown]
# The influence on the loss of each test image by itself takes one system for each. `vmap` solves
# them at once, and each one stops after steps of its own.


# %%
def influence_on(x, y):  # of all training images on one test image
    return gradients @ conjugate_gradients(hessian_product, grad(loss)(weights, x, y)) / COUNT


on_each = vmap(influence_on)(test_x, test_y)
torch.testing.assert_close(on_each.mean(0), influence, rtol=1e-6, atol=1e-8)

# %% [markdown]
# ## Is it true?
#
# Leaving an image out and training again is possible here, so the prediction can be checked. Every
# image gets a `keep` vector of its own, and `vmap` trains all models at once.

# %%
CHECKED = 60  # fast: 12
left_out = torch.ones(CHECKED, COUNT) - torch.eye(COUNT)[:CHECKED]
again = vmap(fit)(left_out)
change = vmap(test_loss)(again) - test_loss(weights)

# %% [markdown]
# Images with a wrong label stand out: the test loss falls when they go.

# %%
is_wrong = torch.zeros(COUNT, dtype=torch.bool)
is_wrong[flipped] = True
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
left.plot(influence[:CHECKED], change, ".")
left.axline((0, 0), slope=1, color="gray", linewidth=0.8)
left.set(xlabel="predicted change of the test loss", ylabel="after training again")
order = influence.argsort()
colors = ["tab:red" if wrong else "tab:blue" for wrong in is_wrong[order]]
right.bar(range(COUNT), influence[order], color=colors, width=1)
right.set(xlabel="training images, by influence (wrong labels in red)", ylabel="predicted change")
figure.tight_layout()
plt.show()

# %%
correlation = torch.corrcoef(torch.stack([influence[:CHECKED], change]))[0, 1].item()
found = is_wrong[order[:WRONG]].double().mean().item()
print(f"correlation {correlation:.3f}; of the {WRONG} most harmful, {found:.0%} have a wrong label")
assert correlation > 0.9
