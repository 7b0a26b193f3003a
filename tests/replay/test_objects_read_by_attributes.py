"""Objects of which a function only reads attributes: these count, and not which object it is."""

import gc
import weakref
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import nn

import forall
from forall import functional_call, grad, jacrev, vmap
from forall._core.python_state import find_attributes_read, may_write_attributes
from replay.test_fresh_functions import plainly

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
FIELD = "scale"  # is written by its name
X = torch.linspace(0.1, 1, 6, dtype=D).reshape(2, 3)


@pytest.fixture
def hits(either_way, hits):
    return hits


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)


class Backend:
    """One that is made anew in each step; a class has no say in what its attributes are."""

    rate = 2.0

    def __init__(self, net, scale=1.0, shift=None, loss=torch.sum):
        self.net, self.scale, self.loss = net, scale, loss
        self.shift = torch.full((3,), 0.5, dtype=D) if shift is None else shift
        self.params = dict(net.named_parameters())
        self.tables = [torch.ones(3, dtype=D), 2]

    def jacobian(self, x):
        def outputs(params):
            return functional_call(self.net, params, x)

        return jacrev(outputs)(self.params)

    def slope(self, x):
        return grad(lambda v: self.loss((v * self.scale + self.shift).sin() * self.tables[0]))(x)

    def nested(self, x):
        def inner(v):
            return (self.net(v) * self.scale).sum()

        return vmap(grad(lambda v: self.loss(inner(v) + v)))(x).detach()

    def unused(self, x):
        def inner(v):
            return v.sin().sum() if v.dim() else self.scale

        return grad(inner)(x)


WAYS = {name: getattr(Backend, name) for name in ("jacobian", "slope", "nested", "unused")}


def agree(way, m, x=X):
    found = way(m, x)
    torch.testing.assert_close(found, plainly(way, m, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
def test_another_one_is_replayed(name, hits):
    net = make_net()
    for i in range(9):
        shift = torch.full((3,), float(i), dtype=D)
        agree(WAYS[name], Backend(net, shift=shift), X * (i + 1))
    assert len(hits) >= 3, hits


def square(x):
    return x.square().sum()


@pytest.mark.parametrize("name", WAYS)
def test_what_the_attributes_are_now_is_what_counts(name, hits, monkeypatch):
    nets = make_net(0), make_net(1)
    way = WAYS[name]
    for i in range(16):  # what differs is another in each call
        agree(way, Backend(nets[i % 2], 1.0 + i // 4 % 2, loss=(torch.sum, square)[i // 8 % 2]))
    m = Backend(nets[0])
    changes = [
        lambda: setattr(m, "scale", 3.0),
        lambda: setattr(m, "shift", torch.ones((), dtype=D)),
        lambda: m.shift.mul_(2),
        lambda: m.tables.__setitem__(0, torch.tensor(2.0, dtype=D)),
        lambda: setattr(m, "net", nets[1]),
        lambda: m.net.append(nn.Linear(1, 1).to(D)),
        lambda: monkeypatch.setattr(Backend, "rate", 4.0),
        lambda: setattr(m, "loss", lambda v: v.exp().sum()),
        lambda: setattr(m, "loss", nn.Flatten(0)),
        lambda: setattr(m, "loss", torch.sum),
        lambda: setattr(m, "__class__", Other),
    ]
    for change in changes:
        change()
        for _ in range(3):
            try:
                plainly(way, m, X)
            except RuntimeError as error:
                with pytest.raises(type(error)):
                    way(m, X)
            else:
                agree(way, m)


class Other(Backend):
    """It computes an attribute that its objects have too."""

    @property
    def scale(self):
        return 5.0

    @scale.setter
    def scale(self, value):
        vars(self)["scale"] = value


def test_an_attribute_that_the_class_defines_later(monkeypatch):
    net = make_net()
    for _ in range(5):
        agree(Backend.slope, Backend(net))
    computed = property(lambda self: 7.0, lambda self, value: None)
    monkeypatch.setattr(Backend, "scale", computed, raising=False)
    m = Backend(net)
    vars(m)["scale"] = 1.0
    agree(Backend.slope, m)
    monkeypatch.undo()
    agree(Backend.slope, m)
    monkeypatch.setattr(
        Backend,
        "__getattribute__",
        lambda self, name: 9.0 if name == "scale" else object.__getattribute__(self, name),
        raising=False,
    )
    agree(Backend.slope, m)


def test_an_attribute_that_the_class_has_where_the_object_lacks_it():
    class Config:
        scale = 2.0

        @cached_property
        def shift(self):
            return torch.full((3,), self.scale, dtype=D)

    def run(config, x):
        return grad(lambda v: (v.sin() * config.scale + v * config.shift).sum())(x)

    for i in range(12):
        config = Config()
        if i % 3 == 1:
            config.scale = 3.0
        agree(run, config)
        if i % 3 == 2:
            Config.scale = float(i)
        agree(run, config)


@dataclass
class Settings:
    net: nn.Module
    scale: float = 1.0


class Writer(nn.Module):
    """A module that knows who has it, and writes there."""

    def __init__(self, write):
        super().__init__()
        self.parent, self.write = [], write

    def forward(self, x):
        self.write(self.parent[0], x)
        return x.sin()


def write_attribute(parent, x):
    parent.scale = float(x.dim() + 2)


def write_by_name(parent, x):
    setattr(parent, FIELD, 3.0)


def write_into_dict(parent, x):
    parent.__dict__[FIELD] = 3.0


def write_past_the_class(parent, x):
    object.__setattr__(parent, FIELD, 3.0)


def remove_and_write(parent, x):
    del parent.scale
    vars(parent).update(scale=3.0)


WRITES = [
    write_attribute,
    write_by_name,
    write_into_dict,
    write_past_the_class,
    remove_and_write,
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_the_object_while_it_runs(write, either_way):
    net = Writer(write)

    def run(x):
        settings = Settings(net)
        net.parent[:] = [settings]
        return grad(lambda v: (settings.net(v) * settings.scale).sum())(x), settings.scale

    for i in range(9):
        found, wanted = run(X * (i + 1)), plainly(run, X * (i + 1))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_list_among_the_attributes_is_the_objects_own():
    class Log:
        def __init__(self):
            self.losses = []

    for i in range(8):
        log = Log()
        for n in range(3):
            grad(lambda v, log=log: add_to(log, v))(X * (i + 1))
            assert len(log.losses) == n + 1

        def loss(v, log=log):
            def inner():
                log.losses.append(v.dim())
                return v.sin().sum()

            return inner()

        grad(loss)(X)
        assert len(log.losses) == 4


def add_to(log, v):
    log.losses.append(v.dim())
    return v.sin().sum()


def test_a_module_that_only_it_has_goes_with_it(hits):
    teacher = make_net()
    gone = []

    class Pair:
        def __init__(self):
            self.teacher, self.student = teacher, make_net(1)

    def run(pair, x):
        return grad(lambda v: (pair.teacher(v) * pair.student(v)).sum())(x)

    for _ in range(3):
        pair = Pair()
        for _ in range(5):
            agree(run, pair)
        gone.append(weakref.ref(pair.student))
        del pair
    gc.collect()
    assert hits
    assert [w() for w in gone] == [None] * 3


def test_the_object_and_its_module_go(hits):
    m = Backend(make_net())
    for _ in range(6):
        for way in WAYS.values():
            agree(way, m)
    assert hits
    gone = weakref.ref(m), weakref.ref(m.net), weakref.ref(m.shift)
    del m
    gc.collect()
    assert [w() for w in gone] == [None] * 3


class Branching(nn.Module):
    def forward(self, x):
        if bool((x > 0.5).all()):
            return x.sin()
        return x * 3


@pytest.mark.filterwarnings("ignore")
def test_a_module_in_torchscript():
    net = torch.jit.script(Branching())

    def run(m, x):
        return grad(lambda v: (m.net(v) * m.scale).sum())(x)

    for i in range(12):
        settings = Settings(net, float(i))
        agree(run, settings, X)
        agree(run, settings, X + 1)


def test_one_object_in_two_functions_and_as_a_whole(hits):
    def run(m, x):
        def scaled(v):
            return v * m.scale

        def whole(v):
            return read(m, v)

        return grad(lambda v: (scaled(v) * whole(v) * m.shift).sum())(x)

    for i in range(5):
        agree(run, Backend(make_net(), float(i)))
    m = Backend(make_net())
    for _ in range(6):
        agree(run, m)
    assert hits


def read(m, v):
    return (v * m.scale).sin() + m.shift


def test_attributes_that_cannot_be_bound(hits):
    """Where one cannot, it is the object that counts."""

    def run(m, x):
        return grad(lambda v: (v * m.scale * len(m.words)).sum())(x)

    m = Backend(make_net())
    m.words = {"a", "b"}
    for scale in (1.0, 2.0):
        m.scale = scale
        for _ in range(5):
            agree(run, m)
    assert hits
    for i in range(4):
        m = Backend(make_net())
        m.words = set(range(i))
        agree(run, m)


def codes():
    m = None

    def reads(x):
        return m.scale * x + m.net(x)

    def reads_inside(x):
        return [m.scale for _ in x] + [lambda: m.net]

    def never(x):
        return x

    def passes_on(x):
        return repr(m) + x

    def compares(x):
        return x if m is None else m.scale

    def writes(x):
        m.scale = x

    def adds(x):
        m.scale += x

    def passes_on_inside(x):
        return lambda: repr(m)

    def keeps_in_a_class(x):
        class Inner:
            scale = m

        return Inner

    def finds_it_by_name(x):
        return m.scale * locals()[x]

    def evaluates(x):
        return m.scale * eval(x)  # noqa: S307 - it is not called

    return dict(locals())


READ = {"reads": ("scale", "net"), "reads_inside": ("scale", "net")}
NOT_READ = (
    "passes_on compares writes adds passes_on_inside keeps_in_a_class finds_it_by_name evaluates"
)


@pytest.mark.parametrize("name", READ)
def test_code_that_only_reads_attributes(name):
    found = find_attributes_read(codes()[name].__code__, "m")
    assert found is None or {*found} == {*READ[name]}
    assert found is not None or name == "reads_inside"  # later Pythons pass variables on otherwise


@pytest.mark.parametrize("name", NOT_READ.split())
def test_code_that_does_more(name):
    assert find_attributes_read(codes()[name].__code__, "m") is None


@pytest.mark.parametrize("write", WRITES)
def test_code_that_may_write(write):
    assert may_write_attributes(write.__code__, frozenset({"scale"}))
    assert not may_write_attributes(read.__code__, frozenset({"scale"}))
    assert not may_write_attributes(write_attribute.__code__, frozenset({"shift"}))


def test_the_reason_names_who_writes():
    net = Writer(write_attribute)

    def make():
        settings = Settings(net)
        net.parent[:] = [settings]
        return grad(lambda v: (settings.net(v) * settings.scale).sum())

    for _ in range(6):
        make()(X)
    assert "write_attribute may write an attribute" in str(forall.explain(make())(X))
