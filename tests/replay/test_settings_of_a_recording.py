"""Calls are made under settings that have ended when a derivative is taken: as if not replayed.

A backward pass finds what torch saved under the call's settings, and runs under its own. Where a
recorded call has to be made once more for it, that is under the settings of the call again.
All settings, calls and passes with each other are tried with FORALL_SETTINGS=1.
"""

import itertools
import os
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import forall
from forall import grad, jit, jvp, vmap
from forall._compat.ambient_settings import SETTINGS, apply_settings, read_settings
from forall._jit.cache.eager_derivative import RecordedCall

pytestmark = [
    pytest.mark.usefixtures("at_once"),
    pytest.mark.filterwarnings("ignore:Please use the new API settings"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
]
BF16, F64 = torch.bfloat16, torch.float64


@contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype():
    return setting(torch.get_default_dtype, torch.set_default_dtype, F64)


def determinism(**how):
    return setting(
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on, **(how if on else {})),
        True,
    )


@contextmanager
def precision(value):
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:  # it sets two others, and these to another value than they had
        torch.set_float32_matmul_precision("highest")
        for of in (torch.backends.cuda, torch.backends.mkldnn):
            of.matmul.fp32_precision = "none"


def fastpath():
    return setting(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    )


@contextmanager
def several():
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", BF16), default_dtype():
        yield


UNDER = {
    "nothing": nullcontext,
    "one kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "several kernels of attention": lambda: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True
    ),
    "autocast": lambda: torch.autocast("cpu", BF16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": default_dtype,
    "determinism": determinism,
    "determinism that warns": lambda: determinism(warn_only=True),
    "high precision": lambda: precision("high"),
    "medium precision": lambda: precision("medium"),
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "no cudnn": lambda: torch.backends.cudnn.flags(enabled=False, deterministic=True),
    "no fast path": fastpath,
    "anomaly mode": torch.autograd.detect_anomaly,
    "grad mode": torch.enable_grad,
    "several": several,
}


_HALVES = [UNDER["autocast"], UNDER["autocast to half"], UNDER["several"]]


class Net(nn.Module):
    """Meets what settings have a say in: attention, products, new tensors, a region of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        q = self.norm(self.inner(x)[None, None])
        y = F.scaled_dot_product_attention(q, q.cos(), q.sin())[0, 0]
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ self.inner.weight
        return z.sin() * torch.full((4,), 1 / 3) + y


class Double(torch.autograd.Function):
    """A product whose way back is another one, of tensors that no autocast has seen."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.float() @ w.mT.float(), x.mT.float() @ g.float()


def summed(y):
    return sum(t.square().sum() for t in y) if isinstance(y, tuple) else y.square().sum()


# Calls of the net, and a scalar whose gradient in its parameters is taken when the block has ended.
CALLS = {
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x.sin()])),
    "grad": lambda f, x: grad(lambda x: f(x).float().square().sum())(x),
    "jit": lambda f, x: jit(f)(x),
    "jit of vmap": lambda f, x: jit(vmap(f))(torch.stack([x, x.sin()])),
    "vmap of jvp": lambda f, x: vmap(lambda x: jvp(f, (x,), (x.cos(),)))(torch.stack([x, x.sin()])),
}


def gradients(end, params, **how):
    return torch.autograd.grad(end, params, allow_unused=True, **how)


def twice(y, params):
    first = gradients(summed(y), params, create_graph=True)
    return gradients(summed(tuple(g for g in first if g is not None)), params)


def of_each(y, params):
    y = y[0] if isinstance(y, tuple) else y
    ones = torch.eye(y.numel(), dtype=y.dtype)[:3].reshape(3, *y.shape)
    return torch.autograd.grad(y, params, ones, is_grads_batched=True, allow_unused=True)


# What is asked of the result after the block.
ASKED = {
    "backward": lambda y, params: gradients(summed(y), params),
    "backward of some results": lambda y, params: gradients(
        (y[0] - y[1].detach()).square().sum() if isinstance(y, tuple) else y.sum(), params
    ),
    "backward of a backward": twice,
    "many cotangents": of_each,
}


def made(kind):
    torch.manual_seed(0)
    return kind()


def trained(f, params, call, asked, under, after=nullcontext, calls=6):
    """The gradients of some calls, each made under a setting and pulled back after it."""
    found = []
    for i in range(calls):
        x = torch.linspace(-1, 1, 12).reshape(3, 4) + i
        with under():
            y = call(f, x)
        with after():
            try:
                found.append(asked(y, params))
            except (RuntimeError, NotImplementedError) as error:  # of a kernel without a derivative
                found.append(type(error).__name__)
    return found


def check(f, params, call, asked, under, after=nullcontext):
    found = trained(f, params, call, asked, under, after)
    forall.config.replay = False
    wanted = trained(f, params, call, asked, under, after)
    forall.config.replay = True
    assert any(not isinstance(w, str) for w in wanted) or asked is not ASKED["backward"]
    # A second derivative meets what it adds up in another order, in numbers of few bits.
    halves = asked is twice and call is not CALLS["jit"] and under in _HALVES
    assert_same(found, wanted, 0.03 if halves else 1e-5)


def assert_same(found, wanted, room=1e-5):
    """Gradients are close, relative to the greatest of a tensor; an error is the same one.

    Where a transform of torch's runs through a call, only one that is replayed has an answer.
    """
    for each, other in zip(found, wanted, strict=True):
        if isinstance(each, str) or isinstance(other, str):
            assert other == "NotImplementedError" or (isinstance(each, str) and each == other)
            continue
        for a, b in zip(each, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=0, atol=room * b.abs().max().item())


ALL = [*itertools.product(UNDER, CALLS, ASKED)]
FEW = [(u, "jvp", "backward of some results") for u in UNDER]
FEW += random.Random(0).sample(ALL, 32)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("under", "call", "asked"), ALL if os.environ.get("FORALL_SETTINGS") else FEW
)
def test_derivative_after_the_block_is_that_of_a_call_as_it_is(under, call, asked):
    net = made(Net)
    before = read_settings()
    check(net, [*net.parameters()], CALLS[call], ASKED[asked], UNDER[under])
    assert read_settings() == before


@pytest.mark.parametrize("asked", ["backward", "backward of a backward"])
@pytest.mark.parametrize("after", ["autocast", "default dtype", "one kernel of attention"])
@pytest.mark.parametrize("under", ["nothing", "autocast", "autocast to half"])
def test_derivative_within_another_block_is_that_of_a_call_as_it_is(under, after, asked):
    net = made(Net)
    check(net, [*net.parameters()], CALLS["vmap"], ASKED[asked], UNDER[under], UNDER[after])


@pytest.mark.parametrize("after", ["nothing", "autocast"])
@pytest.mark.parametrize("under", ["nothing", "autocast"])
def test_backward_pass_of_a_custom_function_is_cast_by_what_is_on_in_it(under, after):
    w = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
    call = jit(lambda x: Double.apply(x, w).sin())
    plain = lambda x: Double.apply(x, w).sin()  # noqa: E731
    found, wanted = (
        trained(f, [w], lambda f, x: f(x), ASKED["backward"], UNDER[under], UNDER[after])
        for f in (call, plain)
    )
    assert_same(found, wanted)


def test_call_that_is_made_once_more_finds_each_setting_as_it_was(monkeypatch):
    found, real = [], RecordedCall._rerun_function

    def noted(self, *args):
        with apply_settings(self.recorded.derivative.rerun.settings):
            found.append(read_settings())
        return real(self, *args)

    monkeypatch.setattr(RecordedCall, "_rerun_function", noted)
    net = made(Net)
    with several():
        wanted = read_settings()
    check(net, [*net.parameters()], CALLS["jvp"], ASKED["backward of a backward"], several)
    assert found
    assert all(f == wanted for f in found)
    assert read_settings() != wanted


def other(kind, value):
    named = {
        "autocast": (("cpu", BF16),),
        "default dtype": F64,
        "default device": torch.device("meta"),
        "determinism": (True, True),
        "precision of float32": ("medium", *value[1:]) if isinstance(value, tuple) else None,
    }
    if kind.name in named:
        return named[kind.name]
    return value[::-1] if isinstance(value, (tuple, list)) else not value


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.name)
def test_setting_is_put_back_to_what_was_told_and_then_to_what_it_was(kind):
    before = read_settings()
    told = before
    try:
        with kind.under(other(kind, kind.get())):
            told = read_settings()
    except RuntimeError as error:
        assert "not supported by the CPU" in str(error)  # noqa: PT017 - of one kind of CPU
    assert read_settings() == before
    with apply_settings(told):
        assert read_settings() == told
        with apply_settings(before):
            assert read_settings() == before
        assert read_settings() == told
    assert read_settings() == before


@pytest.mark.parametrize("value", ["high", "medium"])
def test_precision_is_put_back_whatever_it_was_set_by(value):
    before = read_settings()
    with precision(value):
        told = read_settings()
        torch._C._set_fp32_precision_setter("generic", "all", "tf32")
        both = read_settings()
        with apply_settings(before):
            assert read_settings() == before
        assert read_settings() == both
        torch._C._set_fp32_precision_setter("generic", "all", "none")
    for values in (told, both, before):
        with apply_settings(values):
            found = read_settings()
            assert found == values or values is both  # of which torch tells no older name
