"""`vmap` over a nested tensor is the loop over its components, each of a length of its own.

Results of one shape are stacked; results of several leave as a nested tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forall
from draws import make_generator
from forall import grad, grad_and_value, jacfwd, jacrev, jit, jvp, vjp, vmap
from golden import refused

# torch's own: nested tensors of the strided layout are prototypes, and some tell so
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")

D = torch.float64
generator = make_generator(3)
W = torch.randn(4, 4, dtype=D, generator=generator)
LENGTHS = [3, 1, 4, 3, 2]
ROWS = [torch.randn(n, 4, dtype=D, generator=generator) for n in LENGTHS]
SCALES = torch.arange(1.0, 6.0, dtype=D)
LAYOUTS = [torch.jagged, torch.strided]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["jagged", "strided"])

close = torch.testing.assert_close


def nested(rows: list[Tensor], layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=layout)


def is_loop(found: Any, want: list[Any]) -> None:
    """Results of one shape are stacked, others are components."""
    if len({t.shape for t in want}) == 1:
        assert not found.is_nested
        close(found, torch.stack(want))
        return
    assert found.is_nested
    assert found.size(0) == len(want)
    for mine, its in zip(found.unbind(), want, strict=True):
        close(mine, its)


def attend(x: Tensor) -> Tensor:  # (L, 4) -> (L, 4): two heads
    q, k, v = ((x @ w).unflatten(-1, (2, 2)).transpose(0, 1) for w in (W, W.T, W.sin()))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


def running(x: Tensor) -> Tensor:  # asks nothing, but runs Python over the length
    h = torch.zeros(4, dtype=x.dtype)
    for row in x:
        h = (W @ h + row).tanh()
    return h


def early(x: Tensor) -> Tensor:
    for row in x:
        if row.sum() > 0:
            return row
    return x[-1]


FUNCTIONS: dict[str, Callable] = {
    "sine": torch.sin,
    "sum": torch.sum,
    "pooled": lambda x: x.mean(0),
    "by rows": lambda x: x.sum(-1),
    "linear": lambda x: F.linear(x, W, W[0]),
    "norm": lambda x: F.layer_norm(x, (4,), W[0], W[1]),
    "attention": attend,
    "gram": lambda x: x @ x.T,
    "transposed": lambda x: x.T.cumsum(-1),
    "running": running,
    "early": early,
    "positive": lambda x: x[x > 0],
    "length": lambda x: torch.full((x.shape[0],), x.shape[0], dtype=x.dtype),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.sweep(3)
@functions
@layouts
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_it_is_the_loop_over_components(layout, name, chunk_size):
    f = FUNCTIONS[name]
    is_loop(vmap(f, chunk_size=chunk_size)(nested(ROWS, layout)), [f(x) for x in ROWS])


@pytest.mark.sweep(3)
@functions
@pytest.mark.parametrize("strategy", ["loop", "measured"])
def test_it_is_the_loop_where_that_is_run(strategy, name, monkeypatch):
    monkeypatch.setattr(forall.config, "strategy", strategy)
    f = FUNCTIONS[name]
    for _ in range(3):
        is_loop(vmap(f)(nested(ROWS)), [f(x) for x in ROWS])
        is_loop(vmap(lambda x: (f(x), x[0]))(nested(ROWS))[0], [f(x) for x in ROWS])


@pytest.mark.sweep(3)
@functions
def test_gradients_of_each_example(name):
    f = FUNCTIONS[name]

    def slope(x):
        return grad(lambda x: f(x).sin().sum())(x)

    is_loop(vmap(slope)(nested(ROWS)), [slope(x) for x in ROWS])


@pytest.mark.sweep(3)
@functions
@layouts
def test_gradients_outside(layout, name):
    f = FUNCTIONS[name]
    rows = [x.clone().requires_grad_() for x in ROWS]
    w = W.clone().requires_grad_()

    def weighed(x):
        y = f(x * w.diagonal()) + x.sum() * w.sum()
        return (y * y.sin()).sum()

    want = torch.autograd.grad(sum(weighed(x) for x in rows), [*rows, w])
    whole = torch.nested.as_nested_tensor(rows, layout=layout)
    found = vmap(weighed)(whole).sum()
    for mine, its in zip(torch.autograd.grad(found, [*rows, w]), want, strict=True):
        close(mine, its)


@pytest.mark.sweep(3)
@functions
def test_gradients_with_respect_to_the_whole(name):
    f = FUNCTIONS[name]

    def total(whole):
        y = vmap(f)(whole)
        return (y.values() if y.is_nested else y).sin().sum()

    found = grad(total)(nested(ROWS))
    assert found.is_nested
    for mine, x in zip(found.unbind(), ROWS, strict=True):
        close(mine, grad(lambda x: f(x).sin().sum())(x))


def test_weights_and_scales_beside():
    def f(w, x, s):
        return grad(lambda w: ((x @ w) * s).sin().sum())(w)

    want = [f(W, x, s) for x, s in zip(ROWS, SCALES, strict=True)]
    for in_dims in ((None, 0, 0), {"x": 0, "s": 0}):
        close(vmap(f, in_dims=in_dims)(W, nested(ROWS), SCALES), torch.stack(want))
    other = [x.cos() for x in ROWS]
    g = lambda d: d["a"] * d["b"][0]  # noqa: E731
    pairs = [g({"a": x, "b": (y,)}) for x, y in zip(ROWS, other, strict=True)]
    is_loop(vmap(g)({"a": nested(ROWS), "b": (nested(other),)}), pairs)


def test_components_that_agree_in_one_argument_alone():
    other = [torch.ones(n, 2, dtype=D) for n in (1, 2, 2, 3, 1)]
    f = lambda x, y: torch.cat([x.flatten(), y.flatten()])  # noqa: E731
    want = [f(x, y) for x, y in zip(ROWS, other, strict=True)]
    is_loop(vmap(f)(nested(ROWS), nested(other)), want)


def test_several_results():
    y, s, n, name = vmap(lambda x: (x.sin(), x.sum(0), len(x), "name"))(nested(ROWS))
    is_loop(y, [x.sin() for x in ROWS])
    close(s, torch.stack([x.sum(0) for x in ROWS]))
    assert n.tolist() == LENGTHS
    assert name == "name"


def test_a_result_goes_with_the_argument_it_comes_of():
    """Torch combines two nested tensors where these share one tensor of offsets."""
    whole = nested(ROWS)
    found = vmap(torch.sin)(whole)
    assert found.layout is torch.jagged
    assert found.shape == whole.shape
    for mine, x in zip((whole * found).unbind(), ROWS, strict=True):
        close(mine, x * x.sin())
    assert vmap(lambda x: x.sum(-1))(whole).shape == whole.shape[:2]


def test_lengths_that_are_equal_give_a_stack_unless_told():
    whole = nested([ROWS[0], ROWS[3]])
    close(vmap(torch.sin)(whole), torch.stack([ROWS[0].sin(), ROWS[3].sin()]))
    found = vmap(torch.sin, ragged=True)(whole)
    assert found.is_nested
    assert found.shape == whole.shape


def test_jagged_in_another_dim():
    whole = nested(ROWS).transpose(1, 2)
    is_loop(vmap(torch.cos)(whole), [x.T.cos() for x in ROWS])


def test_second_derivatives_with_respect_to_the_whole():
    def total(whole):
        return vmap(lambda x: x.sin().prod() * x.sum())(whole).sum()

    def slope(whole):
        return grad(total)(whole).values().square().sum()

    found = grad(slope)(nested(ROWS))
    one = lambda x: x.sin().prod() * x.sum()  # noqa: E731
    for mine, x in zip(found.unbind(), ROWS, strict=True):
        close(mine, grad(lambda x: grad(one)(x).square().sum())(x))


def test_components_that_are_a_part_of_their_memory():
    whole = torch.nested.narrow(
        torch.stack([W, W.cos(), W.sin()]),
        1,
        torch.tensor([0, 1, 2]),
        torch.tensor([3, 2, 2]),
        layout=torch.jagged,
    )
    is_loop(vmap(torch.exp)(whole), [x.exp() for x in whole.unbind()])


def test_examples_are_called_together_where_they_agree_in_length():
    calls = []

    def f(x):
        calls.append(x.shape[0])
        return x.sum()

    vmap(f)(nested(ROWS))
    assert sorted(calls) == [1, 2, 3, 4]


def test_the_first_example_to_fail_is_the_loops():
    def f(x):
        if x.shape[0] in (1, 4):
            raise ValueError(f"length {x.shape[0]}")
        return x

    with pytest.raises(ValueError, match="length 1") as caught:
        vmap(f)(nested(ROWS))
    assert any("example 1" in note for note in caught.value.__notes__)


def test_writes_are_the_loops():
    counter = torch.zeros((), dtype=D)
    rows = [x.clone() for x in ROWS]
    whole = nested(rows)

    def f(x):
        x.mul_(2)
        counter.add_(x.sum())
        return x[0]

    want = [f(x) for x in rows]
    total = counter.clone()
    counter.zero_()
    is_loop(vmap(f)(whole), want)
    close(counter, total)
    for mine, its in zip(whole.unbind(), rows, strict=True):
        close(mine, its)


@pytest.mark.parametrize("randomness", ["same", "different", "key"])
def test_random_numbers(randomness):
    key = forall.random.key(4)
    flag = key if randomness == "key" else randomness
    f = lambda x: x * 0 + torch.rand((), dtype=D)  # noqa: E731
    torch.manual_seed(0)
    drawn = [y.flatten()[0].item() for y in vmap(f, randomness=flag)(nested(ROWS)).unbind()]
    assert len(set(drawn)) == (1 if randomness == "same" else len(ROWS))
    if randomness == "key":
        alone = []
        for i, x in enumerate(ROWS):
            with forall.random.scope(key, i):
                alone.append(f(x).flatten()[0].item())
        assert drawn == alone


def test_inside_other_transforms():
    f = lambda w, x: (x @ w).sin().sum()  # noqa: E731
    whole = nested(ROWS)

    def g(w):
        return vmap(f, in_dims=(None, 0))(w, whole)

    def loop(w):
        return torch.stack([f(w, x) for x in ROWS])

    ws = torch.stack([W, W.cos()])
    close(vmap(g)(ws), torch.stack([loop(w) for w in ws]))
    close(jacrev(g)(W), jacrev(loop)(W))
    close(jacfwd(g)(W), jacfwd(loop)(W))
    close(jvp(g, (W,), (W,)), jvp(loop, (W,), (W,)))
    close(vjp(g, W)[1](SCALES), vjp(loop, W)[1](SCALES))
    close(
        vmap(grad(lambda w: g(w).square().sum()))(ws),
        vmap(grad(lambda w: loop(w).square().sum()))(ws),
    )
    value = grad_and_value(lambda w: g(w).sum())(W)
    close(value, grad_and_value(lambda w: loop(w).sum())(W))


def test_recorded(monkeypatch):
    f = vmap(lambda x: x.sin().sum(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forall.PerformanceWarning)  # jit: runs as it is
        jitted = jit(f)
        for rows in (ROWS, [*reversed(ROWS)]):
            want = torch.stack([x.sin().sum(0) for x in rows])
            for _ in range(2):
                close(jitted(nested(rows)), want)
    monkeypatch.setattr(forall.config, "patience", 0)
    for rows in (ROWS, [*reversed(ROWS)], ROWS[:2]):
        for _ in range(3):
            close(f(nested(rows)), torch.stack([x.sin().sum(0) for x in rows]))


def test_explained():
    report = forall.explain(vmap(running))(nested(ROWS))
    assert "running" in str(report)


@layouts
def test_other_dims_are_refused(layout):
    with refused(
        ValueError,
        f"""
        vmap(sin, in_dims=1): the examples of a nested tensor are its components, along dim 0.
            args[0]   nested float64, {str(layout)[6:]}   in_dims 1
        Give it in_dims=0, or None to share it between examples.
        """,
    ):
        vmap(torch.sin, in_dims=1)(nested(ROWS, layout))


def test_sizes_that_differ():
    with refused(
        ValueError,
        """
        vmap(mul, in_dims=0): the mapped axes differ in size.
            args[0]   nested float64, jagged   in_dims 0   size 5
            args[1]   float64[3]               in_dims 0   size 3
        All must have one size. To share an argument between examples, give it in_dims=None.
        """,
    ):
        vmap(torch.mul)(nested(ROWS), SCALES[:3])


def test_results_of_several_shapes_elsewhere():
    with refused(
        ValueError,
        """
        vmap(sin, out_dims=1): results of several shapes leave as a nested tensor, examples first.
            out_dims    1
            example 0   [3, 4]
            example 1   [1, 4]
        Give out_dims=0 (its default), or return the same shape for every example.
        """,
    ):
        vmap(torch.sin, out_dims=1)(nested(ROWS))


def test_results_of_several_shapes_inside_another_transform():
    whole = nested(ROWS)
    with pytest.raises(NotImplementedError, match="take ordinary tensors alone"):
        vmap(lambda w: vmap(lambda x: x @ w)(whole).sum())(torch.stack([W, W]))


def test_no_components():
    with pytest.raises(ValueError, match="no components"):
        vmap(torch.sin)(torch.nested.nested_tensor([], layout=torch.strided))
