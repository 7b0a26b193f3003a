"""How many messages ranks send to each other, and how many of them a call keeps."""

import torch
from torch.utils._pytree import tree_leaves

from forall import grad, vmap
from mesh import message_programs
from mesh.pool import ask, join

DTYPES = {"psum": 3, "pmean": 2, "pmax": 4, "all_gather": 4, "ppermute": 4, "all_gather tiled": 1}


def test_a_tree_is_one_message_for_each_dtype(pool):
    xs = torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3).cos()
    answers = ask(pool, "message_programs.reduce_trees", xs, (3, 2), size=2)
    for name, f in message_programs.TREES.items():
        g = grad(lambda x, f=f: message_programs.weigh_tree(f(x)))
        for form, of_one in {"value": f, "grad": g}.items():
            found, counts = zip(*[answer[name, form] for answer in answers], strict=True)
            want = vmap(of_one, axis_name="b")(xs)
            for one, expected in zip(join(found), tree_leaves(want), strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)  # some are single
            dtypes = DTYPES.get(name, 2)  # double and single precision
            back = min(dtypes, 2) * (2 if name == "pmax" else 1)  # it counts the largest, too
            assert {*counts} == {dtypes if form == "value" else dtypes + back}, name


def test_messages_are_kept_where_a_run_may_be_undone(pool):
    for kept in ask(pool, "message_programs.count_kept_messages", size=2):
        assert kept == [1, 0, 1, 2]  # the last is one inside another, which may be undone
