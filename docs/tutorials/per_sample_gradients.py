# %% [markdown]
# # Per-sample gradients and private training
#
# The gradient of each image by itself, in one call. With it a classifier is trained so that no
# single image can change it much: DP-SGD.
#
# `loss.backward()` gives the gradient of a *sum* over the batch. Some methods need the terms of
# that sum: private training clips each of them, and importance sampling looks at their sizes. Here
# you write the loss of one image, and `vmap(grad(loss))` gives all terms.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from forall import functional_call, grad, per_example_grad_norm, vmap

plt.rcParams["figure.dpi"] = 144
_ = torch.manual_seed(0)

# %% [markdown]
# ## The data and the network
#
# Scikit-learn ships 1 797 images of handwritten digits, 8 by 8 pixels each.

# %%
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)
network = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(0), nn.Linear(128, 10)
)

# %% [markdown]
# ## The loss of one image
#
# `nn.Flatten(0)` is right for *one* image: the network never sees a batch. `functional_call` runs
# the module with the parameters that it is given. `image[None]` adds the channels, of which these
# images have one. With layers that want a batch, as `GroupNorm`, write `nn.Flatten()` and pass a
# batch of one image.


# %%
def loss(parameters, image, label):
    scores = functional_call(network, parameters, (image[None],))
    return cross_entropy(scores, label)


parameters = {name: p.detach() for name, p in network.named_parameters()}
gradients_of_each = vmap(grad(loss), in_dims=(None, 0, 0))
found = gradients_of_each(parameters, images[:64], labels[:64])
{name: tuple(g.shape) for name, g in found.items()}

# %% [markdown]
# Each parameter has 64 gradients now. They are those of a loop over the images:

# %%
one_by_one = [grad(loss)(parameters, x, y) for x, y in zip(images[:64], labels[:64], strict=True)]
for name, stacked in found.items():
    torch.testing.assert_close(stacked, torch.stack([g[name] for g in one_by_one]))

# %% [markdown]
# ## How large is each gradient?
#
# If only the sizes are wanted, `per_example_grad_norm` does not make the gradients at all.

# %%
norms = per_example_grad_norm(loss, in_dims=(None, 0, 0))(parameters, images[:64], labels[:64])
sizes = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
torch.testing.assert_close(norms, sizes)
print(f"from {norms.min():.2f} to {norms.max():.2f}")

# %% [markdown]
# ## Private training
#
# DP-SGD (Abadi et al., 2016) scales each gradient down to a norm of at most $C$, adds the scaled
# gradients, and adds noise of standard deviation $\sigma C$ to the sum. What one image contributes
# is then at most $C$, and is covered by the noise.
#
# This step holds the gradients of all images. *Opacus* in [Coming from other
# libraries](../guides/coming_from.md#opacus) has the same step from the norms alone, without them.

# %%
STEPS = 200  # fast: 80
CLIP, NOISE, RATE = 0.5, 1.0, 0.5


def private_step(parameters, xs, ys):
    gradients = gradients_of_each(parameters, xs, ys)
    squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
    factors = (CLIP / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    new = {}
    for name, g in gradients.items():
        clipped = torch.einsum("b,b...->...", factors, g)
        noisy = clipped + NOISE * CLIP * torch.randn_like(clipped)
        new[name] = parameters[name] - RATE * noisy / len(xs)
    return new, (factors < 1).float().mean()


def accuracy(parameters, part):
    run = vmap(lambda x: functional_call(network, parameters, (x[None],)).argmax())
    return (run(images[part]) == labels[part]).float().mean().item()


curve, clipped = [], []
for step in range(STEPS):
    batch = torch.randperm(1500)[:300]
    parameters, share = private_step(parameters, images[batch], labels[batch])
    clipped.append(share.item())
    if step % 10 == 9:
        curve.append((step + 1, accuracy(parameters, test)))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
left.plot(*zip(*curve, strict=True), marker=".")
left.set(xlabel="step", ylabel="accuracy on test images", ylim=(0, 1))
right.plot(clipped)
right.set(xlabel="step", ylabel="share of clipped gradients", ylim=(0, 1.05))
figure.tight_layout()
plt.show()

# %% [markdown]
# The guarantee $(\varepsilon, \delta)$ follows from $\sigma$, the share of images in a batch and
# the number of steps; `examples/digits_privacy.py` in the repository computes it. The noise here
# comes from PyTorch's ordinary generator, which is no source of secrets.

# %%
final = accuracy(parameters, test)
print(f"accuracy on {len(labels[test])} test images: {final:.2f}")
assert final > 0.75  # 0.1 is chance
