"""Autocast on the CPU: the dtype and the value of each example are those of the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forall
from draws import make_generator
from oracle import difference

B = 3
torch.manual_seed(0)
LINEAR = nn.Linear(6, 6)
ENCODER = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
CELL = nn.LSTMCell(6, 6)

# Of an example (4, 6) and a matrix (6, 6).
MATRICES: dict[str, Callable] = {
    "matmul": lambda x, w: x @ w,
    "mm": torch.mm,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "mv": lambda x, w: torch.mv(w, x[0]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "addbmm": lambda x, w: torch.addbmm(x, x[None], w[None]),
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "dot": lambda x, w: torch.dot(x[0], w[0]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "chain": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "bilinear": lambda x, w: F.bilinear(x, x, w.expand(5, 6, 6)),
    "softmax": lambda x, w: F.softmax(x @ w, -1),
    "log_softmax": lambda x, w: F.log_softmax(x @ w, -1),
    "where": lambda x, w: torch.where(x @ w > 0, x @ w, x),
    "where num": lambda x, w: torch.where(x > 0, x @ w, 1.0),
    "clamp": lambda x, w: torch.clamp(x @ w, min=x[0, 0]),
    "clamp2": lambda x, w: torch.clamp(x @ w, -1, 1),
    "add": lambda x, w: x @ w + x,
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "stack": lambda x, w: torch.stack([x @ w, x]),
    "addcmul": lambda x, w: torch.addcmul(x, x @ w, x @ w),
    "addcdiv": lambda x, w: torch.addcdiv(x, x @ w, x @ w + 3),
    "exp": lambda x, w: torch.exp(x @ w),
    "pow": lambda x, w: (x @ w).pow(2),
    "sum": lambda x, w: (x @ w).sum(),
    "prod": lambda x, w: (x @ w).prod(0),
    "cumsum": lambda x, w: (x @ w).cumsum(0),
    "norm": lambda x, w: torch.norm(x @ w),
    "vecnorm": lambda x, w: torch.linalg.vector_norm(x @ w, dim=0),
    "dist": lambda x, w: torch.dist(x @ w, x),
    "cdist": lambda x, w: torch.cdist(x @ w, x),
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (6,)),
    "group_norm": lambda x, w: F.group_norm(x @ w, 2),
    "mse": lambda x, w: F.mse_loss(x @ w, x),
    "ce": lambda x, w: F.cross_entropy(x @ w, torch.tensor([1, 2, 3, 0])),
    "smoothl1": lambda x, w: F.smooth_l1_loss(x @ w, x),
    "kl": lambda x, w: F.kl_div(x @ w, x, reduction="batchmean"),
    "bce_logits": lambda x, w: F.binary_cross_entropy_with_logits(x @ w, x.sigmoid()),
    "cosine": lambda x, w: F.cosine_similarity(x @ w, x),
    "gelu": lambda x, w: F.gelu(x @ w),
    "softplus": lambda x, w: F.softplus(x @ w),
    "sdpa": lambda x, w: F.scaled_dot_product_attention(x @ w, x, x),
    "module": lambda x, w: LINEAR(x).relu() @ w,
    "enc": lambda x, w: ENCODER(x),
    "inv": lambda x, w: torch.linalg.inv(x.mT @ x + torch.eye(6)),
    "det": lambda x, w: torch.linalg.det(w + x[0]),
    "qr": lambda x, w: torch.linalg.qr(x @ w)[1].abs(),
    "svdvals": lambda x, w: torch.linalg.svdvals(x @ w),
    "median": lambda x, w: torch.median(x @ w),
    "sort": lambda x, w: torch.sort(x @ w)[0],
    "fft": lambda x, w: torch.fft.fft(x).abs(),
    "stft": lambda x, w: torch.stft(
        x.flatten(), 4, return_complex=True, window=torch.ones(4)
    ).abs(),
    "outer": lambda x, w: torch.outer((x @ w)[0], x[0]),
    "kron": lambda x, w: torch.kron(x @ w, x),
    "iadd": lambda x, w: (x @ w).add_(1),
    "item rank0": lambda x, w: (x @ w) * x[0, 0],
    "mul num": lambda x, w: (x @ w) * 2.5,
    "index_put": lambda x, w: torch.zeros(4, 6).index_put(
        (torch.tensor([0, 1]),), (x @ w)[:2].float()
    ),
    "scatter_add": lambda x, w: torch.zeros(4, 6).scatter_add(
        0, torch.zeros(4, 6, dtype=torch.long), (x @ w).float()
    ),
    "embedding": lambda x, w: F.embedding(torch.tensor([1, 2]), w) @ x.mT,
    "rms": lambda x, w: F.rms_norm(x @ w, (6,)),
    "bce": lambda x, w: F.binary_cross_entropy((x @ w).sigmoid(), x.sigmoid()),
}
# Of images (2, 3, 8, 8) and a kernel (5, 3, 3, 3).
IMAGES: dict[str, Callable] = {
    "conv2d": lambda i, k: F.conv2d(i, k),
    "conv1d": lambda i, k: F.conv1d(i[:, :, 0], k[..., 0]),
    "convT": lambda i, k: F.conv_transpose2d(i, k.transpose(0, 1)),
    "avgpool": lambda i, k: F.avg_pool2d(F.conv2d(i, k), 2),
    "adaptive": lambda i, k: F.adaptive_avg_pool2d(F.conv2d(i, k), 2),
    "maxpool": lambda i, k: F.max_pool2d(F.conv2d(i, k), 2),
    "interp": lambda i, k: F.interpolate(F.conv2d(i, k), scale_factor=2),
    "batchnorm": lambda i, k: F.batch_norm(F.conv2d(i, k), None, None, training=True),
    "grid": lambda i, k: F.grid_sample(i, i[:, :2].movedim(1, -1), align_corners=False),
}


def given(images: bool, dim: int | None, place: int) -> Tensor:
    g = make_generator(place)
    shape = ((2, 3, 8, 8), (5, 3, 3, 3)) if images else ((4, 6), (6, 6))
    return torch.randn(*([B] if dim == 0 else []), *shape[place], generator=g)


def looped(f: Callable, args: list[Tensor], dims: tuple) -> Tensor:
    rows = [[a[i] if d == 0 else a for a, d in zip(args, dims, strict=True)] for i in range(B)]
    return torch.stack([f(*row) for row in rows])


def gradient(value: Callable) -> Callable:
    def found(a: Tensor, b: Tensor) -> Tensor:
        own = a.clone().requires_grad_()
        got = torch.autograd.grad(value(own, b), own, allow_unused=True, materialize_grads=True)
        return got[0]

    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", [*MATRICES, *IMAGES])
def test_dtype_and_value_are_those_of_the_loop(name, dims, dtype):
    images = name in IMAGES
    f = IMAGES[name] if images else MATRICES[name]
    args = [given(images, d, place) for place, d in enumerate(dims)]

    def inside(*row):
        with torch.autocast("cpu", dtype=dtype):
            return f(*row)

    def value(*row):
        return f(*row).float().sin().sum()

    with torch.autocast("cpu", dtype=dtype):
        truth = looped(f, args, dims)
        slopes = looped(gradient(value), args, dims) if truth.is_floating_point() else None
        found = forall.vmap(f, in_dims=dims)(*args)
        pulled = None if slopes is None else forall.vmap(forall.grad(value), in_dims=dims)(*args)
    assert difference(found, truth, working=dtype) is None
    assert difference(forall.vmap(inside, in_dims=dims)(*args), truth, working=dtype) is None
    assert slopes is None or difference(pulled, slopes, working=dtype) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_do_not_outlive_the_call(dtype):
    """Autocast caches the cast of a parameter: one made for the examples is no one else's."""
    x = torch.randn(B, 4, 6)
    with torch.autocast("cpu", dtype=dtype):
        before = LINEAR(x)
        inside = forall.vmap(LINEAR)(x)
        after = LINEAR(x)
    assert type(after) is Tensor
    assert torch.equal(before, after)
    assert difference(inside, before, working=dtype) is None


def test_scaled_training_steps_are_those_of_the_loop():
    """Gradients are taken outside, scaled; an inf skips a step and lowers the scale."""

    def trained(losses: Callable) -> list:
        torch.manual_seed(1)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        scales = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = losses(lambda x: net(x).float().square().sum(), torch.randn(B, 6)).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [torch.tensor(scales), *(p.detach() for p in net.parameters())]

    found = trained(lambda f, xs: forall.vmap(f)(xs))
    truth = trained(lambda f, xs: torch.stack([f(x) for x in xs]))
    assert len({*truth[0].tolist()}) > 1
    for ours, theirs in zip(found, truth, strict=True):
        assert difference(ours, theirs, working=torch.bfloat16) is None
