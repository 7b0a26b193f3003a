"""Numbers that lie on the CPU go with tensors of the device, as in the loop."""

import pytest
import torch

from device import fakedev
from forall import config, grad, hessian, jacfwd, jacrev, jvp, vmap

D = fakedev.NAME
torch.manual_seed(0)
XS = torch.randn(4, 3, device=D)
NUMBERS = torch.arange(1.0, 5.0, device="cpu")  # one for each example


def scaled(x, s):
    return (x * s).sin() / (s + 1)


CALLS = {
    "mul": torch.mul,
    "rsub": lambda x, s: s - x,
    "where": lambda x, s: torch.where(x > 0, x, s),
    "lerp": lambda x, s: torch.lerp(x, x * 2, s),
    "in place": lambda x, s: x.clone().add_(s),
    "a few": scaled,
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "addcmul": lambda x, s: torch.addcmul(x, x, s),
}


X = XS[0]
PUSHED = {
    "jacfwd": lambda f: jacfwd(f)(X),
    "vmap of jacfwd": lambda f: vmap(jacfwd(f))(XS),
    "hessian": lambda f: hessian(lambda x: f(x).square().sum())(X),
    "vmap of torch's jvp": lambda f: vmap(lambda x: torch.func.jvp(f, (x,), (X,))[1])(XS),
}


@pytest.mark.parametrize("name", PUSHED)
def test_what_does_not_move_adds_nothing_on_the_device(name):
    f = lambda x: x.sin() * 2 * torch.tensor([1.0, 2.0]).sum()  # noqa: E731
    wanted = PUSHED[name](lambda x: x.sin() * 6)
    found = PUSHED[name](f)
    assert found.device == X.device
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_mapped_numbers(name, replay, monkeypatch):
    monkeypatch.setattr(config, "replay", replay)
    monkeypatch.setattr(config, "patience", 0)
    f = CALLS[name]
    wanted = torch.stack([f(x, s) for x, s in zip(XS, NUMBERS, strict=True)])
    mapped = vmap(f)
    for _ in range(5):
        found = mapped(XS, NUMBERS)
        assert found.device == wanted.device
        torch.testing.assert_close(found, wanted)


OF_NUMBERS_ALONE = {
    "mul": lambda x: torch.mul(x.item(), 2),
    "add": lambda x: torch.add(x.item(), x.item()),
    "sub": lambda x: torch.sub(3, x.item()),
    "div": lambda x: torch.div(3, x.item()),
    "floor_divide": lambda x: torch.floor_divide(3, x.item()),
    "tensor": lambda x: torch.tensor(x.item()),
    "into a tensor of the device": lambda x: torch.mul(x.item(), 2, out=torch.empty((), device=D)),
    "beside a tensor of the device": lambda x: torch.mul(x.item(), 2) * x,
    "chosen by a tensor of the device": lambda x: torch.where(x > 2, x.item(), 2.0),
}


@pytest.mark.parametrize("default_device", [None, D])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", OF_NUMBERS_ALONE)
def test_numbers_alone_make_a_tensor_of_the_loops_device(name, replay, default_device, monkeypatch):
    monkeypatch.setattr(config, "replay", replay)
    monkeypatch.setattr(config, "patience", 0)
    torch.set_default_device(default_device)
    f, xs = OF_NUMBERS_ALONE[name], NUMBERS.to(D)
    wanted = torch.stack([f(x) for x in xs])
    mapped = vmap(f)
    for _ in range(5):
        found = mapped(xs)
        assert found.device == wanted.device
        torch.testing.assert_close(found, wanted)


PLACED = {
    "narrow": lambda x, i: x.narrow(0, i, 2),
    "narrow at a Python number": lambda x, i: x.narrow(0, int(i), 2),
    "slice": lambda x, i: x[i : i + 2],
    "slice at a Python number": lambda x, i: x[int(i) : int(i) + 2],
    "select": lambda x, i: x.select(0, i),
    "select at a Python number": lambda x, i: x.select(0, int(i)),
    "roll by a Python number": lambda x, i: x.roll(int(i)),
}


@pytest.mark.filterwarnings("error")  # a fall back to groups warns
@pytest.mark.parametrize("device", ["cpu", D])
@pytest.mark.parametrize("name", PLACED)
def test_places_of_examples(name, device, monkeypatch):
    monkeypatch.setattr(config, "strategy", "together")
    f, places = PLACED[name], torch.tensor([1, 0, -3, 1], device=device)
    wanted = torch.stack([f(x, i) for x, i in zip(XS, places, strict=True)])
    torch.testing.assert_close(vmap(f)(XS, places), wanted)


def test_a_stack_of_vectors_does_not_go_with_the_device():
    with pytest.raises(RuntimeError, match="same device"):
        vmap(torch.mul)(XS, torch.ones(4, 3))


def gradient(x, s):
    x, s = x.detach().requires_grad_(), s.detach().requires_grad_()
    return torch.autograd.grad(scaled(x, s).sum(), (x, s))


def test_gradients_of_mapped_numbers():
    found = vmap(grad(lambda x, s: scaled(x, s).sum(), argnums=(0, 1)))(XS, NUMBERS)
    rows = [gradient(x, s) for x, s in zip(XS, NUMBERS, strict=True)]
    for f, w in zip(found, zip(*rows, strict=True), strict=True):
        assert f.device == w[0].device
        torch.testing.assert_close(f, torch.stack(w))


def test_gradients_taken_outside():
    s = NUMBERS.clone().requires_grad_()
    vmap(scaled)(XS, s).sum().backward()
    rows = [gradient(x, n)[1] for x, n in zip(XS, NUMBERS, strict=True)]
    assert s.grad.device.type == "cpu"
    torch.testing.assert_close(s.grad, torch.stack(rows))


@pytest.mark.parametrize("transform", [jacfwd, jacrev, hessian])
def test_jacobians_in_a_number(transform):
    f = lambda s: (XS[0] * s).sin()  # noqa: E731
    f = (lambda s: (XS[0] * s).sin().sum()) if transform is hessian else f
    s = torch.tensor(0.7)
    moved = transform(f)(s.to(D))
    torch.testing.assert_close(transform(f)(s).cpu(), moved.cpu())


def test_tangents_of_a_number():
    s = torch.tensor(0.7)
    _, t = jvp(lambda s: (XS[0] * s).sin(), (s,), (torch.tensor(2.0),))
    torch.testing.assert_close(t, (XS[0] * s).cos() * XS[0] * 2)
