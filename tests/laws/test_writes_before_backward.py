"""A tensor is written to once a call has ended: the derivative is an error or right.

Torch counts the writes into each tensor that it saves for a backward pass, and so do we.
"""

import faulthandler

import pytest
import torch
from torch import nn

import forall
from forall import grad, vmap

D = torch.float64
X = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)
W = torch.linspace(1, 2, 3, dtype=D)

FUNCTIONS = {
    "vmap": lambda api, x, w: api.vmap(lambda v: (v * w).sin())(x),
    "vmap, shared alone": lambda api, x, w: api.vmap(lambda v: w.sin() * v)(x),
    "vmap, a shared square": lambda api, x, w: api.vmap(lambda v: (w * w * v).sin())(x),
    "vmap, shared by in_dims": lambda api, x, w: api.vmap(lambda v, u: (v * u).sin(), (0, None))(
        x, w
    ),
    "vmap, columns": lambda api, x, w: api.vmap(lambda v, u: v * u.sin(), (1, 0), 1)(x, w),
    "vmap of vmap": lambda api, x, w: api.vmap(api.vmap(lambda a, b: (a * b).sin()), (0, None))(
        x, w
    ),
    "a view": lambda api, x, w: api.vmap(lambda v: v[0].sin() * v[1:] * w[1].exp())(x),
    "a product": lambda api, x, w: api.vmap(lambda v: v @ w)(x),
    "grad": lambda api, x, w: api.grad(lambda v: (v * w).sin().sum())(x),
    "vmap of grad": lambda api, x, w: api.vmap(api.grad(lambda v: (v * w).sin().sum()))(x),
    "vmap of grad of a product": lambda api, x, w: api.vmap(api.grad(lambda v: (v @ w).sin()))(x),
    "grad of vmap": lambda api, x, w: api.grad(
        lambda x: api.vmap(lambda v: (v * w).sin())(x).sum()
    )(x),
    "jvp": lambda api, x, w: api.jvp(lambda v: (v * w).sin(), (x,), (x.detach() + 1,))[1],
    "jacrev": lambda api, x, w: api.jacrev(lambda v: (v * w).sin())(x),
    "jacfwd": lambda api, x, w: api.jacfwd(lambda v: (v * w).sin())(x),
    "hessian": lambda api, x, w: api.hessian(lambda v: (v * w).sin().sum())(x[0]),
    "vjp": lambda api, x, w: api.vjp(lambda v: (v * w).sin(), x)[1](torch.ones_like(x))[0],
    "a layer": lambda api, x, w: api.vmap(lambda v: torch.layer_norm(v, (3,), w))(x),
}


def outcome(api, f, written, wanted, view):
    """A derivative, and the same once something was written to: None where that is an error."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    arguments = {"x": x * 1, "w": w * 1}  # no leaves, so any of them may be written to
    y = f(api, *arguments.values())
    leaf, cotangents = {"x": x, "w": w}[wanted], torch.ones_like(y)
    (right,) = torch.autograd.grad(y, leaf, cotangents, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        at = arguments[written]
        (at.detach()[..., :1] if view else at).mul_(2)
    try:
        return right, torch.autograd.grad(y, leaf, cotangents, allow_unused=True)[0]
    except RuntimeError as e:
        if "modified by an inplace operation" not in str(e) and "modified inplace" not in str(e):
            raise
        return right, None


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("wanted", ["x", "w"])
@pytest.mark.parametrize("written", ["x", "w"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_captured_tensors(monkeypatch, name, written, wanted, view, replay):
    monkeypatch.setattr(forall.config, "replay", replay)
    monkeypatch.setattr(forall.config, "patience", 0)
    f = FUNCTIONS[name]
    torchs_right, torchs = outcome(torch.func, f, written, wanted, view)
    for _ in range(5 if replay else 1):
        right, found = outcome(forall, f, written, wanted, view)
        if right is None:
            assert torchs_right is None
        elif found is not None:
            torch.testing.assert_close(found, right)
        elif not replay:  # which saves what any of the arguments needs
            assert torchs is None or not torch.equal(torchs, torchs_right)


@pytest.mark.parametrize(
    "f",
    [torch.exp, lambda v: v.exp().reshape(-1, 1), lambda v: v.sigmoid()[None], lambda v: v.tanh()],
)
@pytest.mark.parametrize("transform", [lambda f: vmap(f), lambda f: vmap(vmap(f), 1, 1)])
def test_results_that_a_derivative_needs(f, transform):
    x = X.clone().requires_grad_()
    y = transform(f)(x if transform(torch.sin)(X).dim() == 2 else x[None])
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


OURS = {
    "branches": lambda x, w: vmap(
        lambda v: (v * w * w).sin() if v.sum() > 0 else v.cos() * w.exp()
    )(x),
    "loops": lambda x, w: vmap(lambda v: doubled(v, w))(x),
    "chunks": lambda x, w: vmap(lambda v: (v * w * w).sin(), chunk_size=2)(x),
    "a number": lambda x, w: vmap(lambda v: v * w * w * v.sum().item())(x),
    "cond": lambda x, w: vmap(
        lambda v: forall.cond(v.sum() > 0, lambda v: (v * w * w).sin(), lambda v: v.cos() * w, v)
    )(x),
    "scan": lambda x, w: forall.scan(lambda c, v: ((c * w * w * v).sin(), c * v * w), w, x)[1],
    "fori_loop": lambda x, w: forall.fori_loop(0, 3, lambda i, c: (c * w * w).sin(), x),
    "map": lambda x, w: forall.map(lambda v: (v * w * w).sin(), x),
    "norms": lambda x, w: forall.per_example_grad_norm(lambda p, v: (p * p * v).sin().sum())(w, x),
    "hvp": lambda x, w: forall.hvp(lambda v: (v * w).sin().sum())(x, X),
    "laplacian": lambda x, w: forall.laplacian(lambda v: (v * w).sin().sum())(x),
    "pull-backs": lambda x, w: vmap(lambda t: forall.vjp(lambda v: (v * w).sin(), x)[1](t)[0])(
        torch.stack([X, X])
    ),
}


def doubled(v, w):
    while v.abs().sum() < 3:
        v = v * w.exp() + 0.5
    return v * v * w


@pytest.mark.parametrize("wanted", ["x", "w"])
@pytest.mark.parametrize("written", ["x", "w"])
@pytest.mark.parametrize("name", OURS)
def test_what_torch_has_not(monkeypatch, name, written, wanted):
    monkeypatch.setattr(forall.config, "replay", False)
    right, found = outcome(None, lambda _, x, w: OURS[name](x, w), written, wanted, False)
    assert right is not None
    if found is not None:
        torch.testing.assert_close(found, right)
    assert (found is None) or (written, wanted) != ("w", "w")  # which needs the other factor w


def test_what_a_derivative_does_not_need_may_be_written_to():
    x, w = X.clone().requires_grad_(), W.clone()
    y = vmap(lambda v: v.sin() + w)(x)
    w.mul_(2)
    with torch.no_grad():
        y.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, X.cos())


def test_what_the_function_itself_writes():
    def f(v, out):
        out.copy_(v.exp())
        v.mul_(2)
        return v * out

    x, out = X.clone().requires_grad_(), torch.zeros(4, 3, dtype=D)
    y = vmap(f)(x * 1, out)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 2 * X.exp() * (1 + X))


def test_statistics_are_written_by_each_call():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(D)
    batches = X.expand(2, 4, 3)
    first = vmap(net)(batches)
    second = vmap(net)(batches * 2)
    (first.square().sum() + second.square().sum()).backward()
    assert net[0].weight.grad is not None


def test_a_step_of_the_optimizer_between_two_derivatives():
    w = W.clone().requires_grad_()
    slopes = vmap(grad(lambda v: (v * w).sin().sum()))(X)
    slopes.sum().backward(retain_graph=True)
    torch.optim.SGD([w], 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        slopes.sum().backward()


def test_a_linear_map_is_of_the_point_that_it_was_made_at():
    x, w, t = X.clone(), W.clone(), torch.ones_like(X)
    _, push = forall.linearize(lambda v: (v * w).sin(), x)
    expected = push(t)
    x.mul_(2)
    torch.testing.assert_close(push(t), expected)  # it is made of the cosine, not of x
    w.mul_(2)
    with pytest.raises(RuntimeError, match=r"linearize.*modified by an inplace operation"):
        push(t)


def test_inside_another_transform():
    def f(v, *, write):
        u = v * 1
        y = vmap(lambda a: (a * u).sin())(u)
        if write:
            with torch.no_grad():
                u.mul_(2)
        return torch.autograd.grad(y.sum(), v)[0]

    x = X.clone().requires_grad_()
    assert vmap(lambda v: f(v, write=False))(x).shape == X.shape
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vmap(lambda v: f(v, write=True))(x)


def filled(x):
    out = torch.zeros(2, 3, dtype=D)
    out[0] = x.sin()
    z = out[0] * out[0]
    out[0].copy_(z)
    return (out * x).sum()


def another_row(x):
    out = torch.zeros(2, 3, dtype=D)
    row = out[0]
    row.copy_(x)
    z = row * row
    out[1].copy_(x)
    return (out * z).sum()


def the_whole(x):
    out = torch.zeros(2, 3, dtype=D)
    row = out[0]
    out.mul_(x)
    z = row * x
    out[1].add_(x)
    return z.sum() + out.sum()


CALLS = {
    "grad": lambda f: grad(f)(X[0]),
    "grad, without replay": lambda f: grad(lambda x: f(x))(X[0]),
    "vmap of grad": lambda f: vmap(grad(f))(X),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum())(X),
    "vjp": lambda f: forall.vjp(f, X[0])[1](torch.ones((), dtype=D)),
    "jacrev": lambda f: forall.jacrev(f)(X[0]),
    "hessian": lambda f: forall.hessian(f)(X[0]),
    "jit": lambda f: forall.jit(grad(f))(X[0]),
    "norm": lambda f: forall.per_example_grad_norm(lambda p, x: f(p * x))(X[0], X),
    "jvp of grad": lambda f: forall.jvp(grad(f), (X[0],), (X[1],)),
    "backward inside": lambda f: vmap(lambda x: torch.autograd.grad(f(y := x * 1), y))(
        X.clone().requires_grad_()
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("f", [filled, another_row, the_whole], ids=lambda f: f.__name__)
def test_a_write_inside_is_an_error_and_no_deadlock(f, call):
    """For its message torch makes the history of a view anew, with a lock in its hand."""
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call(f)
    finally:
        faulthandler.cancel_dump_traceback_later()
