"""What runs and what does not, trees, numbers, memory, and torch's own operators inside ours."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from control.programs import PLAIN
from draws import make_generator
from forall import (
    associative_scan,
    cond,
    fori_loop,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jvp,
    scan,
    switch,
    vmap,
    while_loop,
)
from forall import map as map_
from oracle import difference

D = torch.float64


def fails(*_):
    raise AssertionError("a branch that is not taken has run")


# --- only what is taken runs ----------------------------------------------------------------------


@pytest.mark.parametrize("pred", [True, 1, torch.tensor(True), torch.tensor([2.0])])
def test_the_other_branch_does_not_run(pred):
    x = torch.tensor(3.0)
    assert cond(pred, torch.neg, fails, x) == -3
    assert cond(False, fails, torch.neg, x) == -3
    assert grad(lambda x: cond(pred, torch.square, fails, x))(x) == 6
    assert vmap(lambda x: cond(pred, torch.neg, fails, x))(x[None]) == -3


def test_other_branches_of_a_switch_do_not_run():
    for index in (1, torch.tensor(1), torch.tensor([1], dtype=torch.uint8)):
        assert switch(index, [fails, torch.neg, fails, fails], torch.tensor(3.0)) == -3


def test_a_derivative_is_not_spoilt_by_a_branch_that_is_not_taken():
    root = lambda x: cond(x > 0, torch.sqrt, lambda x: 0 * x, x)  # noqa: E731
    assert grad(root)(torch.tensor(0.0)) == 0
    assert hessian(root)(torch.tensor(-1.0)) == 0


def test_a_branch_that_never_ends_does_no_harm():
    endless = lambda x: while_loop(lambda _: True, lambda x: x, x)  # noqa: E731
    assert cond(torch.tensor(False), endless, torch.neg, torch.tensor(1.0)) == -1


def test_operands_may_be_trees_and_functions_may_capture():
    w = torch.tensor(2.0)
    f = lambda x, w: cond(x["n"] > 0, lambda x: x["a"] * w, lambda x: x["a"], x)  # noqa: E731
    x = {"a": torch.tensor(3.0), "n": 1}
    assert grad(lambda w: f(x, w))(w) == 3


def test_the_test_of_a_loop_runs_once_more_than_the_body():
    for every in (None, 1, 2, 3, 5, 7):
        tests, bodies = [], []

        def test(x, tests=tests):
            tests.append(0)
            return x < 6

        def body(x, bodies=bodies):
            bodies.append(0)
            return x + 1

        assert while_loop(test, body, torch.tensor(0), checkpoint_every=every) == 6
        assert (len(tests), len(bodies)) == (7, 6)


# --- derivatives where the values decide ----------------------------------------------------------


def newton(loop):
    def root(a):
        start = (a * 0 + 1, 0)
        far = lambda c: (c[0] * c[0] - a).abs() > 1e-12  # noqa: E731
        return loop(far, lambda c: ((c[0] + a / c[0]) / 2, c[1] + 1), start)[0]

    return root


@pytest.mark.parametrize("every", [None, 1, 2, 100])
def test_reverse_and_forward_mode_of_a_while_loop(every):
    root = newton(lambda *args: while_loop(*args, checkpoint_every=every))
    for a in (torch.tensor(2.0, dtype=D), torch.tensor(50.0, dtype=D)):
        near = lambda x: pytest.approx(x, rel=1e-9)  # noqa: E731
        slope, value = grad_and_value(root)(a)
        assert value.item() == near(a.item() ** 0.5)
        assert slope.item() == near(0.5 * a.item() ** -0.5)
        assert jvp(root, (a,), (a * 0 + 3,))[1].item() == near(1.5 * a.item() ** -0.5)
        assert hessian(root)(a).item() == near(-0.25 * a.item() ** -1.5)
        assert jacrev(jacrev(root))(a).item() == near(-0.25 * a.item() ** -1.5)


# --- checkpoints ----------------------------------------------------------------------------------


def waves(w, x, every):
    body = lambda c: (c[0] + 1, torch.sin(c[1] * w).exp() * 0.5)  # noqa: E731
    return while_loop(lambda c: c[0] < 10, body, (0, x), checkpoint_every=every)[1].sum()


TRANSFORMS = {
    "grad": lambda f: grad(f, (0, 1)),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1)), (None, 0)),
    "grad of vmap": lambda f: grad(lambda w, x: vmap(f, (None, 0))(w, x).sum(), (0, 1)),
    "hessian": lambda f: hessian(f, (0, 1)),
    "vmap of hessian": lambda f: vmap(hessian(f, (0, 1)), (None, 0)),
    "grad of grad": lambda f: grad(lambda w, x: grad(f)(w, x).sin().sum(), (0, 1)),
    "jvp": lambda f: lambda w, x: jvp(f, (w, x), (w.cos(), x.cos())),
    "jvp of grad": lambda f: lambda w, x: jvp(grad(f, (0, 1)), (w, x), (w.cos(), x.cos())),
}


@pytest.mark.parametrize("every", [1, 3, 10, 11])
@pytest.mark.parametrize("verb", TRANSFORMS)
def test_checkpoints_change_no_derivative(verb, every):
    w, x = torch.tensor([0.3, 0.9], dtype=D), torch.tensor([[0.5, -1.0], [2.0, 0.1]], dtype=D)
    transform = TRANSFORMS[verb]
    truth = transform(lambda w, x: waves(w, x, None))(w, x)
    result = transform(lambda w, x: waves(w, x, every))(w, x)
    found = difference(result, truth)
    assert found is None, found


def test_checkpoints_bound_the_memory_and_run_each_step_once_more():
    def kept_and_run(every):
        kept, steps = [], []

        def pack(t):
            kept.extend([0] * bool(t.numel()))  # torch 2.10 packs one without entries
            return t

        def body(c):
            steps.append(0)
            return c[0] + 1, torch.sin(c[1]).exp()  # which keep their argument and their result

        x = torch.ones(3, requires_grad=True)
        with saved_tensors_hooks(pack, lambda t: t):
            _, y = while_loop(lambda c: c[0] < 20, body, (0, x), checkpoint_every=every)
        y.sum().backward()
        return len(kept), len(steps), x.grad

    kept, run, slope = kept_and_run(None)
    assert (kept, run) == (40, 20)
    kept, run, same = kept_and_run(5)
    assert (kept, run) == (0, 40)
    assert torch.equal(slope, same)


def test_a_checkpoint_draws_the_same_numbers_again():
    def noisy(x, every):
        body = lambda c: (c[0] + 1, c[1] * torch.rand_like(x) + x)  # noqa: E731
        torch.manual_seed(0)
        return while_loop(lambda c: c[0] < 6, body, (0, x), checkpoint_every=every)[1].sum()

    x = torch.tensor([0.3, 0.8], dtype=D)
    assert torch.equal(grad(noisy)(x, None), grad(noisy)(x, 2))
    mapped = lambda every: vmap(grad(noisy), (0, None), randomness="different")(  # noqa: E731
        x[:, None], every
    )
    assert torch.equal(mapped(None), mapped(2))


# --- numbers, lengths, empty ----------------------------------------------------------------------


def test_python_numbers_stay_python_numbers():
    assert while_loop(lambda n: n < 100, lambda n: n * 3, 1) == 243
    assert fori_loop(0, 4, lambda i, total: total + i, 0) == 6
    x = torch.arange(3.0)
    assert torch.equal(scan(lambda n, x: (n + 1, x * n), 0, x)[1], torch.tensor([0.0, 1.0, 4.0]))


def test_numbers_are_results_under_vmap_as_in_the_loop():
    counted = vmap(lambda x: while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x)))
    x = torch.tensor([2.0, 3.0])
    assert difference(counted(x), (torch.tensor([3, 3]), x**4)) is None


@pytest.mark.parametrize("integer", [int, torch.tensor, lambda n: torch.tensor(n).int()])
def test_the_number_of_a_step_is_what_the_lower_bound_is(integer):
    seen = []
    lower = integer(2)
    fori_loop(lower, torch.tensor(5), lambda i, x: seen.append(i) or x, 0)
    assert [int(i) for i in seen] == [2, 3, 4]
    assert all(type(i) is type(lower) for i in seen)
    assert all(getattr(i, "dtype", None) == getattr(lower, "dtype", None) for i in seen)


def test_the_order_of_keys_does_not_matter():
    def step(c, x):
        if c["n"] % 2:
            return {"x": c["x"] + x, "n": c["n"] + 1}, {"a": x, "b": -x}
        return {"n": c["n"] + 1, "x": c["x"] * x}, {"b": -x, "a": x}

    x = torch.arange(4.0)
    carry, ys = scan(step, {"n": 0, "x": x[1]}, x)
    assert difference(carry, {"n": 4, "x": torch.tensor(5.0)}) is None
    assert difference(ys, {"b": -x, "a": x}) is None

    def fn(f, g):
        return {"b": f["b"] * g["b"], "a": f["a"] + g["a"]}

    scanned = associative_scan(fn, {"a": x, "b": x + 1})
    assert difference(scanned, {"a": x.cumsum(0), "b": (x + 1).cumprod(0)}) is None


def test_a_scan_of_no_steps_knows_its_shapes():
    drawn = torch.get_rng_state()
    seen = []

    def f(carry, x):
        seen.append(x.shape)
        noise = torch.rand(3)
        return carry * x.sum(), {"a": x[0] + noise, "b": carry > 0, "c": 1.5, "d": None}

    init = torch.tensor(2.0)
    carry, ys = scan(f, init, torch.empty(0, 2, 3))
    assert carry is init
    assert seen == [(2, 3)]
    assert torch.equal(torch.get_rng_state(), drawn)
    empty = {"a": torch.empty(0, 3), "b": torch.empty(0, dtype=torch.bool), "c": torch.empty(0)}
    assert ys.pop("d") is None
    assert difference(ys, empty) is None
    within = vmap(lambda x: map_(lambda y: y * x, torch.empty(0, 2)))(torch.ones(4))
    assert within.shape == (4, 0, 2)
    assert grad(lambda x: map_(lambda y: y * x, torch.empty(0, 2)).sum())(torch.tensor(2.0)) == 0


def test_a_scan_may_be_given_its_length():
    carry, ys = scan(lambda c, _: (c * 2, c), torch.tensor(1), length=3)
    assert (carry.item(), ys.tolist()) == (8, [1, 2, 4])
    assert scan(lambda c, _: (c, None), 5, None, 0) == (5, None)
    assert scan(lambda c, x: (c + x, None), 0, torch.ones(2), 2, unroll=4) == (2, None)


def test_the_examples_of_a_map_run_in_batches():
    seen = []

    def f(x):
        seen.append(0)
        return x.sum(), x * torch.rand(())

    map_(f, torch.ones(7, 2), batch_size=3)
    assert len(seen) == 3


@pytest.mark.parametrize("n", range(18))
def test_an_associative_scan_calls_its_function_few_times(n):
    calls = []

    def fn(a, b):
        calls.append(0)
        return torch.cummax(torch.stack([a, b]), 0)[0][1]

    x = torch.randn(n, 2)
    assert torch.equal(associative_scan(fn, x), x.cummax(0)[0] if n else x)
    assert len(calls) <= 2 * max(n, 1).bit_length()


@pytest.mark.parametrize("size", [0, 1, 5])
def test_an_associative_scan_of_matrices_under_vmap_and_grad(size):
    x = torch.randn(3, size, 2, 2, dtype=D, generator=make_generator(size))

    def products(scanned):
        return lambda x: scanned(lambda a, b: ((b[0] @ a[0]),), (x,))[0].sin().sum()

    ours = vmap(grad(products(associative_scan)))(x)
    plain = lambda x: products(PLAIN.associative_scan)(x) if size else x.sum()  # noqa: E731
    assert difference(ours, torch.stack([grad(plain)(a) for a in x])) is None


# --- next to torch --------------------------------------------------------------------------------


def test_a_loop_may_write_what_it_captures():
    log = torch.zeros(4)

    def body(i, x):
        log[i] = x
        return x * 2

    fori_loop(0, 4, body, torch.tensor(1.0))
    assert log.tolist() == [1, 2, 4, 8]


def test_backward_reaches_what_the_functions_capture():
    w = torch.tensor(2.0, requires_grad=True)
    y = vmap(lambda x: scan(lambda c, x: (c * w + x, None), 0.0, x)[0])(torch.ones(3, 2))
    y.sum().backward()
    assert w.grad == 3
