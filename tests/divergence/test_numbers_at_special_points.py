"""Derivatives at ties, kinks and zeros, where a number of each example is an operator's argument.

There a number and a tensor of that value have different formulas in torch. A number it is.
"""

import pytest
import torch
from torch.nn import functional

from forall import jacfwd, jacrev, vmap

XS = torch.tensor(
    [[0.0, 1, -1, 2], [1, 0, 1, -2], [2, 2, 0, 0.5], [-1, -1, 3, 0], [-2, 0, -0.0, 4]],
    dtype=torch.float64,
)
INF = torch.tensor([[0.5, torch.inf, 0.5, torch.nan], [-torch.inf, 1, 2, 3]], dtype=torch.float64)

CLAMPS = {
    "max": lambda x, n: x.clamp(max=n),
    "min": lambda x, n: x.clamp(min=n),
    "clip": lambda x, n: torch.clip(x, n),
    "both": lambda x, n: x.clamp(n, n + 1),
    "equal": lambda x, n: torch.clamp(x, n, n),
    "crossed": lambda x, n: x.clamp(n, n - 1),
    "one of them the same for all": lambda x, n: x.clamp(n, 2.0),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "clamp_max": lambda x, n: torch.clamp_max(x, n),
    "in place": lambda x, n: x.clone().clamp_(max=n),
    "in place, both": lambda x, n: x.clone().clamp_(n, 2.0),
}
OPERATORS = {
    **CLAMPS,
    "rpow": lambda x, n: n**x,
    "xlogy": torch.xlogy,
    "copysign": torch.copysign,
    "remainder": lambda x, n: torch.remainder(x, n + 0.25),
    "fmod": lambda x, n: torch.fmod(x, n + 0.25),
    "lerp": lambda x, n: torch.lerp(x, x * 2, n),
    "mul": lambda x, n: n * x,
    "where": lambda x, n: torch.where(x > n, x, n),
    "sub": lambda x, n: n - x,
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "threshold": lambda x, n: functional.threshold(x, n, n),
    "hardtanh": lambda x, n: functional.hardtanh(x, -1.0, n + 2.5),
    "leaky_relu": functional.leaky_relu,
    "hardshrink": lambda x, n: functional.hardshrink(x, abs(n)),
    "softshrink": lambda x, n: functional.softshrink(x, abs(n)),
    "maximum": lambda x, n: torch.maximum(x, torch.tensor(n, dtype=x.dtype)),
    "full_like": lambda x, n: torch.full_like(x, n) * x,
}
WORDS = {
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", [float, int])
def test_derivatives_are_the_loops(name, word, kind):
    derivative = WORDS[word](lambda x: OPERATORS[name](x, kind(x[0].item())))
    truth = torch.stack([derivative(x) for x in XS])
    torch.testing.assert_close(vmap(derivative)(XS), truth, equal_nan=True)


@pytest.mark.parametrize("word", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("name", CLAMPS)
def test_clamps_of_what_is_not_finite(name, word):
    derivative = WORDS[word](lambda x: CLAMPS[name](x, x[0].item()))
    truth = torch.stack([derivative(x) for x in INF])
    torch.testing.assert_close(vmap(derivative)(INF), truth, equal_nan=True)


def test_a_tensor_beside_a_number_is_one():
    def f(x):
        return x.clamp(x[0].item(), x[1])

    truth = torch.stack([jacfwd(f)(x) for x in XS])
    torch.testing.assert_close(vmap(jacfwd(f))(XS), truth)


def test_values_of_one_dtype():
    xs = torch.tensor([[1, 5], [2, 3]])
    found = vmap(lambda x: x.clamp(max=x[0].item()))(xs)
    assert found.tolist() == [[1, 1], [2, 2]]
    assert found.dtype is torch.int64
    found = vmap(lambda x: x.clamp(min=x[0].item() + 0.5))(xs)
    assert found.tolist() == [[1.5, 5], [2.5, 3]]
    assert vmap(lambda x: x.bfloat16().clamp(x[0].item()))(XS).dtype is torch.bfloat16
