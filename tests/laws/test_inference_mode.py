"""In inference mode autograd takes nothing apart before it gets to a mode; the loop is the law.

Views of tensors from before it are ordinary tensors there, everything else is not.
"""

import pytest
import torch
from torch import nn

import forall
from forall import (
    grad,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jit,
    jvp,
    laplacian,
    linearize,
    vjp,
    vmap,
)

D = torch.float64
XS = torch.arange(24.0, dtype=D).reshape(4, 2, 3)
OLDER = torch.arange(6.0, dtype=D).reshape(2, 3)

OF_OLDER = {
    "detach": lambda x: OLDER.detach() * x,
    "row": lambda x: OLDER[1] * x,
    "turned": lambda x: OLDER.mT @ x,
    "flat": lambda x: OLDER.mT.reshape(6)[:3] + x,
    "diagonal": lambda x: OLDER.diagonal().sum() * x,
    "parts": lambda x: torch.cat(OLDER.split(1)) * x,
    "chain": lambda x: OLDER.view(6)[1:].unfold(0, 3, 2).T[1] * x[:, :1],
    "expanded": lambda x: OLDER[0].expand(2, 3) * x,
}
OF_EXAMPLES = {
    "detach": lambda x: x.detach() * 2,
    "row": lambda x: x[1],
    "rows": lambda x: x[torch.tensor([1, 0])] + x[:, 1:].sum(),
    "turned": lambda x: x.mT.contiguous(),
    "flat": lambda x: x.mT.reshape(6),
    "flat view": lambda x: x.flatten()[1:],
    "diagonal": lambda x: x.diagonal(),
    "squeezed": lambda x: x[:1].squeeze(0).unsqueeze(-1),
    "parts": lambda x: x.unbind()[0] + x.chunk(2)[1],
    "written": lambda x: x.clone().mul_(2)[0].add_(1),
    "of its own": lambda x: torch.zeros(3, dtype=D).add_(x[0]),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", [*OF_EXAMPLES, *(f"{name} of older" for name in OF_OLDER)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_is_the_loop(name, dim, before):
    f = OF_EXAMPLES.get(name) or OF_OLDER[name.removesuffix(" of older")]
    with torch.inference_mode():
        xs = (XS if before else XS.clone()).movedim(0, dim).contiguous().movedim(dim, 0)
        expected = torch.stack([f(x) for x in xs])
        torch.testing.assert_close(vmap(f, dim)(xs.movedim(0, dim)), expected)
        twice = vmap(vmap(f))(torch.stack([xs, xs + 1]))
        torch.testing.assert_close(
            twice, torch.stack([torch.stack([f(x) for x in ys]) for ys in (xs, xs + 1)])
        )


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_in_training(momentum):
    ours, theirs = (nn.BatchNorm1d(3, momentum=momentum, dtype=D) for _ in range(2))
    with torch.inference_mode():
        torch.testing.assert_close(vmap(ours)(XS), torch.stack([theirs(x) for x in XS]))
        found = vmap(lambda x: ours(XS[0]) + x)(XS)
        torch.testing.assert_close(found, torch.stack([theirs(XS[0]) + x for x in XS]))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def field(x):
    return (OLDER @ x).sin()[0] * x


def energy(x):
    return field(x).sum()


DERIVATIVES = {
    "grad": grad(energy),
    "grad_and_value": forall.grad_and_value(energy),
    "vjp": lambda x: vjp(field, x)[1](x * 3),
    "jvp": lambda x: jvp(field, (x,), (x * 2,)),
    "linearize": lambda x: linearize(field, x)[1](x * 2),
    "jacrev": jacrev(field),
    "jacfwd": jacfwd(field),
    "jacobian": jacobian(field),
    "hessian": hessian(energy),
    "hvp": lambda x: hvp(energy)(x, x * 2),
    "hessian_diag": hessian_diag(field),
    "laplacian": laplacian(field),
    "jacrev of jacrev": jacrev(jacrev(energy)),
    "vmap of grad": lambda x: vmap(grad(energy))(torch.stack([x, x + 1])),
    "vmap of hessian": lambda x: vmap(hessian(energy))(torch.stack([x, x + 1])),
    "grad of vmap": grad(lambda x: vmap(energy)(torch.stack([x, x + 1])).sum()),
    "vmap of jvp": lambda x: vmap(lambda t: jvp(field, (x,), (t,))[1])(torch.stack([x, -x])),
    "jit of grad": jit(grad(energy)),
    "jit of jacfwd": jit(jacfwd(field)),
}


@pytest.mark.filterwarnings("ignore:.*in inference mode, or leaves:forall.PerformanceWarning")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name, before):
    """As outside: torch's own forward mode loses tangents here, and its `backward` raises."""
    expected = DERIVATIVES[name](OLDER[1])
    for _ in range(3):
        with torch.inference_mode():
            found = DERIVATIVES[name](OLDER[1] if before else OLDER[1].clone())
            assert torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
        torch.testing.assert_close(found, expected)
