"""The interface to vmap that the runtime of converted code uses.

Its functions are attributes of one object, so that a test can replace them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol, cast


class VmapInterface(Protocol):
    """The functions and classes of vmap, and of numbers that differ between examples."""

    Tensor: type[Any]
    BatchedScalar: type[Any]
    UndefinedForExamples: type[BaseException]

    def get_active_set(self) -> Any: ...

    def run_active_set(self, world: Any, /) -> Any:
        """Return a context in which the lanes of ``world`` run alone."""

    def evaluate_users_test(self, test: Any, /) -> Any:
        """Return the truth of a test, or the active sets of yes and no."""

    def evaluate_test(self, test: Any, /) -> Any:
        """Evaluate a further operand of a test that listeners were told of."""

    def join_tensors(self, parts: list[tuple[Any, Any]], /) -> Any: ...

    def join_numbers(self, parts: list[tuple[Any, Any]], dtype: Any, /) -> Any: ...

    def run_per_group(self, call: Any, join: Any, /) -> Any:
        """Return ``call()``, made again for each group if lanes diverge in it."""

    def find_alias_family(self, tensor: Any, /) -> Any:
        """Return the memory of a tensor, which lists the tensor's names."""

    def is_partial_name(self, tensor: Any, /) -> Any:
        """Return True if a tensor is a view of a part of its memory."""

    def make_new_name(self, kind: type, memory: Any, /) -> Any:
        """Return a new tensor of the whole memory."""

    def take_written_families(self) -> Any:
        """Return the memory objects with names that were written since the last call."""

    def write_examples(self, target: Any, value: Any, world: Any, /) -> None:
        """Write a tensor's entries into another tensor, for some lanes."""

    def call_torch(self, func: Any, args: tuple, kwargs: dict, /) -> Any:
        """Call a torch function with per-example numbers among its arguments."""

    def call_numpy(self, func: Any, inputs: tuple, kwargs: dict, /) -> Any: ...

    def operate_with_tensor(self, op: Any, a: Any, b: Any, /) -> Any: ...

    def operate_with_array(self, op: Any, a: Any, b: Any, /) -> Any: ...

    def convert_number(self, n: Any, kind: type, /) -> Any:
        """Return ``kind(n)``, as ``int(n)``, of a per-example number."""

    def call_math(self, f: Any, args: tuple, kwargs: dict, /) -> Any:
        """Call a function of `math`, or `sum`, with per-example numbers among its arguments."""

    def find_pure_bindings(self, function: Any, /) -> Any:
        """Return what a function captures, if it has no side effects, else None."""


def _find_nothing_pure(_function: Any, /) -> None:
    """Return None, as for a function with side effects, until the analysis is loaded."""


interface = cast("VmapInterface", SimpleNamespace(find_pure_bindings=_find_nothing_pure))


def install_interface(implementation: Any) -> None:
    """Put the functions and classes of ``implementation`` in the place of those before."""
    found = {name: getattr(implementation, name) for name in dir(implementation)}
    vars(interface).update({name: f for name, f in found.items() if name[0] != "_"})


def intersect_sets(a: Any, b: Any) -> Any:
    """Return the intersection of two active sets; None if it is empty."""
    return a if a is b else a & b


def unite_sets(worlds: list) -> Any:
    """Return the union of disjoint active sets; None if the list is empty."""
    if len(worlds) < 2:
        return worlds[0] if worlds else None
    return worlds[0].unite_all(worlds[1:])
