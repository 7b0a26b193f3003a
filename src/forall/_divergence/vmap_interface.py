"""The words that the runtime is written in: what the room of `vmap` knows about lanes.

They are looked up in one object, so that a test can put its own in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

words: Any = SimpleNamespace()
"""``now``, ``asked``, ``running``, ``joined``, ``Undefined`` as in `worlds`; ``apart`` as in
`rerun`; ``Tensor``, the type of tensors; ``Number``, that of Python numbers of each example;
``mean``, a call of torch's with such numbers; ``again``, which asks for the rest of a test that was
``asked``; ``told``, `joined` of the Python numbers of worlds, or None. Of `aliases`: ``memory``,
what a tensor is a name of, which counts its names; ``views``, whether it is one of a part of that;
``renamed``, a new one of the whole; ``changed``, what was written into since that was last asked,
of all that has names; ``put``, which writes a tensor's entries into another's, for some lanes."""


def use(
    *,
    now: Callable,
    asked: Callable,
    running: Callable,
    joined: Callable,
    undefined: type[Exception],
    apart: Callable,
    tensor: type,
    number: type,
    memory: Callable,
    views: Callable,
    renamed: Callable,
    changed: Callable,
    put: Callable,
    again: Callable | None = None,
    told: Callable | None = None,
) -> None:
    """Let these be the words."""
    words.now, words.asked, words.running, words.joined = now, asked, running, joined
    words.Undefined, words.apart = undefined, apart
    words.Tensor, words.Number = tensor, number
    words.again, words.told = again or asked, told
    words.memory, words.views, words.renamed = memory, views, renamed
    words.changed, words.put = changed, put


def both(a: Any, b: Any) -> Any:
    """The lanes of two worlds that are in both; None where there are none."""
    return a if a is b else a & b


def either(worlds: list) -> Any:
    """The lanes of disjoint worlds together; None where there are no worlds."""
    if len(worlds) < 2:
        return worlds[0] if worlds else None
    return worlds[0].united(worlds[1:])
