"""`Frame`: one running call of a converted function, and all functions that its code calls.

NOTE. The form of a rewritten function (`forall._ast_rewrite` writes the code):

- Bodies stay in place, in loops of one trip, so that ``break`` leads to where lanes reconverge.
- ``dead`` is set when no lane goes on here: all have returned, or left the loop. Each construct
  whose body could do that is followed by ``if dead: break`` (or the frame's return).
- ``apart`` counts the constructs at which lanes of this call have diverged. While it is 0,
  ``return``, ``break`` and ``continue`` are nearly Python's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from forall._divergence import (
    branch_tests,
    converted_call,
    scalar_calls,
    subscripts,
)
from forall._divergence.branch_tests import PLAIN, DivergedTest, evaluate_lane_test
from forall._divergence.heap import (
    CellSlot,
    GlobalSlot,
    Unsplittable,
)
from forall._divergence.if_region import NO, YES, IfRegion
from forall._divergence.join import UNDEFINED, Parts, merge
from forall._divergence.loop_region import LoopRegion
from forall._divergence.predicated_if import run_predicated_if
from forall._divergence.thread_state import Region, close_down_to, thread
from forall._divergence.varying import Varying
from forall._divergence.vmap_interface import interface
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.fast_path.operators import evaluate_fused, make_operators

straight = make_operators()
# Context managers that set what torch asks while their body runs, and nothing else.
_AMBIENT = frozenset(
    {torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.autocast, nullcontext}
)
_CONVERTED = {-1: lambda v: v, ord("r"): repr, ord("s"): str, ord("a"): ascii}


def _format_text(*pieces: Any) -> str:
    """Format an f-string. Each piece is a text, or a value, its conversion and its format."""
    return "".join(p if type(p) is str else format(_CONVERTED[p[1]](p[0]), p[2]) for p in pieces)


class WithMark:
    """The open regions where a ``with`` begins.

    Lanes that leave its body early, by ``return`` or ``break``, do not run when it ends, so they
    would miss what its managers do there. Managers of torch's settings do nothing for a lane.
    """

    __slots__ = ("diverged", "is_ambient", "t", "top")

    def __init__(self, t: Any) -> None:
        self.t, self.top, self.diverged = t, t.top, t.diverged
        self.is_ambient = True

    def end(self) -> None:
        """Note that the body has ended without an exception."""
        if self.is_ambient:
            self.top, self.diverged = self.t.top, self.t.diverged


class Frame(Region):
    """A call of a converted function, from its first line to where all its lanes have returned."""

    __slots__ = ("apart", "dead", "returned")

    # builtins that converted code needs, even if the user's code rebinds their names
    locals = locals
    undefined = UNDEFINED
    once = (None,)
    globals = globals
    AssertionError = AssertionError
    slice = slice
    new_set = set

    def __init__(self) -> None:
        Region.__init__(self, thread)
        self.apart = 0
        self.dead = False
        self.returned: list[tuple[Any, Any, dict]] | None = None

    # --- statements

    def branch(self, test: Any) -> Any:
        if test is True:
            return YES
        if test is False:
            return NO
        answer = evaluate_lane_test(test)
        if type(answer) is bool:
            return YES if answer else NO
        self.t.report_divergence("if", answer)
        return IfRegion(self, *answer)

    def loop(self, *names: str) -> LoopRegion:
        return LoopRegion(self, names)

    def leave(self, value: Any) -> None:
        """Run ``return value`` for the running lanes; others go on."""
        if self.returned is None:
            self.returned = []
            self.apart += 1
            self.t.diverged += 1
        self.returned.append((interface.get_active_set(), value, self.capture_writes()))
        self.dead = True

    def result(self, value: Any = None) -> Any:
        """Join the results of all lanes when the last lanes return (or have returned, if dead)."""
        parts = self.returned
        if parts is None:
            return value
        if not self.dead:
            parts.append((interface.get_active_set(), value, self.capture_writes()))
        self.t.leave_sets(self.depth)
        self.join_writes([(w, written) for w, _, written in parts])
        self.t.diverged -= 1
        self.returned = None
        return merge([(w, v) for w, v, _ in parts])

    # --- expressions

    @staticmethod
    def check_bound(value: Any) -> Any:
        """Return the value of a name; raise where some of the lanes that run have not bound it."""
        if type(value) is Varying:
            value.running_parts()
        return value

    evaluate_if_exp = staticmethod(branch_tests.evaluate_if_exp)

    def both(self, a: Any, b: Callable) -> Any:
        return branch_tests.evaluate_bool_op(a, b, stop=False)

    def either(self, a: Any, b: Callable) -> Any:
        return branch_tests.evaluate_bool_op(a, b, stop=True)

    def both_test(self, a: Any, b: Callable) -> Any:
        return branch_tests.evaluate_bool_test(a, b, stop=False)

    def either_test(self, a: Any, b: Callable) -> Any:
        return branch_tests.evaluate_bool_test(a, b, stop=True)

    negate_test = staticmethod(branch_tests.negate_test)

    def negate_value(self, test: Any) -> Any:
        found = branch_tests.negate_test(test)
        return found.value() if type(found) is DivergedTest else found

    def chain(self, names: tuple[str, ...], left: Any, right: Any, *rest: Callable) -> Any:
        """Evaluate ``left < right < ...``: each operand only for lanes that still compare true."""
        first = self.compare(names[0], left, right)
        if not rest:
            return first
        return branch_tests.evaluate_bool_op(
            first, lambda: self.chain(names[1:], right, rest[0](), *rest[1:]), stop=False
        )

    def compare(self, name: str, a: Any, b: Any) -> Any:
        if name in ("is_", "is_not"):
            return self.same(a, b, name == "is_")
        if name in ("in_", "not_in"):
            return self.contains(a, b, name == "in_")
        return getattr(self, name)(a, b)

    def same(self, a: Any, b: Any, wanted: bool) -> Any:
        """Evaluate ``a is b``, or ``a is not b`` if ``wanted`` is False."""
        if type(a) is Varying:
            return a.each(lambda v: self.same(v, b, wanted))
        if type(b) is Varying:
            return b.each(lambda v: self.same(a, v, wanted))
        if type(a) is interface.BatchedScalar and a.kind is bool and type(b) is bool:
            return a == b if wanted else a != b  # there is one True
        return (a is b) is wanted

    def contains(self, item: Any, container: Any, wanted: bool) -> Any:
        """Evaluate ``item in container``, or ``not in`` if ``wanted`` is False."""
        found = subscripts.contains(item, container)
        if type(found) is bool:
            return found is wanted
        return found if wanted else self.negate_value(found)

    call = staticmethod(converted_call.call_converted)
    run_predicated_if = staticmethod(run_predicated_if)
    scalar = staticmethod(scalar_calls.run_scalar_code)
    Unsplittable = Unsplittable
    item = staticmethod(subscripts.get_item)
    store_item = staticmethod(subscripts.store_item)
    delete_item = staticmethod(subscripts.delete_item)
    store_attr = staticmethod(subscripts.store_attr)
    delete_attr = staticmethod(subscripts.delete_attr)
    unpack_items = staticmethod(subscripts.unpack_items)
    starred = staticmethod(subscripts.starred)
    unpack_mapping = staticmethod(subscripts.unpack_mapping)
    make_dict = staticmethod(subscripts.make_dict)
    make_list = staticmethod(subscripts.make_list)
    make_tuple = staticmethod(subscripts.make_tuple)
    make_set = staticmethod(subscripts.make_set)
    update_in_place = staticmethod(subscripts.update_in_place)

    def run(self, function: Callable, iterable: Any) -> Any:
        """Run a comprehension."""
        return converted_call.call_in_scope(function, (iterable,), {})

    def run_fused(self, fast: Callable, slow: Callable, *operands: Any) -> Any:
        """Evaluate an expression of several operators on the stacks, or else one by one."""
        for a in operands:
            if type(a) is BatchedTensor:
                found = evaluate_fused(fast, operands)
                return slow(self, *operands) if found is None else found
        return slow(self, *operands)

    def text(self, *pieces: Any) -> Any:
        """Evaluate an f-string: one text, or the text of each lane if they differ."""
        if all(type(p) is str or (type(p[0]) in PLAIN and type(p[2]) is str) for p in pieces):
            return _format_text(*pieces)
        return converted_call.call_unconverted(_format_text, pieces, {})

    def grow(self, out: list, value: Any) -> None:
        """Run ``out.append(value)`` in a comprehension, whose list nothing else refers to."""
        if self.apart or self.t.loose:
            self.call(out.append, value)
        else:
            out.append(value)

    def is_sequence(self, value: Any, count: int, more: bool) -> Any:
        """True if a sequence pattern of so many items may match."""
        if type(value) is Varying:
            return value.each(lambda v: self.is_sequence(v, count, more))
        if not isinstance(value, (list, tuple, Sequence)) or isinstance(value, (str, bytes)):
            return False
        length = self.call(len, value)
        return length >= count if more else length == count

    def refuse_iterator(self, iterable: Any) -> Any:
        """Return the iterable of a ``for`` that has a name; raise if it is an iterator.

        Lanes that leave the loop early would leave items in it that others have consumed.
        """
        if hasattr(type(iterable), "__next__"):
            raise Unsplittable("an iterator that is kept")
        return iterable

    # --- ``with``: an exception that it swallows has left regions open

    def manager(self, value: Any, mark: WithMark) -> Any:
        if type(value) is Varying:
            value = subscripts.resolve_varying(value)
            if type(value) is Varying:
                raise Unsplittable("a context manager that is another for some examples")
        mark.is_ambient = mark.is_ambient and type(value) in _AMBIENT
        return value

    def mark(self) -> WithMark:
        self.t.failed = None
        return WithMark(self.t)

    def unmark(self, mark: WithMark) -> None:
        failed, self.t.failed = self.t.failed, None
        if self.t.diverged != mark.diverged or (
            failed is not None and failed != interface.get_active_set()
        ):
            raise Unsplittable("only some examples leave a with block early")
        if self.t.top is not mark.top:
            close_down_to(self.t, mark.top)

    # --- names that other functions see

    def note_cell_before(self, reader: Callable, value: Any) -> Any:
        self.note_cell(reader)
        return value

    def note_cell(self, reader: Callable) -> None:
        """Note the closure variable that ``reader`` reads, before it changes."""
        if self.t.diverged:
            cells: Any = reader.__closure__
            self.t.note(CellSlot(cells[0]))

    def note_global(self, names: dict, name: str) -> None:
        if self.t.diverged:
            self.t.note(GlobalSlot(names, name))


def _make_operator(compute: Callable) -> Callable:
    """Return an operator that is applied for each lane's own containers, where they differ."""

    def apply_to_lanes(a: Any, b: Any) -> Any:
        mixed = thread.mixed
        if mixed and (id(a) in mixed or id(b) in mixed):
            return subscripts.run_per_set(
                (a, b),
                lambda: compute(subscripts.resolve_varying(a), subscripts.resolve_varying(b)),
            )
        return compute(a, b)

    return apply_to_lanes


for _name, _operator in {
    **straight,
    "binary_add": straight["add"],
    **{name: getattr(operator, name) for name in ("and_", "or_", "xor")},
}.items():
    is_binary = _name not in ("add", "neg")  # `add` has a number for an operand
    setattr(Frame, _name, staticmethod(_make_operator(_operator) if is_binary else _operator))

__all__ = ["Frame", "Parts"]
