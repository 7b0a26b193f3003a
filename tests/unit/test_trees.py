"""Trees of common kinds are taken apart here, to the same leaves and shapes as by torch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as torchs

from forall._compat import pytree

Pair = namedtuple("Pair", "a b")  # noqa: PYI024


@dataclass
class Node:
    inside: object


class Row(list):
    """A leaf: torch knows lists, not what derives from them."""


torchs.register_pytree_node(Node, lambda n: ([n.inside], "context"), lambda c, _: Node(*c))
TREES = [
    1,
    None,
    "text",
    (),
    [],
    {},
    (1, [2, (3,)], {"a": 4, "b": {}}),
    {"b": 1, "a": [None, None]},
    {1: 2, 2: 3, "x": 4},
    {True: 2},
    {1: 2},
    ({"a": 1}, {"a": [1]}, {"a": (1,)}),
    {"a": 1, "b": ("a", "b")},
    {"a": {"b": 1}, "c": 2},
    {"a": {"b": 1, "c": 2}},
    Pair(1, [2]),
    (Pair(1, 2), OrderedDict(b=1, a=2), defaultdict(list, a=1), deque([1, 2], 3)),
    [Node((1, 2)), 3],
    (Row([1, 2]), slice(1, 2), torch.Size([1, 2])),
    torch.return_types.max((1, 2)),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_as_torch_has_it(tree):
    for _ in range(2):  # the second time the shape is known
        leaves, spec = pytree.flatten(tree)
        expected, wanted = torchs.tree_flatten(tree)
        assert leaves == expected
        assert spec == wanted
        assert repr(spec) == repr(wanted)
        back = pytree.unflatten(leaves, spec)
        assert back == tree
        assert type(back) is type(torchs.tree_unflatten(expected, wanted))
        assert repr(back) == repr(tree) or type(tree) is not dict


def test_names_keep_their_type_and_order():
    """1 and True are one key; so a shape with such keys is not remembered for the other."""
    for tree in ({1: 0}, {True: 0}, {1.0: 0}, {"b": 0, "a": 1}, {"a": 0, "b": 1}):
        leaves, spec = pytree.flatten(tree)
        assert repr(pytree.unflatten(leaves, spec)) == repr(tree)


def test_a_kind_registered_later():
    class Late:
        def __init__(self, x):
            self.x = x

    late = Late(1)
    assert pytree.flatten((late,))[0] == [late]
    torchs.register_pytree_node(Late, lambda n: ([n.x], None), lambda c, _: Late(*c))
    assert pytree.flatten((late,))[0] == [1]


def test_too_many_or_too_few_leaves():
    _, spec = pytree.flatten((1, 2))
    for leaves in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="unflatten"):
            pytree.unflatten(leaves, spec)


def test_shapes_without_end_are_not_all_kept():
    for n in range(2 * pytree._MANY):
        pytree.flatten({f"name {n}": 1})
    assert len(pytree._specs) <= pytree._MANY
