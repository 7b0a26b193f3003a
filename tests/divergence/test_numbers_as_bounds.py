"""``x[i:j]`` and ``x[i:j] = v`` with bounds of each example: the loop's result, picked at once."""

from __future__ import annotations

import pytest
import torch

from forall import explain, grad, jacfwd, jacrev, vmap

D = torch.float64
SIZE = 6
STARTS = torch.tensor([0, 2, 1, 3, 2])
ROWS = torch.linspace(-1, 1, 5 * SIZE * SIZE, dtype=D).sin().reshape(5, SIZE, SIZE)
TABLE = torch.linspace(0, 2, SIZE * SIZE, dtype=D).cos().reshape(SIZE, SIZE)


def written(write):
    """A use of a copy of x, after something has been written into it."""

    def use(x, n):
        x = x.clone()
        write(x, n)
        return x

    return use


def _by_a_view(x, n):
    window = x[n : n + 2, 1:]
    window += 1
    window[0].mul_(2)


def _by_x(x, n):
    window = x[n : n + 2]
    x.mul_(3)
    x[0] = window[1]


def _both_ways(x, n):
    window = x[:, n : n + 3]
    window[:, 0] = 5
    x[2] = 7
    window[:] = window + window.sum()


def _augmented(x, n):
    x[n : n + 2] *= 3
    x[:, n : n + 1] += x[n : n + 1].sum()


# Uses in which each example picks as many entries.
AS_MANY = {
    "a window": lambda x, n: x[n : n + 2],
    "of the last dim": lambda x, n: x[..., n : n + 2],
    "of two dims": lambda x, n: x[n : n + 2, n + 1 : n + 3],
    "from the end": lambda x, n: x[n - 6 : n - 4],
    "with an int before": lambda x, n: x[1, n : n + 3],
    "with a number of the example before": lambda x, n: x[n, n : n + 3],
    "with a number of the example behind": lambda x, n: x[n : n + 3, n],
    "with None": lambda x, n: x[None, n : n + 2, None],
    "with a list": lambda x, n: x[n : n + 2, [0, 3, 1]],
    "with a mask": lambda x, n: x[n : n + 2, TABLE[0] > 0],
    "with a step": lambda x, n: x[n : n + 3 : 2],
    "none at all": lambda x, n: x[n:n],
    "none, for it ends before it begins": lambda x, n: x[n + 1 : n],
    "of what all share": lambda x, n: TABLE[n : n + 2] * x[0],
    "of what is picked": lambda x, n: x[n : n + 3][1:][:, n : n + 1],
    "of a transposed": lambda x, n: x.T[n : n + 2],
    "narrow": lambda x, n: x.narrow(1, n, 2),
    "narrow, by keywords": lambda x, n: torch.narrow(x, dim=-1, start=n, length=2),
    "select": lambda x, n: x.select(1, n),
    "select, by keywords": lambda x, n: torch.select(x, dim=1, index=n),
    "roll": lambda x, n: x.roll(n, 1),
    "roll of all": lambda x, n: torch.roll(x, n),
    "one value": written(lambda x, n: x.__setitem__(slice(n, n + 2), 3)),
    "one value of a tensor": written(lambda x, n: x.__setitem__(slice(n, n + 2), x.sum())),
    "one value of an int": written(lambda x, n: x.__setitem__(slice(n, n + 2), n)),
    "one value, as many or not": written(lambda x, n: x.__setitem__((slice(n), slice(n, -1)), 3)),
    "one value to the end": written(lambda x, n: x.__setitem__((..., slice(n, None)), -2.0)),
    "one value with a step": written(lambda x, n: x.__setitem__(slice(n, None, 2), 1.5)),
    "one value with ints": written(lambda x, n: x.__setitem__((1, slice(None, n)), 1.5)),
    "one value with None": written(lambda x, n: x.__setitem__((None, slice(n), None), 1.5)),
    "rows": written(lambda x, n: x.__setitem__(slice(n, n + 2), TABLE[:2] * x[0])),
    "a row": written(lambda x, n: x.__setitem__(slice(n, n + 2), x[5])),
    "a column": written(lambda x, n: x.__setitem__((slice(n, n + 2), 1), x[0, 4:])),
    "another window": written(
        lambda x, n: x.__setitem__(slice(n, n + 2), x[n + 1 : n + 3].clone())
    ),
    "by a view of it": written(_by_a_view),
    "by x itself": written(_by_x),
    "by both": written(_both_ways),
    "augmented": written(_augmented),
}
# Uses that part the examples.
OTHERS = {
    "more for some": lambda x, n: x[: n + 1].sum(0),
    "cut off at the end": lambda x, n: x[n + 2 : n + 5].sum(0),
    "cut off at the front": lambda x, n: x[n - 2 : n].sum(0),
    "a step of its own": lambda x, n: x[:: n + 1].sum(0),
    "rows for some": written(lambda x, n: x.__setitem__(slice(n), x[0])),
    "a length of its own": lambda x, n: x.narrow(0, 0, n).sum(0),
}
USES = {**AS_MANY, **OTHERS}


def of(use, ask):
    return lambda x, n: USES[use](x, ask(n))


def by_loop(f, *args):
    return torch.stack([f(*each) for each in zip(*args, strict=True)])


ASKS = {"item": lambda n: n.item(), "int": int}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("use", USES)
def test_bounds_of_each_example_pick_what_the_loop_picks(use, ask):
    f = of(use, ASKS[ask])
    torch.testing.assert_close(vmap(f)(ROWS, STARTS), by_loop(f, ROWS, STARTS))


@pytest.mark.parametrize("use", AS_MANY)
def test_who_picks_as_many_stays_together(use):
    told = explain(vmap(of(use, ASKS["item"])))(ROWS, STARTS)
    assert (told.divergences, told.groups, told.again) == ((), (), ())


@pytest.mark.parametrize("use", USES)
def test_derivatives_outside_are_the_loops(use):
    f = of(use, ASKS["item"])
    rows = ROWS.clone().requires_grad_()
    found, expected = vmap(f)(rows.sin(), STARTS), by_loop(f, rows.sin(), STARTS)
    weights = torch.linspace(1, 2, found.numel(), dtype=D).reshape(found.shape)
    (ours,), (theirs,) = (
        torch.autograd.grad((y * weights).sum(), rows, materialize_grads=True, allow_unused=True)
        if y.requires_grad
        else (torch.zeros_like(rows),)
        for y in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd], ids=lambda t: t.__name__)
@pytest.mark.parametrize("use", USES)
def test_derivatives_inside_are_the_loops(use, transform):
    def number(x, n):
        y = of(use, ASKS["item"])(x.sin(), n)
        return (y * torch.linspace(1, 2, y.numel(), dtype=D).reshape(y.shape)).sum()

    expected = by_loop(grad(number), ROWS, STARTS)
    torch.testing.assert_close(vmap(transform(number))(ROWS, STARTS), expected)


@pytest.mark.parametrize("use", USES)
def test_of_two_levels(use):
    f = of(use, ASKS["item"])
    outer, inner = vmap(vmap(f, (None, 0)), (0, None)), vmap(vmap(f, (0, None)), (None, 0))
    each = [[f(x, n) for n in STARTS] for x in ROWS]
    expected = torch.stack([torch.stack(row) for row in each])
    torch.testing.assert_close(outer(ROWS, STARTS), expected)
    torch.testing.assert_close(inner(ROWS, STARTS), expected.transpose(0, 1))


@pytest.mark.parametrize("use", ["a window", "one value", "augmented", "by both"])
def test_after_a_test_the_bounds_are_those_of_the_examples_that_run(use):
    def f(x, n):
        if x[0, 0] > 0:
            return USES[use](x, int(n)).sum()
        return USES[use](x, int(n) + 1).sum() * 2

    torch.testing.assert_close(vmap(f)(ROWS, STARTS), by_loop(f, ROWS, STARTS))


def test_a_tensor_as_bound_is_asked_for_its_number():
    def f(x, n):
        return x[n : n + 2]

    torch.testing.assert_close(vmap(f)(ROWS, STARTS), by_loop(f, ROWS, STARTS))
    assert explain(vmap(f))(ROWS, STARTS).ways == ("as it is, all examples in one run",)


def test_a_bound_that_is_no_int_is_torchs_error():
    with pytest.raises(TypeError, match="slice indices must be integers"):
        vmap(lambda x, n: x[n.item() :])(ROWS, STARTS.double())


def test_a_place_outside_is_the_loops_error():
    with pytest.raises(IndexError):
        vmap(lambda x, n: x.select(0, n.item()))(ROWS, STARTS + 4)
    with pytest.raises((IndexError, RuntimeError)):
        vmap(lambda x, n: x.narrow(0, n.item(), 5))(ROWS, STARTS)
