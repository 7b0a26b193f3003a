"""What `cond`, `while_loop`, `scan` and their kin say: the call, the leaf, the cure."""

import pytest
import torch

from forall import associative_scan, cond, fori_loop, scan, switch, while_loop
from forall import map as map_
from golden import refused

X = torch.ones(3)


def step(c, *_):
    return c


def small(c):
    return c["x"].sum() < 10


@pytest.mark.parametrize(
    ("new", "shown", "cure"),
    [
        (X.double(), "float64[3]", "Return it converted, .to(torch.float32)"),
        (X[:2], "float32[2]", "Return a tensor of shape (3,)"),
        (1.5, "1.5 (float)", "Return a tensor of shape (3,) and dtype torch.float32"),
        (X.to("meta"), "float32[3] on meta", "Return it converted, .to('cpu')"),
    ],
)
def test_a_leaf_of_the_carry_changes(new, shown, cure):
    def body(c):
        return {"x": new}

    old = "float32[3]" if "meta" not in shown else "float32[3] on cpu"
    with refused(
        TypeError,
        f"""
        while_loop(small, body): carry['x'] is not what it was.
            before   carry['x']   {old}
            step 0   carry['x']   {shown}
        It keeps its shape, dtype and device from step to step.
        {cure}, or start with what the function returns.
        """,
    ):
        while_loop(small, body, {"x": X})


def test_a_later_step_changes_the_carry():
    def body(i, c):
        return c if i < 4 else c[None]

    with refused(
        TypeError,
        """
        fori_loop(lower, upper, body): carry is not what it was.
            before   carry   float32[3]
            step 2   carry   float32[1, 3]
        It keeps its shape, dtype and device from step to step.
        Return a tensor of shape (3,), or start with what the function returns.
        """,
    ):
        fori_loop(2, 9, body, X)


@pytest.mark.parametrize("n", [0, 3])
def test_the_carry_changes_its_structure(n):
    def body(c, x):
        return (c, c), None

    with refused(
        TypeError,
        """
        scan(body): carry changes its structure.
            before   *
            step 0   (*, *)
        Each step returns a tree like the one before it.
        """,
    ):
        scan(body, 0, X[:n])


def test_a_y_changes():
    def body(c, x):
        return c + 1, {"y": X[:c]}

    with refused(
        TypeError,
        """
        scan(body): y['y'] is not what it was.
            before   y['y']   float32[0]
            step 1   y['y']   float32[1]
        It keeps its shape, dtype and device from step to step.
        Return a tensor of shape (0,), or start with what the function returns.
        """,
    ):
        scan(body, 0, X)


def test_a_y_is_no_tensor():
    def body(c, x):
        return c, "y"

    with refused(
        TypeError,
        """
        scan(body): what each step gives must be tensors, numbers or None.
            y   'y'   str
        They are stacked: return a tensor.
        """,
    ):
        scan(body, 0, X)


@pytest.mark.parametrize("n", [0, 3])
def test_no_pair(n):
    with refused(
        TypeError,
        """
        scan(step): the function must return a pair, the carry and a y.
            returned   float32[3]   Tensor
        Where there is no y to keep, return (carry, None).
        """,
    ):
        scan(step, X, X[:n])


def test_numbers_of_steps_differ():
    with refused(
        ValueError,
        """
        scan(step): the numbers of steps differ.
            length                    4 steps
            xs[0]        float32[3]   3 steps
            xs[1]['a']   float32[2]   2 steps
        First dims, and length where it is given, must agree.
        """,
    ):
        scan(step, X, (X, {"a": X[:2]}), 4)


def test_no_number_of_steps():
    with refused(
        ValueError,
        """
        scan(step): nothing tells the number of steps.
        Pass xs with a tensor, or length.
        """,
    ):
        scan(step, X)
    with refused(
        ValueError,
        """
        scan(step): length=-1 is below 0.
        Pass how often the function is to run.
        """,
    ):
        scan(step, X, length=-1)


@pytest.mark.parametrize(("xs", "shown"), [(X[0], "float32[]   Tensor"), (3, "3   int")])
def test_no_first_dim(xs, shown):
    with refused(
        TypeError,
        f"""
        map(step): there is no first dim to go along.
            xs[1]   {shown}
        Every leaf of xs must be a tensor with at least one dim. Put what is the same for all steps into the function.
        """,
    ):
        map_(step, (X, xs))


@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_a_batch_size(size):
    with refused(
        ValueError,
        f"""
        map(step): a batch holds at least one slice.
            batch_size   {size}   {type(size).__name__}
        Pass an int above 0, or None to run the slices one by one.
        """,
    ):
        map_(step, X, batch_size=size)


@pytest.mark.parametrize(
    ("pred", "shown"), [(X > 0, "bool[3]   Tensor"), (None, "None   NoneType")]
)
def test_no_single_predicate(pred, shown):
    with refused(
        TypeError,
        f"""
        cond(pred, step, small): pred must be one number, or a tensor that holds one.
            pred   {shown}
        Reduce it (.any(), .all()). To choose entry by entry use torch.where; to let each example choose, vmap the function.
        """,
    ):
        cond(pred, step, small, X)


@pytest.mark.parametrize(
    "index", [1.0, torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(True)]
)
def test_no_index(index):
    shown = {float: "1.0   float"}.get(type(index))
    if shown is None:
        shown = f"{str(index.dtype).removeprefix('torch.')}{list(index.shape)}   Tensor"
    with refused(
        TypeError,
        f"""
        switch(index, [step]): the index must be one whole number.
            index   {shown}
        Pass an int, or a tensor of shape () with a dtype of integers: index.long().
        """,
    ):
        switch(index, [step], X)


def test_branches():
    with refused(
        ValueError,
        """
        switch(index, []): there is no branch.
        Pass at least one function.
        """,
    ):
        switch(0, [], X)
    with refused(
        TypeError,
        """
        switch(index, [step, 3]): what it runs must be a function.
            given   3   int
        Pass the function itself, not its result.
        """,
    ):
        switch(0, [step, 3], X)


@pytest.mark.parametrize("every", [None, 3])
def test_an_endless_loop(every):
    def going(c):
        return True

    with refused(
        RuntimeError,
        """
        while_loop(going, step): the loop goes on after max_steps=7 steps.
            all examples   carry   {'x': float32[3], 'n': 2}
        Allow more steps, or let the test end the loop sooner.
        """,
    ):
        while_loop(going, step, {"x": X, "n": 2}, max_steps=7, checkpoint_every=every)
    assert while_loop(lambda n: n < 7, lambda n: n + 1, 0, max_steps=7) == 7


@pytest.mark.parametrize(("name", "least"), [("max_steps", 0), ("checkpoint_every", 1)])
def test_numbers_that_count_steps(name, least):
    with refused(
        ValueError,
        f"""
        while_loop(small, step): {name} counts steps.
            {name}   {least - 1}   int
        Pass an int of at least {least}, or None.
        """,
    ):
        while_loop(small, step, X, **{name: least - 1})


def test_a_bound():
    with refused(
        TypeError,
        """
        fori_loop(lower, upper, step): upper must be one whole number.
            upper   1.5   float
        Pass an int, or a tensor of shape () with a dtype of integers.
        """,
    ):
        fori_loop(0, 1.5, step, X)


def test_elements():
    with refused(
        ValueError,
        """
        associative_scan(step): the numbers of elements differ.
            elems['a']   float32[3]   axis 0   size 3
            elems['b']   float32[2]   axis 0   size 2
        All must have one size.
        """,
    ):
        associative_scan(step, {"a": X, "b": X[:2]})
    with refused(
        IndexError,
        """
        associative_scan(step): a tensor has no dim -2.
            elems['a']   float32[3]
        Name the dim that counts the elements: axis.
        """,
    ):
        associative_scan(step, {"a": X}, axis=-2)
    with refused(
        TypeError,
        """
        associative_scan(step): elems must hold tensors only.
            elems[1]   2.0   float
        Put what is the same for all elements into the function.
        """,
    ):
        associative_scan(step, (X, 2.0))


def test_what_combines_elements():
    def fewer(a, b):
        return {"a": a["a"].sum()}

    def other(a, b):
        return a["a"]

    with refused(
        TypeError,
        """
        associative_scan(fewer): the function returns another shape or dtype than it was given.
            given      a['a']   float32[1]
            returned   a['a']   float32[]
        It is given slices of many elements, the axis that counts them included, and returns their like.
        """,
    ):
        associative_scan(fewer, {"a": X})
    with refused(
        TypeError,
        """
        associative_scan(other): the function returns another structure than it was given.
            given      {'a': *}
            returned   *
        Return a tree like each of the two that it takes.
        """,
    ):
        associative_scan(other, {"a": X})
