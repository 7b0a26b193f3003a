"""The four ways to a second derivative of an operator agree: forward and reverse, over each other.

A formula of torch's that reads what its operator saved is right once and lacks terms the next time,
without a word. `python -m laws.test_second_derivatives_agree` looks at every entry of op_db.
"""

import random
import sys
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from draws import HERE, make_generator
from forall import grad, jvp, vmap
from sweep.entries import Flat, _most_different, all_ops

D = torch.float64

# Their examples show these by name, whatever is drawn.
ALWAYS = (
    "aminmax",
    "cdist",
    "cumprod",
    "linalg.det",
    "linalg.eigh",
    "linalg.householder_product",
    "linalg.slogdet",
    "linalg.solve",
    "logsumexp",
    "nn.functional.batch_norm",
    "nn.functional.embedding_bag",
    "nn.functional.glu",
    "nn.functional.hardsigmoid",
    "nn.functional.instance_norm",
    "nn.functional.layer_norm",
    "nn.functional.multi_margin_loss",
    "nn.functional.pdist",
    "nn.functional.scaled_dot_product_attention",
    "scatter_reduce:prod",
    "_segment_reduce:lengths",
    "softmax",
    "torch.ops.aten._safe_softmax.default",
    "triangular_solve",
)

# Entries left out, and why.
APART = {
    "as_strided:partial_views": "reads a storage that a clone does not have",
    "as_strided_scatter": "torch's backward lacks terms where the gradient has other strides",
    "bfloat16": "rounds",
    "chalf": "rounds",
    "cov": "its samples' weights are of single precision",
    "half": "rounds",
    "cholesky_inverse": "its entries' samples are too ill-conditioned to compare",
    "nn.functional.cosine_embedding_loss": "its samples lie at a kink",
    "polygamma:polygamma_n_0": "its samples lie at a pole",
    "polygamma:polygamma_n_1": "its samples lie at a pole",
    "polygamma:polygamma_n_2": "its samples lie at a pole",
    "polygamma:polygamma_n_3": "its samples lie at a pole",
    "polygamma:polygamma_n_4": "its samples lie at a pole",
    "special.polygamma:special_polygamma_n_0": "its samples lie at a pole",
    "sparse.mm:reduce": "torch has one derivative of it",
    "sparse.sampled_addmm": "forward mode has no sparse values",
    "linalg.norm:subgradients_at_zero": "has no second derivative there",
    "masked.logaddexp": "nan in torch's reverse mode, where the derivative is zero",
    "nn.functional.linear_cross_entropy:chunked": "documented to have one derivative",
    "nn.functional.linear_cross_entropy:chunked_none": "documented to have one derivative",
    "nn.functional.max_unpool2d": "its samples write one place twice",
    "nn.functional.max_unpool3d": "its samples write one place twice",
    "tensor_split": "reads where to cut from a tensor of the level",
    "to_sparse": "a sparse value has no wrapper in forward mode",
}


def problems(op, count):
    """Scalar functions of the tensors that samples of the entry differentiate, and their values."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    samples = list(islice(op.sample_inputs(HERE.type, D, requires_grad=True, set_seed=False), 120))
    flat = [
        Flat(*tree_flatten((s.input, tuple(s.args), dict(s.kwargs))), s.output_process_fn_grad)
        for s in samples
    ]
    for i in _most_different(flat, count):
        leaves, spec, _ = flat[i]
        places = [k for k, x in enumerate(leaves) if _moves(x)]
        elements = sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))
        if places and elements < 2000:
            yield scalar(op, samples[i], leaves, spec, places)


def _moves(x):
    return isinstance(x, torch.Tensor) and x.requires_grad and x.layout is torch.strided


def scalar(op, sample, leaves, spec, places):
    base = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]

    def f(*xs):
        full = [x.clone() if isinstance(x, torch.Tensor) else x for x in base]
        for k, x in zip(places, xs, strict=True):
            full[k] = x
        first, args, kwargs = tree_unflatten(full, spec)
        torch.manual_seed(7)
        out = sample.output_process_fn_grad(op.gradcheck_wrapper(op.op, first, *args, **kwargs))
        total = torch.zeros((), dtype=D)
        for k, y in enumerate(tree_flatten(out)[0]):
            if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
                y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
                total = total + (y * weights(y, k)).sum()
        return total

    return f, tuple(base[k] for k in places)


def weights(y, k):
    return torch.arange(1, y.numel() + 1).reshape(y.shape).to(D).add(k).cos()


def directions(xs, seed):
    generator = make_generator(seed)
    return tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in xs)


def dot(gs, us):
    terms = [(g.conj() * u).real if g.is_complex() else g * u for g, u in zip(gs, us, strict=True)]
    return sum((t.sum() for t in terms), torch.zeros((), dtype=D))


def first(f, xs):
    return grad(f, argnums=tuple(range(len(xs))))(*xs)


WAYS = {
    "forward over forward": lambda f, xs, u, v: jvp(lambda *x: jvp(f, x, u)[1], xs, v)[1],
    "forward over reverse": lambda f, xs, u, v: dot(jvp(lambda *x: first(f, x), xs, v)[1], u),
    "reverse over forward": lambda f, xs, u, v: dot(first(lambda *x: jvp(f, x, u)[1], xs), v),
    "reverse over reverse": lambda f, xs, u, v: dot(first(lambda *x: dot(first(f, x), u), xs), v),
}


def quotient(f, xs, u, v, step=1e-5):
    """The second derivative by differences of torch's own first one."""

    def slope(sign):
        moved = [(x + sign * step * d).requires_grad_() for x, d in zip(xs, v, strict=True)]
        y = f(*moved)
        if not y.requires_grad:
            return torch.zeros((), dtype=D)
        found = torch.autograd.grad(y, moved, allow_unused=True)
        return dot(
            [torch.zeros_like(m) if g is None else g for g, m in zip(found, moved, strict=True)], u
        )

    return (slope(1) - slope(-1)) / (2 * step)


def check(op, count):
    for f, xs in problems(op, count):
        u, v = directions(xs, 1), directions(xs, 2)
        truth = WAYS["reverse over reverse"](f, xs, u, v)
        for name, way in WAYS.items():
            found = way(f, xs, u, v)
            assert torch.allclose(found, truth, 1e-6, 1e-6, equal_nan=True), (name, found, truth)
        rough = quotient(f, xs, u, v)
        smooth = bool((rough - truth).abs() <= 1e-3 * (1 + truth.abs()))
        yield smooth or bool(truth.isnan()), rough, truth


OPS = {
    name: op
    for name, op in all_ops().items()
    if D in op.dtypes and op.supports_autograd and name not in APART
}
DRAWN = sorted({*ALWAYS} | set(random.Random(0).sample(sorted(OPS), 40)))


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWN)
def test_an_operators_second_derivatives_agree(name):
    for smooth, rough, truth in check(OPS[name], 2):
        assert smooth, f"{truth.item()}, by differences {rough.item()}"


@pytest.mark.parametrize("name", ["linalg.solve", "nn.functional.layer_norm", "linalg.slogdet"])
@pytest.mark.parametrize("way", WAYS)
def test_of_examples_too(name, way):
    f, xs = next(problems(OPS[name], 1))
    u, v = directions(xs, 1), directions(xs, 2)
    stacks = tuple(torch.stack([x, 1.1 * x]) for x in xs)
    truth = torch.stack([WAYS[way](f, row, u, v) for row in zip(*stacks, strict=True)])
    torch.testing.assert_close(vmap(lambda *x: WAYS[way](f, x, u, v))(*stacks), truth)
    mapped = WAYS[way](lambda *x: vmap(f)(*x).sum(), stacks, *_twice(stacks, u, v))
    torch.testing.assert_close(mapped, truth.sum())


def _twice(stacks, *directions):
    return (tuple(d.expand_as(s) for d, s in zip(ds, stacks, strict=True)) for ds in directions)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    failed = 0
    for name in sys.argv[1:] or sorted(OPS):
        try:
            for smooth, rough, truth in check(OPS[name], 3):
                if not smooth:
                    print(name, "differences:", rough.item(), truth.item())
        except Exception as error:
            failed += 1
            print(name, type(error).__name__, str(error)[:200].replace("\n", " "), flush=True)
    print(f"{len(OPS)} entries, {failed} fail")
