"""Newton's method on many numbers at once: each stops when it is done. And what `explain` tells.

python examples/roots.py [picture.png]
"""

from __future__ import annotations

import sys

import torch

import forall
from forall import vmap


def root(a):
    if a < 0:
        return a * float("nan")
    x = a
    while (x * x - a).abs() > 1e-9 * a:
        x = (x + a / x) / 2
    return x


NUMBERS = torch.tensor([2.0, -1.0, 1e6, 0.5, 9.0, 1e9, -4.0, 100.0], dtype=torch.float64)


def main():
    roots = vmap(root)(NUMBERS)
    assert torch.equal(roots.isnan(), NUMBERS < 0)
    explained = forall.explain(vmap(root))(NUMBERS)
    assert torch.equal(explained.result.nan_to_num(), roots.nan_to_num())
    print(explained)
    if len(sys.argv) > 1:
        explained.plot(sys.argv[1])


if __name__ == "__main__":
    main()
