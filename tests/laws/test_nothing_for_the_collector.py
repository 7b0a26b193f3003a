"""A call leaves nothing that only the garbage collector would free: what it computed goes at once.

A ring of objects keeps all that they hold until the collector comes by, which may be much later.
"""

import gc

import pytest
import torch
from torch import nn

import forall
from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from forall._jit.tracing.coverage import ObservedCoverage

D = torch.float64
X = torch.linspace(0.1, 1, 12, dtype=D).reshape(3, 4)
W = torch.linspace(-1, 1, 16, dtype=D).reshape(4, 4)


def plain(x):
    return (W @ x).tanh()


def with_lists(x):
    a, b = torch.split(torch.cat([x, x.sin()]), 4)
    return torch.stack([a, b * 2]).sum(0)


def by_a_loop(x):
    return torch.linalg.lstsq(W + torch.diag(x), x[:, None]).solution[:, 0]


def indexed(x):
    out = torch.zeros_like(x)
    out[1:] = x[:-1] * 2
    return out.index_add(0, torch.tensor([0, 1]), x[:2])


def branching(x):
    return x.exp() if x.sum() > 2 else x.cos()


def looping(x):
    while x.sum() < 4:
        x = x * 1.5
    return x


def chosen(x):
    return forall.switch((x.sum() * 2).long(), [torch.sin, torch.cos, torch.exp], x)


def scanned(x):
    return forall.scan(lambda c, v: (c * v + 1, c.sin()), x.sum(), x)[1]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004 - the name is torch's
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g

    @staticmethod
    def jvp(ctx, t):
        return 3 * ctx.saved_tensors[0] ** 2 * t


def custom(x):
    return Cubed.apply(x)


FUNCTIONS = [
    plain, with_lists, by_a_loop, indexed, branching, looping, chosen, scanned, custom
]  # fmt: skip
WAYS = {
    "vmap": lambda f: vmap(f)(X),
    "vmap of vmap": lambda f: vmap(vmap(f))(X.expand(2, 3, 4)),
    "grad": lambda f: grad(lambda x: f(x).sum())(X[0]),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(X),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum())(X),
    "vjp": lambda f: vjp(f, X[0])[1](X[1]),
    "jvp": lambda f: jvp(f, (X[0],), (X[1],)),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x,)))(X),
    "linearize": lambda f: linearize(f, X[0])[1](X[1]),
    "linearize of vmap": lambda f: linearize(vmap(f), X)[1](X),
    "jacrev": lambda f: jacrev(f)(X[0]),
    "jacfwd": lambda f: jacfwd(f)(X[0]),
    "hessian": lambda f: vmap(hessian(lambda x: f(x).sum()))(X),
    "laplacian": lambda f: forall.laplacian(lambda x: f(x).sum())(X[0]),
    "autograd inside": lambda f: vmap(inside)(X),
    "recorded outside": lambda f: outside(f),
}


def inside(x):
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y.sin() * x).sum(), y)[0]


def outside(f):
    x = X.clone().requires_grad_()
    vmap(f)(x).sum().backward()


def left_by(call):
    """What the collector finds of ours, and of tensors, after calls like those before."""
    was, forall.config.replay = forall.config.replay, False
    try:
        found: list = []
        for _ in range(5):  # in the first ones tables are filled, and what was in them goes
            found = new_garbage(call)
            if not found:
                break
        return found
    finally:
        forall.config.replay = was


def new_garbage(call):
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [x for x in gc.garbage if isinstance(x, torch.Tensor) or is_ours(x)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def is_ours(x):
    """Torch's own trees leave some functions, which hold nothing."""
    homes = (getattr(x, "__module__", None), type(x).__module__)
    return any(isinstance(home, str) and home.partition(".")[0] == "forall" for home in homes)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_transforms(f, way):
    assert left_by(lambda: WAYS[way](f)) == []


def test_layers_that_join_the_batch():
    lstm = nn.LSTM(4, 3)
    sequences = torch.randn(5, 6, 2, 4)

    def packed(x):
        rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4]))
        return lstm(rows)[0].data

    assert left_by(lambda: vmap(packed)(sequences)) == []


def test_norms():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(D)
    params = {k: p.detach() for k, p in net.named_parameters()}

    def loss(p, x):
        return forall.functional_call(net, p, (x,)).square().sum()

    norms = forall.per_example_grad_norm(loss, in_dims=(None, 0))
    assert left_by(lambda: norms(params, X)) == []


def test_calls_that_are_watched():
    def call():
        with ObservedCoverage().observe_calls():
            vmap(grad(lambda x: plain(x).sum()))(X)

    assert left_by(call) == []
