# %% [markdown]
# # Square roots
#
# Newton's method, written for one number and mapped over many with a loop that stops for each.
#
# Formula $x' = \frac{1}{2}(x + a/x)$ in the text, and

# %%
import matplotlib.pyplot as plt
import torch

from forall import vmap

STEPS = 100  # fast: 10


def root(a):
    x = a
    while (x * x - a).abs() > 1e-4:
        x = (x + a / x) / 2
    return x


xs = torch.linspace(0.1, 9, STEPS)
print(vmap(root)(xs)[:3])
plt.plot(xs, vmap(root)(xs))
plt.show()
