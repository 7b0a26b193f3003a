"""Calls with a named axis are replayed, and told apart by its name and size."""

import pytest
import torch

from forall import axis_index, axis_size, grad, jit, psum, vmap

XS = torch.tensor([1.0, -2.0, 3.0, -4.0])


def over(f, **options):
    return vmap(f, axis_name="b", **options)


def through_replay(f, *args):
    return [f(*args) for _ in range(12)]


def named(x):
    return x * psum(x, "b") + axis_index("b") + axis_size("b")


def of_many():
    return psum(1.0, "b") + axis_index("b")


def test_calls_are_replayed_under_their_own_name_and_size(at_once, hits):
    want = XS * XS.sum() + torch.arange(4) + 4
    for got in through_replay(over(named), XS):
        torch.testing.assert_close(got, want)
    assert len(hits) > 3
    for _ in range(3):
        with pytest.raises(NameError):
            vmap(named, axis_name="c")(XS)
        with pytest.raises(NameError):
            vmap(named)(XS)
    longer = torch.cat([XS, XS])
    for got in through_replay(over(named), longer):
        torch.testing.assert_close(got, longer * longer.sum() + torch.arange(8) + 8)
    for size in (3, 4):
        f = vmap(of_many, axis_name="b", axis_size=size)
        for got in through_replay(f):
            assert torch.equal(got, torch.arange(size) + float(size))
    for got in through_replay(over(grad(lambda x: psum(x * x, "b"))), XS):
        torch.testing.assert_close(got, 8 * XS)


def test_a_program_has_ordinary_operators():
    f = jit(over(lambda x: x - psum(x, "b")))
    f(XS)
    listing = str(f.kinds()[0])
    assert "sum" in listing
    assert "psum" not in listing
