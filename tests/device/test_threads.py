"""Autograd runs the nodes of a device in a thread of its own, where thread-local state is empty."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from device import fakedev
from forall import grad, hessian, jacrev, jit, vmap
from gpu.threads import Cubed, Exponential

D = fakedev.NAME


def numbers(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def rows(f, x):
    x = x.requires_grad_()
    return torch.stack([torch.autograd.grad(f(x)[i], x, create_graph=True)[0] for i in range(3)])


def leaf(device):
    return numbers(3).flip(0).to(device).requires_grad_()


def within_jacrev(device, jac):
    """The gradient that a Jacobian of a custom Function leaves on what it captures."""
    w = leaf(device)
    jac(lambda x: Cubed.apply(x * w), numbers(3).to(device)).sum().backward()
    return w.grad


def test_a_function_called_in_the_backward_of_another():
    wanted = within_jacrev("cpu", rows)
    found = within_jacrev(D, lambda f, x: jacrev(f)(x))
    torch.testing.assert_close(found.cpu(), wanted)


def asked_outside(device, mapped):
    """The gradient is taken outside, through a level that has ended."""
    w = leaf(device)
    f = lambda x: Cubed.apply(x * w).sum()  # noqa: E731
    xs = numbers(4, 3).to(device)
    ys = vmap(f)(xs) if mapped else torch.stack([f(x) for x in xs])
    ys.square().sum().backward()
    return w.grad


def through_a_checkpoint(device, mapped):
    w = leaf(device)

    def f(x):
        return checkpoint(lambda x: (x * w).sin() * w, x, use_reentrant=False).sum()

    xs = numbers(4, 3).to(device)
    ys = vmap(f)(xs) if mapped else torch.stack([f(x) for x in xs])
    ys.square().sum().backward()
    return w.grad


def second_derivatives(device, mapped):
    w = leaf(device)
    xs = numbers(4, 3).to(device)

    def norm(x):
        x = x if mapped else x.detach().requires_grad_()
        y = Exponential.apply(x * w).sum()
        g = (
            grad(lambda x: Exponential.apply(x * w).sum())(x)
            if mapped
            else torch.autograd.grad(y, x, create_graph=True)[0]
        )
        return g.square().sum()

    total = vmap(norm)(xs).sum() if mapped else torch.stack([norm(x) for x in xs]).sum()
    total.backward()
    return w.grad


def with_hooks(device, mapped):
    w = leaf(device)

    def f(x):
        y = x * w
        y.register_hook(lambda g: g * x.cos())
        return y.sin().sum()

    xs = numbers(4, 3).to(device)
    ys = vmap(f)(xs) if mapped else torch.stack([f(x) for x in xs])
    ys.sum().backward()
    return w.grad


def inside(device, mapped):
    """A backward pass within the function."""
    w = numbers(3).flip(0).to(device)

    def f(x):
        v = x.clone().requires_grad_()
        Cubed.apply(v * w).sum().backward()
        return v.grad * x

    xs = numbers(4, 3).to(device)
    return vmap(f)(xs) if mapped else torch.stack([f(x) for x in xs])


PROGRAMS = [asked_outside, through_a_checkpoint, second_derivatives, with_hooks, inside]


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_the_loop(program):
    wanted = program("cpu", mapped=False)
    torch.testing.assert_close(program(D, mapped=False).cpu(), wanted)  # torch alone
    torch.testing.assert_close(program(D, mapped=True).cpu(), wanted)


def test_hessian_of_functions():
    f = lambda x: Cubed.apply(x * x).sum()  # noqa: E731
    x = numbers(3)
    torch.testing.assert_close(hessian(f)(x.to(D)).cpu(), hessian(f)(x))
    torch.testing.assert_close(jit(hessian(f))(x.to(D)).cpu(), hessian(f)(x))


def test_passes_of_a_transform_stay_in_its_thread():
    seen = []

    def f(x):
        y = x * 2
        y.register_hook(lambda _: seen.append(threading.get_ident()))
        return y.sum()

    grad(f)(numbers(3).to(D))
    vmap(grad(f))(numbers(4, 3).to(D))
    w = leaf(D)
    vmap(lambda x: f(x * w))(numbers(4, 3).to(D)).sum().backward()
    assert set(seen) == {threading.get_ident()}


def test_threads_are_on_again_afterwards():
    grad(lambda x: Cubed.apply(x).sum())(numbers(3).to(D))
    asked_outside(D, mapped=True)
    with pytest.raises(RuntimeError, match="one hook failed"):
        grad(failing)(numbers(3).to(D))
    assert torch._C._is_multithreading_enabled()


def failing(x):
    def hook(_):
        raise RuntimeError("one hook failed")

    y = x * 2
    y.register_hook(hook)
    return y.sum()


ALONE = """
import os
import threading
import torch
from device import fakedev
fakedev.load()
import forall
seen = []
def passed():
    x = torch.ones(2, device="fakedev", requires_grad=True)
    x.register_hook(lambda _: seen.append(threading.get_ident() == threading.main_thread().ident))
    (x * 2).sum().backward()
passed()
forall.grad(torch.sum)(torch.ones(2))
passed()
assert seen == [False, True], seen
os._exit(0)  # a thread of the device that still wants the GIL at exit ends the process, as on CUDA
"""


def test_passes_of_torch_keep_the_devices_threads_until_a_transform_is_called():
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
