"""The one lookup of a named axis, and the check that all of its examples come to a collective.

The lookup walks the levels outwards, so an inner axis hides an outer one of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat.call_site import find_users_line
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import Wrapper
from forall._core.bound_meshes import bound, find_bound_dim
from forall._core.errors import AxisError, format_columns
from forall._core.levels import stack

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from forall._core.levels import Level
    from forall._core.named_axes import Axis


def _iter_axes() -> Iterator[tuple[Axis, Level]]:
    """Yield the axes around the running code; for recomputed code also those that have ended."""
    for level in (stack.top, stack.place):
        while level is not None:
            if level.axis is not None:
                yield level.axis, level.root
            level = level.parent


def find_bound_axis(name: Hashable) -> Any:
    """Return the bound mesh of one dim that is the axis of this name here.

    It is None if a level around the running code has an axis of this name, or no bound mesh has it.
    """
    if not bound.meshes or any(axis.name == name for axis, _ in _iter_axes()):
        return None
    return find_bound_dim(name)


def find_axis(verb: str, name: Hashable, operand: Any = None) -> tuple[Axis, Any]:
    """Return the axis of this name, and the root level that has it.

    A hook may run when all levels have ended. Then the levels of the ``operand`` have the names.
    """
    level = stack.top
    if level is not None and level.axis is not None and level.axis.name == name:  # most often
        return level.axis, level.root
    for axis, root in _iter_axes():
        if axis.name == name:
            return axis, root
    while isinstance(operand, Wrapper):
        axis = operand.level.axis
        if axis is not None and axis.name == name:
            return axis, operand.level.root
        operand = operand.value
    known = dict.fromkeys(axis.name for axis, _ in _iter_axes())
    rows = [("named", ", ".join(map(repr, known)) or "none")]
    raise documented_error(NameError, "axis-name")(
        f"{verb}(.., {name!r}): no axis is named {name!r} here.\n{format_columns(rows)}\n"
        f"Name it where the examples are mapped: vmap(f, axis_name={name!r})."
    )


def check_all_come(verb: str, axis: Axis, root: Any) -> None:
    """Raise `AxisError` if a part of an axis's examples alone runs, or examples have diverged."""
    call = f"{verb}(.., {axis.name!r})"
    if root.size != axis.local_size:
        raise _make_part_error(call, axis, root)
    if root.sub_level is not None:
        raise _make_branch_error(call, axis, root.sub_level)


def _make_branch_error(call: str, axis: Axis, some: Any) -> AxisError:
    place = find_users_line()
    rows = [("here", str(place), place.text())]
    test = some.examples.split_at
    if test is not None:
        rows.insert(0, ("diverged", str(test), test.text()))
    return documented_error(AxisError, "collective-diverged")(
        f"{call}: {some.size} of {axis.local_size} examples of axis {axis.name!r} come here; the "
        f"others took another way.\n{format_columns(rows)}\n"
        "A collective takes all examples of its axis. Call it before they diverge, or give those "
        f"that do not take part a neutral value: psum(torch.where(taken, x, 0), {axis.name!r})."
    )


def _make_part_error(call: str, axis: Axis, root: Any) -> AxisError:
    place = find_users_line()
    rows = [("at", str(place), place.text())]
    why = f"chunk_size={axis.chunk_size!r} runs so many at once"
    cure = "Give no chunk_size, or return what is to be combined and combine the results."
    if axis.chunk_size is None:
        why = (
            "they run in groups: they have diverged in code that could not be converted, or have "
            "arguments of several shapes"
        )
        cure = "Call it in a vmap of its own, before they diverge; forall.explain tells where."
    return documented_error(AxisError, "collective-diverged")(
        f"{call}: {root.size} of {axis.local_size} examples of axis {axis.name!r} run together, "
        f"since {why}.\n{format_columns(rows)}\nA collective takes all examples of its axis. {cure}"
    )
