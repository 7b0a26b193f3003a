"""The default device is a part of a call's kind, and costs neither `jit` nor replay their programs.

``torch.set_default_device`` and ``with torch.device(...)`` say where new tensors lie. Each test
compares with the loop over the examples, on the CPU and on the meta device.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

import forall
from forall import grad, hessian, jacfwd, jit, jvp, vmap
from forall._compat.devices import (
    count_function_modes,
    find_default_device,
    override_default_device,
)
from forall.random import key, normal

pytestmark = pytest.mark.usefixtures("at_once")
CPU, META = torch.device("cpu"), torch.device("meta")
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]])


@contextmanager
def set_as_default(device):
    before = find_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(before)


SET = {"with torch.device": torch.device, "set_default_device": set_as_default}


def of_a_new_tensor(x):
    return torch.arange(3.0), x.sin() + torch.ones((), device=x.device)


def of_numbers(x):
    return torch.tensor([1.0, 2.0]), torch.full((2,), 3), torch.as_tensor(0.5), x


def squared(x):
    return (x.sin() * torch.full((3,), 2.0, device=x.device)).square().sum()


CALLS = {
    "vmap": lambda: vmap(of_a_new_tensor),
    "numbers": lambda: vmap(of_numbers),
    "vmap of grad": lambda: vmap(grad(squared)),
    "hessian": lambda: vmap(hessian(squared)),
    "jvp": lambda: lambda x: jvp(of_a_new_tensor, (x,), (x.cos(),)),
    "jacfwd": lambda: vmap(jacfwd(squared)),
}


# A tensor that is made of numbers on the meta device is not recorded, whoever names that device.
DEVICES = {"numbers": ["cpu"]}


def looped(name, x):
    """The same call where nothing is recorded."""
    forall.config.replay = False
    try:
        return CALLS[name]()(x)
    finally:
        forall.config.replay = True


def as_tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def leaves(tree):
    return list(torch.utils._pytree.tree_leaves(tree))


def assert_same(found, wanted):
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        assert a.device == b.device
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.device == CPU:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", SET)
@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_does_not_keep_from_replay(name, how, hits):
    f = CALLS[name]()
    for device in DEVICES.get(name, ["cpu", "meta"]):
        with SET[how](device):
            wanted = looped(name, X)
            before = len(hits)
            for _ in range(8):
                assert_same(f(X), wanted)
            assert len(hits) > before
    assert_same(f(X), looped(name, X))


@pytest.mark.parametrize("how", SET)
@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_does_not_keep_from_jit(name, how):
    f = jit(CALLS[name]())
    devices = DEVICES.get(name, ["cpu", "meta"])
    for device in devices:
        with SET[how](device):
            for _ in range(3):
                assert_same(f(X), looped(name, X))
    assert f.cache_info()[:2] == (2 * len(devices), len(devices))
    assert f"under default device {devices[-1]}" in f.kinds()[-1].arguments


def test_each_call_finds_the_default_device_that_is_set_now():
    f, g = jit(vmap(of_a_new_tensor)), vmap(of_a_new_tensor)
    contexts = [
        lambda: nullcontext(),
        lambda: torch.device("meta"),
        lambda: torch.device("cpu"),
        lambda: set_as_default("meta"),
    ]
    for _ in range(3):
        for made in contexts:
            with made():
                wanted = torch.arange(3.0).device
                for call in (f, g):
                    new, y = call(X)
                    assert new.device == wanted
                    assert y.equal(X.sin() + 1)
    with torch.device("meta"):
        assert f(X)[0].device == META
        with torch.device("cpu"):
            assert f(X)[0].device == g(X)[0].device == CPU
            with torch.device("meta"):
                assert f(X)[0].device == g(X)[0].device == META
            assert f(X)[0].device == g(X)[0].device == CPU
        assert f(X)[0].device == g(X)[0].device == META
    assert f(X)[0].device == g(X)[0].device == CPU
    assert f.cache_info().misses == 3


def test_a_function_may_set_a_default_device_of_its_own():
    def f(x):
        with torch.device("meta"):
            inside = torch.ones(2)
        return inside, torch.ones(2), x

    call = jit(vmap(f))
    for _ in range(3):
        assert [t.device for t in call(X)] == [t.device for t in vmap(f)(X)] == [META, CPU, CPU]
    with torch.device("meta"), torch.device("cpu"):
        for _ in range(3):
            assert [t.device for t in call(X)] == [META, CPU, CPU]


def test_a_function_that_sets_the_default_device_for_good_is_not_replayed():
    def f(x):
        torch.set_default_device("meta" if torch.get_default_device() == CPU else "cpu")
        return x * 2

    call = vmap(f)
    try:
        for n in range(6):
            assert call(X).equal(X * 2)
            assert find_default_device() == (META if n % 2 == 0 else CPU)
    finally:
        torch.set_default_device(None)


# Results, some of them of Python numbers, of examples that diverge.
PARTED = {
    "constants": lambda x: (of_numbers(x), x.sin() if x > 0 else x.cos()),
    "numbers": lambda x: 1.0 if x > 0 else 2.0,
    "item": lambda x: x.item(),
    "whole numbers": lambda x: int(x) + 1 if x > 0 else 7,
    "numbers of some": lambda x: (x.item() if x > 0 else 0.5, x),
    "new tensors": lambda x: torch.ones(2) if x > 0 else torch.zeros(2),
    "a tensor of a number": lambda x: torch.tensor(x.item()),
    "tensors of numbers": lambda x: torch.tensor([x.item(), 1.0]),
    "full": lambda x: torch.full((2,), x.item()),
    "scalar tensor": lambda x: torch.scalar_tensor(x.item()),
    "as_tensor": lambda x: torch.as_tensor([x.item()]),
    "a list of tensors": lambda x: torch.tensor([x, x]) if x.device == CPU else x,
    "linspace": lambda x: torch.linspace(0.0, x.item(), 3),
    "arange": lambda x: torch.arange(3) * (1 if x > 0 else 2),
    "bool": lambda x: bool(x > 0),
    "a sum of numbers": lambda x: x + (x.item() if x > 0 else 3),
}


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("name", PARTED)
@pytest.mark.parametrize("replay", [True, False])
def test_results_of_examples_that_part_lie_where_the_loop_puts_them(
    name, device, replay, monkeypatch
):
    f, xs = PARTED[name], torch.tensor([0.5, -1.0, 2.0, -0.25])
    monkeypatch.setattr(forall.config, "replay", replay)
    monkeypatch.setattr(forall.config, "strategy", "together")
    with nullcontext() if device is None else torch.device(device):
        each = [leaves(f(x)) for x in xs]
        wanted = [torch.stack([*map(as_tensor, column)]) for column in zip(*each, strict=True)]
        for _ in range(3):
            assert_same(vmap(f)(xs), wanted)


def test_draws_lie_on_the_default_device():
    def f(x):
        return torch.randn(2), x

    with torch.device("meta"):
        for call in (vmap(f, randomness="different"), jit(vmap(f, randomness="same"))):
            for _ in range(3):
                assert call(X)[0].device == META
    numbers = vmap(lambda k: normal(k, (3,)))
    k = torch.stack([key(0), key(1)])
    wanted = numbers(k)
    with torch.device("meta"):
        for _ in range(3):
            assert numbers(k).equal(wanted)


def test_backward_passes_of_recorded_calls_do_not_mind_the_default_device():
    w = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)

    def f(x):
        return (x * w + torch.ones(3, device="cpu")).sin().sum()

    for call in (vmap(f), jit(vmap(f))):
        for made in (nullcontext, lambda: torch.device("meta"), lambda: torch.device("cpu")):
            for after in (nullcontext, lambda: torch.device("meta")):
                for _ in range(3):
                    with made():
                        y = call(X).sum()
                    with after():
                        (g,) = torch.autograd.grad(y, w, create_graph=True)
                        (h,) = torch.autograd.grad(g.sum(), w)
                    inside = X * w + 1
                    torch.testing.assert_close(g, (X * inside.cos()).sum(0))
                    torch.testing.assert_close(h, -(X * X * inside.sin()).sum(0))


def test_the_default_device_is_no_mode_that_anyone_asks_for():
    assert (count_function_modes(), find_default_device()) == (0, None)
    with torch.device("meta"):
        assert (count_function_modes(), find_default_device()) == (0, META)
        with override_default_device(None):
            assert (count_function_modes(), find_default_device()) == (0, None)
            assert torch.ones(1).device == CPU
        with torch.overrides.BaseTorchFunctionMode(), override_default_device(None):
            assert (count_function_modes(), find_default_device()) == (1, None)
        assert find_default_device() == META
        with override_default_device(CPU):
            assert torch.ones(1).device == CPU
        assert torch.ones(1).device == META
    assert (count_function_modes(), find_default_device()) == (0, None)


@pytest.mark.parametrize("replay", [True, "check"])
def test_tensors_without_numbers_are_replayed(replay, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", replay)
    monkeypatch.setattr(forall.config, "patience", 0.0)
    x = torch.ones(3, 4, device="meta")
    mapped = vmap(grad(lambda x: x.sin().sum()))
    for _ in range(6):
        found = mapped(x)
        assert found.is_meta
        assert found.shape == (3, 4)
