"""No transform has the host wait for the device, where no Python question of data is asked."""

import re

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import forall
from device import fakedev
from forall import (
    associative_scan,
    fori_loop,
    functional_call,
    grad,
    grad_and_value,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jit,
    jvp,
    laplacian,
    linearize,
    per_example_grad_norm,
    scan,
    stack_module_state,
    vjp,
    vmap,
)

D = fakedev.NAME


def numbers(*shape):
    return torch.randn(*shape, device=D)


W, V, X, XS = numbers(3, 3), numbers(3), numbers(3), numbers(5, 3)


def f(x):
    return (x @ W).tanh() * V


def loss(x):
    return f(x).square().sum()


def weighed(w, x):
    return (x @ w).tanh().square().sum()


def writes(x):
    buffer = torch.zeros(4, device=D)
    buffer[1:] += x
    buffer[0] = x.sum()
    return buffer.cumsum(0)


def drawn(x):
    return x + torch.randn(3, device=D) * torch.rand_like(x)


def dropped(x):
    return nn.functional.dropout(x, 0.5)


def autograd_inside(x):
    v = x.clone().requires_grad_()
    loss(v).backward()
    return v.grad


def steps(carry, x):
    carry = carry * x + f(x)
    return carry, carry.sin()


def kept(x):
    return torch.where(x > 0, x, x.exp()).sort()[0].softmax(0)


def indexed(x):
    return x[PLACES].index_add(0, PLACES, x) + x.gather(0, PLACES)


def looked_up(i):
    return nn.functional.embedding(i, W).sum(0)


def convolved(x):
    return CONV(x).relu()


def attended(x):
    y = x.expand(4, 3)
    return nn.functional.scaled_dot_product_attention(y, y, y * 2)


PLACES = torch.tensor([2, 0, 1], device=D)
INDICES = torch.tensor([[0, 1], [2, 2]], device=D)
CONV = nn.Conv1d(2, 3, 2).to(D)
IMAGES = numbers(4, 2, 6)
NETS = [nn.Linear(3, 2).to(D) for _ in range(4)]
STATE = stack_module_state(NETS)
NORM = nn.BatchNorm1d(3, track_running_stats=False).to(D)
STEPS = numbers(5, 4, 2, 3)  # examples, then steps of two rows
RECURRENT = {
    "an LSTM": nn.LSTM(3, 4).to(D),
    "a GRU": nn.GRU(3, 4).to(D),
    "an LSTM cell": nn.LSTMCell(3, 4).to(D),
    "a GRU cell": nn.GRUCell(3, 4).to(D),
}


def ensemble(state, x):
    return functional_call(NETS[0], state, (x,))


def per_example_gradients():
    state = dict(CONV.named_parameters())
    return vmap(
        grad(lambda s, x: functional_call(CONV, s, (x,)).square().sum()), in_dims=(None, 0)
    )(state, IMAGES)


def per_example_gradients_of_batch_norm():
    xs = numbers(2, 5, 3)
    state = dict(NORM.named_parameters())
    f = lambda s, x: functional_call(NORM, s, (x,)).pow(3).sum()  # noqa: E731
    return vmap(grad(f), in_dims=(None, 0))(state, xs)


def recurrent_calls(name):
    module, xs = RECURRENT[name], STEPS[:, 0] if "cell" in name else STEPS
    state = dict(module.named_parameters())

    def total(s, x):
        return tree_leaves(functional_call(module, s, (x,)))[0].square().sum()

    return {
        f"vmap of {name}": lambda: vmap(module)(xs),
        f"per-example gradients of {name}": lambda: vmap(grad(total), (None, 0))(state, xs),
        f"jvp of {name}": lambda: vmap(lambda x: jvp(lambda x: total(state, x), (x,), (x,)))(xs),
    }


def outside():
    w = W.clone().requires_grad_()
    vmap(lambda x: (x @ w).sin().sum())(XS).sum().backward()
    return w.grad


CALLS = {
    "vmap": lambda: vmap(f)(XS),
    "vmap of vmap": lambda: vmap(vmap(f))(XS.expand(2, 5, 3)),
    "vmap, in chunks": lambda: vmap(f, chunk_size=2)(XS),
    "vmap of writes": lambda: vmap(writes)(XS),
    "vmap of a choice": lambda: vmap(kept)(XS),
    "vmap of indices": lambda: vmap(indexed)(XS),
    "vmap of an embedding": lambda: vmap(looked_up)(INDICES),
    "vmap of a convolution": lambda: vmap(convolved)(IMAGES),
    "vmap of attention": lambda: vmap(attended)(XS),
    "vmap of batch norm": lambda: vmap(NORM)(numbers(2, 5, 3)),
    "vmap of autograd": lambda: vmap(autograd_inside)(XS),
    "draws that differ": lambda: vmap(drawn, randomness="different")(XS),
    "draws that are the same": lambda: vmap(drawn, randomness="same")(XS),
    "dropout": lambda: vmap(dropped, randomness="different")(XS),
    "dropout, in chunks": lambda: vmap(dropped, randomness="different", chunk_size=2)(XS),
    "grad": lambda: grad(loss)(X),
    "grad_and_value": lambda: grad_and_value(loss)(X),
    "grad of grad": lambda: grad(lambda x: grad(loss)(x).sum())(X),
    "vmap of grad": lambda: vmap(grad(loss))(XS),
    "per-example gradients": per_example_gradients,
    "vjp": lambda: vjp(f, X)[1](V),
    "jvp": lambda: jvp(f, (X,), (V,)),
    "jvp of grad": lambda: jvp(grad(loss), (X,), (V,)),
    "linearize": lambda: linearize(f, X)[1](V),
    "jacrev": lambda: jacrev(f)(X),
    "jacrev, in chunks": lambda: jacrev(f, chunk_size=2)(X),
    "jacfwd": lambda: jacfwd(f)(X),
    "hessian": lambda: hessian(loss)(X),
    "vmap of hessian": lambda: vmap(hessian(loss))(XS),
    "jacrev of jacfwd": lambda: jacrev(jacfwd(f))(X),
    "scan": lambda: scan(steps, V, XS),
    "vmap of scan": lambda: vmap(lambda x: scan(steps, x, XS)[0])(XS),
    "grad of scan": lambda: grad(lambda x: scan(steps, x, XS)[1].sum())(X),
    "associative_scan": lambda: associative_scan(torch.mul, XS),
    "fori_loop": lambda: fori_loop(0, 3, lambda _, x: f(x), X),
    "jit": lambda: JITTED(X),
    "jit of vmap of grad": lambda: PER_EXAMPLE(XS),
    "keys": lambda: forall.random.normal(forall.random.split(KEY, 3)[0], (3,)),
    "vmap of keys": lambda: vmap(lambda k: forall.random.normal(k, (3,)))(KEYS),
    "jacobian": lambda: jacobian(f)(X),
    "jacobian, value": lambda: jacobian(f, return_value=True)(X),
    "hessian_diag": lambda: hessian_diag(f)(X),
    "vmap of hessian_diag": lambda: vmap(hessian_diag(loss))(XS),
    "hvp": lambda: hvp(loss)(X, V),
    "vmap of hvp": lambda: vmap(hvp(loss), in_dims=(0, None))(XS, V),
    "laplacian": lambda: laplacian(loss)(X),
    "vmap of laplacian": lambda: vmap(laplacian(loss))(XS),
    "grad of laplacian": lambda: grad(laplacian(loss))(X),
    "map": lambda: forall.map(f, XS),
    "map, in batches": lambda: forall.map(f, XS, batch_size=2),
    "per_example_grad_norm": lambda: per_example_grad_norm(weighed)(W, XS),
    "functionalize": lambda: forall.functionalize(writes)(X),
    "vmap of functionalize": lambda: vmap(forall.functionalize(f))(XS),
    "rearrange": lambda: vmap(lambda x: forall.rearrange(x, "a b -> b a"))(IMAGES),
    "stacked": lambda: vmap(lambda x: [forall.stacked(x), x * 2][1])(XS),
    "debug_unwrap": lambda: vmap(lambda x: [forall.debug_unwrap(x), x * 2][1])(XS),
    "explain": lambda: forall.explain(vmap(f))(XS).result,
    "cond of a number": lambda: forall.cond(True, f, writes, X),
    "switch of a number": lambda: forall.switch(1, [torch.sin, f], X),
    "functional_call": lambda: functional_call(CONV, dict(CONV.named_parameters()), (IMAGES,)),
    "stack_module_state": lambda: vmap(ensemble, in_dims=((0, 0), None))(
        stack_module_state(NETS), X
    ),
    "an ensemble": lambda: vmap(ensemble, in_dims=((0, 0), None))(STATE, X),
    "psum": lambda: named(lambda x: x * forall.psum(x, "b"))(XS),
    "pmean": lambda: named(lambda x: x - forall.pmean(x, "b"))(XS),
    "pmax": lambda: named(grad(lambda x: (x - forall.pmax(x, "b")).exp().sum()))(XS),
    "pmin": lambda: named(lambda x: x - forall.pmin(x, "b"))(XS),
    "all_gather": lambda: named(grad(lambda x: forall.all_gather(x, "b").cos().sum()))(XS),
    "psum_scatter": lambda: named(lambda x: forall.psum_scatter(x, "b"))(SQUARE),
    "all_to_all": lambda: named(lambda x: forall.all_to_all(x, "b"))(SQUARE),
    "ppermute": lambda: named(lambda x: forall.ppermute(x, "b", [(0, 1), (2, 0)]))(XS),
    "axis_index": lambda: named(lambda x: x * forall.axis_index("b"))(XS),
    "axis_size": lambda: named(lambda x: x / forall.axis_size("b"))(XS),
    "grad of vmap of psum": lambda: grad(
        lambda x: named(lambda x: x * forall.psum(x, "b"))(x).sum()
    )(XS),
    "outside": outside,
    "per-example gradients of batch norm": per_example_gradients_of_batch_norm,
}
for recurrent in RECURRENT:
    CALLS.update(recurrent_calls(recurrent))
JITTED = jit(f)
PER_EXAMPLE = jit(vmap(grad(loss)))
KEY = forall.random.key(0).to(D)
KEYS = forall.random.split(KEY, 4)
SQUARE = numbers(5, 5, 2)  # examples with an entry for each example


def named(call):
    return vmap(call, axis_name="b")


@pytest.mark.parametrize("name", CALLS)
def test_the_host_does_not_wait(name, monkeypatch):
    # A replay that is compared with the call itself waits for the comparison.
    monkeypatch.setattr(forall.config, "replay", True)
    for _ in range(3):  # as it is, recorded, and replayed
        waits = fakedev.waits()
        with fakedev.no_waits():
            CALLS[name]()
        assert fakedev.waits() == waits


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_sent_to_the_device(name, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    CALLS[name]()  # what is kept is sent the first time
    before = fakedev.sent()
    CALLS[name]()
    assert fakedev.sent() == before


# What takes its way by numbers of the device waits for them, so often and no more.
ASKING = {
    "cond": (1, lambda: forall.cond(V.sum() > 0, torch.sin, torch.cos, X)),
    "grad of cond": (1, lambda: grad(lambda x: forall.cond(x.sum() > 0, f, f, x).sum())(X)),
    "vmap of cond": (
        1,
        lambda: vmap(lambda x: forall.cond(x.sum() > 0, torch.sin, f, x))(XS),
    ),
    "switch": (1, lambda: forall.switch(PLACES[1], [torch.sin, torch.cos], X)),
    "while_loop": (
        4,  # a question before each of three steps, and the last
        lambda: forall.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, f(s[1])), (ZERO, X)),
    ),
    "if": (1, lambda: vmap(lambda x: x * 2 if x.sum() > 0 else f(x))(XS)),
}
ZERO = torch.zeros((), device=D)
# These run no function of tensors.
OTHERS = {"Chunks", "Explanation", "PerformanceWarning", "config", "install", "installed"}
OTHERS |= {"AxisError", "RankError", "replace_all_batch_norm_modules_", "uninstall"}
# These are a vmap over the ranks of a mesh, and gloo sends messages of the CPU.
OTHERS |= {"axes", "shard_map"}


@pytest.mark.parametrize("name", ASKING)
def test_a_question_waits_once(name, monkeypatch):
    """In most calls: now and then another way of running the examples is tried."""
    monkeypatch.setattr(forall.config, "replay", True)
    waits, call = ASKING[name]
    found = []
    for _ in range(9):
        before = fakedev.waits()
        call()
        found.append(fakedev.waits() - before)
    assert sorted(found)[:6] == [waits] * 6


def test_every_public_transform_is_counted():
    named = {word for name in (*CALLS, *ASKING) for word in re.findall(r"\w+", name)}
    assert {*forall.__all__} - OTHERS <= named
