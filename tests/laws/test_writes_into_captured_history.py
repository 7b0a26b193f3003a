"""Writes into a captured tensor with an autograd history: values and derivatives of the loop."""

from __future__ import annotations

import pytest
import torch

from forall import grad, vmap
from oracle import loop

XS = torch.arange(1.0, 4.0)
MASK = torch.tensor([True, False, True])
AT = torch.tensor([0, 2])


def through_a_view(w, x):
    v = w.view(3)
    w[0] = 1.0
    return (v * x).sum()


def twice(w, x):
    w[0] = 1.0
    w[1:] = 2.0
    return (w * x).sum()


def by_branches(w, x):
    w[0] = 1.0
    return (w * x).sum() if x > 1 else w.sum() - x


def written(write, *, used=True):
    """Return a function that writes into ``w``, and that uses it or does not."""

    def f(w, x):
        write(w)
        return (w * x).sum() if used else 2 * x

    return f


WRITES = {
    "a number at a number": lambda w: w.__setitem__(0, 1.0),
    "a tensor at a number": lambda w: w.__setitem__(0, torch.tensor(1.0)),
    "at a slice": lambda w: w.__setitem__(slice(0, 2), 1.0),
    "at a slice with a step": lambda w: w.__setitem__(slice(None, None, 2), torch.ones(1)),
    "everywhere": lambda w: w.__setitem__(..., 1.0),
    "at a mask": lambda w: w.__setitem__(MASK, 1.0),
    "at places": lambda w: w.__setitem__(AT, 1.0),
    "at places in a tuple": lambda w: w.__setitem__((AT,), torch.tensor([1.0, 2.0])),
    "fill_ of a view": lambda w: w[:1].fill_(1.0),
    "zero_ of a view": lambda w: w[1:].zero_(),
    "copy_ into a view": lambda w: w[:1].copy_(torch.ones(1)),
    "fill_ of a view of a view": lambda w: w[:2][1:].fill_(1.0),
    "fill_": lambda w: w.fill_(1.0),
    "masked_fill_": lambda w: w.masked_fill_(MASK, 1.0),
}
FUNCTIONS = {
    **{name: written(write) for name, write in WRITES.items()},
    **{f"{name}, not used": written(write, used=False) for name, write in WRITES.items()},
    "through a view from before": through_a_view,
    "twice": twice,
    "where examples diverge": by_branches,
}


def run(transform, f, make):
    """Return what a call gives and leaves, with derivatives of both in what the tensor is of."""
    base = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    w = make(base)
    out = transform(lambda x: f(w, x))(XS)
    loss = w.sin().sum() + (out.sin().sum() if out.requires_grad else 0)
    (found,) = torch.autograd.grad(loss, base)
    assert type(found) is torch.Tensor
    return out.detach(), w.detach(), found


MADE = {
    "a product": lambda b: 2 * b,
    "a view of a product": lambda b: torch.cat([b, b]).mul(2)[1:4],
    "a copy": torch.clone,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_the_loop(name, made):
    for got, wanted in zip(
        run(vmap, FUNCTIONS[name], MADE[made]), run(loop, FUNCTIONS[name], MADE[made]), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", WRITES)
def test_a_leaf_is_refused_as_torch_refuses_it(name):
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with pytest.raises(RuntimeError) as theirs:
        WRITES[name](w)
    with pytest.raises(RuntimeError) as ours:
        vmap(lambda x: FUNCTIONS[name](w, x))(XS)
    assert str(ours.value) == str(theirs.value)
    assert w.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", WRITES)
def test_without_grad_a_leaf_is_written(name):
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    wanted = w.detach().clone()
    WRITES[name](wanted)
    with torch.no_grad():
        vmap(lambda x: FUNCTIONS[f"{name}, not used"](w, x))(XS)
    assert torch.equal(w.detach(), wanted)
    assert w.is_leaf


def test_two_calls_in_each_other():
    def run_nested(transform):
        base = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        w = 2 * base

        def f(x):
            w[0] = 1.0
            return (w * x).sum()

        out = transform(transform(f))(torch.arange(1.0, 7.0).reshape(2, 3))
        return out.detach(), *torch.autograd.grad(out.sin().sum() + w.sin().sum(), base)

    for got, wanted in zip(run_nested(vmap), run_nested(loop), strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_value_of_each_example_is_refused():
    w = torch.ones(3, requires_grad=True) * 2

    def f(x):
        w[0] = x
        return w.sum()

    with pytest.raises(RuntimeError, match="writes per-example data into a tensor that all"):
        vmap(f)(XS)


@pytest.mark.parametrize("name", ["clamp_", "abs_"])
def test_what_reads_what_it_writes_is_refused_for_that(name):
    w = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="that the function has read"):
        vmap(lambda x: x + getattr(w, name)(*[0.5] * (name == "clamp_")).sum())(XS)


def test_another_captured_view_of_the_tensor_would_miss_the_write():
    w = torch.ones(3, requires_grad=True) * 2
    other = w.view(3)

    def f(x):
        w[0] = 1.0
        return (other * x).sum()

    with pytest.raises(RuntimeError, match="with a derivative at stake"):
        vmap(f)(XS)


def test_within_a_derivative_of_each_example():
    def f(w, x):
        v = w * 2
        v[0] = 1.0
        return (v * x).sum()

    w = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(
        vmap(grad(f), in_dims=(None, 0))(w, XS),
        torch.stack([grad(f)(w, x) for x in XS]),
    )


@pytest.mark.parametrize("name", ["a number at a number", "at a mask", "fill_ of a view"])
def test_within_a_derivative_outside(name):
    def loss(transform, b):
        w = 2 * b
        out = transform(lambda x: FUNCTIONS[name](w, x))(XS)
        return out.sin().sum() + w.sin().sum()

    b = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(grad(lambda b: loss(vmap, b))(b), grad(lambda b: loss(loop, b))(b))
