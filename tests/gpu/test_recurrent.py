"""Recurrent layers and cells on a CUDA device: the loop, and the CPU's derivatives.

cuDNN's kernels are there alone; `tests/laws/test_recurrent_kernels.py` has what a CPU can show.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

import forall
from oracle import difference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODULES = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm both ways, two layers": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "lstm projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, 2),
    "lstm cell": lambda: nn.LSTMCell(3, 4),
    "gru cell": lambda: nn.GRUCell(3, 4),
}


@pytest.mark.parametrize("name", MODULES)
def test_derivatives_are_those_of_the_cpu(name):
    torch.manual_seed(0)
    module = MODULES[name]().double()
    shape = (2, 3) if isinstance(module, nn.RNNCellBase) else (2, 2, 3)
    xs = torch.randn(4, *shape, dtype=torch.float64)

    def found(module, xs):
        params = {k: p.detach() for k, p in module.named_parameters()}

        def energy(params, x):
            outs = tree_leaves(functional_call(module, params, (x,)))
            return sum(t.sin().sum() for t in outs)

        def out(x):
            return tree_leaves(functional_call(module, params, (x,)))[0]

        along = torch.ones_like(xs[0])
        return [
            forall.vmap(out)(xs),
            forall.vmap(forall.grad(energy), (None, 0))(params, xs),
            forall.jacrev(out)(xs[0]),
            forall.jacfwd(out)(xs[0]),
            forall.jvp(out, (xs[0],), (along,)),
            forall.hessian(lambda x: energy(params, x))(xs[0]),
            forall.vmap(forall.hessian(lambda x: energy(params, x)))(xs),
        ]

    here, there = found(module, xs), found(copy.deepcopy(module).cuda(), xs.cuda())
    for wanted, made in zip(here, there, strict=True):
        assert difference(tree_map(lambda t: t.cpu(), made), wanted) is None
