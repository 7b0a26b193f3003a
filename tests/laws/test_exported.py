"""An exported module computes what the module does, for other inputs too, with transforms in it."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

import forall

X = torch.linspace(-1, 1, 12).reshape(4, 3)
MORE = torch.linspace(-2, 1, 21).reshape(7, 3)
INTO = torch.tensor([1, 1])


class Net(torch.nn.Module):
    """A small network; ``call`` says what is computed with it."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
        )
        self.norm = torch.nn.LayerNorm(3)
        self.scale = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
        self.call = call

    def forward(self, x):
        return self.call(self, x)

    def of(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale

    def normed(self, x: Tensor) -> Tensor:
        return self.of(self.norm(x))

    def energy(self, x: Tensor) -> Tensor:
        return self.of(x).square().sum()

    def loss(self, p: dict, x: Tensor) -> Tensor:
        return functional_call(self.body, p, (x,)).square().sum()


def written(x: Tensor) -> Tensor:
    out = torch.zeros(3, 3)
    out.diagonal().copy_(x)
    return out.index_add_(0, INTO, torch.stack([x, x])) @ x


def step(net: Net, x: Tensor) -> Tensor:
    """An optimizer's step for each example."""
    p = x.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=0.1)
    with torch.enable_grad():
        net.energy(p).backward()
    optimizer.step()
    return p.detach() * net.scale[0]


CALLS = {
    "vmap": lambda net, x: forall.vmap(net.of)(x),
    "nested vmap": lambda net, x: forall.vmap(forall.vmap(lambda y: y * net.scale.sum()))(x),
    "vmap with dims": lambda net, x: forall.vmap(torch.sin, 1, 1)(x) * net.scale[0],
    "grad": lambda net, x: forall.grad(net.energy)(x),
    "vjp": lambda net, x: forall.vjp(net.normed, x)[1](x[:, :2].exp())[0],
    "jvp": lambda net, x: forall.jvp(net.normed, (x,), (x.sin(),)),
    "linearize": lambda net, x: forall.linearize(net.normed, x)[1](x.exp()),
    "vmap of grad": lambda net, x: forall.vmap(forall.grad_and_value(net.energy))(x),
    "vmap of jacrev": lambda net, x: forall.vmap(forall.jacrev(net.normed))(x),
    "vmap of jacfwd": lambda net, x: forall.vmap(forall.jacfwd(net.of))(x),
    "vmap of hessian": lambda net, x: forall.vmap(forall.hessian(net.energy))(x),
    "vmap of laplacian": lambda net, x: forall.vmap(forall.laplacian(net.energy))(x),
    "gradients of each example": lambda net, x: forall.vmap(forall.grad(net.loss), (None, 0))(
        dict(net.body.named_parameters()), x
    ),
    "norms of each example": lambda net, x: forall.per_example_grad_norm(net.loss)(
        dict(net.body.named_parameters()), x
    ),
    "written inside": lambda net, x: forall.vmap(written)(x) * net.scale[1],
    "optimizer inside": lambda net, x: forall.vmap(lambda row: step(net, row))(x),
    "scan": lambda net, x: forall.vmap(
        lambda row: forall.scan(lambda c, a: (c.sin() + a, c * a), net.scale.sum(), row)
    )(x),
    "with ops around": lambda net, x: net.of(
        forall.vmap(forall.grad(net.energy))(net.scale[0] * x)
    ),
}
STATIC = ("vmap", "grad", "jvp")
NOT_STRICT = {
    "optimizer inside": "Dynamo does not read an optimizer's step",
}


def close(actual: object, expected: object) -> None:
    for a, e in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CALLS)
def test_exported_module_computes_what_the_module_does(name):
    """For any number of examples, which the program leaves open."""
    net = Net(CALLS[name])
    with torch.no_grad():
        exported = export(net, (X,), dynamic_shapes=({0: Dim("examples")},)).module()
    close(exported(MORE), net(MORE))


@pytest.mark.parametrize("name", STATIC)
def test_exported_module_of_one_number_of_examples(name):
    net = Net(CALLS[name])
    with torch.no_grad():
        exported = export(net, (X,)).module()
    close(exported(2 * X), net(2 * X))


class Counts(torch.nn.Module):
    """Examples add to a buffer, and update running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, xs):
        def one(x):
            self.sum.add_(x.sum(0))
            return self.norm(x)

        return forall.vmap(one)(xs)


def test_exported_writes_into_buffers():
    example, other = torch.stack([X, X.sin()]), torch.stack([X.cos(), 2 * X])
    eager, exported = Counts(), Counts()
    with torch.no_grad():
        exported = export(exported, (example,)).module()
    close(exported(other), eager(other))
    close(dict(exported.named_buffers()), dict(eager.named_buffers()))


def test_onnx():
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")
    runtime = pytest.importorskip("onnxruntime", reason="what is exported has to run")
    net = Net(CALLS["vmap of hessian"])
    dims = ({0: Dim("examples", min=2, max=64)},)
    with torch.no_grad():
        program = torch.onnx.export(net, (X,), dynamo=True, dynamic_shapes=dims)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: MORE.numpy()})
    close(torch.from_numpy(found), net(MORE))


@pytest.mark.sweep(10**6)  # the C++ compiler takes a minute
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_ahead_of_time(tmp_path):
    net = Net(CALLS["vmap of hessian"])
    dims = ({0: Dim("examples", min=2, max=64)},)
    with torch.no_grad():
        exported = export(net, (X,), dynamic_shapes=dims)
        package = str(tmp_path / "net.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=package)
        close(torch._inductor.aoti_load_package(package)(MORE), net(MORE))


@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_STRICT])
def test_strictly_exported_module_computes_what_the_module_does(name):
    """Dynamo reads the module's Python; each call of a transform is a node of its graph."""
    net = Net(CALLS[name])
    with torch.no_grad():
        program = export(net, (X,), dynamic_shapes=({0: Dim("examples")},), strict=True)
    close(program.module()(MORE), net(MORE))


def test_derivatives_do_not_go_through_an_exported_transform():
    """They would be those of the operators recorded, which need not be the module's."""
    net = Net(lambda net, x: net.of(x) * forall.vmap(net.of)(x))
    with pytest.warns(
        UserWarning, match="Derivatives of the exported program do not go through"
    ) as told:
        exported = export(net, (X,)).module()
    assert told[0].filename == __file__
    (expected,) = torch.autograd.grad((net.of(X) * net.of(X).detach()).sum(), net.scale)
    (found,) = torch.autograd.grad(exported(X).sum(), exported.scale)
    close(found, expected)
    close(exported(X), net(X))
