"""What `jvp`, `linearize`, `jacfwd` and `hessian` say of arguments, tangents and results."""

import pytest
import torch

from forall import hessian, hessian_diag, jacfwd, jvp, laplacian, linearize
from golden import refused

X = torch.arange(3.0)
N = torch.arange(3)
Z = torch.ones(3, dtype=torch.complex64)


def same(x):
    return x


def total(x):
    return x.sum()


# --- primals -----------------------------------------------------------------------------------


def test_primals_that_are_no_tuple():
    with refused(
        RuntimeError,
        """
        jvp(total): primals must be a tuple, one entry per argument.
            primals   [float32[3]]   list
        For one argument write (x,).
        """,
    ):
        jvp(total, [X], (X,))


def test_no_primals():
    with refused(
        RuntimeError,
        """
        jvp(total): primals is empty.
        Pass at least one tensor.
        """,
    ):
        jvp(total, (), ())


def test_a_primal_that_is_no_tensor():
    with refused(
        RuntimeError,
        """
        linearize(mul): primals must hold tensors only.
            primal   3   int
        Close over anything else: lambda x: mul(x, 3).
        """,
    ):
        linearize(torch.mul, X, 3)


@pytest.mark.parametrize("verb", [lambda: jvp(same, (N,), (N,)), lambda: linearize(same, N)])
def test_an_integer_primal(verb):
    name = "jvp" if "jvp" in verb.__code__.co_names else "linearize"
    with refused(
        ValueError,
        f"""
        {name}(same): only floating-point and complex tensors have a derivative.
            differentiated   int64[3]
        Convert it (x.float()), or do not differentiate with respect to it.
        """,
    ):
        verb()


@pytest.mark.parametrize("verb", [jacfwd, hessian])
def test_an_integer_argument(verb):
    with refused(
        ValueError,
        f"""
        {verb.__name__}(total, argnums=0): only floating-point and complex tensors have a derivative.
            differentiated   int64[3]
        Convert it (x.float()), or do not differentiate with respect to it.
        """,
    ):
        verb(total)(N)


@pytest.mark.parametrize("verb", [jacfwd, hessian])
def test_a_complex_input_of_a_jacobian(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(total, argnums=0): the inputs of a Jacobian must be real.
            inputs   complex64[3]
        Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.
        For a complex-differentiable function give holomorphic=True: the result is df/dz.
        """,
    ):
        verb(total)(Z)


@pytest.mark.parametrize("verb", [jacfwd, hessian])
def test_numbers_alone(verb):
    with refused(
        ValueError,
        f"""
        {verb.__name__}(total, argnums=0): there is no tensor to differentiate with respect to.
            differentiated   3.0   float
        Make it a tensor: torch.tensor(x).
        """,
    ):
        verb(total)(3.0)


@pytest.mark.parametrize("verb", [jacfwd, hessian])
def test_argnums_that_the_call_does_not_have(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(total, argnums=-2): argnums names an argument that the call does not have.
            argnums                -2
            positional arguments   1
        Give an int in [-1, 1), and pass the argument by position, or name it in argnames.
        """,
    ):
        verb(total, argnums=-2)(X)


# --- tangents ----------------------------------------------------------------------------------


def test_tangents_that_are_no_tuple():
    with refused(
        RuntimeError,
        """
        jvp(total): tangents must be a tuple, one entry per primal.
            tangents   float32[3]   Tensor
        For one argument write (t,).
        """,
    ):
        jvp(total, (X,), X)


def test_tangents_of_another_tree():
    with refused(
        RuntimeError,
        """
        jvp(total): tangents must be shaped like primals.
            primals    ({'x': *},)
            tangents   (*, *)
        Give every primal one tangent, in the same tree.
        """,
    ):
        jvp(total, ({"x": X},), (X, X))


@pytest.mark.parametrize(
    ("tangent", "shown"), [(X[:2], "float32[2]"), (X.sum(), "float32[]"), (1.0, "1.0")]
)
def test_a_tangent_of_another_shape(tangent, shown):
    with refused(
        RuntimeError,
        f"""
        jvp(total): a tangent must have its primal's shape.
            primal float32[3]   tangent {shown}
        A tangent is a direction in the space of its primal.
        """,
    ):
        jvp(total, (X,), (tangent,))


def test_an_integer_tangent():
    with refused(
        ValueError,
        """
        jvp(total): only floating-point and complex tensors have a derivative.
            differentiated   int64[3]
        Convert it (x.float()), or do not differentiate with respect to it.
        """,
    ):
        jvp(total, (X,), (N,))


def test_a_complex_tangent_of_a_real_primal():
    with refused(
        RuntimeError,
        """
        jvp(total): a tangent must be complex where its primal is, and real where it is.
            primal float32[3]   tangent complex64[3]
        Convert it: t.to(x.dtype), or t.real.
        """,
    ):
        jvp(total, (X,), (Z,))


def test_a_tangent_of_another_dtype_than_the_program_was_kept_for():
    _, push = linearize(total, X)
    with refused(
        RuntimeError,
        """
        linearize(total): a tangent must have its primal's dtype and device.
            primal float32[3] on cpu   tangent float64[3] on cpu
        Convert it: t.to(x).
        """,
    ):
        push(X.double())


# --- what the function returns -----------------------------------------------------------------


def test_an_output_that_is_no_tensor():
    with refused(
        RuntimeError,
        """
        jvp(<lambda>): the function must return tensors, or trees of them.
            returned   None   NoneType
        has_aux=True lets you return other things beside them.
        """,
    ):
        jvp(lambda _: None, (X,), (X,))


def test_no_output():
    with refused(
        RuntimeError,
        """
        linearize(<lambda>): the function returned no tensor.
            returned   {}
        Return at least one.
        """,
    ):
        linearize(lambda _: {}, X)


def test_no_aux():
    with refused(
        RuntimeError,
        """
        jacfwd(total, argnums=0): with has_aux=True the function returns a tuple (output, aux).
            returned   float32[]   Tensor
        Return two things, or leave has_aux out.
        """,
    ):
        jacfwd(total, has_aux=True)(X)


def test_a_complex_output_of_a_jacobian():
    with refused(
        RuntimeError,
        """
        jacfwd(<lambda>, argnums=0): the outputs of a Jacobian must be real.
            outputs   complex64[3]
        Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.
        """,
    ):
        jacfwd(lambda x: x * 1j)(X)


def test_an_output_that_does_not_depend_on_the_primals():
    with refused(
        RuntimeError,
        """
        jvp(<lambda>): with strict=True every output must depend on the primals.
            output   float32[3]
        Leave strict out to get zeros for it.
        """,
    ):
        jvp(lambda x: (x, X), (X,), (X,), strict=True)


# --- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [jacfwd, hessian, hessian_diag, laplacian])
def test_chunk_size_below_one(verb):
    with refused(
        ValueError,
        f"""
        {verb.__name__}(chunk_size=0): a chunk holds at least one example.
        Pass an int above 0, 'auto' for as many as fit, or None to run all examples at once.
        """,
    ):
        verb(total, chunk_size=0)


def test_unknown_randomness():
    with refused(
        RuntimeError,
        """
        jacfwd(randomness=[]): no such flag.
        It is one of 'error' (default), 'different' and 'same'.
        """,
    ):
        jacfwd(total, randomness=[])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("verb", "call"),
    [(jvp, lambda: jvp(3, (X,), (X,))), (linearize, lambda: linearize(3, X))],  # pyright: ignore[reportArgumentType]
)
def test_not_callable(verb, call):
    name = verb.__name__
    with refused(
        TypeError,
        f"""
        {name}(func): func must be callable.
            func   3   int
        Pass the function itself, not its result: {name}(f), not {name}(f(x)).
        """,
    ):
        call()
