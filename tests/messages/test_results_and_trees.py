"""What `vmap` says about results; and transforms about names, trees, and parts of the Hessian."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from forall import (
    functional_call,
    grad,
    hessian,
    hessian_diag,
    hvp,
    jacrev,
    laplacian,
    stack_module_state,
    vmap,
)
from golden import refused

X = torch.arange(3.0)


def total(x, y=1.0):
    return x.sum() * y


@dataclass
class Point:
    x: int


class Box:
    def __init__(self, x):
        self.x = x


# --- argnames ----------------------------------------------------------------------------------


@pytest.mark.parametrize("argnames", [0, (), ("x", 1), ["x"]])
def test_argnames_of_a_wrong_type(argnames):
    with refused(
        RuntimeError,
        f"""
        grad(total, argnames={argnames!r}): argnames must be a str or a tuple of strs.
            argnames   {argnames!r}   {type(argnames).__name__}
        Give the names of the arguments.
        """,
    ):
        grad(total, argnames=argnames)(X)


def test_argnames_beside_argnums():
    with refused(
        RuntimeError,
        """
        jacrev(total, argnames='x'): argnums and argnames both say which arguments.
            argnums    1
            argnames   'x'
        Give one of them.
        """,
    ):
        jacrev(total, 1, argnames="x")(X)


def test_argnames_name_an_argument_that_is_not_passed():
    with refused(
        RuntimeError,
        """
        hessian(total, argnames='y'): argnames names an argument that the call does not pass.
            argnames   'y'
            passed     x
        Pass the argument; a default is not differentiated.
        """,
    ):
        hessian(total, argnames="y")(X)


def test_argnames_name_an_argument_twice():
    with refused(
        RuntimeError,
        """
        laplacian(total, argnames=('x', 'x')): argnames names an argument twice.
            argnames   ('x', 'x')
        Name each argument once.
        """,
    ):
        laplacian(total, argnames=("x", "x"))(X)


def test_argnames_of_a_function_whose_names_are_unknown():
    with refused(
        ValueError,
        f"""
        grad(dot, argnames='input'): argnames needs the names of the arguments.
            func   {str(torch.dot)[:57] + "..." if len(str(torch.dot)) > 60 else torch.dot}
        Python does not know them for this function. Pass them by keyword, or give argnums.
        """,
    ):
        grad(torch.dot, argnames="input")(X, X)


# --- parts of the Hessian ----------------------------------------------------------------------


def test_no_vector():
    with refused(
        TypeError,
        """
        hvp(total, argnums=0): the arguments of the function come first, then the vector.
            positional arguments   1
        Pass both: hvp(total)(x, v).
        """,
    ):
        hvp(total)(X)


def test_a_vector_of_another_tree():
    with refused(
        RuntimeError,
        """
        hvp(total, argnums=(0, 1)): the vector must be shaped like what is differentiated.
            arguments   (*, *)
            vector      *
        Give it the same tree; several argnums take a tuple of vectors.
        """,
    ):
        hvp(total, (0, 1))(X, X.sum(), X)


def test_a_vector_of_another_shape():
    with refused(
        RuntimeError,
        """
        hvp(total, argnums=0): a tangent must have its primal's shape.
            primal float32[3]   tangent float32[2]
        A tangent is a direction in the space of its primal.
        """,
    ):
        hvp(total)(X, X[:2])


@pytest.mark.parametrize("verb", [laplacian, hessian_diag])
def test_a_complex_output(verb):
    with refused(
        RuntimeError,
        f"""
        {verb.__name__}(f, argnums=0): the outputs of a Jacobian must be real.
            outputs   complex64[]
        Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.
        """,
    ):

        def f(x):
            return x.sum() * 1j

        verb(f)(X)


def test_aux_that_is_not_returned():
    with refused(
        RuntimeError,
        """
        laplacian(total): with has_aux=True the function returns a tuple (output, aux).
            returned   float32[]   Tensor
        Return two things, or leave has_aux out.
        """,
    ):
        laplacian(total, has_aux=True)(X)


# --- trees -------------------------------------------------------------------------------------


def test_a_dataclass_that_is_no_tree():
    with refused(
        ValueError,
        """
        vmap(f, in_dims=0): only tensors can be mapped.
            args[0]   Point(x=1)   in_dims 0   Point
        Its fields are not seen: register it once, torch.export.register_dataclass(Point).
        """,
    ):

        def f(p):
            return p.x

        vmap(f)(Point(1))
    with refused(
        ValueError,
        """
        grad(f, argnums=0): there is no tensor to differentiate with respect to.
            differentiated   Point(x=1)   Point
        Its fields are not seen: register it once, torch.export.register_dataclass(Point).
        """,
    ):
        grad(f)(Point(1))


@pytest.mark.parametrize(
    ("kind", "cure"),
    [
        (
            Point,
            "Its fields are not seen: register it once, torch.export.register_dataclass(Point).",
        ),
        (Box, "Return its tensors in a tuple, a list or a dict."),
    ],
)
def test_a_result_that_hides_tensors(kind, cure):
    def f(x):
        return kind(x)

    with refused(
        ValueError,
        f"""
        vmap(f, out_dims=0): a result holds tensors where torch's trees do not see them.
            result   {kind.__name__}
            holds    float32[]
        {cure}
        """,
    ):
        vmap(f)(X)


@pytest.mark.impure("uses up an iterator")
def test_results_that_are_no_tensors_differ():
    names = iter("abc")

    def f(x):
        return x, next(names)

    with refused(
        ValueError,
        """
        vmap(f, out_dims=0): a result that is no tensor differs between the examples.
            result[1] of example 0   'a'   str
            result[1] of example 2   'b'   str
        Tensors and numbers are stacked; anything else must be the same for all. Return a number instead: an index in the place of a string, nan in the place of None.
        """,
    ):
        vmap(f, chunk_size=2)(X)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"ragged": True}])
def test_none_of_some_examples(options):
    xs = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])

    def f(x):
        return {"y": x[:1] if x[0] > 0 else None}

    with refused(
        ValueError,
        """
        vmap(f, out_dims=0): a result that is no tensor differs between the examples.
            result['y'] of example 0   float32[1]   Tensor
            result['y'] of example 1   None         NoneType
        Tensors and numbers are stacked; anything else must be the same for all. Return a number instead: an index in the place of a string, nan in the place of None.
        """,
    ):
        vmap(f, **options)(xs)


@pytest.mark.impure("uses up an iterator")
def test_results_that_differ_in_structure():
    sizes = iter([1, 2])

    def f(x):
        return [x] * next(sizes)

    with refused(
        ValueError,
        """
        vmap(f, out_dims=0): the results of the examples differ in structure.
            example 0   [*]
            example 2   [*, *]
        Return the same tree for every example.
        """,
    ):
        vmap(f, chunk_size=2)(X)


ROWS = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def positive(x):
    return x[x > 0]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}])
@pytest.mark.parametrize(
    ("tree", "of"),
    [(lambda y: y, ""), (lambda y: {"mean": y.mean(), "kept": y}, "result['kept'] of ")],
)
def test_results_that_differ_in_shape(tree, of, options):
    def f(x):
        return tree(positive(x))

    with refused(
        ValueError,
        f"""
        vmap(f, out_dims=0): the results of the examples differ in shape.
            {of}example 0   [1]
            {of}example 1   [2]
        They cannot be stacked. Return the same shape for every example, or say ragged=True for a nested tensor.
        """,
    ):
        vmap(f, **options)(ROWS)


def test_ragged_results_that_differ_in_rank():
    def f(x):
        return x.mean(), x if x[1] > 0 else x[None]

    with refused(
        ValueError,
        """
        vmap(f, out_dims=0): the results of the examples differ in rank.
            result[1] of example 0   [1, 2]
            result[1] of example 1   [2]
        A nested tensor has components of one rank. Return the same for every example.
        """,
    ):
        vmap(f, ragged=True)(ROWS)


def test_ragged_results_whose_examples_are_not_first():
    def f(x):
        return x.mean(), positive(x)

    with refused(
        ValueError,
        """
        vmap(f, out_dims=(0, 1)): results of several shapes leave as a nested tensor, examples first.
            out_dims                 1
            result[1] of example 0   [1]
            result[1] of example 1   [2]
        Give out_dims=0 (its default), or return the same shape for every example.
        """,
    ):
        vmap(f, out_dims=(0, 1), ragged=True)(ROWS)


# --- stacks of modules -------------------------------------------------------------------------


def test_no_modules():
    with refused(
        RuntimeError,
        """
        stack_module_state(models): there is no module to stack.
        Pass at least one.
        """,
    ):
        stack_module_state([], detach=False)


def test_modules_that_differ():
    frozen = nn.Linear(1, 1).requires_grad_(False)
    for other, what, first, second in (
        (nn.ReLU(), "class", "Linear", "ReLU"),
        (nn.Linear(1, 1).eval(), "mode", "training", "evaluation"),
        (nn.Linear(1, 1, bias=False), "names", "weight, bias", "weight"),
        (frozen, "requires_grad of weight", "True", "False"),
        (nn.Linear(2, 1), "shape of weight", "[1, 1]", "[1, 2]"),
    ):
        with refused(
            RuntimeError,
            f"""
            stack_module_state(models): the modules differ in {what}.
                models[0]   {first}
                models[1]   {second}
            Only modules that differ in their values alone can run as one.
            """,
        ):
            stack_module_state([nn.Linear(1, 1), other], detach=False)


@pytest.mark.parametrize("models", [nn.Linear(1, 1), [{"weight": X}]])
def test_no_list_of_modules(models):
    shown = "Linear(in_features=1, out_features=1, bias=True)   Linear"
    with refused(
        TypeError,
        f"""
        stack_module_state(models): models must be several modules.
            models   {"[{'weight': float32[3]}]   list" if type(models) is list else shown}
        Pass a list of them.
        """,
    ):
        stack_module_state(models)


def test_functional_call_of_no_module():
    with refused(
        TypeError,
        """
        functional_call(module, parameters, args): the first argument must be a module.
            module   {'weight': float32[3]}   dict
        The module comes first, then the dict of its parameters, then the arguments.
        """,
    ):
        functional_call({"weight": X}, nn.Linear(3, 1), (X,))  # pyright: ignore[reportArgumentType]


def test_functional_call_without_names():
    with refused(
        ValueError,
        """
        functional_call(module, parameters, args): parameters are given by name, in a dict.
            parameters   float32[3]   Tensor
        Make it one: {name: p.detach() for name, p in module.named_parameters()}.
        """,
    ):
        functional_call(nn.Linear(3, 1), [X], (X,))  # pyright: ignore[reportArgumentType]


def test_a_module_in_the_place_of_its_parameters():
    with refused(
        ValueError,
        """
        grad(total, argnums=0): there is no tensor to differentiate with respect to.
            differentiated   Linear(in_features=1, out_features=1, bias=True)   Linear
        Pass its parameters as a dict, {name: p.detach() for name, p in net.named_parameters()}, and
        call it by functional_call(net, parameters, (x,)).
        """,
    ):
        grad(total)(nn.Linear(1, 1))


def test_modules_that_are_mapped():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): only tensors can be mapped.
            args[0][0]   ReLU()   in_dims 0   ReLU
        To run several modules, map their parameters, parameters, _ = stack_module_state(models),
        and call one by functional_call(models[0], parameters, (x,)).
        """,
    ):
        vmap(total)([nn.ReLU(), nn.ReLU()])


def test_parameters_that_are_an_iterator():
    def given():
        yield X

    made = given()
    with refused(
        ValueError,
        f"""
        grad(total, argnums=0): there is no tensor to differentiate with respect to.
            differentiated   {repr(made)[:57]}...   generator
        What an iterator will give is not seen. Make it a list, or a dict.
        """,
    ):
        grad(total)(made)
