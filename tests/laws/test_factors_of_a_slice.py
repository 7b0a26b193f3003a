"""Derivatives of what is factored are right, however the examples lie in memory.

The kernels of determinants and systems of equations factor the transpose of a contiguous matrix,
and torch's formulas ask the matrix whether it was. One example may be contiguous in a stack that is
not.
"""

import pytest
import torch

from draws import make_generator
from forall import grad, jit, jvp, vmap

D = torch.float64
M = torch.randn(4, 5, 3, 3, dtype=D, generator=make_generator(0))
B = torch.randn(4, 3, 2, dtype=D, generator=make_generator(1))

FUNCTIONS = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "complex slogdet": lambda a: torch.linalg.slogdet(a * (1 + 2j))[1],
    "inv": lambda a: torch.linalg.inv(a).sin().sum((-2, -1)),
    "solve": lambda a: torch.linalg.solve(a, B[0]).sin().sum((-2, -1)),
    "solve for a vector": lambda a: torch.linalg.solve(a, B[0, :, 0]).sin().sum(-1),
    "solve from the right": lambda a: (
        torch.linalg.solve(a, B[0].mT, left=False).sin().sum((-2, -1))
    ),
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0].sin().sum((-2, -1)),
    "solve with lu_factor": lambda a: (
        torch.linalg.lu_solve(*torch.linalg.lu_factor(a), B[0]).sin().sum((-2, -1))
    ),
}
# Each of four examples out of what is mapped over.
PLACES = {
    "a slice of an example": (M, 0, lambda x: x[1]),
    "a slice of one that was computed": (M, 0, lambda x: x.exp()[2]),
    "examples in the middle": (M.movedim(0, 2), 2, lambda x: x[1]),
    "examples at the end": (M.movedim(0, -1), -1, lambda x: x[1]),
    "a transpose": (M, 0, lambda x: x[1].mT),
    "columns": (M, 0, lambda x: x[:3, :, 0]),
    "a slice of a batch": (M, 0, lambda x: x[1:4]),
    "a batch of transposes": (M, 0, lambda x: x[::2].mT),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_and_tangents_are_the_loops(name, place):
    stack, axis, cut = PLACES[place]
    f = FUNCTIONS[name]

    def one(x):
        return f(cut(x)).sum()

    def autograd(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(one(x), x)[0]

    rows = stack.movedim(axis, 0)
    truth = torch.stack([autograd(x) for x in rows])
    pushed = torch.stack([(autograd(x) * x.cos()).sum() for x in rows])
    found = vmap(grad(one), in_dims=axis)
    torch.testing.assert_close(found(stack), truth)
    torch.testing.assert_close(jit(found)(stack), truth)
    torch.testing.assert_close(
        vmap(lambda x: jvp(one, (x,), (x.cos(),))[1], in_dims=axis)(stack), pushed
    )
    whole = grad(lambda s: vmap(one, in_dims=axis)(s).sum())(stack).movedim(axis, 0)
    torch.testing.assert_close(whole, truth)
