"""Which source a function has. Each version of Python says it a little differently."""

import ast
import linecache
import sys

import pytest
import torch

from forall import vmap
from forall._ast_rewrite import Refusal, find_template
from forall._ast_rewrite.find_source import find_function_node
from forall._ast_rewrite.unsupported import CannotConvert

X = torch.tensor([0.7, -0.5, 3.2])


def source(f):
    return ast.unparse(find_function_node(f).node)


def test_lambdas_of_one_line_are_told_apart():
    # fmt: off
    choice, lazy, both, name = (lambda x: 2 if x else x), (lambda x: x and 2), (lambda x: (x, x)), (lambda x: x)  # noqa: E501
    # fmt: on
    assert source(choice) == "lambda x: 2 if x else x"
    assert source(lazy) == "lambda x: x and 2"
    assert source(both) == "lambda x: (x, x)"
    assert source(name) == "lambda x: x"


def test_a_lambda_in_a_lambda_is_told_from_it():
    outer = lambda x: lambda x: x * 2  # noqa: E731
    assert source(outer) == "lambda x: lambda x: x * 2"
    assert source(outer(0)) == "lambda x: x * 2"
    shadow = lambda x: 1 or (lambda x: x)  # noqa: E731, SIM222
    assert source(shadow) == "lambda x: 1 or (lambda x: x)"


def assert_never_another(f, wanted):
    """Python 3.12 does not say where in its line a constant is returned."""
    if sys.version_info[:2] == (3, 12):
        with pytest.raises(CannotConvert):
            source(f)
    else:
        assert source(f) == wanted


def test_lambdas_without_a_place_are_never_taken_for_each_other():
    one, two = (lambda x: 1), (lambda x: 2)
    assert_never_another(one, "lambda x: 1")
    assert_never_another(two, "lambda x: 2")
    assert vmap(lambda x: one(x) if x > 0 else two(x))(X).tolist() == [1, 2, 1]


GENERIC = """
def inside[T](x: T) -> T:
    if x > 0:
        return x
    return -x

def named[T](x):
    kept = [T]
    if x > 0:
        kept.append(x)
    return len(kept), str(kept[0])

class Box[T]:
    __secret = 2
    def method[U](self, x: U):
        names = str(T) + str(U)
        if x > 0:
            return x * self.__secret, len(names)
        return x, len(names)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`def f[T]` is of Python 3.12")
def test_functions_with_parameters_for_types():
    names = {}
    linecache.cache["<generic>"] = (len(GENERIC), None, GENERIC.splitlines(True), "<generic>")
    exec(compile(GENERIC, "<generic>", "exec"), names)  # noqa: S102
    for f in (names["inside"], names["named"], names["Box"].method):
        assert not isinstance(find_template(f), Refusal)
    assert torch.equal(vmap(names["inside"])(X), X.abs())
    counts, types = vmap(names["named"])(X)
    assert counts.tolist() == [2, 1, 2]
    assert types == "T"
    doubled, lengths = vmap(names["Box"]().method)(X)
    assert torch.equal(doubled, torch.where(X > 0, X * 2, X))
    assert lengths.tolist() == [2, 2, 2]
