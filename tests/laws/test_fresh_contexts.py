"""What a function makes anew in each of its runs is one thing, if it holds the same each time.

`vmap` runs a function once for all examples, in chunks, or in groups; the loop takes what it makes
besides tensors from the first example.
"""

import pytest
import torch
from torch.utils._pytree import register_pytree_node

from forall import cond, vmap

pytestmark = pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
X = torch.arange(4.0)


class Settings:
    """It is equal to itself alone."""

    def __init__(self, **held):
        self.__dict__.update(held)


class Valued(Settings):
    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return len(vars(self))


class Node:
    def __init__(self, value, context):
        self.value, self.context = value, context


register_pytree_node(Node, lambda n: ([n.value], n.context), lambda v, c: Node(*v, c))

MADE = {
    "attributes": lambda: Settings(a=1, b="two"),
    "of attributes": lambda: Settings(a=Settings(b=[1, {"c": Settings(d=2)}])),
    "in a list": lambda: [Settings(a=1), (Settings(a=2),)],
    "with an equality": lambda: Valued(a=1),
    "a ring": lambda: ring(),
}
WAYS = {
    "no branch": lambda make: lambda x: make(x * 2),
    "an if": lambda make: lambda x: make(x * 2) if x > 1 else make(-x),
    "cond": lambda make: lambda x: cond(x > 1, lambda x: make(x * 2), lambda x: make(-x), x),
}


def ring():
    found = Settings(a=1)
    found.itself = found
    return found


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", MADE)
def test_contexts_of_results(made, way, chunk):
    f = WAYS[way](lambda y: Node(y, MADE[made]()))
    found = vmap(f, chunk_size=chunk)(X)
    torch.testing.assert_close(found.value, torch.stack([f(x).value for x in X]))
    assert type(found.context) is type(MADE[made]())


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("made", MADE)
def test_results_that_are_no_tensors(made, chunk):
    found = vmap(lambda x: (x, MADE[made]()), chunk_size=chunk)(X)
    assert type(found[1]) is type(MADE[made]())


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


DIFFERENT = {
    "an attribute": [lambda: Settings(a=1), lambda: Settings(a=2)],
    "one more attribute": [lambda: Settings(a=1), lambda: Settings(a=1, b=2)],
    "a type": [lambda: [1], lambda: (1,)],
    "an attribute's type": [lambda: Settings(a=1), lambda: Settings(a=True)],
    "deeper": [lambda: [Settings(a=Settings(b=1))], lambda: [Settings(a=Settings(b=3))]],
    "what is not seen": [lambda: Slotted(1), lambda: Slotted(2)],
    "a tensor": [lambda: Settings(a=torch.ones(1)), lambda: Settings(a=torch.zeros(1))],
}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", DIFFERENT)
def test_contexts_that_differ_are_an_error(name, chunk):
    one, other = DIFFERENT[name]
    with pytest.raises(ValueError, match="differ in structure"):
        vmap(lambda x: Node(x, one() if x > 1 else other()), chunk_size=chunk)(X)


def with_an_attribute(x):
    found = Settings(a=0)
    if x > 1:
        found.a = 3
    return x, found


PER_EXAMPLE = {
    "a number in a context": lambda x: Node(x, x.item()),
    "a number in a list": lambda x: Node(x, [1, x.item()]),
    "a number that differs": lambda x: Node(x, 1 if x > 1 else 2),
    "a text that differs": lambda x: Node(x, "a" if x > 1 else "b"),
    "an attribute": lambda x: (x, Settings(a=x.item())),
    "an attribute of some": with_an_attribute,
    "a list of some": lambda x: (x, Settings(a=[1] if x > 1 else ())),
}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_no_value_of_an_example_leaves_in_what_is_no_tensor(name, chunk):
    with pytest.raises(ValueError, match=r"differ|holds tensors where"):
        vmap(PER_EXAMPLE[name], chunk_size=chunk)(X)
