"""FlexAttention inside transforms: the loop's value, and derivatives of the formula it stands for.

On a CPU torch's own has no derivative, so these are held to the formula, written out below.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, vjp, vmap

pytestmark = [
    # torch's own: that it was not compiled, and what its compiler says of itself
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore::Warning:torch"),
]

D = torch.float64
B, H, L, E = 2, 4, 6, 4
generator = make_generator(5)


def draw(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator)


Q, K, V = (draw(3, B, H, L, E) for _ in range(3))
BIAS = draw(3, H, L, L)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]])
CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device="cpu")
# The rows of the last two queries are masked whole.
MASKED = create_block_mask(lambda b, h, i, j: (i < L - 2) & (j > 0), None, None, L, L, device="cpu")

close = torch.testing.assert_close


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, mask: Tensor | bool) -> Tensor:
    """What each function below comes down to: ``bias`` (B, H, L, L) is added, ``mask`` stays."""
    n = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
    scores = q @ k.mT / math.sqrt(E) + bias
    kept = torch.as_tensor(mask).expand(scores.shape)
    weights = torch.where(kept, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total)) @ v


def loop(f: Callable, *args: Tensor) -> Tensor:
    """The results of ``f`` for one example after another; nothing is compiled, which takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        return torch.stack([f(*xs) for xs in zip(*args, strict=True)])


I, J = torch.arange(L)[:, None], torch.arange(L)  # noqa: E741 - of queries and keys
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=D)


def alibi(s, b, h, i, j):
    return s + SLOPES[h] * (j - i)


def soft_cap(s, b, h, i, j):
    return 2 * torch.tanh(s / 2)


# name: (of q, k, v; the same by the formula)
FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "plain": (flex_attention, lambda q, k, v: formula(q, k, v, 0.0, True)),
    "alibi": (
        lambda q, k, v: flex_attention(q, k, v, score_mod=alibi),
        lambda q, k, v: formula(q, k, v, SLOPES[:, None, None] * (J - I), True),
    ),
    "causal": (
        lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL),
        lambda q, k, v: formula(q, k, v, 0.0, I >= J),
    ),
    "masked whole": (
        lambda q, k, v: flex_attention(q, k, v, alibi, MASKED),
        lambda q, k, v: formula(q, k, v, SLOPES[:, None, None] * (J - I), (I < L - 2) & (J > 0)),
    ),
    "grouped": (
        lambda q, k, v: flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        lambda q, k, v: formula(q, k[:, :2], v[:, :2], 0.0, True),
    ),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.sweep(2)
@functions
def test_each_mapped_example_is_the_loops(name):
    f, _ = FUNCTIONS[name]
    want = loop(f, Q, K, V)
    close(vmap(f)(Q, K, V), want)
    close(vmap(f, in_dims=(0, None, None))(Q, K[0], V[0])[0], want[0])
    close(vmap(f, in_dims=(1, 1, 1))(Q.transpose(0, 1), K.transpose(0, 1), V.transpose(0, 1)), want)


@pytest.mark.sweep(2)
@functions
def test_derivatives_are_the_formulas(name):
    f, g = FUNCTIONS[name]
    at = (Q[0], K[0], V[0])
    cotangent, direction = draw(B, H, L, E), draw(B, H, L, E)
    close(f(*at), g(*at))
    close(vjp(f, *at)[1](cotangent), vjp(g, *at)[1](cotangent))
    directions = (direction, direction.sin(), direction.cos())
    close(jvp(f, at, directions), jvp(g, at, directions))

    def slope(f):
        return lambda q: grad(lambda q: f(q, K[0], V[0]).sin().sum())(q)

    close(jvp(slope(f), (Q[0],), (direction,)), jvp(slope(g), (Q[0],), (direction,)))
    close(
        grad(lambda q: slope(f)(q).square().sum())(Q[0]),
        grad(lambda q: slope(g)(q).square().sum())(Q[0]),
    )


@pytest.mark.sweep(2)
@functions
def test_mapped_gradients_and_gradients_of_mapped_calls(name):
    f, g = FUNCTIONS[name]

    def loss(f):
        return lambda q, k, v: f(q, k, v).sin().sum()

    want = [grad(loss(g), argnums=(0, 1, 2))(q, k, v) for q, k, v in zip(Q, K, V, strict=True)]
    want = tuple(map(torch.stack, zip(*want, strict=True)))
    close(vmap(grad(loss(f), argnums=(0, 1, 2)))(Q, K, V), want)
    close(grad(lambda *xs: vmap(loss(f))(*xs).sum(), argnums=(0, 1, 2))(Q, K, V), want)
    q = Q.clone().requires_grad_()
    close(torch.autograd.grad(vmap(loss(f))(q, K, V).sum(), q)[0], want[0])


def test_hessians():
    q, k, v = (x[0, :1, :1, :3, :2] for x in (Q, K, V))
    f = lambda q: flex_attention(q, k, v, soft_cap).sin().sum()  # noqa: E731

    def g(q):
        weights = (2 * torch.tanh(q @ k.mT / math.sqrt(2) / 2)).softmax(-1)
        return (weights @ v).sin().sum()

    close(hessian(f)(q), hessian(g)(q))
    close(jacfwd(jacfwd(f))(q), hessian(g)(q))
    close(jacrev(jacrev(f))(q), hessian(g)(q))


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i, j])


def test_captured_tensors_that_are_mapped():
    want = loop(biased, Q, K, V, BIAS)
    close(vmap(biased)(Q, K, V, BIAS), want)
    close(vmap(biased, in_dims=(None, None, None, 0))(Q[0], K[0], V[0], BIAS)[0], want[0])

    def slope(f):
        return grad(lambda bias, q, k, v: f(q, k, v, bias).sin().sum())

    by_formula = slope(lambda q, k, v, bias: formula(q, k, v, bias, True))
    want = torch.stack([by_formula(*xs) for xs in zip(BIAS, Q, K, V, strict=True)])
    close(vmap(slope(biased))(BIAS, Q, K, V), want)


def by_document(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    def in_one(b, h, i, j):
        return documents[i] == documents[j]

    return flex_attention(q, k, v, block_mask=create_block_mask(in_one, None, None, L, L, "cpu"))


def test_masks_made_inside_of_what_is_mapped():
    want = loop(by_document, Q, K, V, DOCUMENTS)
    close(vmap(by_document)(Q, K, V, DOCUMENTS), want)
    gradient = grad(lambda q, k, v, d: by_document(q, k, v, d).sin().sum())
    want = [
        grad(lambda q, k, v, d: formula(q, k, v, 0.0, d[:, None] == d).sin().sum())(*xs)
        for xs in zip(Q, K, V, DOCUMENTS, strict=True)
    ]
    close(vmap(gradient)(Q, K, V, DOCUMENTS), torch.stack(want))


@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
def test_statistics_beside():
    f = lambda q: flex_attention(q, K[0], V[0], block_mask=MASKED, return_lse=True)  # noqa: E731
    close(vmap(f)(Q), (loop(lambda q: f(q)[0], Q), loop(lambda q: f(q)[1], Q)))
    slopes = vmap(grad(lambda q: torch.where(f(q)[1].isinf(), 0.0, f(q)[1]).sum()))(Q)
    assert slopes.isfinite().all()
    kept = (I < L - 2) & (J > 0)

    def lse(q):
        scores = torch.where(kept, q @ K[0].mT / 2, -1e30)
        return scores.logsumexp(-1)[..., : L - 2].sum()

    close(slopes, torch.stack([grad(lse)(q) for q in Q]))


def test_recorded():
    for f in (flex_attention, biased):
        args = (Q, K, V, BIAS)[: 3 + (f is biased)]
        g = vmap(grad(lambda *xs, f=f: f(*xs).sin().sum()))
        g(*args)  # which sets up what torch does once
        recorded = jit(g)
        for scale in (1.0, 2.0, -1.0):
            scaled = [x * scale for x in args]
            close(recorded(*scaled), g(*scaled))
        assert recorded.cache_info().hits == 2


def test_layouts_are_the_loops():
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (Q, K, V))
    want = loop(flex_attention, q, k, v)
    found = vmap(lambda q, k, v: flex_attention(q, k, v), out_dims=0)(q, k, v)
    close(found, want)
    for one in (q[0], Q[0], q[0].transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
            own = flex_attention(one, K[0], V[0]).stride()
        inside = jvp(lambda q: flex_attention(q, K[0], V[0]), (one,), (one,))[0]
        assert inside.stride() == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_the_loops(dtype):
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    want = loop(flex_attention, q, k, v)
    found = vmap(flex_attention)(q, k, v)
    assert found.dtype is dtype
    close(found, want)


def test_under_autocast():
    q, k, v = (x.float() for x in (Q, K, V))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = loop(flex_attention, q, k, v)
        found = vmap(flex_attention)(q, k, v)
    assert found.dtype is want.dtype
    close(found, want)


def test_outside_of_transforms_it_is_torchs():
    q = Q[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q, K[0], V[0])
    assert isinstance(CAUSAL, BlockMask)


@pytest.mark.sweep(16)  # seconds
def test_the_first_call_of_a_process_loads_the_compiler():
    code = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from forall import grad, jit, vmap
q = torch.linspace(-1, 1, 48).reshape(3, 1, 1, 4, 4)
g = vmap(grad(lambda q: flex_attention(q, q, q).sum()))
assert torch.allclose(jit(g)(q), g(q), atol=1e-6)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_compiled_it_runs_as_it_is():
    compiled = torch.compile(flex_attention, backend="eager")
    want = loop(flex_attention, Q, K, V)
    close(vmap(compiled)(Q, K, V), want)


def test_errors_are_torchs():
    with pytest.raises(ValueError, match="same embedding dimension"):
        vmap(flex_attention)(Q, K[..., :2], V)
    with pytest.raises(ValueError, match="number of heads"):
        vmap(flex_attention)(Q, K[:, :, :2], V[:, :, :2])
