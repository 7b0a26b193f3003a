"""Tensors of a class of the user's mean inside a transform what they mean in the loop.

Each class is made inside, passed as an argument (mapped and not), captured and returned. The loop
on plain tensors with torch's autograd says what methods, attributes and results there are.
"""

import copy

import pytest
import torch
from torch import nn

import forall
from forall import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jit,
    jvp,
    linearize,
    per_example_grad_norm,
    vjp,
    vmap,
)

D = torch.float64
Tensor = torch.Tensor


def numbers(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# --- the classes ----------------------------------------------------------------------------------


class Methods(Tensor):
    """Has methods and a property, and one that takes the place of a method of Tensor."""

    def twice(self):
        return self * 2

    @property
    def value(self):
        return self.as_subclass(Tensor).abs().sum()

    def norm(self):
        return self.as_subclass(Tensor).square().sum()

    def sin(self):
        return super().sin() + 1


class Tagged(Tensor):
    """Hands an attribute on to what is computed from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        tags = [a.level for a in args if isinstance(a, Tagged) and hasattr(a, "level")]
        if isinstance(out, Tagged) and tags:
            out.level = tags[0]
        return out


class Quantity(Tensor):
    """Is made with its unit, and tells units apart in products and sums."""

    @staticmethod
    def __new__(cls, data, unit):
        return data.as_subclass(cls)

    def __init__(self, data, unit):
        self.unit = unit

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = list(args)
        units = [a.unit for a in args if isinstance(a, Quantity) and hasattr(a, "unit")]
        if func in (torch.add, Tensor.add) and len(set(units)) > 1:
            raise ValueError(f"units {units}")
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Quantity) and units:
            out.unit = "*".join(units) if func in (torch.mul, Tensor.mul) else units[0]
        return out


class CosForSin(Tensor):
    """Changes what a function means."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.sin, Tensor.sin):
            func = torch.cos
        return super().__torch_function__(func, types, args, kwargs or {})


class Quiet(CosForSin):
    """The same, and what is computed from it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.sin, Tensor.sin):
            func = torch.cos
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OldStyle(Tensor):
    """Switches all of __torch_function__ off where it computes, as older code does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not isinstance(out, OldStyle):
            out = out.as_subclass(OldStyle)
        return out

    def twice(self):
        return self * 2


class Weight(nn.Parameter):
    """A parameter with a method."""

    def twice(self):
        return self * 2


class Slotted(Tensor):
    """Keeps its attribute in a slot."""

    __slots__ = ("axis",)


def plain(x):
    return Tensor.as_subclass(x, Tensor)


def tagged(x, tag):
    x = x.as_subclass(Tagged)
    x.level = tag
    return x


def slotted(x):
    y = x.as_subclass(Slotted)
    y.axis = 3.0
    return y


def in_place(x):
    y = (x * 1).as_subclass(Methods)
    y.mul_(3)
    y[0] = y[1] * 2
    return plain(y.twice())


def with_dict(x):
    y = x.as_subclass(Methods)
    y.family, y.level = "mine", 2.0
    z = y * 1
    z.__dict__.update(y.__dict__)
    assert z.__dict__ == {"family": "mine", "level": 2.0}
    return plain(z * z.level)


def asked(x):
    y = x.as_subclass(Methods)
    assert isinstance(y, Methods)
    assert issubclass(type(y), Methods)
    assert type(y) == Methods  # noqa: E721
    assert y.__class__ is Methods
    assert not isinstance(y, Tagged)
    assert isinstance(y * 2, Methods)
    assert not isinstance(plain(y), Methods)
    assert not isinstance(x, Methods)
    assert isinstance(type(y)(x), Methods)
    assert {Methods: 1}[type(y)] == 1
    assert y.shape == x.shape
    assert isinstance(copy.copy(y), Methods)
    return plain(y)


def with_mixed_classes(x):
    with pytest.raises(TypeError):
        x.as_subclass(Methods) + x.as_subclass(Slotted)
    return x


# Functions of a vector, in each of which a class is made.
MADE = {
    "as_subclass": lambda x: plain(x.as_subclass(Methods).twice()) + 1,
    "unbound as_subclass": lambda x: plain(Tensor.as_subclass(x, Methods).twice()) * x,
    "constructor": lambda x: plain(Methods(x) * x),
    "_make_subclass": lambda x: plain(Tensor._make_subclass(Methods, x).twice()) * x,
    "property": lambda x: x.as_subclass(Methods).value * x,
    "method in the place of Tensor's": lambda x: x.as_subclass(Methods).norm() * x,
    "super": lambda x: plain(x.as_subclass(Methods).sin()),
    "attribute": lambda x: plain(tagged(x, 3.0) * tagged(x, 3.0).level),
    "attribute handed on": lambda x: plain(tagged(x, 3.0).exp()) * tagged(x, 3.0).exp().level,
    "own constructor": lambda x: plain(Quantity(x, "m") * Quantity(x, "s"))
    * len((Quantity(x, "m") * Quantity(x, "s")).unit),
    "meaning changed": lambda x: plain(torch.sin(x.as_subclass(CosForSin))),
    "method's meaning changed": lambda x: plain(x.as_subclass(CosForSin).sin()),
    "ordinary results": lambda x: x.as_subclass(Quiet).sin().sin(),
    "functions off": lambda x: plain(x.as_subclass(OldStyle).twice().exp()),
    "operators mixed": lambda x: plain(1 + x.as_subclass(Methods) * x),
    "slots": lambda x: slotted(x).axis * plain(slotted(x)),
    "in place": in_place,
    "attributes with our names": with_dict,
    "questions": asked,
    "lists": lambda x: plain(torch.stack([x.as_subclass(Methods), x.as_subclass(Methods)]).twice()),
    "torch functions": lambda x: plain(torch.cat([x.as_subclass(Methods), x]).view(2, -1).sum(0)),
    "index": lambda x: plain(x.as_subclass(Methods)[1:].twice()),
    "two classes": with_mixed_classes,
    "of numbers": lambda x: plain(Methods([1.0, 2.0]).twice()).sum() * x,
    "deep copy": lambda x: copy.deepcopy(x.detach().as_subclass(Methods)).value * x,
}


def looped(f):
    def of_all(*xs):
        return torch.stack([f(*(x[i] for x in xs)) for i in range(len(xs[0]))])

    return of_all


def jacobian(f):
    def of(x):
        return torch.autograd.functional.jacobian(lambda x: plain(f(x)), x, create_graph=True)

    return of


def second(f):
    return jacobian(lambda x: jacobian(lambda x: plain(f(x)).sum())(x))


def same(mine, theirs):
    torch.testing.assert_close(plain(mine), plain(theirs), rtol=1e-10, atol=1e-10)


WAYS = {
    "vmap": (lambda f: vmap(f), lambda f: looped(f), numbers(4, 3)),
    "vmap in_dims 1": (
        lambda f: vmap(f, in_dims=1),
        lambda f: lambda x: looped(f)(x.mT),
        numbers(3, 4),
    ),
    "vmap vmap": (
        lambda f: vmap(vmap(f)),
        lambda f: looped(looped(f)),
        numbers(2, 4, 3),
    ),
    "jacrev": (lambda f: jacrev(f), jacobian, numbers(3)),
    "jacfwd": (lambda f: jacfwd(f), jacobian, numbers(3)),
    "grad": (
        lambda f: grad(lambda x: plain(f(x)).sum()),
        lambda f: jacobian(lambda x: plain(f(x)).sum()),
        numbers(3),
    ),
    "hessian": (lambda f: hessian(lambda x: plain(f(x)).sum()), second, numbers(3)),
    "grad grad": (
        lambda f: grad(lambda x: grad(lambda x: plain(f(x)).sum())(x).sum()),
        lambda f: lambda x: second(f)(x).sum(0),
        numbers(3),
    ),
    "vmap grad": (
        lambda f: vmap(grad(lambda x: plain(f(x)).sum())),
        lambda f: looped(jacobian(lambda x: plain(f(x)).sum())),
        numbers(4, 3),
    ),
    "vmap jacfwd": (
        lambda f: vmap(jacfwd(f)),
        lambda f: looped(jacobian(f)),
        numbers(4, 3),
    ),
    "vmap hessian": (
        lambda f: vmap(hessian(lambda x: plain(f(x)).sum())),
        lambda f: looped(second(f)),
        numbers(2, 3),
    ),
    "grad vmap": (
        lambda f: grad(lambda x: plain(vmap(f)(x)).sum()),
        lambda f: jacobian(lambda x: plain(looped(f)(x)).sum()),
        numbers(4, 3),
    ),
    "jacfwd vmap": (
        lambda f: jacfwd(lambda x: vmap(f)(x)),
        lambda f: jacobian(looped(f)),
        numbers(2, 3),
    ),
    "jvp": (
        lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1],
        lambda f: lambda x: jacobian(f)(x).sum(-1),
        numbers(3),
    ),
    "vjp": (
        lambda f: lambda x: vjp(f, x)[1](torch.ones(f(x).shape, dtype=D))[0],
        lambda f: lambda x: jacobian(f)(x).sum(0),
        numbers(3),
    ),
    "linearize": (
        lambda f: lambda x: linearize(f, x)[1](torch.ones_like(x)),
        lambda f: lambda x: jacobian(f)(x).sum(-1),
        numbers(3),
    ),
    "jit vmap": (lambda f: jit(vmap(f)), lambda f: looped(f), numbers(4, 3)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_a_class_made_inside_is_the_loops(made, way):
    f, (mine, theirs, x) = MADE[made], WAYS[way]
    same(mine(f)(x), theirs(f)(x))
