"""Functions of a few numbers: the price of a call."""

import torch

from registry import REPLAYED, Contestants, contest, workload


def well(x: torch.Tensor) -> torch.Tensor:
    """Rosenbrock's function of two numbers."""
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def by_autograd(f, x: torch.Tensor):
    def handwritten():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    return handwritten


@workload(
    "grad-of-two-numbers",
    "`grad` of Rosenbrock's function of 2 numbers",
    limits={(REPLAYED, 1): 0.5},
)
def grad_of_two_numbers(device: torch.device) -> Contestants:
    x = torch.randn(2, device=device)

    def transformed(api):
        gradient = api.grad(well)
        return lambda: gradient(x)

    return contest(transformed, by_autograd(well, x), by_jax=lambda jax: (jax.grad(well), (x,)))


@workload(
    "vmap-grad-of-two-numbers",
    "`vmap(grad)` of the same at 64 points",
    limits={(REPLAYED, 1): 0.4},
)
def vmap_grad_of_two_numbers(device: torch.device) -> Contestants:
    xs = torch.randn(64, 2, device=device)

    def transformed(api):
        gradient = api.vmap(api.grad(well))
        return lambda: gradient(xs)

    return contest(transformed, by_autograd(lambda x: well(x.T).sum(), xs))


def oscillate(state: torch.Tensor) -> torch.Tensor:
    """Twenty steps of Van der Pol's oscillator: sums and products with constants."""
    x, v = state
    for _ in range(20):
        x, v = x + 0.05 * v, v + 0.05 * (1.5 * (1 - x * x) * v - x)
    return torch.stack([x, v])


def oscillate_with_tangent(state: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """The tangent of the same, written by hand."""
    (x, v), (dx, dv) = state, tangent
    for _ in range(20):
        slope = 1.5 * (1 - x * x)
        dx, dv = dx + 0.05 * dv, dv + 0.05 * (slope * dv - (3 * x * v + 1) * dx)
        x, v = x + 0.05 * v, v + 0.05 * (slope * v - x)
    return torch.stack([dx, dv])


@workload("jvp-with-constants", "`jvp` of 20 steps of 8 oscillators of Van der Pol")
def jvp_with_constants(device: torch.device) -> Contestants:
    # Of 0-d tensors torch.func gives tangents in float64.
    state, tangent = torch.randn(2, 2, 8, device=device)

    def transformed(api):
        return lambda: api.jvp(oscillate, (state,), (tangent,))[1]

    return contest(transformed, lambda: oscillate_with_tangent(state, tangent))


class Steps:
    """Batches, one after the other, and a perceptron's parameters: what a step closes over."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = torch.randn(8, 64, 16, device=device)
        self.targets = torch.randn(8, 64, 1, device=device)
        shapes = [(16, 32), (32,), (32, 1), (1,)]
        self.parameters = [torch.randn(*shape, device=device) / shape[0] ** 0.5 for shape in shapes]

        self.decay = 1e-3

    def by_autograd(self, loss) -> list[list[torch.Tensor]]:
        """The gradients of ``loss(parameters, x, y)`` of each batch."""
        found = []
        for x, y in zip(self.inputs, self.targets, strict=True):
            leaves = [p.detach().requires_grad_() for p in self.parameters]
            found.append([*torch.autograd.grad(loss(leaves, x, y), leaves)])
        return found

    def loss(self, parameters: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor):
        weights = parameters[0].square().sum() + parameters[2].square().sum()
        return (self.network(parameters, x) - y).square().mean() + self.decay * weights

    @staticmethod
    def network(parameters: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        first, bias1, second, bias2 = parameters
        return torch.tanh(x @ first + bias1) @ second + bias2


@workload(
    "steps-with-closures",
    "`grad` of a loss written as a closure over each of 8 batches, a 16-32-1 perceptron",
)
def steps_with_closures(device: torch.device) -> Contestants:
    steps = Steps(device)
    network, parameters = steps.network, steps.parameters

    def transformed(api):
        def program():
            found = []
            for x, y in zip(steps.inputs, steps.targets, strict=True):
                loss = lambda p, x=x, y=y: (network(p, x) - y).square().mean()  # noqa: E731
                found.append(api.grad(loss)(parameters))
            return found

        return program

    def handwritten():
        return steps.by_autograd(lambda p, x, y: (network(p, x) - y).square().mean())

    return contest(transformed, handwritten)


@workload(
    "steps-of-an-object",
    "`grad` of a method of an object, taken anew for each of 8 batches, the same perceptron",
)
def steps_of_an_object(device: torch.device) -> Contestants:
    steps = Steps(device)
    batches = [*zip(steps.inputs, steps.targets, strict=True)]

    def transformed(api):
        return lambda: [api.grad(steps.loss)(steps.parameters, x, y) for x, y in batches]

    return contest(transformed, lambda: steps.by_autograd(steps.loss))


@workload(
    "gradient-penalty",
    "the penalty of a critic's slopes (`vmap(grad)`) at 128 points, and its backward pass",
)
def gradient_penalty(device: torch.device) -> Contestants:
    critic = torch.nn.Sequential(
        torch.nn.Linear(2, 64),
        torch.nn.LeakyReLU(0.2),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1, bias=False),
    ).to(device)
    weights = [critic[0].weight, critic[2].weight, critic[2].bias, critic[4].weight]
    points = torch.randn(128, 2, device=device)

    def penalised(slopes):
        return torch.autograd.grad((slopes.norm(dim=1) - 1).square().mean(), weights)

    def transformed(api):
        return lambda: penalised(api.vmap(api.grad(lambda x: critic(x).sum()))(points))

    def handwritten():
        leaf = points.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(critic(leaf).sum(), leaf, create_graph=True)
        return penalised(slopes)

    return contest(transformed, handwritten)


@workload(
    "residuals-with-closures",
    "a heat equation's residual at 64 points, its functions written anew in each of 8 steps",
)
def residuals_with_closures(device: torch.device) -> Contestants:
    steps = Steps(device)
    network, parameters, points = steps.network, steps.parameters, steps.inputs

    def transformed(api):
        def program():
            found = []
            for xs in points:
                u = lambda x: network(parameters, x)[0]  # noqa: E731
                slope, curved = api.grad(u), api.hessian(u)
                residual = lambda x, c: slope(x)[0] - c * curved(x).trace()  # noqa: E731, B023
                found.append(api.vmap(residual, (0, None))(xs, 0.5))
            return found

        return program

    def handwritten():
        first, bias1, second, _ = parameters
        column, squares = second[:, 0], first.square().sum(0)
        found = []
        for xs in points:
            hidden = torch.tanh(torch.addmm(bias1, xs, first))
            slope = (1 - hidden * hidden) * column
            found.append(slope @ first[0] + (hidden * slope) @ squares)
        return found

    return contest(transformed, handwritten)
