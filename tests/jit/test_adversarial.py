"""A replayed call equals the call: values, dtypes, identities and side effects, six times over."""

from __future__ import annotations

import warnings

import pytest
import torch

import forall
from forall._compat import pytree
from jit.cases import AS_IT_IS, CASES


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.requires_grad == b.requires_grad
            and torch.equal(a.detach().isnan(), b.detach().isnan())
            and torch.allclose(a.detach(), b.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
        )
    return type(a) is type(b) and a == b


def plainly(f):
    return f


def six_calls(name, jit):
    """Compare them with the function's; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replayed, plain = CASES[name](jit), CASES[name](plainly)
        for i in range(6):
            found, tree = pytree.flatten(replayed(i))
            expected, wanted = pytree.flatten(plain(i))
            assert tree == wanted
            for a, b in zip(found, expected, strict=True):
                assert same(a, b), f"call {i}: {a} and not {b}"
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_the_function(name):
    told = six_calls(name, forall.jit)
    assert any("not recorded" in text for text in told) == (name in AS_IT_IS), told
