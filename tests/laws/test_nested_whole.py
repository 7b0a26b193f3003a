"""Nested tensors that a function takes whole: layer norm, linear, attention of all components.

The truth is the same function of each component by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as again

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap

D = torch.float64
generator = make_generator(11)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested tensors:UserWarning", "ignore:.*has no rule:forall.PerformanceWarning"
)
ROWS = [torch.randn(n, 4, dtype=D, generator=generator) for n in (3, 1, 4)]
W = torch.randn(4, 4, dtype=D, generator=generator)
V = torch.randn(4, 4, dtype=D, generator=generator)
WS = torch.stack([W, W.cos(), W.sin()])

close = torch.testing.assert_close


def nested(rows: list[Tensor] = ROWS) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def attend(x: Tensor, w: Tensor) -> Tensor:
    """Two heads; the rows of a component are its second dim from the end, before they are split."""
    q = F.linear(x, w).unflatten(-1, (2, 2)).transpose(-3, -2)
    k = x.unflatten(-1, (2, 2)).transpose(-3, -2)
    return F.scaled_dot_product_attention(q, k, k).transpose(-3, -2).flatten(-2)


# Of a whole and of a component alike.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "norm of linear": lambda x, w: F.layer_norm(F.linear(x, w), (4,)),
    "attention": attend,
    "scaled": lambda x, w: (x * w[0, 0]).sin() + x,
    "by columns": lambda x, w: x * w[2],
    "activations": lambda x, w: F.gelu(F.linear(x, w)).sigmoid() * x.tanh(),
    "two layers": lambda x, w: F.linear(F.relu(F.linear(x, w)), w.T),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)
# torch has no forward mode for what its attention is made of
PUSHED = pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
# torch has no second backward of linear on a nested tensor
TWICE = [name for name in FUNCTIONS if name in ("norm", "scaled", "by columns")]


def of_whole(name: str, whole: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda w: FUNCTIONS[name](whole, w).values()


def of_rows(name: str, rows: list[Tensor] = ROWS) -> Callable[[Tensor], Tensor]:
    return lambda w: torch.cat([FUNCTIONS[name](x, w) for x in rows])


@pytest.mark.sweep(3)
@functions
def test_mapped_weights_of_a_captured_whole(name):
    f, g = of_whole(name, nested()), of_rows(name)
    close(vmap(f)(WS), torch.stack([g(w) for w in WS]))
    close(vmap(f, in_dims=2)(WS.movedim(0, 2)), torch.stack([g(w) for w in WS]))
    twice = vmap(vmap(f))(torch.stack([WS, WS.exp()]))
    close(twice, torch.stack([torch.stack([g(w) for w in ws]) for ws in (WS, WS.exp())]))


@pytest.mark.sweep(3)
@functions
def test_gradients(name):
    f, g = of_whole(name, nested()), of_rows(name)
    total_f, total_g = (lambda w: f(w).sin().sum()), (lambda w: g(w).sin().sum())
    close(grad(total_f)(W), grad(total_g)(W))
    close(vjp(f, W)[1](f(V)), vjp(g, W)[1](g(V)))
    close(vmap(grad(total_f))(WS), torch.stack([grad(total_g)(w) for w in WS]))
    close(grad(lambda w: vmap(total_f)(w).sum())(WS), torch.stack([grad(total_g)(w) for w in WS]))
    slopes = vmap(lambda w: jvp(f, (w,), (V,))[1])(WS)
    close(slopes, torch.stack([jvp(g, (w,), (V,))[1] for w in WS]))


@pytest.mark.sweep(3)
@PUSHED
def test_first_derivatives(name):
    f, g = of_whole(name, nested()), of_rows(name)
    close(jvp(f, (W,), (V,)), jvp(g, (W,), (V,)))
    close(linearize(f, W)[1](V), jvp(g, (W,), (V,))[1])
    close(jacrev(f)(W), jacrev(g)(W))
    close(jacfwd(f)(W), jacrev(g)(W))


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name):
    f, g = of_whole(name, nested()), of_rows(name)
    total_f, total_g = (lambda w: f(w).sin().sum()), (lambda w: g(w).sin().sum())
    close(hessian(total_f)(W), hessian(total_g)(W))
    close(jvp(grad(total_f), (W,), (V,)), jvp(grad(total_g), (W,), (V,)))
    close(
        grad(lambda w: jvp(total_f, (w,), (V,))[1])(W),
        grad(lambda w: jvp(total_g, (w,), (V,))[1])(W),
    )


@pytest.mark.sweep(3)
@functions
def test_the_whole_has_history_outside(name):
    """Captured, in every example or under forward mode, with a derivative taken outside."""
    rows = [x.clone().requires_grad_() for x in ROWS]
    w = WS.clone().requires_grad_()

    def gradients(y):
        return torch.autograd.grad(y.square().sum(), [*rows, w])

    runs: list[Callable[[Any, Any], Tensor]] = [
        lambda f, w: vmap(f)(w),
        lambda f, w: vmap(lambda w: f(w).sum())(w),
        lambda f, w: vmap(vmap(f))(w.expand(2, 3, 4, 4)),
        lambda f, w: vmap(lambda w: vjp(f, w)[0])(w),
    ]
    if name != "attention":
        runs += [
            lambda f, w: jvp(f, (w[0],), (w[1],))[0],
            lambda f, w: jacfwd(lambda w: f(w).sin())(w[0]),
        ]
    for run in runs:
        whole = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        found = gradients(run(of_whole(name, whole), w))
        for mine, its in zip(found, gradients(run(of_rows(name, rows), w)), strict=True):
            close(mine, its)
    whole = nested().requires_grad_()
    (found,) = torch.autograd.grad(vmap(of_whole(name, whole))(WS).square().sum(), whole)
    want = torch.autograd.grad(vmap(of_rows(name, rows))(WS).square().sum(), rows)
    close(found.values(), torch.cat(want))


def test_attention_has_no_forward_mode():
    """Outside of `vmap`, where it goes component by component."""
    with pytest.raises(RuntimeError, match=r"must be contiguous|of their components"):
        jvp(of_whole("attention", nested()), (W,), (V,))


@pytest.mark.sweep(3)
@PUSHED
def test_derivatives_with_respect_to_the_whole(name):
    f = FUNCTIONS[name]
    whole, along = nested(), nested([x.cos() for x in ROWS])
    along = torch.nested.nested_tensor_from_jagged(along.values(), whole.offsets())

    def total(x):
        return f(x, W).sin()

    found = grad(lambda x: total(x).values().sum())(whole)
    assert found.shape == whole.shape
    close(found.values(), torch.cat([grad(lambda x: total(x).sum())(x) for x in ROWS]))
    _, tangent = jvp(lambda x: total(x).values(), (whole,), (along,))
    close(tangent, torch.cat([jvp(total, (x,), (x.cos(),))[1] for x in ROWS]))
    value, tangent = jvp(total, (whole,), (along,))
    assert value.shape == tangent.shape == whole.shape
    close(tangent.values(), torch.cat([jvp(total, (x,), (x.cos(),))[1] for x in ROWS]))
    y, pull = vjp(total, whole)
    close(pull(y)[0].values(), torch.cat([vjp(total, x)[1](total(x))[0] for x in ROWS]))


def test_made_inside():
    whole = nested()

    def f(w):
        inside = torch.nested.nested_tensor_from_jagged(whole.values() @ w, whole.offsets())
        return F.layer_norm(inside * whole, (4,)).values()

    def g(w):
        return torch.cat([F.layer_norm((x @ w) * x, (4,)) for x in ROWS])

    close(vmap(f)(WS), torch.stack([g(w) for w in WS]))
    close(jacfwd(f)(W), jacrev(g)(W))
    close(jacrev(f)(W), jacrev(g)(W))
    close(hessian(lambda w: f(w).sin().sum())(W), hessian(lambda w: g(w).sin().sum())(W))
    rows = vmap(lambda w: [x.sum() for x in (whole * w[0]).unbind()])(WS)
    close(
        torch.stack(rows, 1),
        torch.stack([torch.stack([(x * w[0]).sum() for x in ROWS]) for w in WS]),
    )


def test_a_module():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    ).double()
    params = {k: p.detach() for k, p in net.named_parameters()}
    stacks = {k: torch.stack([p, p.cos()]) for k, p in params.items()}
    whole = nested()

    def loss(params, x):
        y = forall.functional_call(net, params, (x,))
        return (y.values() if y.is_nested else y).square().sum()

    def loop(params):
        return sum(loss(params, x) for x in ROWS)

    for k, g in grad(loss)(params, whole).items():
        close(g, grad(loop)(params)[k])
    found = vmap(grad(loss), in_dims=(0, None))(stacks, whole)
    want = vmap(grad(loop))(stacks)
    for k, g in found.items():
        close(g, want[k])


@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
def test_recorded(monkeypatch):
    f, g = of_whole("norm of linear", nested()), of_rows("norm of linear")
    for transform in (lambda f: f, grad, vmap):
        own = transform((lambda w: f(w).sum()) if transform is grad else f)
        its = transform((lambda w: g(w).sum()) if transform is grad else g)
        recorded = jit(own)
        for w in (WS, 2 * WS, -WS) if transform is vmap else WS:
            close(recorded(w), its(w))
    monkeypatch.setattr(forall.config, "patience", 0)
    mapped, rows = vmap(f), vmap(g)
    for n in range(5):
        close(mapped(WS * n), rows(WS * n))


def test_a_result_that_differs_between_the_examples():
    whole = nested()
    with pytest.raises(NotImplementedError, match=r"Return its rows \(x\.values\(\)\)"):
        vmap(lambda w: F.linear(whole, w))(WS)


# --- programs in which one thing meets another: of the whole, and of its rows as one tensor -------

N, R = nested(), torch.cat(ROWS)


def rows_of(x: Tensor) -> Tensor:
    return x.values() if x.is_nested else x


def twice_cut(x: Tensor, w: Tensor) -> Tensor:
    return (x * w[0]).detach() * w[1] + x * w[2]


def without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * w[0]
    return y * w[1]


def kept(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd inside": lambda x: vmap(
        lambda w: rows_of(torch.autograd.grad(rows_of((x * w[0]).sin()).sum(), x)[0])
    )(WS),
    "diverging": lambda x: vmap(
        lambda w: rows_of(x * w[0]).sum() if w[0, 0] > 0 else rows_of(x + w[1]).prod()
    )(WS),
    "written inside": lambda x: vmap(lambda w: rows_of((x + w[0]).mul_(w[1])))(WS),
    "jvp of vmap": lambda x: jvp(
        lambda w: vmap(lambda w: rows_of((x * w[0]).sin()))(w), (WS,), (WS,)
    )[1],
    "detach in jvp": lambda x: jvp(lambda w: rows_of(twice_cut(x, w)), (W,), (V,))[1],
    "no_grad in jvp": lambda x: jvp(lambda w: rows_of(without_grad(x, w)), (W,), (V,))[1],
    "where": lambda x: vmap(lambda w: rows_of(torch.where(x > 0, x * w[0], x)))(WS),
    "checkpoint": lambda x: vmap(
        grad(lambda w: again(lambda w: rows_of((x * w[0]).sin()).sum(), w, use_reentrant=False))
    )(WS),
    "chunks": lambda x: vmap(lambda w: rows_of(x * w[0]), chunk_size=2)(WS),
    "reverse over forward": lambda x: jacrev(
        lambda w: jvp(lambda w: rows_of((x * w[0]).sin()), (w,), (V,))[1]
    )(W),
    "gradient of jvp": lambda x: rows_of(
        grad(lambda x: jvp(lambda w: rows_of((x * w[0]).sin()), (W,), (V,))[1].sum())(x)
    ),
    "gradient of jacfwd": lambda x: rows_of(
        grad(lambda x: jacfwd(lambda w: rows_of((x * w[0]).sin()))(W).square().sum())(x)
    ),
    "gradient in vmap": lambda x: vmap(
        lambda w: rows_of(grad(lambda x: rows_of((x * w[0]).sin()).sum())(x))
    )(WS),
    "jvp of a gradient": lambda x: jvp(
        lambda w: rows_of(grad(lambda x: rows_of((x * w[0]).sin()).sum())(x)), (W,), (V,)
    )[1],
    "hessian times vector": lambda x: rows_of(
        jvp(grad(lambda x: rows_of(x.sin() * x).sum()), (x,), (x,))[1]
    ),
    "jvp twice": lambda x: jvp(
        lambda w: jvp(lambda w: rows_of((x * w[0]).sin()), (w,), (V,))[1], (W,), (V,)
    )[1],
    "linearized": lambda x: linearize(lambda w: rows_of((x * w[0]).sin()), W)[1](V),
}


# These differentiate in the whole themselves, or have no history (no_grad); what a checkpoint saves
# of a captured whole that has history is counted otherwise when it recomputes, which torch refuses.
INSIDE = {name for name in PROGRAMS if name.startswith(("gradient", "hessian", "jvp of a"))}
INSIDE |= {"autograd inside", "no_grad in jvp", "checkpoint"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    f = PROGRAMS[name]
    needs_grad = name == "autograd inside"
    found, want = (f(kept(x) if needs_grad else x) for x in (N, R))
    close(found, want)
    assert want.abs().max() > 1e-3
    if name in INSIDE:
        return
    whole, rows = kept(N), kept(R)
    close(
        torch.autograd.grad(f(whole).square().sum(), whole)[0].values(),
        torch.autograd.grad(f(rows).square().sum(), rows)[0],
    )


def test_a_primal_of_linearize():
    with pytest.raises(NotImplementedError, match=r"Take its rows \(x\.values\(\)\)"):
        linearize(lambda x: x.sin().values(), N)
    with pytest.raises(NotImplementedError, match=r"Take their rows \(x\.values\(\)\)"):
        jacrev(lambda x: x.sin().values())(N)


@pytest.mark.filterwarnings("ignore:jit.*not recorded")
@pytest.mark.sweep(3)
@PUSHED
def test_under_jit_it_is_the_same(name):
    f, g = of_whole(name, nested()), of_rows(name)
    total_f, total_g = (lambda w: f(w).sin().sum()), (lambda w: g(w).sin().sum())

    def derive(total):
        return (
            grad(lambda w: vmap(total)(w).sum()),
            vmap(grad(total)),
            lambda ws: jvp(grad(total), (ws[0],), (V,))[1],
        )

    for ours, by_rows in zip(derive(total_f), derive(total_g), strict=True):
        recorded = jit(ours)
        for _ in range(2):
            close(recorded(WS), by_rows(WS))
