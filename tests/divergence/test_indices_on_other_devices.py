"""Where examples diverge, the CPU knows which of them run: a device gets that once for each part.

Tensors of the meta device stand for those of an accelerator. What is copied there is counted.
"""

from __future__ import annotations

import pytest
import torch

import forall
from forall import vmap
from forall._compat import devices

pytestmark = pytest.mark.usefixtures("together")
CHOICES = torch.tensor([1.0, -1.0, 2.0, -3.0, 0.5])


@pytest.fixture
def together(monkeypatch):
    monkeypatch.setattr(forall.config, "strategy", "together")
    monkeypatch.setattr(forall.config, "replay", False)


@pytest.fixture
def copied(monkeypatch):
    """The sizes of the indices that were copied, in order."""
    found, original = [], devices._copy_async

    def noted(index, device):
        found.append((len(index), str(device)))
        return original(index, device)

    monkeypatch.setattr(devices, "_copy_async", noted)
    return found


def test_one_copy_for_each_part_however_many_tensors_and_steps(copied):
    def f(choice, x, y, z):
        if choice > 0:
            for _ in range(3):
                x, y = x.sin() + y, y * z
        else:
            x = x.cos() - z
        return x, y, z

    xs = torch.empty(3, 5, 2, device="meta").unbind()
    found = vmap(f)(CHOICES, *xs)
    assert [t.device.type for t in found] == ["meta"] * 3
    assert [t.shape for t in found] == [(5, 2)] * 3
    assert len(copied) <= 3  # who goes each way, and in which order they come back
    assert {device for _, device in copied} == {"meta"}


def test_one_copy_for_each_step_of_a_loop(copied):
    def f(n, x, y):
        while n > 0:
            n, x, y = n - 1, x.sin() + y, y.cos() * x
        return x, y

    xs, ys = torch.empty(2, 4, 3, device="meta").unbind()
    few = torch.tensor([1, 2, 3, 4])
    found = vmap(f)(few, xs, ys)
    assert [t.shape for t in found] == [(4, 3)] * 2
    assert sum(device == "meta" for _, device in copied) <= 2 * int(few.max())


def test_nothing_is_copied_for_tensors_of_the_cpu(copied):
    choices, xs = CHOICES.cpu(), torch.randn(5, 2, device="cpu")
    f = lambda choice, x: x.sin() if choice > 0 else x.cos()  # noqa: E731
    wanted = torch.stack([f(c, x) for c, x in zip(choices, xs, strict=True)])
    torch.testing.assert_close(vmap(f)(choices, xs), wanted)
    assert not copied


def test_an_index_is_copied_once_for_each_device():
    index = torch.arange(3)
    assert devices.copy_index_to(index, index.device) is index
    there = devices.copy_index_to(index, torch.device("meta"))
    assert there.device.type == "meta"
    assert devices.copy_index_to(index, torch.device("meta")) is there
