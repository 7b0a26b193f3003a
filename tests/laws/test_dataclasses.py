"""Dataclasses that torch's trees know: arguments, results, trees of in_dims and out_dims."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

import forall
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap
from forall._core import escaped_values
from oracle import difference

D = torch.float64
close = torch.testing.assert_close
numbers = torch.linspace(-1, 2, 24, dtype=D)


@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: Any = "layer"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Net:
    first: Any
    rest: Any


@dataclasses.dataclass
class Stranger:
    x: Any


for kind in (Layer, Frozen, Net):
    torch.export.register_dataclass(kind)

LAYER = Layer(numbers[:6].reshape(2, 3), numbers[:2].exp())
LAYERS = Layer(numbers.reshape(4, 2, 3), numbers[:8].reshape(4, 2).exp())
XS = numbers[:12].reshape(4, 3).cos()


def at(layers: Layer, i: int) -> Layer:
    return Layer(layers.w[i], layers.b[i], layers.name)


def value(layer: Layer, x: Tensor) -> Tensor:
    if layer.name != "layer":
        raise ValueError(layer.name)
    return (layer.w @ x + layer.b).sin().sum()


def truth(layer: Layer, x: Tensor) -> Layer:
    w, b = (t.detach().clone().requires_grad_() for t in (layer.w, layer.b))
    return Layer(*torch.autograd.grad(value(Layer(w, b), x), (w, b)), None)


def alike(found: Layer, want: Layer) -> None:
    assert type(found) is type(want)
    assert found.name == want.name
    close((found.w, found.b), (want.w, want.b))


def test_gradients():
    alike(grad(value)(LAYER, XS[0]), truth(LAYER, XS[0]))
    found = vmap(grad(value), in_dims=(None, 0))(LAYER, XS)
    want = [truth(LAYER, x) for x in XS]
    close((found.w, found.b), tuple(torch.stack([getattr(g, n) for g in want]) for n in "wb"))


DIMS = [
    (Layer(0, 0, None), LAYERS),
    (Layer(0, None, None), Layer(LAYERS.w, LAYER.b)),
    (Layer(-1, 1, None), Layer(LAYERS.w.movedim(0, -1), LAYERS.b.T)),
]


@pytest.mark.parametrize(("dims", "layers"), DIMS, ids=["all", "one", "other dims"])
def test_dims_of_the_fields(dims, layers):
    own = [
        Layer(
            *(
                getattr(layers, n) if d is None else getattr(layers, n).select(d, i)
                for n, d in zip("wb", (dims.w, dims.b), strict=True)
            )
        )
        for i in range(4)
    ]
    want = torch.stack([value(layer, x) for layer, x in zip(own, XS, strict=True)])
    for in_dims in ((dims, 0), {"layer": dims, "x": 0}):
        close(vmap(value, in_dims=in_dims)(layers, XS), want)
    found = vmap(
        lambda net, x: value(net["net"].first, x) + value(net["net"].rest[0], x),
        in_dims=({"net": Net(dims, [dims])}, 0),
    )({"net": Net(layers, [layers])}, XS)
    close(found, 2 * want)
    gradients = vmap(grad(value), in_dims=(dims, 0))(layers, XS)
    wants = [truth(layer, x) for layer, x in zip(own, XS, strict=True)]
    close(gradients.w, torch.stack([g.w for g in wants]))


def test_results():
    def f(x):
        return Layer(x.sin(), x.sum(), "made"), Frozen(x), Net(Frozen(x, x.exp()), [x])

    layer, frozen, net = vmap(f)(XS)
    close((layer.w, layer.b), (XS.sin(), XS.sum(1)))
    assert layer.name == "made"
    close(frozen.x, XS)
    assert frozen.y is None
    close(net.first.y, XS.exp())
    out = vmap(lambda x: f(x)[0], out_dims=Layer(1, 0, None))(XS)
    close((out.w, out.b), (XS.sin().T, XS.sum(1)))
    out = vmap(f, out_dims=(Layer(1, 0, None), 0, Net(Frozen(0, 1), 1)))(XS)
    close((out[0].w, out[2].first.y, out[2].rest[0]), (XS.sin().T, XS.exp().T, XS.T))


def test_results_where_examples_part():
    def f(x):
        return Layer(x, x.sum()) if x.sum() > 0 else Layer(2 * x, x.prod())

    found = vmap(f)(XS)
    want = [f(x) for x in XS]
    close((found.w, found.b), tuple(torch.stack([getattr(g, n) for g in want]) for n in "wb"))


def test_derivatives_of_every_kind():
    def f(p):
        return Frozen((p.x @ XS[0]).sin(), p.y * p.x.sum())

    p = Frozen(LAYER.w, LAYER.b[0])
    flat = torch.cat([p.x.flatten(), p.y[None]])

    def plain(v):
        out = f(Frozen(v[:6].reshape(2, 3), v[6]))
        return torch.cat([out.x, out.y[None]])

    j = torch.autograd.functional.jacobian(plain, flat)
    for verb in (jacrev, jacfwd):
        found = verb(f)(p)
        close(found.x.x.reshape(2, 6), j[:2, :6])
        close(found.y.y, j[2, 6])
    h = torch.autograd.functional.hessian(lambda v: plain(v).sum(), flat)
    found = hessian(lambda p: f(p).x.sum() + f(p).y)(p)
    close(found.x.x.reshape(6, 6), h[:6, :6])
    close(found.x.y.reshape(6), h[:6, 6])
    cot = Frozen(torch.ones(2, dtype=D), torch.ones((), dtype=D))
    (pulled,) = vjp(f, p)[1](cot)
    close(pulled.x.flatten(), j.sum(0)[:6])
    want = j @ flat
    for tangent in (jvp(f, (p,), (p,))[1], linearize(f, p)[1](p)):
        close((tangent.x, tangent.y), (want[:2], want[2]))


def test_recorded_and_in_loops():
    recorded = jit(grad(value))
    for scale in (1.0, 2.0, 3.0):
        layer = Layer(LAYER.w * scale, LAYER.b)
        alike(recorded(layer, XS[0]), truth(layer, XS[0]))
    assert recorded.cache_info().hits == 2
    carry, ys = forall.scan(
        lambda c, x: (Frozen(c.x + x, c.y * 2), c.y),
        Frozen(torch.zeros(3, dtype=D), torch.tensor(1.0)),
        XS,
    )
    close(
        (carry.x, carry.y, ys), (XS.sum(0), torch.tensor(16.0), torch.tensor([1.0, 2.0, 4.0, 8.0]))
    )


def test_dims_that_do_not_fit():
    with pytest.raises(ValueError, match="in_dims does not fit the arguments"):
        vmap(value, in_dims=(Frozen(0, 0), 0))(LAYERS, XS)
    with pytest.raises(ValueError, match="in_dims does not fit the arguments"):
        vmap(value, in_dims=(Layer(0, (0, 0), None), 0))(LAYERS, XS)
    with pytest.raises(ValueError, match="out_dims does not fit the result"):
        vmap(lambda x: Layer(x, x), out_dims=Frozen(0, 0))(XS)


@pytest.mark.parametrize(
    "call",
    [
        lambda: grad(lambda s: s.x.sum())(Stranger(XS)),
        lambda: vmap(lambda s: s.x)(Stranger(XS)),
        lambda: vmap(Stranger)(XS),
    ],
    ids=["differentiated", "mapped", "returned"],
)
def test_one_that_no_tree_knows(call):
    with pytest.raises(ValueError, match=r"torch\.export\.register_dataclass\(Stranger\)"):
        call()
    assert (
        difference(vmap(lambda s, x: s.x[0] * x, in_dims=(None, 0))(Stranger(XS), XS), XS[0] * XS)
        is None
    )


def test_classes_of_attrs():
    attrs = pytest.importorskip("attrs")
    kind = attrs.make_class("Pair", ["x", "y"])
    cure = (
        r"torch\.utils\._pytree\.register_pytree_node\(Pair, "
        r"lambda x: \(\(x\.x, x\.y,\), None\), lambda xs, _: Pair\(\*xs\)\)"
    )
    with pytest.raises(ValueError, match=cure):
        vmap(lambda p: p.x + p.y)(kind(XS, XS))
    with pytest.raises(ValueError, match=cure):
        vmap(lambda x: kind(x, x))(XS)
    register_pytree_node(kind, lambda x: ((x.x, x.y), None), lambda xs, _: kind(*xs))
    found = vmap(lambda p: kind(p.x * p.y, p.x.sum()), in_dims=(kind(0, None),))(kind(XS, XS[0]))
    close((found.x, found.y), (XS * XS[0], XS.sum(1)))
    close(grad(lambda p: (p.x * p.y).sum())(kind(XS, XS.exp())).x, XS.exp())


def test_classes_that_optree_knows():
    optree = pytest.importorskip("optree")

    class Pair:
        def __init__(self, *parts):
            self.parts = parts

    here = optree.registry.__dict__["__GLOBAL_NAMESPACE"]
    optree.register_pytree_node(
        Pair, lambda p: (p.parts, None), lambda _, xs: Pair(*xs), namespace=here
    )
    with pytest.raises(ValueError, match="optree knows its parts, and torch does not"):
        vmap(lambda p: p.parts[0])(Pair(XS, XS))
    register_pytree_node(Pair, lambda p: (p.parts, None), lambda xs, _: Pair(*xs))
    found = vmap(lambda p: Pair(p.parts[0] * p.parts[1]))(Pair(XS, XS.exp()))
    close(found.parts[0], XS * XS.exp())


class Measured:
    """A class that looks at its tensor where it is put together."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.norm = x, x.norm()


register_pytree_node(Measured, lambda m: ([m.x], None), lambda children, _: Measured(*children))


def test_a_class_may_compute_with_examples_where_it_is_put_together():
    found = vmap(lambda m: m.norm * m.x)(Measured(XS))
    close(found, torch.stack([x.norm() * x for x in XS]))
    close(
        grad(lambda m: vmap(lambda m: m.norm)(m).sum())(Measured(XS)).x,
        XS / XS.norm(dim=1, keepdim=True),
    )


def test_a_class_is_put_together_where_calls_run(monkeypatch):
    """What asks an example for its shape asks nobody what an ended call has left of it."""
    monkeypatch.setattr(
        escaped_values, "find_fallback", lambda _: pytest.fail("asked after the call")
    )
    w = torch.ones(3, dtype=D, requires_grad=True)
    vmap(lambda m: m.norm * w)(Measured(XS))
