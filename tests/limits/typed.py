"""What a type checker makes of the verbs. Checked by test_types, never run."""
# pyright: reportCallIssue=true, reportArgumentType=true, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import torch
from torch import Tensor

import forall
from forall import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

Params = dict[str, Tensor]
x = torch.ones(3)
params: Params = {"w": x}


def scalar(p: Params, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return (p["w"] * x).sum() * scale


def with_aux(p: Params, x: Tensor) -> tuple[Tensor, list[str]]:
    return scalar(p, x), []


def one(x: Tensor) -> Tensor:
    return x.sin()


def pair(x: Tensor, n: Tensor) -> tuple[Tensor, Params]:
    return x + n, {}


def named(x: Tensor) -> dict[str, Tensor]:
    return {"sine": x.sin()}


def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


# --- vmap keeps parameters and result ----------------------------------------------------------

assert_type(vmap(one)(x), Tensor)
assert_type(vmap(pair, in_dims=(0, None))(x, x), tuple[Tensor, Params])
assert_type(vmap(scalar, in_dims={"x": 0})(params, x, scale=2.0), Tensor)
assert_type(vmap(vmap(pair))(x, n=x), tuple[Tensor, Params])
vmap(one)(x, x)  # pyright: ignore[reportCallIssue]
vmap(scalar)(params, x, sale=2.0)  # pyright: ignore[reportCallIssue]
vmap(one)("x")  # pyright: ignore[reportArgumentType]

# --- grad: the gradient is of the argument's type ----------------------------------------------

assert_type(grad(one)(x), Tensor)
assert_type(grad(scalar)(params, x, scale=2.0), Params)
assert_type(grad(with_aux, has_aux=True)(params, x), tuple[Params, list[str]])
assert_type(vmap(grad(scalar), in_dims=(None, 0))(params, x), Params)
assert_type(grad(grad(one))(x), Tensor)
assert_type(grad(scalar, argnums=1)(params, x), Tensor)
assert_type(grad(scalar, argnums=(0, 1))(params, x, scale=2.0), tuple[Params, Tensor])
assert_type(vmap(grad(scalar, (0, 1)), in_dims=(None, 0))(params, x), tuple[Params, Tensor])
assert_type(grad(scalar, argnums=(1, 0))(params, x), tuple[Tensor, Params])
assert_type(grad(scalar, argnames="p")(params, x=x), Any)
assert_type(grad(with_aux, argnums=(0, 1), has_aux=True)(params, x), tuple[Any, list[str]])
assert_type(grad_and_value(scalar)(params, x), tuple[Params, Tensor])
assert_type(
    grad_and_value(with_aux, has_aux=True)(params, x), tuple[Params, tuple[Tensor, list[str]]]
)
assert_type(grad_and_value(scalar, 1)(params, x), tuple[Tensor, Tensor])
assert_type(grad_and_value(scalar, (0, 1))(params, x), tuple[tuple[Params, Tensor], Tensor])
assert_type(grad_and_value(scalar, (1, 0))(params, x), tuple[tuple[Tensor, Params], Tensor])
of_examples: Callable[[Params, Tensor], Params] = vmap(grad(scalar))
grad(scalar)(params)  # pyright: ignore[reportCallIssue]
grad(scalar)(params, x, sale=2.0)  # pyright: ignore[reportCallIssue]

# --- Jacobians: by a tensor of a tensor a tensor, by a tree of a tensor that tree ---------------

aux = (params, x)
assert_type(jacrev(one)(x), Tensor)
assert_type(jacfwd(scalar)(params, x, scale=2.0), Params)
assert_type(forall.jacobian(one)(x), Tensor)
assert_type(jacrev(jacrev(one))(x), Tensor)
assert_type(vmap(jacrev(scalar), in_dims=(None, 0))(params, x), Params)
assert_type(jacrev(pair)(x, x), Any)
assert_type(jacrev(scalar, 1)(params, x), Tensor)
assert_type(vmap(jacrev(scalar, 1), in_dims=(None, 0))(params, x), Tensor)
assert_type(jacrev(scalar, (0, 1))(params, x, scale=2.0), tuple[Params, Tensor])
assert_type(jacfwd(scalar, argnums=1)(params, x), Tensor)
assert_type(forall.jacobian(scalar, argnums=(0, 1))(params, x), tuple[Params, Tensor])
assert_type(jacrev(named)(x), dict[str, Tensor])
assert_type(jacfwd(several)(x), tuple[Tensor, ...])
assert_type(forall.jacobian(named)(x), dict[str, Tensor])
assert_type(jacrev(one, (0,))(x), Any)
assert_type(jacrev(with_aux, has_aux=True)(*aux), tuple[Params, list[str]])
assert_type(jacrev(one, return_value=True)(x), tuple[Tensor, Tensor])
assert_type(jacrev(pair, return_value=True)(x, x), tuple[Any, tuple[Tensor, Params]])
assert_type(
    jacrev(with_aux, has_aux=True, return_value=True)(*aux),
    tuple[Params, tuple[Tensor, list[str]]],
)
assert_type(jacfwd(with_aux, has_aux=True)(*aux), tuple[Params, list[str]])
assert_type(forall.jacobian(one, return_value=True)(x), tuple[Tensor, Tensor])
assert_type(jacfwd(one, return_value=True)(x), tuple[Tensor, Tensor])
assert_type(hessian(one)(x), Tensor)
assert_type(vmap(vmap(hessian(one)))(x), Tensor)
assert_type(hessian(scalar)(params, x, scale=2.0), dict[str, Params])
assert_type(vmap(hessian(scalar), in_dims=(None, 0))(params, x), dict[str, Params])
assert_type(hessian(scalar, argnums=1)(params, x), Tensor)
assert_type(vmap(hessian(scalar, 1), in_dims=(None, 0))(params, x), Tensor)
assert_type(hessian(with_aux, has_aux=True)(*aux), tuple[Any, list[str]])
assert_type(hessian(one, return_value=True)(x), tuple[Tensor, tuple[Tensor, Tensor]])
assert_type(
    hessian(with_aux, has_aux=True, return_value=True)(*aux),
    tuple[Any, tuple[Any, Tensor, list[str]]],
)
jacrev(one)(x, x)  # pyright: ignore[reportCallIssue]
hessian(one)(x, x)  # pyright: ignore[reportCallIssue]
hessian(one)("x")  # pyright: ignore[reportCallIssue, reportArgumentType]
hessian(scalar)(params)  # pyright: ignore[reportCallIssue]

# --- second derivatives ------------------------------------------------------------------------

assert_type(forall.laplacian(one)(x), Tensor)
assert_type(forall.laplacian(with_aux, has_aux=True)(*aux), tuple[Tensor, list[str]])
assert_type(forall.laplacian(one, return_value=True)(x), tuple[Tensor, tuple[Any, Tensor]])
assert_type(forall.hessian_diag(scalar)(params, x), Params)
assert_type(forall.hessian_diag(with_aux, has_aux=True)(*aux), tuple[Params, list[str]])
assert_type(forall.hvp(scalar)(params, x, params), Params)
assert_type(forall.hvp(with_aux, has_aux=True)(*aux, params), tuple[Params, list[str]])
forall.laplacian(one)(x, x)  # pyright: ignore[reportCallIssue]

# --- at a point --------------------------------------------------------------------------------

value, pull = vjp(scalar, params, x)
assert_type(value, Tensor)
assert_type(pull(x), tuple[Params, Tensor])
assert_type(
    vjp(with_aux, params, x, has_aux=True),
    tuple[Tensor, Callable[..., tuple[Params, Tensor]], list[str]],
)
assert_type(vjp(one, torch.nn.Parameter(x))[0], Tensor)
assert_type(jvp(one, (x,), (x,)), tuple[Tensor, Tensor])
assert_type(jvp(pair, (x, x), (x, x)), tuple[tuple[Tensor, Params], tuple[Tensor, Params]])
assert_type(jvp(with_aux, aux, aux, has_aux=True), tuple[Tensor, Tensor, list[str]])
assert_type(forall.linearize(one, x), tuple[Tensor, Callable[[Tensor], Tensor]])
assert_type(forall.linearize(pair, x, x)[1](x, x), tuple[Tensor, Params])

# --- jit -----------------------------------------------------------------------------------------


class Model:
    @forall.jit
    def step(self, a: Tensor, n: int = 1) -> Tensor:
        return a * n


assert_type(forall.jit(one)(x), Tensor)
assert_type(forall.jit(vmap(grad(scalar), in_dims=(None, 0)))(params, x), Params)
assert_type(forall.jit(vmap(hessian(one)))(x), Tensor)
assert_type(forall.jit(hessian(one)).cache_info().hits, int)
assert_type(forall.linearize(grad(one), x), tuple[Tensor, Callable[[Tensor], Tensor]])
assert_type(jvp(hessian(one), (x,), (x,)), tuple[Tensor, Tensor])
assert_type(forall.jit(one, static_argnums=0).cache_info().hits, int)
assert_type(forall.jit(one).kinds()[0].why, str | None)
assert_type(Model().step(x, n=2), Tensor)
assert_type(vmap(forall.jit(one))(x), Tensor)
forall.jit(lambda a: a.sin())(x).sin()
forall.jit(one)(x, x)  # pyright: ignore[reportCallIssue]
Model().step(x, x)  # pyright: ignore[reportArgumentType]

# --- parameters, names and options that are lost where a signature is --------------------------

assert_type(jacfwd(with_aux, 1, has_aux=True, randomness="same")(*aux), tuple[Any, list[str]])
assert_type(jacrev(one, (0,), return_value=True, chunk_size="auto")(x), tuple[Any, Tensor])
assert_type(
    forall.jacobian(with_aux, has_aux=True, holomorphic=True)(*aux), tuple[Params, list[str]]
)
assert_type(forall.hvp(scalar, argnames="p", return_value=True)(*aux, params)[1][1], Tensor)
assert_type(
    forall.hessian_diag(scalar, return_value=True)(params, x=x),
    tuple[Params, tuple[Params, Tensor]],
)
assert_type(forall.per_example_grad_norm(scalar, in_dims=0)(params, x) is None, bool)
assert_type(forall.explain(grad(one))(x).ways, tuple[str, ...])
assert_type(forall.random.key(0), Tensor)
assert_type(forall.config.replay, bool | str)
grad(one, has_axu=True)(x)  # pyright: ignore[reportCallIssue]
jacrev(one, randomness="same")  # pyright: ignore[reportCallIssue]
jacfwd(one, 0, True)  # pyright: ignore[reportCallIssue]
forall.laplacian(one, holomorphic=True)  # pyright: ignore[reportCallIssue]
jvp(one, (x,), (x,), stric=True)  # pyright: ignore[reportCallIssue]
forall.linearize(pair, x, x)[1](x)  # pyright: ignore[reportCallIssue]
vjp(one, x, has_aux=3)  # pyright: ignore[reportCallIssue, reportArgumentType]

# --- lambdas and functions without types are let pass ------------------------------------------

model = torch.nn.Linear(3, 3)
vmap(model)(x)
vmap(lambda a, b: a * b, in_dims=(0, None))(x, 2.0)
vmap(lambda a: {"y": a.sin(), "n": 42})(x)["y"].sum()
assert_type(vmap(lambda a: one(a))(x), Tensor)
grad(lambda a, b: (a * b).sum(), (0, 1))(x, x)
grad(lambda a: (x * a).sum())(x).sin()
grad(lambda p: (p["w"] * x).sum())(params)["w"].sin()
vmap(grad(lambda p, a: (p["w"] * a).sum()), in_dims=(None, 0))(params, x)
grad(lambda a: grad(lambda b: (a * b).sum())(x) @ x)(x)
grad(lambda a: ((a * x).sum(), a), has_aux=True)(x)
grad(one, 0, False)(x)
jacrev(lambda p: p["w"])(params)
hessian(lambda a: (x * a).sum(), return_value=True)(x)[1]
hessian(lambda p: (p["w"] * x).sum())(params)["w"]["w"].sin()
vmap(hessian(lambda p, a: (p["w"] * a).sum()), in_dims=(None, 0))(params, x)["w"]["w"].sin()
forall.jit(vmap(hessian(lambda p, a: (p["w"] * a).sum()), in_dims=(None, 0)))(params, x)["w"]
vmap(jacrev(lambda a: {"y": x * a}))(x)["y"]
forall.laplacian(lambda a: (x * a).sum())(x).sin()
vjp(lambda a, b: x * a * b["w"], x, params)[1](x)
jvp(lambda a: x * a, (x,), (x,))
forall.linearize(lambda a: x * a, x)[1](x)
assert_type(forall.stack_module_state([model])[0], dict[str, Any])
