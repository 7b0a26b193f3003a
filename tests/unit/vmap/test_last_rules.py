"""Rules for operators that nothing else leads to, and what still runs once per example."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.nn import functional as F

from forall import PerformanceWarning, grad, jvp, vmap
from forall._compat.private_api import DispatchKey, has_kernel
from forall._compat.versions import get_release
from forall._vmap import registry, rule_lookup
from forall._vmap.rules.attention import ROW, align_mask_rows
from oracle import check_vmap, difference, loop

aten = torch.ops.aten
D = torch.float64


@pytest.fixture(autouse=True)
def _no_loops():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        yield


def _drawn(*shape):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(len(shape)))


def _placed(f, *examples):
    """vmap is the loop: every subset of the arguments, first axis and last, several sizes."""
    n = len(examples)
    for which in range(1, 2**n):
        for place in (0, -1):
            dims = tuple(place if which >> j & 1 else None for j in range(n))
            args = [
                e[0] if d is None else e.movedim(0, d) for e, d in zip(examples, dims, strict=True)
            ]
            check_vmap(f, tuple(args), dims)
    for size in (0, 1):
        mine = vmap(f)(*(e[:size] for e in examples))
        truth = loop(f)(*examples)
        flat = zip(*(t if isinstance(t, tuple) else (t,) for t in (mine, truth)), strict=True)
        for ours, theirs in flat:
            assert difference(ours, theirs[:size]) is None


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [F.hardshrink, F.softshrink])
def test_shrinking_backward(f):
    x = _drawn(3, 4, 5)

    def g(x):
        return f(x).square().sum()

    def plain(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(g(x), x)[0]

    for dim in (0, 1, 2):
        args = x.movedim(0, dim)
        assert difference(vmap(grad(g), dim)(args), loop(plain, dim)(args)) is None


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tangents_of_gates(dim):
    x, t = _drawn(3, 4, 6), _drawn(3, 4, 6) + 1
    _placed(lambda y, x, t: aten.glu_jvp(y, x, t, dim), F.glu(x, dim % 2 + 1), x, t)
    g = _drawn(3, *F.glu(x[0], dim).shape)
    _placed(lambda a, b, x, c, t: aten.glu_backward_jvp(a, b, x, c, t, dim), x + 1, g, x, g + 1, t)

    def tangent(x, t):
        return jvp(lambda x: F.glu(x, dim), (x,), (t,))[1]

    def plain(x, t):
        return torch.autograd.functional.jvp(lambda x: F.glu(x, dim), x, t)[1]

    assert difference(vmap(tangent)(x, t), loop(plain)(x, t)) is None


def test_masked_softmax_backward():
    x, g = _drawn(3, 2, 4, 5, 5), _drawn(3, 2, 4, 5, 5) + 1
    mask = _drawn(3, 2, 4, 5, 5) > 0.5
    y = aten._masked_softmax(x, mask, -1, 2)
    _placed(lambda g, y, m: aten._masked_softmax_backward(g, y, m, -1), g, y, mask)


def test_slow_convolution_backward():
    x, w, g = _drawn(3, 2, 2, 6, 6), _drawn(3, 4, 2, 3, 3), _drawn(3, 2, 4, 4, 4)

    def f(g, x, w):
        return aten._slow_conv2d_backward.output_mask(
            g, x, w, [3, 3], [1, 1], [0, 0], [True, True, True]
        )

    _placed(f, g, x, w)


@pytest.mark.parametrize(("heads", "width"), [(1, 3), (2, 4), (3, 8)])
def test_heads_of_an_attention(heads, width):
    qkv, bias = _drawn(3, 2, 5, 3 * heads * width), _drawn(3, 3 * heads * width)
    _placed(lambda x, b: aten._transform_bias_rescale_qkv(x, b, heads), qkv, bias)
    inner = vmap(lambda x, b: aten._transform_bias_rescale_qkv(x, b, heads), (0, None))
    check_vmap(inner, (qkv.unsqueeze(1), bias), (0, 0))  # another call inside


# --- products and sums ---------------------------------------------------------------------------


def test_products_of_integers():
    x = torch.randint(-128, 128, (3, 17, 8), dtype=torch.int8)
    w = torch.randint(-128, 128, (3, 8, 16), dtype=torch.int8)
    _placed(torch._int_mm, x, w)


def test_linear_combinations_and_triangular_solutions():
    _placed(aten._compute_linear_combination.default, _drawn(3, 4, 2, 2), _drawn(3, 5, 4))
    a = _drawn(3, 4, 4).tril() + 4 * torch.eye(4, dtype=D)
    _placed(lambda b, a: aten._cholesky_solve_helper(b, a, False), _drawn(3, 4, 2), a)


def test_sums_cut_off_at_zero():
    _placed(lambda x, y: aten._add_relu.Tensor(x, y, alpha=2), _drawn(3, 4), _drawn(3, 4) + 0.1)
    _placed(lambda x: aten._add_relu.Scalar(x, 0.3), _drawn(3, 4))


@pytest.mark.parametrize("density", [False, True])
def test_histograms_of_points(density):
    x, w = _drawn(3, 20, 2), torch.rand(3, 20, dtype=D)
    limits = [-1.0, 1.0, -0.5, 2.0]
    _placed(lambda x: tuple(torch.histogramdd(x, [4, 3])[1]), x)
    _placed(lambda x: torch.histogramdd(x, 5, density=density)[0], x)
    _placed(lambda x: torch.histogramdd(x, [4, 3], range=limits, density=density)[0], x)
    _placed(lambda x, w: torch.histogramdd(x, [4, 3], weight=w, density=density)[0], x, w)
    _placed(lambda x: torch.histogramdd(x.round(), [4, 3], range=limits)[0], x)
    edges = _drawn(3, 5).sort(1)[0], _drawn(3, 4).sort(1)[0] + 0.1
    _placed(lambda x, a, b: torch.histogramdd(x, (a, b), density=density)[0], x, *edges)


# --- quantisation --------------------------------------------------------------------------------


def test_learned_scales():
    x, g = _drawn(3, 4, 5).float(), _drawn(3, 4, 5).float() + 1
    scale, zero = torch.rand(3, 1) + 0.1, torch.tensor([[-1.0], [0.0], [2.0]])
    tensor = aten._fake_quantize_learnable_per_tensor_affine
    _placed(lambda x, s, z: tensor(x, s, z, -8, 7, 0.5), x, scale, zero)
    back = aten._fake_quantize_learnable_per_tensor_affine_backward
    _placed(lambda g, x, s, z: back(g, x, s, z, -8, 7, 0.5), g, x, scale, zero)
    scale, zero = torch.rand(3, 4) + 0.1, torch.randint(-2, 3, (3, 4)).float()
    channel = aten._fake_quantize_learnable_per_channel_affine
    _placed(lambda x, s, z: channel(x, s, z, 0, -8, 7, 0.5), x, scale, zero)
    _placed(lambda x, s, z: channel(x, s, z, 1, -8, 7, 0.5), x.mT.contiguous(), scale, zero)
    back = aten._fake_quantize_learnable_per_channel_affine_backward
    _placed(lambda g, x, s, z: back(g, x, s, z, 0, -8, 7, 0.5), g, x, scale, zero)


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_quantised_tensors_of_one_scale():
    x = _drawn(3, 4, 5).float()

    def tensor(x):
        q = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
        return q.int_repr(), q.dequantize()

    def channels(x):
        scales, zeros = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.arange(4)
        q = torch.quantize_per_channel(x, scales, zeros, 0, torch.quint8)
        return q.int_repr(), q.dequantize()

    for f in (tensor, channels):
        for dim in (0, -1):
            check_vmap(f, (x.movedim(0, dim),), dim)
    with pytest.raises(NotImplementedError, match="Give all examples one scale"):
        vmap(lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False))(x)
    with pytest.raises(NotImplementedError, match="Give all examples one scale"):
        vmap(lambda x, s: torch.quantize_per_tensor(x, s, torch.tensor(0), torch.quint8))(
            x, torch.rand(3)
        )


# --- other layouts -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_coordinates():
    x = _drawn(3, 4, 5) * (_drawn(3, 4, 5) > 0)  # each example has entries of its own
    for dim in (0, 1, 2):
        check_vmap(lambda x: x.to_sparse().to_dense(), (x.movedim(0, dim),), dim)
        check_vmap(lambda x: x.to_sparse(1).to_dense(), (x.movedim(0, dim),), dim)
    sparse = vmap(lambda x: x.to_sparse())(x)
    assert sparse.layout is torch.sparse_coo
    assert sparse.to_dense().equal(x)
    indices, values = torch.randint(4, (3, 2, 6)), _drawn(3, 6)

    def f(i, v):
        return torch.sparse_coo_tensor(i, v, (4, 5)).to_dense()

    _placed(f, indices, values)
    _placed(
        lambda i, v: torch.sparse_coo_tensor(i, v, (4, 5, 2)).to_dense(), indices, _drawn(3, 6, 2)
    )

    def g(v, i):
        return f(i, v).square().sum()

    def plain(v, i):
        v = v.detach().requires_grad_()
        return torch.autograd.grad(g(v, i), v)[0]

    assert difference(vmap(grad(g))(values, indices), loop(plain)(values, indices)) is None


SPDIAGS = torch.sparse.spdiags
OFFSETS = torch.tensor([[0, 1], [1, -1], [-2, 3]])  # they have 7, 6 and 2 entries in (4, 4)


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (7, 4)])
def test_rows_put_on_diagonals(shape):
    def f(d, o):
        return SPDIAGS(d, o, shape)

    d, offsets = _drawn(3, 2, 4), OFFSETS.clamp(min=-shape[0])
    _placed(lambda d, o: f(d, o).to_dense(), d, offsets)
    _placed(lambda d, o: SPDIAGS(d, o, shape, torch.sparse_coo).to_dense(), d[:, 0], offsets[:, 0])
    check_vmap(lambda d: f(d > 0, offsets[0]), (d.movedim(0, 2),), 2)
    check_vmap(lambda d: f((d + 1j * d).conj(), offsets[1]), (d.movedim(0, 1),), 1)
    truth = [f(a, o) for a, o in zip(d, offsets, strict=True)]
    found = vmap(f, (2, 1))(d.movedim(0, 2), offsets.mT)
    which = found._indices()[0]
    for i, one in enumerate(truth):  # entry by entry, in torch's order, with the zeros among them
        assert torch.equal(found._indices()[1:, which == i], one._indices())
        assert torch.equal(found._values()[which == i], one._values())


def test_rows_put_on_diagonals_in_nested_calls_and_branches():
    def f(d, o):
        return SPDIAGS(d, o, (4, 4)).to_dense()

    def branches(d, o):
        if d[0, 0] > 0:
            m = SPDIAGS(2 * d, o, (4, 4))
        elif d[1, 1] > 0:
            m = SPDIAGS(d, o.flip(0), (4, 4))
        else:
            m = SPDIAGS(d[:1], torch.zeros(1, dtype=torch.long), (4, 4))
        return m

    d = _drawn(3, 2, 4)
    d[:, 0, 0], d[:, 1, 1] = torch.tensor([1.0, -1, -1]), torch.tensor([1.0, 1, -1])
    for g in (f, lambda d, o: branches(d, o).to_dense()):
        for inner, outer in (((0, None), (None, 0)), ((None, 0), (0, None)), ((0, 0), (None, 0))):
            given = d, OFFSETS.expand(2, 3, 2) if None not in inner else OFFSETS
            found = vmap(vmap(g, inner), outer)(*given)
            assert difference(found, loop(loop(g, inner), outer)(*given)) is None
    check_vmap(branches, (d, OFFSETS))
    check_vmap(lambda d: branches(d, OFFSETS[0]), (d,))


def test_rows_that_cannot_be_put_on_diagonals():
    d = _drawn(3, 2, 4)
    failures = {
        "duplicate": lambda d, o: SPDIAGS(d, o * (o != 1), (4, 4)),  # of the first example alone
        "negative dimension": lambda d, o: SPDIAGS(d, o + 9, (4, 4)),
        "Long": lambda d, o: SPDIAGS(d, o.int(), (4, 4)),
        "number of offsets": lambda d, o: SPDIAGS(d, o[:1], (4, 4)),
        "Offsets must be": lambda d, o: SPDIAGS(d, o[None], (4, 4)),
        "Diagonals must be": lambda d, o: SPDIAGS(d[None], o, (4, 4)),
        "2d": lambda d, o: SPDIAGS(d, o, (4,)),
        "got Strided": lambda d, o: SPDIAGS(d, o, (4, 4), torch.strided),
    }
    for words, f in failures.items():
        with pytest.raises(RuntimeError) as expected:
            loop(f)(d, OFFSETS)
        with pytest.raises(RuntimeError, match=words) as found:
            vmap(f)(d, OFFSETS)
        assert str(found.value) == str(expected.value)
    for layout in (torch.sparse_csr, torch.sparse_csc):
        with pytest.raises(NotImplementedError, match="have no stack"):
            vmap(lambda d, layout=layout: SPDIAGS(d, OFFSETS[0], (4, 4), layout))(d)
    with pytest.raises(RuntimeError, match="derivative for aten::_spdiags is not implemented"):
        vmap(grad(lambda d: SPDIAGS(d, OFFSETS[0], (4, 4)).to_dense().sum()))(d)


def test_rows_that_do_not_fit_are_cut_off():
    """Torch writes over other entries, or keeps places that are not there."""
    d = _drawn(3, 2, 4)
    whole = loop(lambda d: SPDIAGS(d, OFFSETS[0], (4, 4)).to_dense())(d)
    for shape in ((2, 4), (4, 2), (1, 1)):
        cut = vmap(lambda d, shape=shape: SPDIAGS(d, OFFSETS[0], shape).to_dense())(d)
        assert torch.equal(cut, whole[:, : shape[0], : shape[1]])
    outside = vmap(lambda d: SPDIAGS(d, torch.tensor([0, -6]), (4, 4)).to_dense())(d)
    assert torch.equal(outside, d[:, 0].diag_embed())


def test_layouts_without_a_stack_are_refused():
    for f in (torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn):
        with pytest.raises(NotImplementedError, match="have no stack"):
            vmap(f)(torch.rand(3, 4, 4))


# --- questions -----------------------------------------------------------------------------------


def test_questions_about_memory_and_masks():
    x = _drawn(3, 4, 5)
    check_vmap(lambda x: x + x.is_set_to(x), (x,), 1)
    check_vmap(lambda x: x + x.is_set_to(x.clone()), (x,))
    mask = torch.arange(5) < torch.tensor([2, 5, 0, 3])[:, None]
    for m in (mask, mask.flip(1)):
        check_vmap(
            lambda x, m: x + aten._nested_tensor_from_mask_left_aligned(x[..., None], m),
            (x, m),
            (0, None),
        )
        check_vmap(
            lambda x, m: x + aten._nested_tensor_from_mask_left_aligned(x[..., None], m),
            (x, m.expand(3, 4, 5)),
        )


# --- out= ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fill",
    [
        lambda x, out: torch.zeros(4, out=out),
        lambda x, out: torch.full((4,), 2.5, out=out),
        lambda x, out: torch.arange(1, 9, 2, out=out),
        lambda x, out: torch.linspace(0, 1, 4, out=out),
        lambda x, out: torch.linspace(x[0], 1, 4, out=out),
        lambda x, out: torch.logspace(x[0], x[1], 4, out=out),
        lambda x, out: aten.full_like.out(x, 2.0, out=out),
        lambda x, out: aten.ones_like.out(x, out=out),
        lambda x, out: aten.hann_window.out(4, out=out),
        lambda x, out: aten._to_copy.out(x, out=out),
        lambda x, out: aten.polygamma.out(1, x.abs() + 1, out=out),
    ],
)
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_factories_with_out(fill, dtype):
    x = _drawn(3, 4)
    check_vmap(lambda x: fill(x, x.to(dtype, copy=True)), (x.mT,), 1)
    check_vmap(lambda x, out: fill(x, out), (x, torch.empty(3, 4, dtype=dtype)))


def test_in_place_forms_in_inference_mode():
    """Torch leaves composite operators whole there."""
    x = _drawn(3, 4, 5)
    with torch.inference_mode():
        check_vmap(lambda x: x.clone().fill_diagonal_(2.0), (x,), 1)
        check_vmap(lambda x: F.dropout(x.clone(), 0.5, False, True), (x,))
        drawn = vmap(lambda x: F.dropout(x.clone(), 0.5, True, True), randomness="different")(x)
    assert bool(((drawn == 0) | (drawn == 2 * x)).all())


# --- what is left --------------------------------------------------------------------------------

LEFT = {
    "_cummax_helper.default": "only cummax calls it, which has a rule",
    "_cummin_helper.default": "only cummin calls it, which has a rule",
    "_embedding_bag_dense_backward.default": "_embedding_bag_backward has a rule and does without",
    "_functional_assert_async.msg": "what torch.compile makes of _assert_async, which has a rule",
    "_fused_moving_avg_obs_fq_helper.default": "an observer: keeps statistics of what it has seen",
    "_native_multi_head_attention.default": "the fast path of MultiheadAttention, not taken here",
    "_scaled_mm.default": "float8, with scales for blocks of it",
    "_scaled_mm_v2.default": "float8, with scales for blocks of it",
    "_slow_conv2d_backward.grad_input": "an out= form by another name, which nothing calls",
    "_transformer_encoder_layer_fwd.default": "the fast path of an encoder layer, not taken here",
    "normal.out": "an in-place draw under another name, which nothing calls",
    # Some releases have these.
    "_philox_key_fold_in.default": "a key of torch's own stateless draws; forall.random has others",
    "_philox_key_fold_in.Tensor": "the same",
    "_philox_key_split.default": "the same",
    "_scaled_addmm.default": "float8, with scales for blocks of it",
    "_scaled_grouped_mm_v2.default": "float8, with scales for blocks of it",
    "shallow_copy_data_.default": "how a traced program sets x.data",
}
if get_release() < (2, 13):
    LEFT["_unique.default"] = "an older form of _unique2, which has a rule"
# What these work on is no dense tensor, or is a weight packed for one kernel.
_ELSEWHERE = re.compile("nested|jagged|quant|indices|values|sparse|int4pack|int8pack|_test_")
_KERNELS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


def _overloads():
    """Of aten, those that take a tensor and have a kernel for dense ones on the CPU."""
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        op = getattr(getattr(aten, name, None), schema.overload_name or "default", None)
        if (
            op is not None
            and any("Tensor" in str(a.type) for a in schema.arguments)
            and not _ELSEWHERE.search(name)
            and torch._C._dispatch_has_kernel(op.name())
            and any(has_kernel(op.name(), getattr(DispatchKey, k)) for k in _KERNELS)
        ):
            yield op


def test_what_is_left_to_the_loop():
    loops = (rule_lookup._loop_and_warn, rule_lookup._loop_and_write, rule_lookup._loop_into_out)
    handlers = {
        op: registry.HANDLERS.get(op) or rule_lookup._find_handler(op)[0] for op in _overloads()
    }
    assert len(handlers) > 1500
    left = {str(op).removeprefix("aten.") for op, handler in handlers.items() if handler in loops}
    assert left == set(LEFT) & {str(op).removeprefix("aten.") for op in handlers}
    assert len(LEFT) <= 20


@pytest.mark.parametrize("columns", [1, 6, 16, 19])
def test_rows_of_a_mask_begin_where_the_memory_efficient_kernel_reads_them(columns):
    mask = torch.randn(4, 2, 3, columns)
    aligned = align_mask_rows(mask)
    assert torch.equal(aligned, mask)
    assert aligned.stride(-2) % ROW == 0
    assert align_mask_rows(aligned) is aligned
