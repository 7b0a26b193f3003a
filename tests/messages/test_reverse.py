"""What `grad`, `grad_and_value`, `vjp` and `jacrev` say of arguments, cotangents and results."""

import pytest
import torch

from forall import grad, grad_and_value, hessian, jacfwd, jacobian, jacrev, jvp, vjp, vmap
from golden import refused

X = torch.arange(3.0)
N = torch.arange(3)
Z = torch.ones(3, dtype=torch.complex64)


def same(x):
    return x


def total(x):
    return x.sum()


@pytest.mark.parametrize("verb", [grad, grad_and_value, jacrev])
def test_not_callable(verb):
    name = verb.__name__
    with refused(
        TypeError,
        f"""
        {name}(func): func must be callable.
            func   float32[3]   Tensor
        Pass the function itself, not its result: {name}(f), not {name}(f(x)).
        """,
    ):
        verb(X)


# --- argnums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argnums", [[0], 1.0])
def test_argnums_of_a_wrong_type(argnums):
    with refused(
        RuntimeError,
        f"""
        grad(total, argnums={argnums!r}): argnums must be an int or a tuple of ints.
            argnums   {argnums!r}   {type(argnums).__name__}
        Count the positional arguments from 0.
        """,
    ):
        grad(total, argnums=argnums)(X)


def test_a_name_for_argnums():
    with refused(
        RuntimeError,
        """
        grad(total, argnums='x'): argnums must be an int or a tuple of ints.
            argnums   'x'   str
        Names go in argnames: grad(f, argnames='x').
        """,
    ):
        grad(total, argnums="x")(X)  # pyright: ignore[reportArgumentType]


def test_the_point_for_argnums():
    with refused(
        RuntimeError,
        """
        jacrev(total, argnums=float32[3]): argnums must be an int or a tuple of ints.
            argnums   float32[3]   Tensor
        The arguments of f come in a second call: jacrev(f)(x).
        """,
    ):
        jacrev(total, X)  # pyright: ignore[reportArgumentType]


def test_the_point_in_a_second_call():
    with pytest.raises(TypeError) as caught:
        vjp(total)(X)
    assert caught.value.__notes__ == ["vjp runs at once: write vjp(f, x), not vjp(f)(x)."]


def test_an_argnum_of_a_wrong_type():
    with refused(
        RuntimeError,
        """
        jacrev(total, argnums=(0.0,)): argnums must be an int or a tuple of ints.
            argnums   0.0   float
        Count the positional arguments from 0.
        """,
    ):
        jacrev(total, argnums=(0.0,))(X)  # pyright: ignore[reportArgumentType]


def test_argnums_that_the_call_does_not_have():
    with refused(
        RuntimeError,
        """
        grad(total, argnums=1): argnums names an argument that the call does not have.
            argnums                1
            positional arguments   1
        Give an int in [-1, 1), and pass the argument by position, or name it in argnames.
        """,
    ):
        grad(total, argnums=1)(X)


def test_an_argument_passed_by_keyword():
    with refused(
        RuntimeError,
        """
        grad(total, argnums=0): argnums names an argument that the call does not have.
            argnums                0
            positional arguments   0
        Pass the argument by position, or name it in argnames.
        """,
    ):
        grad(total)(x=X)


def test_no_argnums():
    with refused(
        RuntimeError,
        """
        grad(total, argnums=()): argnums must not be empty.
        Name at least one argument.
        """,
    ):
        grad(total, argnums=())(X)


def test_the_same_argument_twice():
    with refused(
        RuntimeError,
        """
        grad(add, argnums=(0, -2)): argnums names an argument twice.
            argnums   (0, -2)
        Name each argument once.
        """,
    ):
        grad(torch.add, argnums=(0, -2))(X, X)


# --- what is differentiated --------------------------------------------------------------------


@pytest.mark.parametrize("verb", [grad, grad_and_value, jacrev])
def test_an_integer_tensor(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(total, argnums=0): only floating-point and complex tensors have a derivative.
            differentiated   int64[3]
        Convert it (x.float()), or do not differentiate with respect to it.
        """,
    ):
        verb(total)(N)


@pytest.mark.parametrize("verb", [grad, jacrev])
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


def test_a_complex_input_of_a_jacobian():
    with refused(
        RuntimeError,
        """
        jacrev(same, argnums=0): the inputs of a Jacobian must be real.
            inputs   complex64[3]
        Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.
        For a complex-differentiable function give holomorphic=True: the result is df/dz.
        """,
    ):
        jacrev(same)(Z)


# --- what the function returns -----------------------------------------------------------------


def test_no_scalar():
    with refused(
        RuntimeError,
        """
        grad(same, argnums=0): the function must return a scalar, a tensor of rank 0.
            returned   float32[3]
        Reduce it (.sum(), .mean()), or use jacrev for the derivative of every entry.
        """,
    ):
        grad(same)(X)


def test_no_tensor():
    with refused(
        RuntimeError,
        """
        grad_and_value(<lambda>, argnums=0): the function must return a tensor.
            returned   (float32[], 1)   tuple
        Return the scalar to differentiate; has_aux=True lets you return more beside it.
        """,
    ):
        grad_and_value(lambda x: (x.sum(), 1))(X)


def test_a_complex_scalar():
    with refused(
        RuntimeError,
        """
        grad(total, argnums=0): the function must return a real number.
            returned   complex64[]
        Return its real part or its absolute value, or use vjp with a complex cotangent.
        For a complex-differentiable function give holomorphic=True: the result is df/dz.
        """,
    ):
        grad(total)(Z)


@pytest.mark.parametrize("verb", [grad, grad_and_value, jacrev, jacobian, jacfwd, hessian])
def test_a_real_input_of_a_holomorphic_function(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(total, argnums=0, holomorphic=True): the inputs of a holomorphic function \
must be complex.
            inputs   float32[3]
        Convert them (z.to(torch.complex64)), or leave out holomorphic.
        """,
    ):
        verb(total, holomorphic=True)(X)


@pytest.mark.parametrize("verb", [jacrev, jacobian, jacfwd, hessian])
def test_a_real_output_of_a_holomorphic_function(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(<lambda>, argnums=0, holomorphic=True): the outputs of a holomorphic \
function must be complex.
            outputs   float32[3]
        Convert them (z.to(torch.complex64)), or leave out holomorphic.
        """,
    ):
        verb(lambda z: z.abs(), holomorphic=True)(Z)


@pytest.mark.parametrize("verb", [grad, grad_and_value])
def test_a_real_scalar_of_a_holomorphic_function(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(<lambda>, argnums=0, holomorphic=True): a holomorphic function must return \
a complex number.
            returned   float32[]
        Convert it (y.to(torch.complex64)), or leave out holomorphic.
        """,
    ):
        verb(lambda z: z.abs().sum(), holomorphic=True)(Z)


def test_no_aux_from_grad():
    with refused(
        RuntimeError,
        """
        grad(total, argnums=0): with has_aux=True the function returns a tuple (value, aux).
            returned   float32[]   Tensor
        Return two things, or leave has_aux out.
        """,
    ):
        grad(total, has_aux=True)(X)


def test_no_aux_from_vjp():
    with refused(
        RuntimeError,
        """
        vjp(<lambda>): with has_aux=True the function returns a tuple (output, aux).
            returned   [float32[3], None]   list
        Return two things, or leave has_aux out.
        """,
    ):
        vjp(lambda x: [x, None], X, has_aux=True)


def test_an_output_that_is_no_tensor():
    with refused(
        RuntimeError,
        """
        vjp(<lambda>): the function must return tensors, or trees of them.
            returned   3   int
        has_aux=True lets you return other things beside them.
        """,
    ):
        vjp(lambda x: {"y": x, "n": 3}, X)


def test_no_output():
    with refused(
        RuntimeError,
        """
        jacrev(<lambda>, argnums=0): the function returned no tensor.
            returned   ()
        Return at least one.
        """,
    ):
        jacrev(lambda _: ())(X)


def test_an_integer_output():
    with refused(
        RuntimeError,
        """
        vjp(<lambda>): outputs must be floating-point or complex.
            output   bool[3]
        No derivative reaches any other. Convert it, or return it beside, with has_aux=True.
        """,
    ):
        vjp(lambda x: x > 1, X)


def test_a_complex_output_of_a_jacobian():
    with refused(
        RuntimeError,
        """
        jacrev(<lambda>, argnums=0): the outputs of a Jacobian must be real.
            outputs   complex64[3]
        Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.
        """,
    ):
        jacrev(lambda x: x * 1j)(X)


# --- cotangents --------------------------------------------------------------------------------


def test_cotangents_of_another_tree():
    _, pull = vjp(lambda x: {"y": x, "z": x}, X)
    with refused(
        RuntimeError,
        """
        vjp(<lambda>): cotangents must be shaped like the output.
            output       {'y': *, 'z': *}
            cotangents   (*, *)
        Give every output one cotangent, in the same tree.
        """,
    ):
        pull((X, X))


def test_two_cotangents_as_two_arguments():
    with refused(
        TypeError,
        """
        vjp(same): the cotangents are one argument, shaped like the output.
            second argument   float32[3]
        For an output that is a tuple pass a tuple: pull((c1, c2)).
        """,
    ):
        vjp(same, X)[1](X, X)


def test_a_cotangent_of_another_shape():
    _, pull = vjp(same, X)
    with refused(
        RuntimeError,
        """
        vjp(same): a cotangent must have its output's shape.
            output float32[3]   cotangent float32[2]
        A cotangent weighs every entry of its output.
        """,
    ):
        pull(X[:2])


def test_a_cotangent_that_is_no_tensor():
    _, pull = vjp(total, X)
    with refused(
        TypeError,
        """
        vjp(total): a cotangent must be a tensor.
            cotangent   1.0   float
        Make it one: torch.tensor(c).
        """,
    ):
        pull(1.0)


def test_a_complex_cotangent_of_a_real_output():
    _, pull = vjp(same, X)
    with refused(
        RuntimeError,
        """
        vjp(same): a cotangent must be complex where its output is, and real where it is.
            output float32[3]   cotangent complex64[3]
        Convert it: c.to(y.dtype), or c.real.
        """,
    ):
        pull(Z)


def test_chunk_size_below_one():
    with refused(
        ValueError,
        """
        jacrev(chunk_size=-1): a chunk holds at least one example.
        Pass an int above 0, 'auto' for as many as fit, or None to run all examples at once.
        """,
    ):
        jacrev(same, chunk_size=-1)


def computed_before():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    return w, w.sin() * w


def test_a_second_derivative_inside_through_history_from_outside():
    w, y = computed_before()

    def twice(x):
        (slope,) = torch.autograd.grad((y * x).sum().exp(), w, create_graph=True)
        return torch.autograd.grad(slope.sum(), w)[0]

    with refused(
        NotImplementedError,
        """
        vmap: a second derivative is asked for inside, through the history of a tensor from before the call.
            with respect to   float32[2]
        The first one left the mapped function on its way to a tensor from outside.
        Compute inside the function what depends on that tensor.
        """,
    ):
        vmap(twice)(torch.ones(3, 2))


def test_a_derivative_inside_vmap_inside_jvp_through_history_from_outside():
    w, y = computed_before()

    def slopes(a):
        z = a * y
        return vmap(lambda x: torch.autograd.grad((z * x).sum(), w, create_graph=True)[0])(
            torch.ones(3, 2)
        )

    with refused(
        NotImplementedError,
        """
        vmap inside jvp: a derivative is asked for, through the history of a tensor from before the call.
            with respect to   float32[2]
        The cotangents of all examples, with their tangents, cannot leave vmap at once.
        Compute inside the function what depends on that tensor.
        """,
    ):
        jvp(slopes, (torch.ones(2),), (torch.ones(2),))
