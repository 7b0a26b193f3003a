"""Derivatives that torch's engine takes: a GPU's are taken in threads of the device.

Whatever forall keeps for each thread has to be there in those threads too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap
from gpu.checks import Check, assert_same, gradients, numbers, second_call_of, total
from oracle import loop


class Exponential(torch.autograd.Function):
    """Its derivative is twice the right one: whether this backward runs shows."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Cubed(torch.autograd.Function):
    """Another custom Function is called in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return Exponential.apply(ctx.saved_tensors[0]) * g


class ByAutograd(torch.autograd.Function):
    """Its backward asks torch.autograd for a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.sin().sum(), leaf)
        return 3 * g * slope * x


class Divergence(torch.autograd.Function):
    """Its backward has a test that examples answer in different ways."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 if x.sum() > 0 else g * x


def hooked(x: Tensor) -> Tensor:
    y = x.sin() * x
    if y.requires_grad:
        y.register_hook(lambda g: g * torch.ones_like(g) * 3)
    return y.exp()


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda x: x.sin() * x.exp(), x, use_reentrant=False)


def packed(x: Tensor) -> Tensor:
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t * 2, lambda t: t / 2):
        return (x.sin() * x).exp()


def with_gradient_inside(x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    value = Cubed.apply(leaf) + checkpointed(leaf)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return slope * x


def with_backward_inside(x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    Cubed.apply(leaf * 2).sum().backward()
    assert leaf.grad is not None
    return leaf.grad * x


def fitted(kind: Callable[..., torch.optim.Optimizer]) -> Callable[[Tensor], Tensor]:
    def fit(x: Tensor) -> Tensor:
        w = torch.zeros_like(x, requires_grad=True)
        optimizer = kind([w], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((w * x.detach()).sum() - 1).square().backward()
            optimizer.step()
        return w.detach() + x

    return fit


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a custom Function": lambda x: Exponential.apply(x) * x,
    "a Function in another's backward": lambda x: Cubed.apply(x) + x.sin(),
    "autograd in a backward": ByAutograd.apply,
    "a backward that parts": Divergence.apply,
    "a hook": hooked,
    "a checkpoint": checkpointed,
    "saved tensors' hooks": packed,
    "autograd.grad inside": with_gradient_inside,
    "backward() inside": with_backward_inside,
    "SGD inside": fitted(torch.optim.SGD),
    "Adam inside": fitted(torch.optim.Adam),
}


def scalar(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: total(f(x))


def slope(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient of a scalar function, that can be differentiated again."""

    def run(x: Tensor) -> Tensor:
        x = x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
        y = f(x)
        if not y.requires_grad:
            return torch.zeros_like(x)
        return torch.autograd.grad(y, x, create_graph=True, materialize_grads=True)[0]

    return run


def rows(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        x = x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
        y = f(x)
        if not y.requires_grad:
            return x.new_zeros(len(y), *x.shape)
        options = {"create_graph": True, "retain_graph": True, "materialize_grads": True}
        return torch.stack([torch.autograd.grad(e, x, **options)[0] for e in y])

    return run


# Of a function of a vector: ours, and the truth by torch's autograd.
VERBS: dict[str, tuple[Callable, Callable]] = {
    "vmap": (vmap, loop),
    "vmap of grad": (lambda f: vmap(grad(scalar(f))), lambda f: loop(slope(scalar(f)))),
    "vmap of jacrev": (lambda f: vmap(jacrev(f)), lambda f: loop(rows(f))),
    "vmap of vjp": (
        lambda f: vmap(lambda x: vjp(f, x)[1](x.cos())[0]),
        lambda f: loop(lambda x: x.cos() @ rows(f)(x)),
    ),
    "grad of vmap": (lambda f: grad(scalar(vmap(f))), lambda f: slope(scalar(loop(f)))),
    "jacrev of vmap": (
        lambda f: lambda xs: jacrev(lambda x: vmap(f)(x).flatten())(xs),
        lambda f: lambda xs: rows(lambda x: loop(f)(x).flatten())(xs),
    ),
    "jit of vmap of grad": (
        lambda f: second_call_of(jit(vmap(grad(scalar(f))))),
        lambda f: loop(slope(scalar(f))),
    ),
}
TWICE = {
    "vmap of hessian": (
        lambda f: vmap(hessian(scalar(f))),
        lambda f: loop(rows(slope(scalar(f)))),
    ),
    "vmap of jacfwd": (lambda f: vmap(jacfwd(f)), lambda f: loop(rows(f))),
    "vmap of jacrev of grad": (
        lambda f: vmap(jacrev(grad(scalar(f)))),
        lambda f: loop(rows(slope(scalar(f)))),
    ),
    "vmap of jvp": (
        lambda f: vmap(lambda x: jvp(f, (x,), (x.cos(),))[1]),
        lambda f: loop(lambda x: rows(f)(x) @ x.cos()),
    ),
    "vmap of linearize": (
        lambda f: vmap(lambda x: linearize(f, x)[1](x.cos())),
        lambda f: loop(lambda x: rows(f)(x) @ x.cos()),
    ),
}
# What forward mode, or a second derivative, says of these is another question than the loop's.
ONCE = {"autograd in a backward", "a hook", "saved tensors' hooks"}
PARTS = {"a backward that parts"}
UNRECORDED = {"backward() inside", "SGD inside", "Adam inside"}


def checks(device: torch.device) -> list[Check]:
    xs = numbers(device, 4, 3) * 0.5

    def of(name: str, verb: str, outside: str) -> Callable[[], None]:
        ours, truth = (VERBS | TWICE)[verb]

        def run() -> None:
            both = []
            for transform in (truth, ours):
                w = numbers(device, 3, seed=1).requires_grad_(outside == "a leaf outside")
                x = xs.clone().requires_grad_(outside == "the argument")
                y = transform(lambda x: FUNCTIONS[name](x * w) + 0 * w)(x)  # noqa: B023
                given = [t for t in (w, x) if t.requires_grad]
                grads = []
                if given and y.requires_grad:
                    grads = torch.autograd.grad(total(y), given, materialize_grads=True)
                elif given:
                    grads = [torch.zeros_like(t) for t in given]
                both.append([y.detach(), *grads])
            assert_same(both[1], both[0])

        return run

    found = []
    for name in FUNCTIONS:
        for verb in (*VERBS, *(() if name in ONCE else TWICE)):
            for outside in ("nothing", "a leaf outside", "the argument"):
                # Examples diverge inside vmap alone, and jit is about what can be recorded.
                if name in PARTS and not (verb.startswith("vmap of") and outside == "nothing"):
                    continue
                if verb.startswith("jit") and (outside != "nothing" or name in UNRECORDED):
                    continue
                text = f"{verb}, {name}, {outside} requires grad"
                found.append(Check(text, of(name, verb, outside)))
    return [*found, Check("calls in four threads at once", lambda: in_threads(device))]


def in_threads(device: torch.device) -> None:
    """Transforms of several threads of the caller's do not see each other."""
    stacks = [numbers(device, 5, 3, seed=i) for i in range(4)]
    found: list[list[Tensor]] = [[] for _ in stacks]
    raised: list[BaseException] = []

    def run(i: int) -> None:
        try:
            for _ in range(10):
                found[i].append(vmap(grad(scalar(Cubed.apply)))(stacks[i]))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(stacks))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if raised:
        raise raised[0]
    for given, results in zip(stacks, found, strict=True):
        (truth,) = loop(lambda x: gradients(Cubed.apply)(x))(given)
        for result in results:
            assert_same(result, truth)
