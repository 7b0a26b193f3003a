"""The interface to vmap that the runtime of converted code uses.

Its functions are attributes of one object, so that a test can replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

words: Any = SimpleNamespace()
"""The functions and classes of the interface to vmap.

- ``now``, ``asked``, ``running``, ``joined``, ``UndefinedForExamples``: as in `active_mask`.
- ``apart``: as in `rerun`.
- ``Tensor``: the class of tensors. ``BatchedScalar``: the class of per-example Python numbers.
- ``mean``: calls a torch function on such numbers.
- ``again``: like ``asked``, for a further operand of the same test.
- ``told``: `joined` for Python numbers, or None.

For `aliases`:

- ``memory``: the memory object of a tensor, which lists the tensor's names.
- ``views``: True if a tensor is a view of a part of its memory.
- ``renamed``: makes a new tensor of the whole memory.
- ``changed``: the memory objects with names that were written since the last call.
- ``put``: writes a tensor's entries into another tensor, for some lanes.
"""


def install_interface(
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
    """Install the functions of the interface."""
    words.now, words.asked, words.running, words.joined = now, asked, running, joined
    words.Undefined, words.apart = undefined, apart
    words.Tensor, words.Number = tensor, number
    words.again, words.told = again or asked, told
    words.memory, words.views, words.renamed = memory, views, renamed
    words.changed, words.put = changed, put


def intersect_sets(a: Any, b: Any) -> Any:
    """Return the intersection of two active sets; None if it is empty."""
    return a if a is b else a & b


def unite_sets(worlds: list) -> Any:
    """Return the union of disjoint active sets; None if the list is empty."""
    if len(worlds) < 2:
        return worlds[0] if worlds else None
    return worlds[0].unite_all(worlds[1:])
