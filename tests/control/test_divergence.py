"""Examples that want different branches, or different numbers of steps."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from control.programs import PLAIN
from draws import make_generator
from forall import cond, fori_loop, grad, hessian, jvp, scan, switch, vmap, while_loop
from forall import map as map_
from golden import refused
from oracle import difference, loop

D = torch.float64


def collatz(lax):
    def steps(n):
        def step(c):
            n, count = c
            return lax.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n), count + 1

        return lax.while_loop(lambda c: c[0] != 1, step, (n, 0))[1]

    return steps


def newton(lax, **options):
    def root(a):
        far = lambda x: (x * x - a).abs() > 1e-10 * a  # noqa: E731
        return lax.while_loop(far, lambda x: (x + a / x) / 2, a * 0 + 1, **options)

    return root


class Ours:
    cond = staticmethod(cond)
    switch = staticmethod(switch)
    while_loop = staticmethod(while_loop)
    fori_loop = staticmethod(fori_loop)
    scan = staticmethod(scan)


SQUARES = torch.tensor([2.0, 50.0, 1.0, 1e6, 3.0], dtype=D)


@pytest.mark.parametrize("size", [1, 2, 13, 40, 256])
def test_numbers_of_steps_are_each_examples_own(size):
    n = torch.arange(1, size + 1)
    assert difference(vmap(collatz(Ours))(n), loop(collatz(PLAIN))(n)) is None


@pytest.mark.parametrize("every", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "verb",
    [
        lambda vmap, f: vmap(f),
        lambda vmap, f: vmap(grad(f)),
        lambda vmap, f: vmap(hessian(f)),
        lambda vmap, f: grad(lambda a: vmap(f)(a).sum()),
        lambda vmap, f: lambda a: jvp(vmap(f), (a,), (a,)),
        lambda vmap, f: lambda a: vmap(lambda a: jvp(f, (a,), (a,)))(a),
    ],
    ids=["vmap", "vmap of grad", "vmap of hessian", "grad of vmap", "jvp of vmap", "vmap of jvp"],
)
def test_newton_and_its_derivatives_with_checkpoints(verb, every):
    ours, plain = newton(Ours, checkpoint_every=every), newton(PLAIN)
    result = verb(vmap, ours)(SQUARES)
    truth = verb(loop, plain)(SQUARES)
    assert difference(result, truth) is None


class Rows(TorchDispatchMode):
    """How many rows sines were taken of."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sin.default:
            self.seen.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_an_example_that_has_finished_is_not_computed():
    trips = torch.tensor([1, 0, 4, 1, 2])
    x = torch.arange(5.0)
    with Rows() as rows:
        y = vmap(lambda x, n: fori_loop(0, n, lambda i, x: x.sin(), x))(x, trips)
    assert rows.seen == [4, 2, 1, 1]
    assert (
        difference(y, loop(lambda x, n: PLAIN.fori_loop(0, n, lambda i, x: x.sin(), x))(x, trips))
        is None
    )


def test_an_untaken_branch_does_not_run_for_an_example():
    x = torch.tensor([1.0, -1.0, 0.5, -2.0, -3.0])
    with Rows() as rows:
        vmap(lambda x: cond(x > 0, torch.sin, torch.cos, x))(x)
    assert rows.seen == [2]


def test_a_derivative_is_not_spoilt_by_a_branch_that_an_example_does_not_take():
    x = torch.tensor([4.0, -1.0, 0.0, 9.0], dtype=D)
    root = lambda x: cond(x > 0, torch.sqrt, lambda x: 0 * x, x)  # noqa: E731
    truth = torch.tensor([0.25, 0, 0, 1 / 6], dtype=D)
    for slope in (vmap(grad(root)), grad(lambda x: vmap(root)(x).sum())):
        torch.testing.assert_close(slope(x), truth)
    torch.testing.assert_close(jvp(vmap(root), (x,), (x * 0 + 1,))[1], truth)


def test_a_branch_that_never_ends_does_no_harm():
    def f(n):
        count = lambda n: while_loop(lambda n: n != 0, lambda n: n - 1, n)  # noqa: E731
        return cond(n >= 0, count, torch.neg, n)

    assert vmap(f)(torch.tensor([3, -2, 0, -7])).tolist() == [0, 2, 0, 7]


@pytest.mark.parametrize("size", [1, 7, 40])
def test_branches_of_a_switch(size):
    index = torch.randint(-2, 7, (size,), generator=make_generator(size))
    x = torch.linspace(-1, 2, size, dtype=D)
    branches = [torch.sin, torch.exp, torch.square, lambda x: x * 2, torch.tanh]

    def f(lax):
        return lambda x, i: lax.switch(i, branches, x)

    assert difference(vmap(f(Ours))(x, index), loop(f(PLAIN))(x, index)) is None
    slopes = vmap(grad(f(Ours)))(x, index)
    assert difference(slopes, loop(grad(f(PLAIN)))(x, index)) is None


@pytest.mark.parametrize("lower", ["mapped", "shared"])
@pytest.mark.parametrize("upper", ["mapped", "shared"])
def test_bounds_that_differ(lower, upper):
    low = torch.tensor([0, 2, 5, -1]) if lower == "mapped" else torch.tensor(1)
    high = torch.tensor([3, 2, 4, 6]) if upper == "mapped" else torch.tensor(4)
    x = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=D)
    over = (0, 0 if lower == "mapped" else None, 0 if upper == "mapped" else None)

    def f(lax):
        return lambda x, a, b: lax.fori_loop(a, b, lambda i, x: x * 0.5 + i * 2, x)

    assert difference(vmap(f(Ours), over)(x, low, high), loop(f(PLAIN), over)(x, low, high)) is None


def test_trees_meet_again():
    shared = torch.tensor([1.0, 2.0])

    def f(x, p):
        yes = lambda x: {"n": 1, "x": x * 2, "s": shared, "t": (2.5, None)}  # noqa: E731
        no = lambda x: {"x": x - 1, "n": 3, "t": (x, None), "s": shared}  # noqa: E731
        return cond(p, yes, no, x)

    x, p = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    result = vmap(f)(x, p)
    assert result.pop("t")[0].tolist() == [2.5, 2.0, 2.5]
    truth = {"n": torch.tensor([1, 3, 1]), "x": torch.tensor([2.0, 1.0, 6.0])}
    assert difference(result.pop("s"), shared.expand(3, 2)) is None
    assert difference(result, truth) is None


def test_control_flow_in_control_flow():
    def f(lax):
        def run(x, n):
            def step(c, i):
                grown = lax.fori_loop(0, n - i, lambda j, c: c.sin() + j * x, c)
                c = lax.cond(grown > c, lambda a, b: a * b, lambda a, b: a - b, grown, c)
                return c, c * 2

            c, ys = lax.scan(step, x, torch.arange(3))
            return lax.while_loop(lambda c: c.abs() > 0.3, lambda c: c * 0.7, c) + ys.sum()

        return run

    x, n = torch.tensor([0.5, 1.5, -0.7, 2.0], dtype=D), torch.tensor([3, 1, 0, 2])
    assert difference(vmap(f(Ours))(x, n), loop(f(PLAIN))(x, n)) is None
    truth = loop(grad(f(PLAIN)))(x, n)
    assert difference(vmap(grad(f(Ours)))(x, n), truth) is None
    assert difference(grad(lambda x: vmap(f(Ours))(x, n).sum())(x), truth) is None


@pytest.mark.parametrize("over", [(0, 0), (0, None), (None, 0)])
def test_two_levels_whose_examples_part(over):
    """A predicate of both levels, of the outer one, of the inner one."""
    x = torch.arange(6, dtype=D).reshape(2, 3) * 0.3 - 0.5
    n = {(0, 0): torch.tensor([[0, 3, 1], [2, 2, 5]]), (0, None): torch.tensor([4, 1])}
    n = n.get(over, torch.tensor([2, 0, 3]))

    def f(lax):
        return lambda x, n: lax.fori_loop(
            0, n, lambda i, y: lax.cond(y > 0, torch.sin, lambda y: y * 2 + 1, y) * x, x
        )

    inner = 0 if over[1] == 0 else None
    result = vmap(vmap(f(Ours), (0, inner)), (0, over[0] if over != (None, 0) else None))(x, n)
    truth = loop(loop(f(PLAIN), (0, inner)), (0, over[0] if over != (None, 0) else None))(x, n)
    assert difference(result, truth) is None


def test_a_step_of_map_may_part():
    x = torch.tensor([[1.0, -2.0, 3.0], [-1.0, -2.0, 0.5]])
    f = lambda row: map_(lambda y: cond(y > 0, torch.sqrt, torch.neg, y), row)  # noqa: E731
    expected = torch.where(x > 0, x.abs().sqrt(), -x)
    assert difference(vmap(f)(x), expected) is None
    chunks = lambda row: map_(lambda y: cond(y > 0, torch.sqrt, torch.neg, y), row, batch_size=2)  # noqa: E731
    assert difference(chunks(x[0]), expected[0]) is None
    assert difference(vmap(chunks)(x), expected) is None


def test_examples_that_never_finish_are_named():
    def going(n):
        return n != 0

    def down(n):
        return n - 1

    with refused(
        RuntimeError,
        """
        while_loop(going, down): the loop goes on after max_steps=9 steps.
            examples 1, 3   carry   int64[]
        Allow more steps, or let the test end the loop sooner.
        """,
    ):
        vmap(lambda n: while_loop(going, down, n, max_steps=9))(torch.tensor([3, -1, 9, 12]))


def test_branches_that_do_not_meet():
    def row(x):
        return {"a": x, "b": x[None]}

    def number(x):
        return {"a": x, "b": x}

    p = torch.tensor([True, False, True, False, True, True, True])
    with refused(
        TypeError,
        """
        cond(pred, row, number): result['b'] is not of one kind for all examples.
            examples 0, 2, 4, 5, ...   result['b']   float32[1]
            examples 1, 3              result['b']   float32[]
        Return the same structure, shapes and dtypes for each.
        """,
    ):
        vmap(lambda p: cond(p, row, number, torch.ones(())))(p)
    with refused(
        TypeError,
        """
        cond(pred, row, neg): result is not of one kind for all examples.
            examples 0, 2, 4, 5, ...   result   {'a': *, 'b': *}
            examples 1, 3              result   *
        Return the same structure, shapes and dtypes for each.
        """,
    ):
        vmap(lambda p: cond(p, row, torch.neg, torch.ones(())))(p)
