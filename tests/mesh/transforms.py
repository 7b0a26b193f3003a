"""Derivatives taken inside of a call with a named axis, each with the program over all examples.

An entry of `INSIDE` is what to do with a function of one example, and what that is on the stack.
"""

import torch

from forall import grad, hessian, jacfwd, jacobian, jacrev, jit, jvp, linearize, vjp, vmap
from mesh.programs import Explicit, Named


def weights(like):
    return torch.linspace(0.3, 1.1, like.numel(), dtype=like.dtype).view(like.shape)


def named(program):
    return lambda x: program(Named, x)


def explicit(program):
    return lambda xs: program(Explicit(i=3), xs)


def weighed(f):
    def loss(x):
        y = f(x)
        return (y * weights(y)).sum()

    return loss


def pushed(f, x):
    return jvp(f, (x,), (weights(x),))


def pulled(f, x):
    y, pull = vjp(f, x)
    return y, pull(weights(y))


def linearized(f, x):
    y, push = linearize(f, x)
    return y, push(weights(x))


def each_row(f, xs):
    """Row k: entry k of all examples' results, pulled back at once."""
    size = f(xs)[0].numel()
    rows = [grad(lambda xs, k=k: f(xs).flatten(1)[:, k].sum())(xs) for k in range(size)]
    return torch.stack(rows, 1).view(*f(xs).shape, *xs.shape[1:])


def each_column(f, xs):
    """Column k: entry k of all examples' arguments, pushed at once."""
    columns = [
        jvp(
            f,
            (xs,),
            (torch.eye(xs[0].numel(), dtype=xs.dtype)[k].view(1, *xs.shape[1:]).expand_as(xs),),
        )[1]
        for k in range(xs[0].numel())
    ]
    return torch.stack(columns, -1).view(*f(xs).shape, *xs.shape[1:])


def of_all(f):
    """The sum of all examples' results, each with the weights that one example has."""
    return lambda xs: (f(xs) * weights(f(xs)[0])).sum()


def inside_backward(f):
    def run(x):
        x = x.clone().requires_grad_()
        weighed(f)(x).backward()
        return x.grad

    return run


def inside_autograd_grad(f):
    def run(x):
        x = x.clone() if x.requires_grad else x.clone().requires_grad_()
        return torch.autograd.grad(weighed(f)(x), x, create_graph=True)[0]

    return run


def push_all(f, xs):
    return jvp(f, (xs,), (weights(xs[0]).expand_as(xs),))


INSIDE = {
    "grad": (lambda f: grad(weighed(f)), lambda f, xs: grad(of_all(f))(xs)),
    "vjp": (lambda f: lambda x: pulled(f, x)[1][0], lambda f, xs: grad(of_all(f))(xs)),
    "jvp": (lambda f: lambda x: pushed(f, x), push_all),
    "linearize": (lambda f: lambda x: linearized(f, x), push_all),
    "jacrev": (jacrev, each_row),
    "jacobian": (jacobian, each_row),
    "jacfwd": (jacfwd, each_column),
    "hessian": (
        lambda f: hessian(weighed(f)),
        lambda f, xs: each_column(lambda xs: grad(of_all(f))(xs), xs),
    ),
    "backward": (inside_backward, lambda f, xs: grad(of_all(f))(xs)),
    "autograd.grad": (inside_autograd_grad, lambda f, xs: grad(of_all(f))(xs)),
    "jit": (jit, lambda f, xs: f(xs)),
    "grad of grad": (
        lambda f: grad(lambda x: grad(weighed(f))(x).sin().sum()),
        lambda f, xs: grad(lambda xs: grad(of_all(f))(xs).sin().sum())(xs),
    ),
    "vmap further in": (
        lambda f: lambda x: vmap(lambda s: f(s * x))(torch.tensor([1.0, 2.0]).double()),
        lambda f, xs: torch.stack([f(xs), f(2 * xs)], 1),
    ),
    "grad of vmap further in": (
        lambda f: grad(lambda x: weighed(vmap(lambda s: f(s * x)))(torch.ones(2).double())),
        lambda f, xs: grad(
            lambda xs: (torch.stack([f(xs)] * 2, 1) * weights(torch.stack([f(xs)[0]] * 2))).sum()
        )(xs),
    ),
}
