"""numpy's functions of what is the same for all examples, where torch's own layer cannot answer.

Their memory is read, so it must be the tensor's own at each depth of levels.
"""

import numpy as np
import pytest
import torch

from forall import hessian, jacfwd, jvp, vmap

ROWS = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 7


def of_one_made_inside(x):
    return x * np.sqrt(torch.arange(1, 5))


def of_a_number_made_inside(x):
    return x * np.sqrt(torch.tensor(4))


def of_a_view(x):
    return sum(x * np.sqrt(s) for s in torch.arange(1, 4))


def of_two(x):
    return x * np.hypot(torch.arange(1, 5), torch.full((4,), 3))


def of_one_and_of_what_differs(x):
    return x * np.hypot((x * 7).long(), torch.arange(4))


def of_what_was_computed(x):
    return x * np.sqrt(torch.zeros(4, dtype=torch.int64) + 4)


FUNCTIONS = pytest.mark.parametrize(
    "f",
    [
        of_one_made_inside,
        of_a_number_made_inside,
        of_a_view,
        of_two,
        of_one_and_of_what_differs,
        of_what_was_computed,
    ],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:vmap. numpy runs"),
    pytest.mark.filterwarnings("ignore:__array_wrap__"),
]


@FUNCTIONS
def test_under_one_level(f):
    torch.testing.assert_close(vmap(f)(ROWS), torch.stack([f(x) for x in ROWS]))


@FUNCTIONS
def test_where_the_examples_are_of_the_inner_level(f):
    got = vmap(lambda s: vmap(f)(ROWS) * s)(torch.arange(2.0))
    want = torch.stack([f(x) for x in ROWS])
    torch.testing.assert_close(got, torch.stack([want * 0, want]))


@FUNCTIONS
def test_where_the_examples_are_of_the_outer_level(f):
    got = vmap(lambda x: vmap(lambda s: f(x) * s)(torch.arange(2.0)))(ROWS)
    want = torch.stack([f(x) for x in ROWS])
    torch.testing.assert_close(got, torch.stack([want * 0, want], 1))


@FUNCTIONS
def test_beside_a_tangent(f):
    if f is of_one_and_of_what_differs:
        f = lambda x: x * np.hypot(x.detach().long(), torch.arange(4))  # noqa: E731
    want = torch.stack([torch.autograd.functional.jacobian(f, x) for x in ROWS])
    torch.testing.assert_close(torch.stack([jacfwd(f)(x) for x in ROWS]), want)
    torch.testing.assert_close(vmap(jacfwd(f))(ROWS), want)
    along = vmap(lambda x: jvp(f, (x,), (torch.ones_like(x),))[1])(ROWS)
    torch.testing.assert_close(along, want.sum(-1))
    squares = hessian(lambda x: (f(x) * x).sum())(ROWS[1])
    torch.testing.assert_close(
        squares, torch.autograd.functional.hessian(lambda x: (f(x) * x).sum(), ROWS[1])
    )


def test_of_what_moves_is_refused():
    with pytest.raises(NotImplementedError, match="no derivative of this"):
        jvp(lambda x: np.spacing(x), (ROWS[0],), (ROWS[0],))


def test_of_a_value_that_a_jvp_has_left():
    box = []
    jvp(lambda x: (box.append(torch.arange(3.0).cos()), x)[1], (ROWS[0],), (ROWS[0],))
    found = np.interp(0.5, np.arange(3.0), box[0])
    assert found == np.interp(0.5, np.arange(3.0), torch.arange(3.0).cos().numpy())
