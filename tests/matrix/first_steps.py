"""What someone runs first after ``pip install``; needs torch and forall alone."""

import torch

import forall

xs = torch.randn(5, 3, dtype=torch.float64)


def f(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[0] = 2 * y[1]
    return (y * x).sum() if x.sum() > 0 else (y.exp() * x).sum()


for transform in (forall.grad, forall.hessian, forall.jacrev, forall.jacfwd):
    one_by_one = torch.stack([transform(f)(x) for x in xs])
    torch.testing.assert_close(forall.vmap(transform(f))(xs), one_by_one)
jitted = forall.jit(forall.vmap(forall.hessian(lambda x: (x.sin() * x).prod())))
torch.testing.assert_close(
    jitted(xs), forall.vmap(forall.hessian(lambda x: (x.sin() * x).prod()))(xs)
)
g = torch.stack([torch.autograd.functional.jacobian(f, x) for x in xs])
torch.testing.assert_close(forall.vmap(forall.grad(f))(xs), g)
torch.testing.assert_close(forall.jvp(f, (xs[0],), (xs[1],))[1], g[0] @ xs[1])
print("ok")
