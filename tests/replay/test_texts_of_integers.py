"""Functions that use `bin`, `hex`, `oct`, `chr` or `ord` are replayed, as the loop."""

from __future__ import annotations

import builtins
import time

import pytest
import torch

from forall import explain, grad, vmap
from oracle import check_vmap

SIZES = {"n": 11}
XS = torch.arange(6.0).reshape(2, 3) + 1


class Clock:
    def __index__(self):
        return int(time.perf_counter() * 1e6)


CLOCK = Clock()


def power(x):
    """Return x**n by repeated squaring, along the binary digits of n."""
    result = torch.ones_like(x)
    for digit in bin(SIZES["n"])[2:]:  # noqa: FURB116 - the built-in function is what is tested
        result = result * result * (x if digit == "1" else 1)
    return result


def by_digits(x):
    return x.sin() * int(hex(SIZES["n"]), 16) + len(oct(SIZES["n"]))


def by_letters(x):
    return torch.stack([x * ord(letter) for letter in "ij" + chr(96 + SIZES["n"])]).sum(0)


FUNCTIONS = [power, by_digits, by_letters]


@pytest.mark.parametrize("func", FUNCTIONS)
def test_a_replayed_call_is_the_loop(func, at_once, either_way, hits, monkeypatch):
    x = XS[0].clone().requires_grad_()
    slope = torch.autograd.grad(func(x).sum(), x)[0]
    for step in range(8):
        check_vmap(func, (XS + step / 8,))
        torch.testing.assert_close(grad(lambda x: func(x).sum())(XS[0]), slope)
    assert hits
    monkeypatch.setitem(SIZES, "n", 4)  # it is read anew
    check_vmap(func, (XS,))


def test_what_is_patched_is_seen(at_once, hits, monkeypatch):
    for _ in range(8):
        vmap(power)(XS)
    assert hits
    monkeypatch.setattr(builtins, "bin", lambda _: "0b1")
    torch.testing.assert_close(vmap(power)(XS), XS)


@pytest.mark.parametrize("of", [bin, hex, oct])
def test_an_object_whose_number_is_the_clock_is_not_replayed(of, at_once, hits):
    def f(x):
        return x * len(of(CLOCK))

    for _ in range(8):
        vmap(f)(XS)
    assert not hits
    assert "uses time.perf_counter" in explain(vmap(f))(XS).replay


def test_the_digits_of_an_example_are_its_own(at_once, hits):
    xs = torch.tensor([3, 12, 5])
    for _ in range(8):
        assert check_vmap(lambda x: x * len(bin(x)), (xs,)).tolist() == [12, 72, 25]
    assert not hits
