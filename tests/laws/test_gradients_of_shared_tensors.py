"""What a tensor that all examples share gets from a backward pass: the sum of the loop's gradients.

The sum is made without a tensor of its shape for each example, see `_vmap.lazy_grad`; all cases
are small, so the bound from which on it is worth it is taken away.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, vmap
from forall._vmap.lazy_grad import sources
from oracle import same

D = torch.float64
N = 3


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    monkeypatch.setattr(sources, "WORTH", 1)


def given(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=make_generator(seed))


W, X = given(7, 5, seed=1), given(N, 5, seed=2)
AT = torch.tensor([[0, 6, 2, 2], [1, 1, 1, 3], [5, 0, 4, 6]])
BAGS = torch.tensor([0, 3])
MASK = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=D)
PERMUTED = torch.tensor([3, 0, 6, 1, 5, 4, 2])
EYE = torch.eye(5, dtype=D)
THETA = given(48, seed=3)


class Tanhs(torch.autograd.Function):
    """A function of the user's with a backward pass of the user's."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return w @ x

    @staticmethod
    def backward(ctx, g):
        w, x = ctx.saved_tensors
        return torch.outer(g, x), w.T @ g


def packed(t, x, i):
    """A network whose parameters lie in one vector."""
    a, b, c = t[:20].view(4, 5), t[20:24], t[24:44].view(5, 4)
    return c @ (a @ x + b).tanh() + t[44:].sum()


def hooked(w, x, i):
    y = w @ x
    y.register_hook(lambda g: 2 * g)
    v = w * 1
    v.register_hook(lambda g: g.clone().mul_(3))
    return y + v @ x


def layer(w, x, i):
    return F.layer_norm(F.linear(x, w), (7,), w[:, 0], w[:, 1])


def attention(w, x, i):
    x = x.expand(4, 5) * torch.arange(4, dtype=D)[:, None].sin()
    q, k, v = F.linear(x, torch.cat([w, w, w[:1]])).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v).sum(0)


def image(x):
    return (x * x)[None, None]


def channels(x):
    return (x[:4, None] * x)[None]


def filters(w, *shape):
    return w.view(35)[: torch.Size(shape).numel()].view(shape)


CASES = {
    "linear": lambda w, x, i: F.linear(x, w).tanh(),
    "of rows": lambda w, x, i: F.linear(x.expand(4, 5) * i[:, None], w).tanh().sum(0),
    "of batches": lambda w, x, i: F.linear(x.expand(2, 4, 5) * i[:, None], w).cos(),
    "its transpose": lambda w, x, i: (w.T @ (w @ x).sin()).sin(),
    "twice": lambda w, x, i: (w @ x).sin() * (w @ x.cos()),
    "mv": lambda w, x, i: w.mv(x).exp(),
    "bmm": lambda w, x, i: torch.bmm(w.view(1, 7, 5).expand(2, 7, 5), x.expand(2, 5)[..., None]),
    "of its own batch": lambda w, x, i: torch.bmm(w[:6].view(2, 3, 5), x.expand(2, 5)[..., None]),
    "einsum": lambda w, x, i: torch.einsum("ij,j,k->ik", w, x, x[:2]).sin(),
    "outer": lambda w, x, i: (w * torch.outer(x[:1].expand(7).cos(), x)).sin(),
    "row": lambda w, x, i: w[2] * x,
    "rows": lambda w, x, i: w[2:6:2] @ x,
    "column": lambda w, x, i: w[:, -1] * x.sum(),
    "chunks": lambda w, x, i: w.chunk(2)[0] @ x - w.chunk(2)[1].sum() * x[:4],
    "parts": lambda w, x, i: torch.stack([p @ x for p in w.split([2, 2, 3])[:2]]),
    "unbound": lambda w, x, i: w.unbind()[3] * x,
    "diagonal": lambda w, x, i: w.diagonal() * x,
    "triangle": lambda w, x, i: (w[:5].tril() + w[2:].triu(1)) @ x,
    "padded": lambda w, x, i: F.pad(w, (-1, 0, 0, 2)) @ x[1:],
    "negated": lambda w, x, i: (-w / 3 * 2 - w.T.flip(0).T) @ x,
    "times a number": lambda w, x, i: (w * w.sum()) @ x,
    "normed": lambda w, x, i: (w / w.norm(dim=1, keepdim=True)) @ x,
    "low rank": lambda w, x, i: (w + w[:, :2] @ w[:2] * 0.1) @ x,
    "decayed": lambda w, x, i: (w @ x).sum() + (w * w).sum() * x[0],
    "decayed by each": lambda w, x, i: w @ x + (w * x).square().sum(1),
    "cast": lambda w, x, i: w.float().double() @ x,
    "places": lambda w, x, i: w[i].sin() @ x,
    "one place": lambda w, x, i: w[i[0]] * x,
    "one entry": lambda w, x, i: w[i[0], i[1].clamp(max=4)].sin(),
    "entries": lambda w, x, i: w[i, i.clamp(max=4)] * x[0],
    "columns": lambda w, x, i: w[:, i.clamp(max=4)] * x[0],
    "apart": lambda w, x, i: w.view(7, 1, 5)[i, :, i.clamp(max=4)] * x[0],
    "places of all": lambda w, x, i: w[torch.tensor([1, 1, 4])] @ x,
    "both": lambda w, x, i: w[i, torch.tensor([1])] * x[:4],
    "by a mask": lambda w, x, i: w[torch.arange(7) > 3] @ x,
    "picked": lambda w, x, i: w.index_select(0, i) @ x,
    "picked columns": lambda w, x, i: w.index_select(-1, i.clamp(max=4)) * x[0],
    "gathered": lambda w, x, i: w.gather(0, i[:, None].expand(4, 5)) @ x,
    "along rows": lambda w, x, i: w.take_along_dim(i.clamp(max=4)[None], 1) * x[:4],
    "taken": lambda w, x, i: w.take(i).sin() * x[0],
    "embedded": lambda w, x, i: F.embedding(i, w).sin() @ x,
    "with a padding": lambda w, x, i: F.embedding(i, w, padding_idx=2) @ x,
    "by frequency": lambda w, x, i: F.embedding(i, w, scale_grad_by_freq=True) @ x,
    # Weights that are computed, of what all share.
    "weight norm": lambda w, x, i: F.linear(x, torch._weight_norm(w, w[:, :1], 0)),
    "of a softmax": lambda w, x, i: F.linear(x, w.softmax(0)),
    "of a log_softmax": lambda w, x, i: F.linear(x, w.log_softmax(1)),
    "masked": lambda w, x, i: F.linear(x, w * MASK),
    "filled": lambda w, x, i: F.linear(x, w.masked_fill(MASK > 0, 0.3)),
    "chosen": lambda w, x, i: F.linear(x, torch.where(MASK > 0, w, w.sin())),
    "positive": lambda w, x, i: F.linear(x, F.softplus(w)) + F.linear(x, w.exp()),
    "gated": lambda w, x, i: F.linear(x, F.gelu(w) + F.silu(w) + F.elu(w) + F.leaky_relu(w)),
    "clamped": lambda w, x, i: F.linear(x, w.clamp(-0.5, 0.5)),
    "of unit length": lambda w, x, i: F.linear(x, F.normalize(w)),
    "standardised": lambda w, x, i: F.linear(x, F.layer_norm(w, (5,), x.new_ones(5))),
    "of groups": lambda w, x, i: F.linear(x, F.group_norm(w, 1)),
    "cumulated": lambda w, x, i: F.linear(x, w.cumsum(0)),
    "permuted": lambda w, x, i: F.linear(x, w[PERMUTED]) + F.linear(x, w.roll(1, 0)),
    "gathered from": lambda w, x, i: F.linear(x, w.gather(0, PERMUTED[:, None].expand(7, 5))),
    "in chunks": lambda w, x, i: sum(c.sin().sum(0) @ x for c in w.chunk(3)) * x,
    "taken apart": lambda w, x, i: torch.stack([r.cos() @ x for r in w.unbind()]),
    "repeated": lambda w, x, i: F.linear(x, w.repeat(2, 1).sin()),
    "orthogonal": lambda w, x, i: F.linear(x, torch.linalg.qr(w).Q),
    "an exponential": lambda w, x, i: torch.matrix_exp(w[:5] / 9) @ x,
    "solved": lambda w, x, i: torch.linalg.solve(w[:5] + 9 * EYE, x),
    "of triangles": lambda w, x, i: torch.linalg.solve_triangular(
        w[:5].tril() + 9 * EYE, x[:, None], upper=False
    ),
    "pooled": lambda w, x, i: F.linear(x[:3], F.avg_pool1d(w, 3, 1)),
    "of a transform": lambda w, x, i: F.linear(x, torch.fft.rfft(w, dim=0).abs()),
    "in bags": lambda w, x, i: F.embedding_bag(i[None], w, mode="sum") * x,
    "means of bags": lambda w, x, i: F.embedding_bag(i, w, BAGS, mode="mean").sin() * x,
    "largest of bags": lambda w, x, i: F.embedding_bag(i, w, BAGS, mode="max").sin() * x,
    "bags with a padding": lambda w, x, i: (
        F.embedding_bag(i, w, BAGS, mode="mean", padding_idx=2).sin() * x
    ),
    "bags to the last": lambda w, x, i: (
        F.embedding_bag(i, w, torch.tensor([0, 1, 4]), mode="sum", include_last_offset=True).sin()
        * x
    ),
    "weighted bags": lambda w, x, i: F.embedding_bag(
        i, w, BAGS, mode="sum", per_sample_weights=x[:4]
    ).sin(),
    "tied": lambda w, x, i: F.linear(F.embedding(i, w).sin(), w).sum(0),
    "of all": lambda w, x, i: (w.sin().cos() * 2).sum() * x,
    "a user's": lambda w, x, i: Tanhs.apply(w, x).sin(),
    "hooks": hooked,
    "a layer": layer,
    "a layer of rows": lambda w, x, i: F.layer_norm(w[i] * x, (5,), w[0], w[1]).sin(),
    "squares": lambda w, x, i: F.rms_norm(w[i] * x, (5,), w[0]).sin(),
    "groups": lambda w, x, i: F.group_norm((w[:4] * x)[None], 2, w[:4, 0], w[:4, 1]).sin(),
    "batches": lambda w, x, i: F.batch_norm(w[i] * x, None, None, w[0], None, True).sin(),
    "batches alone": lambda w, x, i: F.batch_norm(w[i] * x, None, None, None, None, True).sin(),
    "groups alone": lambda w, x, i: F.instance_norm((w[:4] * x)[None], None, None, w[:4, 0]).sin(),
    "attention": attention,
    "conv": lambda w, x, i: F.conv1d((x[:, None] * x)[None], w.view(7, 5, 1)).sin(),
    "conv, wide": lambda w, x, i: F.conv1d(image(x), w[:, None, :2], stride=2, padding=1).cos(),
    "conv, groups": lambda w, x, i: F.conv1d(channels(x), w[:4, None, :2], groups=4).cos(),
    "conv, two images": lambda w, x, i: F.conv1d(
        channels(x).view(2, 2, 5), filters(w, 4, 2, 3), dilation=2, padding=2
    ).cos(),
    "conv, transposed": lambda w, x, i: F.conv_transpose1d(
        channels(x), filters(w, 4, 3, 2), stride=2
    ).cos(),
    "conv2d": lambda w, x, i: F.conv2d(
        (x[:, None] * x)[None, None], filters(w, 3, 1, 3, 3), w[0, :3]
    ).cos(),
}


def loss(f, w, xs, indices, each):
    return sum(c * y.sum() for c, y in zip((1, -2, 0.5), each(f, w, xs, indices), strict=True))


def at_once(f, w, xs, indices):
    return vmap(f, in_dims=(None, 0, 0))(w, xs, indices)


def one_by_one(f, w, xs, indices):
    return [f(w, x, i) for x, i in zip(xs, indices, strict=True)]


def by_slopes(f, w, xs, indices):
    """A gradient penalty: what each example makes is a gradient itself."""
    return vmap(grad(lambda x, i: f(w, x, i).sum()))(xs, indices)


def slopes_one_by_one(f, w, xs, indices):
    found = []
    for x, i in zip(xs, indices, strict=True):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(w, x, i).sum(), x, create_graph=True, materialize_grads=True)
        found.append(g)
    return found


NAMES = [*CASES, "packed"]


def case(name):
    return (packed, THETA) if name == "packed" else (CASES[name], W)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ours", "loops"), [(at_once, one_by_one), (by_slopes, slopes_one_by_one)])
def test_the_gradient_is_the_sum(name, ours, loops):
    if name == "weighted bags" and ours is by_slopes:
        pytest.skip("torch has no second derivative of it")
    f, w = case(name)
    found, wanted = (
        torch.autograd.grad(
            loss(f, v, X, AT, each) + v.sum(), v, allow_unused=True, materialize_grads=True
        )
        for each in (ours, loops)
        for v in [w.clone().requires_grad_()]
    )
    assert same(found[0], wanted[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative(name):
    if name == "by frequency" or (name.count("bags") and name != "in bags"):
        pytest.skip("torch has no second derivative of it")
    f, w = case(name)

    def twice(each):
        v = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(f, v, X, AT, each), v, create_graph=True)
        if not g.requires_grad:
            return g, g
        return g, torch.autograd.grad((g * g.detach().sin()).sum(), v, allow_unused=True)[0]

    for found, wanted in zip(twice(at_once), twice(one_by_one), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or same(found, wanted)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "derived",
    [
        grad,
        jacrev,
        lambda g: hessian(g),
        lambda g: jacfwd(grad(g)),
        lambda g: lambda v: jvp(grad(g), (v,), (v.cos(),))[1],
        lambda g: lambda v: vmap(grad(g))(torch.stack([v, v.sin()])),
        lambda g: lambda v: vmap(lambda s: jacrev(lambda u: g(u) * s)(v))(v[:2].reshape(-1)[:2]),
    ],
    ids=["grad", "jacrev", "hessian", "forward over reverse", "hvp", "vmap of grad", "of jacrev"],
)
def test_under_transforms(name, derived):
    if name in ("hooks", "by frequency"):
        pytest.skip("a hook, or an operator, that torch has no second derivative of")
    f, w = case(name)
    found = derived(lambda v: loss(f, v, X, AT, at_once))(w)
    wanted = derived(lambda v: loss(f, v, X, AT, one_by_one))(w)
    assert same(found, wanted)


@pytest.mark.parametrize("name", ["linear", "places", "tied", "conv, two images", "packed"])
def test_a_jacobian_of_all_examples(name):
    f, w = case(name)
    found = jacrev(lambda v: at_once(f, v, X, AT))(w)
    assert same(found, jacrev(lambda v: torch.stack(one_by_one(f, v, X, AT)))(w))


@pytest.mark.parametrize("name", ["linear", "of rows", "places", "tied", "conv2d", "packed"])
def test_through_two_calls(name):
    """Shared by both, and one inside the other."""
    f, w = case(name)
    scales = given(4, seed=5)

    def both(v):
        def one(c):
            return c * vmap(lambda x, i: f(v, x * c, i))(X, AT)

        return vmap(one)(scales).sin().sum()

    def loops(v):
        ys = [c * f(v, x * c, i) for c in scales for x, i in zip(X, AT, strict=True)]
        return torch.stack(ys).sin().sum()

    assert same(grad(both)(w), grad(loops)(w))
    found = vmap(grad(both))(torch.stack([w, w.cos()]))
    assert same(found, torch.stack([grad(loops)(w), grad(loops)(w.cos())]))


def test_an_optimiser_of_a_module():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).to(D) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, all_of in zip(
        nets, (vmap, lambda f: lambda xs: torch.stack([*map(f, xs)])), strict=True
    ):
        steps = torch.optim.Adam(net.parameters(), 0.1)
        for _ in range(4):
            steps.zero_grad()
            all_of(net)(X).square().mean().backward()
            steps.step()
    for a, b in zip(*(n.parameters() for n in nets), strict=True):
        torch.testing.assert_close(a, b)


def _largest(f):
    with torch.profiler.profile(record_shapes=True) as seen:
        f()
    return max(
        torch.Size(shape).numel()
        for event in seen.events() or ()
        for shape in event.input_shapes
        if shape and all(isinstance(n, int) for n in shape)
    )


@pytest.mark.parametrize(
    ("f", "w"),
    [
        (lambda w, x, i: F.linear(x, w).tanh(), (60, 5)),
        (lambda w, x, i: (w.T @ x).tanh(), (5, 60)),
        (lambda w, x, i: F.embedding(i, w), (60, 5)),
        (lambda w, x, i: F.embedding_bag(i, w, BAGS), (60, 5)),
        (lambda w, x, i: w[i] @ x, (60, 5)),
        (lambda w, x, i: w.index_select(0, i), (60, 5)),
        (lambda w, x, i: w[:7] @ x, (60, 5)),
        (lambda w, x, i: w[3] * x, (60, 5)),
        (lambda w, x, i: w[:20].view(4, 5) @ x, (300,)),
        (lambda w, x, i: (w + 1) @ x, (60, 5)),
    ],
)
def test_no_tensor_of_its_shape_for_each_example(f, w, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", False)
    w = given(*w).requires_grad_()
    y = vmap(f, in_dims=(None, 0, 0))(w, X, AT)
    assert _largest(lambda: y.sum().backward()) < 3 * w.numel()


DERIVED = {
    "value": lambda u: u,
    "grad": grad,
    "hessian": hessian,
    "jvp of grad": lambda u: lambda z: jvp(grad(u), (z,), (z.cos(),))[1],
    "jacfwd twice": lambda u: jacfwd(jacfwd(u)),
    "jacrev twice": lambda u: jacrev(jacrev(u)),
    "jacrev of jacfwd": lambda u: jacrev(jacfwd(u)),
    "laplacian": forall.laplacian,
    "mapped inside": lambda u: lambda z: vmap(lambda c: u(c * z))(z),
}


@pytest.mark.parametrize("worth", [1, 1000])
@pytest.mark.parametrize("derived", DERIVED)
def test_the_weights_of_a_network_whose_derivatives_are_taken_inside(derived, worth, monkeypatch):
    """Physics-informed nets, learned energies: the sum, without a matrix for each point."""
    monkeypatch.setattr(forall.config, "replay", False)
    monkeypatch.setattr(sources, "WORTH", worth)
    n, width = 12, 20
    shapes = (width, 2), (width,), (width, width), (width,), (1, width)
    weights = [given(*shape, seed=i) for i, shape in enumerate(shapes)]
    points = given(n, 2, seed=7)

    def u(w, z):
        hidden = torch.tanh(F.linear(z, w[0], w[1]))
        return (w[4] @ torch.tanh(F.linear(hidden, w[2], w[3]))).squeeze()

    def of_one(w, z):
        return DERIVED[derived](lambda z: u(w, z))(z).flatten()[0] ** 2

    def at_once(w):
        return vmap(of_one, (None, 0))(w, points).mean()

    def loop(w):
        return torch.stack([of_one(w, z) for z in points]).mean()

    assert same(grad(at_once)(weights), grad(loop)(weights))
    assert _largest(lambda: grad(at_once)(weights)) < n * width * width


def test_a_gradient_that_is_written_into_while_it_is_needed():
    kept = []

    def f(x):
        v = w * 1
        x = x * 1
        y = v @ x
        y.register_hook(lambda g: kept.append(g * 1) or kept[-1])
        x.register_hook(lambda g: g * kept[-1].mul_(2).sum())
        return y

    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    y = vmap(f)(x).sin()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), [x, w])


def steps(w, x, i):
    """Each step uses the parameter, as it is and as it was made by those before."""
    h, v = x, w
    for t in range(300):
        h = torch.tanh(w[:5] @ h + v[t % 7])
        v = v * 0.9 + w * 0.1
    return h


def rows_of_its_own(w, x, i):
    """The gradient of an argument of its own, in as many parts."""
    xs = x.expand(300, 5) * torch.arange(300, dtype=D)[:, None].cos()
    return sum(xs[t] * w[t % 7] for t in range(300))


@pytest.mark.parametrize("f", [steps, rows_of_its_own])
def test_many_steps(f):
    found, wanted = (
        torch.autograd.grad(loss(f, v, X, AT, each), v)[0]
        for each in (at_once, one_by_one)
        for v in [W.clone().requires_grad_()]
    )
    assert same(found, wanted)


@pytest.mark.parametrize("name", ["linear", "decayed by each"])
def test_an_argument_written_into_before_a_second_pass(name):
    w, xs = W.clone().requires_grad_(), X.clone()
    (g,) = torch.autograd.grad(loss(CASES[name], w, xs, AT, at_once), w, create_graph=True)
    assert g.requires_grad
    xs.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(g.square().sum(), w)


def test_an_argument_written_into_that_a_second_pass_does_not_need():
    def second(each):
        w, xs = W.clone().requires_grad_(), X.clone()
        (g,) = torch.autograd.grad(loss(CASES["low rank"], w, xs, AT, each), w, create_graph=True)
        xs.mul_(2)
        return torch.autograd.grad(g.sin().sum(), w)[0]

    assert same(second(at_once), second(one_by_one))
