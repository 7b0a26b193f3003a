"""A call whose examples diverge, next to what else it has: draws, errors, results, other levels."""

from __future__ import annotations

import functools

import pytest
import torch

import forall
from by_groups import only_groups
from divergence.cases import D
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from forall._compat.devices import count_function_modes
from forall._core.levels import top
from oracle import difference, stack_trees

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(params=["groups", "converted"])
def way(request, monkeypatch):
    """Groups alone, as for a function whose source cannot be had; or what vmap chooses."""
    if request.param == "groups":
        only_groups(monkeypatch)


@pytest.fixture
def groups_alone(way, monkeypatch):
    only_groups(monkeypatch)


XS = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, 0.5], dtype=D)
MATRIX = XS.reshape(2, 3)


def looped(f, xs):
    return stack_trees([f(xs[i]) for i in range(len(xs))])


def branches(x):
    if x > 0:
        return x.sin() * x if x > 2 else x**3
    return x.exp()


def assert_same(mine, truth):
    assert (found := difference(mine, truth)) is None, found


def nothing_is_left():
    """No level and no mode of ours is active any more."""
    assert top() is None
    assert type(torch.ones(2, requires_grad=True) * 2) is torch.Tensor
    assert count_function_modes() == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


# --- draws ---------------------------------------------------------------------------------------


def test_the_same_draws_for_all_examples_of_all_groups():
    def f(x):
        before = torch.rand(2, dtype=D)
        return torch.cat([before, torch.rand(2, dtype=D)]) if x > 0 else torch.cat([before, before])

    out = vmap(f, randomness="same")(XS)
    assert (out[:, :2] == out[0, :2]).all()
    positive = out[XS > 0]
    assert (positive == positive[0]).all()
    assert torch.equal(vmap(f, randomness="same", chunk_size=4)(XS)[:, :2] >= 0, out[:, :2] >= 0)


def test_the_same_draws_from_a_generator_of_the_users():
    own = make_generator()

    def f(x):
        before = torch.rand(2, generator=own)
        return before if x > 0 else before + 0

    out = vmap(f, randomness="same")(XS)
    assert (out == out[0]).all()


def test_what_was_drawn_before_parting_is_drawn_once():
    def f(x):
        drawn = torch.rand(())
        return drawn if x > 0 else drawn * 1

    def after(examples):
        torch.manual_seed(0)
        out = vmap(f, randomness="different")(examples)
        return out, torch.rand(())

    parted, next_drawn = after(XS)
    agreed, next_after_one_run = after(XS.abs())
    assert len(set(parted.tolist())) == len(XS)
    assert torch.equal(next_drawn, next_after_one_run)
    assert torch.equal(parted.sort().values, agreed.sort().values)


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_draws_of_a_key_are_those_of_one_example(chunk_size):
    def f(x):
        y = torch.rand((), dtype=D) + x
        while y < 2:
            y = y + torch.rand((), dtype=D)
        return y + torch.randn((), dtype=D)

    def alone(i, key):
        with forall.random.scope(key, i):
            return f(XS[i])

    key = forall.random.key(3)
    out = vmap(f, randomness=key, chunk_size=chunk_size)(XS)
    assert_same(out, torch.stack([alone(i, key) for i in range(len(XS))]))


def test_forbidden_draws_stay_forbidden():
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: x * 2 if x > 0 else x + torch.rand(()))(XS)


# --- errors --------------------------------------------------------------------------------------


class FailedError(Exception):
    pass


@pytest.mark.parametrize("error", [FailedError, KeyboardInterrupt, SystemExit])
def test_an_error_of_the_second_group_leaves_everything_as_it_was(error, groups_alone):
    acc, kept = torch.zeros((), dtype=D), torch.ones((), dtype=D)
    w = torch.tensor(2.0, dtype=D, requires_grad=True)
    xs = XS.clone()

    def f(x):
        acc.add_(x)
        kept.fill_(2.0)
        (w * x).backward()
        x.mul_(2)
        if x > 0:
            return x
        raise error("below")

    versions = acc._version, kept._version, xs._version
    with pytest.raises(error):
        vmap(f)(xs)
    assert (acc.item(), kept.item(), w.grad) == (0, 1, None)
    assert torch.equal(xs, XS)
    assert (acc._version, kept._version, xs._version) == versions
    nothing_is_left()
    assert_same(vmap(branches)(XS), looped(branches, XS))


@pytest.mark.parametrize("chunk_size", [None, 2, 4])
def test_the_first_error_of_the_loop_names_the_example_in_the_whole_batch(chunk_size):
    xs = torch.tensor([0.1, 0.2, -0.3, 2.0, 0.4, -2.0], dtype=D)

    def f(x):
        if x > 1:
            raise ValueError("above")
        if x < -1:
            raise KeyError("below")
        return x if x > 0 else x * 2

    with pytest.raises(ValueError, match="above") as caught:
        vmap(f, chunk_size=chunk_size)(xs)
    assert "example 3 of 6, counted from 0" in "\n".join(caught.value.__notes__)


def test_an_operators_error_names_the_example_at_each_level():
    def f(x):
        return torch.linalg.cholesky(x.reshape(1, 1)).sum() if x < 4 else x

    with pytest.raises(torch.linalg.LinAlgError) as caught:
        vmap(vmap(f))(MATRIX)
    notes = "\n".join(caught.value.__notes__)
    assert "example 0 of 2" in notes
    assert "example 1 of 3" in notes


def caught_by_kind(x):
    try:
        return torch.linalg.cholesky(x.reshape(1, 1)).sum()
    except torch.linalg.LinAlgError:
        return x * 10


def caught_by_a_bare_except(x):
    try:
        if x > 0:
            return x * 2
        return x * x.item()
    except:  # noqa: E722
        return x * 100


def caught_and_asked_again(x):
    found = x * 0
    for limit in (0.0, 2.0):
        try:
            if x < limit:
                raise ValueError
            found = found + x.item()
        except ValueError:
            found = found - 1
        finally:
            found = found * 2
    return found


def raised_and_caught_for_some(x):
    try:
        [1.0, 2.0][int(x)]
    except IndexError:
        return x * 7
    else:
        return x


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize(
    "f",
    [caught_by_kind, caught_by_a_bare_except, caught_and_asked_again, raised_and_caught_for_some],
)
def test_an_error_that_is_caught_is_the_affair_of_those_examples(f, chunk_size):
    assert_same(vmap(f, chunk_size=chunk_size)(XS), looped(f, XS))
    assert_same(vmap(vmap(f, chunk_size=chunk_size))(MATRIX), looped(f, XS).reshape(2, 3))


# --- results and arguments -----------------------------------------------------------------------

RESULTS = {
    "trees": (lambda x: (x, x) if x > 0 else [x, x], r"\(\*, \*\)"),
    "keys": (lambda x: {"a": x} if x > 0 else {"b": x}, "'b'"),
    "shapes": (lambda x: x.expand(2) if x > 0 else x.expand(3), r"example 1   \[3\]"),
    "None": (lambda x: None if x > 0 else x, "None"),
    "strings": (lambda x: "up" if x > 0 else "down", "'down'"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_do_not_go_together_name_two_examples(name):
    f, shown = RESULTS[name]
    with pytest.raises(ValueError, match=shown) as caught:
        vmap(f)(XS)
    assert "example 0" in str(caught.value)
    assert "example 1" in str(caught.value)
    nothing_is_left()


def test_equal_results_that_are_no_tensors_pass_through():
    out = vmap(lambda x: (x, None, "s") if x > 0 else (x * 2, None, "s"))(XS)
    assert_same(out, (torch.where(XS > 0, XS, XS * 2), None, "s"))


def test_numbers_are_stacked():
    out = vmap(lambda x: {"n": int(x), "up": bool(x > 0), "x": x})(XS)
    assert_same(out, {"n": XS.long(), "up": XS > 0, "x": XS})


@pytest.mark.parametrize("out_dims", [0, 1, -1, (1, 0)])
def test_out_dims(out_dims):
    def f(x):
        y = x * torch.arange(3, dtype=D)
        return (y, y.sum()) if x > 0 else (y * 2, x)

    out_dims = (out_dims, 0) if isinstance(out_dims, int) else out_dims
    truth = stack_trees([f(x) for x in XS], out_dims)
    assert_same(vmap(f, out_dims=out_dims)(XS), truth)
    assert_same(vmap(f, out_dims=out_dims, chunk_size=4)(XS), truth)


def test_a_result_that_is_the_same_for_all_examples_needs_no_place(groups_alone):
    w = torch.arange(3, dtype=D)
    out = vmap(lambda x: (x, w * 2) if x > 0 else (x * 3, w * 2), out_dims=(0, None))(XS)
    assert_same(out, (torch.where(XS > 0, XS, XS * 3), w * 2))


@pytest.mark.parametrize("in_dims", [(1, None, 0), {"a": 1, "x": 0}])
def test_in_dims(in_dims):
    a, b = torch.arange(12, dtype=D).reshape(2, 6), torch.ones(2, dtype=D)

    def f(a, b, x):
        return a @ b if x > 0 else a * x

    def g(a, b, x):
        return f(a, b, x) + a

    truth = torch.stack([g(a[:, i], b, XS[i]) for i in range(6)])
    assert_same(vmap(g, in_dims=in_dims)(a, b, XS), truth)


def test_an_argument_without_a_mapped_leaf_is_the_very_object():
    given = {"w": torch.ones(2)}
    seen = []

    def f(given, x):
        seen.append(given)
        return x if x > 0 else x * 2

    vmap(f, in_dims=(None, 0))(given, XS)
    assert seen
    assert all(s is given for s in seen)


# --- other levels --------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda run: grad(lambda xs: run(xs).sum()),
    "grad of grad": lambda run: grad(lambda xs: grad(lambda ys: run(ys).sum())(xs).sum()),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "jacrev in chunks": functools.partial(jacrev, chunk_size=2),
    "hessian": hessian,
    "jvp": lambda run: lambda xs: jvp(run, (xs,), (xs.cos(),)),
    "vjp": lambda run: lambda xs: vjp(run, xs)[1](xs.cos()),
}


@pytest.mark.parametrize(
    "run", [vmap, functools.partial(vmap, chunk_size=4)], ids=["all", "chunks"]
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_outside(name, run):
    transform = TRANSFORMS[name]
    truth = transform(lambda xs: torch.stack([branches(x) for x in xs]))(XS)
    assert_same(transform(run(branches))(XS), truth)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian", "jvp"])
def test_derivatives_inside(name):
    def of_a_vector(xs):
        return torch.stack([branches(x) for x in xs])

    f = TRANSFORMS[name](of_a_vector)
    rows = torch.stack([XS[:3], -XS[:3], XS[3:]])
    assert_same(vmap(f)(rows), stack_trees([f(row) for row in rows]))


def test_derivatives_on_both_sides():
    def run(mapped):
        return jacrev(lambda xs: mapped(grad(branches))(xs))(XS)

    assert_same(run(vmap), run(lambda f: lambda xs: torch.stack([f(x) for x in xs])))


def test_a_gradient_of_autograd_through_the_whole_call():
    def run(mapped):
        xs = XS.clone().requires_grad_()
        w = torch.tensor(2.0, dtype=D, requires_grad=True)
        out = mapped(lambda x: branches(x * w))(xs)
        return torch.autograd.grad(out.sin().sum(), (xs, w))

    assert_same(run(vmap), run(lambda f: functools.partial(looped, f)))


@pytest.mark.parametrize("outer", [None, 1])
@pytest.mark.parametrize("inner", [None, 2])
def test_both_levels_part(outer, inner):
    def f(row):
        shift = 1 if row.sum() > 0 else -1
        return vmap(lambda x: branches(x) + shift, chunk_size=inner)(row) * (2 if row[0] > 0 else 3)

    def loop(row):
        shift = 1 if row.sum() > 0 else -1
        return looped(lambda x: branches(x) + shift, row) * (2 if row[0] > 0 else 3)

    assert_same(vmap(f, chunk_size=outer)(MATRIX), looped(loop, MATRIX))


def nested_adds():
    acc = torch.zeros((), dtype=D)

    def f(x):
        acc.add_(x)
        return branches(x)

    return f, lambda: acc


def nested_average():
    mean = torch.ones((), dtype=D)

    def f(x):
        mean.mul_(0.5).add_(x)
        return branches(x)

    return f, lambda: mean


def nested_overwrites():
    kept = torch.zeros((), dtype=D)

    def f(x):
        kept.fill_(3.0)
        return branches(x) * kept

    return f, lambda: kept


def nested_gradients():
    w = torch.tensor(2.0, dtype=D, requires_grad=True)

    def f(x):
        (w * x).backward()
        if x > 0:
            (w * w * x).backward()
        return x * 2

    return f, lambda: w.grad


def nested_writes():
    def f(x):
        x.mul_(2)
        return branches(x)

    return f, lambda: None


@pytest.mark.parametrize(
    "make", [nested_adds, nested_average, nested_overwrites, nested_gradients, nested_writes]
)
def test_effects_under_two_levels_happen_once(make):
    def run(mapped):
        f, look = make()
        xs = MATRIX.clone()
        return mapped(f)(xs), xs, look()

    truth = run(lambda f: lambda xs: looped(lambda row: looped(f, row), xs))
    assert_same(run(lambda f: vmap(vmap(f))), truth)


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode(inside):
    def f(x):
        x = x * 2
        x.add_(1)
        return x if x > 0 else x * 3

    def written(x):
        x.add_(1)
        return x if x > 0 else x * 3

    with torch.inference_mode():
        xs, ys = XS.clone(), XS.clone()
        if inside:
            assert_same(vmap(written)(xs), looped(written, ys))
            assert torch.equal(xs, ys)
            assert vmap(f)(xs).is_inference()
    assert_same(vmap(f)(xs), looped(f, ys))


def test_a_leaf_made_inside():
    def f(x):
        y = x.detach().clone().requires_grad_()
        (y * y).backward() if x > 0 else (y * 3).backward()
        return y.grad

    assert_same(vmap(f)(XS), looped(f, XS))
