# %% [markdown]
# # Search a tree by recursion
#
# The nearest neighbor of a point, found in a k-d tree by a function that calls itself and skips
# what cannot help. It is written for one query and mapped over many.
#
# Each query takes its own way through the tree: left or right, and back up for a second look or
# not. `torch.func.vmap` refuses the first `if` on a query's values.

# %%
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from forall import explain, grad, vmap

plt.rcParams["figure.dpi"] = 144

# %% [markdown]
# ## The data
#
# Handwritten digits, each reduced to three numbers by a principal component analysis. Most are in
# the tree. The others are queries, and take the label of their nearest neighbor.

# %%
QUERIES = 300  # fast: 60
images, digits = load_digits(return_X_y=True)
points = torch.tensor(PCA(3, random_state=0).fit_transform(images))
digits = torch.tensor(digits)
order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
stored, queries = order[:-QUERIES], order[-QUERIES:]

# %% [markdown]
# ## The tree
#
# A k-d tree halves the points by one coordinate, then each half by another, until few are left.
# Building it is ordinary Python, done once. The nodes are Python objects.


# %%
class Leaf(NamedTuple):
    points: torch.Tensor
    labels: torch.Tensor


class Split(NamedTuple):
    dim: int
    at: float
    below: "Leaf | Split"
    above: "Leaf | Split"


def build(points, labels, leaf_size=64):
    if len(points) <= leaf_size:
        return Leaf(points, labels)
    dim = int(points.var(0).argmax())
    rank = points[:, dim].argsort()
    half = len(rank) // 2
    at = float(points[rank[half], dim])
    below, above = rank[:half], rank[half:]
    return Split(
        dim,
        at,
        build(points[below], labels[below], leaf_size),
        build(points[above], labels[above], leaf_size),
    )


tree = build(points[stored], digits[stored])

# %% [markdown]
# ## The search, for one query
#
# Go to the side on which the query lies. The other side matters only if the border is nearer than
# the best point so far. `best` is a squared distance, `label` the digit of that point, and `visits`
# counts the leaves.


# %%
def search(query, node, best, label, visits):
    if isinstance(node, Leaf):
        squared = (node.points - query).square().sum(-1)
        nearest = squared.argmin()
        if squared[nearest] < best:
            best, label = squared[nearest], node.labels[nearest]
        return best, label, visits + 1
    gap = query[node.dim] - node.at
    if gap < 0:
        best, label, visits = search(query, node.below, best, label, visits)
        if gap * gap < best:
            best, label, visits = search(query, node.above, best, label, visits)
    else:
        best, label, visits = search(query, node.above, best, label, visits)
        if gap * gap < best:
            best, label, visits = search(query, node.below, best, label, visits)
    return best, label, visits


def find(query):
    infinite = torch.tensor(float("inf"), dtype=query.dtype)
    return search(query, tree, infinite, torch.tensor(-1), 0)


print(find(points[queries[0]]))

# %% [markdown]
# ## All queries
#
# This is the line that maps it:

# %%
squared, labels, visits = vmap(find)(points[queries])
print(labels[:10], digits[queries[:10]])
print(f"leaves visited: {visits.min()} to {visits.max()}, mean {visits.double().mean():.1f}")

# %% [markdown]
# The recursion runs once, for all queries. At each node the queries that want to go below part from
# those that want to go above, and meet again afterwards. A leaf is compared with the queries that
# visit it, and no others. `explain` shows where queries diverged, and into how many on each side:

# %%
report = explain(vmap(find))(points[queries[:40]])
for divergence in report.divergences[:12]:
    print(f"{divergence.place.text():20}", divergence.sizes)

# %% [markdown]
# ## Derivatives
#
# The search has a derivative: that of the distance to the point which it found. So a query can be
# moved away from its neighbor, or towards it, through all the branches of the tree. The gradient of
# a distance has the length 1.

# %%
away = vmap(grad(lambda query: find(query)[0].sqrt()))(points[queries[:20]])
print(away[0], away.norm(dim=1).min(), away.norm(dim=1).max())

# %% [markdown]
# ## The result

# %%
plane = PCA(2, random_state=0).fit_transform(images)
plane_tree = build(torch.tensor(plane)[stored], digits[stored], leaf_size=32)


def count_leaves(query):
    infinite = torch.tensor(float("inf"), dtype=query.dtype)
    return search(query, plane_tree, infinite, torch.tensor(-1), 0)[2]


SIDE = 24  # fast: 8
low, high = plane.min(0), plane.max(0)
grid = torch.cartesian_prod(
    torch.linspace(low[0], high[0], SIDE, dtype=torch.float64),
    torch.linspace(low[1], high[1], SIDE, dtype=torch.float64),
)
counts = vmap(count_leaves)(grid).reshape(SIDE, SIDE)

figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.8))
left.hist(visits.numpy(), bins=range(1, int(visits.max()) + 2), align="left")
left.set(xlabel="leaves that a query visits", ylabel="queries", title="three coordinates")
first, second = grid.reshape(SIDE, SIDE, 2).unbind(2)
picture = right.pcolormesh(first.numpy(), second.numpy(), counts.numpy(), cmap="viridis")
right.scatter(*plane[stored].T, s=1, color="white")
right.set(
    xlabel="first coordinate",
    ylabel="second coordinate",
    title="leaves visited from a place",
)
figure.colorbar(picture, ax=right)
figure.tight_layout()
plt.show()

# %% [markdown]
# In the middle of a cell of the tree one leaf is enough. Near a border, and outside of the data,
# the search has to look at several.
#
# What this costs: each node that any query visits runs a few small operators, and diverging costs
# time too. For so small a set of points, the full table of distances below is faster: one large
# operator beats many small ones. A tree pays where the table does not fit, or where a visit is
# expensive. The point is that the function needs no rewriting.
#
# The check: the table of all distances knows the right answer.

# %%
table = torch.cdist(points[queries], points[stored])
nearest = table.argmin(1)
error = (squared.sqrt() - table.min(1).values).abs().max()
print(f"largest error of a distance: {error:.1e}")
print(f"digits told right: {(labels == digits[queries]).double().mean():.0%}")
assert error < 1e-5
assert (labels == digits[stored][nearest]).all()
assert torch.allclose(away.norm(dim=1), torch.ones(20, dtype=torch.float64))
