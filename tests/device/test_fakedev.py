"""The device itself: as the CPU in its numbers, as an accelerator in all else."""

import pytest
import torch
from torch import nn

from device import fakedev

D = fakedev.NAME


def on_device(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    other = type(module)(*module.given, **module.named).to(D)
    other.load_state_dict(module.state_dict())
    return other


def made(kind, *given, **named):
    torch.manual_seed(0)
    module = kind(*given, **named)
    module.given, module.named = given, named
    return module


MODULES = {
    "conv2d": (lambda: made(nn.Conv2d, 2, 4, 3, padding=1, groups=2), (2, 2, 5, 5)),
    "conv1d with a stride": (lambda: made(nn.Conv1d, 2, 3, 2, stride=2, bias=False), (2, 2, 6)),
    "conv_transpose2d": (lambda: made(nn.ConvTranspose2d, 2, 4, 3, groups=2), (2, 2, 5, 5)),
    "batch norm": (lambda: made(nn.BatchNorm1d, 4), (3, 4)),
    "layer norm": (lambda: made(nn.LayerNorm, 4), (3, 4)),
    "lstm": (lambda: made(nn.LSTM, 4, 5, num_layers=2), (3, 2, 4)),
    "gru": (lambda: made(nn.GRU, 4, 5, bias=False), (3, 2, 4)),
    "lstm cell": (lambda: made(nn.LSTMCell, 4, 5), (2, 4)),
    "gru cell": (lambda: made(nn.GRUCell, 4, 5), (2, 4)),
}


def first(result):
    return first(result[0]) if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_cpus_numbers(name):
    make, shape = MODULES[name]
    ours, theirs = make(), on_device(make())
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().to(D).requires_grad_()
    for module, given in ((ours, x), (theirs, y)):
        first(module(given)).square().sum().backward()
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad)
    for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(q.cpu(), p)


def test_running_statistics_are_written():
    norm = nn.BatchNorm1d(3).to(D)
    norm(torch.randn(4, 3, device=D))
    assert (norm.running_mean != 0).all()
    assert norm.num_batches_tracked == 1


def test_it_is_not_the_cpu():
    x = torch.ones(2, device=D)
    assert not x.is_cpu
    assert x.device == torch.device(D, 0)
    assert torch.ones(2, device=f"{D}:1").device.index == 1
    assert torch.accelerator.current_accelerator().type == D
    assert torch.accelerator.device_count() == 2


@pytest.mark.parametrize("other", ["cpu", f"{D}:1"])
@pytest.mark.parametrize("func", [torch.add, torch.mm, lambda a, b: torch.cat([a, b])])
def test_tensors_of_two_devices_do_not_mix(func, other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        func(torch.ones(2, 2, device=D), torch.ones(2, 2, device=other))


def test_a_number_of_the_cpu_goes_with_the_device():
    assert (torch.ones(2, device=D) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_memory_has_a_limit():
    with fakedev.limited(1000), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.ones(1000, device=D)
    assert torch.ones(1000, device=D).sum() == 1000


WAITS = {
    "item": lambda x: x.sum().item(),
    "nonzero": torch.nonzero,
    "a mask": lambda x: x[x > 1],
    "a write at a mask": lambda x: x.index_put_((x > 1,), torch.zeros(1, device=D).view(())),
    "a copy": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0] > 0),
    "unique": torch.unique,
}


@pytest.mark.parametrize("what", WAITS)
def test_waits_are_counted_and_can_be_forbidden(what):
    x = torch.arange(4.0, device=D)
    before = fakedev.waits()
    WAITS[what](x)
    assert fakedev.waits() > before
    with fakedev.no_waits(), pytest.raises(RuntimeError, match="the host waits for the device"):
        WAITS[what](x)


def test_what_stays_on_the_device_does_not_wait():
    with fakedev.no_waits():
        x = torch.randn(4, 4, device=D, requires_grad=True)
        (x @ x).sum().backward()
        x.detach()[1:].t().add_(1)
        x.detach()[torch.arange(2, device=D)]


def test_copies_from_the_host_are_counted():
    before = fakedev.sent()
    torch.ones(2).to(D)
    assert fakedev.sent() == before + 1


def test_draws_take_from_its_own_generators():
    torch.manual_seed(0)
    host = torch.get_rng_state()
    a = torch.rand(3, device=D), torch.nn.functional.dropout(torch.ones(3, device=D))
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(0)
    b = torch.rand(3, device=D), torch.nn.functional.dropout(torch.ones(3, device=D))
    assert all(map(torch.equal, a, b))
    assert torch.rand(3, device=f"{D}:1").tolist() == a[0].tolist()


def test_lazy_conjugates_are_resolved():
    z = torch.randn(2, 2, dtype=torch.complex64)
    assert torch.equal((z.to(D).conj() @ z.to(D)).cpu(), z.conj() @ z)
    assert torch.equal(z.to(D).conj().cpu(), z.conj())
    assert torch.equal(z.to(D).conj().imag.cpu(), z.conj().imag)


def test_results_may_take_another_shape():
    out = torch.empty(0, device=D)
    torch.add(torch.ones(2, device=D), 1, out=out)
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["add_", "logical_and_", "atan2_"])
def test_a_written_argument_that_is_read_keeps_its_shape(name):
    x = torch.ones((), device=D)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        getattr(x, name)(torch.ones(2, 3, device=D))


def test_views_share_memory():
    x = torch.arange(6.0, device=D)
    x.view(2, 3)[1].mul_(10)
    x.unfold(0, 2, 4)[0].zero_()
    torch.as_strided(x, (1,), (1,), 2).fill_(7)
    assert x.tolist() == [0.0, 0.0, 7.0, 30.0, 40.0, 50.0]


def test_products_are_cast_by_autocast():
    x = torch.ones(2, 2, device=D)
    with torch.autocast(D, dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
