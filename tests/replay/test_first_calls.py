"""The call that is recorded is a call like any other, and what is replayed is what it did."""

import warnings

import pytest
import torch

import forall
from forall import grad, jvp, vmap

D = torch.float64
X = torch.linspace(0.1, 1, 12, dtype=D).reshape(4, 3)
Z = torch.complex(X, X.flip(0).cos())


def arange_in_place(a):
    t = torch.arange(3, dtype=D)  # its tangent is zeros without memory
    t *= a
    return t.sub_(a, alpha=2)


PURE = {
    "a view of another dtype": (lambda x: x.view(torch.int32).view(torch.uint8)[2:7], X[0]),
    "mapped views of another dtype": (vmap(lambda x: x.view(torch.int64)[1:]), X),
    "a complex kernel that conjugates": (torch.linalg.pinv, Z),
    "a conjugate, mapped": (vmap(lambda z: torch.linalg.pinv(z[None].mH)), Z),
    "a zero tangent in place": (
        lambda x: grad(lambda x: jvp(arange_in_place, (x,), (x * 2,))[1].sum())(x),
        X[0],
    ),
}


@pytest.mark.parametrize("name", PURE)
def test_each_call_is_the_functions(name, recorded):
    f, x = PURE[name]
    g = recorded(f)
    for _ in range(6):
        torch.testing.assert_close(g(x), f(x))


@pytest.mark.parametrize("wrap", [lambda jobs: jobs, lambda jobs: {"jobs": jobs}])
def test_lists_that_are_given_are_the_very_lists(wrap, recorded):
    def f(x, given):
        jobs = given["jobs"] if isinstance(given, dict) else given
        return x * jobs.pop()

    g, jobs = recorded(vmap(f, in_dims=(0, None))), [*range(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forall.PerformanceWarning)
        for i in reversed(range(6, 12)):
            torch.testing.assert_close(g(X, wrap(jobs)), X * i)
    assert jobs == [*range(6)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
def test_nested_arguments_are_as_ever(recorded):
    nested = torch.nested.nested_tensor([X, X[:2]])
    g = recorded(lambda x: x * 2)
    for _ in range(5):
        torch.testing.assert_close(g(nested).to_padded_tensor(0.0)[0], X * 2)


def test_an_error_of_the_first_call_is_the_functions_own(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", "check")
    q = torch.tensor([0.5, 0.1, -1.0])
    f = vmap(lambda q: torch.quantile(X.float(), q))
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"q values must be in the range \[0, 1\]"):
            f(q)


@pytest.mark.filterwarnings("ignore:.*in inference mode, or leaves:forall.PerformanceWarning")
def test_forward_mode_of_what_is_older_than_inference_mode(recorded):
    """A derivative leaves inference mode, so its results are ordinary, and a program's are not."""
    w = X[0]
    ways = [
        lambda x: jvp(lambda x: (x.sin(), x, w * 1, w), (x,), (x,)),
        vmap(lambda x: jvp(lambda x: (x * w, x), (x,), (x,))),
    ]
    for f in ways:
        g = recorded(f)
        for x in (X, X + 1, X):
            with torch.inference_mode():
                found, wanted = g(x), f(x)
            torch.testing.assert_close(found, wanted)
