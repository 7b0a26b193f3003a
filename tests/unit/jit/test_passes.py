"""What passes leave of a program, and what they must not touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forall import jit, vmap
from forall._compat import pytree
from forall._jit.graph import (
    Layout,
    OpNode,
    Program,
    Ref,
    Value,
)
from forall._jit.passes.peephole import reuse_operand_memory
from forall._jit.tracing.trace_call import record

aten = torch.ops.aten
X = torch.tensor([[1.0, -0.0, float("inf")], [float("nan"), 2.0, -3.0]])


def program(f, *args):
    made = record(f, *pytree.flatten((args, {})))
    assert made.recorded is not None, made.why
    return made.recorded.program


def ops(f, *args):
    return [node.op.overloadpacket.__name__ for node in program(f, *args).nodes]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + 0,
        lambda x: x * 1,
        lambda x: x + torch.zeros(3, dtype=torch.float64),
        lambda x: torch.eye(2) @ x,
        lambda x: x @ torch.zeros(3, 3),
        lambda x: x - x,
    ],
)
def test_what_changes_a_bit_stays(f):
    assert ops(f, X)
    g = jit(f)
    for x in (X, -X, 2 * X):
        found, wanted = g(x), f(x)
        assert found.dtype == wanted.dtype
        assert found.view(torch.uint8).equal(wanted.contiguous().view(torch.uint8))


def test_what_is_always_the_same_is_made_once():
    def f(x):
        basis = torch.zeros(3, 3)
        basis[range(3), range(3)] = 2.0
        return x @ (basis + torch.eye(3))

    assert ops(f, X) == ["mm"]


def test_a_constant_that_depends_on_what_varies_is_none():
    def f(x):
        buffer = torch.zeros(2, 3)
        before = buffer.sum()
        buffer.copy_(x)
        return buffer + before

    assert "copy_" in ops(f, X)
    assert jit(f)(X[1:].expand(2, 3).nan_to_num()).equal(X[1:].expand(2, 3).nan_to_num())


def test_what_nobody_reads_is_dropped_unless_it_draws_or_writes():
    assert ops(lambda x: (x.sin(), x * 2)[1], X) == ["mul"]
    assert "rand" in ops(lambda x: (torch.rand(3), x * 2)[1], X)
    assert ops(lambda x: (x.mul_(2), x.cos(), None)[2], X.clone()) == ["mul_"]


def test_views_that_lead_back_are_none_and_chains_are_one():
    assert ops(lambda x: (x * 2).t().unsqueeze(0).squeeze(0).t().view(2, 3) + 1, X) == [
        "mul",
        "add_",
    ]
    assert ops(lambda x: (x * 2).t().unsqueeze(1).expand(3, 4, 2), X) == ["mul", "as_strided"]


def test_a_chain_of_views_of_an_argument_goes_where_the_argument_lies():
    def f(x):
        return x.t().unsqueeze(0).expand(4, 3, 2), x[1:].t().unsqueeze(0)

    assert ops(f, X) == ["as_strided", "slice", "t", "unsqueeze"]
    w = X.clone()
    g, h = jit(f), jit(lambda x: (*f(w), x))
    for i in range(4):
        x = torch.randn(5 + i, 3)[i : i + 2]
        w.data = x  # begins elsewhere
        for found, wanted in zip((*g(x), *h(x)), (*f(x), *f(x), x), strict=True):
            assert found.equal(wanted)
            assert found.stride() == wanted.stride()
            assert found.data_ptr() == wanted.data_ptr()
        z = torch.complex(x, x).conj()
        for found, wanted in zip(jit(f)(z), f(z), strict=True):
            assert found.equal(wanted)
            assert found.is_conj() == wanted.is_conj()


def test_memory_is_given_back_where_it_is_read_last():
    recorded = record(lambda x: x.sin().cos().exp(), *pytree.flatten(((X,), {}))).recorded
    assert recorded is not None
    run: Any = recorded.run
    assert run.source.count("del ") == 2


def test_a_level_leaves_nothing_but_operators_on_stacks():
    assert ops(vmap(lambda x: (x * 2).sum()), X) == ["mul", "sum"]


@pytest.mark.parametrize("zeros", [(), (1,), (2,)])
def test_zeros_without_memory_are_not_written_into_nor_multiplied_in_place(zeros):
    at = Layout.from_tensor(torch.ones(3))
    values = [Value(at, n, n in zeros) for n in range(4)]
    nodes = [
        OpNode(aten.neg.default, (Ref(0),), {}, 1),
        OpNode(aten.sin.default, (Ref(0),), {}, 2),
        OpNode(aten.mul.Tensor, (Ref(1), Ref(2)), {}, 3),
    ]
    made = Program([0], {}, {}, nodes, [3], values)
    reuse_operand_memory(made)
    assert made.nodes[-1].op is (aten.mul.Tensor if zeros else aten.mul_.Tensor)
