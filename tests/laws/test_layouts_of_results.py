"""What an operator makes lies in memory as in the loop, wherever the axis of the examples is."""

import pytest
import torch
import torch.nn.functional as F

from forall import grad, jvp, vmap
from oracle import same

D = torch.float64
PICK = torch.tensor([1, 0])

OPERATORS = {
    "itself": lambda x: x,
    "times": lambda x: x * 2,
    "clone": lambda x: x.clone(),
    "expanded clone": lambda x: x.expand(2, *x.shape).clone(),
    "expanded inside": lambda x: x.unsqueeze(1).expand(x.shape[0], 3, *x.shape[1:]).contiguous(),
    "expanded row": lambda x: x[:1].expand(4, *x.shape[1:]) * 2,
    "expanded sum": lambda x: x[:1].expand(4, *x.shape[1:]) + x[:, :1].sum(0),
    "expanded and turned": lambda x: x.expand(2, *x.shape).transpose(0, 1).movedim(0, -1).exp(),
    "zeros like": lambda x: torch.zeros_like(x.expand(2, *x.shape)),
    "index": lambda x: x[PICK],
    "index columns": lambda x: x[:, PICK],
    "index both": lambda x: x[PICK, PICK],
    "index of a table": lambda x: x[PICK.expand(2, 2)],
    "index of what is turned": lambda x: x.transpose(0, -1)[PICK],
    "index select": lambda x: x.index_select(1, PICK),
    "gather": lambda x: x.gather(0, (x > 0).long()),
    "take": lambda x: x.take(PICK.expand(3, 2)),
    "outer": lambda x: x[:, :1] * x[:1],
    "outer of numbers": lambda x: x.reshape(-1)[:, None] * x.reshape(-1),
    "where": lambda x: torch.where(x[0] > 0, x, x[:1]),
    "mixed": lambda x: x * torch.ones(x.shape[::-1], dtype=D).permute(*range(x.dim())[::-1]),
    "with its copy": lambda x: x + x.contiguous(),
    "sum": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "cat": lambda x: torch.cat([x, x * 2.0, x.contiguous()]),
    "stack": lambda x: torch.stack([x, x], -1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, *[1] * x.dim()),
    "pad": lambda x: F.pad(x, (1, 1)),
    "softmax": lambda x: x.softmax(-1),
    "product": lambda x: x @ x.mT,
    "kron": lambda x: torch.kron(x, x),
    "einsum": lambda x: torch.einsum("i...,j...->ij...", x, x),
    "convolution": lambda x: F.conv1d(x, torch.ones(2, x.shape[-2], 2, dtype=D)),
    "masked scatter": lambda x: x.masked_scatter(x > 0, x.flip(0)),
    "copy of a view": lambda x: torch.transpose_copy(x, 0, 1),
    "index fill": lambda x: x.index_fill(0, PICK, 0.0),
    "index put": lambda x: x.index_put((PICK,), x[:2]),
    "loss": lambda x: F.huber_loss(x, x.cos(), reduction="none"),
    "real parts": lambda x: torch.view_as_real(torch.complex(x, x)),
    "fft": torch.fft.fft,
}
LAYOUTS = {
    "given": lambda x: x,
    "made": lambda x: x * 1,
    "turned": lambda x: (x * 1).transpose(0, 1),
    "sliced": lambda x: (x * 1)[..., ::2],
    "expanded": lambda x: (x * 1)[:1].expand(3, *x.shape[1:]),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("name", OPERATORS)
def test_strides(name, shape, dim):
    xs = torch.randn(3, *shape, dtype=D).movedim(0, dim).contiguous()
    for layout, laid_out in LAYOUTS.items():
        seen = []

        def f(x, laid_out=laid_out, seen=seen):
            y = OPERATORS[name](laid_out(x))
            contiguous, strides = y.is_contiguous(), y.stride()
            seen.append((contiguous, [s for s, n in zip(strides, y.shape, strict=True) if n > 1]))
            return y

        right = torch.stack([f(x) for x in xs.unbind(dim)])
        assert same(vmap(f, dim)(xs), right), layout
        assert seen[0] == seen[-1], layout


def index(x):
    y = x[PICK]
    y.flatten().mul_(2)
    return y


def expanded(x):
    y = x.expand(2, *x.shape).clone()
    y.reshape(-1).mul_(x.sum())
    return y


def viewed(x):
    return x.expand(2, *x.shape).clone().view(-1) * 2


def asked(x):
    y = x * 2
    z = y if y.is_contiguous() else y.clone()
    z.mul_(3)
    return y


def asked_of_images(x):
    y = (x * 2).expand(2, 2, *x.shape).contiguous(memory_format=torch.channels_last)
    if y.is_contiguous() or not y.is_contiguous(memory_format=torch.channels_last):
        raise ValueError
    return y


def broadcast(x):
    y = x[:, :1] * x[:1]
    y.t().reshape(-1)[:4].mul_(2)
    return y


WRITERS = [index, expanded, viewed, asked, asked_of_images, broadcast]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("f", WRITERS, ids=lambda f: f.__name__)
def test_writes_into_what_may_be_a_view(f, dim):
    xs = torch.randn(2, 3, 4, dtype=D)

    def slope(x):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        return torch.autograd.grad(f(leaf).sin().sum(), leaf)[0]

    def push(x):
        return jvp(f, (x,), (x.cos(),))[1]

    examples = xs.unbind(dim)
    assert same(vmap(f, dim)(xs), torch.stack([f(x) for x in examples]))
    assert same(vmap(vmap(f, dim))(xs[None]), torch.stack([f(x) for x in examples])[None])
    found = vmap(grad(lambda x: f(x).sin().sum()), dim)(xs)
    assert same(found, torch.stack([slope(x) for x in examples]))
    assert same(vmap(push, dim)(xs), torch.stack([push(x) for x in examples]))
