"""Recurrent layers and cells of accelerators: cuDNN's layers, and cells of one kernel.

The CPU has no such kernels, so it is given some here: each is torch's own layer or cell, in torch's
own operators. All else is as on an accelerator: what autograd records, and which backward it runs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

import forall
from forall._compat import wrapper_tensor
from forall._vmap.rules import rnn_accelerators
from oracle import difference, loop

aten = torch.ops.aten
F64 = torch.float64
B, T, N, I, H = 3, 3, 2, 3, 4  # noqa: E741 - as in the formulas
CALLS = [torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru]  # as cuDNN numbers them
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

KINDS = {
    "lstm": (nn.LSTM, {}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
    "lstm projected, two layers": (nn.LSTM, {"proj_size": 2, "num_layers": 2}),
    "lstm both ways, two layers": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru both ways, batch first": (nn.GRU, {"bidirectional": True, "batch_first": True}),
    "rnn of two layers": (nn.RNN, {"num_layers": 2}),
    "relu both ways": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}
KIND = pytest.mark.parametrize("kind", KINDS)
CELL = pytest.mark.parametrize("cell", ["lstm", "gru"])


def run_layers(
    x, params, stride, _, hx, cx, mode, hidden, projected, layers, batch_first, p, train, both, ns
):  # fmt: skip
    states = hx if cx is None else (hx, cx)
    how = (stride > 3, layers, 0.0, False, both)
    if ns:
        return CALLS[mode](x, torch.tensor(ns), states, params, *how)
    return CALLS[mode](x, states, params, *how, batch_first)


def cudnn_rnn(*args):
    out, *states = run_layers(*args[:-1])
    h, c = states if len(states) == 2 else (*states, torch.empty(0))
    return out, h, c, torch.empty(0, dtype=torch.uint8), torch.empty(0)


def with_autograd(f):
    """Run a kernel in a thread of its own: autograd is switched off where it is called."""

    def run(*args):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(f, *args).result()

    return run


@with_autograd
def cudnn_rnn_backward(x, params, stride, buffer, hx, cx, out, gy, gh, gc, *rest):
    *words, _, _, _ = rest
    with torch.enable_grad():
        own = [t.detach().requires_grad_() for t in (x, *params, hx)]
        cell = [] if cx is None else [cx.detach().requires_grad_()]
        given = (own[0], own[1:-1], stride, buffer, own[-1], *(cell or [None]), *words)
        outs = [(y, g) for y, g in zip(run_layers(*given), (gy, gh, gc)) if g is not None]  # noqa: B905
        found = torch.autograd.grad(
            [y for y, _ in outs], own + cell, [g for _, g in outs], allow_unused=True
        )
    found = [
        torch.zeros_like(t) if g is None else g for g, t in zip(found, own + cell, strict=True)
    ]
    gx, *gw, gh = found[: len(own)]
    return gx, gh, found[-1] if cell else None, gw


def fused_lstm_cell(x, h, c, b=None, d=None):
    gates = x + h if b is None else x + h + b + d
    i, f, g, o = gates.chunk(4, 1)
    kept = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, kept


def fused_lstm_cell_backward(gh, gc, before, c, kept, has_bias):
    i, f, g, o = kept.chunk(4, 1)
    gh = torch.zeros_like(c) if gh is None else gh
    gc = (0 if gc is None else gc) + gh * o / c.cosh().square()
    gates = [gc * g * i * (1 - i), gc * before * f * (1 - f), gc * i * (1 - g**2)]
    gates = torch.cat([*gates, gh * c.tanh() * o * (1 - o)], 1)
    return gates, gc * f, gates.sum(0) if has_bias else None


def fused_gru_cell(x, h, hidden, b=None, d=None):
    x, h = (x, h) if b is None else (x + b, h + d)
    r, z = (x + h)[:, : 2 * H].sigmoid().chunk(2, 1)
    hn = h[:, 2 * H :]
    n = (x[:, 2 * H :] + r * hn).tanh()
    return (1 - z) * n + z * hidden, torch.cat([r, z, n, hidden, hn], 1)


@with_autograd
def fused_gru_cell_backward(g, kept, has_bias):
    with torch.enable_grad():
        r, z, n, hidden, hn = kept.chunk(5, 1)
        x = torch.cat([r.logit(), z.logit(), n.atanh() - r * hn], 1).detach().requires_grad_()
        h = torch.cat([r * 0, z * 0, hn], 1).detach().requires_grad_()
        hidden = hidden.detach().requires_grad_()
        gx, gh, by_state = torch.autograd.grad(fused_gru_cell(x, h, hidden)[0], (x, h, hidden), g)
    return gx, gh, by_state, *((gx.sum(0), gh.sum(0)) if has_bias else (None, None))


@pytest.fixture(autouse=True)
def calls():
    """Give the CPU the kernels; which of them were called, in order."""
    called: list[str] = []

    def noted(name, f):
        def kernel(*args):
            called.append(name)
            return f(*args)

        return kernel

    library = torch.library.Library("aten", "IMPL")
    for name, f in {
        "_cudnn_rnn": cudnn_rnn,
        "_cudnn_rnn_backward": cudnn_rnn_backward,
        "_thnn_fused_lstm_cell": fused_lstm_cell,
        "_thnn_fused_lstm_cell_backward_impl": fused_lstm_cell_backward,
        "_thnn_fused_gru_cell": fused_gru_cell,
        "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
    }.items():
        library.impl(name, noted(name, f), "CPU")
    yield called
    library._destroy()


def layer(kind):
    make, how = KINDS[kind]
    torch.manual_seed(0)
    module = make(I, H, **how).to(F64)
    params = [p.detach().clone() for p in module._flat_weights]
    directions = 2 if module.bidirectional else 1
    front = (module.num_layers * directions, N)
    h = torch.randn(*front, module.proj_size or H, dtype=F64)
    c = torch.randn(*front, H, dtype=F64) if make is nn.LSTM else None
    sizes = (N, T) if module.batch_first else (T, N)
    x = torch.randn(B, *sizes, I, dtype=F64)
    mode = {nn.LSTM: 2, nn.GRU: 3}.get(make, int(getattr(module, "nonlinearity", "") == "tanh"))
    return module, mode, params, x, h, c


def by_kernel(module, mode, params, c, sizes=()):
    """The layers of a module as cuDNN's operator, a function of input and state."""
    each = len(params) // (module.num_layers * (2 if module.bidirectional else 1))

    def call(x, h, params=params):
        out, h, cell, *_ = aten._cudnn_rnn(
            x, [*params], each, None, h, c, mode, H, module.proj_size, module.num_layers,
            module.batch_first, 0.0, False, module.bidirectional, sizes, None,
        )  # fmt: skip
        return (out, h) if c is None else (out, h, cell)

    return call


def summed(outs):
    return sum(t.sin().sum() for t in tree_leaves(outs))


@KIND
def test_layers_and_their_gradients_are_the_loop(kind):
    module, mode, params, xs, h, c = layer(kind)
    f = by_kernel(module, mode, params, c)
    assert difference(forall.vmap(f, (0, None))(xs, h), loop(f, (0, None))(xs, h)) is None
    every = [torch.stack([p * (1 + i / 4) for i in range(B)]) for p in params]

    def value(params, x):
        return summed(f(x, h, params))

    def truth(params, x):
        own = [p.detach().clone().requires_grad_() for p in params]
        return list(torch.autograd.grad(value(own, x), own))

    found = forall.vmap(forall.grad(value), (None, 0))(params, xs)
    assert difference(found, loop(truth, ([None] * len(params), 0))(params, xs)) is None
    assert difference(forall.vmap(forall.grad(value))(every, xs), loop(truth)(every, xs)) is None


@pytest.mark.counted
@KIND
def test_rows_of_a_jacobian_are_no_calls_of_the_kernel(kind, calls):
    module, mode, params, (x, *_), h, c = layer(kind)
    f = by_kernel(module, mode, params, c)
    wanted = torch.autograd.functional.jacobian(lambda x: f(x, h)[0], x)
    calls.clear()
    assert difference(forall.jacrev(lambda x: f(x, h)[0])(x), wanted) is None
    assert calls == ["_cudnn_rnn"]
    assert difference(forall.jacfwd(lambda x: f(x, h)[0])(x), wanted) is None
    assert "_cudnn_rnn_backward" not in calls


@KIND
def test_second_derivatives_are_there(kind):
    """CuDNN has none; the wanted ones are those of torch's own layer."""
    module, mode, params, (x, *_), h, c = layer(kind)
    module.requires_grad_(False)
    x = x[:, :2] if module.batch_first else x[:2, :1]
    h = h if module.batch_first else h[:, :1]
    cell = None if c is None else c[:, :1]
    f = by_kernel(module, mode, params, cell)

    def value(x):
        return summed(f(x, h))

    def plain(x):
        out, state = module(x, h if c is None else (h, cell))
        return summed((out, state))

    wanted = torch.autograd.functional.hessian(plain, x)
    assert difference(forall.hessian(value)(x), wanted) is None
    assert difference(forall.jacrev(forall.grad(value))(x), wanted) is None
    many = forall.vmap(forall.hessian(value))(torch.stack([x, x.cos()]))
    assert difference(many[0], wanted) is None


@pytest.mark.parametrize("kind", ["lstm both ways, two layers", "rnn of two layers"])
def test_packed_sequences(kind):
    module, mode, params, xs, h, c = layer(kind)
    sizes = pack_padded_sequence(xs[0], [T, 2]).batch_sizes.tolist()
    f = by_kernel(module, mode, params, c, sizes)
    rows = torch.randn(B, sum(sizes), I, dtype=F64)
    g = lambda x: summed(f(x, h))  # noqa: E731
    assert difference(forall.vmap(f, (0, None))(rows, h), loop(f, (0, None))(rows, h)) is None
    wanted = torch.autograd.functional.jacobian(g, rows[1])
    assert difference(forall.vmap(forall.grad(g))(rows)[1], wanted) is None
    assert (
        difference(
            forall.jacrev(lambda x: f(x, h)[0])(rows[0]),
            forall.jacfwd(lambda x: f(x, h)[0])(rows[0]),
        )
        is None
    )


def gates(cell, *front):
    torch.manual_seed(1)
    wide = (4 if cell == "lstm" else 3) * H
    x, h = (torch.randn(*front, N, wide, dtype=F64) for _ in range(2))
    b, d = (torch.randn(wide, dtype=F64) for _ in range(2))
    return x, h, torch.randn(*front, N, H, dtype=F64), b, d


def fused(cell, *args):
    call = aten._thnn_fused_lstm_cell if cell == "lstm" else aten._thnn_fused_gru_cell
    return call(*args)[: 2 if cell == "lstm" else 1]


@CELL
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no bias"])
def test_cells_and_their_derivatives_are_the_loop(cell, biases, calls):
    x, h, s, *rest = gates(cell, B)
    rest = rest if biases else []
    f = lambda x, h, s: fused(cell, x, h, s, *rest)  # noqa: E731
    assert difference(forall.vmap(f)(x, h, s), loop(f)(x, h, s)) is None
    value = lambda *a: summed(fused(cell, *a))  # noqa: E731
    n = 3 + len(rest)
    grad = forall.grad(value, tuple(range(n)))
    dims = (0, 0, 0, *[None] * len(rest))

    def truth(*args):
        own = [t.detach().clone().requires_grad_() for t in args]
        return tuple(torch.autograd.grad(value(*own), own))

    calls.clear()
    found = forall.vmap(grad, dims)(x, h, s, *rest)
    assert not calls
    assert difference(found, loop(truth, dims)(x, h, s, *rest)) is None


@CELL
def test_second_derivatives_of_cells(cell):
    x, h, s, b, d = gates(cell)
    x, h, s = (t[:1] for t in (x, h, s))
    plain = fused_lstm_cell if cell == "lstm" else fused_gru_cell
    value = lambda x: summed(fused(cell, x, h, s, b, d))  # noqa: E731
    exact = lambda x: summed(plain(x, h, s, b, d)[: 2 if cell == "lstm" else 1])  # noqa: E731
    wanted = torch.autograd.functional.hessian(exact, x)
    assert difference(forall.hessian(value)(x), wanted) is None
    assert difference(forall.jacrev(forall.grad(value))(x), wanted) is None
    assert difference(forall.jacfwd(forall.grad(value))(x), wanted) is None
    j = forall.jacrev(lambda x: fused(cell, x, h, s, b, d)[0])(x)
    assert (
        difference(j, torch.autograd.functional.jacobian(lambda x: plain(x, h, s, b, d)[0], x))
        is None
    )


@KIND
@pytest.mark.parametrize("mapped", [False, True], ids=["shared weights", "weights of each"])
def test_calls_of_modules_are_ordinary_operators(kind, mapped, monkeypatch, calls):
    """As on an accelerator, where a call with a derivative at stake would be cuDNN's."""
    monkeypatch.setattr(rnn_accelerators, "has_kernel", lambda x: True)
    module, _, _, xs, _, _ = layer(kind)
    params = dict(module.named_parameters())
    params = {k: p.detach().clone() for k, p in params.items()}
    if mapped:
        params = {k: torch.stack([p * (1 + i / 4) for i in range(B)]) for k, p in params.items()}
    dim = 0 if mapped else None

    def value(params, x):
        return summed(torch.func.functional_call(module, params, (x,)))

    def truth(params, x):
        own = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
        return dict(zip(own, torch.autograd.grad(value(own, x), list(own.values())), strict=True))

    found = forall.vmap(forall.grad(value), (dim, 0))(params, xs)
    assert difference(found, loop(truth, (dict.fromkeys(params, dim), 0))(params, xs)) is None
    assert not calls


def test_dropout_between_layers_is_drawn_as_randomness_says(monkeypatch):
    monkeypatch.setattr(rnn_accelerators, "has_kernel", lambda x: True)
    torch.manual_seed(0)
    module = nn.LSTM(I, 64, num_layers=2, dropout=0.5)
    xs = torch.randn(T, N, I).expand(B, T, N, I)
    call = lambda x: module(x)[0]  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness='error'"):
        forall.vmap(call)(xs)
    apart = forall.vmap(call, randomness="different")(xs)
    assert not torch.equal(apart[0], apart[1])
    alike = forall.vmap(call, randomness="same")(xs)
    assert torch.equal(alike[0], alike[1])


def test_dropout_that_cudnn_has_drawn_has_no_second_derivative():
    _, mode, params, (x, *_), h, c = layer("lstm both ways, two layers")

    def value(x):
        return aten._cudnn_rnn(
            x, params, 4, None, h, c, mode, H, 0, 2, False, 0.5, True, True, [], None
        )[0].sum()

    with pytest.raises(NotImplementedError, match=r"cudnn\.flags\(enabled=False\)"):
        forall.hessian(value)(x)


def test_weights_that_have_no_memory_are_not_moved():
    moved, layer = [], nn.LSTM(I, H)
    flatten = wrapper_tensor._skip_wrapped_weights(moved.append)
    flatten(layer)
    assert moved == [layer]

    def f(x):
        layer._flat_weights[0] = x
        flatten(layer)
        return x

    forall.vmap(f)(torch.randn(2, 4 * H, I))
    assert moved == [layer]
