"""An operator fails for one example: the loop's error, and a note that names the example."""

import inspect

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F

from by_groups import EXPECTED
from forall import grad, jacrev, jvp, vmap
from golden import entry_of
from oracle import loop

ODD = torch.eye(3).repeat(5, 1, 1)
ODD[2, 1, 1] = -1
ODD[4] *= -1
SINGULAR = ODD.clone()
SINGULAR[2, 1, 1] = 0
NAN = torch.eye(3).repeat(5, 1, 1)
NAN[2, 0, 0] = torch.nan
PLACES = torch.tensor([[0, 1], [1, 2], [0, 7], [1, 1], [9, 9]])
PROBS = torch.tensor([[0.5, 0.5], [0.5, 0.5], [-1.0, 2.0], [0.5, 0.5], [0.0, 0.0]])
W = torch.arange(15.0).reshape(5, 3)

CASES = {
    "cholesky": (torch.linalg.cholesky, ODD),
    "inv": (torch.linalg.inv, SINGULAR),
    "solve": (lambda x: torch.linalg.solve(x, torch.ones(3)), SINGULAR),
    "svd": (torch.linalg.svd, NAN),
    "eig": (torch.linalg.eig, NAN),
    "pinv": (torch.linalg.pinv, NAN),
    "lu_factor": (torch.linalg.lu_factor, SINGULAR),
    "tensorinv": (lambda x: torch.linalg.tensorinv(x, ind=1), SINGULAR),
    "index_select": (lambda i: torch.index_select(W, 0, i), PLACES),
    "W[i]": (lambda i: W[i], PLACES),
    "W[i[1]]": (lambda i: W[i[1]], PLACES),
    "gather": (lambda i: torch.gather(W[:, 0], 0, i), PLACES),
    "take": (lambda i: torch.take(W, i * 3), PLACES),
    "embedding": (lambda i: F.embedding(i, W), PLACES),
    "embedding_bag": (lambda i: F.embedding_bag(i[None], W), PLACES),
    "one_hot": (lambda i: F.one_hot(i, 5), PLACES),
    "cross_entropy": (lambda i: F.cross_entropy(W[:2], i), PLACES),
    "scatter_": (lambda i: torch.zeros(3).scatter_(0, i, 1.0), PLACES),
    "index_put_": (lambda i: torch.zeros(3).index_put_((i,), torch.ones(())), PLACES),
    "index_add": (lambda i: torch.zeros(3).index_add(0, i, torch.ones(2)), PLACES),
    "multinomial": (lambda p: torch.multinomial(p, 1), PROBS),
    "bernoulli": (torch.bernoulli, PROBS),
    "normal": (lambda p: torch.normal(0.0, p), PROBS),
    "binary_cross_entropy": (lambda p: F.binary_cross_entropy(p, torch.zeros(2)), PROBS),
    "quantile": (lambda q: torch.quantile(W, q), PROBS),
    "floor_divide": (lambda i: 10 // (i - 7), PLACES),
    "both mapped": (lambda i: i // (i - 7), PLACES),
    "remainder": (lambda i: 10 % (i - 7), PLACES),
    "max_unpool1d": (lambda i: F.max_unpool1d(torch.ones(1, 1, 2), i[None, None], 2), PLACES),
    "_assert_async": (lambda p: torch._assert_async((p >= 0).all()), PROBS),
}


def error_of(run, *args):
    torch.manual_seed(0)
    with pytest.raises(Exception) as caught:
        run(*args)
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_the_loops_and_names_the_example(name):
    f, xs = CASES[name]
    truth = error_of(loop(f), xs)
    mine = error_of(vmap(f, randomness="different"), xs)
    assert type(mine) is type(truth)
    assert str(mine) == str(truth)
    (note,) = mine.__notes__
    assert "example 2 of 5, counted from 0" in note
    assert __file__ in note


@pytest.mark.parametrize("name", ["cholesky", "W[i]", "scatter_", "one_hot"])
def test_of_several_levels_each_example_is_named_in_the_loops_order(name):
    f, xs = CASES[name]
    good = xs[:1].expand_as(xs)
    both = torch.stack([good, xs.flip(0), xs])  # the loop meets [1][0] first
    truth = error_of(loop(loop(f)), both)
    mine = error_of(vmap(vmap(f)), both)
    assert (type(mine), str(mine)) == (type(truth), str(truth))
    (note,) = mine.__notes__
    inner, outer = note.splitlines()[2:]
    assert "example 0 of 5" in inner
    assert "example 1 of 3" in outer


@pytest.mark.parametrize("name", ["inv", "W[i]"])
def test_a_chunk_counts_from_the_start_of_the_call(name):
    f, xs = CASES[name]
    (note,) = error_of(vmap(f, chunk_size=2), xs).__notes__
    assert "example 2 of 5" in note


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: vmap(grad(lambda x: f(x).sum())),
        lambda f: lambda xs: grad(lambda ys: vmap(f)(ys).sum())(xs),
        lambda f: vmap(lambda x: jvp(f, (x,), (x,))),
        lambda f: lambda xs: jvp(vmap(f), (xs,), (xs,)),
        lambda f: vmap(jacrev(f)),
        lambda f: lambda xs: jacrev(vmap(f))(xs),
    ],
)
def test_derivatives_name_the_example_too(transform):
    f, xs = CASES["cholesky"]
    truth = error_of(loop(f), xs)
    mine = error_of(transform(f), xs)
    assert (type(mine), str(mine)) == (type(truth), str(truth))
    assert any("example 2 of 5" in note for note in mine.__notes__)


def test_the_users_line_is_named():
    def f(x):
        y = x * 2
        return torch.linalg.cholesky(y)

    line = inspect.getsourcelines(f)[1] + 2
    (note,) = error_of(vmap(f), ODD).__notes__
    assert f"{__file__}:{line}" in note
    assert "return torch.linalg.cholesky(y)" in note


def test_a_shape_that_does_not_fit_is_told_of_one_example():
    def f(x):
        return x @ torch.ones(4)

    assert str(error_of(vmap(f), ODD)) == str(error_of(loop(f), ODD))


@pytest.mark.parametrize("law", [D.Normal, D.Gamma])
def test_distributions_check_all_examples(law):
    def f(p):
        # Asked for: torch's compiler, once loaded, may have switched the checks off for all.
        return law(p, p, validate_args=True).log_prob(torch.tensor(0.5))

    good = PROBS[:2]
    assert torch.allclose(vmap(f)(good), loop(f)(good))
    assert type(error_of(vmap(f), PROBS)) is type(error_of(loop(f), PROBS)) is ValueError


@EXPECTED
def test_a_caught_error_leaves_everything_as_it_was():
    xs = ODD.clone()
    state = torch.get_rng_state()

    def f(x, p):
        try:
            torch.multinomial(p, 1)
        except RuntimeError:
            return x.zero_()
        return x

    theirs = ODD.clone()
    truth = loop(f)(theirs, PROBS)
    torch.set_rng_state(state)
    assert torch.equal(vmap(f, randomness="different")(xs, PROBS), truth)
    assert torch.equal(xs, theirs)
    torch.set_rng_state(state)


def test_what_failed_to_write_is_not_written_by_the_search():
    targets = torch.zeros(5, 3)
    with pytest.raises(RuntimeError):
        vmap(lambda t, i: t.scatter_(0, i, 1.0))(targets, PLACES)
    assert not targets[3:].any()  # the loop would not have come to them


def test_our_own_errors_name_no_example():
    error = error_of(vmap(lambda x: x.sum().item(), divergence="error"), ODD)
    assert entry_of(error).key == "data-dependent"
    assert len(error.__notes__) == 1
