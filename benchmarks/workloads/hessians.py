"""Second derivatives: batched Hessians and Hessian-vector products."""

import torch

from registry import JIT, Contestants, contest, workload


@workload(
    "batched-hessian",
    "`vmap(hessian)` of a 16-32-1 perceptron at 64 points",
    limits={(JIT, 2): 0.6},
)
def batched_hessian(device: torch.device) -> Contestants:
    return at_points(device, 64)


@workload(
    "batched-hessian-einsum",
    "the same; by hand `torch.einsum` sums the rank-one matrices of the hidden units",
    limits={(JIT, 2): 0.6},
)
def batched_hessian_by_einsum(device: torch.device) -> Contestants:
    return at_points(device, 64, by_einsum=True)


@workload(
    "batched-hessian-fastmath",
    "`batched-hessian` with `jit(fastmath=True)`",
    limits={(JIT, 2): 0.6},
)
def batched_hessian_by_fastmath(device: torch.device) -> Contestants:
    return at_points(device, 64, fastmath=True)


def at_points(
    device: torch.device,
    examples: int,
    hidden_units: int = 32,
    *,
    by_einsum: bool = False,
    fastmath: bool = False,
) -> Contestants:
    first = torch.randn(hidden_units, 16, device=device) / 4
    bias = torch.randn(hidden_units, device=device)
    second = torch.randn(hidden_units, device=device)
    points = torch.randn(examples, 16, device=device)

    def function(x):
        return second @ torch.tanh(first @ x + bias)

    def transformed(api):
        hessians = api.vmap(api.hessian(function))
        return lambda: hessians(points)

    def handwritten():
        hidden = torch.tanh(torch.addmm(bias, points, first.T))
        # The second derivative of tanh is -2 tanh (1 - tanh^2).
        curvature = -2 * second * hidden * (1 - hidden * hidden)
        if by_einsum:
            return torch.einsum("nh,hi,hj->nij", curvature, first, first)
        # Summing rank-one matrices over the hidden units is one matrix product for all points.
        squares = (first.unsqueeze(2) * first.unsqueeze(1)).flatten(1)
        return (curvature @ squares).view(examples, 16, 16)

    def by_jax(jax):
        def function(x, first, bias, second):
            return second @ jax.numpy.tanh(first @ x + bias)

        hessians = jax.vmap(jax.hessian(function), (0, None, None, None))
        return hessians, (points, first, bias, second)

    return contest(transformed, handwritten, by_jax=by_jax, fastmath=fastmath)


class Regression:
    """Mean squared error of a 32-64-1 perceptron over 64 examples, in its parameters."""

    def __init__(self, device: torch.device) -> None:
        shapes = {"first": (32, 64), "bias": (64,), "second": (64, 1)}
        self.parameters = {
            name: torch.randn(*shape, device=device) / shape[0] ** 0.5
            for name, shape in shapes.items()
        }
        self.direction = {name: torch.randn_like(value) for name, value in self.parameters.items()}
        self.inputs = torch.randn(64, 32, device=device)
        self.targets = torch.randn(64, 1, device=device)

    def loss(self, p: dict[str, torch.Tensor]) -> torch.Tensor:
        prediction = torch.tanh(self.inputs @ p["first"] + p["bias"]) @ p["second"]
        return (prediction - self.targets).square().mean()

    def double_backward(self) -> dict[str, torch.Tensor]:
        """The Hessian-vector product by differentiating the gradient once more."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        variables = list(leaves.values())
        grads = torch.autograd.grad(self.loss(leaves), variables, create_graph=True)
        products = torch.autograd.grad(grads, variables, list(self.direction.values()))
        return dict(zip(leaves, products, strict=True))


@workload(
    "hvp-forward-over-reverse", "Hessian-vector product by `jvp` of `grad`", limits={(JIT, 2): 0.7}
)
def hvp_forward_over_reverse(device: torch.device) -> Contestants:
    problem = Regression(device)

    def transformed(api):
        gradient = api.grad(problem.loss)
        return lambda: api.jvp(gradient, (problem.parameters,), (problem.direction,))[1]

    return contest(transformed, problem.double_backward)


@workload(
    "hvp-reverse-over-reverse",
    "Hessian-vector product by `grad` of a product with `grad`",
    limits={(JIT, 2): 0.7},
)
def hvp_reverse_over_reverse(device: torch.device) -> Contestants:
    problem = Regression(device)

    def transformed(api):
        gradient = api.grad(problem.loss)

        def slope(p):
            grads = gradient(p)
            return sum((grads[name] * problem.direction[name]).sum() for name in grads)

        product = api.grad(slope)
        return lambda: product(problem.parameters)

    return contest(transformed, problem.double_backward)
