"""A number that a dtype cannot hold is an error for each example, as it is in the loop."""

from __future__ import annotations

import pytest
import torch

import forall
from forall import jit, vmap

MASK = torch.tensor([True, False])
AT = torch.tensor([0])
FILLS = {
    "masked_fill": lambda x, v: x.masked_fill(MASK, v),
    "masked_fill_": lambda x, v: x.clone().masked_fill_(MASK, v),
    "masked_fill, nested": lambda x, v: vmap(lambda m: x.masked_fill(m, v))(MASK),
    "index_fill": lambda x, v: x.index_fill(0, AT, v),
    "index_fill_": lambda x, v: x.clone().index_fill_(0, AT, v),
    "full": lambda x, v: torch.full((2,), v, dtype=x.dtype),
    "full_like": lambda x, v: torch.full_like(x, v),
    "new_full": lambda x, v: x.new_full((2,), v),
    "fill_": lambda x, v: x.clone().fill_(v),
    "where": lambda x, v: torch.where(MASK, v, x),
}
INF, NAN = float("inf"), float("nan")
NUMBERS = {
    "int8": (torch.int8, [127, -128, 3], [127, 128, 3]),
    "int8, too low": (torch.int8, [127, -128, 3], [1, 2, -129]),
    "int8 of floats": (torch.int8, [1.5, -2.5, 3.0], [1.5, -2.5, 300.0]),
    "int8 of nan": (torch.int8, [1.5, -2.5, 3.0], [1.5, NAN, 3.0]),
    "uint8": (torch.uint8, [255, -1, 3], [255, 256, 3]),
    "uint8, too low": (torch.uint8, [255, -255, 3], [255, -256, 3]),
    "int16": (torch.int16, [32767, 0, 0], [32768, 0, 0]),
    "int32": (torch.int32, [2**31 - 1, 0, 0], [2**31, 0, 0]),
    "int64 of floats": (torch.int64, [1e18, 0.0, 0.0], [1e19, 0.0, 0.0]),
    "half": (torch.float16, [65504.0, INF, NAN], [65505.0, 1.0, -1e6]),
    "float": (torch.float32, [3e38, INF, NAN], [1.0, 4e38, 1.0]),
    "bool": (torch.bool, [300, 0, 1], [300, 0, 1]),
}


def outcome(call):
    try:
        return call()
    except RuntimeError as error:
        # torch has two names for half
        return str(error).partition("\n")[0].replace("c10::", "at::")


def agree(found, wanted):
    if isinstance(wanted, str) or isinstance(found, str):
        assert found == wanted
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", FILLS)
def test_each_call_raises_where_the_loop_does(name, numbers, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    f = FILLS[name]
    dtype, *given = NUMBERS[numbers]
    kind = torch.float64 if isinstance(given[0][0], float) else torch.int64
    good, bad = (torch.tensor(v, dtype=kind) for v in given)
    xs = torch.zeros(3, 2, dtype=dtype)

    def loop(values):
        return torch.stack([f(x, v) for x, v in zip(xs, values, strict=True)])

    for way in (vmap(f), jit(vmap(f))):
        for values in (good, bad, *[good] * 6, bad, good):
            agree(outcome(lambda: way(xs, values)), outcome(lambda: loop(values)))  # noqa: B023
