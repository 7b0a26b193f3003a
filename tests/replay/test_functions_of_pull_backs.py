"""Calls of functions that capture a pull-back, which `vjp` makes anew for each point."""

import gc
import weakref

import pytest
import torch
from torch import nn

import forall
from forall import functional_call, grad, jvp, vjp, vmap
from forall._api.vjp import find_pullback

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(0.1, 1, 3, dtype=D)
W = torch.linspace(1, 2, 3, dtype=D)
EYE = torch.eye(3, dtype=D)
CALLS = 12


@pytest.fixture
def hits(either_way, hits):
    return hits


def product(x):
    return (x * W).sin().exp() * x.sum()


def quadratic(x):
    return (torch.outer(x, W) @ x).cos()


def written(x):
    y = x * 2
    y[0] = x[1] * x[2]
    return y.sin() * W


def gradient(x):
    return grad(lambda v: product(v).square().sum())(x)


def in_pieces(x):
    a, b = x[:1], x[1:]
    return torch.cat([b.cumsum(0), a.exp()]).softmax(0)


def by_matrices(x):
    m = torch.outer(x, x) + 3 * EYE
    return torch.linalg.solve(m, W) + m.logdet()


def picked(x):
    return torch.where(x > 0.5, x.sqrt(), x**3)[[2, 0, 1]]


FUNCTIONS = (product, quadratic, written, gradient, in_pieces, by_matrices, picked)


def conjugate_gradients(pull, b):
    """Two steps, as a library has it: the pull-back is called in a function of one example."""

    def solve(b):
        x, r, p = torch.zeros_like(b), b, b
        for _ in range(2):
            ap = pull(p)[0] + p
            a = r.dot(r) / p.dot(ap)
            x, new = x + a * p, r - a * ap
            p, r = new + new.dot(new) / r.dot(r) * p, new
        return x

    return vmap(solve)(b)


USES = {
    "itself": lambda pull: vmap(pull)(EYE)[0],
    "in a lambda": lambda pull: vmap(lambda c: pull(2 * c)[0] + 1)(EYE),
    "twice": lambda pull: vmap(lambda c: pull(pull(c)[0])[0])(EYE),
    "nested": lambda pull: vmap(vmap(lambda c: pull(c)[0]))(torch.stack([EYE, 2 * EYE])),
    "of one example": lambda pull: vmap(pull)(EYE[:1])[0],
    "with a tangent": lambda pull: jvp(lambda c: pull(c)[0].sin(), (W,), (X,))[1],
    "with a gradient": lambda pull: grad(lambda c: pull(c)[0].square().sum())(W),
    "columns": lambda pull: vmap(pull, in_dims=1, out_dims=1)(torch.eye(4, 3, dtype=D).T)[0],
    "solved": lambda pull: conjugate_gradients(pull, EYE),
}


def plainly(step, *args):
    before, forall.config.replay = forall.config.replay, False
    try:
        return step(*args)
    finally:
        forall.config.replay = before


def agree(step, *args):
    found, wanted = step(*args), plainly(step, *args)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    return found


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_call_at_another_point_is_as_without_replay(hits, f, use):
    for i in range(CALLS):
        agree(lambda x: USES[use](vjp(f, x)[1]), X + i / 7)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_rows_are_those_of_the_loop(hits, f):
    for i in range(CALLS):
        _, pull = vjp(f, X + i / 7)
        found = vmap(lambda c, pull=pull: pull(c)[0])(EYE)
        torch.testing.assert_close(found, torch.stack([pull(c)[0] for c in EYE]))


@pytest.mark.parametrize("use", ["itself", "in a lambda", "nested", "columns", "solved"])
def test_such_calls_are_replayed(hits, use):
    for i in range(CALLS):
        found = vjp(product, X + i)[1]
        hits.clear()
        USES[use](found)
    assert hits


def test_functions_of_the_same_form_are_told_apart(hits):
    def step(f, x):
        return vmap(vjp(f, x)[1])(EYE)[0]

    for i in range(2 * CALLS):
        agree(step, (torch.sin, product, quadratic)[i % 3], X + i)


def test_a_number_that_the_function_captures_is_that_of_the_point(hits):
    def step(factor, x):
        _, pull = vjp(lambda v: (factor * v).sin(), x)
        factor = -1.0
        return vmap(lambda c: pull(c)[0])(EYE)

    for i in range(2 * CALLS):
        agree(step, float(i // 8), X)


def test_tensors_that_the_function_captures_are_those_of_the_point(hits):
    held = {"w": W}

    def f(x):
        return (x * held["w"]).sin()

    for i in range(CALLS):
        held["w"] = w = W + i
        _, pull = vjp(f, X)
        held["w"] = torch.zeros(3, dtype=D)
        found = vmap(lambda c, pull=pull: pull(c)[0])(EYE)
        torch.testing.assert_close(found, torch.diag((X * w).cos() * w))


def test_several_pull_backs_in_one_function(hits):
    def step(x):
        one, other = vjp(product, x)[1], vjp(quadratic, x + 1)[1]
        return vmap(lambda c: one(other(c)[0])[0] - other(c)[0])(EYE)

    for i in range(CALLS):
        agree(step, X + i / 7)


def test_trees_and_results_besides(hits):
    def f(p):
        y = p["a"] * p["b"][0] * p["k"]
        return (y.sin(), {"s": y.sum()}), y

    def step(x, k):
        _, pull, _ = vjp(f, {"a": x, "b": [x + 1], "k": k}, has_aux=True)
        return vmap(lambda c: pull((c, {"s": c[0]})))(EYE)

    for i in range(CALLS):
        found = agree(step, X + i, torch.tensor(3))
        assert found[0]["k"] is None


def test_with_and_without_a_result_besides(hits):
    def f(x):
        return x.sin(), x * W

    def both(x):
        return vmap(lambda c: vjp_of(x)(c))(EYE)

    def vjp_of(x):
        _, pull = vjp(f, x)
        return lambda c: pull((c, c))[0]

    def one(x):
        _, pull, _ = vjp(f, x, has_aux=True)
        return vmap(lambda c: pull(c)[0])(EYE)

    for i in range(2 * CALLS):
        agree((both, one)[i % 2], X + i)


def test_a_module_with_parameters_that_require_grad(hits):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(D)
    params = {name: p.detach() for name, p in net.named_parameters()}

    def of_inputs(x):
        _, pull = vjp(net, x)
        return vmap(pull)(EYE)[0].detach()

    def of_parameters(x):
        _, pull = vjp(lambda p: functional_call(net, p, (x,)), params)
        return vmap(pull)(EYE)[0]

    for i in range(CALLS):
        agree(of_inputs, X + i)
        agree(of_parameters, X + i)


def test_history_of_cotangents_and_points(hits):
    def step(x, c, which):
        x, c = x.clone().requires_grad_(which != 1), c.clone().requires_grad_(which != 0)
        _, pull = vjp(product, x)
        rows = vmap(lambda c: pull(c)[0])(c)
        given = [t for t in (x, c) if t.requires_grad]
        return rows.detach(), *torch.autograd.grad(rows.square().sum(), given)

    for i in range(2 * CALLS):
        agree(step, X + i, EYE + i, i % 3)


def test_dtypes_of_cotangents(hits):
    def step(x, dtype):
        _, pull = vjp(product, x)
        return vmap(lambda c: pull(c)[0])(EYE.to(dtype))

    for i in range(CALLS):
        agree(step, X + i, D)
    for i in range(CALLS):
        agree(step, X + i, torch.float32)


@pytest.mark.parametrize("on", [True, False])
def test_what_the_pull_back_reads_is_not_to_be_written_to(on):
    forall.config.replay = on
    for i in range(CALLS):
        x = X + i
        _, pull = vjp(torch.sin, x)
        if i < CALLS - 4:
            vmap(lambda c, pull=pull: pull(c)[0])(EYE)
            continue
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"inplace operation|changed since"):
            vmap(lambda c, pull=pull: pull(c)[0])(EYE)


def test_memory_that_is_freed_is_gone():
    for i in range(CALLS):
        _, pull = vjp(product, X + i)

        def last(c, pull=pull):
            return pull(c, retain_graph=False)[0]

        last(W)
        with pytest.raises(RuntimeError, match="second time"):
            vmap(lambda c, pull=pull: pull(c)[0])(EYE)


def test_a_bad_cotangent_is_the_same_error():
    for i in range(CALLS):
        _, pull = vjp(product, X + i)
        vmap(lambda c, pull=pull: pull(c)[0])(EYE)
        with pytest.raises(RuntimeError, match=r"vjp\(product\): a cotangent must have"):
            vmap(lambda c, pull=pull: pull(c[:2])[0])(EYE)


def test_an_error_that_the_function_catches_is_seen_anew(hits):
    def step(x):
        _, pull = vjp(product, x)

        def f(c):
            try:
                return pull(c[:2])[0]
            except RuntimeError as error:
                return c * len(str(error))

        return vmap(f)(EYE)

    for i in range(CALLS):
        agree(step, X + i)


def test_what_a_function_has_drawn_stays(hits):
    def f(x):
        return (x * torch.rand(3, dtype=D)).sin()

    def step(x):
        torch.manual_seed(3)
        _, pull = vjp(f, x)
        return vmap(lambda c: pull(c)[0])(EYE), torch.rand(2)

    for i in range(CALLS):
        agree(step, X + i)


def test_under_autocast():
    def step(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            _, pull = vjp(lambda x: x @ w, x)
        return vmap(lambda c: pull(c)[0])(torch.eye(3, dtype=torch.bfloat16))

    w = torch.linspace(1, 2, 9).reshape(3, 3)
    for i in range(CALLS):
        agree(step, X.float() + i, w)
    for i in range(CALLS):
        with torch.autocast("cpu", torch.bfloat16):
            agree(step, X.float() + i, w)


def test_points_and_functions_are_freed():
    class Owner:
        def __init__(self):
            self.w = W.clone()

        def of(self, x):
            return (x * self.w).sin()

    def make():
        owner = Owner()
        refs: list[weakref.ref] = [weakref.ref(owner)]
        for i in range(CALLS):
            x = X + i
            _, pull = vjp(owner.of, x)
            vmap(lambda c, pull=pull: pull(c)[0])(EYE)
            refs += [weakref.ref(x), weakref.ref(pull)]
        return refs

    refs = make()
    for _ in range(3):
        gc.collect()
    assert not any(r() is not None for r in refs)


def test_attributes_that_another_function_was_given_make_it_no_pull_back():
    _, pull = vjp(product, X)

    def other(c):
        return c

    vars(other).update(vars(pull))
    assert find_pullback(pull) is not None
    assert find_pullback(other) is None
