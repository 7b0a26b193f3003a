"""Transforms in functions that torch.compile compiles: the numbers of the function as it is.

Values and gradients of one graph without a break, in which forall's own engine has run. What no
graph can hold breaks it, and runs as it does without a compiler.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

import forall
from draws import make_generator
from forall import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    laplacian,
    linearize,
    per_example_grad_norm,
    vjp,
    vmap,
)
from forall._compat import versions

# torch reads its own .grad_fn, warns about its own deprecations and so on while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:torch"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

GENERATOR = make_generator()
X = torch.randn(4, 3, dtype=torch.float64, generator=GENERATOR)
W = torch.randn(3, 3, dtype=torch.float64, generator=GENERATOR)
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
CASES: dict[str, Callable] = {}


class Pair(NamedTuple):
    a: Any
    b: Any


def case(f: Callable) -> Callable:
    CASES[f.__name__] = f
    return f


def scalar(a: Tensor) -> Tensor:
    return (W @ a).sin().sum() * a.prod()


def vector(a: Tensor) -> Tensor:
    return torch.tanh(W @ a) * a


@case
def mapped(x):
    return vmap(scalar)(x)


@case
def mapped_with_dims_and_trees(x):
    return vmap(lambda a, b: {"s": a + b, "t": (a * b, a.sum())}, (0, None))(x, W[0])


@case
def mapped_along_names(x):
    return vmap(lambda a, *, s, w: a * s + w, in_dims={"w": 0})(x[0], s=2.0, w=x)


@case
def mapped_in_chunks(x):
    return vmap(scalar, chunk_size=3)(x)


@case
def mapped_without_examples(x):
    return vmap(vector)(x[:0])


@case
def mapped_twice(x):
    return vmap(vmap(torch.sin, in_dims=0), in_dims=1)(x)


@case
def mapped_over_a_named_tuple(x):
    return vmap(lambda p, k: p.a * p.b + k, (0, None))(Pair(x, 2 * x), 3)


@case
def gradient(x):
    return grad(scalar)(x[0])


@case
def gradients_by_name(x):
    return grad(lambda a, w: (w @ a).sin().sum(), argnames=("w", "a"))(w=W, a=x[0])


@case
def gradients_of_trees(x):
    def loss(p, q, a):
        return (p["w"] @ a).square().sum() * q[0].sum(), {"aux": a * 2}

    q = collections.OrderedDict(w=W, v=x[1])
    of_dicts = grad(lambda p: (p["w"] @ p["v"]).sum())(q)
    return of_dicts, grad_and_value(loss, (0, 1), has_aux=True)({"w": W}, [x[1]], x[0])


@case
def per_example_gradients(x):
    return vmap(grad(scalar))(x)


@case
def gradients_of_a_module(x):
    return vmap(grad(lambda a: MODEL(a).sum()))(x)


@case
def norms_of_gradients(x):
    return per_example_grad_norm(lambda p, a: (p @ a).square().sum())(W, x)


@case
def pushed(x):
    return jvp(vector, (x[0],), (x[1],))


@case
def pushed_where_gradients_are_off(x):
    def f(a):
        with torch.no_grad():
            b = a * 2
        return a * b

    return jvp(f, (x[0],), (x[1],))


@case
def pulled_back(x):
    y, pull = vjp(vector, x[0])
    return y, pull(x[1]), vmap(pull)(x)


@case
def linearized(x):
    y, push = linearize(vector, x[0])
    return y, push(x[1]), push(x[2])


@case
def jacobians(x):
    return jacrev(vector)(x[0]), jacobian(vector, return_value=True)(x[0])


@case
def jacobians_of_examples(x):
    return vmap(jacfwd(vector))(x)


@case
def hessians_of_examples(x):
    return vmap(hessian(scalar))(x)


@case
def laplacians_of_examples(x):
    return vmap(laplacian(scalar))(x)


@case
def parts_of_a_hessian(x):
    return hessian_diag(scalar)(x[0]), hvp(scalar)(x[0], x[1])


@case
def written_in_place(x):
    def f(a):
        out = torch.zeros(3, dtype=a.dtype)
        out[1] = a[0]
        out += a
        return out

    return vmap(f)(x)


@case
def arguments_written_to(x):
    y = x.clone()
    vmap(lambda a: a.mul_(2).sin_())(y)
    return y


@case
def captured_and_given(x):
    a0 = x[0]
    pushed = jvp(lambda a: a * a0, (a0,), (x[1],))
    return grad(lambda a: (a * a0).sum())(a0), pushed, vmap(lambda a: a.mT + x.sum())(x[None])


@case
def added_to_what_all_share(x):
    sums = torch.zeros(3, dtype=x.dtype)

    def f(a):
        sums.add_(a)
        return (a * a).sum()

    return vmap(f)(x), sums


@case
def nested(x):
    return vmap(lambda a: jacrev(lambda b: vmap(lambda c: c * b.sum())(b))(a))(x)


@case
def jitted(x):
    return vmap(forall.jit(vector))(x)


@case
def with_torchs_own(x):
    return torch.func.vmap(grad(scalar))(x), vmap(torch.func.grad(scalar))(x)


@case
def drawn_by_keys(x):
    keys = forall.random.split(forall.random.key(0), 4)
    by_hand = vmap(lambda k, a: a * forall.random.uniform(k, (3,), dtype=a.dtype))(keys, x)
    key = forall.random.key(1)
    return by_hand, vmap(lambda a: a * torch.rand(3, dtype=a.dtype), randomness=key)(x)


def total(tree: Any) -> Any:
    leaves = [x for x in _pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]
    return sum((x * x).sum() for x in leaves)


def check(f: Callable, x: Tensor, **options: Any) -> Any:
    """The compiled function against the function: values, trees, gradients where there are any."""
    torch.compiler.reset()
    x = x.clone().requires_grad_()
    expected, actual = (
        f(x),
        torch.compile(f, **{"backend": "aot_eager", "fullgraph": True} | options)(x),
    )
    assert _pytree.tree_structure(actual) == _pytree.tree_structure(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    if isinstance(total(expected), Tensor):
        gradients = [
            torch.autograd.grad(total(y), x, allow_unused=True) for y in (actual, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    return actual


@pytest.mark.sweep(2)
@pytest.mark.parametrize("f", CASES.values(), ids=list(CASES))
def test_one_graph_with_gradients(f):
    check(f, X)


@pytest.mark.skipif(
    versions.get_release() < (2, 12), reason="Dynamo knows no requires_grad_() there"
)
def test_autograd_inside():
    def f(a):
        a = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad(scalar(a), a)
        return slope * a

    check(lambda x: vmap(f)(x), X)


def test_ensembles_by_functional_call():
    def f(x):
        weights = dict(MODEL.named_parameters())
        one = grad(lambda p, a: functional_call(MODEL, p, (a,)).sum())
        return vmap(one, (None, 0))(weights, x)

    check(f, X)


def test_gradients_of_the_parameters_of_a_module():
    class Slopes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(W.clone())

        def forward(self, x):
            return vmap(grad(lambda a: (self.weight @ a).sin().sum()))(x)

    torch.compiler.reset()
    module = Slopes()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(f(X).sin().sum(), module.weight)[0] for f in (module, compiled)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_draws(randomness):
    def f(x):
        mapped = vmap(lambda a: a * torch.rand(3, dtype=a.dtype), randomness=randomness)
        dropped, pull = vjp(lambda a: torch.nn.functional.dropout(a, 0.5), x)
        return mapped(x), dropped, pull(torch.ones_like(x))

    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    compiled(X)
    found = []
    for g in (f, compiled):
        torch.manual_seed(0)
        found.append(g(X))
    torch.testing.assert_close(*found)
    _, dropped, (pulled,) = found[1]
    torch.testing.assert_close(dropped, X * pulled)  # the draw of the value is that of the pull


def test_a_default_device_is_on_within_the_transform():
    f = vmap(lambda a: a * torch.ones(3, dtype=a.dtype))
    with torch.device("meta"):
        torch.compiler.reset()
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        assert compiled(torch.empty_like(X, device="meta")).is_meta


def test_sizes_left_open_compile_once():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(hessians_of_examples, backend=backend, fullgraph=True, dynamic=True)
    for n in (4, 7, 2):
        torch.testing.assert_close(
            compiled(X.repeat(2, 1)[:n]), hessians_of_examples(X.repeat(2, 1)[:n])
        )
    assert len(graphs) == 1


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


# Each option that is a whole number, of calls in which that number is 0, 1 or 2 and up.
NUMBERS: dict[str, Callable] = {
    "vmap, in_dims": lambda x, n: vmap(torch.sum, in_dims=n % 2)(x),
    "vmap, in_dims in a tuple": lambda x, n: vmap(torch.outer, in_dims=(n % 2, None))(x, W[0]),
    "vmap, in_dims in a dict": lambda x, n: vmap(lambda a: a.sum(), in_dims={"a": n % 2})(a=x),
    "vmap, out_dims": lambda x, n: vmap(vector, out_dims=n % 2)(x),
    "vmap, out_dims in a tuple": lambda x, n: vmap(lambda a: (a, a), out_dims=(n % 2, 0))(x),
    "vmap, axis_size": lambda x, n: vmap(vector, axis_size=n - n + 4)(x),
    "vmap, chunk_size": lambda x, n: vmap(vector, chunk_size=n)(x),
    "grad": lambda x, n: grad(dot, argnums=n % 2)(x, x.sin()),
    "grad, in a tuple": lambda x, n: grad(dot, argnums=(n % 2,))(x, x.sin()),
    "grad_and_value": lambda x, n: grad_and_value(dot, argnums=n % 2)(x, x.sin()),
    "jacrev": lambda x, n: jacrev(dot, argnums=n % 2)(x, x.sin()),
    "jacrev, chunk_size": lambda x, n: jacrev(vector, chunk_size=n)(x[0]),
    "jacfwd": lambda x, n: jacfwd(dot, argnums=n % 2)(x, x.sin()),
    "jacfwd, chunk_size": lambda x, n: jacfwd(vector, chunk_size=n)(x[0]),
    "jacobian, chunk_size": lambda x, n: jacobian(vector, chunk_size=n)(x[0]),
    "hessian": lambda x, n: hessian(dot, argnums=n % 2)(x[0], x[1]),
    "hessian, chunk_size": lambda x, n: hessian(scalar, chunk_size=n)(x[0]),
    "hessian_diag, chunk_size": lambda x, n: hessian_diag(scalar, chunk_size=n)(x[0]),
    "laplacian, chunk_size": lambda x, n: laplacian(scalar, chunk_size=n)(x[0]),
    "hvp": lambda x, n: hvp(dot, argnums=n % 2)(x[0], x[1], x[2]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_among_the_options_differ_between_calls(name):
    f = NUMBERS[name]
    torch.compiler.reset()
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    for n in (1, 2):  # in the second call Dynamo takes n for a symbol
        torch.testing.assert_close(compiled(X, n), f(X, n))


SIZES: dict[str, Callable] = {
    "vmap, in_dims": lambda x, n: vmap(torch.sum, in_dims=n - 2)(x),
    "vmap, in_dims in a tuple": lambda x, n: vmap(torch.add, in_dims=(n - 2, None))(x, 2.0),
    "vmap, out_dims": lambda x, n: vmap(torch.sin, out_dims=n - 2)(x),
    "vmap, axis_size": lambda x, n: vmap(torch.sin, axis_size=n + 1)(x),
    "vmap, chunk_size": lambda x, n: vmap(torch.sin, chunk_size=n - 1)(x),
    "grad": lambda x, n: grad(dot, argnums=n - 2)(x, x.sin()),
    "jacrev, chunk_size": lambda x, n: jacrev(torch.sin, chunk_size=n)(x[0]),
}


@pytest.mark.parametrize("name", SIZES)
def test_options_that_are_sizes_of_a_traced_tensor(name):
    def f(x):
        return SIZES[name](x, x.shape[1])

    traced = make_fx(f, tracing_mode="symbolic")(X)
    torch.testing.assert_close(traced(X.cos()), f(X.cos()))


def test_a_transformed_function_itself_is_compiled():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(vmap(vector), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(X), vmap(vector)(X))
    assert len(graphs) == 1


# --- what breaks the graph ---------------------------------------------------------------------


def parted(x):
    def f(a):
        while a.abs().max() > 0.5:
            a = a / 2
        return a * 2 if a.sum() > 0 else a.sin()

    return vmap(f)(x)


def read_by_item(x):
    return vmap(lambda a: a * a.sum().item())(x)


def found_by_nonzero(x):
    return vmap(lambda a: a * (a > 0).nonzero().sum())(x)


def told_to_a_list(x):
    seen = []
    return vmap(lambda a: seen.append(a.shape) or a * 2)(x), len(seen)


def named_by_position(x):
    return vmap(lambda a, b: a - b, in_dims={"b": 0})(1.0, x)


def given_a_named_tuple(x):
    return vmap(lambda a: Pair(a, a.sum()))(x)


def pulled_after_a_break(x):
    y, pull = vjp(vector, x[0])
    torch._dynamo.graph_break()
    return y, pull(x[1])


def linearized_before_a_break(x):
    y, push = linearize(vector, x[0])
    torch._dynamo.graph_break()
    return y, vmap(push)(x)


class Fifth(torch.autograd.Function):
    """A square whose backward is another function's, which nobody may leave out."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return 5 * a * g


def with_a_backward_of_its_own(x):
    def f(a):
        return Fifth.apply(a).sum() + a.pow(3).sum()

    with torch.no_grad():
        without = grad(f)(x[0])
    return vmap(grad(f))(x), vmap(jacrev(Fifth.apply))(x), jvp(f, (x,), (x,)), without


def with_a_checkpoint(x):
    def f(a):
        return torch.utils.checkpoint.checkpoint(torch.sin, a, use_reentrant=False).sum()

    return vmap(grad(f))(x), jvp(f, (x,), (x,))


BREAKS = (
    with_a_backward_of_its_own,
    with_a_checkpoint,
    parted,
    read_by_item,
    found_by_nonzero,
    told_to_a_list,
    named_by_position,
    given_a_named_tuple,
    pulled_after_a_break,
    linearized_before_a_break,
)


@pytest.mark.parametrize("f", BREAKS, ids=lambda f: f.__name__)
def test_a_break_changes_no_number(f):
    check(f, X, fullgraph=False)
    if f is not given_a_named_tuple:  # which a graph of torch 2.10 can hold
        with pytest.raises(Exception, match=r"(?i)dynamo|graph|trace|branching|fake"):
            torch.compile(f, backend="eager", fullgraph=True)(X)
    check(mapped, X)  # nothing is left of what failed


def test_a_function_made_before_is_called_in_a_compiled_one():
    _, pull = vjp(vector, X[0])
    _, push = linearize(vector, X[0])
    check(lambda x: (pull(x[1]), push(x[1])), X, fullgraph=False)


def test_errors_of_a_call_say_what_they_say():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: vmap(vector, in_dims=5)(x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="in_dims"):
        compiled(X)
