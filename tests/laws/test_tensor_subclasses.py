"""Tensors of a class of the user's mean inside a transform what they mean in the loop.

Each class is made inside, passed as an argument (mapped and not), captured and returned. The loop
on plain tensors with torch's autograd says what methods, attributes and results there are.
"""

import copy

import pytest
import torch
from torch import nn

import forall
from draws import make_generator
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
    return torch.randn(shape, dtype=D, generator=make_generator(seed))


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
        _ = x.as_subclass(Methods) + x.as_subclass(Slotted)
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
    "own constructor": lambda x: (
        plain(Quantity(x, "m") * Quantity(x, "s")) * len((Quantity(x, "m") * Quantity(x, "s")).unit)
    ),
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
        lambda f: lambda x: jacobian(f)(x).reshape(-1, 3).sum(0),
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


# --- arguments ------------------------------------------------------------------------------------


def quantity(x):
    return Quantity(x, "m")


CLASSES = {
    "methods": lambda x: x.as_subclass(Methods),
    "tagged": lambda x: tagged(x, 2.0),
    "quantity": quantity,
    "cos for sin": lambda x: x.as_subclass(CosForSin),
    "quiet": lambda x: x.as_subclass(Quiet),
    "old style": lambda x: x.as_subclass(OldStyle),
}


def looked_at(x):
    """What a function can tell of its argument, as a number."""
    assert isinstance(x, Tensor)
    y = x
    if isinstance(x, (Methods, OldStyle)):
        y = x.twice()
    if isinstance(x, Tagged):
        y = x * x.level
    if isinstance(x, Quantity):
        y = x * len((x * x).unit)
    return plain(y.sin() * x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.filterwarnings("ignore:jit")  # programs are for plain tensors
def test_an_argument_of_a_class_is_the_loops(kind, way):
    mine, theirs, x = WAYS[way]
    dressed = CLASSES[kind]

    def example(x):
        """Of this class, as the loop picks it from what is mapped over."""
        for _ in range(way.split().count("vmap")):
            x = x[None]
        x = dressed(x)
        for _ in range(way.split().count("vmap")):
            x = x.select(0, 0)
        return x

    same(mine(looked_at)(dressed(x)), theirs(lambda x: looked_at(example(x)))(x))


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:jit")
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "call",
    [
        lambda c, xs: vmap(lambda c, x: looked_at(c) * x, in_dims=(None, 0))(c, xs),
        lambda c, xs: vmap(lambda x: looked_at(c) * x)(xs),
        lambda c, xs: vmap(lambda t: looked_at(t["c"][0]) * t["x"], in_dims=({"c": None, "x": 0},))(
            {"c": (c,), "x": xs}
        ),
        lambda c, xs: vmap(lambda x, c: looked_at(c) * x)(xs, c=c),
        lambda c, xs: jit(vmap(lambda x: looked_at(c) * x))(xs),
        lambda c, xs: vmap(vmap(lambda x: looked_at(c) * x))(xs[None])[0],
    ],
)
def test_a_class_that_is_shared_is_the_very_object(call, kind):
    c, xs = CLASSES[kind](numbers(3, seed=5)), numbers(4, 3)
    same(call(c, xs), looked_at(c) * xs)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_in_a_tree_of_arguments_is_the_loops(kind):
    dressed, x, y = CLASSES[kind], numbers(4, 3), numbers(4, 3, seed=1)
    f = lambda t: looked_at(t["a"][0]) * t["b"]  # noqa: E731
    a = dressed(x)
    same(vmap(f)({"a": [a], "b": y}), looped(lambda a, y: looked_at(a) * y)(a, y))
    got = grad(lambda t: f(t).sum())({"a": [dressed(x[0])], "b": y[0]})
    a, b = jacobian_of_two(lambda a, b: (looked_at(dressed(a)) * b).sum(), x[0], y[0])
    same(got["a"][0], a)
    same(got["b"], b)


def jacobian_of_two(f, a, b):
    return torch.autograd.functional.jacobian(f, (a, b))


def test_a_captured_class_that_is_trained_has_its_gradient():
    w = numbers(3).as_subclass(Methods).requires_grad_()
    xs = numbers(4, 3, seed=2)
    f = lambda x: plain((w.twice() * x).sin())  # noqa: E731
    got = torch.autograd.grad(plain(vmap(f)(xs)).sum(), w)[0]
    same(got, torch.autograd.grad(looped(f)(xs).sum(), w)[0])


def test_a_parameter_subclass_is_itself_in_every_place():
    w = Weight(numbers(3))
    w.name_of_mine = "w"
    x = numbers(4, 3, seed=1)

    def f(w, x):
        assert isinstance(w, Weight)
        assert isinstance(w, nn.Parameter)
        assert w.name_of_mine == "w"
        return (w.twice() * x).sin().sum()

    want = torch.autograd.functional.jacobian(lambda v: (v * 2 * x[0]).sin().sum(), w.detach())
    same(grad(f)(w, x[0]), want)
    same(jacfwd(f)(w, x[0]), want)
    same(vmap(grad(f), in_dims=(None, 0))(w, x)[0], want)
    same(vmap(lambda x: f(w, x))(x)[0], f(w, x[0]))
    found = per_example_grad_norm(f)(w, x)
    same(found[0], want.norm())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = w

        def forward(self, x):
            return f(self.w, x)

    net = Net()
    found = grad(lambda p: functional_call(net, p, (x[0],)))(dict(net.named_parameters()))
    same(found["w"], want)


def test_a_parameter_subclass_made_inside_has_its_methods():
    f = lambda x: (Weight(x.detach()).twice() * x).detach()  # noqa: E731
    same(vmap(f)(numbers(4, 3)), looped(f)(numbers(4, 3)))
    g = lambda x: (Weight(x).twice() * x).sum()  # noqa: E731
    assert isinstance(Weight(numbers(3)), Weight)
    same(grad(g)(numbers(3)), 2 * numbers(3))
    same(vmap(grad(g))(numbers(4, 3)), 2 * numbers(4, 3))


# --- attributes -----------------------------------------------------------------------------------


class Rows(Tensor):
    """Has a tensor of as many rows, which an index picks too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        mine = next(a for a in args if isinstance(a, Rows))
        if isinstance(out, Rows) and hasattr(mine, "scale"):
            picks = func in (Tensor.select, Tensor.__getitem__)
            out.scale = mine.scale[args[-1]] if picks else mine.scale
        return out


def test_attributes_that_differ_by_example_are_each_examples_own():
    x = numbers(4, 3).as_subclass(Rows)
    x.scale = numbers(4, seed=3)
    f = lambda v: plain(v * v.scale)  # noqa: E731
    same(vmap(f)(x), looped(f)(x))
    same(vmap(f, chunk_size=3)(x), looped(f)(x))
    parts = lambda v: plain(v * v.scale if plain(v).sum() > 0 else v - v.scale)  # noqa: E731
    same(vmap(parts)(x), looped(parts)(x))


def test_attributes_that_differ_and_are_no_tensors_are_an_error():
    class Numbered(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            if func is Tensor.select:
                out.number = args[2]
            return out

    with pytest.raises(ValueError, match=r"example 1 .*\.number = 1"):
        vmap(lambda x: x)(numbers(4, 3).as_subclass(Numbered))


def test_an_attribute_that_is_set_inside_stays_inside():
    def f(x):
        y = x.as_subclass(Methods)
        assert not hasattr(y, "seen")
        y.seen = True
        z = y.as_subclass(Methods)
        assert not hasattr(z, "seen")
        return plain(y)

    x = numbers(4, 3).as_subclass(Methods)
    vmap(f)(x)
    assert not hasattr(x, "seen")


def with_attributes(x):
    y = (x * 2).as_subclass(Tagged)
    y.level = 7.0
    z = x * 3
    z.tag = "mine"
    return y, z


@pytest.mark.filterwarnings("ignore:jit")
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("patience", [0, 4])
def test_results_keep_class_and_attributes_in_each_call(patience, detached, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", patience)

    def f(x):
        y, z = with_attributes(x.detach() if detached else x)
        return plain(y).sum() + (x * x).sum(), (y, {"z": z})

    def value(x):
        y, z = with_attributes(x.detach() if detached else x)
        return y, {"z": z}

    def are_kept(y, z):
        assert type(y) is Tagged
        assert y.level == 7.0
        assert type(z["z"]) is Tensor
        assert z["z"].tag == "mine"

    x = numbers(3)
    calls = {
        "grad": (grad(f, has_aux=True), lambda r: r[1]),
        "grad_and_value": (grad_and_value(f, has_aux=True), lambda r: r[1][1]),
        "jacrev": (jacrev(f, has_aux=True), lambda r: r[1]),
        "jacfwd": (jacfwd(f, has_aux=True), lambda r: r[1]),
        "hessian": (hessian(f, has_aux=True), lambda r: r[1]),
        "vjp": (lambda x: vjp(f, x, has_aux=True), lambda r: r[2]),
        "vjp value": (lambda x: vjp(value, x), lambda r: r[0]),
        "jvp": (lambda x: jvp(f, (x,), (x,), has_aux=True), lambda r: r[2]),
        "jvp value": (lambda x: jvp(value, (x,), (x,)), lambda r: r[0]),
        "linearize": (lambda x: linearize(value, x), lambda r: r[0]),
        "jit": (jit(value), lambda r: r),
        "jit grad": (jit(grad(f, has_aux=True)), lambda r: r[1]),
    }
    for call, taken in calls.values():
        for _ in range(6):
            are_kept(*taken(call(x)))
        with torch.no_grad():
            are_kept(*taken(call(x)))
    w = numbers(3).requires_grad_()
    for call, taken in calls.values():
        are_kept(*taken(call(w * 2)))


@pytest.mark.parametrize("patience", [0, 4])
def test_stacked_results_are_what_torch_stack_gives(patience, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", patience)
    x = numbers(4, 3)
    for f in (
        lambda x: tagged(x, 3.0) * 2,
        lambda x: x.as_subclass(Methods),
        lambda x: x.as_subclass(Quiet),
        lambda x: Quantity(x, "m"),
        lambda x: x.as_subclass(CosForSin),
        lambda x: Weight(x.detach()),
        lambda x: with_attributes(x)[1],
    ):
        theirs, mapped = looped(f)(x), vmap(f)
        for _ in range(6):
            mine = mapped(x)
            assert type(mine) is type(theirs)
            assert vars(mine) == vars(theirs)
            same(mine, theirs)


def test_a_class_that_changes_stacks_is_asked_for_each():
    class Doubling(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            return plain(out).mul(2).as_subclass(cls) if func is torch.stack else out

    f = lambda x: x.as_subclass(Doubling)  # noqa: E731
    same(vmap(f)(numbers(4, 3)), looped(f)(numbers(4, 3)))
    same(vmap(f, out_dims=1)(numbers(4, 3)), looped(f)(numbers(4, 3)).mT)


# --- other ways in --------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(x):
        assert isinstance(x, Methods)
        return x.twice()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_, g):
        return g * 2


def diverging(x):
    y = x.as_subclass(Methods)
    z = y.twice() if plain(y).sum() > 0 else y * 3
    assert isinstance(z, Methods)
    return plain(z.twice())


def diverging_late(x):
    y = x.as_subclass(Tagged)
    if plain(y).sum() > 0:
        y.level = 2.0
        y = y * 2
    else:
        y.level = 5.0
    return plain(y) * y.level


def looping(x):
    y = x.as_subclass(Methods)
    while plain(y).abs().max() < 4:
        y = y.twice()
    return plain(y.twice())


def hooked(x):
    y = (x * 2).as_subclass(Methods)
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return plain(y.twice())


def kept(x):
    y = (x * x).as_subclass(Methods)
    return plain(y.detach().twice()) * x + plain(y.data.twice())


OTHERS = {
    "Function": lambda x: plain(Double.apply((x * x).as_subclass(Methods)).twice()),
    "hook": hooked,
    "detached": kept,
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        lambda y: plain(y.as_subclass(Methods).twice().exp()), x, use_reentrant=False
    ),
    "numpy": lambda x: x * float(x.detach().as_subclass(Methods).twice().numpy().sum()),
    "item": lambda x: x * plain(x.detach()).sum().as_subclass(Methods).item(),
    "diverging": diverging,
    "diverging late": diverging_late,
    "loop": looping,
    "inner grad": lambda x: plain(grad(lambda y: y.norm())(x.as_subclass(Methods))),
    "inner vmap": lambda x: plain(vmap(lambda y: y.twice())(x.as_subclass(Methods))),
    "inner jvp": lambda x: plain(jvp(lambda y: y.twice(), (x.as_subclass(Methods),), (x,))[1]),
    "inner autograd": lambda x: _inner_autograd(x),
    "out": lambda x: plain(torch.add(x.as_subclass(Methods), 1).clamp_(min=0)),
    "cond": lambda x: forall.cond(
        plain(x).sum() > 0, lambda y: plain(y.twice()), lambda y: plain(y), x.as_subclass(Methods)
    ),
}


def through_a_generator(x):
    y = x.as_subclass(Methods)
    y = y.twice() if y.norm() > 3 else y * 3
    some = (v for v in [y])  # has no converted form
    return plain(next(some).twice())


def attribute_in_a_loop(x):
    y = tagged(x, 1.0)
    while plain(y).abs().max() < 4:
        y = y * 2
        y.level = y.level + 1
    return plain(y) * y.level


def class_of_some(x):
    y = x.as_subclass(Methods)
    if x.sum() > 0:
        y = plain(y) * 2
    return plain(y * 2) if isinstance(y, Methods) else y * 5


def one_name_of_some(x):
    y = x.clone().as_subclass(Methods)
    z = y
    if x.sum() > 0:
        z = (x * 2).as_subclass(Methods)
    z.add_(1)
    return plain(y) + plain(z) * 10


def written_by_some(x):
    y = (x * 1).as_subclass(Methods)
    if x.sum() > 0:
        y[0] = 5
    y[1:].mul_(2)
    return plain(y)


def truth(x):
    return x * 2 if x.sum().as_subclass(Methods) > 0 else x


def old_in_place(x):
    y = (x * 1).as_subclass(OldStyle)
    y.mul_(2)
    return plain(y.exp())


def with_other_data(x):
    y = (x * 1).as_subclass(Methods)
    y.data = plain(y.detach()) * 5
    return plain(y)


OTHERS |= {
    "generator": through_a_generator,
    "attribute in a loop": attribute_in_a_loop,
    "class of some": class_of_some,
    "one name of some": one_name_of_some,
    "written by some": written_by_some,
    "truth": truth,
    "old in place": old_in_place,
    "other data": with_other_data,
}


def _inner_autograd(x):
    with torch.enable_grad():
        y = x.detach().as_subclass(Methods).requires_grad_()
        return plain(torch.autograd.grad(y.norm(), y)[0])


@pytest.mark.parametrize("way", [w for w in WAYS if w != "vmap in_dims 1"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_a_class_goes_every_way_that_a_tensor_goes(other, way):
    if other == "hook" and ("jacfwd" in way or way in ("jvp", "linearize", "hessian")):
        return  # no hook on a gradient has a say in forward mode
    if (other, way) == ("other data", "jacfwd vmap"):
        return  # refused of any tensor
    f, (mine, theirs, x) = OTHERS[other], WAYS[way]
    theirs_f = _PLAIN_FORM.get(other, f)
    same(mine(f)(x), theirs(theirs_f)(x))


# What autograd.functional cannot do with the function itself: transforms of ours inside of it.
_PLAIN_FORM = {
    "inner grad": lambda x: 2 * x,
    "inner vmap": lambda x: 2 * x,
    "inner jvp": lambda x: 2 * x,
    "cond": lambda x: 2 * x if x.sum() > 0 else x,
}


def test_a_value_kept_from_a_call_that_has_ended_is_still_of_its_class():
    seen = []
    w = numbers(3).requires_grad_()
    vmap(lambda x: (seen.append((w * 1).as_subclass(Methods)), x)[1])(numbers(4, 3))
    (left,) = seen
    assert isinstance(left, Methods)
    assert isinstance(left.twice(), Methods)
    same(left.twice(), 2 * w)
    same(torch.autograd.grad(plain(left.twice()).sum(), w)[0], torch.full((3,), 2.0, dtype=D))
    seen.clear()
    vmap(lambda x: (seen.append(x.as_subclass(Methods)), x)[1])(numbers(4, 3))
    with pytest.raises(RuntimeError, match="vmap"):
        seen[0].twice()
    jvp(lambda x: (seen.append(x.as_subclass(Methods)), x)[1], (numbers(3),), (numbers(3),))
    same(seen[1].twice(), 2 * numbers(3))


def test_a_class_is_told_of_calls_as_in_the_loop():
    told = []

    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            told.append((func, types, cls))
            return super().__torch_function__(func, types, args, kwargs or {})

    def f(x):
        y = x.as_subclass(Told)
        told.clear()
        plain(torch.sin(y + x * y).sum())
        return x

    f(numbers(3))
    want = [*told]
    for call in (vmap(f), lambda x: jvp(f, (x,), (x,)), jacrev(f)):
        call(numbers(3, 3))
        assert told == want


def test_classes_and_what_they_were_made_of_are_let_go():
    import gc
    import weakref

    def made():
        class Mine(Tensor):
            pass

        vmap(lambda x: plain(x.as_subclass(Mine) * 2))(numbers(4, 3))
        return weakref.ref(Mine)

    forall.vmap(lambda x: x)(numbers(2))
    found = made()
    gc.collect()
    assert found() is None


def test_subclasses_are_not_told_of_our_classes():
    told = []

    class Registry(type(Tensor)):
        def __init__(cls, *args, **kwargs):
            super().__init__(*args, **kwargs)
            told.append(cls)

    class Base(Tensor, metaclass=Registry):
        def __init_subclass__(cls, **kwargs):
            told.append(cls)

        def twice(self):
            return self * 2

    told.clear()
    same(vmap(lambda x: plain(x.as_subclass(Base).twice()))(numbers(4, 3)), 2 * numbers(4, 3))
    assert told == []


@pytest.mark.parametrize("name", ["level", "value", "axis", "family"])
def test_an_attribute_that_has_the_name_of_one_of_ours_is_refused(name):
    def f(x):
        setattr(x * 2, name, 1)
        return x

    said = rf"x\.{name} = .*\n.*as_subclass"
    with pytest.raises(AttributeError, match=said):
        vmap(f)(numbers(4, 3))
    with pytest.raises(AttributeError, match=said):
        jvp(f, (numbers(3),), (numbers(3),))
    with pytest.raises(AttributeError, match=said):
        vmap(grad(lambda x: f(x).sum()))(numbers(4, 3))


@pytest.mark.parametrize("patience", [0, 4])
def test_what_a_class_says_is_asked_in_each_call(patience, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", patience)
    told = []

    class Counting(Tensor):
        factor = 2

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

        def scaled(self):
            return self * self.factor

    f = lambda x: plain(x.as_subclass(Counting).scaled())  # noqa: E731
    x = numbers(4, 3)
    for call in (vmap(f), grad(lambda x: f(x).sum())):
        for factor in (2, 2, 2, 2, 2, 2, 7, 7):
            Counting.factor = factor
            told.clear()
            got = call(x)
            assert len(told) == 1
            want = factor * x if call(x).flatten()[0] != factor else torch.full_like(x, factor)
            same(got, want)


def test_attributes_of_what_is_given_are_read_in_each_call(monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    x = numbers(4, 3)
    t, p = tagged(x, 0.0), x.clone()
    scaled = vmap(lambda v: plain(v * v.level))
    slope = grad(lambda v: plain(v * v.level).sum())
    slope_of_plain = grad(lambda v: (v * v.tag).sum())
    captured = vmap(lambda v: v * t.level)
    for i in range(12):
        t.level = p.tag = float(i // 3)
        same(scaled(t), x * t.level)
        same(slope(t), torch.full_like(x, t.level))
        same(slope_of_plain(p), torch.full_like(x, p.tag))
        same(captured(x), x * t.level)


class Lie(Tensor):
    """Is made by a class of its own, as a Lie group's tensors are of their algebra's."""

    def __init__(self, *data, group):
        self.group = group

    @staticmethod
    def __new__(cls, *data, group):
        tensor = data[0] if isinstance(data[0], Tensor) else Tensor(*data)
        return Tensor.as_subclass(tensor, Lie)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        groups = [a.group for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Lie)]
        out = super().__torch_function__(func, types, args, kwargs or {})
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Lie) and not hasattr(t, "group"):
                t.group = groups[0]
        return out

    def log(self):
        return type(self)(plain(self) * 2, group=self.group + "'")


@pytest.mark.filterwarnings("ignore:jit")
@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_makes_itself_is_the_loops(way):
    def f(x):
        y = Lie(x, group="SO3")
        z = torch.cat([y[1:], y[:1]]).log() * 2
        assert (y.group, z.group) == ("SO3", "SO3'")
        return plain(z)

    mine, theirs, x = WAYS[way]
    same(mine(f)(x), theirs(f)(x))


@pytest.mark.parametrize("kind", [Methods, OldStyle, CosForSin])
def test_what_is_captured_beside_a_class_has_its_gradient(kind):
    w, xs = numbers(3).requires_grad_(), numbers(4, 3, seed=1)
    f = lambda x: plain((x.as_subclass(kind) * w).sin())  # noqa: E731
    got, want = (
        torch.autograd.grad(call(xs).sum(), w, create_graph=True)[0]
        for call in (vmap(f), looped(f))
    )
    same(got, want)
    same(torch.autograd.grad(got.sum(), w)[0], torch.autograd.grad(want.sum(), w)[0])


def test_a_written_argument_of_a_class_is_written_with_its_history():
    def found(run):
        v, s = numbers(4, 3).requires_grad_(), torch.ones((), dtype=D, requires_grad=True)
        base = (v * 1).as_subclass(Methods)
        out = run(lambda row: (row.mul_(s * 3), plain(row) * 1)[1])(base)
        return base, torch.autograd.grad(plain(base).sum() + plain(out).sum(), (v, s))

    (mine, slopes), (theirs, wanted) = found(vmap), found(looped)
    same(mine, theirs)
    for got, want in zip(slopes, wanted, strict=True):
        same(got, want)


def test_stacked_and_debug_unwrap_look_into_a_class():
    seen, x = [], numbers(4, 3)

    def f(x):
        y = x.as_subclass(Methods)
        seen.append(y * 2)
        assert forall.debug_unwrap(y).shape == (4, 3)
        assert forall.stacked(y).shape == (4, 3)
        return x

    vmap(f)(x)
    assert type(forall.stacked(seen[0])) is Methods
    same(forall.stacked(seen[0]), 2 * x)


def test_loops_of_forall_carry_a_class():
    steps = numbers(5, 3)

    def f(x):
        start = x.as_subclass(Methods)
        last, all_of_them = forall.scan(lambda c, a: (c + a, c.twice()), start, steps)
        assert isinstance(last, Methods)
        grown = forall.while_loop(lambda c: c.value < 9, lambda c: c.twice(), start)
        return plain(all_of_them).sum(0) + plain(grown.twice())

    def by_python(x):
        c, total, grown = x, 0, x
        for a in steps:
            total, c = total + 2 * c, c + a
        while grown.abs().sum() < 9:
            grown = grown * 2
        return total + grown * 2

    x = numbers(4, 3)
    same(vmap(f)(x), looped(by_python)(x))
    same(vmap(jacfwd(f))(x), looped(jacobian(by_python))(x))
