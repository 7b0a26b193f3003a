"""A call that ends in an exception leaves all state as it was; threads are apart."""

import threading

import pytest
import torch
from torch.autograd import forward_ad

from draws import make_generator
from forall import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from forall._core import levels
from oracle import difference
from state import state

D = torch.float64


def ones(x):
    return torch.ones_like(x)


VERBS = {
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x * 2])).sum(),
    "grad": grad,
    "grad_and_value": lambda f: lambda x: sum(grad_and_value(f)(x)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](ones(x))[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (ones(x),))[1],
    "linearize": lambda f: lambda x: linearize(f, x)[1](ones(x)),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
}


class Custom(Exception):  # noqa: N818 - named for what it is
    pass


ERRORS = {
    "an exception": Custom,
    "a keyboard interrupt": KeyboardInterrupt,
    "a generator's exit": GeneratorExit,
}


def failing(error):
    def f(x):
        y = x.sin() * x
        if y is not None:
            raise error
        return y

    return f


def failing_in_an_operator(x):
    return torch.linalg.cholesky(-torch.eye(2, dtype=D) * x.exp()).sum()


def failing_in_shapes(x):
    return (torch.ones(3, dtype=D) * x) @ (torch.ones(4, dtype=D) * x)


def failing_in_the_backward(x):
    h = x * 2

    def hook(g):
        raise Custom

    if h.requires_grad:
        h.register_hook(hook)
        return h.sin()
    raise Custom


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("outer", ["", *VERBS])
@pytest.mark.parametrize("inner", VERBS)
def test_what_is_raised_inside_comes_out_and_leaves_all_as_it_was(inner, outer, error):
    f = VERBS[inner](failing(ERRORS[error]))
    if outer:
        f = VERBS[outer](f)
    before = state()
    with pytest.raises(ERRORS[error]):
        f(torch.tensor(0.3, dtype=D))
    assert state() == before


@pytest.mark.parametrize(
    "broken", [failing_in_an_operator, failing_in_shapes, failing_in_the_backward]
)
@pytest.mark.parametrize("outer", ["", *VERBS])
@pytest.mark.parametrize("inner", VERBS)
def test_a_failing_operator_leaves_all_as_it_was(inner, outer, broken):
    f = VERBS[inner](broken)
    if outer:
        f = VERBS[outer](f)
    before = state()
    with pytest.raises((Custom, RuntimeError)):
        f(torch.tensor(0.3, dtype=D))
    assert state() == before


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("outer", ["", *VERBS])
@pytest.mark.parametrize("inner", VERBS)
def test_a_call_that_ends_well_leaves_all_as_it_was(inner, outer, grad_mode):
    f = VERBS[inner](lambda x: x.sin() * x.exp() * x)
    if outer:
        f = VERBS[outer](f)
    with torch.set_grad_enabled(grad_mode):
        before = state()
        f(torch.tensor(0.3, dtype=D, requires_grad=True))
        assert state() == before


@pytest.mark.parametrize("verb", VERBS)
def test_an_exception_caught_inside_lets_the_call_go_on(verb):
    def f(x):
        with pytest.raises(Custom):
            vmap(grad(failing(Custom)))(torch.stack([x, x]))
        with pytest.raises(Custom):
            jvp(failing(Custom), (x,), (x,))
        return x.sin() * x

    x = torch.tensor(0.3, dtype=D)
    truth = VERBS[verb](lambda x: x.sin() * x)(x)
    assert difference(VERBS[verb](f)(x), truth) is None


def test_a_bad_call_leaves_all_as_it_was():
    before = state()
    x = torch.zeros(3, 2, dtype=D)
    for bad in (
        lambda: vmap(lambda a, b: a)(x, x[:2]),
        lambda: vmap(lambda a: a, out_dims=5)(x),
        lambda: vmap(lambda a: a, out_dims=(0, 0))(x),
        lambda: vmap(lambda a: a, out_dims=None)(x),
        lambda: grad(lambda a: a)(x),
        lambda: grad(lambda a: a.sum(), argnums=3)(x),
        lambda: jvp(lambda a: a, (x,), (x[:2],)),
        lambda: vjp(lambda a: a, x)[1](x[:2]),
        lambda: jacfwd(lambda a: "text")(x),
    ):
        with pytest.raises((ValueError, RuntimeError, IndexError, TypeError)):
            bad()
        assert state() == before


def test_a_generator_that_is_dropped_inside_leaves_all_as_it_was():
    def partial():
        yield vmap(lambda a: a * 2)(torch.ones(3, 2))
        yield grad(lambda a: a.sum())(torch.ones(2))

    before = state()
    vmap(lambda a: a + next(partial())[0])(torch.ones(3, 2))
    assert state() == before


# --- threads --------------------------------------------------------------------------------------


def work(seed):
    """Every transform on numbers of this thread's own, and the closed forms."""
    generator = make_generator(seed)
    x = torch.randn(3, dtype=D, generator=generator)
    w = torch.randn(3, dtype=D, generator=generator).requires_grad_()
    wx, plain = w.detach(), w.detach()

    def f(x):
        return (x**3 * w).sum()

    xs = torch.stack([x, 2 * x])
    y, pull = vjp(lambda x: x**3 * plain, x)
    leaf = x.clone().requires_grad_()
    vmap(f)(torch.stack([leaf, 2 * leaf])).sum().backward()
    found = [
        vmap(f)(xs),
        vmap(grad(f))(xs),
        grad_and_value(f)(x)[1],
        pull(x)[0],
        y,
        *jvp(lambda x: x**3 * plain, (x,), (x,)),
        jvp(lambda x: jvp(lambda x: x**3, (x,), (plain,))[1], (x,), (plain,))[1],
        linearize(lambda x: x**3 * plain, x)[1](plain),
        jacrev(lambda x: x**3)(x),
        jacfwd(lambda x: x**3)(x),
        hessian(f)(x),
        vmap(jacfwd(lambda x: x**3))(xs),
        leaf.grad,
        w.grad,
    ]
    truth = [
        (xs**3 * wx).sum(1),
        3 * xs**2 * wx,
        (x**3 * wx).sum(),
        3 * x**3 * wx,
        x**3 * wx,
        x**3 * wx,
        3 * x**3 * wx,
        6 * x * wx**2,
        3 * x**2 * wx**2,
        torch.diag(3 * x**2),
        torch.diag(3 * x**2),
        torch.diag(6 * x * wx),
        torch.diag_embed(3 * xs**2),
        3 * x**2 * wx * 9,
        9 * x**3,
    ]
    return difference([t.detach() for t in found], truth)


def test_one_thread_is_right():
    assert work(0) is None


def test_eight_threads_run_all_transforms_at_once():
    start = threading.Barrier(8)
    failures = []

    def run(seed):
        try:
            start.wait()
            for i in range(10):
                found = work(100 * seed + i)
                if found is not None or state() | {"forward level": 0} != clean:
                    failures.append((seed, found))
        except BaseException as e:
            failures.append((seed, repr(e)))

    clean = state() | {"forward level": 0}
    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    assert forward_ad._current_level == -1


def test_a_level_of_one_thread_is_not_seen_by_another():
    seen = []

    def other():
        seen.append((levels.top(), torch._C._len_torch_dispatch_stack()))
        seen.append(difference(torch.ones(2) * 2, torch.full((2,), 2.0)))

    def f(a):
        t = threading.Thread(target=other)
        t.start()
        t.join()
        return a * 2

    vmap(grad(lambda a: f(a).sum()))(torch.ones(3, 2))
    jvp(f, (torch.ones(2),), (torch.ones(2),))
    assert seen == [(None, 0), None] * 2
