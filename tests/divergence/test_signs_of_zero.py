"""0.0 and -0.0 are equal, and two numbers: no example is given another's sign."""

import math

import pytest
import torch

from forall import config, vmap

XS = torch.tensor([0.0, -0.0, 1.0, -0.0, 0.0], dtype=torch.float64)


def read(x):
    return torch.tensor(math.copysign(1.0, x.item()))


def angle(x):
    return torch.tensor(math.atan2(0.0, x.item()), dtype=torch.float64)


def as_text(x):
    return torch.tensor(float(len(f"{x.item()}")))


def in_a_list(x):
    return torch.tensor([math.copysign(2.0, v) for v in x.expand(2).tolist()])


def of_complex_numbers(x):
    z = torch.complex(x.new_ones(()), x).item()
    return torch.tensor(math.copysign(1.0, z.imag))


def asked_by_a_library(x):
    return torch.tensor(math.copysign(1.0, float(x.numpy() if x > 9 else x)))


@pytest.mark.parametrize("strategy", ["together", "loop", "measured"])
@pytest.mark.parametrize(
    "f", [read, angle, as_text, in_a_list, of_complex_numbers, asked_by_a_library]
)
@pytest.mark.parametrize("xs", [XS, XS[:2], XS[[0, 1, 3]]])
def test_each_example_has_its_own(f, xs, strategy, monkeypatch):
    monkeypatch.setattr(config, "strategy", strategy)
    truth = torch.stack([f(x) for x in xs])
    for _ in range(2):
        assert torch.equal(vmap(f)(xs), truth)
