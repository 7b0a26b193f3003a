"""What users ask for besides the transforms: several results of one call, names, trees, parts."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from draws import make_generator
from forall import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacrev,
    jvp,
    laplacian,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from oracle import check_vmap, difference, loop

G = make_generator(0)


def rand(*shape):
    return torch.rand(*shape, generator=G, dtype=torch.float64) + 0.5


def same(a, b):
    found = difference(a, b)
    assert found is None, found


@dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Known:
    x: torch.Tensor
    y: torch.Tensor


torch.export.register_dataclass(Known)


def cubic(x):
    """(n,) -> (); the Hessian has entries off the diagonal."""
    return (x**3).sum() * x.prod() + x.sin().sum() * x.sum()


def field(x):
    """(n,) -> (2,)."""
    return torch.stack([cubic(x), (x.exp() * x.flip(0)).sum()])


# --- several results of one call ---------------------------------------------------------------


class counted:
    """A function that counts its calls."""

    def __init__(self, f):
        self.f = f
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.f(*args, **kwargs)


@pytest.mark.parametrize("f", [cubic, field])
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_a_jacobian_and_its_value(jacobian, f):
    x, g = rand(3), counted(f)
    same(jacobian(g, return_value=True)(x), (jacobian(f)(x), f(x)))
    assert g.calls == 1


@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_a_jacobian_its_value_and_aux(jacobian):
    x = rand(3)
    result = jacobian(lambda x: (field(x), {"x": x, "n": 2}), has_aux=True, return_value=True)(x)
    same(result, (jacobian(field)(x), (field(x), {"x": x, "n": 2})))


@pytest.mark.parametrize("f", [cubic, field])
def test_value_gradient_hessian_and_aux(f):
    x, g = rand(3), counted(lambda x: (f(x), "aux"))
    h, (j, y, aux) = hessian(g, has_aux=True, return_value=True)(x)
    same((h, j, y, aux), (jacfwd(jacrev(f))(x), jacrev(f)(x), f(x), "aux"))
    assert g.calls == 1
    same(hessian(f, return_value=True)(x), (h, (j, y)))
    same(hessian(g, has_aux=True)(x), (h, "aux"))


def test_value_gradient_and_hessian_of_every_example():
    xs = rand(4, 3)
    check_vmap(hessian(cubic, return_value=True), (xs,))
    check_vmap(grad(lambda x: hessian(cubic, return_value=True)(x)[1][0].sum()), (xs,))


def test_results_of_one_call_require_grad_only_through_something_outside():
    x, w = rand(3), rand(3).requires_grad_()
    for y in (*jacrev(cubic, return_value=True)(x), hessian(cubic, return_value=True)(x)[1][1]):
        assert not y.requires_grad
    with torch.no_grad():
        _, (_, y) = hessian(lambda x: cubic(w * x), return_value=True)(x)
    assert not y.requires_grad
    _, (_, y) = hessian(lambda x: cubic(w * x), return_value=True)(x)
    same(torch.autograd.grad(y, w)[0], grad(lambda w: cubic(w * x))(w.detach()))


def test_a_result_with_out_dims_none_keeps_its_history():
    w = rand(()).requires_grad_()
    _, y = vmap(lambda x: (x, w**3), out_dims=(0, None))(rand(3))
    (g,) = torch.autograd.grad(y, w, create_graph=True)
    same(g, 3 * w**2)
    same(torch.autograd.grad(g, w)[0], 6 * w)
    xs = rand(3)
    f = lambda w: vmap(lambda x: (x, w**3), out_dims=(0, None))(xs)[1]  # noqa: E731
    same(grad(grad(f))(w.detach()), 6 * w)
    same(jvp(f, (w.detach(),), (torch.ones_like(w),))[1], 3 * w**2)
    ws = rand(2)
    same(vmap(grad(f))(ws), 3 * ws**2)
    same(
        jacrev(lambda w: hessian(lambda x: cubic(w * x), return_value=True)(ws)[1][1])(ws),
        grad(lambda w: cubic(w * ws))(ws),
    )


# --- arguments by name -------------------------------------------------------------------------


def energy(x, y, *, k=1.0):
    return (x**3).sum() * y**2 * k


@pytest.mark.parametrize("verb", [grad, jacrev, jacfwd, hessian])
def test_argnames_are_argnums_by_name(verb):
    x, y = rand(3), rand(())
    same(verb(energy, argnames="y")(x, y), verb(energy, argnums=1)(x, y))
    same(verb(energy, argnames="y")(x, y=y), verb(energy, argnums=1)(x, y))
    same(verb(energy, argnames=("y", "x"))(x, y), verb(energy, argnums=(1, 0))(x, y))


def test_argnames_reach_keyword_arguments():
    x, y, k = rand(3), rand(()), rand(())
    same(grad(energy, argnames="k")(x, y, k=k), (x**3).sum() * y**2)
    g, value = grad_and_value(energy, argnames=("k", "y"))(x, y, k=k)
    same(g, ((x**3).sum() * y**2, 2 * (x**3).sum() * y * k))
    same(value, energy(x, y, k=k))
    same(hessian(energy, argnames=("k", "y"))(x, y, k=k)[0][1], 2 * (x**3).sum() * y)
    same(grad(lambda **p: p["a"] * p["b"], argnames="a")(a=x[0], b=x[1]), x[1])


def test_argnames_of_a_module_are_those_of_its_forward():
    net, x = nn.Linear(3, 1).double(), rand(3)
    same(jacrev(net, argnames="input")(x).detach(), net.weight.detach())


def test_argnames_under_vmap():
    xs, ys = rand(4, 3), rand(4)
    check_vmap(lambda x, y: grad(energy, argnames=("y", "x"))(x, y=y), (xs, ys))


def test_in_dims_by_name_map_keyword_arguments():
    x, w = rand(3, 4), rand(4, 3)

    def f(x, *, w=None, shift=0.0):
        return x * w + shift

    truth = torch.stack([f(x[:, i], w=w[i], shift=1.0) for i in range(4)])
    same(vmap(f, in_dims={"x": 1, "w": 0})(x, w=w, shift=1.0), truth)
    same(vmap(f, in_dims={"w": 0})(x[:, 0], w=w), torch.stack([x[:, 0] * v for v in w]))
    same(vmap(f, in_dims={"x": 1, "w": 0}, chunk_size=3)(x, w=w, shift=1.0), truth)
    trees = vmap(lambda p, x: p["w"] * x + p["b"], in_dims={"p": {"w": 0, "b": None}})
    same(trees({"w": w, "b": 1.0}, x[:, 0]), torch.stack([v * x[:, 0] + 1.0 for v in w]))


def test_in_dims_by_name_of_a_module():
    net, xs = nn.Linear(3, 2).double(), rand(3, 5)
    same(vmap(net, in_dims={"input": 1})(xs).detach(), net(xs.T).detach())


def test_keyword_arguments_are_shared_unless_named():
    x, w = rand(3, 3), rand(3, 3)
    same(vmap(lambda x, *, w: x * w)(x, w=w), loop(lambda x, w: x * w, (0, None))(x, w))


# --- leaves and results that are no tensors ----------------------------------------------------


def test_results_that_are_no_tensors():
    def f(x):
        return {"y": x.sin(), "n": 42, "h": 0.5, "flag": True, "tag": "a", "none": None}

    check_vmap(f, (rand(4, 3),))
    xs = rand(5, 3)
    same(vmap(f, chunk_size=2)(xs), vmap(f)(xs))
    same(vmap(vmap(lambda x: (x, 2, "a")))(rand(2, 3))[1], torch.full((2, 3), 2))


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_numbers_of_numpy_are_stacked():
    sums = vmap(lambda n: np.full(3, n.item()).sum())(torch.arange(4))
    same(sums, torch.tensor([0, 3, 6, 9]))
    same(vmap(lambda x: np.int64(3))(torch.ones(2)), torch.tensor([3, 3]))
    same(vmap(lambda x: np.bool_(x.item() > 1))(torch.arange(3)), torch.tensor([0, 0, 1]).bool())


def test_a_number_with_out_dims_none_stays_a_number():
    assert vmap(lambda x: (x, 42), out_dims=(0, None))(rand(3))[1] == 42
    result = vmap(lambda x: (x, 42), out_dims=(0, None), chunk_size=2)(rand(3))
    assert result[1] == 42


def leaves():
    return {"w": rand(3), "i": torch.arange(3), "k": 2.0, "name": "a", "none": None}


def of_leaves(d):
    return (d["w"] ** 3 * d["i"] * d["k"]).sum()


@pytest.mark.parametrize("verb", [grad, jacrev, jacfwd])
def test_only_leaves_that_have_one_get_a_derivative(verb):
    d = leaves()
    expected = dict.fromkeys(d)
    expected["w"] = 3 * d["w"] ** 2 * d["i"] * d["k"]
    same(verb(of_leaves)(d), expected)
    same(vjp(of_leaves, d)[1](torch.tensor(1.0, dtype=torch.float64))[0], expected)
    same(verb(of_leaves, argnums=(0,))(d), (expected,))


def test_second_derivatives_of_leaves():
    d = leaves()
    nothing = dict.fromkeys(d)
    diagonal = 6 * d["w"] * d["i"] * d["k"]
    same(hessian(of_leaves)(d), {**nothing, "w": {**nothing, "w": diagonal.diag()}})
    same(hessian_diag(of_leaves)(d), {**nothing, "w": diagonal})
    same(hvp(of_leaves)(d, d), {**nothing, "w": diagonal * d["w"]})
    same(laplacian(of_leaves)(d), diagonal.sum())


def test_a_complex_leaf_follows_torchs_convention():
    z = torch.complex(rand(3), rand(3))
    result = grad(lambda d: (d["z"].abs() ** 2).sum() * d["x"])({"z": z, "x": rand(3)[0]})
    leaf = z.clone().requires_grad_()
    (truth,) = torch.autograd.grad((leaf.abs() ** 2).sum(), leaf)
    same(result["z"] / result["z"].abs(), truth / truth.abs())
    check_vmap(grad(lambda z: (z.abs() ** 2).sum()), (torch.complex(rand(4, 3), rand(4, 3)),))


def test_a_registered_dataclass_is_a_tree():
    xs, ys = rand(4, 3), rand(4)
    result = vmap(lambda p: Known(p.y * p.x, p.y))(Known(xs, ys))
    assert isinstance(result, Known)
    same((result.x, result.y), (ys[:, None] * xs, ys))
    g = grad(lambda p: (p.x**2).sum() * p.y)(Known(xs[0], ys[0]))
    same((g.x, g.y), (2 * xs[0] * ys[0], (xs[0] ** 2).sum()))


def test_an_unregistered_dataclass_without_a_tensor_of_an_example_passes():
    p = Point(rand(2), rand(2))
    assert vmap(lambda x: (x, p))(rand(3))[1] is p
    same(vmap(lambda x, p: x * p.x[0], in_dims=(0, None))(p.y, p), p.y * p.x[0])


# --- parts of the Hessian ----------------------------------------------------------------------


def by_hessian(f, x):
    h = hessian(f)(x)
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    return h, diagonal, diagonal.sum(-1)


@pytest.mark.parametrize("f", [cubic, field])
def test_parts_of_the_hessian(f):
    x, v = rand(4), rand(4)
    h, diagonal, trace = by_hessian(f, x)
    same(hvp(f)(x, v), h @ v)
    same(hessian_diag(f)(x), diagonal)
    same(laplacian(f)(x), trace)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 9])
def test_parts_in_chunks(chunk_size):
    x, g = rand(4), counted(cubic)
    _, diagonal, trace = by_hessian(cubic, x)
    same(hessian_diag(g, chunk_size=chunk_size)(x), diagonal)
    same(laplacian(g, chunk_size=chunk_size)(x), trace)
    assert g.calls == 2


def test_parts_with_value_and_aux():
    x, v = rand(3), rand(3)
    h, diagonal, trace = by_hessian(cubic, x)
    beside = (grad(cubic)(x), cubic(x), "aux")
    for verb, args, truth in (
        (hvp, (x, v), h @ v),
        (hessian_diag, (x,), diagonal),
        (laplacian, (x,), trace),
    ):
        g = counted(lambda x: (cubic(x), "aux"))
        same(verb(g, has_aux=True, return_value=True)(*args), (truth, beside))
        same(verb(g, has_aux=True)(*args), (truth, "aux"))
        same(verb(cubic, return_value=True)(*args), (truth, beside[:2]))
        assert g.calls == 2


def test_parts_with_respect_to_several_arguments():
    x, y, k = rand(3), rand(()), rand(())
    (xx, _), (_, yy) = hessian(energy, (0, 1))(x, y, k=k)
    same(laplacian(energy, (0, 1))(x, y, k=k), xx.trace() + yy)
    same(hessian_diag(energy, (1, 0))(x, y, k=k), (yy, xx.diagonal()))
    same(hessian_diag(energy, argnames=("y", "k"))(x, y, k=k), (yy, torch.zeros_like(k)))
    v = (rand(3), rand(()))
    xy = 6 * x**2 * y * k
    same(hvp(energy, (0, 1))(x, y, v, k=k), (xx @ v[0] + xy * v[1], xy @ v[0] + yy * v[1]))


def test_parts_of_shapes_that_are_no_vectors():
    x = rand(2, 3)
    f = lambda x: (x**3 * x[0, 0]).sum(0)  # noqa: E731 - (2, 3) -> (3,)
    h = hessian(f)(x)
    truth = h.reshape(3, 6, 6).diagonal(dim1=-2, dim2=-1)
    same(hessian_diag(f, chunk_size=4)(x), truth.reshape(3, 2, 3))
    same(laplacian(f)(x), truth.sum(-1))
    same(laplacian(lambda x: x**3)(rand(()) * 0 + 2), torch.tensor(12.0, dtype=torch.float64))
    same(laplacian(lambda x: (x**2).sum())(rand(0)), torch.zeros((), dtype=torch.float64))


def test_a_diagonal_beside_infinite_entries():
    x = torch.tensor([0.0, 2.0], dtype=torch.float64)
    f = lambda x: (x[0].abs() ** 0.5 + x[1]) ** 2 - x[0].abs() + x[1] ** 3  # noqa: E731
    same(hessian_diag(f)(x)[1], hessian(f)(x).diagonal()[1])


@pytest.mark.parametrize("verb", [laplacian, hessian_diag])
def test_parts_nest(verb):
    xs, vs = rand(3, 3), rand(3, 3)
    full = (
        (lambda x: by_hessian(cubic, x)[2])
        if verb is laplacian
        else (lambda x: by_hessian(cubic, x)[1])
    )
    part = verb(cubic)
    check_vmap(part, (xs,))
    check_vmap(part, (xs,), chunk_size=2)
    same(jacrev(part)(xs[0]), jacrev(full)(xs[0]))
    same(jacfwd(part)(xs[0]), jacrev(full)(xs[0]))
    same(jvp(part, (xs[0],), (vs[0],))[1], jacrev(full)(xs[0]) @ vs[0])
    check_vmap(jacrev(part), (xs,))
    same(hessian(part)(xs[0]), hessian(full)(xs[0]))


def test_the_laplacian_of_a_laplacian():
    xs = rand(2, 3)
    f = lambda x: (x**2).sum() ** 3  # noqa: E731 - r^6; in three dims 42 r^4, then 42 * 20 r^2
    same(vmap(laplacian(laplacian(f)))(xs), 840 * (xs**2).sum(-1))


def test_a_product_with_the_hessian_nests():
    xs, vs = rand(3, 3), rand(3, 3)
    check_vmap(hvp(cubic), (xs, vs))
    check_vmap(lambda x, v: grad(lambda x: hvp(cubic)(x, v) @ v)(x), (xs, vs))
    same(jacfwd(hvp(cubic), 1)(xs[0], vs[0]), hessian(cubic)(xs[0]))
    same(hvp(hvp_of_square)(xs[0], vs[0]), hessian(hvp_of_square)(xs[0]) @ vs[0])


def hvp_of_square(x):
    return (hvp(cubic)(x, x) ** 2).sum()


def test_a_laplacian_is_trained_through():
    """As in a physics-informed network: the loss holds the Laplacian, its gradient the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    xs, weights = rand(5, 2), tuple(net.parameters())
    u = lambda x: net(x).squeeze()  # noqa: E731
    loss = vmap(laplacian(u))(xs).square().sum()
    found = torch.autograd.grad(loss, weights[:3])
    slow = sum(by_hessian(u, x)[2] ** 2 for x in xs)
    same(found, torch.autograd.grad(slow, weights[:3]))
    params = dict(net.named_parameters())
    pure = grad(lambda p: laplacian(lambda x: functional_call(net, p, (x,)).squeeze())(xs[0]))
    same(pure({k: p.detach() for k, p in params.items()})["0.weight"].shape, weights[0].shape)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operator returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, torch.Tensor):
                self.size = max(self.size, t.numel())
        return out


@pytest.mark.parametrize("verb", [laplacian, hessian_diag])
def test_no_hessian_is_made(verb):
    n, chunk = 200, 4
    x = rand(n)
    with Largest() as whole:
        hessian(lambda x: (x**3).sum() * x.sum())(x)
    assert whole.size >= n * n
    with Largest() as parts:
        verb(lambda x: (x**3).sum() * x.sum(), chunk_size=chunk)(x)
    assert parts.size <= 2 * chunk * n


def test_no_hessian_is_made_for_a_product():
    x = rand(200)
    with Largest() as largest:
        hvp(lambda x: (x**3).sum() * x.sum())(x, x)
    assert largest.size <= 200


def test_parts_inside_torchs_own_transforms():
    xs, vs = rand(3, 3), rand(3, 3)
    theirs = torch.func.vmap
    same(theirs(laplacian(cubic))(xs), vmap(laplacian(cubic))(xs))
    same(theirs(hessian_diag(field))(xs), vmap(hessian_diag(field))(xs))
    same(theirs(hvp(cubic))(xs, vs), vmap(hvp(cubic))(xs, vs))
    same(theirs(hessian(cubic, return_value=True))(xs), vmap(hessian(cubic, return_value=True))(xs))
    same(theirs(grad(cubic, argnames="x"))(xs), vmap(grad(cubic))(xs))


# --- the tangent program -----------------------------------------------------------------------


def test_a_program_of_several_primals_that_are_rows_of_others():
    xs, ys, ones = rand(3, 2), rand(3, 2), torch.ones(2, dtype=torch.float64)
    f = lambda x, y: x * y * y  # noqa: E731
    x, y = xs[1], ys[2]
    same(linearize(f, x, y)[1](ones, 2 * ones), jvp(f, (x, y), (ones, 2 * ones))[1])


# --- stacks of modules -------------------------------------------------------------------------


def heads():
    torch.manual_seed(0)
    return [nn.Linear(3, 3).double() for _ in range(2)]


def outputs(models, x, **options):
    params, _ = stack_module_state(models, **options)
    return vmap(lambda p: functional_call(models[0], p, (x,)))(params)


@pytest.mark.parametrize("detach", [True, False])
def test_modules_are_stacked_inside_a_transform(detach):
    models, xs, v = heads(), rand(4, 3), rand(3)
    f = lambda x: outputs(models, x, detach=detach)  # noqa: E731
    slow = lambda x: torch.stack([m(x) for m in models])  # noqa: E731
    same(jvp(f, (xs[0],), (v,)), jvp(slow, (xs[0],), (v,)))
    same(jacrev(f)(xs[0]), jacrev(slow)(xs[0]))
    same(vmap(f)(xs), torch.stack([slow(x) for x in xs]))


def test_gradients_of_a_stack_reach_the_modules_where_asked():
    models, x = heads(), rand(3)
    outputs(models, x, detach=False).square().sum().backward()
    for m in models:
        (truth,) = torch.autograd.grad(m(x).square().sum(), m.weight)
        same(m.weight.grad, truth)
    detached = heads()
    outputs(detached, x).square().sum().backward()
    assert all(m.weight.grad is None for m in detached)


# --- optimizers in an inner loop ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("RMSprop", {})],
)
def test_every_example_has_its_own_optimizer(optimizer, options):
    def fit(x, y):
        w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        steps = getattr(torch.optim, optimizer)([w], lr=0.1, **options)
        for _ in range(3):
            steps.zero_grad()
            (x @ w - y).square().mean().backward()
            steps.step()
        return w.detach()

    check_vmap(fit, (rand(4, 5, 3), rand(4, 5)))


def test_a_gradient_goes_through_an_inner_loop():
    """Meta-learning: the loss after a step, differentiated in where the step began."""
    xs, ys, w = rand(4, 5, 3), rand(4, 5), rand(3)

    def loss(w, x, y):
        return (x @ w - y).square().mean()

    def after(w, x, y):
        return loss(w - 0.1 * grad(loss)(w, x, y), x, y)

    found = grad(lambda w: vmap(after, in_dims=(None, 0, 0))(w, xs, ys).sum())(w)
    leaf = w.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(xs, ys, strict=True):
        (g,) = torch.autograd.grad(loss(leaf, x, y), leaf, create_graph=True)
        total = total + loss(leaf - 0.1 * g, x, y)
    same(found, torch.autograd.grad(total, leaf)[0])
