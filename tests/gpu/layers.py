"""Layers whose kernels on a GPU are others than the CPU's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forall
from forall import grad, jit, vmap
from gpu.checks import (
    Check,
    D,
    assert_same,
    gradients_of_weights,
    numbers,
    on,
    parameters,
    total,
    truth_of,
    vmapped_and_differentiated,
)

MODULES = {
    "a convolution": lambda: nn.Conv2d(8, 8, 3),
    "a convolution with strides": lambda: nn.Conv2d(8, 4, 3, stride=2, padding=1),
    "a dilated convolution": lambda: nn.Conv2d(8, 4, 3, dilation=2),
    "a convolution in groups": lambda: nn.Conv2d(8, 8, 3, groups=4),
    "a depthwise convolution": lambda: nn.Conv2d(8, 8, 3, groups=8),
    "a convolution 1 x 1": lambda: nn.Conv2d(8, 4, 1),
    "a reflected convolution": lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"),
    "a transposed convolution": lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "max pooling": lambda: nn.MaxPool2d(2),
    "max pooling, overlapping": lambda: nn.MaxPool2d(3, 2, 1),
    "average pooling": lambda: nn.AvgPool2d(2),
    "adaptive pooling": lambda: nn.AdaptiveAvgPool2d(3),
    "adaptive max pooling": lambda: nn.AdaptiveMaxPool2d(3),
    "upsampling, bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "upsampling, bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "upsampling, nearest": lambda: nn.Upsample(scale_factor=2),
    "padding, reflected": lambda: nn.ReflectionPad2d(2),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "PReLU": lambda: nn.PReLU(8),
    "batch norm": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "batch norm that was trained": lambda: nn.BatchNorm2d(8).eval(),
}


def checks(device: torch.device) -> list[Check]:
    found = []
    for dtype in (torch.float32, D):
        images = numbers(device, 4, 2, 8, 9, 9, dtype=dtype)
        for name, make in MODULES.items():
            torch.manual_seed(0)
            net = make().to(dtype).to(device)
            given = f"{str(dtype).removeprefix('torch.')}, {name}"
            found += vmapped_and_differentiated(given, net, images)
            if list(net.parameters()):
                found.append(Check(f"gradients of weights, {given}", of_weights(net, images)))
    found += of_other_ranks(device)
    for name, (f, *stacks) in functions(device).items():
        found += vmapped_and_differentiated(name, f, *stacks)
    return [
        *found,
        Check("running statistics", lambda: running_statistics(device)),
        Check("a small network of convolutions, jit", lambda: small_network(device)),
        Check("channels last", lambda: channels_last(device)),
    ]


def of_weights(net: nn.Module, xs: Tensor):
    def run() -> None:
        truth = truth_of(lambda: gradients_of_weights(net, xs))
        of_one = grad(lambda p, x: total(forall.functional_call(net, p, (x,))))
        assert_same(vmap(of_one, in_dims=(None, 0))(parameters(net), xs), truth)

    return run


def of_other_ranks(device: torch.device) -> list[Check]:
    found = []
    for rank, (kind, turned) in enumerate(
        ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv3d, nn.ConvTranspose3d))
    ):
        xs = numbers(device, 3, 2, 4, *[6] * (2 * rank + 1), dtype=torch.float32)
        for make in (kind, turned):
            torch.manual_seed(0)
            net = make(4, 3, 3).to(device)
            found += vmapped_and_differentiated(make.__name__, net, xs)
            found.append(Check(f"gradients of weights, {make.__name__}", of_weights(net, xs)))
    return found


def functions(device: torch.device) -> dict[str, tuple]:
    xs, rows = numbers(device, 4, 3, 8), numbers(device, 4, 3, 8, seed=1)
    images = numbers(device, 4, 2, 8, 9, 9)
    square = numbers(device, 4, 3, 3)
    lengths = torch.full((2,), 12, device=device), torch.full((2,), 4, device=device)
    draws = torch.Generator().manual_seed(0)
    targets = torch.randint(1, 9, (2, 4), generator=draws)
    labels = torch.randint(0, 8, (3,), generator=draws).to(device)
    grid = on(device, torch.linspace(-1, 1, 64, dtype=D).reshape(2, 4, 4, 2))
    here = targets.to(device)
    eye = torch.eye(3, device=device, dtype=D)
    bags = torch.tensor([[0, 1], [2, 2]], device=device)
    places = torch.tensor([0, 3, 3], device=device)
    log_softmax = numbers(device, 4, 12, 2, 9).log_softmax(-1)
    return {
        "layer_norm": (lambda x: F.layer_norm(x, (8,)), xs),
        "rms_norm": (lambda x: F.rms_norm(x, (8,)), xs),
        "softmax": (lambda x: x.softmax(-1), xs),
        "cross_entropy": (lambda x: F.cross_entropy(x, labels), xs),
        "nll_loss": (lambda x: F.nll_loss(x, labels, reduction="none"), xs),
        "smooth_l1_loss": (F.smooth_l1_loss, xs, rows),
        "ctc_loss": (lambda x: F.ctc_loss(x, here, *lengths), log_softmax),
        "ctc_loss by cuDNN": (
            lambda x: F.ctc_loss(x, targets.int().flatten(), (12, 12), (4, 4)),
            log_softmax.float(),
        ),
        "grid_sample": (lambda x: F.grid_sample(x, grid, align_corners=False), images),
        "cdist": (lambda x, y: torch.cdist(x, y), xs, rows),
        "pdist": (F.pdist, xs),
        "embedding": (lambda w: F.embedding(bags, w), xs),
        "embedding_bag": (lambda w: F.embedding_bag(bags, w), xs),
        "index_add": (lambda x: x.new_zeros(5, 8).index_add(0, places, x), xs),
        "index_put": (lambda x: x.new_zeros(5, 8).index_put((places,), x, accumulate=True), xs),
        "scatter_add": (
            lambda x: x.new_zeros(4, 8).scatter_add(0, places[:, None].expand(3, 8), x),
            xs,
        ),
        "scatter_reduce": (
            lambda x: x.new_ones(4, 8).scatter_reduce(0, places[:, None].expand(3, 8), x, "mean"),
            xs,
        ),
        "gather": (lambda x: x.gather(1, places[:, None].expand(3, 8)), xs),
        "sort": (lambda x: x.sort(-1)[0], xs),
        "topk": (lambda x: x.topk(3)[0], xs),
        "median": (lambda x: x.median(-1)[0], xs),
        "kthvalue": (lambda x: x.kthvalue(2)[0], xs),
        "mode": (lambda x: x.round().mode(-1)[0], xs),
        "cumsum": (lambda x: x.cumsum(0), xs),
        "cumprod": (lambda x: x.cumprod(-1), xs),
        "logcumsumexp": (lambda x: x.logcumsumexp(-1), xs),
        "cummax": (lambda x: x.cummax(-1)[0], xs),
        "logsumexp": (lambda x: x.logsumexp(-1), xs),
        "prod": (lambda x: x.prod(-1), xs),
        "var": (lambda x: x.var(-1), xs),
        "norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=-1), xs),
        "fft": (lambda x: torch.fft.rfft(x).abs(), xs),
        "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), xs, rows),
        "baddbmm": (lambda x, y: torch.baddbmm(x @ y.mT, x[:, None] * y, y.mT), xs, rows),
        "unfold": (lambda x: F.unfold(x, 3), images),
        "dropout at rest": (lambda x: F.dropout(x, training=False), xs),
        "inv": (torch.linalg.inv, square),
        "det": (torch.linalg.det, square),
        "slogdet": (lambda x: torch.linalg.slogdet(x)[1], square),
        "solve": (torch.linalg.solve, square, xs),
        "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + eye), square),
        "qr": (lambda x: torch.linalg.qr(x)[1].abs(), square),
        "eigh": (lambda x: torch.linalg.eigvalsh(x + x.mT), square),
        "svdvals": (torch.linalg.svdvals, xs),
        "lstsq": (lambda x, y: torch.linalg.lstsq(x @ x.mT + eye, y).solution, square, xs),
        "matrix_exp": (torch.linalg.matrix_exp, square),
        "triangular": (
            lambda x, y: torch.linalg.solve_triangular(x.tril() + 3 * eye, y, upper=False),
            square,
            xs,
        ),
    }


def running_statistics(device: torch.device) -> None:
    ours, truth = nn.BatchNorm2d(8).to(device), nn.BatchNorm2d(8).to(device)
    images = numbers(device, 4, 2, 8, 9, 9, dtype=torch.float32)
    found = vmap(ours)(images)
    assert_same(found.detach(), torch.stack([truth(x) for x in images]).detach())
    assert_same(dict(ours.named_buffers()), dict(truth.named_buffers()))


def small_network(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(-3),
        nn.Linear(8 * 36, 5),
    ).to(device)
    images = numbers(device, 6, 1, 3, 16, 16, dtype=torch.float32)
    mapped = vmap(grad(lambda p, x: total(forall.functional_call(net, p, (x,)))), in_dims=(None, 0))
    truth = truth_of(lambda: gradients_of_weights(net, images))
    recorded = jit(mapped)
    for f in (mapped, recorded, recorded, recorded):
        assert_same(f(parameters(net), images), truth)


def channels_last(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(8, 4, 3).to(device).to(memory_format=torch.channels_last)
    images = numbers(device, 4, 2, 8, 9, 9, dtype=torch.float32)
    images = torch.stack([x.contiguous(memory_format=torch.channels_last) for x in images])
    of_weights(net, images)()
    found = vmap(net)(images)
    assert_same(found.detach(), torch.stack([net(x) for x in images]).detach())
