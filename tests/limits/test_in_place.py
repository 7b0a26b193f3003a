"""Writes in place: buffers, views of views, indices that differ, changed metadata, other dtypes.

The random programs cross writes with all else; here are the forms that they do not make.
"""

import pytest
import torch

from forall import grad, jvp, vmap
from limits.words import DIRECTION, FORWARD, OUTSIDE, WORDS, D, numbers, outcome
from oracle import check_vmap, difference

# --- of real numbers, under every transform -------------------------------------------------------


def zeros(*shape):
    return torch.zeros(shape, dtype=D)


def tensor_of_numbers(a, w):
    t = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D)
    t[0] += a[:2] * w[:2]
    return t


def full(a, w):
    t = torch.full((3, 3), 2.0, dtype=D)
    t.diagonal().mul_(a * w)
    t[0].add_(w)
    return t


def aranged(a, w):
    t = torch.arange(3, dtype=D)
    t *= a
    t.sub_(w, alpha=2)
    return t


def stacked_numbers(a, w):
    t = torch.stack([a[0] * w[0], a[1], w[2]])
    t[1] = a.sum()
    t[2:] *= a[2]
    return t


def views_of_views(a, w):
    t = zeros(2, 3, 3)
    row = t[1].mT[0:2].view(2, 3)
    row.copy_(a.expand(2, 3))
    t.transpose(0, 2)[0, :, 1] += w
    t[1].diagonal()[1:].unsqueeze(0).squeeze(0).mul_(3)
    return t


def seen_before_and_after(a, w):
    t = zeros(3)
    before = t[1:]
    t.add_(a)
    after = t[:2]
    before.mul_(w[1:])
    after += 1
    t[1] = a.prod()
    return torch.cat([t, before, after])


def diagonal_copied(a, w):
    t = torch.eye(3, dtype=D)
    t.diagonal().copy_(a)
    t.diagonal(1).copy_(w[:2] * a[1:])
    return t


def index_put(a, w):
    t = torch.ones(3, 3, dtype=D)
    t.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), a[:2])
    t.index_put_((torch.tensor([0, 0]),), a * w, accumulate=True)
    return t


def index_put_where(a, w):
    t = a * w
    t[torch.tensor([True, False, True])] = w[1] * a[0]
    return t


def scattered(a, w):
    t = torch.ones(3, dtype=D)
    places = torch.tensor([2, 0, 2])
    t.scatter_(0, torch.tensor([1]), a[:1])
    t.scatter_add_(0, places, a * w)
    return t


def scattered_by_own(a, w):
    t = torch.ones(3, dtype=D)
    t.scatter_(0, a.detach().argsort(), a * w)
    return t * a


def scatter_reduced(a, w):
    t = torch.ones(3, dtype=D)
    t.scatter_reduce_(0, torch.tensor([0, 1, 0]), a * w, "sum")
    t.index_add_(0, torch.tensor([1, 1]), a[:2], alpha=3)
    return t


def masked(a, w):
    t = (a * w).clone()
    t.masked_fill_(t > 0, 0.5)
    t.masked_fill_(torch.tensor([True, False, False]), a.sum())
    return t * a


def masked_scattered(a, w):
    t = torch.ones(3, dtype=D)
    t.masked_scatter_(torch.tensor([True, False, True]), a * w)
    return t


def sliced(a, w):
    t = zeros(5)
    t[1:4] = a
    t[::2] *= 2
    t[-1] = t[1] * w[0]
    t[...] += t.detach().sum()
    return t


def rows_accumulated(a, w):
    total = zeros(3)
    for i in range(3):
        total += a[i] * w
        total[i] -= a[i]
    return total


def recurrent(a, w):
    h = zeros(4, 3)
    h[0] = a
    for i in range(1, 4):
        h[i] = (h[i - 1] * w).sin()
    return h


def swapped(a, w):
    t = (a * w).clone()
    t[0], t[1] = t[1].clone(), t[0].clone()
    return t


def slices_swapped(a, w):
    t = torch.stack([a, w * a])
    t[[0, 1]] = t[[1, 0]]
    return t


def by_out(a, w):
    t = zeros(3)
    with torch.no_grad():
        torch.mul(a.detach(), w.detach(), out=t)
    return t * a


def transposed(a, w):
    t = torch.stack([a, w * a])
    assert t.t_() is t
    assert t.shape == (3, 2)
    t[0] *= 2
    t.transpose_(0, 1).add_(w)
    t.swapaxes_(0, 1).swapdims_(0, 1)
    return t


def squeezed(a, w):
    t = (a * w).clone()
    assert t.unsqueeze_(0).shape == (1, 3)
    t[0, 1] = 2 * a[0]
    t.squeeze_().mul_(a)
    t.unsqueeze_(-1).squeeze_(-1)
    return t


def flattened(a, w):
    t = zeros(2, 3)
    t.view(-1)[1::2].copy_(a)
    t.flatten()[0:1].add_(w[0])
    t.unflatten(1, (3, 1))[1, :, 0] *= a
    return t


def relu_in_place(a, w):
    t = a * w
    torch.relu_(t)
    torch.nn.functional.leaky_relu_(t, 0.5)
    return t + torch.nn.functional.elu_(a * 2)


def power_in_place(a, w):
    t = a * w
    t **= 2
    t /= w
    t.clamp_(max=2).exp_().sigmoid_()
    return t


def cumulated(a, w):
    t = a * w
    t.cumsum_(0)
    return t


def triangular(a, w):
    t = a[:, None] * w
    t.tril_()
    t.fill_diagonal_(2.0)
    return t


def addmm_in_place(a, w):
    t = torch.eye(3, dtype=D)
    t.addmm_(a[:, None], w[None], beta=2)
    t.addr_(a, a)
    v = zeros(3)
    v.addmv_(t, a)
    return t + v


def shifted(a, w):
    t = (a * w).clone()
    t[1:] = t[:-1].clone() + t[1:]
    return t


def set_data(a, w):
    t = torch.ones(3, dtype=D)
    t.data = (a * w).detach()
    t.mul_(2)
    return t * a


def resized(a, w):
    t = zeros(2)
    t.resize_(3)
    t.copy_(a)
    return t * w


def inner_leaf(a, w):
    """The gradient with respect to a buffer that is written to afterwards."""
    p = (a * w).detach().requires_grad_()
    t = zeros(3)
    t[1:] = p[:2] * a[:2]
    t[0] = p.prod()
    (g,) = torch.autograd.grad(t.sin().sum(), p, create_graph=True)
    g[0] = a[1]
    return g


def detached_alias(a, w):
    t = a * w
    s = t.detach()
    s.mul_(2)
    return t + s


def copied_dtype(a, w):
    t = torch.zeros(3, dtype=torch.float32)
    t.copy_(a)
    t += w
    return t.double()


CASES = {
    f.__name__: f
    for f in (
        tensor_of_numbers, full, aranged, stacked_numbers, views_of_views, seen_before_and_after,
        diagonal_copied, index_put, index_put_where, scattered, scattered_by_own, scatter_reduced,
        masked, masked_scattered, sliced, rows_accumulated, recurrent, swapped, slices_swapped,
        by_out, transposed, squeezed, flattened, relu_in_place, power_in_place, cumulated,
        triangular, addmm_in_place, shifted, set_data, resized, inner_leaf,
        detached_alias, copied_dtype,
    )
}  # fmt: skip

REVERSE = [word for word in WORDS if not FORWARD & {*word.split()}]


def agrees(word, f, outside):
    """Whether the transform is the loop, in its result or in its error."""
    there = WORDS[word]
    try:
        truth = outcome(there.truth, f, there.shape, outside)
    except RuntimeError as error:
        if word in REVERSE:  # forward mode may have an answer where reverse mode has none
            with pytest.raises(RuntimeError, match=str(error)[:40]):
                outcome(there.ours, f, there.shape, outside)
        return
    assert difference(outcome(there.ours, f, there.shape, outside), truth) is None


@pytest.mark.sweep(8)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("case", CASES)
def test_a_write_in_place_is_the_loops(case, word):
    for outside in OUTSIDE:
        agrees(word, CASES[case], outside)


# --- other dtypes, whose values alone are compared ------------------------------------------------


def counted(a, i):
    t = torch.zeros(4, dtype=torch.int64)
    t[i] += 1
    t.index_add_(0, i.expand(2), torch.ones(2, dtype=torch.int64))
    return t


def histogram(a, i):
    t = torch.zeros(3, dtype=torch.int32)
    for n in range(3):
        t[n] = (a > n / 3 - 0.5).sum()
    return t.bitwise_or_(4).bitwise_left_shift_(1)


def flags(a, i):
    t = torch.zeros(3, dtype=torch.bool)
    t[i] = True
    t |= a > 0.5
    t.logical_not_()
    return t


def bool_from_number(a, i):
    t = torch.zeros(3, dtype=torch.bool)
    t.copy_(a)
    t[1] = a[0]
    return t


def truncated(a, i):
    t = torch.zeros(3, dtype=torch.int64)
    t.copy_(10 * a)
    t[0] = 10 * a[1]
    t.neg_()
    return t


def complex_parts(a, i):
    t = torch.zeros(3, dtype=torch.complex128)
    t.real.copy_(a)
    t.imag += a.flip(0)
    t[i] *= 1j
    return t.conj_physical_()


def viewed_as_real(a, i):
    t = torch.view_as_complex(torch.stack([a, a + 1], -1))
    torch.view_as_real(t)[:, 1].mul_(a)
    return t


def single(a, i):
    t = torch.zeros(3)
    t += a
    t[i] = a[0]
    return t.mul_(2.5)


def half(a, i):
    t = torch.ones(3, dtype=torch.float16)
    t.mul_(a.half()).add_(1)
    return t.to(torch.bfloat16).to(D)


def refused_cast(a, i):
    t = torch.zeros(3, dtype=torch.int64)
    try:
        t += a
    except RuntimeError as error:
        assert "can't be cast" in str(error)  # noqa: PT017 - in the function under test
        return t - 1
    raise AssertionError


def numbers_in_lists(a, i):
    return torch.tensor([[a[0], 2.0], [i, a.sum()]]), torch.tensor([i, 3])


def full_of_number(a, i):
    return torch.full((2,), a[1]), torch.full_like(i, i), a.new_full((2, 1), a[0])


def row_written(a, i):
    t = torch.zeros(3, 2, dtype=D)
    row = t[i]
    row += a[:2]
    t[i, 0] *= 3
    return t, row


def sorted_in_place(a, i):
    t = a.clone()
    t.copy_(t.sort().values)
    return t, t.argsort()


def bytes_viewed(a, i):
    t = a.clone()
    t.view(torch.int64).bitwise_and_(-2)
    return t


def no_grad_step(a, i):
    p = a.clone().requires_grad_()
    (p * p).sum().backward()
    with torch.no_grad():
        p[i] -= p.grad[i]
        p.grad.zero_()
    return p.detach(), p.grad


VALUES = {
    f.__name__: f
    for f in (
        counted, histogram, flags, bool_from_number, truncated, complex_parts, viewed_as_real,
        single, half, refused_cast, numbers_in_lists, full_of_number, row_written,
        sorted_in_place, bytes_viewed, no_grad_step,
    )
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_write_into_another_dtype_is_the_loops(case):
    f = VALUES[case]
    check_vmap(f, (numbers(4, 3), torch.tensor([0, 2, 1, 1])))
    check_vmap(f, (numbers(3, 4), torch.tensor([0, 2, 1, 1])), in_dims=(1, 0))
    check_vmap(vmap(f), (numbers(2, 4, 3), torch.tensor([[0, 2, 1, 1], [1, 1, 0, 0]])))
    check_vmap(vmap(f, in_dims=(0, None)), (numbers(2, 4, 3), torch.tensor([0, 2])))


# --- the caller's tensors, versions ---------------------------------------------------------------


def test_a_mapped_argument_written_through_a_view_is_seen_by_the_caller():
    def f(a):
        a[1:].mul_(2)
        a.view(3, 1)[0, 0] = a.sum()
        return a * 1

    check_vmap(f, (numbers(4, 3),))
    check_vmap(f, (numbers(3, 4),), in_dims=1)
    check_vmap(vmap(f), (numbers(2, 4, 3),))


def overwritten(a):
    h = a.exp()
    y = h.sin()
    h[0] = 1
    return y.sum()


def overwritten_through_a_view(a):
    h = a.exp()
    view = h[1:]
    y = (h * h).sum()
    view.zero_()
    return y


def overwritten_by_promotion(a):
    p = torch.ones(3, dtype=D, requires_grad=True)
    buffer = torch.ones(3, dtype=D)
    y = (p * buffer).sum()
    buffer += a
    (g,) = torch.autograd.grad(y, p)
    return g.sum() + a.sum()


@pytest.mark.parametrize("f", [overwritten, overwritten_through_a_view, overwritten_by_promotion])
def test_a_version_that_is_gone_is_the_loops_error(f):
    told = "modified by an inplace operation"
    x = numbers(4, 3)
    with pytest.raises(RuntimeError, match=told):
        grad(f)(x[0])
    with pytest.raises(RuntimeError, match=told):
        vmap(grad(f))(x)
    with pytest.raises(RuntimeError, match=told):
        grad(lambda x: vmap(f)(x).sum())(x)


def test_other_memory_for_a_mapped_tensor_is_a_clear_error():
    def f(a):
        t = torch.ones(2, dtype=D)
        return t.set_(a.clone())

    with pytest.raises(NotImplementedError, match="gives a tensor other memory"):
        vmap(f)(numbers(4, 3))


def test_a_module_changes_its_dtype_under_jvp():
    def f(a):
        module = torch.nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.full((3, 3), 0.1, dtype=D))
        return module.double()(a)

    weight = torch.full((3, 3), 0.1).double()
    x = numbers(3)
    truth = weight @ x, weight @ DIRECTION
    assert difference(jvp(f, (x,), (DIRECTION,)), truth) is None
