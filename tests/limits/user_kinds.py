"""What users hand to a function besides tensors: trees, classes with contexts, tensor subclasses.

Each form holds one tensor. `inside` finds it as the function does, with what the form itself adds
to the computation, so that a form that is mistaken for another shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node


class Box:
    """A node of trees with a context that the user may change in place."""

    def __init__(self, value: Any, context: Any) -> None:
        self.value, self.context = value, context


register_pytree_node(
    Box,
    lambda box: ([box.value], box.context),
    lambda children, context: Box(*children, context),
    serialized_type_name="tests.limits.Box",
)


class Settings:
    """A context that is compared by identity alone."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Pair:
    """A node whose context is a number."""

    def __init__(self, value: Any, sign: Any) -> None:
        self.value, self.sign = value, sign


register_pytree_node(
    Pair,
    lambda pair: ([pair.value], pair.sign),
    lambda children, sign: Pair(*children, sign),
    serialized_type_name="tests.limits.Pair",
)


class Tagged(Tensor):
    """A tensor with an attribute that it hands on to what is made of it, and a method."""

    tag: float

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        tags = [a.tag for a in args if isinstance(a, Tagged) and hasattr(a, "tag")]
        if isinstance(result, Tagged) and tags:
            result.tag = tags[0]
        return result

    def bent(self) -> Tensor:
        return self.sin() * getattr(self, "tag", 1.0)


def tagged(t: Tensor, tag: float) -> Tagged:
    made = t.as_subclass(Tagged)
    made.tag = tag
    return made


PLAIN, LIST, DICT, BOX, SETTINGS, PAIR, TAGGED = range(7)
FORMS = 6


def wrapped(form: int, t: Tensor, state: dict[str, Any]) -> Any:
    """A tensor in one of the forms; what the user may change between calls is in ``state``."""
    return [
        lambda: t,
        lambda: [t],
        lambda: {"t": t},
        lambda: Box(t, state["context"]),
        lambda: Box(t, state["settings"]),
        lambda: Pair(t, state["sign"]),
        lambda: tagged(t, state["scale"]),
    ][form % FORMS]()


def inside(form: int, value: Any) -> Tensor:
    """The tensor that a form holds, changed by what else it holds."""
    return [
        lambda: value,
        lambda: value[0],
        lambda: value["t"],
        lambda: value.value * value.context["scale"],
        lambda: value.value * value.context.scale,
        lambda: value.value * value.sign if type(value.sign) is float else value.value.neg(),
        lambda: value.bent().as_subclass(Tensor),
    ][form % FORMS]()


def described(tree: Any) -> Any:
    """All of a result but the numbers of its tensors: classes, contexts, attributes."""
    if isinstance(tree, (list, tuple)):
        return [type(tree).__name__, *map(described, tree)]
    if isinstance(tree, dict):
        return {key: described(value) for key, value in tree.items()}
    if isinstance(tree, Box):
        context = tree.context
        told = context.scale if isinstance(context, Settings) else dict(context)
        return ["Box", described(tree.value), told]
    if isinstance(tree, Pair):
        return ["Pair", described(tree.value), repr(tree.sign)]
    if isinstance(tree, Tensor):
        return [type(tree).__name__.removesuffix("Parameter"), tuple(tree.shape)]
    return tree
