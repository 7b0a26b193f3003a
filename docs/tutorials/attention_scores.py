# %% [markdown]
# # Where does the time go: attention, replay and explain
#
# A small attention model reads handwritten digits, and we ask which rows of an image it looks at.
# On the way we watch which calls are replayed, which are not, and why.
#
# forall is written in Python, and runs each operator of a transformed function through Python. For
# small models that costs more than the arithmetic. So calls that always do the same are recorded,
# and replayed as a straight line of operators.

# %%
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import forall
from forall import explain, functional_call, grad, hessian, jacrev, jit, vmap

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 144

# %% [markdown]
# ## The model, for one image
#
# An image of 8 times 8 pixels is a sequence of 8 rows. Four queries, which are learned, attend to
# the rows. The scores say how much each row counts. The forward pass returns the ten logits and
# these scores.

# %%
images, digits = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16
digits = torch.tensor(digits)


class Reader(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = torch.nn.Linear(8, width)
        self.place = torch.nn.Parameter(0.1 * torch.randn(8, width))
        self.query = torch.nn.Parameter(torch.randn(4, width) / width**0.5)
        self.value = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(4 * width, 10)

    def forward(self, image):
        rows = torch.tanh(self.embed(image) + self.place)
        scores = torch.softmax(self.query @ rows.T, dim=-1)  # (4, 8)
        mixed = scores @ self.value(rows)
        return self.out(mixed.flatten()), scores


model = Reader()
parameters = {name: p.detach() for name, p in model.named_parameters()}


def loss(parameters, image, digit):
    logits, _ = functional_call(model, parameters, (image,))
    return F.cross_entropy(logits, digit)


# %% [markdown]
# ## Training, and the time of each call
#
# The gradient of the mean loss is an ordinary transformed function. We time each call.


# %%
def mean_loss(parameters, images, digits):
    return vmap(loss, in_dims=(None, 0, 0))(parameters, images, digits).mean()


slope = grad(mean_loss)


def train(parameters, steps):
    generator = torch.Generator().manual_seed(0)
    milliseconds = []
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for _ in range(steps):
        batch = torch.randint(1500, (64,), generator=generator)
        start = time.perf_counter()
        slopes = slope(parameters, images[batch], digits[batch])
        milliseconds.append(1000 * (time.perf_counter() - start))
        momentum = {name: 0.9 * momentum[name] + g for name, g in slopes.items()}
        parameters = {name: p - 0.05 * momentum[name] for name, p in parameters.items()}
    return parameters, milliseconds


STEPS = 2000  # fast: 300
trained, milliseconds = train(parameters, STEPS)
logits, scores = vmap(lambda image: functional_call(model, trained, (image,)))(images)
right = (logits.argmax(1) == digits)[1500:].float().mean()
print(f"first call {milliseconds[0]:.1f} ms, longest {max(milliseconds):.1f} ms")
print(f"median of the last hundred {sorted(milliseconds[-100:])[50]:.2f} ms")
print(f"digits told right: {right:.0%}")

# %% [markdown]
# Nobody asked for it, and yet the later calls are faster. A function that has run for 50 ms in all
# is looked at. Where it is certain that all its calls do the same, and nothing besides, one call is
# recorded, and the calls after that are replayed. The first call and the one that records take the
# longest.
#
# ## What `explain` tells
#
# `explain` makes one call and reports how it ran. For `slope` it has the recorded program too.
# These are the first of its operators:

# %%
report = explain(slope)(trained, images[:64], digits[:64])
operators = [line for line in report.program.splitlines() if " = " in line]
print(*report.ways, report.replay, sep="\n")
print(*(" ".join(line.split()) for line in operators[:10]), sep="\n")
print(f"and {len(operators) - 10} more")

# %% [markdown]
# The program is the forward pass and the backward pass for the whole batch. No Python of the model
# is left in it, and no trace of `vmap` or `grad`.
#
# ## What is not replayed
#
# A function that does something besides its result has to run each time. Here is one that writes a
# line into a list. The report says what stands in the way:

# %%
seen = []


def counted_loss(parameters, images, digits):
    seen.append(len(images))
    return mean_loss(parameters, images, digits)


counted = grad(counted_loss)
for _ in range(60):
    counted(trained, images[:64], digits[:64])
print(explain(counted)(trained, images[:64], digits[:64]))
print(len(seen))

# %% [markdown]
# The list has an entry for each call, as it should.
#
# ## Asking for it: `jit`
#
# `jit` records at the first call, and takes your word that the function is pure. It keeps a program
# for each kind of arguments. Another size of the batch is another kind:


# %%
def saliency(image, digit):
    return grad(loss, argnums=1)(trained, image, digit).norm(dim=1)


row_saliency = jit(vmap(saliency))
for size in (64, 64, 64, 32, 64):
    row_saliency(images[:size], digits[:size])
    print(size, row_saliency.cache_info())

# %% [markdown]
# A function of one example is enough for all kinds of derivatives. Here is how the attention of an
# image changes with its pixels, and the curvature of the loss in the ten logits:


# %%
def attend(image):
    return functional_call(model, trained, (image,))[1]


score_slopes = vmap(jacrev(attend))(images[:4])
curvature = vmap(hessian(F.cross_entropy))(logits[:4], digits[:4])
print(score_slopes.shape, curvature.shape)

# %% [markdown]
# ## Turning it off
#
# `forall.config.replay = False` turns the automatic replay off. The results are the same. It is
# also a way to see what replay saves:

# %%
forall.config.replay = False
plain, milliseconds_off = train(parameters, STEPS // 4)
forall.config.replay = True
replayed, _ = train(parameters, STEPS // 4)
difference = max((plain[name] - replayed[name]).abs().max() for name in plain)
print(f"median call without replay {sorted(milliseconds_off)[STEPS // 8]:.2f} ms")
print(f"largest difference of the parameters: {difference:.1e}")

# %% [markdown]
# ## The result

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.6))
left.semilogy(milliseconds_off, ".", markersize=3, color="gray", label="replay off")
left.semilogy(milliseconds[: STEPS // 4], ".", markersize=3, label="replay on")
left.set(xlabel="call", ylabel="time of the call, ms", title="one gradient of 64 images")
left.legend()
by_digit = torch.stack([scores[digits == d].mean((0, 1)) for d in range(10)])
picture = right.imshow(by_digit.numpy(), cmap="magma", aspect="auto")
right.set(xlabel="row of the image", ylabel="digit", title="mean attention")
right.set_yticks(range(10))
figure.colorbar(picture, ax=right)
figure.tight_layout()
plt.show()

# %% [markdown]
# What to take along: time a call only after the first ones. The first call of a function runs as it
# is, one of the next ones records, and the later ones tell how fast it is. If they are not fast,
# `explain` says why.
#
# The checks: a function that is not pure was run for each call, the kinds of arguments were counted
# as told, and training with replay and without it gives the same parameters.

# %%
info = row_saliency.cache_info()
assert len(seen) == 61
assert (info.hits, info.misses) == (3, 2)
assert curvature.sum(-1).abs().max() < 1e-5  # logits may be shifted
assert difference < 1e-3
assert report.result.keys() == parameters.keys()
