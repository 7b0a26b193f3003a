"""Functions that are made anew with each call, of other tensors: these are given to one program."""

import functools
import gc
import threading
import weakref
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call

import forall
from draws import make_generator
from forall import explain, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from forall._auto_replay import fresh_closures
from replay.test_fresh_functions import agree, network, plainly

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
NET = network()


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = NET

    def twice(self, v):
        return 2 * self.net(v)


DOUBLED = Doubled()
X = Y = torch.ones(2, 3, dtype=D)  # a notebook's: bound anew with each batch


@pytest.fixture
def hits(either_way, hits):
    return hits


def batch(i, n=4):
    numbers = make_generator(i)
    return tuple(torch.randn(n, 3, dtype=D, generator=numbers) for _ in range(2))


def mse(a, b):
    return (a - b).square().mean()


def weighted(w, x, y=1.0):
    return (w * x).sin().sum() * y


def in_the_notebook(w):
    return mse((w * X).sin(), Y)


def parameters():
    return {name: p.detach().clone() for name, p in NET.named_parameters()}


def with_parameters(x, y):
    p = parameters()
    return vmap(grad(lambda v: functional_call(NET, p, (v,)).sum()))(x)


def with_a_method(twice, x, y):
    return vmap(grad(lambda v: (twice(v) * y[0]).sum()))(x).detach()


def with_a_list(x, y):
    both = [x, (y, 2.0)]
    return grad(lambda w: (w * both[0] + both[1][0] * both[1][1]).sin().sum())(x)


class Batch(NamedTuple):
    inputs: torch.Tensor
    scale: float

    def doubled(self):
        return self.inputs * 2


def with_a_named_tuple(x, y):
    b = Batch(x, float(len(x)))
    return grad(lambda w: (w * b.doubled() * b.scale).sin().sum())(y)


def with_an_ordered_dict(x, y):
    p = OrderedDict(parameters())
    return vmap(grad(lambda v: functional_call(NET, p, (v,)).sum() * y[0, 0]))(x)


def with_functions(x, y):
    u = lambda z: NET(z)[0]  # noqa: E731
    slope, curved = grad(u), hessian(u)
    source = y.sin()

    def residual(z, s):
        return torch.trace(curved(z)) + (slope(z) * source[0]).sum() - s

    return vmap(residual)(x, y[:, 0]).detach()


def with_a_global(x, y):
    names = globals()
    names["X"], names["Y"] = x, y
    return grad(in_the_notebook)(y)


def with_a_global_and_more(x, y):
    names = globals()
    names["X"], names["Y"] = x, y
    return vmap(grad(lambda w, scale: (w * X[0] * scale + Y.sum()).sin().sum()), (0, None))(y, x[1])


STEPS = {
    "a closure": lambda x, y: grad(lambda p: mse(functional_call(NET, p, (x,)), y))(parameters()),
    "a default": lambda x, y: grad(lambda w, x=x: weighted(w, x))(y),
    "a partial": lambda x, y: grad(functools.partial(weighted, x=x))(y),
    "a partial of a closure": lambda x, y: grad(functools.partial(lambda w, v: w @ y[0] * v, v=2))(
        x[0]
    ),
    "parameters": with_parameters,
    "a list": with_a_list,
    "a NamedTuple": with_a_named_tuple,
    "an OrderedDict": with_an_ordered_dict,
    "functions and transforms": with_functions,
    "a pull-back": lambda x, y: vjp(lambda w: (w * x).sin(), y)[1](x)[0],
    "a tangent": lambda x, y: jvp(lambda w: (w * x).sin(), (y,), (y,))[1],
    "a linear map": lambda x, y: linearize(lambda w: (w * x).sin(), y)[1](x),
    "a keyword": lambda x, y: grad(lambda w, given, template: (w * x * given).sum() * template)(
        y, given=y, template=x[0, 0]
    ),
    "a method of a module": lambda x, y: with_a_method(DOUBLED.twice, x, y),
    "rows": lambda x, y: jacrev(lambda w: (w * x).sin() @ y[0])(y),
    "columns": lambda x, y: jacfwd(lambda w: (w * x[0]).sin() @ y.T)(y[0]),
    "a Hessian": lambda x, y: hessian(lambda w: weighted(w, x))(y[0]),
    "a diagonal": lambda x, y: forall.hessian_diag(lambda w: weighted(w, x))(y[0]),
    "norms": lambda x, y: forall.per_example_grad_norm(lambda w, v: (w * v * y[0]).sum())(x[0], x),
    "a global": with_a_global,
    "a lambda with globals": with_a_global_and_more,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", STEPS)
def test_it_is_replayed(name, hits):
    for i in range(12):
        agree(STEPS[name], *batch(i, 4 + (i % 2)))
    assert len(hits) >= 4, hits


def test_a_transform_that_nothing_tells_from_others_is_one_of_its_own(hits):
    x, y = batch(0)
    made = vmap(lambda d: (d["a"] * y).sin(), in_dims=({"a": 0},))
    for _ in range(6):
        assert torch.equal(made({"a": x}), (x[:, None] * y).sin())
    assert hits


def test_what_is_bound_anew_after_the_transform_counts(hits):
    def loss(w):
        return mse(w * x, y) * scale

    slope = grad(loss)
    for i in range(16):
        x, y = batch(i)
        scale = [1.0, 2.0, 2, torch.tensor(3.0)][i // 4]
        found = slope(y)
        assert torch.equal(found, plainly(grad(loss), y))
    assert hits


def test_kinds_of_what_is_given_are_told_apart():
    def step(x, y):
        return vmap(grad(lambda w: (w * x).sin().sum() + n))(y)

    x, y = batch(0)
    looks = [
        x[0],
        x[0].float(),
        x[:, 0][:3],
        x[0:1],
        x[0].requires_grad_(),
        nn.Parameter(x[0].detach()),
        x[0].detach()[0],
        2.0,
        2,
        True,
    ]
    n = 1
    for _ in range(3):
        for look in looks:
            for n in (1, y[0, 0], y[0].sum()):  # noqa: B007 - of the closure
                agree(lambda x, y: step(x, y).detach(), look, y)


def test_one_tensor_in_two_places(hits):
    def step(x, y, w):
        both = {"a": x, "b": y}
        return grad(lambda v: (v * both["a"] * w + both["b"]).sin().sum())(v)

    for i in range(24):
        x, y = batch(i % 2)
        v = x
        pairs = [(x, y, y), (x, x, x), (x, y, x), (x[:], x, x), (y, y.clone(), x), (v, x, v)]
        agree(step, *pairs[i // 4])
    assert hits


def test_parameters_of_a_module_that_is_held_too(hits):
    net = network()
    for i in range(10):
        x, _ = batch(i)
        p = dict(net.named_parameters())
        loss = lambda: vmap(  # noqa: E731
            grad(lambda v: (functional_call(net, p, (v,)) * net(2 * v)).sum())  # noqa: B023
        )(x).sum()  # noqa: B023
        found = torch.autograd.grad(loss(), [*p.values()])
        wanted = plainly(lambda: torch.autograd.grad(loss(), [*p.values()]))  # noqa: B023
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        with torch.no_grad():
            net[0].weight.mul_(0.9)
    assert hits


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_derivative_outside_once_other_tensors_are_held(hits, create_graph):
    def total():
        losses = []
        for i in range(8):
            x, y = batch(i)
            losses.append(vmap(grad(lambda v: weighted(v, w, y[0].sum())))(x).sum())  # noqa: B023
        return torch.stack(losses).prod()

    w = torch.linspace(1, 2, 3, dtype=D, requires_grad=True)
    for _ in range(3):
        (found,) = torch.autograd.grad(total(), w, create_graph=create_graph)
        (wanted,) = plainly(lambda: torch.autograd.grad(total(), w, create_graph=create_graph))
        torch.testing.assert_close(found, wanted)
        if create_graph:
            (found,) = torch.autograd.grad(found.sum(), w)
            (wanted,) = torch.autograd.grad(wanted.sum(), w)
            torch.testing.assert_close(found, wanted)
    assert hits


def test_what_is_written_to_before_the_backward_pass_is_an_error_as_ever():
    def step(x, w):
        y = vmap(grad(lambda v: (v * w).sin().sum()))(x)
        with torch.no_grad():
            w.mul_(2)
        return torch.autograd.grad(y.sum(), w)[0]

    for i in range(6):
        w = torch.ones(3, dtype=D, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(batch(i)[0], w)


def test_writes_into_what_is_held():
    def step(x, y):
        sums, log = torch.zeros(3, dtype=D), []

        def f(v):
            sums.add_(1)
            log.append(v.shape)
            return (v * y).sum()

        return grad(f)(x), sums, len(log)

    for i in range(6):
        agree(step, *batch(i))


def test_a_function_that_rebinds_what_it_holds():
    def step(x, y):
        n = 0

        def f(v):
            nonlocal n
            n += 1
            return (v * y).sum() * n

        made = grad(f)
        return made(x), made(x), n

    for i in range(6):
        agree(step, *batch(i))


def _turn():
    names = globals()
    names["X"] = names["X"] * 2


def doubles(x):
    global X  # noqa: PLW0603 - what is tested
    X = X * 2
    return x


class Calls:
    before = staticmethod(lambda: None)


def test_others_rebind_what_it_holds_while_it_runs():
    hook = Calls()

    def step(x, y, way):
        names = globals()
        names["X"] = x

        def turn():
            nonlocal y
            y = y + 1

        hook.before = turn
        ways = [
            lambda v: (_turn(), (v * X).sin().sum())[1],
            lambda v: (doubles(v) * X).sin().sum(),
            lambda v: (hook.before(), (v * y).sin().sum())[1],
        ]
        return grad(ways[way])(x), X, y

    for way in range(3):
        for i in range(7):
            agree(lambda x, y, way=way: step(x, y, way), *batch(i))


def test_helpers_that_read_the_same_globals(hits):
    for i in range(6):
        names = globals()
        names["X"], names["Y"] = batch(i)
        made = lambda w: in_the_notebook(w) + (w * X).sum()  # noqa: E731
        agree(lambda made=made: grad(made)(Y))
    assert not hits  # by a helper a tensor is captured, and each time it is another


def test_draws_are_the_functions(hits):
    def step(x, y):
        torch.manual_seed(0)
        made = vmap(lambda v: v * y[0] + torch.rand(3, dtype=D), randomness="different")
        return made(x), torch.rand(2)

    for i in range(6):
        agree(step, *batch(i))
    assert hits


def test_examples_that_part():
    for i in range(8):
        agree(lambda x, y: vmap(lambda v: v * 2 if (v * y[0]).sum() > 0 else -v)(x), *batch(i))


def test_errors_are_as_ever():
    def step(x, y):
        return grad(lambda v: v @ y)(x)

    said = set()
    for _ in range(6):
        with pytest.raises(RuntimeError) as e:
            step(*batch(0))
        said.add(str(e.value).replace(hex(id(e)), ""))
    with pytest.raises(RuntimeError) as e:
        plainly(step, *batch(0))
    assert said == {str(e.value)}


def test_nothing_that_is_given_is_kept(hits):
    net, gone = network(), []
    for i in range(8):
        x, y = batch(i)
        p = {name: t.detach().clone().requires_grad_() for name, t in net.named_parameters()}
        gone += map(weakref.ref, (x, y, *p.values()))
        loss = lambda v, p=p, y=y: mse(functional_call(net, p, (v,)), y[:1, :1])  # noqa: E731
        vmap(grad(loss))(x).sum().backward()
        del x, y, p, loss
    gc.collect()
    assert hits
    assert not [t for t in (ref() for ref in gone) if t is not None]
    assert len(fresh_closures.table) == 0  # all with the module


def test_one_function_in_two_threads(hits):
    wrong = []

    def work(seed):
        for i in range(30):
            x, y = batch(seed + i)
            found = vmap(grad(lambda v: (v * y[0]).sin().sum()))(x)  # noqa: B023
            if not torch.equal(found, (x * y[0]).cos() * y[0]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert hits


def test_explain_tells_of_all():
    def made(y):
        return vmap(lambda v: (v * y[0]).sin())

    for i in range(6):
        x, y = batch(i)
        made(y)(x)
    assert "calls so far" in explain(made(X))(X).replay


def test_many_things_are_not_read_with_each_call(hits):
    rows = [torch.ones(3, dtype=D)] * (fresh_closures._MOST_GIVEN + 1)
    for i in range(5):
        agree(lambda x, y: grad(lambda v: (v * rows[3]).sum())(x), *batch(i))
    assert not hits
    assert not fresh_closures.table


def test_a_class_of_its_own_is_left_alone():
    class Own(nn.Parameter): ...

    for i in range(5):
        w = torch.full((3,), float(i), dtype=D).as_subclass(Own)
        agree(lambda x, y, w=w: grad(lambda v: (v * w).sum())(x), *batch(i))
    assert not fresh_closures.table
