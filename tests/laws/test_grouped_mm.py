"""Layers of experts: products of matrices in groups, where each example has groups of its own."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import forall
from draws import make_generator
from forall import (
    explain,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    per_example_grad_norm,
    vmap,
)
from forall._vmap.lazy_grad import sources
from forall._vmap.rules import grouped_mm
from oracle import empty_truth, loop, same

B, G, R, K, N = 3, 4, 12, 8, 16  # examples, groups, rows in them, and the sizes of the matrices


def given(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=make_generator(seed)).to(dtype)


def ends(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


OFFS = ends((2, 2, 9, 12), (0, 5, 11, 12), (12, 12, 12, 12))
SHORT = ends((2, 2, 7, 9), (0, 0, 0, 0), (1, 12, 12, 12))  # rows behind the last belong to none
X, W = given(B, R, K, seed=1), given(B, G, K, N, seed=2)


def whole(f, *args, in_dims=0):
    """What `vmap` gives where no examples diverge."""
    explained = explain(vmap(f, in_dims))(*args)
    assert explained.divergences == (), explained
    return vmap(f, in_dims)(*args)


def is_loop(f, *args, in_dims=0) -> bool:
    return same(whole(f, *args, in_dims=in_dims), loop(f, in_dims)(*args))


def stack(shape: tuple[int, ...], dim: int | None, by_column: bool, seed: int) -> Tensor:
    """Examples of a shape along ``dim``, each of which is laid out by row or by column."""
    *front, n, m = shape
    like = [*front, m, n] if by_column else [*shape]
    if dim is not None:
        like.insert(dim, B)
    return given(*like, seed=seed)


FORMS = {
    "rows in groups": ((R, K), (G, K, N)),
    "columns in groups": ((G, N, K), (K, R)),
    "what is summed over in groups": ((N, R), (R, K)),
}
DIMS = [d for d in itertools.product((0, 1, None), (0, 1, None), (0, None)) if d != (None,) * 3]


@pytest.mark.parametrize("by_column", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("in_dims", DIMS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_with_every_operand_mapped_or_shared(form, in_dims, by_column):
    (left, right), (a, b) = FORMS[form], by_column
    x, w = stack(left, in_dims[0], a, 1), stack(right, in_dims[1], b, 2)

    def f(x, w, offs):
        return F.grouped_mm(x.mT if a else x, w.mT if b else w, offs=offs)

    offs = OFFS[0] if in_dims[2] is None else OFFS
    assert is_loop(f, x, w, offs, in_dims=in_dims)


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 2)])
def test_matrices_in_a_batch_have_no_offsets(in_dims):
    x, w = stack((G, R, K), in_dims[0], False, 1), stack((G, K, N), in_dims[1], False, 2)
    assert is_loop(F.grouped_mm, x, w, in_dims=in_dims)


@pytest.mark.parametrize("in_dims", DIMS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_behind_the_last_group_is_in_none(form, in_dims):
    """The loop has what was in memory there; the rule has zeros. No sum takes it in."""
    left, right = FORMS[form]
    x, w = stack(left, in_dims[0], False, 1), stack(right, in_dims[1], False, 2)
    offs = SHORT[0] if in_dims[2] is None else SHORT

    def f(x, w, offs):
        return F.grouped_mm(x, w, offs=offs)

    def truth(x, w, offs):
        out, inside = f(x, w, offs), torch.arange(R) < offs[-1]
        if out.dim() == 3:
            return out
        return torch.where(inside if out.shape[-1] == R else inside[:, None], out, 0)

    assert same(whole(f, x, w, offs, in_dims=in_dims), loop(truth, in_dims)(x, w, offs))


def test_nan_behind_the_last_group_reaches_no_gradient():
    x = X.clone()
    x[torch.arange(R) >= SHORT[:, -1:]] = torch.nan
    g = given(B, R, N, seed=3)

    def f(x, g, offs):
        return F.grouped_mm(x.mT, g, offs=offs)

    assert is_loop(f, x, g, SHORT)
    out = vmap(lambda x, w, offs: F.grouped_mm(x, w, offs=offs))(x, W, SHORT)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_half_precision(dtype, shared):
    w = W.to(dtype)
    in_dims = (0, None, 0) if shared else 0
    f = lambda x, w, offs: F.grouped_mm(x, w, offs=offs, out_dtype=dtype)  # noqa: E731
    assert is_loop(f, X.to(dtype), w[0] if shared else w, OFFS, in_dims=in_dims)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, 0), (0, None, None), (0, 0, None)])
def test_rows_that_need_gaps_have_them(in_dims):
    """A product of five columns has rows of eight, so that the next product can read them."""
    v = given(G, 5, 8, seed=4)
    wide = given(B, R, 8, seed=5)

    def f(x, w, offs):
        y = F.grouped_mm(x[:, :5], v, offs=offs)  # 5 -> 8
        return F.grouped_mm(F.grouped_mm(y, w[..., :5], offs=offs), v, offs=offs)

    w = W[:, :, :, :8].contiguous()
    w = w if in_dims[1] == 0 else w[0]
    offs = OFFS if in_dims[2] == 0 else OFFS[0]
    assert is_loop(f, wide, w, offs, in_dims=in_dims)


def test_examples_side_by_side_in_a_stack():
    """Those of the loop are dense after any operator, so the kernel takes them."""
    x, w = X.movedim(0, -1).contiguous(), W.movedim(0, -1).contiguous()
    f = lambda x, w, offs: F.grouped_mm(x * 2, w * 2, offs=offs)  # noqa: E731
    assert is_loop(f, x, w, OFFS, in_dims=(-1, -1, 0))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (None, 0, 0), (0, None, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_more_groups_than_one_call_takes(form, in_dims, monkeypatch):
    monkeypatch.setattr(grouped_mm, "_GROUPS", 2 * (G + 1))
    left, right = FORMS[form]
    x, w = stack(left, in_dims[0], False, 1), stack(right, in_dims[1], False, 2)
    assert is_loop(lambda x, w, o: F.grouped_mm(x, w, offs=o), x, w, OFFS, in_dims=in_dims)


def test_no_examples():
    f = lambda x, w, offs: F.grouped_mm(x, w, offs=offs)  # noqa: E731
    assert same(vmap(f)(X[:0], W[:0], OFFS[:0]), empty_truth(loop(f)(X, W, OFFS)))


def test_no_rows():
    f = lambda x, w, offs: F.grouped_mm(x, w, offs=offs)  # noqa: E731
    assert is_loop(f, X[:, :0], W, OFFS * 0)
    assert is_loop(f, X[:, :0], W[0], OFFS * 0, in_dims=(0, None, 0))
    assert is_loop(f, X[:, :0], W[0], OFFS[0] * 0, in_dims=(0, None, None))


REFUSED = {
    "offsets of the wrong dtype": (X, W, {"offs": OFFS.long()}),
    "no offsets": (X, W, {}),
    "another number of groups": (X, W[:, 1:], {"offs": OFFS}),
    "sizes that do not fit": (X, W[:, :, :4], {"offs": OFFS}),
    "rows that are not aligned": (X[..., :7].clone(), W[:, :, :7], {"offs": OFFS}),
    "columns that are not aligned": (X, W[..., :7].clone(), {"offs": OFFS}),
    "double precision": (X.double(), W.double(), {"offs": OFFS}),
    "two dtypes": (X, W.bfloat16(), {"offs": OFFS}),
    "a bias": (X, W, {"offs": OFFS, "bias": given(B, N)}),
    "another dtype of the result": (X, W, {"offs": OFFS, "out_dtype": torch.bfloat16}),
    "vectors": (X[:, 0], W, {"offs": OFFS}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_loop_refuses_is_refused_in_its_words(case):
    x, w, rest = REFUSED[case]
    tensors = {k: v for k, v in rest.items() if isinstance(v, Tensor)}
    others = {k: v for k, v in rest.items() if k not in tensors}

    def f(x, w, *given):
        return F.grouped_mm(x, w, **dict(zip(tensors, given, strict=True)), **others)

    with pytest.raises(RuntimeError) as theirs:
        loop(f)(x, w, *tensors.values())
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        vmap(f)(x, w, *tensors.values())


# --- derivatives ---------------------------------------------------------------------------------


def energy(x, w, offs):
    return F.grouped_mm(x.tanh(), w.mT.contiguous().mT.sin(), offs=offs).sin().sum()


def gradients(argnums):
    """Those of `energy`, by torch."""

    def found(*args):
        own = [a.clone().requires_grad_() if i in argnums else a for i, a in enumerate(args)]
        return torch.autograd.grad(energy(*own), [own[i] for i in argnums])

    return found


def turned(argnum):
    """A derivative of the second order: the gradient of one along the gradient's own sine."""

    def found(x, w, offs):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        (g,) = torch.autograd.grad(
            energy(x, w, offs), (x, w)[argnum : argnum + 1], create_graph=True
        )
        return torch.autograd.grad(g.sin().sum(), (x, w))

    return found


SHARINGS = [
    (0, 0, 0),
    (0, None, 0),
    (None, 0, 0),
    (0, None, None),
    (None, 0, None),
    (None, None, 0),
]


def operands(in_dims):
    return [a if d == 0 else a[0] for a, d in zip((X, W, OFFS), in_dims, strict=True)]


@pytest.mark.parametrize("in_dims", SHARINGS, ids=str)
def test_gradients_of_each_example(in_dims):
    args = operands(in_dims)
    got = whole(grad(energy, (0, 1)), *args, in_dims=in_dims)
    assert same(got, loop(gradients((0, 1)), in_dims)(*args))


@pytest.mark.parametrize("worth", [1, sources.WORTH])
@pytest.mark.parametrize("in_dims", SHARINGS, ids=str)
def test_gradients_of_what_all_share(in_dims, worth, monkeypatch):
    monkeypatch.setattr(sources, "WORTH", worth)
    x, w, offs = operands(in_dims)
    got = grad(lambda x, w: vmap(energy, in_dims)(x, w, offs).sum(), (0, 1))(x, w)
    want = loop(gradients((0, 1)), in_dims)(x, w, offs)
    total = (g if d == 0 else g.sum(0) for g, d in zip(want, in_dims, strict=False))
    assert same(got, tuple(total))


@pytest.mark.parametrize("offs", [OFFS, OFFS[0], SHORT], ids=["of each", "shared", "short"])
def test_a_shared_weights_gradient_is_added_up_before_it_is_made(offs, monkeypatch):
    monkeypatch.setattr(sources, "WORTH", 1)
    sums = []
    add_up = sources.sum_grouped_products
    monkeypatch.setattr(
        sources, "sum_grouped_products", lambda *args: sums.append(1) or add_up(*args)
    )
    x, w = X[:, :, :4].contiguous(), W[0, :, :4].contiguous()  # smaller than the weight
    in_dims = (0, None, 0 if offs.dim() == 2 else None)

    def inside(x, w, offs):
        y = F.grouped_mm(x, w, offs=offs).sin()
        return torch.where((torch.arange(R) < offs[-1])[:, None], y, 0).sum()

    def torchs(x, w, offs):
        w = w.clone().requires_grad_()
        return torch.autograd.grad(inside(x, w, offs), w)[0]

    got = grad(lambda w: vmap(inside, in_dims)(x, w, offs).sum())(w)
    assert same(got, loop(torchs, in_dims)(x, w, offs).sum(0))
    assert sums


@pytest.mark.parametrize("argnum", [0, 1])
@pytest.mark.parametrize("in_dims", SHARINGS[:4], ids=str)
def test_second_derivatives(in_dims, argnum):
    args = operands(in_dims)

    def f(x, w, offs):
        return grad(lambda x, w: grad(energy, argnum)(x, w, offs).sin().sum(), (0, 1))(x, w)

    assert same(whole(f, *args, in_dims=in_dims), loop(turned(argnum), in_dims)(*args))


@pytest.mark.parametrize("moving", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("in_dims", SHARINGS, ids=str)
def test_forward_mode_is_the_transpose_of_reverse_mode(in_dims, moving):
    args = operands(in_dims)
    tangents = [given(*args[i].shape, seed=7 + i) for i in moving]

    def along(*both):
        own, ts = list(both[:3]), both[3:]

        def f(*xs):
            for i, x in zip(moving, xs, strict=True):
                own[i] = x
            return energy(*own)

        return jvp(f, tuple(both[i] for i in moving), ts)[1]

    def truth(*both):
        found = gradients(moving)(*both[:3])
        return sum((g * t).sum() for g, t in zip(found, both[3:], strict=True))

    dims = (*in_dims, *(in_dims[i] for i in moving))
    assert same(whole(along, *args, *tangents, in_dims=dims), loop(truth, dims)(*args, *tangents))
    first = [a[0] if d == 0 else a for a, d in zip((*args, *tangents), dims, strict=True)]
    assert same(along(*first), truth(*first))


SPREAD = given(5, 4, seed=9), given(2, 4, 4, seed=8)


def small(x, v, offs):
    """Of few numbers."""
    rows, matrices = SPREAD
    return F.grouped_mm(x[:, None] * rows, v[:, None, None] * matrices, offs=offs).sin()


def rows_of(f, *args, argnum):
    return torch.autograd.functional.jacobian(
        lambda a: f(*args[:argnum], a, *args[argnum + 1 :]), args[argnum]
    )


FEW = (given(B, 5, seed=3), given(B, 2, seed=4), ends((2, 5), (0, 5), (5, 5)))


@pytest.mark.parametrize("argnum", [0, 1])
@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_jacobians(jacobian, argnum):
    want = loop(lambda *args: rows_of(small, *args, argnum=argnum))(*FEW)
    assert same(whole(jacobian(small, argnum), *FEW), want)


@pytest.mark.parametrize("argnum", [0, 1])
def test_hessians(argnum):
    def f(*args):
        return small(*args).sum()

    def truth(*args):
        return torch.autograd.functional.hessian(
            lambda a: f(*args[:argnum], a, *args[argnum + 1 :]), args[argnum]
        )

    for order in (
        hessian(f, argnum),
        jacfwd(jacfwd(f, argnum), argnum),
        jacrev(grad(f, argnum), argnum),
    ):
        assert same(whole(order, *FEW), loop(truth)(*FEW))


@pytest.mark.parametrize("in_dims", SHARINGS, ids=str)
def test_forward_mode_around_vmap(in_dims):
    """Of what is added up over all examples, by `jvp` and by `linearize`."""
    x, w, offs = operands(in_dims)
    ts = given(*x.shape, seed=7), given(*w.shape, seed=8)

    def f(x, w):
        return vmap(energy, in_dims)(x, w, offs)

    found = torch.autograd.functional.jacobian(
        lambda x, w: loop(energy, in_dims)(x, w, offs), (x, w)
    )
    want = sum((j * t).flatten(1).sum(1) for j, t in zip(found, ts, strict=True))
    assert same(jvp(f, (x, w), ts)[1], want)
    assert same(linearize(f, x, w)[1](*ts), want)


def test_norms_of_gradients():
    in_dims = (0, None, 0)
    args = operands(in_dims)
    (want,) = loop(gradients((1,)), in_dims)(*args)
    assert same(
        per_example_grad_norm(energy, 1, in_dims=in_dims)(*args), want.flatten(1).norm(dim=1)
    )


# --- nested, replayed, recorded ------------------------------------------------------------------


@pytest.mark.parametrize("inner", SHARINGS, ids=str)
@pytest.mark.parametrize("outer", SHARINGS, ids=str)
def test_vmap_of_vmap(outer, inner):
    args = []
    for a, i, o in zip((X, W, OFFS), inner, outer, strict=True):
        a = a if i == 0 else a[0]
        args.append(
            torch.stack([a, a.flip(0) if a.dtype == torch.int32 and i == 0 else a + 0])
            if o == 0
            else a
        )
    f = lambda x, w, offs: F.grouped_mm(x, w, offs=offs)  # noqa: E731
    got = whole(vmap(f, inner), *args, in_dims=outer)
    assert same(got, loop(loop(f, inner), outer)(*args))


def experts(x, router, up, down, top=2):
    """A layer as in models: (T, D) -> (T, D), each row by the experts that it is sent to."""
    weights, index = (x @ router).softmax(-1).topk(top, -1)
    order = index.flatten().argsort(stable=True)
    counts = torch.histc(index.flatten().float(), bins=G, min=0, max=G - 1)
    offs = counts.cumsum(0, dtype=torch.int32)
    rows = x[order // top]
    h = F.silu(F.grouped_mm(rows, up.mT, offs=offs))
    y = F.grouped_mm(h, down.mT, offs=offs) * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // top, y)


def loss(x, router, up, down):
    return experts(x, router, up, down).square().mean()


LAYER = (given(K, G, seed=5), given(G, N, K, seed=6), given(G, K, N, seed=7))
LAYERS = tuple(torch.stack([p, p * 1.1, p * 0.9]) for p in LAYER)


def torchs_gradients(*args):
    own = [a.clone().requires_grad_() for a in args]
    return torch.autograd.grad(loss(*own), own)


@pytest.mark.parametrize("shared", [True, False])
def test_a_layer_of_experts(shared):
    in_dims = (0, None, None, None) if shared else 0
    args = (X, *(LAYER if shared else LAYERS))
    assert is_loop(experts, *args, in_dims=in_dims)
    got = whole(grad(loss, (0, 1, 2, 3)), *args, in_dims=in_dims)
    assert same(got, loop(torchs_gradients, in_dims)(*args))


@pytest.mark.parametrize("shared", [True, False])
def test_replayed_calls(shared, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", "check")
    monkeypatch.setattr(forall.config, "patience", 0)
    in_dims = (0, None, None, None) if shared else 0
    layer = vmap(experts, in_dims)
    slopes = vmap(grad(loss, (0, 1, 2, 3)), in_dims)
    summed_up = grad(lambda x, *p: vmap(loss, in_dims)(x, *p).sum(), (1, 2, 3))
    for n in range(4):
        args = (X.roll(n, 1) * (n + 1), *(LAYER if shared else LAYERS))
        want = loop(torchs_gradients, in_dims)(*args)
        assert same(layer(*args), loop(experts, in_dims)(*args))
        assert same(slopes(*args), want)
        assert same(summed_up(*args), tuple(g.sum(0) if shared else g for g in want[1:]))


def test_recorded_calls():
    jitted = forall.jit(vmap(grad(loss, (0, 1, 2, 3)), (0, None, None, None)))
    for n in range(3):
        args = (X.roll(n, 1), *LAYER)
        assert same(jitted(*args), loop(torchs_gradients, (0, None, None, None))(*args))
    assert jitted.cache_info().hits == 2
