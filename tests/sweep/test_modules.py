"""Every module in torch's own database: kernels for 32 and 16 bits, and for other layouts.

A part, drawn with a fixed seed; all of it with FORALL_MODULES=1, in five minutes.
"""

import os
import random
import warnings
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from forall import grad, jacfwd, jacrev, jit, vmap

PART = 1.0 if os.environ.get("FORALL_MODULES") == "1" else 0.1
SEED = 0
SAMPLES = 6  # of the inputs of a module
NEAR = {torch.float32: 2e-4, torch.bfloat16: 6e-2}  # relative to the largest entry
MOST = 400  # rows, or columns, of a Jacobian
# Torch's two modes differ at a kink, or where the numbers are not what an operator asks for: nan in
# one of them, or (CTCLoss) the derivative as if they were logarithms of probabilities.
BY_MODE = {"nn.KLDivLoss", "nn.LPPool1d", "nn.LPPool2d", "nn.LPPool3d", "nn.CTCLoss"}

CASES = [
    (i, dtype, training)
    for i in range(len(module_db))
    for dtype in NEAR
    for training in (False, True)
]
DRAWN = sorted(random.Random(SEED).sample(CASES, round(PART * len(CASES))), key=str)


class Case:
    """A module as a function of the first tensor that it is given."""

    def __init__(self, info: Any, given: Any, dtype: torch.dtype, training: bool) -> None:
        options = given.constructor_input
        self.module = info.module_cls(*options.args, **options.kwargs).to(dtype).train(training)
        self.state = {n: t.detach().clone() for n, t in self.module.state_dict().items()}
        self.leaves, self.spec = tree_flatten(
            (given.forward_input.args, given.forward_input.kwargs)
        )
        self.place = next(i for i, x in enumerate(self.leaves) if _is_real(x))
        self.x = self.leaves[self.place].detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        leaves = [x if i == self.place else a for i, a in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        state = {n: t.clone() for n, t in self.state.items()}
        out = functional_call(self.module, state, args, kwargs)
        return next(y for y in tree_leaves(out) if _is_real(y))

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        y = self(x).float()
        return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout == torch.strided


def gradient(f, x):
    x = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, allow_unused=True, materialize_grads=True)
    return g


def rows(f, x):
    x = x.detach().clone().requires_grad_()
    y = f(x)
    how = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    found = [torch.autograd.grad(e, x, **how)[0] for e in y.reshape(-1)]
    return torch.stack(found).reshape([*y.shape, *x.shape])


def near(found, expected):
    assert found.shape == expected.shape
    a, b = found.double(), expected.double()
    room = NEAR[expected.dtype] * b.abs().nan_to_num(0, 0, 0).max() + 1e-6 if b.numel() else 0
    assert ((a - b).abs() <= room).logical_or(a == b).logical_or(a.isnan() & b.isnan()).all()


def inputs_of(info, dtype, training):
    torch.manual_seed(SEED)
    how = {"device": "cpu", "dtype": dtype, "requires_grad": False, "training": training}
    return [*info.module_inputs_func(info, **how)][:SAMPLES]


def truth(f):
    """Three points, with values and slopes of a plain loop; None where torch itself has none."""
    xs = torch.stack([f.x, f.x * 0.5, f.x + 0.125])
    torch.manual_seed(1)
    values = torch.stack([f(x) for x in xs])
    torch.manual_seed(2)
    if not torch.equal(values.nan_to_num(), torch.stack([f(x) for x in xs]).nan_to_num()):
        return None  # it draws
    return xs, values, torch.stack([gradient(f.slope, x) for x in xs])


def check(f, xs, values, slopes, by_mode):
    near(vmap(f)(xs), values)
    near(vmap(grad(f.slope))(xs), slopes)
    last = xs.movedim(0, -1).contiguous()  # the examples lie inside
    near(vmap(f, -1)(last), values)
    near(vmap(grad(f.slope), -1)(last), slopes)
    if f.x.dim() in (4, 5):  # each example with its channels last
        channels = xs.movedim(2, -1).contiguous().movedim(-1, 2)
        near(vmap(f)(channels), values)
    if 0 < max(values[0].numel(), f.x.numel()) <= MOST:
        jacobian = rows(f, f.x)
        near(jacrev(f)(f.x), jacobian)
        near(jit(jacrev(f))(f.x), jacobian)
        if not by_mode and f.x.dtype == torch.float32:  # 16 bits leave the two modes too far apart
            near(jacfwd(f)(f.x), jacobian)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("i", "dtype", "training"), DRAWN, ids=[f"{module_db[c[0]].name}-{c[1:]}" for c in DRAWN]
)
def test_a_module_is_the_loops(i, dtype, training):
    info, checked = module_db[i], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = inputs_of(info, dtype, training)
        except (RuntimeError, TypeError, ValueError):
            samples = []
        for given in samples:
            try:
                f = Case(info, given, dtype, training)
                found = truth(f)
            except (StopIteration, RuntimeError, NotImplementedError, ValueError, IndexError):
                continue  # torch itself has no answer
            if found is not None:
                check(f, *found, info.name in BY_MODE)
                checked += 1
    if not checked:
        pytest.skip("no sample, it draws, or torch itself has no answer")
