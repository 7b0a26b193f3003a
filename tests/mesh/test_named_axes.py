"""Named axes beside the laws: numbers, trees, sizes, memory, replay, modules, random numbers."""

import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import forall
from draws import make_generator
from forall import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    explain,
    grad,
    jacrev,
    jvp,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    vmap,
)
from forall._autodiff.dual_tensor import DualTensor
from forall._vmap.lazy_grad import sources

XS = torch.tensor([1.0, -2.0, 3.0, -4.0])


def over(f, **options):
    return vmap(f, axis_name="b", **options)


# --- numbers, trees, dtypes --------------------------------------------------------------------


def test_numbers_of_python():
    seen = []
    over(lambda x: seen.append((psum(3, "b"), psum(True, "b"), psum(0.5, "b"), pmax(7, "b"))) or x)(
        XS
    )
    assert seen == [(12, 4, 2.0, 7)]
    assert over(lambda x: pmean(3, "b") * x)(XS).tolist() == (3 * XS).tolist()
    assert over(lambda _: all_gather(2.0, "b"))(XS).tolist() == [[2.0] * 4] * 4
    assert over(lambda _: ppermute(1.0, "b", [(0, 2)]))(XS).tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.int64, torch.half])
def test_dtypes_are_those_of_torchs_reductions(dtype):
    xs = (XS > 0).to(dtype)
    assert torch.equal(over(lambda x: psum(x, "b"))(xs), xs.sum(0).expand(4))
    assert torch.equal(over(lambda x: pmax(x, "b"))(xs), xs.amax(0).expand(4))
    assert torch.equal(over(lambda x: pmin(x, "b"))(xs), xs.amin(0).expand(4))
    mean = over(lambda x: pmean(x, "b"))(xs)
    assert mean.tolist() == [0.5] * 4
    assert mean.dtype == (dtype if dtype.is_floating_point else torch.float32)
    for name, f in (
        ("all_gather", lambda x: all_gather(x, "b")),
        ("ppermute", lambda x: ppermute(x, "b", [(0, 1)])),
    ):
        assert over(f)(xs).dtype == dtype, name


def test_complex_numbers():
    zs = torch.randn(3, 2, dtype=torch.complex128)
    torch.testing.assert_close(
        over(lambda z: psum(z.conj(), "b"))(zs), zs.conj().sum(0).expand(3, 2)
    )
    got = over(grad(lambda z: psum(z * z, "b").abs().sum()))(zs)
    want = grad(lambda zs: 3 * (zs * zs).sum(0).abs().sum())(zs)
    torch.testing.assert_close(got, want)


def test_trees():
    tree = {"a": XS, "b": [XS * 2, (XS > 0, 1)]}
    got = vmap(lambda t: psum(t, "b"), in_dims=({"a": 0, "b": [0, (0, None)]},), axis_name="b")(
        tree
    )
    assert got["a"].tolist() == [-2.0] * 4
    assert got["b"][0].tolist() == [-4.0] * 4
    assert got["b"][1][0].tolist() == [2] * 4
    assert got["b"][1][1].tolist() == [4] * 4
    assert over(lambda x: psum({}, "b") == {} and x)(XS).tolist() == XS.tolist()


def test_what_all_examples_share():
    w = torch.tensor([1.0, 2.0])
    f = vmap(
        lambda w, x: (psum(w, "b"), pmean(w, "b"), pmax(w, "b"), all_gather(w, "b"), x),
        (None, 0),
        (None, None, None, None, 0),
        axis_name="b",
    )
    total, mean, most, rows, _ = f(w, XS)
    assert torch.equal(total, 4 * w)
    assert torch.equal(mean, w)
    assert torch.equal(most, w)
    assert torch.equal(rows, w.expand(4, 2))


def test_a_captured_tensor_with_a_derivative():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    over(lambda x: (psum(w, "b") * x * psum(x * w, "b")).sum())(XS).sum().backward()
    v = w.detach().clone().requires_grad_()
    (4 * v * XS[:, None] * (XS[:, None] * v).sum(0)).sum().backward()
    torch.testing.assert_close(w.grad, v.grad)


# --- sizes -------------------------------------------------------------------------------------


def test_sizes_of_axes_without_arguments():
    assert vmap(lambda: axis_index("i") * 2, axis_name="i", axis_size=3)().tolist() == [0, 2, 4]
    assert (
        vmap(lambda x: psum(x, "i"), None, axis_name="i", axis_size=5)(2.0).tolist() == [10.0] * 5
    )
    both = vmap(
        lambda: vmap(lambda: axis_index("i") * 10 + axis_index("j"), axis_name="j", axis_size=2)(),
        axis_name="i",
        axis_size=3,
    )
    assert both().tolist() == [[0, 1], [10, 11], [20, 21]]
    assert vmap(lambda x: x + 1, axis_size=4)(XS).tolist() == (XS + 1).tolist()
    sized = vmap(lambda k: k + axis_size("i"), in_dims={}, axis_name="i", axis_size=2)
    assert sized(k=torch.tensor(1.0)).tolist() == [3.0, 3.0]


def test_sizes_of_several_axes():
    seen = []
    f = lambda x: seen.append((axis_size("i"), axis_size("j"), axis_size(("i", "j")))) or x  # noqa: E731
    vmap(vmap(f, axis_name="j"), axis_name="i")(torch.ones(2, 3))
    assert seen == [(2, 3, 6)]


@pytest.mark.parametrize("size", [0, 1])
def test_few_examples(size):
    xs = torch.ones(size, size) + 1

    def f(x):
        return (
            psum(x, "b"),
            pmax(x, "b"),
            pmin(x, "b"),
            all_gather(x, "b"),
            psum_scatter(x, "b"),
            all_to_all(x, "b"),
            ppermute(x, "b", [(i, i) for i in range(size)]),
            axis_index("b"),
        )

    shapes = [(size, size)] * 3 + [(size, size, size), (size,), (size, size), (size, size), (size,)]
    assert [tuple(r.shape) for r in over(f)(xs)] == shapes
    assert over(grad(lambda x: (psum(x, "b") * pmax(x, "b")).sum()))(xs).shape == xs.shape


def test_the_largest_shares_its_derivative_as_in_torch():
    xs = torch.tensor([3.0, 1.0, 3.0])
    for mine, theirs in ((pmax, torch.amax), (pmin, torch.amin)):
        want = grad(lambda xs, f=theirs: (f(xs, 0) * 3).sum())(xs)
        assert torch.equal(over(grad(lambda x, f=mine: f(x, "b")))(xs), want)
    nan = torch.tensor([1.0, torch.nan, 2.0])
    assert over(lambda x: pmax(x, "b"))(nan).isnan().all()


def test_examples_of_several_shapes():
    rows = [torch.ones(2), torch.ones(3), torch.ones(2)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert over(lambda x: x.sum() + axis_index("b"))(nested).tolist() == [2.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="arguments of several shapes"):
        over(lambda x: psum(x.sum(), "b"))(nested)
    alike = torch.nested.nested_tensor([rows[0], rows[2]], layout=torch.jagged)
    assert over(lambda x: psum(x.sum(), "b"))(alike).tolist() == [4.0, 4.0]


# --- memory ------------------------------------------------------------------------------------


def test_results_have_memory_of_their_own():
    xs = torch.ones(3, 3)

    def f(x):
        gathered, sent = all_gather(x, "b"), all_to_all(x, "b")
        most, moved = pmax(x, "b"), ppermute(x, "b", [(0, 0), (1, 1), (2, 2)])
        for t in (gathered, sent, most, moved):
            t += 1
        return x, gathered, sent, most, moved

    x, *others = over(f)(xs)
    assert torch.equal(x, torch.ones(3, 3))
    assert torch.equal(xs, torch.ones(3, 3))
    assert all(torch.equal(t, torch.full_like(t, 2)) for t in others)


def test_what_all_have_is_held_once():
    def f(x):
        seen.extend(
            y.axis for y in (psum(x, "b"), pmax(x, "b"), all_gather(x, "b")) if hasattr(y, "axis")
        )
        return x

    seen = []
    over(f)(torch.ones(3, 2))
    assert seen == [None, None, None]


def test_nothing_outlives_the_call():
    levels = []

    def f(x):
        y = psum(x * x, "b") * all_gather(x, "b").sum()
        levels.append(weakref.ref(y.level if not isinstance(y, DualTensor) else y.value.level))
        return y

    over(grad(f))(XS)
    grad(lambda xs: over(f)(xs).sum())(XS)
    over(lambda x: jvp(f, (x,), (x,)))(XS)
    gc.collect()
    assert all(level() is None for level in levels)


# --- other ways in -----------------------------------------------------------------------------


def test_norms_of_gradients():
    w = torch.randn(4, 2, dtype=torch.float64)
    ys = torch.randn(3, 5, 4, dtype=torch.float64)

    def loss(w, y):
        return psum((y @ w).sin(), "b").square().sum()

    got = over(lambda y: forall.per_example_grad_norm(lambda w, y: (y @ w).sin().sum())(w, y))(ys)
    plain = vmap(grad(lambda w, y: (y @ w).sin().sum()), (None, 0))
    want = torch.stack([plain(w, y).flatten(1).norm(dim=1) for y in ys])
    torch.testing.assert_close(got, want)
    norms = over(lambda y: forall.per_example_grad_norm(loss)(w, y))(ys)
    gradients = over(lambda y: vmap(grad(loss), (None, 0))(w, y))(ys)
    torch.testing.assert_close(norms, gradients.flatten(2).norm(dim=2))


class Normalized(nn.Module):
    """The batch norm of one example."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        centered = x - pmean(x, "b")
        return centered / (pmean(centered**2, "b") + 1e-5).sqrt() * self.weight + self.bias


def test_a_module_with_means_is_torchs_batch_norm():
    xs = torch.randn(8, 3, dtype=torch.float64)
    ours, theirs = Normalized().double(), nn.BatchNorm1d(3).double()
    weights = torch.randn(8, 3, dtype=torch.float64)
    torch.testing.assert_close(over(ours)(xs), theirs(xs))
    for module, f in ((ours, over(ours)), (theirs, theirs)):
        (f(xs).sin() * weights).sum().backward()
        assert module.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)
    both = [jacrev(lambda xs, f=f: f(xs).sum(0))(xs) for f in (over(ours), theirs)]
    torch.testing.assert_close(*both, atol=1e-8, rtol=1e-6)


def test_checkpoints_inside_and_outside():
    def f(x):
        return x * psum(x.sin(), "b") + pmax(x * x, "b")

    def saved(x):
        return checkpoint(f, x, use_reentrant=False)

    want = grad(lambda xs: over(f)(xs).sum())(XS)
    torch.testing.assert_close(over(grad(saved))(XS), want)
    torch.testing.assert_close(grad(lambda xs: over(saved)(xs).sum())(XS), want)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return psum(x * x, "b")

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * psum(g, "b")


def test_a_custom_function_with_collectives():
    def f(x):
        return Doubled.apply(x) * x

    def plain(x):
        return psum(x * x, "b") * x

    torch.testing.assert_close(over(grad(f))(XS), over(grad(plain))(XS))
    torch.testing.assert_close(jacrev(over(f))(XS), jacrev(over(plain))(XS))
    got = over(lambda x: jvp(f, (x,), (x.cos(),)))(XS)
    torch.testing.assert_close(got, over(lambda x: jvp(plain, (x,), (x.cos(),)))(XS))
    got = jvp(over(f), (XS,), (XS.cos(),))
    torch.testing.assert_close(got, jvp(over(plain), (XS,), (XS.cos(),)))


def test_the_users_own_tangents():
    def push(x):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        both = psum(dual * dual, "b"), pmax(dual * dual, "b"), all_gather(dual, "b")
        return tuple(forward_ad.unpack_dual(y).tangent for y in both)

    with forward_ad.dual_level():
        total, most, rows = [*over(push)(XS)]
    assert total.tolist() == [-4.0] * 4
    assert most.tolist() == [-8.0] * 4
    assert torch.equal(rows, torch.ones(4, 4))


def test_a_hook_that_calls_a_collective():
    def f(x):
        x = x.clone().requires_grad_()
        x.register_hook(lambda g: psum(g, "b"))
        return torch.autograd.grad(x * x, x)[0]

    assert over(f)(XS).tolist() == [-4.0] * 4


def test_a_hook_that_runs_after_the_call():
    def f(x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda g: psum(g, "b"))
        return y * y

    want = [-4.0] * 4
    assert over(grad(f))(XS).tolist() == want
    assert grad(lambda xs: over(f)(xs).sum())(XS).tolist() == want
    xs = XS.clone().requires_grad_()
    over(f)(xs).sum().backward()
    assert xs.grad.tolist() == want


def test_random_numbers_do_not_change():
    key = forall.random.key(0)

    def draw(x):
        return torch.rand(()) + 0 * x

    plain = vmap(draw, randomness=key)(XS)
    assert torch.equal(over(draw, randomness=key)(XS), plain)
    total = over(lambda x: psum(draw(x), "b"), randomness=key)(XS)
    torch.testing.assert_close(total, plain.sum().expand(4))


# --- the call itself -----------------------------------------------------------------------------


def test_explain_tells_of_a_call_with_an_axis():
    told = explain(over(lambda x: x * 2 if psum(x, "b") > 0 else -x))(XS)
    assert "all examples in one run" in str(told)


def test_vmap_takes_its_options_in_one_place():
    names = [*inspect.signature(vmap).parameters]
    assert names[-3:] == ["axis_name", "axis_size", "mesh"]


# --- lazy gradients ----------------------------------------------------------------------------

GENERATOR = make_generator()
LEFT, RIGHT = torch.randn(2, 150, 24, dtype=torch.float64, generator=GENERATOR).mul(0.1)
WEIGHT = torch.randn(24, 16, dtype=torch.float64, generator=GENERATOR).mul(0.3)


def by_rows(w, x, y):
    return (all_gather(y @ w, "b") @ (x @ w)).sin().sum()


def by_products(w, x, y):
    return (psum(torch.outer(x @ w, y @ w), "b") @ (y @ w)).sin().sum()


ON_THE_STACK = {
    by_rows: lambda w: ((LEFT @ w) @ (RIGHT @ w).T).sin().sum(),
    by_products: lambda w: ((RIGHT @ w) @ ((LEFT @ w).T @ (RIGHT @ w)).T).sin().sum(),
}


@pytest.mark.parametrize("one", ON_THE_STACK)
@pytest.mark.parametrize(
    "derivative",
    [
        grad,
        lambda f: lambda w: jvp(grad(f), (w,), (w.cos(),))[1],
        lambda f: grad(lambda w: grad(f)(w).sin().sum()),
        lambda f: jacrev(lambda w: torch.stack([f(w), f(2 * w)])),
        lambda f: lambda w: vmap(grad(f))(torch.stack([w, 2 * w])),
    ],
)
def test_a_gradient_that_is_added_up_is_never_made(one, derivative, monkeypatch):
    added, original = [], sources._add_up_examples

    def noted(*args, **kwargs):
        added.append(original(*args, **kwargs))
        return added[-1]

    monkeypatch.setattr(sources, "_add_up_examples", noted)

    def whole(w):
        return vmap(one, (None, 0, 0), axis_name="b")(w, LEFT, RIGHT).sum()

    torch.testing.assert_close(derivative(whole)(WEIGHT), derivative(ON_THE_STACK[one])(WEIGHT))
    if derivative is grad:
        assert len(added) == 1
        assert added[0] is not None
