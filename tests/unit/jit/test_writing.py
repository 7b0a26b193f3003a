"""Names of a program's text: functions and arguments may be called as they like."""

import pytest
import torch

from forall import jit

UNARY = """
    abs neg exp expm1 exp2 log log2 log1p log10 sin sinh cos cosh tan tanh atan sqrt rsqrt sigmoid
    erf erfc square reciprocal relu floor ceil sign
"""
X = torch.linspace(0.2, 0.9, 5)


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize(("one", "other"), [("log2", "log"), ("exp2", "exp"), ("log10", "log")])
def test_functions_whose_names_end_in_digits_stay_apart(one, other, first):
    names = [name for name in UNARY.split() if name not in (one, other)]
    names.insert(first, one)
    names.insert(first + (100 if one == "log10" else 20), other)

    def f(x):
        return [getattr(torch, name)(x) for name in names]

    g = jit(f)
    wanted = f(X)
    for _ in range(3):
        assert all(map(torch.equal, g(X), wanted))
    assert g.cache_info().hits


@pytest.mark.parametrize("name", ["v", "c", "v1", "k", "_below", "_", "if_", "program"])
def test_an_operator_that_is_called_as_a_value_is(name):
    with torch.library._scoped_library("names_of_a_program", "FRAGMENT") as home:
        home.define(f"{name}(Tensor x) -> Tensor")
        home.impl(name, lambda x: x * 3, "CompositeExplicitAutograd")
        op = getattr(torch.ops.names_of_a_program, name)
        g = jit(lambda x: [op(x + i) for i in range(20)])
        for _ in range(3):
            assert all(torch.equal(y, (X + i) * 3) for i, y in enumerate(g(X)))
        assert g.cache_info().hits


@pytest.mark.parametrize("name", ["from", "lambda", "self", "v1", "k_3"])
def test_an_argument_of_an_operator_that_is_called_by_a_keyword(name):
    with torch.library._scoped_library("names_of_arguments", "FRAGMENT") as home:
        home.define(f"scaled(Tensor x, *, float {name}) -> Tensor")
        home.impl("scaled", lambda x, **given: x * given[name], "CompositeExplicitAutograd")
        g = jit(lambda x: torch.ops.names_of_arguments.scaled(x, **{name: 3.0}))
        for _ in range(3):
            assert torch.equal(g(X), X * 3)
        assert g.cache_info().hits
