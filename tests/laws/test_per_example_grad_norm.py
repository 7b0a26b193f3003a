"""`per_example_grad_norm` equals the norms of the loop's gradients, and makes no large gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import forall
from forall import grad, jvp, per_example_grad_norm, vmap
from forall._vmap.lazy_grad import ghost_norm

D = torch.float64


class Tied(nn.Module):
    """A language model's: one matrix embeds and reads out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 24, padding_idx=2)
        self.mix, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, i):
        h = self.embed(i)
        for _ in range(2):
            h = self.norm(self.mix(h).relu_() + h)
        return F.linear(h, self.embed.weight)


class Autoencoder(nn.Module):
    """One matrix forth and, transposed, back."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(30, 40))

    def forward(self, x):
        return (x @ self.w).tanh() @ self.w.T + F.linear(x, self.w.T) @ self.w.T


class Decayed(nn.Module):
    """A matrix that is also used otherwise than as a factor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(14, 20)

    def forward(self, x):
        w = self.layer.weight
        return self.layer(x).sum() + (w * w).sum() * x[0] + F.linear(x, w.chunk(2)[0]).sum()


class Steps(nn.Module):
    """A gradient step of its own, inside."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(20, 14))

    def forward(self, x):
        inner = F.linear(x, self.w).sin().sum()
        (g,) = torch.autograd.grad(inner, self.w, create_graph=True)
        return F.linear(x, self.w - 0.1 * g)


class Slopes(nn.Module):
    """The derivative in the input, as networks for differential equations have it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(14, 20), nn.Tanh(), nn.Linear(20, 17), nn.Tanh())

    def forward(self, x):
        return grad(lambda x: self.net(x).sum())(x)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(14, 20), nn.Tanh(), nn.Linear(20, 17))

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class Of(nn.Module):
    """The same bare matrix, in a function."""

    def __init__(self, f, *shape):
        super().__init__()
        self.f, self.w = f, nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.f(x, self.w)


def images(*layers):
    return nn.Sequential(nn.Unflatten(0, (1, -1)), *layers)


def attention():
    return nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)


MODELS = {
    "vectors": (lambda: nn.Linear(14, 20), (14,)),
    "sequences": (lambda: nn.Linear(14, 20), (3, 14)),
    "long sequences": (lambda: nn.Linear(14, 20), (50, 14)),
    "more dims": (lambda: nn.Linear(14, 20, bias=False), (2, 2, 14)),
    "four layers": (
        lambda: nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(14, 14), nn.Tanh())]),
        (14,),
    ),
    "tied": (Tied, torch.tensor([[0, 2, 5, 5], [1, 1, 1, 1], [7, 2, 2, 39]])),
    "embedding, scaled": (
        lambda: nn.Embedding(40, 12, scale_grad_by_freq=True),
        torch.tensor([[0, 2, 5, 5], [1, 1, 1, 1], [7, 2, 2, 39]]),
    ),
    "autoencoder": (Autoencoder, (3, 30)),
    "decayed": (Decayed, (14,)),
    "steps": (Steps, (14,)),
    "slopes": (Slopes, (14,)),
    "recomputed": (Recomputed, (14,)),
    "attention": (attention, (3, 16)),
    "lstm": (lambda: nn.LSTM(8, 12), (3, 8)),
    "einsum": (lambda: Of(lambda x, w: torch.einsum("si,io->os", x, w), 14, 20), (2, 14)),
    "heads": (lambda: Of(lambda x, w: torch.einsum("si,hio->hso", x, w), 3, 14, 20), (2, 14)),
    "a dim of size one": (lambda: Of(lambda x, w: F.linear(x, w.squeeze(0)), 1, 20, 14), (14,)),
    "dims in another order": (
        lambda: Of(lambda x, w: x @ w.movedim(2, 0).reshape(14, 20), 4, 5, 14),
        (2, 14),
    ),
    "one of two": (lambda: Of(lambda x, w: x @ w[1], 2, 14, 20), (2, 14)),
    "a part": (lambda: Of(lambda x, w: x @ w[:, 3:17], 14, 20), (2, 14)),
    "one by one": (lambda: Of(lambda x, w: sum(x @ a for a in w), 3, 14, 20), (2, 14)),
    "matrix times vector": (lambda: Of(lambda x, w: w @ x, 20, 14), (14,)),
    "complex": (lambda: Of(lambda x, w: torch.view_as_real(x * w.exp() * 1j), 14), (14,)),
    "conv1d": (lambda: nn.Conv1d(12, 14, 3), (12, 6)),
    "conv2d": (lambda: nn.Conv2d(12, 14, 3), (12, 5, 4)),
    "conv2d, large": (lambda: nn.Conv2d(2, 3, 2), (2, 9, 9)),
    "conv2d, groups": (
        lambda: nn.Conv2d(24, 28, (3, 2), (2, 1), (1, 2), (2, 1), groups=2),
        (24, 6, 3),
    ),
    "conv2d, several": (lambda: nn.Conv2d(12, 14, 3), (3, 12, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(12, 14, 2), (12, 3, 3, 2)),
    "transposed conv": (
        lambda: nn.ConvTranspose2d(24, 28, 3, stride=2, padding=1, output_padding=1, groups=2),
        (24, 2, 3),
    ),
    "conv twice": (
        lambda: Of(lambda x, w: F.conv1d(F.conv1d(x, w).tanh(), w), 14, 14, 3),
        (14, 7),
    ),
    "norms": (
        lambda: images(
            nn.Conv2d(8, 16, 3),
            nn.GroupNorm(4, 16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3),
            nn.InstanceNorm2d(16, affine=True),
            nn.BatchNorm2d(16),
            nn.Flatten(0),
            nn.Linear(64, 50),
            nn.LayerNorm(50),
        ),
        (8, 6, 6),
    ),
}


def example(shape, n=3):
    return shape if isinstance(shape, torch.Tensor) else torch.randn(n, *shape, dtype=D)


def model(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make().to(D), example(shape)


def loss_of(module):
    def loss(parameters, x):
        out = functional_call(module, parameters, (x,))
        return (out[0] if isinstance(out, tuple) else out).sin().square().sum()

    return loss


def by_the_loop(loss, parameters, xs):
    found = []
    for x in xs:
        own = {k: v.detach().clone().requires_grad_() for k, v in parameters.items()}
        gs = torch.autograd.grad(loss(own, x), [*own.values()], materialize_grads=True)
        found.append(torch.stack([torch.linalg.vector_norm(g) for g in gs]).norm())
    return torch.stack(found)


def bare(module):
    return {k: v.detach() for k, v in module.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_norms_are_the_loops(name, dtype):
    module, xs = model(name)
    module = module.to(dtype)
    xs = xs.to(dtype) if xs.is_floating_point() else xs
    loss, parameters = loss_of(module), bare(module)
    expected = by_the_loop(loss, parameters, xs)
    # These gradients are badly conditioned: the loop in float32 is 3e-6 from the loop in float64,
    # and rounds otherwise on machines with other instructions.
    near = {"rtol": 1e-5 if dtype == torch.float32 else 1e-7, "atol": 0}
    torch.testing.assert_close(per_example_grad_norm(loss)(parameters, xs), expected, **near)
    if "BatchNorm2d" not in str(module):  # its statistics have moved on
        chunked = per_example_grad_norm(loss, chunk_size=2)(parameters, xs)
        torch.testing.assert_close(chunked, expected, **near)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_their_derivatives_are_those_of_norms_of_gradients(name):
    """By every way: reverse mode through captured leaves, forward mode, an outer vmap."""
    module, xs = model(name)
    module.eval()
    if name == "lstm":
        pytest.skip("torch has no second derivative of it, see tests/limits")
    loss, parameters = loss_of(module), bare(module)

    def norms(parameters, xs):
        each = vmap(grad(loss), (None, 0))(parameters, xs).values()
        return torch.stack([g.abs().square().flatten(1).sum(1) for g in each]).sum(0).sqrt()

    def total(norms):
        return lambda parameters: (norms(parameters, xs) ** 3).sum()

    of_norms = per_example_grad_norm(loss)
    expected = grad(total(norms))(parameters)
    torch.testing.assert_close(grad(total(of_norms))(parameters), expected)

    leaves = {k: v.clone().requires_grad_() for k, v in parameters.items()}
    found = of_norms(leaves, xs)
    assert found.requires_grad
    gs = torch.autograd.grad((found**3).sum(), [*leaves.values()], materialize_grads=True)
    torch.testing.assert_close(dict(zip(leaves, gs, strict=True)), expected)

    several = {k: torch.stack([v, v * 1.5]) for k, v in parameters.items()}
    torch.testing.assert_close(
        vmap(of_norms, (0, None))(several, xs),
        torch.stack([norms({k: v[i] for k, v in several.items()}, xs) for i in range(2)]),
    )
    if name == "attention":
        return  # see tests/gaps
    along = {k: v.cos() for k, v in parameters.items()}
    moved = jvp(lambda p: of_norms(p, xs), (parameters,), (along,))
    torch.testing.assert_close(moved, jvp(lambda p: norms(p, xs), (parameters,), (along,)))


# --- what is made, and what is not -------------------------------------------------------------

# Used otherwise than as a factor too.
MADE = {"decayed", "steps"}


@pytest.fixture
def made(monkeypatch):
    """How often a product has been made after all."""
    found = []
    make = ghost_norm.DeferredProduct.make

    def noted(product):
        found.append(product.terms)
        return make(product)

    monkeypatch.setattr(ghost_norm.DeferredProduct, "make", noted)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_that_is_used_as_a_factor_has_its_gradient_made(name, made):
    module, xs = model(name)
    per_example_grad_norm(loss_of(module))(bare(module), xs)
    assert bool(made) == (name in MADE)


HOOKS = {
    "reads": lambda g: repr(g) and None,
    "returns another": lambda g: g * 2,
    "writes": lambda g: g.mul_(2),
    "writes into what it has a view of": lambda g: (g.t(), g.mul_(3))[0].t(),
    "writes into a part": lambda g: (g[:2].zero_(), g)[1],
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_sees_a_lazy_product_as_any_other_gradient(name):
    torch.manual_seed(0)
    w, xs = torch.randn(20, 14, dtype=D), torch.randn(3, 2, 14, dtype=D)

    def loss(w, x):
        turned = w.t()
        turned.register_hook(HOOKS[name])
        return (x @ turned).sin().sum()

    expected = vmap(grad(loss), (None, 0))(w, xs).flatten(1).norm(dim=1)
    torch.testing.assert_close(per_example_grad_norm(loss)(w, xs), expected)


def test_sums_that_cancel_have_no_rounding_error_of_their_square():
    """Two places that undo each other but for one part in ten thousand."""
    torch.manual_seed(0)
    w, x = torch.randn(100, 100), torch.randn(4, 100)

    def loss(w, x):
        signs = torch.tensor([[1.0], [-1.0 + 1e-4]])
        return (F.linear(torch.stack([x, x]), w) * signs).sum()

    expected = vmap(grad(loss), (None, 0))(w, x).flatten(1).norm(dim=1)
    torch.testing.assert_close(per_example_grad_norm(loss)(w, x), expected, rtol=1e-3, atol=0)


def test_half_precision_does_not_overflow():
    w, x = torch.zeros(8, 8, dtype=torch.float16), torch.full((2, 8), 200.0, dtype=torch.float16)
    norms = per_example_grad_norm(lambda w, x: F.linear(x, w).sum())(w, x)
    assert norms.dtype == torch.float16
    torch.testing.assert_close(norms, torch.full((2,), 1600.0, dtype=torch.float16))


def test_a_norm_of_zero_has_derivative_zero():
    w = torch.zeros(4, 3, requires_grad=True)
    norms = per_example_grad_norm(lambda w, x: F.linear(x, w).square().sum())(w, torch.ones(2, 3))
    norms.sum().backward()
    assert not norms.any()
    assert not w.grad.any()


# --- arguments and results ---------------------------------------------------------------------


def weighed(w, b, x, scale=1.0):
    y = F.linear(x, w, b)
    return y.sin().sum() * scale, y


def given():
    torch.manual_seed(0)
    return torch.randn(9, 8, dtype=D), torch.randn(9, dtype=D), torch.randn(5, 8, dtype=D)


def of_gradients(*argnums):
    def norms(w, b, xs, **kwargs):
        gs, _ = vmap(grad(weighed, argnums, has_aux=True), (None, None, 0))(w, b, xs, **kwargs)
        return torch.cat([g.flatten(1) for g in gs], 1).norm(dim=1)

    return norms


@pytest.mark.parametrize("options", [{"argnums": (0, 1)}, {"argnames": ("b", "w")}])
def test_several_arguments_are_one_vector(options):
    w, b, xs = given()
    norms, ys = per_example_grad_norm(weighed, has_aux=True, **options)(w, b, xs, scale=2.0)
    torch.testing.assert_close(norms, of_gradients(0, 1)(w, b, xs, scale=2.0))
    torch.testing.assert_close(ys, F.linear(xs, w, b))


def test_the_value_and_the_aux_come_beside():
    w, b, xs = given()
    shared = {"in_dims": (None, None, 0)}
    norms, (values, ys) = per_example_grad_norm(
        weighed, 1, has_aux=True, return_value=True, **shared
    )(w, b, xs)
    torch.testing.assert_close(norms, of_gradients(1)(w, b, xs))
    torch.testing.assert_close((values, ys), (ys.sin().sum(1), F.linear(xs, w, b)))
    norms, values = per_example_grad_norm(
        lambda *a: weighed(*a)[0], 1, return_value=True, **shared
    )(w, b, xs)
    torch.testing.assert_close(values, ys.sin().sum(1))


def test_one_int_is_for_what_is_not_differentiated():
    w, b, xs = given()
    bs = b.expand(5, 9)
    f = lambda *a: weighed(*a)[0]  # noqa: E731
    expected = of_gradients(0)(w, b, xs)
    torch.testing.assert_close(per_example_grad_norm(f)(w, bs, xs), expected)
    torch.testing.assert_close(per_example_grad_norm(f, in_dims=-1)(w, bs.T, xs.T), expected)
    g = lambda w, b, x: weighed(w, b, x)[0]  # noqa: E731 - a dict names its arguments
    torch.testing.assert_close(per_example_grad_norm(g, in_dims={"x": 1})(w, b, xs.T), expected)


def test_parameters_may_differ_between_the_examples():
    w, b, xs = given()
    ws = torch.stack([w * i for i in range(5)])
    f = lambda w, x: weighed(w, b, x)[0]  # noqa: E731
    expected = torch.stack([grad(f)(w, x).norm() for w, x in zip(ws, xs, strict=True)])
    torch.testing.assert_close(per_example_grad_norm(f, in_dims=(0, 0))(ws, xs), expected)


@pytest.mark.parametrize("n", [0, 1])
def test_any_number_of_examples(n):
    w, b, xs = given()
    norms = per_example_grad_norm(lambda w, x: weighed(w, b, x)[0])(w, xs[:n])
    torch.testing.assert_close(norms, of_gradients(0)(w, b, xs)[:n])


def test_empty_weights_and_unused_ones_have_norm_zero():
    w = {"empty": torch.zeros(0, 3), "unused": torch.ones(2)}
    norms = per_example_grad_norm(lambda w, x: F.linear(x, w["empty"]).sum() + x.sum())
    assert norms(w, torch.ones(4, 3)).tolist() == [0, 0, 0, 0]


# --- what models do ----------------------------------------------------------------------------


def test_frozen_parameters_are_those_that_are_left_out():
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)).to(D)
    xs = torch.randn(4, 6, dtype=D)
    head = {k: v.detach() for k, v in net.named_parameters() if k.startswith("2.")}
    loss = loss_of(net)
    assert per_example_grad_norm(loss)(head, xs).requires_grad  # in the body, which is captured
    net.requires_grad_(False)
    norms = per_example_grad_norm(loss)(head, xs)
    assert not norms.requires_grad
    torch.testing.assert_close(norms, by_the_loop(loss, head, xs))


def test_dropout_draws_as_vmap_says():
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 7)).to(D)
    xs, key = torch.randn(4, 6, dtype=D), forall.random.key(3)
    loss, parameters = loss_of(net), bare(net)

    def one(i):
        with forall.random.scope(key, i):
            return by_the_loop(loss, parameters, xs[i : i + 1])[0]

    expected = torch.stack([one(i) for i in range(4)])
    for chunk in (None, 3):
        found = per_example_grad_norm(loss, randomness=key, chunk_size=chunk)(parameters, xs)
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="randomness"):
        per_example_grad_norm(loss)(parameters, xs)


def test_running_statistics_are_what_the_loop_leaves():
    net = nn.Sequential(nn.Unflatten(0, (1, -1)), nn.BatchNorm1d(3)).to(D)
    xs = torch.randn(4, 3, 6, dtype=D)
    per_example_grad_norm(loss_of(net))(bare(net), xs)
    found = {k: v.clone() for k, v in net.named_buffers()}
    net[1].reset_running_stats()
    for x in xs:
        net(x)
    torch.testing.assert_close(found, dict(net.named_buffers()))


def test_examples_may_part():
    torch.manual_seed(0)
    w, xs = torch.randn(9, 8, dtype=D), torch.randn(6, 8, dtype=D)

    def loss(w, x):
        y = F.linear(x, w)
        n = 0
        while y[0] > 0 and n < 3:
            y = F.linear(F.linear(y, w.T) - 0.4 * n, w)
            n += 1
        return y.sin().sum() if x[1] > 0 else F.linear(y, w.T).sum()

    expected = torch.stack([grad(loss)(w, x).norm() for x in xs])
    for _ in range(2):  # the second time converted from the start
        torch.testing.assert_close(per_example_grad_norm(loss)(w, xs), expected)


def test_a_factor_may_not_be_written_to():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            g = g.clone()
            of_w = x.T @ g
            g.mul_(2)
            return g @ w.T, of_w

    w, xs = torch.randn(9, 8), torch.randn(3, 2, 9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        per_example_grad_norm(lambda w, x: Scaled.apply(x, w).sum())(w, xs)


def test_a_product_is_made_before_it_is_written_to():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            of_w = x.T @ g
            of_w.T[0].mul_(0.5)
            return g @ w.T, of_w

    w, xs = torch.randn(9, 8, dtype=D), torch.randn(3, 2, 9, dtype=D)
    loss = lambda w, x: Halved.apply(x, w).sin().sum()  # noqa: E731
    expected = vmap(grad(loss), (None, 0))(w, xs).flatten(1).norm(dim=1)
    torch.testing.assert_close(per_example_grad_norm(loss)(w, xs), expected)


def test_next_to_torchs_own_transforms():
    w, b, xs = given()
    f = lambda w, x: weighed(w, b, x)[0]  # noqa: E731
    expected = grad(lambda w: of_gradients(0)(w, b, xs).sum())(w)
    found = torch.func.grad(lambda w: per_example_grad_norm(f)(w, xs).sum())(w)
    torch.testing.assert_close(found, expected)
