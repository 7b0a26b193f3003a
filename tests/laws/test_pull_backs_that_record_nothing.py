"""Many cotangents pulled back at once in a pass that records nothing, as `torch.autograd.grad`."""

import pytest
import torch

from forall import grad, vmap
from forall._autodiff.standard_basis import make_basis_rows
from forall._compat.symbolic_diagonal import find_diagonal
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.dispatch import run_vmap_level
from forall._vmap.vmap_level import CotangentLevel

D = torch.float64
X = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4)
W = torch.linspace(0.2, 1, 12, dtype=D).reshape(4, 3)


class Written(torch.autograd.Function):
    """It writes into what it is given, or has saved, where it is pulled back."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        found = g * x.cos()
        if ctx.where == "cotangent":
            g.mul_(2)
        elif ctx.where == "saved":
            x.mul_(1.0)
        elif ctx.where == "result":
            found.mul_(2)
            found[..., 0] = 1.0
        return found, None


class Differentiating(torch.autograd.Function):
    """Its backward takes a derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, g)[0] + (x * g).detach()


FUNCTIONS = {
    "a layer": lambda x: (x @ W.to(x.dtype)).tanh(),
    "views": lambda x: x.t().unsqueeze(1).expand(4, 2, 3).flip(0).movedim(0, -1)[..., 1:],
    "views of views": lambda x: x.unsqueeze(0).squeeze(0).transpose(0, 1).reshape(2, 6),
    "entries": lambda x: x.sin() * x.exp() + x.square().sum(),
    "alone": lambda x: -x,
    "mixed dtypes": lambda x: x.float() * 2 + x.sum().half(),
    "another's graph": lambda x: Differentiating.apply(x * 2),
    "a result that is written to": lambda x: Written.apply(x * 2, "result"),
    "lazy bits": lambda x: -torch.complex(x, x * 2).conj().imag * torch.complex(x, x).conj().real,
    "parts": lambda x: torch.stack([*x.unbind(0), *x.sin().chunk(3)[0]]),
}


def rows(y, x, cotangents, how):
    def pull(g):
        return torch.autograd.grad(y, x, g, retain_graph=True)[0]

    if how == "loop":
        return torch.stack([pull(g) for g in cotangents])
    if how == "batched":
        return torch.autograd.grad(y, x, cotangents, retain_graph=True, is_grads_batched=True)[0]
    return vmap(pull)(cotangents)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("place", [0, -1])
def test_it_is_the_loop(name, size, place):
    x = X.clone().requires_grad_()
    y = FUNCTIONS[name](x)
    torch.manual_seed(0)
    laid = torch.randn(*y.shape, size, dtype=D).to(y.dtype).movedim(-1, 0)
    cotangents = laid if place else laid.contiguous()
    before = cotangents.clone()
    found, wanted = (rows(y, x, cotangents, how) for how in ("vmap", "loop"))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert found.grad_fn is None
    assert torch.equal(cotangents, before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_within_other_examples(name):
    def outer(x, scale):
        y = FUNCTIONS[name](x0 * 1.5)
        cotangents = torch.stack([y.detach() * k for k in (1, 2, 3)])
        return vmap(lambda g: torch.autograd.grad(y, x0, g * scale, retain_graph=True)[0])(
            cotangents * x.sum().to(y.dtype)
        )

    x0 = X.clone().requires_grad_()
    scales = torch.tensor([1.0, -2.0], dtype=D)
    found = vmap(outer)(torch.stack([X, X + 1]), scales)
    wanted = torch.stack([outer(x, s) for x, s in zip((X, X + 1), scales, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_write_into_what_was_saved_is_refused():
    x = X.clone().requires_grad_()
    y = Written.apply(x * 1.0, "saved")
    with pytest.raises(RuntimeError, match="changes a tensor from before the call"):
        rows(y, x, torch.stack([X, X + 1]), "vmap")


def test_a_write_into_a_cotangent_is_its_own():
    x = X.clone().requires_grad_()
    y = Written.apply(x, "cotangent")
    found, wanted = (rows(y, x, torch.stack([X, X + 1]), how) for how in ("vmap", "loop"))
    torch.testing.assert_close(found, wanted)


def test_tangents_and_derivatives_outside_stay():
    x = X.clone().requires_grad_()
    y = x.sin() * 2

    def pulled(cotangents):
        return vmap(lambda g: torch.autograd.grad(y, x, g, retain_graph=True)[0])(cotangents)

    cotangents = torch.stack([X, X + 1, X * 2])
    with torch.no_grad():
        wanted = pulled(cotangents)
    torch.testing.assert_close(pulled(cotangents.requires_grad_()), wanted)
    assert not pulled(cotangents).requires_grad
    z = grad(lambda c: (pulled(c) * c).sum())(cotangents.detach())
    torch.testing.assert_close(z, wanted.detach())


def test_diagonal_cotangents_stay_marked():
    (basis,) = make_basis_rows([torch.empty(160)], 0, 160)
    with torch.no_grad():
        level = CotangentLevel(160, None)
    assert level.outer_grad is None
    with run_vmap_level(level):
        found = -wrap_stack(basis, 0, level) * 2.0
    assert find_diagonal(found.value) is not None
