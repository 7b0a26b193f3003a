"""Programs of collectives, run by named axes or written out on the stack of all examples.

A program is a function of (c, x), where ``c`` has the collectives. `Named` are forall's. `Explicit`
takes the examples of all axes at once, as leading dims, and knows nothing of vmap.
"""

import torch

import forall

Tensor = torch.Tensor


class Named:
    """The collectives of forall, in a function of one example."""

    psum = staticmethod(forall.psum)
    pmean = staticmethod(forall.pmean)
    pmax = staticmethod(forall.pmax)
    pmin = staticmethod(forall.pmin)
    all_gather = staticmethod(forall.all_gather)
    psum_scatter = staticmethod(forall.psum_scatter)
    all_to_all = staticmethod(forall.all_to_all)
    ppermute = staticmethod(forall.ppermute)
    axis_size = staticmethod(forall.axis_size)

    @staticmethod
    def index(name, _x):
        """Return the number of the example, to be broadcast with ``x``."""
        return forall.axis_index(name)

    @staticmethod
    def dims(x):
        return x.dim()

    @staticmethod
    def choose(x, one, other):
        """Return ``one`` for an example of which the sum is positive: examples diverge here."""
        if x.sum() > 0:
            return one.sin()
        return other


class Explicit:
    """The same on stacks: the examples of axis i are dim i, those of an example come after."""

    def __init__(self, **sizes):
        self.sizes = sizes
        self.names = [*sizes]

    def dims(self, x):
        return x.dim() - len(self.names)

    def choose(self, x, one, other):
        dims = [*range(len(self.names), x.dim())]
        return torch.where(x.sum(dims, keepdim=True) > 0, one.sin(), other)

    def axis_size(self, names):
        names = names if isinstance(names, tuple) else (names,)
        return torch.tensor([self.sizes[n] for n in names]).prod().item()

    def index(self, name, x):
        at = self.names.index(name)
        shape = [1] * x.dim()
        shape[at] = self.sizes[name]
        return torch.arange(self.sizes[name]).view(shape)

    def _reduce(self, call, x, names):
        for name in names if isinstance(names, tuple) else (names,):
            at = self.names.index(name)
            out = call(x, at)
            x = out.expand([*x.shape[:at], self.sizes[name], *x.shape[at + 1 :]])
        return x

    def psum(self, x, names):
        return self._reduce(lambda x, at: x.sum(at, keepdim=True), x, names)

    def pmean(self, x, names):
        return self._reduce(lambda x, at: x.mean(at, keepdim=True), x, names)

    def pmax(self, x, names):
        return self._reduce(lambda x, at: x.amax(at, keepdim=True), x, names)

    def pmin(self, x, names):
        return self._reduce(lambda x, at: x.amin(at, keepdim=True), x, names)

    def all_gather(self, x, name, dim=0, tiled=False):
        at, lead, n = self.names.index(name), len(self.names), self.sizes[name]
        rank = x.dim() - lead + (not tiled)
        place = dim % rank
        out = x.unsqueeze(lead + place).expand(
            [*x.shape[: lead + place], n, *x.shape[lead + place :]]
        )
        out = out.transpose(at, lead + place)  # example i, entry j: what example j has
        return out.flatten(lead + place, lead + place + 1) if tiled else out

    def _in_parts(self, x, name, dim, tiled):
        """Return x with its parts in the first dim behind the examples'."""
        lead, n = len(self.names), self.sizes[name]
        place = dim % (x.dim() - lead)
        if tiled:
            x = x.unflatten(lead + place, (n, -1))
        return x.movedim(lead + place, lead)

    def psum_scatter(self, x, name, scatter_dim=0, tiled=False):
        at, lead = self.names.index(name), len(self.names)
        parts = self._in_parts(x, name, scatter_dim, tiled).sum(at)  # (other examples, N, *S)
        return parts.movedim(lead - 1, at)

    def all_to_all(self, x, name, split_dim=0, concat_dim=0, tiled=False):
        at, lead = self.names.index(name), len(self.names)
        place = concat_dim % (x.dim() - lead)
        out = self._in_parts(x, name, split_dim, tiled).transpose(at, lead)
        out = out.movedim(lead, lead + place)
        return out.flatten(lead + place, lead + place + 1) if tiled else out

    def ppermute(self, x, name, perm):
        at = self.names.index(name)
        rows = list(torch.zeros_like(x).unbind(at))
        for source, target in perm:
            rows[target] = x.select(at, source)
        return torch.stack(rows, at)


# Programs of an x of shape (3, 3), with 3 examples along "i": results of any shape.
RING = [(0, 1), (1, 2), (2, 0)]
PROGRAMS = {
    "psum": lambda c, x: x * c.psum(x.sin(), "i"),
    "psum twice": lambda c, x: c.psum(c.psum(x, "i") * x, "i").cos(),
    "pmean": lambda c, x: (x - c.pmean(x, "i")) / (c.pmean(x * x, "i") + 1).sqrt(),
    "pmax": lambda c, x: (x - c.pmax(x, "i")).exp(),
    "pmin": lambda c, x: x * c.pmin(x * x, "i"),
    "softmax": lambda c, x: (x - c.pmax(x, "i")).exp() / c.psum((x - c.pmax(x, "i")).exp(), "i"),
    "all_gather": lambda c, x: (c.all_gather(x, "i").sin() * x.unsqueeze(-3)).sum(-3),
    "all_gather last": lambda c, x: c.all_gather(x * x, "i", dim=-1).cos(),
    "all_gather tiled": lambda c, x: c.all_gather(x.sin(), "i", dim=1, tiled=True),
    "psum_scatter": lambda c, x: c.psum_scatter(x * x, "i"),
    "psum_scatter dim": lambda c, x: c.psum_scatter(x.sin(), "i", scatter_dim=1),
    "psum_scatter tiled": lambda c, x: c.psum_scatter(x * x, "i", 1, tiled=True),
    "all_to_all": lambda c, x: c.all_to_all(x.sin(), "i") * x,
    "all_to_all dims": lambda c, x: c.all_to_all(x.sin(), "i", 1, 0) * x,
    "all_to_all tiled": lambda c, x: c.all_to_all(x * x, "i", 0, 1, tiled=True),
    "ppermute": lambda c, x: c.ppermute(x * x, "i", RING) - x,
    "ppermute some": lambda c, x: x + c.ppermute(x.sin(), "i", [(0, 2), (2, 1)]),
    "axis_index": lambda c, x: x.sin() * (c.index("i", x) + 1) / c.axis_size("i"),
    "attention": lambda c, x: (
        (x @ c.all_gather(x, "i", tiled=True).mT).softmax(-1) @ c.all_gather(x * x, "i", tiled=True)
    ),
}
EXAMPLES = torch.linspace(-1.0, 1.7, 27, dtype=torch.float64).view(3, 3, 3).sin()
