"""Derivatives that torch lacks of its fused kernels: the same as those of finite differences."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from forall import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from oracle import check_vmap

D = torch.float64
INF = float("inf")


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=D, generator=generator)


def qkv(heads=2, keys=2):
    return drawn(2, heads, 3, 4), drawn(2, keys, 5, 4, seed=1), drawn(2, keys, 5, 4, seed=2)


def attention(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


SEEN = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def distance(p):
    return lambda x, y: torch.cdist(x, y, p=p)


def sampled(**options):
    return lambda image, grid: F.grid_sample(image, grid.tanh(), align_corners=False, **options)


def ctc(x, **options):
    targets = torch.tensor([[1, 2, 2], [3, 1, 0]])
    sizes = torch.tensor([3, 2])
    return F.ctc_loss(x.log_softmax(-1), targets, torch.tensor([6, 5]), sizes, **options)


BAG = torch.tensor([1, 2, 2, 4, 0, 3, 1])
STARTS = torch.tensor([0, 2, 2, 5])


def bag(**options):
    def run(weight, *own):
        named = {"per_sample_weights": own[0]} if own else {}
        return F.embedding_bag(BAG, weight, STARTS, **options, **named)

    return run


PLACES = torch.tensor([[2, 0, -1], [1, 2, 0]])

CASES = {
    "attention": (attention(), qkv()),
    "causal": (attention(is_causal=True, scale=0.7), qkv()),
    "boolean mask": (attention(attn_mask=SEEN), qkv()),
    "mask": (masked, (*qkv(), drawn(2, 1, 3, 5))),
    "grouped": (attention(enable_gqa=True), qkv(4, 2)),
    **{f"cdist {p}": (distance(p), (drawn(2, 3, 2), drawn(2, 4, 2))) for p in (0, 1, 2, INF)},
    **{f"cdist {p}": (distance(p), (drawn(3, 2), drawn(4, 2))) for p in (0.7, 1.5, 3)},
    "pdist": (lambda x: F.pdist(x, 3), (drawn(4, 3),)),
    **{
        f"grid 2d {mode} {padding}": (
            sampled(mode=mode, padding_mode=padding),
            (drawn(1, 2, 4, 3), drawn(1, 2, 3, 2)),
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
    },
    "grid 3d": (sampled(), (drawn(1, 1, 3, 4, 3), drawn(1, 1, 2, 2, 3))),
    "grid 3d nearest": (sampled(mode="nearest"), (drawn(1, 1, 3, 4, 3), drawn(1, 1, 2, 2, 3))),
    "ctc": (ctc, (drawn(6, 2, 4),)),
    "ctc of each": (lambda x: ctc(x, reduction="none", zero_infinity=True), (drawn(6, 2, 4),)),
    "bag of sums": (bag(mode="sum"), (drawn(5, 3), drawn(7))),
    "bag of means": (bag(mode="mean", padding_idx=2), (drawn(5, 3),)),
    "bag of maxima": (bag(mode="max"), (drawn(5, 3),)),
    "multi margin": (
        lambda x: F.multi_margin_loss(x, torch.tensor([2, 0]), p=2, margin=0.8),
        (drawn(2, 3),),
    ),
    "multilabel margin": (lambda x: F.multilabel_margin_loss(x, PLACES) ** 2, (drawn(2, 3),)),
    **{
        f"segments {how}": (
            lambda x, how=how: torch.segment_reduce(x, how, lengths=torch.tensor([2, 1, 3])),
            (drawn(6, 2),),
        )
        for how in ("sum", "mean", "max", "prod")
    },
    "hardsigmoid": (lambda x: F.hardsigmoid(4 * x) ** 2, (drawn(5),)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), (drawn(2, 3), drawn(3), drawn(3))),
    "batch norm": (
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
        (drawn(4, 2), drawn(2)),
    ),
}


def smooth(name):
    """The case as a function whose derivatives all differ from zero."""
    f, xs = CASES[name]
    return lambda *xs: f(*xs).sin(), xs


def leaves(xs):
    return tuple(x.clone().requires_grad_() for x in xs)


def directions(xs):
    return tuple(drawn(*x.shape, seed=7 + i) for i, x in enumerate(xs))


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_reverse_mode_transposed(name):
    f, xs = smooth(name)
    us = directions(xs)
    y, tangent = jvp(f, xs, us)
    torch.testing.assert_close(y, f(*xs))
    out, pull = vjp(f, *xs)
    cotangent = drawn(*out.shape, seed=5)
    pulled = sum((g * u).sum() for g, u in zip(pull(cotangent), us, strict=True))
    torch.testing.assert_close((tangent * cotangent).sum(), pulled)


@pytest.mark.parametrize("name", CASES)
def test_every_second_derivative_passes_gradcheck(name):
    f, xs = smooth(name)
    us = directions(xs)
    which = tuple(range(len(xs)))

    def total(*xs):
        return f(*xs).sum()

    found = {
        "reverse over reverse": grad(lambda *xs: dot(grad(total, which)(*xs), us), which)(*xs),
        "reverse over forward": grad(lambda *xs: jvp(total, xs, us)[1], which)(*xs),
        "forward over reverse": jvp(grad(total, which), xs, us)[1],
    }
    assert gradcheck(lambda *xs: grad(total, which)(*xs), leaves(xs), fast_mode=True, atol=1e-4)
    for way in ("reverse over forward", "forward over reverse"):
        torch.testing.assert_close(found[way], found["reverse over reverse"], msg=way)
    twice = jvp(lambda *xs: jvp(total, xs, us)[1], xs, us)[1]
    torch.testing.assert_close(twice, dot(found["reverse over reverse"], us))


def dot(gs, us):
    return sum((g * u).sum() for g, u in zip(gs, us, strict=True))


STACKED = ("attention", "causal", "mask", "cdist 2", "cdist 3", "ctc", "layer norm", "hardsigmoid")


@pytest.mark.parametrize("name", STACKED)
def test_examples_have_the_derivatives_of_the_loop(name):
    f, xs = smooth(name)
    us = directions(xs)
    stacks = tuple(torch.stack([x, x.cos()]) for x in xs)
    which = tuple(range(len(xs)))

    def total(*xs):
        return f(*xs).sum()

    def push(*xs):
        return jvp(f, xs, us)[1]

    def over(*xs):
        return jvp(grad(total, which), xs, us)[1]

    def again(*xs):
        return grad(lambda *xs: dot(grad(total, which)(*xs), us), which)(*xs)

    for g in (push, over, again):
        truth = [g(*row) for row in zip(*stacks, strict=True)]
        truth = torch.utils._pytree.tree_map(lambda *ts: torch.stack(ts), *truth)
        torch.testing.assert_close(vmap(g)(*stacks), truth)
    mapped = jvp(vmap(f), stacks, tuple(x.exp() for x in stacks))[1]
    truth = [jvp(f, row, tuple(x.exp() for x in row))[1] for row in zip(*stacks, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(truth))


def multihead():
    torch.manual_seed(0)
    m = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=D)
    return lambda x: m(x, x, x, need_weights=False)[0]


def encoder(training):
    torch.manual_seed(0)
    m = torch.nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, dtype=D)
    m = m.train(training).requires_grad_(training)
    m.activation = F.gelu
    return m


MODULES = {
    "MultiheadAttention": multihead(),
    "TransformerEncoderLayer, training": encoder(True),
    "TransformerEncoderLayer": encoder(False),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_all_second_derivatives(name):
    m, x, u = MODULES[name], drawn(2, 3, 4), drawn(2, 3, 4, seed=3)

    def total(x):
        return m(x).sin().sum()

    first = jacrev(total)(x)
    torch.testing.assert_close(jacfwd(total)(x), first)
    assert gradcheck(grad(total), leaves((x,)), fast_mode=True, atol=1e-4)
    second = hessian(total)(x)
    torch.testing.assert_close(jacrev(jacrev(total))(x), second)
    torch.testing.assert_close(jacfwd(jacfwd(total))(x), second)
    torch.testing.assert_close(jacrev(jacfwd(total))(x), second)
    check_vmap(lambda x: jvp(grad(total), (x,), (u,))[1], (torch.stack([x, x.cos()]),))
