"""Jacobians at one point, and a linearisation applied to several tangents."""

import torch

import forall
from registry import JIT, Contestants, assert_agree, contest, workload

WIDTH, TANGENTS = 64, 16


class Perceptron:
    """x -> second tanh(first x + bias1) + bias2 on a vector, and its derivative in closed form."""

    def __init__(self, device: torch.device) -> None:
        self.first = torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5
        self.bias1 = torch.randn(WIDTH, device=device)
        self.second = torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5
        self.bias2 = torch.randn(WIDTH, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second @ torch.tanh(self.first @ x + self.bias1) + self.bias2

    def jacobian(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.addmv(self.bias1, self.first, x))
        return (self.second * (1 - hidden * hidden)) @ self.first

    def by_jax(self, jax, x: torch.Tensor):
        def function(x, first, bias1, second, bias2):
            return second @ jax.numpy.tanh(first @ x + bias1) + bias2

        return function, (x, self.first, self.bias1, self.second, self.bias2)


@workload("jacrev", "`jacrev` of a 64-64-64 perceptron at one point", limits={(JIT, 2): 1.0})
def jacrev(device: torch.device) -> Contestants:
    function = Perceptron(device)
    x = torch.randn(WIDTH, device=device)

    def transformed(api):
        jacobian = api.jacrev(function)
        return lambda: jacobian(x)

    def by_jax(jax):
        f, given = function.by_jax(jax, x)
        return jax.jacrev(f), given

    return contest(transformed, lambda: function.jacobian(x), by_jax=by_jax)


@workload("jacfwd", "`jacfwd` of the same perceptron", limits={(JIT, 2): 1.2})
def jacfwd(device: torch.device, *, fastmath: bool = False) -> Contestants:
    function = Perceptron(device)
    x = torch.randn(WIDTH, device=device)

    def transformed(api):
        jacobian = api.jacfwd(function)
        return lambda: jacobian(x)

    def by_jax(jax):
        f, given = function.by_jax(jax, x)
        return jax.jacfwd(f), given

    return contest(transformed, lambda: function.jacobian(x), by_jax=by_jax, fastmath=fastmath)


@workload(
    "jacfwd-fastmath",
    "the same with `jit(fastmath=True)`",
    limits={(JIT, 2): 1.2},
)
def jacfwd_fastmath(device: torch.device) -> Contestants:
    return jacfwd(device, fastmath=True)


@workload("jacrev-gelu", "`jacrev` of a 64-1024-64 perceptron with GELU (by tanh) at one point")
def jacrev_gelu(device: torch.device) -> Contestants:
    first = torch.randn(1024, WIDTH, device=device) / WIDTH**0.5
    second = torch.randn(WIDTH, 1024, device=device) / 1024**0.5
    x = torch.randn(WIDTH, device=device)

    def function(x):
        return second @ torch.nn.functional.gelu(first @ x, approximate="tanh")

    def transformed(api):
        jacobian = api.jacrev(function)
        return lambda: jacobian(x)

    def handwritten():
        h = first @ x
        inner = (2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)
        tanh = torch.tanh(inner)
        bend = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * h * h)
        slope = 0.5 * (1 + tanh) + 0.5 * h * (1 - tanh * tanh) * bend
        return (second * slope) @ first

    return contest(transformed, handwritten)


@workload("linearize", f"`linearize` at a point, then {TANGENTS} tangents one after the other")
def linearize(device: torch.device) -> Contestants:
    function = Perceptron(device)
    x = torch.randn(WIDTH, device=device)
    # One after the other, as an iterative solver would ask for them.
    tangents = list(torch.randn(TANGENTS, WIDTH, device=device))

    def network(x):  # calls of a function are counted together, those of an object are not
        return function(x)

    def transformed(api):
        def program():
            value, push_forward = api.linearize(network, x)
            return value, [push_forward(tangent) for tangent in tangents]

        return program

    def handwritten():
        f = function
        hidden = torch.tanh(torch.addmv(f.bias1, f.first, x))
        slope = 1 - hidden * hidden
        pushed = [f.second @ (slope * (f.first @ tangent)) for tangent in tangents]
        return torch.addmv(f.bias2, f.second, hidden), pushed

    return contest(transformed, handwritten)


@workload(
    "jacobian-tall",
    "`jacobian` of 32 numbers to 2048, with rows and with columns",
    names=("forall", "jacrev", "jacfwd"),
    limits={(0, 1): 0.5},
)
def jacobian_tall(device: torch.device) -> Contestants:
    weight, x = torch.randn(2048, 32, device=device), torch.randn(32, device=device)

    def function(x):
        return torch.tanh(weight @ x)

    verbs = [verb(function) for verb in (forall.jacobian, forall.jacrev, forall.jacfwd)]
    programs = (lambda: verbs[0](x), lambda: verbs[1](x), lambda: verbs[2](x))
    return Contestants(programs, lambda actual, expected: assert_agree(actual, expected, 1e-5))
