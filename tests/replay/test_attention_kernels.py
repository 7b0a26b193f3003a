"""Which kernel attention takes is the user's choice of the moment: a replayed call asks too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from forall import grad, jit, vmap

pytestmark = pytest.mark.usefixtures("at_once")


def attend(x):
    return F.scaled_dot_product_attention(x, x.cos(), x.sin())


def block():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return lambda x: layer(x, x, x, need_weights=False)[0]


def fused(made, x):
    """Whether a fused kernel runs; the profiler sees those of a replayed call too."""
    with torch.profiler.profile() as seen:
        made(x)
    return any("flash_attention" in event.key for event in seen.key_averages())


@pytest.mark.parametrize(
    "transform", [vmap, lambda f: jit(vmap(f)), jit], ids=["vmap", "both", "jit"]
)
@pytest.mark.parametrize("f", [attend, block()], ids=["a function", "a layer"])
def test_it_is_asked_with_each_call(f, transform):
    made = transform(f)
    x = torch.randn(2, 1, 3, 5, 4) if f is attend else torch.randn(2, 3, 5, 4)
    x = x[0] if transform is jit else x
    for _ in range(5):
        with torch.no_grad():
            assert fused(made, x)
            with sdpa_kernel(SDPBackend.MATH):
                assert not fused(made, x)


def test_so_is_that_of_its_derivative():
    made, x = vmap(grad(lambda x: attend(x).sum())), torch.randn(2, 1, 3, 5, 4)
    for _ in range(5):
        assert fused(made, x)
        with sdpa_kernel(SDPBackend.MATH):
            assert not fused(made, x)
