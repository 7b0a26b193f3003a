"""Annotations are no part of what a function computes: they may name what is not there."""

import inspect
import sys

import pytest
import torch

from forall import (
    cond,
    explain,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jit,
    jvp,
    linearize,
    scan,
    vjp,
    vmap,
)
from oracle import same

# On Python 3.14 annotations are code that runs when they are asked for, before they are text here.
FUTURE = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
TEXT = """
import torch


def f(x: ForTypeCheckers, k: Nowhere.At[All] = 2.0, *more: No, n: Such = 1.0) -> Thing:
    y: Unknown = x * k
    return (y * x).sum() * n


def plain(x, k=2.0, *more, n=1.0):
    return (x * k * x).sum() * n


def parted(x: ForTypeCheckers) -> Thing:
    def double(y: Nowhere = 3.0) -> Thing:
        z: Unknown = y
        return z * 2

    class Local:
        a: Unknown
        b: Unknown = 5.0

        def take(self, y: No) -> Such:
            return y * self.b if y.sum() > 0 else y

    return double(x) if x.sum() > 0 else Local().take(x)


def plain_parted(x):
    return x * 2 if x.sum() > 0 else x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x: ForTypeCheckers, k: No = 2.0) -> Thing:
        return (self.w * x * k * x).sum()


def noted(a: 2.0):
    pass


def of_annotations(x):
    return f(x) * float(noted.__annotations__["a"])
"""
X = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [0.5, -0.25]])


class Module:
    """The names of a module that is made of the text."""

    def __init__(self, file, future):
        file.write_text(future + TEXT)
        names = {"__name__": "annotated"}
        exec(compile(future + TEXT, str(file), "exec"), names)  # noqa: S102
        vars(self).update(names)


@pytest.fixture
def m(tmp_path):
    return Module(tmp_path / "annotated.py", FUTURE)


CALLS = {
    "vmap": lambda f: vmap(f)(X),
    "vmap by names": lambda f: vmap(f, in_dims={"x": 0})(X, k=4.0),
    "grad": lambda f: grad(f)(X),
    "grad by name": lambda f: grad(f, argnames=("x", "k"))(X, torch.tensor(2.0)),
    "grad_and_value": lambda f: grad_and_value(f)(X, n=3.0),
    "jit": lambda f: [jit(f)(X) for _ in range(3)],
    "jit of static names": lambda f: jit(f, static_argnames="n")(X, n=2.0),
    "jit of static positions": lambda f: jit(f, static_argnums=1)(X, 3.0),
    "vjp": lambda f: vjp(f, X)[1](torch.ones(())),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "linearize": lambda f: linearize(f, X)[1](X),
    "jacrev": lambda f: jacrev(f)(X[0]),
    "jacfwd": lambda f: jacfwd(f, argnums=0)(X[0]),
    "hessian": lambda f: hessian(f)(X[0]),
    "vmap of grad": lambda f: [vmap(grad(f), (0, None))(X, 2.0) for _ in range(9)],
    "cond": lambda f: vmap(lambda x: cond(x.sum() > 0, f, lambda x: x.sum(), x))(X),
    "scan": lambda f: scan(lambda c, x: (c + f(x), c), torch.zeros(()), X),
}


@pytest.mark.parametrize("call", CALLS)
def test_undefined_annotations_of_a_function(call, m):
    assert same(CALLS[call](m.f), CALLS[call](m.plain))


def test_undefined_annotations_of_a_module(m):
    net = m.Model()
    g = grad(lambda x: net(x))
    for found in (grad(net, argnames="x")(X), grad(net)(X), jit(g)(X)):
        assert same(found, 12 * X)
    assert same(vmap(net, in_dims={"x": 0})(X), torch.stack([net(x) for x in X]))


def test_undefined_annotations_where_examples_diverge(m):
    for _ in range(9):
        assert same(vmap(m.parted)(X), torch.stack([m.plain_parted(x) for x in X]))
    explain(vmap(m.parted))(X)


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")  # f's raise when they are read
def test_a_function_that_reads_those_of_another(m):
    g = jit(m.of_annotations)
    for given in (2.0, 3.0):
        m.noted.__annotations__["a"] = given
        for _ in range(9):
            assert same(vmap(m.of_annotations)(X), given * torch.stack([m.plain(x) for x in X]))
            assert same(g(X), given * m.plain(X))


@pytest.mark.skipif(bool(FUTURE), reason="annotations are code from Python 3.14 on")
def test_a_transformed_function_has_the_annotations_unevaluated(m):
    as_text = {"annotation_format": pytest.importorskip("annotationlib").Format.STRING}
    text = str(inspect.signature(m.f, **as_text))
    for g in (vmap(m.f), grad(m.f), jit(m.f), jacrev(m.f)):
        assert str(inspect.signature(g, **as_text)) == text
        with pytest.raises(NameError):
            g.__annotations__  # noqa: B018 - asks for it
