"""`vjp` of a function whose calls are replayed: whatever is asked of the pull-back."""

import pytest
import torch

import forall
from forall import grad, jacrev, jvp, vjp, vmap
from forall._jit.cache.differentiable_entry import Derivative

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(0.1, 1, 12, dtype=D).reshape(4, 3)
W = torch.linspace(1, 2, 3, dtype=D)
C = torch.linspace(-1, 1, 3, dtype=D)


@pytest.fixture
def served(monkeypatch):
    """Whether each backward pass was the recorded one."""
    told, real = [], Derivative.serves_backward

    def noted(self, *given):
        told.append(real(self, *given))
        return told[-1]

    monkeypatch.setattr(Derivative, "serves_backward", noted)
    return told


def made():
    def f(x):
        return (x * W).sin().exp() * x.sum()

    return f


def pairs(f, use, calls=6):
    """What ``use`` finds of replayed calls, and of the same without."""
    for i in range(calls):
        found = use(f, X[0] + i)
        forall.config.replay = False
        wanted = use(f, X[0] + i)
        forall.config.replay = True
        yield found, wanted


def alike(f, use):
    for found, wanted in pairs(f, use):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_pull_back_is_the_recorded_one(served):
    alike(made(), lambda f, x: vjp(f, x)[1](C))
    assert served
    assert all(served)


def test_it_may_be_asked_again_and_again(served):
    def use(f, x):
        y, pull = vjp(f, x)
        return y, pull(C), pull(2 * C), pull(C, retain_graph=False)

    alike(made(), use)
    assert any(served)


def test_memory_that_is_freed_is_gone():
    f = made()
    for i in range(5):
        _, pull = vjp(f, X[0] + i)
        pull(C, retain_graph=False)
        with pytest.raises(RuntimeError, match="second time"):
            pull(C)


@pytest.mark.parametrize(
    "use",
    [
        lambda f, x: vmap(vjp(f, x)[1])(torch.eye(3, dtype=D)),
        lambda f, x: vmap(vmap(vjp(f, x)[1]))(torch.eye(9, dtype=D).reshape(3, 9, 3)[:, :4]),
        lambda f, x: jvp(lambda c: vjp(f, x)[1](c)[0], (C,), (2 * C,)),
        lambda f, x: jacrev(lambda c: vjp(f, x)[1](c)[0])(C),
        lambda f, x: grad(lambda c: vjp(f, x)[1](c)[0].square().sum())(C),
        lambda f, x: vmap(lambda x: vjp(f, x)[1](C)[0])(torch.stack([x, 2 * x])),
        lambda f, x: grad(lambda x: vjp(f, x)[1](C)[0].sum())(x),
        lambda f, x: vjp(lambda x: vjp(f, x)[1](C)[0], x)[1](C),
    ],
)
def test_transforms_of_it(use):
    alike(made(), use)


def test_a_pull_back_with_history():
    def use(f, x):
        x, c = x.clone().requires_grad_(), C.clone().requires_grad_()
        y, pull = vjp(f, x)
        (g,) = pull(c)
        return y.detach(), g.detach(), *torch.autograd.grad((y.sum() + g.square().sum()), (x, c))

    alike(made(), use)


def test_captured_tensors_that_require_grad():
    w = torch.linspace(1, 2, 3, dtype=D).requires_grad_()

    def use(f, x):
        y, pull = vjp(f, x)
        (g,) = pull(C)
        assert y.requires_grad
        assert g.requires_grad
        return y.detach(), g.detach(), *torch.autograd.grad(y.sum() + g.square().sum(), w)

    alike(lambda x: (x * w).sin(), use)


def test_results_have_no_history_that_nobody_asked_for():
    for found, wanted in pairs(made(), lambda f, x: (*vjp(f, x)[1](C), vjp(f, x)[0])):
        assert [t.requires_grad for t in found] == [t.requires_grad for t in wanted]
        assert not any(t.requires_grad for t in found)


def test_a_result_besides(served):
    def f(x):
        y = (x * W).sin()
        return {"y": y, "z": x.sum()}, y * 2

    def use(f, x):
        y, pull, aux = vjp(f, x, has_aux=True)
        return y, aux, pull({"y": C, "z": C[0]})

    alike(f, use)


@pytest.mark.parametrize("on", [True, False])
def test_primals_that_are_written_to_are_an_error_as_ever(on):
    forall.config.replay = on
    f = lambda x: x.sin()  # noqa: E731 - its pull-back reads x
    for i in range(6):
        x = X[0] + i
        _, pull = vjp(f, x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            pull(C)


def test_a_function_that_is_not_pure_runs_each_time():
    told = []

    def f(x):
        print(end="")
        told.append(1)
        return x.sin()

    for _ in range(6):
        vjp(f, X[0])[1](C)
    assert len(told) == 6
