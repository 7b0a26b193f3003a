"""What an operator says that cannot keep the law, while a function runs under a transform."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD

from forall import jvp, vmap
from forall._core.errors import DataDependentError
from golden import refused

X = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("target", ["itself", "a view made inside"])
def test_a_write_of_an_examples_data_into_a_shared_tensor(target):
    buffer = torch.zeros(2)

    def f(x):
        (buffer if target == "itself" else buffer[:2]).copy_(x)

    with refused(
        RuntimeError,
        """
        vmap: aten.copy_.default writes per-example data into a tensor that all examples share.
            written to   float32[2]   from before the call, one for all examples
            data         float32[2]   differs between the examples
        Each example would overwrite the last one's result. To give every example its own, map the tensor (in_dims) or clone it inside the function (.clone()).
        """,
    ):
        vmap(f)(X)
    assert not buffer.any()


def test_a_counter_shared_by_all_examples():
    count = torch.zeros(())
    with refused(
        RuntimeError,
        """
        vmap: aten.add_.Tensor changes a tensor from before the call, once for every example.
            written to   float32[]   shared by all examples
        Clone it inside the function (.clone()), or move the write outside vmap.
        """,
    ):
        vmap(lambda x: (count.add_(1), x)[1])(X)
    assert count == 0


def test_out_that_would_be_resized():
    buffer = torch.zeros(2)
    with refused(
        RuntimeError,
        """
        vmap: aten.cat.out would resize out=, a tensor from before the call.
            out      float32[2]
            result   float32[4]
        Give it the result's shape, or leave out= away.
        """,
    ):
        vmap(lambda x: torch.cat([x, x], out=buffer))(X)


def branch(x):
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize("f", [branch, lambda x: x.sum().item(), lambda x: int(x[0])])
def test_a_value_that_differs_between_the_examples(f):
    with refused(
        DataDependentError,
        """
        vmap: a tensor read as a Python number (.item(), bool(), int(), `if`, `while`) asks for a value that differs between the examples.
        All examples run as one, so there is no single answer here.
        Use torch.where instead of `if`, and a tensor instead of the number.
        """,
    ):
        vmap(f)(X)


@pytest.mark.parametrize(
    ("f", "name"),
    [(torch.rand_like, "rand_like"), (lambda x: x + torch.randn(2), "randn")],
)
def test_a_random_draw_that_nobody_allowed(f, name):
    with refused(
        RuntimeError,
        f"""
        vmap: {name} draws random numbers, and randomness='error' forbids that.
            randomness='different'     each example draws its own
            randomness='same'          one draw serves all examples
            randomness=random.key(0)   each example draws its own, by forall.random's key
        Say which to vmap, or draw outside it.
        """,
    ):
        vmap(f)(X)


def test_a_tangent_written_into_a_tensor_from_outside():
    buffer = torch.zeros(2)
    with refused(
        RuntimeError,
        """
        jvp: aten.copy_.default writes a value that has a tangent into a tensor from outside.
            written to   float32[2]   from before the call
        Clone it inside the function (.clone()), or pass it as a primal.
        """,
    ):
        jvp(buffer.copy_, (X[0],), (X[1],))


def test_jvp_inside_torchs_own_dual_level():
    with (
        fwAD.dual_level(),
        refused(
            NotImplementedError,
            """
            jvp: called inside torch.autograd.forward_ad.dual_level().
            PyTorch has one forward-mode level in a process, and it is taken.
            Use forall.jvp for the outer derivative too.
            """,
        ),
    ):
        jvp(torch.sin, (X,), (X,))
