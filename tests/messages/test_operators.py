"""What an operator says that cannot keep the law, while a function runs under a transform."""

import inspect

import pytest
import torch
import torch.autograd.forward_ad as fwAD

from forall import hessian, jacfwd, jvp, vmap
from forall._core.errors import DataDependentError
from golden import refused

X = torch.arange(6.0).reshape(3, 2)


def test_a_lazy_module():
    with refused(
        RuntimeError,
        """
        vmap: a lazy module makes its parameters in its first call, for all examples.
        Call it once outside vmap, on one example: net(xs[0]).
        """,
    ):
        vmap(torch.nn.LazyLinear(4), randomness="different")(X)


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


def test_a_change_of_a_shared_tensor_once_for_every_example():
    count = torch.ones(())
    with refused(
        RuntimeError,
        """
        vmap: aten.sin_.default changes a tensor from before the call, once for every example.
            written to   float32[]   shared by all examples
        Clone it inside the function (.clone()), or move the write outside vmap.
        """,
    ):
        vmap(lambda x: (count.sin_(), x)[1])(X)
    assert count == 1


@pytest.mark.parametrize(
    ("f", "does", "done"),
    [
        (
            lambda b, x: (b.add_(x), x * b),
            "aten.mul.Tensor reads",
            "written to",
        ),
        (
            lambda b, x: (x * b, b.add_(x)),
            "aten.add_.Tensor adds to",
            "read",
        ),
        (
            lambda b, x: (b.zero_(), b.add_(x)),
            "aten.add_.Tensor adds to",
            "overwritten",
        ),
        (
            lambda b, x: (x * b, b.zero_()),
            "aten.zero_.default overwrites",
            "read",
        ),
        (
            lambda b, x: (b.add_(x), b.mul_(2)),
            "aten.mul_.Tensor writes to",
            "written to otherwise",
        ),
    ],
)
def test_what_another_example_would_meet(f, does, done):
    buffer = torch.zeros(2)
    with refused(
        RuntimeError,
        f"""
        vmap: {does} a tensor from before the call that the function has {done}.
            the tensor   float32[2]   shared by all examples
        In the loop an example would meet what those before it wrote; here all run as one.
        Return what each example adds, and add it up outside vmap. To give every example its own, map the tensor (in_dims) or clone it inside the function (.clone()).
        """,
    ):
        vmap(lambda x: f(buffer, x)[0])(X)
    assert not buffer.any()


def test_a_shared_write_with_a_derivative_at_stake():
    buffer, w = torch.zeros(2), torch.ones(2, requires_grad=True)
    with refused(
        RuntimeError,
        """
        vmap: aten.copy_.default writes to a tensor from before the call, with a derivative at stake.
            written to   float32[2]   shared by all examples
        Autograd would count this write once, or not at all, where the loop makes one for each example.
        Write what is detached (.detach()), or return it and do the write outside vmap.
        """,
    ):
        vmap(lambda x: (buffer.copy_(w), x)[1])(X)


def test_a_layer_that_gets_one_example_instead_of_a_batch():
    with pytest.raises(ValueError, match="expected 4D input") as caught:
        vmap(torch.nn.BatchNorm2d(3))(torch.randn(4, 3, 8, 8))
    assert caught.value.__notes__ == [
        (
            "vmap: the function sees one example, without the axis that in_dims names.\n"
            "A layer that wants a batch takes a batch of one: layer(x.unsqueeze(0)).squeeze(0)."
        )
    ]


def test_out_that_would_be_resized():
    buffer = torch.zeros(2)
    with refused(
        RuntimeError,
        """
        vmap: aten.cat.out would resize what it writes to, a tensor from before the call.
            written to   float32[2]
            result       float32[4]
        Give it the result's shape, or use the form that returns a new tensor.
        """,
    ):
        vmap(lambda x: torch.cat([x, x], out=buffer))(X)


def branch(x):
    return x if x.sum() > 0 else -x


def number(x):
    return x.sum().item()


def whole_number(x):
    return int(x[0])


@pytest.mark.parametrize("f", [branch, number, whole_number])
def test_a_value_that_differs_between_the_examples(f):
    lines, first = inspect.getsourcelines(f)
    line, text = first + 1, lines[1].strip()
    with refused(
        DataDependentError,
        f"""
        vmap: a tensor read as a Python number (.item(), bool(), int(), `if`, `while`) asks for a value that differs between the examples.
            at   {__file__}:{line}   {text}
        All examples run as one, so there is no single answer here.
        Use torch.where instead of `if`, and a tensor instead of the number.
        """,
    ):
        vmap(f, divergence="error")(X - 2)


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


def test_a_random_draw_in_a_column():
    def f(x):
        return (x * torch.rand(2)).sum()

    with refused(
        RuntimeError,
        """
        jacfwd: rand draws random numbers, and each column could see others.
            randomness='same'          one draw serves all columns
            forall.random.scope(key)   a block around the call: the draws are those of the key
        Say which, or draw outside the function.
        """,
    ):
        jacfwd(f)(X[0])
    with refused(
        RuntimeError,
        """
        hessian: rand draws random numbers, and each column could see others.
            forall.random.scope(key)   a block around the call: the draws are those of the key
        Say which, or draw outside the function.
        """,
    ):
        vmap(hessian(f), randomness="same")(X)


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


def test_a_sparse_tensor_that_moves():
    with refused(
        NotImplementedError,
        """
        jvp: forward mode has no tangent of a sparse tensor.
            value   float32[2]
        Use reverse mode (vjp, grad, jacrev), or make it sparse outside.
        """,
    ):
        vmap(lambda x: jvp(lambda x: x.to_sparse().to_dense(), (x,), (x,)))(X)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_values_of_each_example_in_compressed_places():
    ends, columns = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    with refused(
        NotImplementedError,
        """
        vmap: the examples of a tensor of layout torch.sparse_csr have no stack.
        Use torch.sparse_coo_tensor or x.to_sparse(), in coordinates, or convert outside vmap.
        """,
    ):
        vmap(lambda v: torch.sparse_csr_tensor(ends, columns, v, (2, 2)).to_dense())(X)


def test_values_that_move_in_places():
    places = torch.tensor([[0, 1], [1, 0]])
    with refused(
        NotImplementedError,
        """
        jvp: forward mode has no tangent of a sparse tensor.
            value   float32[2]
        Use reverse mode (vjp, grad, jacrev), or make it sparse outside.
        """,
    ):
        jvp(lambda v: torch.sparse_coo_tensor(places, v, (2, 2)).to_dense(), (X[0],), (X[0],))
