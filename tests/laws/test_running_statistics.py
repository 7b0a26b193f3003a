"""What an operator writes of which its schema says nothing: a law of running statistics.

Whatever the function does beside, it leaves the statistics that the loop leaves, or is refused.
"""

import pytest
import torch
from torch.nn import functional as F

from draws import make_generator
from forall import vmap

D = torch.float64
XS = torch.randn(4, 5, 3, 6, dtype=D, generator=make_generator(0))
ROW = XS[0]


def normed(x, mean, var):
    return F.batch_norm(x, mean, var, None, None, True, 0.1)


def updated(x, mean, var):
    return torch.batch_norm_update_stats(x, mean, var, 0.1)


def started():
    return torch.zeros(3, dtype=D), torch.ones(3, dtype=D)


def stacked(outs):
    return torch.utils._pytree.tree_map(lambda *ts: torch.stack(ts), *outs)


def rows_of_one(op, x):
    both = torch.zeros(2, 3, dtype=D)
    before = both * 1
    return op(x, both[0], both[1]), both, before


def made_inside(op, x):
    mean, var = started()
    view = mean[1:]
    return op(x, mean, var), mean, var, view


def made_inside_of_shared_data(op, x):
    mean, var = started()
    return op(ROW, mean, var), mean, var, x


def test_the_counter_of_a_layer_under_a_default_device_of_its_own():
    ours, theirs = (torch.nn.BatchNorm1d(3, momentum=None, dtype=D) for _ in range(2))

    def f(x):
        with torch.device(x.device):  # a mode of torch's between the layer and vmap
            return ours(x)

    torch.testing.assert_close(vmap(f)(XS), torch.stack([theirs(x) for x in XS]))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("op", [normed, updated])
@pytest.mark.parametrize("f", [rows_of_one, made_inside, made_inside_of_shared_data])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_statistics_made_inside(op, f, mode):
    with mode():
        found = vmap(lambda x: f(op, x))(XS)
        expected = stacked([f(op, x) for x in XS])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", [normed, updated])
def test_mapped_statistics(op):
    ours = torch.rand(2, 4, 3, dtype=D)
    theirs = ours.clone()
    version = ours._version
    found = vmap(op)(XS, *ours)
    torch.testing.assert_close(
        found, stacked([op(x, *s) for x, *s in zip(XS, *theirs, strict=True)])
    )
    torch.testing.assert_close(ours, theirs)
    assert ours._version > version


CAPTURED = {
    "alone": lambda op, x, s: op(x, *s),
    "of shared data": lambda op, x, s: (op(ROW, *s), x),
    "twice": lambda op, x, s: (op(x, *s), op(x * 2, *s)),
    "nested": lambda op, x, s: vmap(lambda y: op(y, *s))(torch.stack([x, x + 1])),
    "nested, the same inside": lambda op, x, s: vmap(lambda y: (op(x, *s), y))(x),
    "and a sum": lambda op, x, s: (op(x, *s), s[0].add_(1))[0],
    "where examples diverge": lambda op, x, s: op(x, *s)[0] * (2 if x[0, 0, 0] > 0 else 3),
}


def of_instances(x, mean, var):
    return F.instance_norm(x, mean, var, None, None, True, 0.2)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("op", [normed, updated, of_instances])
@pytest.mark.parametrize("f", CAPTURED.values(), ids=CAPTURED)
def test_captured_statistics(op, f, mode):
    """In inference mode torch leaves `batch_norm` in one piece."""
    ours, theirs = started(), started()
    with mode():
        expected = stacked([f(op, x, theirs) for x in XS])
        found = vmap(lambda x: f(op, x, ours))(XS)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, theirs)


def into_out(x, s):
    outs = torch.empty_like(x), *started()
    return torch.native_batch_norm(x, None, None, *s, True, 0.1, 1e-5, out=outs)


def test_an_out_form():
    ours, theirs = started(), started()
    expected = stacked([into_out(x, theirs) for x in XS])
    torch.testing.assert_close(vmap(lambda x: into_out(x, ours))(XS), expected)
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError, match="once for every example"):
        vmap(lambda x: (into_out(ROW, ours), x))(XS)


@pytest.mark.parametrize("op", [normed, updated])
@pytest.mark.parametrize(
    "f",
    [
        lambda op, x, s: (op(x, *s), s[0] * 2),
        lambda op, x, s: (s[0] * 2, op(x, *s)),
        lambda op, x, s: (op(ROW, *s), s[0] * x[0, 0, 0]),
        lambda op, x, s: (op(x, *s), s[0].zero_())[0],
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_captured_statistics_that_are_read_or_set_as_well(op, f, mode):
    ours = started()
    with mode(), pytest.raises(RuntimeError, match="from before the call"):
        vmap(lambda x: f(op, x, ours))(XS)
    torch.testing.assert_close(ours, started())
