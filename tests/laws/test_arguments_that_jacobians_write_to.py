"""A Jacobian of a function that writes into its other arguments is that of what it computes."""

from __future__ import annotations

import pytest
import torch

from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vmap

D = torch.float64
X = torch.tensor([1.0, 2.0, 3.0], dtype=D)


def written(write):
    def f(x, y):
        write(x, y)
        return y * x

    return f


def kept_view(x, y):
    z = y.view(-1)
    y.copy_(x**2)
    return z * y


FUNCTIONS = {
    "copy_": written(lambda x, y: y.copy_(x**2)),
    "copy_ twice": written(lambda x, y: y.copy_(x).copy_(2 * y)),
    "a constant": written(lambda x, y: y.fill_(2.0)),
    "mul_": written(lambda x, y: y.mul_(x**2)),
    "add_": written(lambda x, y: y.add_(x**2)),
    "index_put_": written(lambda x, y: y.index_put_((torch.tensor([0]),), x[1])),
    "a slice": written(lambda x, y: y[:2].copy_(x[:2] ** 2)),
    "y[:2] = x": written(lambda x, y: y.__setitem__(slice(2), x[:2] ** 2)),
    "y[0] = number": written(lambda x, y: y.__setitem__(0, x.sum() ** 2)),
    "a view": written(lambda x, y: y.view(3, 1).mul_(x[:, None] ** 2)),
    "read before": lambda x, y: (y + x, y.mul_(x))[0] * x,
    "itself": lambda x, y: y.copy_(x**2),
    "a view of before": kept_view,
}


def argument():
    return torch.full((3,), 0.5, dtype=D)


def truth(f, x):
    return torch.autograd.functional.jacobian(lambda x: f(x.clone(), argument()), x)


def total(f):
    return lambda x, y: f(x, y).sin().sum()


def second_time(f, *args):
    f(*(args or (X, argument())))
    return f(*(args or (X, argument())))


def in_a_branch(f):
    def rows(x, y):
        if x.sum() > 0:
            return jacfwd(f, chunk_size=1)(x, y)
        return jacfwd(f)(x, y)

    return rows


WAYS = {
    "jacfwd": lambda f: jacfwd(f)(X, argument()),
    "jacrev": lambda f: jacrev(f)(X, argument()),
    "chunks": lambda f: jacfwd(f, chunk_size=2)(X, argument()),
    "rows": lambda f: jacfwd(f, chunk_size=1)(X, argument()),
    "by name": lambda f: jacfwd(lambda *, y, x: f(x, y), argnames="x")(y=argument(), x=X),
    "in a tree": lambda f: jacfwd(lambda x, s: f(x, s["y"][0]))(X, {"y": [argument()]}),
    "recorded": lambda f: second_time(jit(jacfwd(f))),
    "mapped": lambda f: vmap(jacfwd(f))(X.repeat(2, 1), argument().repeat(2, 1))[1],
    "mapped argument": lambda f: vmap(jacfwd(f), (None, 0))(X, argument().repeat(2, 1))[1],
    "mapped, in rows": lambda f: vmap(jacfwd(f, chunk_size=1), (None, 0))(
        X, argument().repeat(2, 1)
    )[1],
    "mapped, in chunks": lambda f: vmap(jacfwd(f, chunk_size=2))(
        X.repeat(2, 1), argument().repeat(2, 1)
    )[1],
    "mapped twice, in rows": lambda f: vmap(vmap(jacfwd(f, chunk_size=1), (None, 0)), (None, 0))(
        X, argument().repeat(2, 2, 1)
    )[1, 1],
    "where examples diverge": lambda f: vmap(in_a_branch(f))(
        X.repeat(2, 1), argument().repeat(2, 1)
    )[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobian_of_a_function_that_writes_into_another_argument(name, way):
    torch.testing.assert_close(WAYS[way](FUNCTIONS[name]), truth(FUNCTIONS[name], X))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessian_of_a_function_that_writes_into_another_argument(name):
    f = total(FUNCTIONS[name])
    right = torch.autograd.functional.hessian(lambda x: f(x.clone(), argument()), X)
    torch.testing.assert_close(hessian(f)(X, argument()), right)
    torch.testing.assert_close(jacfwd(jacfwd(f))(X, argument()), right)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangent_of_a_jacobian_whose_function_writes_into_an_argument(name):
    f = FUNCTIONS[name]
    right = torch.autograd.functional.jvp(
        lambda x: torch.autograd.functional.jacobian(
            lambda x: f(x.clone(), argument()), x, create_graph=True
        ),
        X,
        X.sin(),
    )[1]
    found = jvp(lambda x: jacfwd(f)(x, argument()), (X,), (X.sin(),))[1]
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_argument_holds_what_one_call_wrote(name, chunk):
    right, y = argument(), argument()
    FUNCTIONS[name](X, right)
    jacfwd(FUNCTIONS[name], chunk_size=chunk)(X, y)
    torch.testing.assert_close(y, right)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"a constant"}))
def test_write_of_a_tangent_into_a_captured_tensor_is_an_error(name):
    y = argument()
    calls = [
        lambda f: jvp(f, (X,), (X,)),
        lambda f: linearize(f, X)[1](X),
        lambda f: jacfwd(f)(X),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="into a tensor from outside"):
            call(lambda x: FUNCTIONS[name](x, y))


@pytest.mark.parametrize("chunk", [1, 2])
def test_directions_in_chunks_read_what_was_there_before_a_write(chunk):
    b = torch.ones(3, dtype=D)

    def read_then_write(x):
        y = x * b
        b.add_(1)
        return y

    def of_itself(x):
        return x.mul_(x.sin())

    torch.testing.assert_close(jacfwd(read_then_write, chunk_size=chunk)(X), torch.eye(3, dtype=D))
    torch.testing.assert_close(b, torch.full((3,), 2.0, dtype=D))
    right = torch.diag(X.sin() + X * X.cos())
    torch.testing.assert_close(jacfwd(of_itself, chunk_size=chunk)(X.clone()), right)


def test_view_of_what_has_a_history_is_an_error_not_another_number():
    def f(x, y):
        y.copy_(x)
        y[1:].mul_(x[:2])
        return (y.sum() * x).sum()

    right = torch.autograd.functional.jacobian(lambda x: f(x, argument()), X)
    torch.testing.assert_close(jacfwd(f)(X, argument()), right)
    torch.testing.assert_close(grad(f)(X, argument()), right)
    with pytest.raises(RuntimeError, match="into a tensor from outside"):
        hessian(f)(X, argument())


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_each_example_holds_what_one_call_wrote(chunk):
    def read_then_write(x, y):
        z = y * x
        y.mul_(s := x.detach()[0] + 1)
        return z * s

    y = torch.ones(2, 3, dtype=D)
    found = vmap(jacfwd(read_then_write, chunk_size=chunk), (None, 0))(X, y)
    torch.testing.assert_close(found, (X[0] + 1) * torch.eye(3, dtype=D).expand(2, 3, 3))
    torch.testing.assert_close(y, (X[0] + 1).expand(2, 3))


# With a view from before the write, torch's own check of what was saved refuses the backward pass.
DERIVED = sorted(set(FUNCTIONS) - {"a view of before"})


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_of_a_jacobian_and_of_what_its_function_wrote(name, chunk):
    def loss(x):
        y = argument()
        found = jacfwd(FUNCTIONS[name], chunk_size=chunk)(x, y).sin().sum()
        return found + (y * x).sin().sum()

    def by_autograd(x):
        y = argument()
        found = torch.autograd.functional.jacobian(
            lambda x: FUNCTIONS[name](x.clone(), argument()), x, create_graph=True
        )
        FUNCTIONS[name](x, y)
        return found.sin().sum() + (y * x).sin().sum()

    x = X.clone().requires_grad_()
    (right,) = torch.autograd.grad(by_autograd(x), x)
    torch.testing.assert_close(grad(loss)(X), right)
    torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], right)
    torch.testing.assert_close(vmap(grad(loss))(X.repeat(2, 1))[1], right)
    torch.testing.assert_close(jvp(loss, (X,), (X,))[1], right @ X)
    torch.testing.assert_close(jacfwd(loss, chunk_size=chunk)(X), right)
    if chunk is None:
        torch.testing.assert_close(second_time(jit(grad(loss)), X), right)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_of_a_hessian_and_of_what_its_function_wrote(name, chunk):
    def loss(x):
        y = argument()
        return hessian(total(FUNCTIONS[name]), chunk_size=chunk)(x, y).sum() + (y * x).sin().sum()

    def by_autograd(x):
        y = argument()
        found = torch.autograd.functional.hessian(
            lambda x: total(FUNCTIONS[name])(x.clone(), argument()), x, create_graph=True
        )
        FUNCTIONS[name](x, y)
        return found.sum() + (y * x).sin().sum()

    x = X.clone().requires_grad_()
    (right,) = torch.autograd.grad(by_autograd(x), x)
    torch.testing.assert_close(jvp(loss, (X,), (X,))[1], right @ X)
    torch.testing.assert_close(jacfwd(loss, chunk_size=chunk)(X), right)
    torch.testing.assert_close(vmap(jacfwd(loss))(X.repeat(2, 1))[1], right)


B = torch.tensor([3.0, 1.0, 2.0], dtype=D)
OWN = {
    "mul_": lambda x: torch.full_like(X, 0.5).mul_(B) * x**2,
    "a slice": lambda x: (y := torch.zeros_like(X), y[1:].add_(B[1:]))[0] * x**2,
    "y[0] = b": lambda x: (y := torch.ones_like(X), y.__setitem__(0, B[1]))[0] * x**2,
    "out=": lambda x: torch.mul(B, B, out=torch.empty(3, dtype=D)) * x**2,
    "copy_": lambda x: torch.empty(3, dtype=D).copy_(B) * x**2,
    "torch._foreach_add_": lambda x: (
        (y := [torch.zeros_like(X)], torch._foreach_add_(y, [B]))[0][0] * x**2
    ),
    "index_add_": lambda x: torch.zeros_like(X).index_add_(0, torch.arange(3), B) * x**2,
    "in another transform": lambda x: vmap(lambda b: torch.zeros(()).double().add_(b))(B) * x**2,
}


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("name", OWN)
def test_directions_in_chunks_write_what_is_shared_into_memory_of_their_own(name, chunk):
    right = torch.autograd.functional.jacobian(OWN[name], X)
    torch.testing.assert_close(jacfwd(OWN[name], chunk_size=chunk)(X), right)
    found = vmap(jacfwd(OWN[name], chunk_size=chunk))(X.repeat(2, 1))
    torch.testing.assert_close(found, right.expand(2, 3, 3))
    right = torch.autograd.functional.hessian(lambda x: OWN[name](x).sum(), X)
    found = hessian(lambda x: OWN[name](x).sum(), chunk_size=chunk)(X)
    torch.testing.assert_close(found, right)


SWEEPS = {
    "jacfwd": (jacfwd, ()),
    "jacrev": (jacrev, ()),
    "hessian": (lambda f, **how: hessian(lambda x: f(x).sum(), **how), ()),
    "vmap of jacfwd": (lambda f, **how: vmap(jacfwd(f, **how)), (2,)),
    "vmap of hessian": (lambda f, **how: vmap(hessian(lambda x: f(x).sum(), **how)), (2,)),
    "vmap of vmap of jacfwd": (lambda f, **how: vmap(vmap(jacfwd(f, **how))), (2, 3)),
    "jacfwd of jacfwd": (lambda f, **how: jacfwd(jacfwd(f, **how), **how), ()),
    "grad of jacfwd": (lambda f, **how: grad(lambda x: jacfwd(f, **how)(x).sum()), ()),
    "vmap of grad of jacfwd": (
        lambda f, **how: vmap(grad(lambda x: jacfwd(f, **how)(x).sum())),
        (2,),
    ),
}


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("name", SWEEPS)
def test_what_a_function_adds_to_captured_tensors_counts_once_for_each_call(name, chunk):
    transform, shape = SWEEPS[name]
    leaf = torch.ones(3, dtype=D, requires_grad=True)
    count, total = torch.zeros((), dtype=D), torch.zeros(3, dtype=D)

    def f(x):
        count.add_(1)
        total[1:] += B[1:]
        y = x.detach().clone().requires_grad_()
        (leaf * y * y).sum().backward()
        return y.grad * x * x

    x = X.expand(*shape, 3).clone()
    found = transform(f, chunk_size=chunk)(x)
    calls = x.numel() // 3
    assert count == calls
    torch.testing.assert_close(total, calls * torch.tensor([0.0, *B[1:]], dtype=D))
    torch.testing.assert_close(leaf.grad, calls * X * X)
    torch.testing.assert_close(found, transform(lambda x: 2 * x.detach() * x * x)(x))


OF_ITSELF = {
    "mul_": lambda x: x.mul_(x.mean()) * x,
    "a slice": lambda x: (x[1:].add_(3 * x[0]), x * x)[1],
    "a view": lambda x: x.view(3, 1).sin_()[:, 0] * x,
    "fill_": lambda x: (x[:2].fill_(x.sum()), x * x)[1],
    "not written": lambda x: x * x,
}


@pytest.mark.parametrize("name", OF_ITSELF)
def test_derivatives_of_what_a_function_wrote_into_the_argument_that_moves(name):
    def loss(x):
        y = x * 2
        return jacfwd(OF_ITSELF[name])(y).sin().sum() + y.sin().sum()

    def by_autograd(x):
        found = torch.autograd.functional.jacobian(
            lambda x: OF_ITSELF[name](x.clone()), x * 2, create_graph=True
        )
        y = x * 2
        OF_ITSELF[name](y)
        return found.sin().sum() + y.sin().sum()

    x = X.clone().requires_grad_()
    (right,) = torch.autograd.grad(by_autograd(x), x)
    torch.testing.assert_close(grad(loss)(X), right)
    torch.testing.assert_close(vmap(grad(loss))(X.repeat(2, 1))[1], right)
    torch.testing.assert_close(jvp(loss, (X,), (X,))[1], right @ X)
    torch.testing.assert_close(jacfwd(loss)(X), right)


@pytest.mark.parametrize("name", OF_ITSELF)
def test_chunks_of_what_writes_into_the_argument_that_moves(name):
    def loss(chunk):
        return lambda x: jacfwd(OF_ITSELF[name], chunk_size=chunk)(x * 2).sin().sum()

    for chunk in (1, 2):
        right, left = X * 2, X * 2
        OF_ITSELF[name](right)
        jacfwd(OF_ITSELF[name], chunk_size=chunk)(left)
        torch.testing.assert_close(left, right)
        torch.testing.assert_close(jacfwd(loss(chunk))(X), jacfwd(loss(None))(X))
        if name == "not written":
            torch.testing.assert_close(grad(loss(chunk))(X), grad(loss(None))(X))
            continue
        with pytest.raises(RuntimeError, match=r"(?s)with a chunk_size.*float64\[3\].*\.clone\(\)"):
            grad(loss(chunk))(X)
        with pytest.raises(RuntimeError, match="with a chunk_size"):
            vmap(grad(loss(chunk)))(X[None])
