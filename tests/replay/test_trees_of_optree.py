"""Functions that take trees apart by optree are replayed; what they ask of it is watched."""

import functools

import pytest
import torch

import forall

optree = pytest.importorskip("optree", reason="optree is not installed: `make clients` installs it")
pytestmark = pytest.mark.usefixtures("at_once")

X = torch.arange(1.0, 4.0)
NAMESPACE = "forall.tests"
STATE = {"factor": 2.0}


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


def stacked(tree, **options):
    return torch.stack(optree.tree_leaves(tree, **options))


def of_sorted(x):
    return stacked({"b": x, "a": 2 * x}, namespace="forall.text")


def of_named(x):
    return stacked({"b": x, "a": 2 * x}, namespace=NAMESPACE)


def of_default(x, namespace="forall.default"):
    return stacked({"b": x, "a": 2 * x}, namespace=namespace)


def of_options(x, options={"namespace": "forall.options"}):  # noqa: B006
    return stacked({"b": x, "a": 2 * x}, **options)


def of_all(x):
    return stacked({"b": x, "a": 2 * x})


def mapped(x):
    return optree.tree_map(lambda a, b: a.sin() * b, {"b": x, "a": [x, x]}, {"b": x, "a": [x, x]})


def test_a_function_that_maps_trees_is_replayed(hits):
    f = forall.grad(lambda x: sum(optree.tree_leaves(mapped(x))))
    expected = 3 * (X.cos() * X + X.sin())
    for x in (X, X + 1, X + 2, X + 3, X + 4, X + 5):
        found = forall.vmap(f)(x)
        torch.testing.assert_close(found, 3 * (x.cos() * x + x.sin()))
    torch.testing.assert_close(forall.vmap(f)(X), expected)
    assert hits


@pytest.mark.parametrize(
    ("f", "namespace"),
    [
        (of_sorted, "forall.text"),
        (of_named, NAMESPACE),
        (of_default, "forall.default"),
        (of_options, "forall.options"),
    ],
)
def test_another_order_of_dicts_is_not_answered_by_the_first(f, namespace, hits):
    g, expected = forall.vmap(f), torch.stack([2 * X, X], 1)
    for _ in range(6):
        torch.testing.assert_close(g(X), expected)
    assert hits
    for _ in range(6):
        with optree.dict_insertion_ordered(True, namespace=namespace):
            torch.testing.assert_close(g(X), expected.flip(1))
        torch.testing.assert_close(g(X), expected)


def test_another_order_of_all_dicts_is_not_answered_by_the_first(hits):
    g, expected = forall.vmap(of_all), torch.stack([2 * X, X], 1)
    for _ in range(6):
        torch.testing.assert_close(g(X), expected)
    assert hits
    with optree.dict_insertion_ordered(True, namespace="forall.others"):
        torch.testing.assert_close(g(X), expected)


def test_a_class_that_is_registered_later_is_taken_apart():
    def of_pair(x):
        leaves = optree.tree_leaves([x, Pair(x, 2 * x)], namespace="forall.pairs")
        return sum(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    g = forall.vmap(of_pair)
    for _ in range(6):
        torch.testing.assert_close(g(X), X)
    flatten = lambda p: ((p.a, p.b), None, None)  # noqa: E731
    optree.register_pytree_node(Pair, flatten, lambda _, c: Pair(*c), namespace="forall.pairs")
    try:
        for _ in range(6):
            torch.testing.assert_close(g(X), 4 * X)
    finally:
        optree.unregister_pytree_node(Pair, namespace="forall.pairs")
    torch.testing.assert_close(g(X), X)


class Flatten:
    def __call__(self, pair):
        return (pair.a * STATE["factor"], pair.b), None, None

    def bound(self, pair):
        return self(pair)


@pytest.mark.parametrize(
    "flatten",
    [Flatten.__call__.__get__(Flatten()), Flatten(), Flatten().bound, functools.partial(Flatten())],
)
def test_what_a_registered_class_asks_is_read_anew(flatten):
    optree.register_pytree_node(Pair, flatten, lambda _, c: Pair(*c), namespace="forall.factors")
    try:
        g = forall.vmap(lambda x: stacked(Pair(x, x), namespace="forall.factors"))
        for factor in (2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 4.0):
            STATE["factor"] = factor
            torch.testing.assert_close(g(X), torch.stack([factor * X, X], 1))
    finally:
        optree.unregister_pytree_node(Pair, namespace="forall.factors")


def test_what_says_which_nodes_are_leaves_is_read_anew():
    g = forall.vmap(
        lambda x: (
            stacked([x, 2 * x], is_leaf=lambda t: STATE["factor"] > 5)
            if STATE["factor"] <= 5
            else x
        )
    )
    for factor in (2.0, 2.0, 2.0, 2.0, 2.0, 6.0, 6.0, 2.0):
        STATE["factor"] = factor
        expected = torch.stack([X, 2 * X], 1) if factor <= 5 else X
        torch.testing.assert_close(g(X), expected)


def test_what_a_mapped_function_reads_is_read_anew(hits):
    g = forall.vmap(lambda x: stacked(optree.tree_map(lambda a: a * STATE["factor"], [x, 2 * x])))
    for factor in (2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        STATE["factor"] = factor
        torch.testing.assert_close(g(X), factor * torch.stack([X, 2 * X], 1))
    assert hits


def test_a_class_that_torch_has_registered_with_it_is_read_too():
    """By a function of torch's that has the user's in its closure."""
    python = lambda children, _: Pair(children[0] * STATE["factor"], children[1])  # noqa: E731
    flatten = lambda p: ((p.a, p.b), None, None)  # noqa: E731
    unflatten = _reversed(python)
    unflatten.__globals__["__name__"] = "torch.made_up"
    optree.register_pytree_node(Pair, flatten, unflatten, namespace="forall.reversed")
    try:

        def doubled(x):
            found = optree.tree_map(lambda a: 2 * a, Pair(x, x), namespace="forall.reversed")
            return torch.stack([found.a, found.b])

        g = forall.vmap(doubled)
        for factor in (2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 4.0):
            STATE["factor"] = factor
            torch.testing.assert_close(g(X), torch.stack([2 * factor * X, 2 * X], 1))
    finally:
        optree.unregister_pytree_node(Pair, namespace="forall.reversed")


def _reversed(func):
    names = {"func": func}
    exec("def made(func):\n    return lambda data, children: func(children, data)", names)  # noqa: S102
    return names["made"](func)
