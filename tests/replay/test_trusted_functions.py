"""The lists of what is trusted: nothing in them holds what the guards do not see."""

import gc
import itertools

import pytest

from forall._compat import pure_functions
from forall._jit.guards.build import Guards


class Index(list):
    """A list that may be given where a number, a text or a class is asked for."""

    def __index__(self):
        return 1

    def __float__(self):
        return 1.0


def _made_of(kind, thing):
    """Objects of a class that took something: whatever its arguments may be."""
    for given in itertools.chain.from_iterable(
        itertools.product([thing, None, list], repeat=n) for n in (1, 2, 3)
    ):
        try:
            made = kind(*given)
        except Exception:  # noqa: S112 - it is made of something else
            continue
        if any(x is thing for x in _held(made)):
            yield made


def _held(value):
    near = gc.get_referents(value)
    return [*near, *gc.get_referents(*near)]


@pytest.mark.parametrize("kind", pure_functions._INERT, ids=lambda kind: kind.__qualname__)
def test_what_an_object_of_a_trusted_class_holds_is_reached(kind):
    box = Index()
    for made in _made_of(kind, box):
        asked = made

        def f(x, asked=asked):
            return x * asked.__args__ if hasattr(asked, "__args__") else asked

        guards = Guards(f)
        assert guards.why is not None or id(box) in guards.collect_ids(), made


def test_some_trusted_class_holds_things():
    assert [kind for kind in pure_functions._INERT if any(_made_of(kind, Index()))]


@pytest.mark.parametrize(
    "kind", sorted(pure_functions._BASES, key=repr), ids=lambda kind: kind.__qualname__
)
def test_an_object_of_a_trusted_base_that_moves_on_is_not_watched(kind):
    if not hasattr(kind, "__next__"):
        assert not hasattr(kind, "send")
        return
    made = kind([1, 2, 3])
    assert Guards(lambda x: x * next(made)).why is not None
    derived = type("Derived", (kind,), {})([1, 2, 3])
    assert Guards(lambda x: x * next(derived)).why is not None
