"""A row of the table of rules holds in converted code too, which has stacks without wrappers."""

from typing import Any

import pytest
import torch

from forall import config, grad_and_value, vmap
from forall._compat.tensor_subclass import posing
from forall._vmap.fast_path import api_calls
from forall._vmap.registry import HANDLERS
from forall._vmap.rule_makers.along_dims import StackHandler

aten = torch.ops.aten
XS = torch.arange(12.0).reshape(4, 3) - 4

ROWS = {
    aten.sum.dim_IntList: lambda x: x.sum(0),
    aten.mean.dim: lambda x: torch.mean(x, -1),
    aten.amax.default: lambda x: x.amax(0),
    aten.amin.default: lambda x: torch.amin(x, 0),
    aten.stack.default: lambda x: torch.stack([x, x]),
    aten.cat.default: lambda x: torch.cat([x, x], -1),
}


def in_branches(f):
    def branches(x):
        if x[0] > 0:
            y = f(x * 2)
        else:
            y = f(x + 1)
        return y

    return branches


@pytest.mark.parametrize("op", ROWS, ids=str)
def test_function_of_stacks_in_a_row_runs_in_converted_code(op, monkeypatch):
    monkeypatch.setattr(config, "replay", False)
    monkeypatch.setattr(posing, "used", False)  # a subclass of an earlier test turns fast paths off
    row: Any = HANDLERS[op]
    calls = []

    def run(*args, **kwargs):
        calls.append(op)
        return row.run(*args, **kwargs) + 100

    monkeypatch.setitem(HANDLERS, op, StackHandler(row.handle, run))
    f = in_branches(ROWS[op])
    monkeypatch.setattr(config, "strategy", "together")
    found = vmap(f)(XS)
    assert calls
    assert torch.equal(found, torch.stack([f(x) + 100 for x in XS]))


@pytest.mark.parametrize("where", ["plain", "with a derivative", "by name"])
@pytest.mark.parametrize("op", [aten.sum.dim_IntList, aten.mean.dim], ids=str)
def test_reduction_of_all_dims_asks_the_row_of_the_one_along_dims(op, where, monkeypatch):
    monkeypatch.setattr(config, "replay", False)
    row: Any = HANDLERS[op]
    handler = StackHandler(row.handle, lambda *a, **k: row.run(*a, **k) + 100)
    monkeypatch.setitem(HANDLERS, op, handler)
    reduce = torch.sum if op is aten.sum.dim_IntList else torch.mean
    f = {
        "plain": lambda x: reduce(x),
        "with a derivative": lambda x: grad_and_value(lambda y: reduce(y))(x)[1],
        "by name": lambda x: reduce(x, dtype=torch.float32),
    }[where]
    assert torch.equal(vmap(f)(XS), reduce(XS, 1) + 100)


def test_own_row_of_a_pointwise_operator_answers_its_calls(monkeypatch):
    calls = []
    op = aten.sigmoid.default

    def handler(level, func, args, kwargs):
        calls.append(func)
        return args[0]

    api_calls._known.clear()
    monkeypatch.setitem(HANDLERS, op, handler)
    try:
        assert torch.equal(vmap(torch.sigmoid)(XS), XS)
        assert calls == [op]
    finally:
        api_calls._known.clear()
