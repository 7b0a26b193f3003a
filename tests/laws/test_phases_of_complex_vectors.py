"""A loss of the phase of complex vectors is torch's error, under each transform and in each call.

Torch's backwards look at the numbers of plain tensors; under a mode or a level they look at none.
"""

import pytest
import torch

from draws import make_generator
from forall import config, grad, jacrev, jit, jvp, vjp, vmap

Z = torch.complex128
A = torch.randn(4, 3, 3, dtype=Z, generator=make_generator(0))
W = torch.arange(9, dtype=torch.float64).view(3, 3).sin()


def hermitian(a):
    return a + a.mH


VECTORS = {
    "eigh": lambda a: torch.linalg.eigh(hermitian(a))[1],
    "eig": lambda a: torch.linalg.eig(a)[1],
    "eig of a real matrix": lambda a: torch.linalg.eig(a.real)[1],
    "left singular vectors": lambda a: torch.linalg.svd(a)[0],
    "right singular vectors": lambda a: torch.linalg.svd(a[:2])[2],
    "svd of a wide matrix": lambda a: torch.linalg.svd(a[:2], full_matrices=False)[2],
    "torch.svd": lambda a: torch.svd(a)[2],
}
LOSSES = {
    "of the phase": lambda v: (v * W[: v.shape[0]]).real.sum(),
    "of a phase alone": lambda v: v[0, 0].angle(),
    "of no phase": lambda v: (v.abs().square() * W[: v.shape[0]]).sum(),
    "of hardly any phase": lambda v: (v.abs().square() * W).sum() + 1e-4 * v.real.sum(),
}
WAYS = {
    "grad": lambda f, xs: torch.stack([grad(f)(x) for x in xs]),
    "vjp": lambda f, xs: torch.stack([vjp(f, x)[1](W[0, 1].reshape(()))[0] for x in xs]) / W[0, 1],
    "jacrev": lambda f, xs: torch.stack([by_parts(f)(x) for x in xs]),
    "vmap": lambda f, xs: vmap(grad(f))(xs),
    "vmap of two": lambda f, xs: vmap(vmap(grad(f)))(xs.reshape(2, 2, *xs.shape[1:])).flatten(0, 1),
    "outside vmap": lambda f, xs: grad(lambda xs: vmap(f)(xs).sum())(xs),
    "autograd in vmap": lambda f, xs: vmap(by_autograd(f))(xs),
    "backward of vmap": lambda f, xs: by_autograd(lambda xs: vmap(f)(xs).sum())(xs),
    "jit": lambda f, xs: torch.stack([jit(grad(f))(x) for x in xs]),
    "jit of vmap": lambda f, xs: jit(vmap(grad(f)))(xs),
    "autograd in jit": lambda f, xs: jit(vmap(by_autograd(f)))(xs),
    "where it moves": lambda f, xs: jvp(vmap(grad(f)), (xs,), (xs,))[0],
}


def by_autograd(f):
    def slope(x):
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return slope


def by_parts(f):
    def slope(x):
        rows = jacrev(lambda p: f(torch.view_as_complex(p)))(torch.view_as_real(x))
        return torch.view_as_complex(rows)

    return slope


def outcome(f):
    try:
        return f()
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:jit")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", VECTORS)
def test_value_or_error_is_the_loops(name, loss):
    vectors, weigh = VECTORS[name], LOSSES[loss]
    if loss == "of hardly any phase" and name.startswith(("right", "svd")):
        pytest.skip("of other shapes")

    def f(a):
        return weigh(vectors(a))

    truth = outcome(lambda: torch.stack([by_autograd(f)(a) for a in A]))
    assert isinstance(truth, type) is (loss in {"of the phase", "of a phase alone"})
    for way, found in WAYS.items():
        found = outcome(lambda found=found: found(f, A))
        if isinstance(truth, type) or isinstance(found, type):
            assert found is truth, way
        else:
            torch.testing.assert_close(found, truth, msg=lambda m, way=way: f"{way}: {m}")


def test_one_example_that_depends_on_it_is_enough():
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)

    def f(a, w):
        v = VECTORS["eigh"](a)
        return (v.abs().square() * W).sum() + w * v.real.sum()

    mapped = vmap(grad(f))
    torch.testing.assert_close(
        mapped(A, 0 * weights), torch.stack([grad(f)(a, 0 * a[0, 0].real) for a in A])
    )
    with pytest.raises(RuntimeError, match="ill-defined"):
        mapped(A, weights)


@pytest.mark.counted
@pytest.mark.parametrize("transform", [lambda f: vmap(grad(f)), lambda f: jit(vmap(grad(f)))])
def test_a_call_of_many_raises_as_the_first(transform, monkeypatch):
    monkeypatch.setattr(config, "patience", 0)

    def f(a, w):
        v = VECTORS["eigh"](a)
        return (v.abs().square() * W).sum() + w * v.real.sum()

    found = transform(f)
    none, some = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    truth = found(A, none)
    for _ in range(40):
        torch.testing.assert_close(found(A, none), truth)
    with pytest.raises(RuntimeError, match="ill-defined"):
        found(A, some)
    torch.testing.assert_close(found(A, none), truth)
