"""What is said of one example: it failed, it is used after the call, it has no memory."""

import inspect
import re

import numpy as np
import pytest
import torch

from forall import grad, jvp, stacked, vmap
from forall._core.errors import DataDependentError
from golden import refused

X = torch.arange(6.0).reshape(3, 2)


def test_a_value_of_an_example_after_the_call():
    kept = []

    def keep(x):
        kept.append(x * 2)
        return x

    line = inspect.currentframe().f_lineno + 1
    vmap(keep)(X)
    with refused(
        RuntimeError,
        f"""
        vmap(keep, in_dims=0): a value of one example is used after the call.
            used by   aten.add.Tensor
            value     float32[2], one for each example
            made in   keep, at {__file__}:{inspect.getsourcelines(keep)[1]}
            called    at {__file__}:{line}
        The examples are there one by one during the call alone. Return it from the function, or take all examples together: forall.stacked(value).
        """,
    ):
        _ = kept[0] + 1


def test_a_value_of_an_example_inside_a_gradient():
    kept = []

    def keep(x):
        kept.append(x * 2)
        return x.sum()

    vmap(grad(keep))(X)
    place = f"{__file__}:{inspect.getsourcelines(keep)[1]}"
    with pytest.raises(RuntimeError, match=f"made in   keep, at {re.escape(place)}"):
        _ = kept[0] + 1


def pick(i):
    return X[i]


def test_the_note_of_a_failing_example():
    places = torch.tensor([[0, 1], [2, 9]])
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(IndexError) as caught:
        vmap(vmap(pick))(places)
    of_pick = inspect.getsourcelines(pick)[1] + 1
    inner = inspect.getsourcefile(pick)
    assert str(caught.value) == "index 9 is out of bounds for dimension 0 with size 3"
    (note,) = caught.value.__notes__
    rows = [
        ("aten.index.Tensor", f"at {inner}:{of_pick}", "return X[i]"),
        ("vmap(pick, in_dims=0)", f"at {__file__}:{line}", "example 1 of 2, counted from 0"),
        ("vmap(pick, in_dims=0)", f"at {__file__}:{line}", "example 1 of 2, counted from 0"),
    ]
    wide = len(rows[1][0])
    file = max(len(r[1]) for r in rows)
    table = "\n".join(f"    {a:<{wide}}   {b:<{file}}   {c}" for a, b, c in rows)
    assert note == f"vmap: one example failed.\n{table}"


@pytest.mark.parametrize(
    ("f", "call", "cure"),
    [
        (
            lambda x: x.numpy(),
            "x.numpy()",
            "Give numpy's functions x itself (np.sin(x)), or read the results outside vmap.",
        ),
        (
            lambda x: np.asarray(x),
            "np.asarray(x)",
            "Give numpy's functions x itself (np.sin(x)), or read the results outside vmap.",
        ),
        (
            lambda x: x.tolist(),
            "x.tolist()",
            "Use torch's operators, or read the results outside vmap.",
        ),
        (
            lambda x: x.data_ptr(),
            "x.data_ptr()",
            "Use torch's operators, or forall.stacked(x): all examples together.",
        ),
        (
            lambda x: __import__("pickle").dumps(x),
            "pickle",
            "Save the results of vmap, or forall.stacked(x): all examples in one tensor.",
        ),
    ],
)
def test_the_memory_of_one_example(f, call, cure):
    with refused(
        DataDependentError,
        f"""
        vmap: {call} asks for the memory of one example.
            x   float32[2], one for each of 3 examples
        All examples lie in one stack, and none has memory of its own.
        {cure}
        """,
    ):
        vmap(f, divergence="error")(X)


def test_numpys_derivative():
    with refused(
        RuntimeError,
        """
        np.median: numpy has no derivative of this for a tensor that requires grad.
        Use torch's function, or x.detach().
        """,
    ):
        vmap(grad(lambda x: np.median(x)))(X)
    with refused(
        NotImplementedError,
        """
        np.median: numpy has no derivative of this for a value with a tangent.
        Use torch's function.
        """,
    ):
        jvp(np.median, (X[0],), (X[0],))


def test_an_array_of_numpys_as_out():
    with refused(
        TypeError,
        """
        np.add: out= cannot take a tensor's values.
        Use the result, or torch's operators.
        """,
    ):
        vmap(lambda x: np.add(x, 1, out=np.zeros(2)))(X)


def test_the_stack_of_what_has_none():
    with refused(
        TypeError,
        """
        stacked: the argument is no tensor, and no number of each example.
            given   list
        Give it one tensor at a time.
        """,
    ):
        stacked([X])
    with refused(
        NotImplementedError,
        """
        stacked: a value of a jvp that is running has a tangent, which would be lost.
        Take the stack outside the jvp, or of x.detach().
        """,
    ):
        jvp(stacked, (X,), (X,))
