"""A transformed function may have the host read a tensor from outside, as it may without."""

import copy
import io
import pickle

import pytest
import torch

from device import fakedev
from forall import grad, hessian, jacfwd, jvp, linearize, vjp, vmap

D = fakedev.NAME
W = torch.tensor([1.0, 2.0], device=D)
XS = torch.randn(3, 2, device=D)


def saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


READS = {
    "tolist": lambda x: x * sum(W.tolist()),
    "tolist of data": lambda x: x * sum(W.data.tolist()),
    "item": lambda x: x * W[1].item(),
    "numpy": lambda x: x * float(W.numpy(force=True).sum()),
    "numpy of a copy": lambda x: x * float(W.cpu().numpy().sum()),
    "repr": lambda x: x * len(repr(W)),
    "pickle": lambda x: x * pickle.loads(pickle.dumps(W)),  # noqa: S301
    "save": lambda x: x * saved(W),
    "deepcopy": lambda x: x * copy.deepcopy(W),
    "copies": lambda x: (x.cpu() * W.cpu()).to(D),
}
WAYS = {
    "vmap": lambda f: vmap(f)(XS),
    "vmap of vmap": lambda f: vmap(vmap(f))(XS[:, None])[:, 0],
    "vjp": lambda f: vjp(f, XS)[0],
    "jvp": lambda f: jvp(f, (XS,), (XS,))[1],
    "linearize": lambda f: linearize(f, XS)[1](XS),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x,))[1])(XS),
    "jvp of jvp": lambda f: jvp(lambda x: jvp(f, (x,), (XS,))[1] * x, (XS,), (XS / XS,))[1],
    "vmap of jacfwd": lambda f: vmap(lambda x: jacfwd(f)(x) @ x)(XS),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(XS) * XS,
    "vmap of hessian": lambda f: vmap(lambda x: hessian(lambda y: (f(y) * y).sum())(x) @ x / 2)(XS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", READS)
def test_what_is_from_outside_can_be_read(name, way):
    f = READS[name]
    for _ in range(3):
        torch.testing.assert_close(WAYS[way](f), f(XS))


def test_a_copy_on_the_host_takes_in_tangents():
    def f(x):
        c = W.cpu()
        c[0] = x[0].cpu()
        return c * 2 + len(c.tolist()), c

    x = XS[0]
    (_, c), (t, tc) = jvp(f, (x,), (x,))
    assert t.tolist() == [2 * x[0].item(), 0]
    assert tc.tolist() == [x[0].item(), 0]
    assert c.tolist() == [x[0].item(), 2]
    torch.testing.assert_close(jacfwd(f)(x)[0].cpu(), torch.tensor([[2.0, 0], [0, 0]]))


def test_numpy_refuses_a_copy_that_has_taken_in_a_tangent():
    def f(x):
        c = W.cpu()
        c[0] = x[0].cpu()
        return x * float(c.numpy().sum())

    with pytest.raises(RuntimeError, match="would lose the tangent"):
        jvp(f, (XS[0],), (XS[0],))
