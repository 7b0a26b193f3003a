"""What `vmap` says about its arguments and options, also `out_dims`."""

import functools

import pytest
import torch

from forall import vmap
from golden import refused

X = torch.arange(6.0).reshape(3, 2)


def total(x):
    return x.sum()


def test_not_callable():
    with refused(
        TypeError,
        """
        vmap(func): func must be callable.
            func   float32[3, 2]   Tensor
        Pass the function itself, not its result: vmap(f), not vmap(f(x)).
        """,
    ):
        vmap(X)  # pyright: ignore[reportArgumentType]


def test_unknown_randomness():
    with refused(
        RuntimeError,
        """
        vmap(randomness='no'): no such flag.
        It is one of 'error' (default), 'different' and 'same', or a key of forall.random.
        """,
    ):
        vmap(total, randomness="no")


def test_chunk_size_below_one():
    with refused(
        ValueError,
        """
        vmap(chunk_size=0): a chunk holds at least one example.
        Pass an int above 0, 'auto' for as many as fit, or None to run all examples at once.
        """,
    ):
        vmap(total, chunk_size=0)


def test_a_list_of_examples_of_several_sizes():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): the mapped axes differ in size.
            args[0][0]   float32[3, 2]   in_dims 0   size 3
            args[0][1]   float32[2, 2]   in_dims 0   size 2
        args[0] is a tree of arguments. If it shall be the list of the examples, stack it, or for
        several sizes torch.nested.nested_tensor(args[0], layout=torch.jagged).
        """,
    ):
        vmap(total)([X, X[:2]])


def test_in_dims_in_the_wrong_call():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): the mapped axes differ in size.
            args[0]   float32[3, 2]   in_dims 0   size 3
            args[1]   float32[2]      in_dims 0   size 2
        in_dims belongs to vmap: vmap(f, in_dims=...)(x).
        """,
    ):
        vmap(total)(X, X[0], in_dims=(0, None))


def test_a_keyword_argument_that_looks_mapped():
    with pytest.raises(RuntimeError) as caught:
        vmap(lambda x, w: x @ w)(X, w=X)
    assert caught.value.__notes__[-1] == (
        "vmap: w was passed by keyword, so all examples share it. To map it, name the mapped "
        "arguments: in_dims={'x': 0, 'w': 0}."
    )


def test_in_dims_of_a_wrong_type():
    with refused(
        ValueError,
        """
        vmap(total, in_dims='0'): in_dims must be an int, a tuple or a dict.
            in_dims   '0'   str
        Give one int for all arguments, a tuple with one entry per argument, or a dict of names.
        """,
    ):
        vmap(total, in_dims="0")(X)


def test_a_dim_of_a_wrong_type():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=(0.5,)): a dim of in_dims must be an int or None.
            args[0]   float32[3, 2]   in_dims 0.5   float
        Give the dim that counts the examples, or None to share the argument.
        """,
    ):
        vmap(total, in_dims=(0.5,))(X)


def test_no_arguments():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): called without arguments.
        There is nothing to map over. Pass at least one tensor.
        """,
    ):
        vmap(total)()


def test_in_dims_too_long():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=(0, 0)): in_dims does not fit the arguments.
            in_dims   (0, 0)
            args[0]   float32[3, 2]
        A tuple of in_dims has one entry per argument; a tree of them is shaped like its argument.
        """,
    ):
        vmap(total, in_dims=(0, 0))(X)


def test_in_dims_of_another_tree():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=({'b': 0},)): in_dims does not fit the arguments.
            in_dims   ({'b': 0},)
            args[0]   {'a': float32[3, 2]}
        A tuple of in_dims has one entry per argument; a tree of them is shaped like its argument.
        """,
    ):
        vmap(total, in_dims=({"b": 0},))({"a": X})


def test_a_number_mapped():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): only tensors can be mapped.
            args[1]['n']   3.0   in_dims 0   float
        Give it in_dims=None to share it between examples, or make it a tensor.
        """,
    ):
        vmap(total)(X, {"n": 3.0})


def test_a_dim_that_the_argument_does_not_have():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=2): in_dims names a dim that the argument does not have.
            args[0]   float32[3, 2]   in_dims 2   rank 2
        Give a dim in [-2, 2); to share the argument between examples, give it None.
        """,
    ):
        vmap(total, in_dims=2)(X)


def test_a_scalar_mapped():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): in_dims names a dim that the argument does not have.
            args[0]   float32[]   in_dims 0   rank 0
        A tensor of rank 0 has none; to share the argument between examples, give it None.
        """,
    ):
        vmap(total)(X.sum())


def test_nothing_mapped():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=(None,)): no argument is mapped.
            in_dims   (None,)
        At least one tensor needs an int in in_dims, or there is no number of examples.
        """,
    ):
        vmap(total, in_dims=(None,))(X)


def test_keyword_arguments_alone():
    with refused(
        ValueError,
        """
        vmap(total, in_dims=0): no argument is mapped.
            in_dims   0
        Keyword arguments are shared unless a dict names them: in_dims={'x': 0}.
        """,
    ):
        vmap(total)(x=X)


def test_sizes_that_differ():
    def loss(batch, scale):
        return batch["image"].sum() * scale

    batch = {"image": torch.zeros(32, 784), "label": torch.zeros(10, 31, dtype=torch.int64)}
    with refused(
        ValueError,
        """
        vmap(loss, in_dims=({'image': 0, 'label': 1}, None)): the mapped axes differ in size.
            args[0]['image']   float32[32, 784]   in_dims 0   size 32
            args[0]['label']   int64[10, 31]      in_dims 1   size 31
        All must have one size. To share an argument between examples, give it in_dims=None.
        """,
    ):
        vmap(loss, in_dims=({"image": 0, "label": 1}, None))(batch, X)


def test_a_dict_of_in_dims_names_a_stranger():
    def scaled(x, *, by):
        return x * by

    with refused(
        ValueError,
        """
        vmap(scaled, in_dims={'x': 0, 'z': 0}): in_dims names an argument that the call does not pass.
            in_dims   z
            passed    by, x
        Name only arguments that are passed.
        """,
    ):
        vmap(scaled, in_dims={"x": 0, "z": 0})(X, by=2.0)


def test_a_dict_of_in_dims_for_a_function_without_names():
    with refused(
        ValueError,
        """
        vmap(dot, in_dims={'input': 0}): a dict of in_dims needs the names of the arguments.
            func   <built-in method dot of type object>
        Python does not know them for this function. Give a tuple of in_dims.
        """.replace("<built-in method dot of type object>", _builtin()),
    ):
        vmap(torch.dot, in_dims={"input": 0})(X, X)


def _builtin() -> str:
    shown = repr(torch.dot)  # with an address
    return shown if len(shown) <= 60 else shown[:57] + "..."


def test_out_dims_of_a_wrong_type():
    with refused(
        ValueError,
        """
        vmap(total, out_dims='a'): out_dims must be an int, None, or a tree of them.
            out_dims   'a'
        Give the place of the examples in each result; None for one that is the same for all.
        """,
    ):
        vmap(total, out_dims="a")(X)


def test_out_dims_of_another_tree():
    with refused(
        ValueError,
        """
        vmap(partial(<lambda>), out_dims=(0, 0, 0)): out_dims does not fit the result.
            out_dims   (0, 0, 0)
            result     {'a': (*, *)}
        Give one int for all results, or a tree of ints (or None) like the result.
        """,
    ):
        vmap(functools.partial(lambda x: {"a": (x, x)}), out_dims=(0, 0, 0))(X)


def test_a_place_that_the_result_does_not_have():
    with refused(
        IndexError,
        """
        vmap(total, out_dims=2): out_dims names a place that the result does not have.
            result of one example   float32[]   out_dims 2
        Give a place in [-1, 1).
        """,
    ):
        vmap(total, out_dims=2)(X)


def test_no_place_for_a_result_that_differs():
    with refused(
        ValueError,
        """
        vmap(total, out_dims=None): out_dims is None for a result that differs between the examples.
            result of one example   float32[]
        Give it an int: the place of the examples in the result.
        """,
    ):
        vmap(total, out_dims=None)(X)


def test_the_message_of_a_long_tree_is_clipped():
    many = {f"weight_{i}": 0 for i in range(100)}
    with refused(
        ValueError,
        """
        vmap(total, in_dims=({'weight_0': 0, 'weight_1': 0, 'weight_2': 0, 'weight_3'...): in_dims does not fit the arguments.
            in_dims   ({'weight_0': 0, 'weight_1': 0, 'weight_2': 0, 'weight_3'...
            args[0]   float32[3, 2]
        A tuple of in_dims has one entry per argument; a tree of them is shaped like its argument.
        """,
    ):
        vmap(total, in_dims=(many,))(X)
