"""The number of an example as a size, a dim, a shift or a count: the loop's result."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from forall import vmap

COUNTS = torch.tensor([1, 2, 2, 0, 1])
ROWS = torch.arange(20.0).reshape(5, 4)

USES = {
    "roll": lambda x, n: x.roll(n),
    "sum": lambda x, n: x.reshape(2, 2, 1).sum(n).sum(),
    "sum, dim=": lambda x, n: torch.sum(x.reshape(2, 2, 1), dim=n).sum(),
    "flip": lambda x, n: x.reshape(2, 2, 1).flip(n),
    "softmax": lambda x, n: x.reshape(2, 2, 1).softmax(n),
    "narrow": lambda x, n: x.narrow(0, n, 2),
    "arange": lambda x, n: x + torch.arange(n).sum(),
    "zeros": lambda x, n: x + torch.zeros(n).numel(),
    "zeros of two": lambda x, n: x + torch.zeros(n + 1, 2).numel(),
    "new_ones": lambda x, n: x + x.new_ones(n + 1, 2).sum(),
    "expand": lambda x, n: x[0].expand(n, 3).sum(),
    "expand by what agrees": lambda x, n: x[0].expand(n // 10 + 2, 3).sum(),
    "reshape": lambda x, n: x.reshape(2 if n else 1, -1).sum(0).sum(),
    "slice": lambda x, n: x[:n].sum(),
    "slice of both ends": lambda x, n: x[n : n + 1].sum(),
    "index in a list": lambda x, n: x[[n, 0]],
    "range": lambda x, n: x + sum(range(n)),
    "list": lambda x, n: x * [3, 1, 2][n],
    "slice of a list": lambda x, n: x * sum([3, 1, 2][:n]),
    "text": lambda x, n: x * len("ab" * n),
    "dict": lambda x, n: x * {0: 3, 1: 1, 2: 2}[n],
    "order of a norm": lambda x, n: x.norm(n),
    "pad": lambda x, n: functional.pad(x, (n, 0)).sum(),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "text of it": lambda x, n: x * len(f"{n * 100}") + int(str(n)),
}


@pytest.mark.parametrize("use", USES)
def test_a_number_is_the_loops_wherever_torch_wants_an_int(use):
    def f(x, n):
        return USES[use](x, n.item())

    expected = torch.stack([f(x, n) for x, n in zip(ROWS, COUNTS, strict=True)])
    torch.testing.assert_close(vmap(f)(ROWS, COUNTS), expected)
