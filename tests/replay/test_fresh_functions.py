"""Functions that are made anew with each call of another, and what they hold: one is as another."""

import builtins
import builtins as of_python
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forall
from forall import grad, hessian, jacrev, jvp, linearize, vjp, vmap
from forall._api.execution.transform_decorator import find_transform
from forall._auto_replay import fresh_closures

pytestmark = pytest.mark.usefixtures("at_once")
FACTOR = 1.0  # is looked up by its name in a text
D = torch.float64
X = torch.linspace(0.1, 1, 6, dtype=D).reshape(2, 3)
SCALE = 2.0


@pytest.fixture
def hits(either_way, hits):
    return hits


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)


def plainly(step, *args):
    before, forall.config.replay = forall.config.replay, False
    try:
        return step(*args)
    finally:
        forall.config.replay = before


def agree(step, *args):
    found, wanted = step(*args), plainly(step, *args)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return found


def doubled(x):
    return 2 * x


STEPS = {
    "a function of nothing else": lambda net, x: vmap(grad(lambda v: v.sin().sum()))(x),
    "of a function of torch's": lambda net, x: vmap(vmap(torch.sin, 0, -1))(x),
    "a gradient of a function of torch's": lambda net, x: vmap(grad(torch.sum))(x),
    "of a module": lambda net, x: vmap(grad(lambda v: net(v).sum()))(x).detach(),
    "of a module and a function": lambda net, x: vmap(
        jacrev(lambda v: doubled(net(v)).sum() * SCALE)
    )(x).detach(),
    "with a default": lambda net, x: vmap(grad(lambda v, n=2: (net(v) ** n).sum()))(x).detach(),
    "a Hessian": lambda net, x: vmap(hessian(lambda v: net(v).sum()))(x).detach(),
    "a tangent": lambda net, x: jvp(lambda v: net(v).sum(), (x,), (x,))[1].detach(),
    "a pull-back": lambda net, x: vjp(lambda v: v.sin() * v, x)[1](x)[0],
    "a linear map": lambda net, x: linearize(lambda v: net(v).sin(), x)[1](x).detach(),
    "of functions in a tuple": lambda net, x: vmap(
        grad(composed(torch.sin, doubled, lambda v: net(v) * x.shape[0]))
    )(x).detach(),
    "with a function of its own": lambda net, x: with_a_helper(net, x),
}


def composed(*functions):
    def together(v):
        for function in functions:
            v = function(v)
        return v.sum()

    return together


def with_a_helper(net, x):
    def shifted(v):
        return net(v) + 1

    def loss(v):
        return shifted(v).square().sum()

    return vmap(grad(loss))(x).detach()


@pytest.mark.parametrize("name", STEPS)
def test_it_is_replayed(name, hits):
    net, step = network(), STEPS[name]
    for i in range(9):
        agree(step, net, X * (i + 1))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
    assert len(hits) >= 3, hits


def draw(x):
    return F.dropout(x, 0.5) + torch.rand(())


def test_a_key_that_is_new_in_each_call_is_an_argument(hits):
    for step in range(8):
        key = forall.random.fold_in(forall.random.key(1), step)
        agree(lambda k: vmap(draw, randomness=k)(X), key)
        agree(lambda k: vmap(grad(lambda v: draw(v).sum()), randomness=k)(X), key)
    assert len(hits) >= 8


def test_transforms_that_take_a_key_are_not_those_that_take_a_word(hits):
    key = forall.random.key(1)
    found, *_ = [vmap(draw, randomness=key)(X) for _ in range(6)]
    torch.testing.assert_close(found, plainly(vmap(draw, randomness=key), X))
    assert (vmap(draw, randomness="different")(X) != found).any()
    keyed, again, same = (
        find_transform(vmap(draw, randomness=how)) for how in (key, key + 1, "same")
    )
    assert keyed
    assert again
    assert same
    assert keyed.key == again.key
    assert keyed.key != same.key
    template = keyed.make(draw)
    found_template = find_transform(template)
    assert found_template
    assert found_template.key is None
    torch.testing.assert_close(template(X), found)


def test_a_loss_that_is_trained(hits):
    net, other = network(), network()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (net, other)]

    def loss(m):
        slopes = vmap(grad(lambda v: m(v).sum()))(X)
        return (slopes.square().sum() - 1) ** 2

    for _ in range(8):
        for m, optimizer in zip((net, other), optimizers, strict=True):
            optimizer.zero_grad()
            (loss(m) if m is net else plainly(loss, m)).backward()
            optimizer.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert hits


def test_another_module_has_its_own(hits):
    nets = [network() for _ in range(3)]
    for i in range(18):
        with torch.no_grad():
            nets[i % 3][0].weight.fill_(i)
        agree(STEPS["of a module"], nets[i % 3], X)
    assert hits


def test_what_is_bound_later_is_what_counts():
    one, other = network(), network()
    with torch.no_grad():
        other[0].weight.mul_(3)

    def step(x, *, late):
        net = one
        made = vmap(grad(lambda v: net(v).sum()))
        if late:
            net = other
        return made(x).detach()

    for late in (False, False, False, True, True, False, True):
        agree(lambda x, late=late: step(x, late=late), X)


def test_what_the_first_one_holds_by_now_is_not_asked_of_the_others():
    one, other = network(), network()
    with torch.no_grad():
        other[0].weight.mul_(3)
    rebind = []

    def step(x):
        net = one

        def bind(new):
            nonlocal net
            net = new

        rebind.append(bind)
        return vmap(grad(lambda v: net(v).sum()))(x).detach()

    for i in range(8):
        agree(step, X)
        for bind in rebind:
            bind(other if i > 3 else one)


def test_numbers_and_defaults_are_told_apart():
    def step(n, scale):
        return vmap(grad(lambda v, k=n: (v**k * scale).sum()))(X)

    for n, scale in [(2, 1.0), (2, 1.0), (3, 1.0), (2, -1.0), (3, 1.0), (2, 1), (True, 1.0)] * 3:
        agree(step, n, scale)


def test_a_global_is_watched(monkeypatch):
    for i in range(6):
        monkeypatch.setitem(globals(), "SCALE", float(i // 2))
        agree(STEPS["of a module and a function"], network(), X)
        agree(lambda x: vmap(grad(lambda v: (v * SCALE).sin().sum()))(x), X)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: by_what_it_holds(Own(i)),
        lambda i: by_what_it_holds([Own(i)]),
        lambda i: keyworded(i),
        lambda i: attributed(i),
        lambda i: recursive(i),
    ],
)
def test_what_may_be_another_thing_is_not_kept(make):
    for i in range(5):
        agree(lambda x, i=i: vmap(grad(make(i)))(x), X)
    assert not fresh_closures.table


class Own:
    def __init__(self, i):
        self.n = float(i)

    def __getitem__(self, i):
        return self

    def __rmul__(self, other):
        return self.n * other


def by_what_it_holds(w):
    return lambda v: (v * w[0]).sum()


def keyworded(i):
    def f(v, *, n=float(i)):
        return (v * n).sum()

    return f


def attributed(i):
    def f(v):
        return (v * vars(f)["n"]).sum()

    vars(f)["n"] = float(i)
    return f


def recursive(i):
    def power(v, n=i):
        return v.sum() if n == 0 else power(v, n - 1) * v.sum()

    return power


def test_a_module_goes_with_all_that_was_made_of_it():
    net = network()
    for _ in range(5):
        STEPS["of a module"](net, X)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(fresh_closures, "MOST", 8)
    for i in range(30):
        agree(lambda x, i=i: vmap(grad(lambda v: (v * i).sin().sum()))(x), X)
    assert len(fresh_closures.table) <= 8


class Switched:
    factor = 2.0

    def eval(self):
        return self.factor


def test_a_method_with_the_name_of_a_built_in_function(hits):
    switched, x = Switched(), torch.randn(3)
    for i in range(20):
        switched.factor = 2.0 if i < 15 else 3.0
        slope = forall.grad(lambda x: (x * switched.eval()).sum())(x)
        assert torch.equal(slope, torch.full((3,), switched.factor))
    assert hits


@pytest.mark.parametrize("how", ["global", "attribute", "alias", "value"])
def test_the_built_in_function_itself_reads_anew(how, monkeypatch):
    evaluate, x = eval, torch.randn(3)
    made = {
        "global": lambda: lambda x: (x * eval("FACTOR")).sum(),  # noqa: S307
        "attribute": lambda: lambda x: (x * builtins.eval("FACTOR")).sum(),  # noqa: S307
        "alias": lambda: lambda x: (x * of_python.eval("FACTOR")).sum(),  # noqa: S307
        "value": lambda: lambda x: (x * evaluate("FACTOR")).sum(),
    }
    for i in range(12):
        monkeypatch.setitem(globals(), "FACTOR", float(i))
        slope = forall.grad(made[how]())
        assert torch.equal(slope(x), torch.full((3,), float(i)))
