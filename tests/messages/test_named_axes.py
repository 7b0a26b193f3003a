"""The errors of named axes: the call, what was given, the cure."""

import pytest
import torch

from forall import (
    AxisError,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    ppermute,
    psum,
    psum_scatter,
    vmap,
)
from golden import refused

XS = torch.ones(4, 3)


def named(f):
    return lambda: vmap(vmap(f, axis_name="inner"), axis_name="b")(XS)


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("psum", lambda x: psum(x, "rows")),
        ("axis_index", lambda _: axis_index("rows")),
        ("axis_size", lambda _: axis_size(("b", "rows"))),
    ],
)
def test_a_name_that_no_axis_has(verb, call):
    with refused(
        NameError,
        f"""
        {verb}(.., 'rows'): no axis is named 'rows' here.
            named   'inner', 'b'
        Name it where the examples are mapped: vmap(f, axis_name='rows').
        """,
    ):
        named(call)()


def test_no_axis_at_all():
    with refused(
        NameError,
        """
        psum(.., 'b'): no axis is named 'b' here.
            named   none
        Name it where the examples are mapped: vmap(f, axis_name='b').
        """,
    ):
        vmap(lambda x: psum(x, "b"))(XS)


def test_a_dim_that_does_not_have_the_size_of_the_axis():
    with refused(
        ValueError,
        """
        psum_scatter(.., 'b'): the dim that is split does not fit the axis.
            x      float32[3]   scatter_dim=0   size 3
            axis   'b'                          size 4
        Give it size 4, or say tiled=True for equal parts of several entries.
        """,
    ):
        vmap(lambda x: psum_scatter(x, "b"), axis_name="b")(XS)


def test_a_dim_that_is_no_multiple_of_the_axis():
    with refused(
        ValueError,
        """
        all_to_all(.., 'b'): the dim that is split does not fit the axis.
            x      float32[3]   split_dim=0   size 3
            axis   'b'                        size 4
        Give it a multiple of 4: pad it.
        """,
    ):
        vmap(lambda x: all_to_all(x, "b", tiled=True), axis_name="b")(XS)


@pytest.mark.parametrize(
    ("perm", "what", "value", "cure"),
    [
        ([(0, 1), (0, 2)], "a source stands twice", "0", "Use all_gather to send to several."),
        ([(0, 1), (2, 1)], "a target stands twice", "1", "Use psum or all_gather to get several."),
        ([(0, 4)], "a target is no example", "4", "Give ints in [0, 4)."),
        ([(-1, 0)], "a source is no example", "-1", "Give ints in [0, 4)."),
        ([(1.0, 0)], "a source is no example", "1.0", "Give ints in [0, 4)."),
    ],
)
def test_a_permutation_that_is_none(perm, what, value, cure):
    with refused(
        ValueError,
        f"""
        ppermute(.., 'b', perm): in perm, {what}.
            in perm   {value}
            axis      'b', size 4
        {cure}
        """,
    ):
        vmap(lambda x: ppermute(x, "b", perm), axis_name="b")(XS)


def test_a_dim_that_is_not_there():
    with refused(
        IndexError,
        """
        all_gather(.., 'b'): dim is no dim of the result.
            x     float32[3]
            dim   2
        Give a dim in [-2, 2).
        """,
    ):
        vmap(lambda x: all_gather(x, "b", dim=2), axis_name="b")(XS)


def test_what_is_no_tensor():
    with refused(
        TypeError,
        """
        psum(.., 'b'): x must be a tensor or a number, or a tree of them.
            x   'text'   str
        Pass its tensors in a tuple, a list or a dict.
        """,
    ):
        vmap(lambda x: psum({"x": x, "y": "text"}, "b"), axis_name="b")(XS)


def test_an_axis_size_that_arguments_do_not_have():
    with refused(
        ValueError,
        """
        vmap(<lambda>, in_dims=0): the mapped axes have another size than axis_size=3.
            args[0]   float32[4, 3]   in_dims 0   size 4
        Give no axis_size where an argument is mapped, or the size that it has.
        """,
    ):
        vmap(lambda x: x, axis_size=3)(XS)


@pytest.mark.parametrize(("size", "kind"), [(-1, "int"), (2.0, "float"), (True, "bool")])
def test_an_axis_size_that_counts_nothing(size, kind):
    with refused(
        ValueError,
        f"""
        vmap: axis_size counts examples.
            axis_size   {size}   {kind}
        Pass an int of at least 0, or None.
        """,
    ):
        vmap(lambda x: x, axis_size=size)


@pytest.mark.parametrize(
    ("name", "shown"), [(("a", "b"), "('a', 'b')   tuple"), ([1], "[1]   list")]
)
def test_a_name_that_is_none(name, shown):
    with refused(
        TypeError,
        f"""
        vmap: axis_name must be hashable, and no tuple.
            axis_name   {shown}
        Give a string. A tuple stands for several axes, in psum and its kin.
        """,
    ):
        vmap(lambda x: x, axis_name=name)


def test_a_transform_of_torch_func_inside():
    with refused(
        NotImplementedError,
        """
        psum(.., 'b'): a transform of torch.func runs inside the axis.
        It knows no named axes. Use forall's transform of the same name.
        """,
    ):
        vmap(torch.func.grad(lambda x: psum(x, "b").sum()), axis_name="b")(XS)


def test_a_transform_of_torch_func_around():
    with refused(
        NotImplementedError,
        """
        vmap(<lambda>, in_dims=0): torch.compile and the transforms of torch.func know no named axes.
            axis_name   'b'
            axis_size   None
        Use forall's transforms around it, and forall.jit in the place of torch.compile.
        """,
    ):
        torch.func.vmap(lambda xs: vmap(lambda x: psum(x, "b"), axis_name="b")(xs))(XS)


def some_come(x):
    if x.sum() > 0:
        return psum(x, "b")
    return x


def test_some_examples_come():
    xs = torch.tensor([1.0, -1.0, 2.0])
    with pytest.raises(RuntimeError) as caught:
        vmap(some_come, axis_name="b")(xs)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "psum(.., 'b'): 2 of 3 examples of axis 'b' come here; the others took another way."
    )
    assert lines[1].endswith("if x.sum() > 0:")
    assert lines[2].endswith('return psum(x, "b")')
    assert lines[3] == (
        "A collective takes all examples of its axis. Call it before they diverge, or give those that "
        "do not take part a neutral value: psum(torch.where(taken, x, 0), 'b')."
    )


def sums(x):
    return psum(x, "b")


def test_chunks():
    line = sums.__code__.co_firstlineno + 1
    with refused(
        AxisError,
        f"""
        psum(.., 'b'): 3 of 4 examples of axis 'b' run together, since chunk_size=3 runs so many at once.
            at   {__file__}:{line}   return psum(x, "b")
        A collective takes all examples of its axis. Give no chunk_size, or return what is to be combined and combine the results.
        """,
    ):
        vmap(sums, axis_name="b", chunk_size=3)(XS)
