"""Autocast, GradScaler, TF32 and deterministic algorithms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import forall
from forall import grad, hessian, jit, vmap
from gpu.checks import (
    Check,
    Skipped,
    assert_same,
    gradients_of_weights,
    numbers,
    only_cuda,
    parameters,
    perceptron,
    total,
    truth_of,
)
from oracle import loop

HALVES = (torch.float16, torch.bfloat16)


def checks(device: torch.device) -> list[Check]:
    found = []
    for dtype in HALVES:
        word = str(dtype).removeprefix("torch.")
        found += [
            Check(f"autocast to {word}, {name}", lambda f=f, dtype=dtype: f(device, dtype))
            for name, f in AUTOCAST.items()
        ]
    return [
        *found,
        *(Check(name, lambda f=f: f(device)) for name, f in OTHERS.items()),
    ]


def net_and_inputs(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    return perceptron(device, dtype=torch.float32), numbers(device, 4, 2, 16, dtype=torch.float32)


def values(device: torch.device, dtype: torch.dtype) -> None:
    net, xs = net_and_inputs(device)
    with torch.autocast(device.type, dtype=dtype):
        truth = truth_of(lambda: loop(net)(xs))
        assert_same(vmap(net)(xs).detach(), truth.detach())
        inside = vmap(lambda x: within(net, x, device, dtype))(xs)
    assert_same(inside.detach(), truth.detach())
    assert_same(vmap(lambda x: within(net, x, device, dtype))(xs).detach(), truth.detach())


def within(net: nn.Module, x: torch.Tensor, device: torch.device, dtype: torch.dtype):
    with torch.autocast(device.type, dtype=dtype):
        return net(x)


def weights(device: torch.device, dtype: torch.dtype) -> None:
    net, xs = net_and_inputs(device)
    mapped = vmap(grad(lambda p, x: total(forall.functional_call(net, p, (x,)))), in_dims=(None, 0))
    recorded = jit(mapped)
    with torch.autocast(device.type, dtype=dtype):
        truth = truth_of(lambda: gradients_of_weights(net, xs))
        for name, f in (("eager", mapped), ("jit", recorded), ("jit again", recorded)):
            assert_same(f(parameters(net), xs), truth, name, working=dtype)
    plain = gradients_of_weights(net, xs)
    assert_same(recorded(parameters(net), xs), plain, "after autocast")
    assert_same(mapped(parameters(net), xs), plain, "after autocast")


def convolved(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # No bias: batch norm takes it away again, and its gradient is nothing but rounding.
    conv, norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, track_running_stats=False)
    net = nn.Sequential(conv, norm, nn.ReLU()).to(device)
    images = numbers(device, 4, 2, 3, 9, 9, dtype=torch.float32)
    with torch.autocast(device.type, dtype=dtype):
        truth = truth_of(lambda: gradients_of_weights(net, images))
        of_one = grad(lambda p, x: total(forall.functional_call(net, p, (x,))))
        found = vmap(of_one, in_dims=(None, 0))(parameters(net), images)
    # What is subtracted in batch norm leaves less than the working precision.
    assert_same(found, truth, working=torch.bfloat16)


def attended(device: torch.device, dtype: torch.dtype) -> None:
    stacks = [numbers(device, 3, 2, 8, 16, dtype=torch.float32, seed=i) for i in range(3)]
    with torch.autocast(device.type, dtype=dtype):
        truth = truth_of(lambda: loop(F.scaled_dot_product_attention)(*stacks))
        assert_same(vmap(F.scaled_dot_product_attention)(*stacks), truth)


def second(device: torch.device, dtype: torch.dtype) -> None:
    net, xs = net_and_inputs(device)
    with torch.autocast(device.type, dtype=dtype):
        f = lambda x: total(net(x))  # noqa: E731
        truth = truth_of(lambda: loop(lambda x: torch.autograd.functional.hessian(f, x))(xs[:, 0]))
        assert_same(vmap(hessian(f))(xs[:, 0]), truth, working=torch.bfloat16)


def scaled(device: torch.device, dtype: torch.dtype) -> None:
    """A step of training by GradScaler, with the backward pass outside."""
    only_cuda(device)
    both = []
    for mapped in (loop, vmap):
        net, xs = net_and_inputs(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler(device.type)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype):
                loss = mapped(net)(xs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        both.append({**parameters(net), "scale": torch.tensor(scaler.get_scale())})
    assert_same(both[1], both[0], working=dtype)


AUTOCAST: dict[str, Callable] = {
    "values": values,
    "gradients of weights": weights,
    "convolutions": convolved,
    "attention": attended,
    "Hessians": second,
    "GradScaler": scaled,
}


def tf32_between_calls(device: torch.device) -> None:
    only_cuda(device)
    a = numbers(device, 256, 256, dtype=torch.float32)
    image = numbers(device, 2, 8, 32, 32, dtype=torch.float32)
    kernel = numbers(device, 8, 8, 3, 3, dtype=torch.float32)
    products = {
        "python": jit(lambda x: x @ x),
        "cudagraphs": jit(lambda x: (x @ x) * 1, backend="cudagraphs"),
    }
    convolution = jit(lambda x: F.conv2d(x, kernel))
    setting, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for _ in range(3):
        for on in (False, True):
            setting.allow_tf32 = cudnn.allow_tf32 = on
            try:
                for name, f in products.items():
                    assert torch.equal(f(a), a @ a), f"{name}, TF32 {on}: not torch's product now"
                assert torch.equal(convolution(image), F.conv2d(image, kernel)), "convolution"
            finally:
                setting.allow_tf32 = cudnn.allow_tf32 = False


def precision_of_products(device: torch.device) -> None:
    only_cuda(device)
    a = numbers(device, 256, 256, dtype=torch.float32)
    f = jit(vmap(lambda x: x @ a))
    for _ in range(3):
        for word in ("highest", "high"):
            torch.set_float32_matmul_precision(word)
            try:
                assert_same(f(a), torch.stack([x @ a for x in a]), word, working=torch.float16)
            finally:
                torch.set_float32_matmul_precision("highest")


def deterministic(device: torch.device) -> None:
    places = torch.tensor([0, 1, 1, 3, 0, 2, 2, 2], device=device)
    xs = numbers(device, 5, 8, dtype=torch.float32)
    f = lambda x: x.new_zeros(4).index_add(0, places, x)  # noqa: E731
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = vmap(f)(xs)
        assert torch.equal(found, vmap(f)(xs)), "two calls differ"
        assert_same(found, loop(f)(xs))
        recorded = jit(vmap(f))
        for _ in range(3):
            assert torch.equal(recorded(xs), found), "jit differs"
    finally:
        torch.use_deterministic_algorithms(False)


def deterministic_or_an_error(device: torch.device) -> None:
    """Where torch refuses an operator, so do we."""
    xs = numbers(device, 3, 4, 8, dtype=torch.float32)
    f = lambda x: F.interpolate(x[None], scale_factor=2, mode="linear")  # noqa: E731
    torch.use_deterministic_algorithms(True)
    try:
        try:
            slopes = [torch.autograd.functional.jacobian(f, x) for x in xs]
        except RuntimeError:
            try:
                vmap(forall.jacrev(f))(xs)
            except RuntimeError:
                return
            raise AssertionError("the loop raises, vmap does not") from None
        assert_same(vmap(forall.jacrev(f))(xs), torch.stack(slopes))
    finally:
        torch.use_deterministic_algorithms(False)


def eight_bits(device: torch.device) -> None:
    """Products of float8, where this device has them."""
    if not hasattr(torch, "_scaled_mm"):
        raise Skipped("this torch has none")
    a = numbers(device, 3, 32, 32, dtype=torch.float32).to(torch.float8_e4m3fn)
    b = numbers(device, 32, 32, dtype=torch.float32).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    f = lambda x: torch._scaled_mm(x, b, one, one, out_dtype=torch.bfloat16)  # noqa: E731
    truth = truth_of(lambda: torch.stack([f(x) for x in a.unbind()]))
    assert_same(vmap(f)(a), truth)


OTHERS: dict[str, Callable] = {
    "TF32 switched between calls": tf32_between_calls,
    "precision of products between calls": precision_of_products,
    "deterministic algorithms": deterministic,
    "deterministic algorithms, where there is none": deterministic_or_an_error,
    "products of float8": eight_bits,
}
