"""To record a call imports nothing of torch's or other libraries: sympy takes half a second."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import forall
from forall._compat.shapes import broadcast_shapes
from forall._vmap.lazy_grad.lazy_tensor import (
    _SHAPES,
    IN_ZEROS,
    infer_convolution_shape,
    make_meta_result,
)

aten = torch.ops.aten

_PROGRAM = """
    import sys
    import torch
    from torch import nn
    import forall
    from forall import grad, hessian, jacfwd, jvp, vmap

    def with_parameters(module):
        parameters = dict(module.named_parameters())
        def loss(p, x):
            return torch.func.functional_call(module, p, (x[None],)).square().sum()
        return loss, parameters

    convolutions, p = with_parameters(nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)))
    attention, q = with_parameters(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
    perceptron = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    images, words, points = torch.randn(4, 1, 8, 8), torch.randn(4, 5, 8), torch.randn(4, 3)

    def energy(x):
        return perceptron(x).square().sum()

    calls = [
        lambda g=vmap(grad(convolutions), in_dims=(None, 0)): g(p, images),
        lambda g=vmap(grad(attention), in_dims=(None, 0)): g(q, words),
        lambda g=grad(lambda p, x: vmap(convolutions, (None, 0))(p, x).mean()): g(p, images),
        lambda g=vmap(hessian(energy)): g(points),
        lambda g=vmap(jacfwd(lambda x: perceptron(x).sin())): g(points),
        lambda g=hessian(energy): g(points[0]),
        lambda g=grad(energy): g(points[0]),
        lambda g=lambda x: jvp(energy, (x,), (x,)): g(points[0]),
    ]
    forall.config.replay = False
    for call in calls:
        call()
    before = {*sys.modules}
    forall.config.replay, forall.config.patience = True, 0
    from forall._jit import deadline
    from forall._auto_replay import policy
    deadline.SECONDS_ALLOWED = 1e6  # however slow the machine is
    recorded = []
    original = policy.begin_recording
    policy.begin_recording = lambda *given, **how: recorded.append(1) or original(*given, **how)
    for call in calls:
        for _ in range(6):
            call()
    new = {*sys.modules} - before
    files = {m: getattr(sys.modules[m], "__file__", None) or "" for m in new}
    others = [m for m in new if m.partition(".")[0] != "forall"]
    print(len(recorded), sorted(m for m in others if "site-packages" in files[m]))
"""


def test_to_record_imports_nothing_of_torchs_or_other_libraries():
    home = str(Path(forall.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {home!r})\n{textwrap.dedent(_PROGRAM)}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count, _, modules = done.stdout.partition(" ")
    assert int(count) >= 8
    assert modules.strip() == "[]"


def _given(op):
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    z = torch.randn(2, 4, 3)
    if op in (aten.mm.default, aten.bmm.default):
        first = z if op is aten.bmm.default else x
        return [(first, first.mT.contiguous()), (first.mT.contiguous(), first)]
    if op in (aten.cat.default, aten.stack.default):
        pairs = [(x, y), (x.mT, y.mT), (z, z, z), (x[0], y[0])]
        given = [(pair,) for pair in pairs] + [(pair, -1) for pair in pairs]
        return given + ([((x, x[:1]),)] if op is aten.cat.default else [])
    if op is aten.threshold_backward.default:
        return [(x, y, 0), (x.mT, y.mT, 0)]
    if str(op).endswith("backward.default") and op not in IN_ZEROS:
        return [(x, y), (x.mT, y.mT), (x.double(), y.double())]
    if op in (aten.flip.default, aten.roll.default):
        return [(z, [1]), (x.mT, [1])]
    if op is aten.select_backward.default:
        return [(x, [4, 5, 3], 1, 2), (x.mT, [3, 4, 5], 2, 0)]
    if op is aten.slice_backward.default:
        return [(x, [9, 3], 0, 1, 8, 2), (x.mT, [3, 7], 1, 0, 4, 1)]
    if op is aten.diagonal_backward.default:
        return [(x, [4, 3, 3], 0, 1, 2)]
    if op in (aten.mul.Scalar, aten.div.Scalar):
        return [(x, 2.0), (x.double(), 3)]
    if op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return [(x, y), (x.mT, y.mT), (x, y[0]), (x, y.double()), (x.int(), y.int()), (x, 2.0)]
    return [(x,), (z,), (x.mT,), (x.int(),)]


@pytest.mark.parametrize("op", [*_SHAPES], ids=str)
def test_what_results_look_like_without_asking_torch(op):
    for given in _given(op):
        like, wanted = make_meta_result(op, given), op(*given)
        assert (like.shape, like.dtype) == (wanted.shape, wanted.dtype)
        assert like.stride() == wanted.stride()


@pytest.mark.parametrize("how", [([1, 1], [0, 0], [1, 1], 1), ([2, 1], [1, 2], [1, 2], 2)])
def test_shape_of_a_convolution_is_torchs(how):
    stride, padding, dilation, groups = how
    x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4 // groups, 3, 2)
    given = (x, w, None, stride, padding, dilation, False, [0, 0], groups)
    assert infer_convolution_shape(*given) == aten.convolution.default(*given).shape


@pytest.mark.parametrize(
    "shapes", [(), ((),), ((3,),), ((3, 1), (4,)), ((2, 1, 3), (5, 1), ()), ((0,), (1,)), ((1, 1),)]
)
def test_broadcast_shapes_is_torchs(shapes):
    assert broadcast_shapes(*shapes) == torch.broadcast_shapes(*shapes)
    assert type(broadcast_shapes(*shapes)) is torch.Size


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((0,), (2,)), ((2, 3), (3, 1))])
def test_broadcast_shapes_that_do_not_fit_raise_torchs_error(shapes):
    with pytest.raises(RuntimeError) as wanted:
        torch.broadcast_shapes(*shapes)
    with pytest.raises(RuntimeError) as found:
        broadcast_shapes(*shapes)
    assert str(found.value) == str(wanted.value)
