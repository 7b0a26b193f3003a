"""A user's module: what type checkers make of forall in it. Checked by test_types, never run."""
# pyright: reportArgumentType=true, reportUnnecessaryTypeIgnoreComment=true

import torch
from torch import Tensor, nn

import forall
from forall import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jit,
    jvp,
    linearize,
    vjp,
    vmap,
)

Params = dict[str, Tensor]
net = nn.Linear(3, 1)
params: Params = dict(net.named_parameters())


def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = functional_call(net, p, (x,))
    return (out - y).square().sum()


def one(x: Tensor) -> Tensor:
    return x.sin().sum() if x.sum() > 0 else x.sum()


xs, ys = torch.ones(5, 3), torch.zeros(5, 1)
slopes: Params = vmap(grad(loss), in_dims=(None, 0, 0))(params, xs, ys)
gradient, value = grad_and_value(one)(xs[0])
curvature: Tensor = vmap(hessian(one))(xs)
rows: Tensor = jit(vmap(jacrev(one)))(xs)
out, tangent = jvp(one, (xs[0],), (xs[1],))
result, pull = vjp(one, xs[0])
back: tuple[Tensor, ...] = pull(result)
parts = torch.stack([gradient, *back]).sum() + value + tangent + out + curvature.sum()
both: tuple[Params, Tensor] = vmap(grad(loss, (0, 1)), in_dims=(None, 0, 0))(params, xs, ys)
push: Tensor = linearize(grad(one), xs[0])[1](xs[1])
weights: Tensor = jacrev(loss)(params, xs[0], ys[0])["weight"]
blocks: dict[str, Params] = hessian(loss)(params, xs[0], ys[0])
vmap(grad(lambda x: x.sin().sum()))(xs)
vmap(hessian(lambda p, x: (p["w"] * x).sum()), in_dims=(None, 0))({"w": xs[0]}, xs)["w"]["w"]
jit(vmap(grad(lambda x: x.sin().sum())))(xs).sum()
vmap(jacrev(lambda x: {"y": x.sin()}))(xs)["y"]
report: str = str(forall.explain(vmap(one))(xs))

vmap(one)("text")  # type: ignore[arg-type]
wrong: str = vmap(one)(xs)  # type: ignore[assignment]
more: str = vmap(hessian(one))(xs)  # type: ignore[assignment]
