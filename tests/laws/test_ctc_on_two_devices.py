"""`F.ctc_loss` takes targets and lengths on the CPU, as cuDNN wants them, for scores on any device.

The meta device stands for another device, with a kernel that gives shapes.
"""

import pytest
import torch
import torch.nn.functional as F

import forall
from forall import grad, vmap
from oracle import difference, loop

B, T, N, C, S = 3, 6, 2, 5, 3


@pytest.fixture
def kernel(monkeypatch):
    """Give the meta device the one of `F.ctc_loss`; where its targets and lengths are."""
    monkeypatch.setattr(forall.config, "replay", False)  # to compare would read numbers
    seen = []

    def shapes(scores, targets, inputs, lengths, blank=0, zero_infinity=False):
        seen.append((targets.device.type, targets.dtype, lengths.device.type))
        n = scores.shape[1]
        return scores.new_empty(n), scores.new_empty(n, scores.shape[0], 2 * S + 1)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_ctc_loss.Tensor", shapes, "Meta")
    yield seen
    library._destroy()


def lengths(kind, dtype):
    ends = [T] * N, [S, S - 1]
    return ends if kind is list else tuple(torch.tensor(e, dtype=dtype) for e in ends)


def targets(rank, dtype):
    torch.manual_seed(0)
    shape = (B, N, S) if rank == 2 else (B, 2 * S - 1)  # padded, or one after another
    return torch.randint(1, C, shape, dtype=dtype)


DTYPE, KIND, REDUCTION = (
    pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str),
    pytest.mark.parametrize("kind", [list, torch.Tensor]),
    pytest.mark.parametrize("reduction", ["none", "mean", "sum"]),
)


@pytest.mark.counted
@DTYPE
@KIND
@REDUCTION
def test_targets_on_the_cpu_for_scores_on_a_device(kernel, dtype, kind, reduction):
    ends, xs = lengths(kind, dtype), torch.empty(B, T, N, C, device="meta")
    f = lambda x, t: F.ctc_loss(x, t, *ends, reduction=reduction)  # noqa: E731
    found = vmap(f)(xs, targets(2, dtype))
    assert found.device.type == "meta"
    assert found.shape == ((B, N) if reduction == "none" else (B,))
    assert kernel == [("meta", torch.int64, "meta")]  # with the scores, as CUDA asks for


@pytest.mark.parametrize("rank", [1, 2])
@DTYPE
@KIND
@REDUCTION
def test_values_and_gradients_are_the_loops(rank, dtype, kind, reduction):
    ends, given = lengths(kind, dtype), targets(rank, dtype)
    xs = torch.randn(B, T, N, C, dtype=torch.float64).log_softmax(-1)
    f = lambda x, t: F.ctc_loss(x, t, *ends, reduction=reduction)  # noqa: E731
    assert difference(vmap(f)(xs, given), loop(f)(xs, given)) is None
    value = lambda x, t: f(x, t).sum()  # noqa: E731

    def truth(x, t):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(value(x, t), x)[0]

    assert difference(vmap(grad(value))(xs, given), loop(truth)(xs, given)) is None


@pytest.mark.parametrize("reduction", [(), (0,), (1,), (2,)])
@KIND
def test_torchs_own_call_reduces_as_in_the_loop(kind, reduction):
    ends, given = lengths(kind, torch.int64), targets(2, torch.int64)
    xs = torch.randn(B, T, N, C, dtype=torch.float64).log_softmax(-1)
    f = lambda x, t: torch.ctc_loss(x, t, *ends, 0, *reduction)  # noqa: E731
    assert difference(vmap(f)(xs, given), loop(f)(xs, given)) is None
