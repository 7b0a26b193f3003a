"""Code as libraries have it is replayed, and what it asks for is watched."""

import collections
import contextvars
import ctypes
import functools
import inspect
import logging
import os
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch

import forall
from forall._api.execution.transform_decorator import describe_replay
from oracle import same

logger = logging.getLogger(__name__)
SCALES = types.ModuleType("scales_of_a_test")
SCALES.factor = 2.0
LEVEL = contextvars.ContextVar("level", default=1.0)
pytestmark = pytest.mark.usefixtures("at_once")


class Settings:
    factor = 3.0
    verbose = False


class Backend:
    """Holds a module, as those do that choose one."""

    def __init__(self, library, clock=None):
        self.library, self.clock = library, clock


@functools.lru_cache
def table(n):
    return [float(n)]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = Settings()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        if getattr(self.settings, "verbose", False):
            logger.warning("told")
            print(x)
        if torch.jit.is_scripting() or torch.compiler.is_compiling():
            warnings.warn("compiled", stacklevel=2)
        return (x * self.weight * getattr(self.settings, "factor")).sum()  # noqa: B009


class Marked(torch.Tensor):
    """A class of tensors as libraries have them: most calls only ask whether something is one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    handled = {torch.Tensor.view: "view"}  # noqa: RUF012

    @staticmethod
    def __new__(cls, x, log):
        log.append(1)
        return x.as_subclass(cls)

    def told(self):
        print(self)


class Nameless:
    """A class that does not say where it is from, as those of Cython do not."""

    __module__ = property(lambda self: 3)  # pyright: ignore[reportAssignmentType]
    factor = 2.0

    def times(self, x):
        return x * self.factor


NAMELESS = Nameless()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: NAMELESS.times(x),
        lambda x, given=NAMELESS: given.times(x),
        lambda x: x * (Nameless.factor if isinstance(NAMELESS, Nameless) else 0.0),
    ],
)
def test_a_class_need_not_say_where_it_is_from(f, monkeypatch):
    g, x = forall.vmap(f), torch.arange(3.0)
    for factor in (2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0):
        monkeypatch.setattr(Nameless, "factor", factor)
        assert same(g(x), factor * x)
    assert same(forall.vmap(lambda x, o: o.times(x), (0, None))(x, NAMELESS), factor * x)


class Definition(ctypes.Structure):
    """Of a function in C."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


DEFINED = Definition(b"same", Definition._fields_[1][1](lambda _, x: x), 8, None)
_NEW = ctypes.pythonapi.PyCFunction_NewEx
_NEW.argtypes = [ctypes.POINTER(Definition), ctypes.py_object, ctypes.py_object]
_NEW.restype = ctypes.py_object
EXTENSION = _NEW(DEFINED, None, sys)

Spec = collections.namedtuple("Spec", "names default")  # noqa: PYI024


class Inspector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.spec = inspect.getfullargspec(table.__wrapped__)
        self.own = Spec(("x",), 2.0)

    def forward(self, x):
        if isinstance(x, Marked):
            x.told()
        return x.sum() * len(self.spec.args) * self.own.default


def imports(x):
    import torch.nn.functional as F
    from scales_of_a_test import factor  # pyright: ignore[reportMissingImports]

    return F.relu(x).sum() * factor


def of_environment(x):
    if x.ndim > 3:
        print(x)
    return x.sum() * float(os.environ.get("FORALL_TEST_FACTOR", "2"))


def in_context(x):
    if x.ndim > 3:
        print(x)
    return x.sum() * LEVEL.get()


def of_cache(x):
    if x.ndim > 3:
        print(x)
    return x.sum() * table(2)[0]


def by_backend(backend, x):
    if x.ndim > 3:
        print(x)
    return backend.library.sin(x).sum() * float(np.prod(x.shape))


def told(transformed):
    return describe_replay(transformed)


def replayed(transformed, x, wanted, calls=9):
    for _ in range(calls):
        assert same(transformed(x), wanted(x))
    return "calls so far" in told(transformed)


def test_a_layer_with_settings_and_messages():
    layer, x = Layer(), torch.randn(3)
    slope = forall.grad(layer)

    def wanted(x):
        return layer.weight.detach() * layer.settings.factor * torch.ones_like(x)

    assert replayed(slope, x, lambda x: wanted(x).requires_grad_())
    layer.settings.factor = 5.0
    assert torch.equal(slope(x).detach(), wanted(x))


def test_classes_of_tensors_and_named_tuples_of_libraries():
    layer, x = Inspector(), torch.randn(4, 3)
    f = forall.vmap(forall.grad(layer))
    for i in range(12):
        if i == 8:
            layer.own = Spec(("x",), 3.0)
        if i == 10:
            layer.spec = layer.spec._replace(args=["n", "m"])
        assert same(f(x), torch.full((4, 3), (1 + (i > 9)) * (2.0 + (i > 7))))
    assert "calls so far" in told(f)


def test_a_class_of_tensors_that_is_made():
    log = []

    def f(x):
        return Marked(x * 2, log).sum().as_subclass(torch.Tensor)

    g, x = forall.vmap(f), torch.randn(4, 3)
    for _ in range(8):
        assert same(g(x), (x * 2).sum(1))
    assert len(log) == 8


def test_a_function_of_an_extension_whose_module_is_no_name():
    f = forall.vmap(lambda x: x.sin() if EXTENSION else x)
    x = torch.randn(4, 3)
    for _ in range(8):
        assert same(f(x), x.sin())


def test_what_is_imported_inside(monkeypatch):
    monkeypatch.setitem(sys.modules, "scales_of_a_test", SCALES)
    x = torch.randn(3).abs()
    slope = forall.grad(imports)
    assert replayed(slope, x, lambda x: torch.full_like(x, SCALES.factor))
    monkeypatch.setattr(SCALES, "factor", 7.0)
    assert torch.equal(slope(x), torch.full((3,), 7.0))


def test_the_environment(monkeypatch):
    x, slope = torch.randn(3), forall.grad(of_environment)
    assert replayed(slope, x, lambda x: torch.full_like(x, 2.0))
    monkeypatch.setenv("FORALL_TEST_FACTOR", "4")
    assert torch.equal(slope(x), torch.full((3,), 4.0))


def test_a_context_variable():
    x, slope = torch.randn(3), forall.grad(in_context)
    assert replayed(slope, x, torch.ones_like)
    token = LEVEL.set(6.0)
    try:
        assert torch.equal(slope(x), torch.full((3,), 6.0))
    finally:
        LEVEL.reset(token)
    assert torch.equal(slope(x), torch.ones(3))


def test_what_a_cache_keeps():
    x, slope = torch.randn(3), forall.grad(of_cache)
    assert replayed(slope, x, lambda x: torch.full_like(x, 2.0))
    table(2)[0] = 9.0
    assert torch.equal(slope(x), torch.full((3,), 9.0))
    table.cache_clear()
    assert torch.equal(slope(x), torch.full((3,), 2.0))


def test_a_partial_that_is_transformed_once_and_a_module_that_an_object_holds():
    x, backend = torch.randn(4, 3), Backend(torch)
    slopes = forall.vmap(forall.grad(functools.partial(by_backend, backend)))
    assert replayed(slopes, x, lambda x: 3 * x.cos())
    backend.library = types.SimpleNamespace(sin=torch.exp)
    assert torch.allclose(slopes(x), 3 * x.exp())


def test_a_module_that_does_not_do_the_same_with_each_call():
    ticks = Backend(torch, time)

    def f(x):
        if x.ndim > 3:
            print(x)
        return x.sum() * 0 + ticks.clock.perf_counter_ns() % 1_000_003

    slope, x = forall.grad_and_value(f), torch.randn(3)
    values = {slope(x)[1].item() for _ in range(9)}
    assert len(values) == 9
    assert told(slope).startswith("no: ")


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, list, set])
def test_a_container_of_a_library(kind, monkeypatch):
    home, found = torch.distributions.kl, kind()
    monkeypatch.setattr(home, "_KL_MEMOIZE", found)

    def f(x):
        return x.sum() * (2.0 + len(torch.distributions.kl._KL_MEMOIZE))

    slope, x = forall.grad(f), torch.randn(3)
    assert replayed(slope, x, lambda x: torch.full_like(x, 2.0))
    put = {list: "append", set: "add"}.get(kind)
    if put is None:
        found[1] = 2
    else:
        getattr(found, put)(1)
    assert replayed(slope, x, lambda x: torch.full_like(x, 3.0))
    monkeypatch.setattr(home, "_KL_MEMOIZE", kind())
    assert same(slope(x), torch.full((3,), 2.0))


def test_the_hooks_of_all_modules():
    def f(x):
        return x.sum() * (2.0 + len(torch.nn.modules.module._global_forward_hooks))

    slope, x = forall.grad(f), torch.randn(3)
    assert replayed(slope, x, lambda x: torch.full_like(x, 2.0))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert same(slope(x), torch.full((3,), 3.0))
    finally:
        handle.remove()
    assert same(slope(x), torch.full((3,), 2.0))


def test_a_container_of_a_library_that_is_written_to_with_each_call(monkeypatch):
    found = []
    monkeypatch.setattr(torch.distributions.kl, "_KL_MEMOIZE", found)

    def f(x):
        torch.distributions.kl._KL_MEMOIZE.append(1)  # pyright: ignore[reportAttributeAccessIssue]
        return x.sum()

    slope = forall.grad(f)
    for _ in range(9):
        slope(torch.randn(3))
    assert len(found) == 9


def test_a_function_of_the_users_in_a_container_of_a_library(monkeypatch):
    monkeypatch.setattr(torch.distributions.kl, "_KL_MEMOIZE", {"clock": lambda: next(ticks)})
    ticks = iter(range(99))

    def f(x):
        table: dict = torch.distributions.kl._KL_MEMOIZE
        return x.sum() * table["clock"]()

    slope, x = forall.grad(f), torch.randn(3)
    for i in range(9):
        assert same(slope(x), torch.full((3,), float(i)))


def test_a_debugger_is_left_alone(monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys.gettrace()))

    def f(x):
        breakpoint()  # noqa: T100
        return x.sum()

    slope = forall.grad(f)
    for _ in range(9):
        slope(torch.randn(3))
    assert stops == [None] * 9
    assert sys.gettrace() is None
