"""Python's `sum` of floats that differ between examples, which rounds less than `+` does.

From Python 3.12 on `sum` keeps what each addition of floats loses, and adds it in the end; from
3.14 on of complex numbers too. A `BatchedScalar` among its items is added by ``+``, which has to
know that `sum` calls it: by the instruction at which the caller is. That is seen where code names
`sum` in the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from forall._core.code_table import CodeTable
from forall._core.python_state import CALL_OPS, instructions_of

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import CodeType, FrameType

RANKS: dict[Any, int] = {bool: 0, int: 0, float: 1, complex: 2}
SUM_KEEPS_LOSSES = sum([1.0, 1e100, -1e100]) == 1
SUM_KEEPS_LOSSES_OF_INTEGERS = sum([1e100, 1, -1e100]) == 1  # among floats
KEPT_RANK = 2 if sum([1 + 0j, 1e100, -1e100]) == 1 else 1  # of the numbers that are added so
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_offsets: CodeTable[frozenset[int]] = CodeTable()


class RunningSum(NamedTuple):
    """The state of `sum` while it adds floats: the total by ``+``, and what that has lost so far.

    The loss of an addition is a float too, which ``+`` and ``-`` give exactly.
    """

    place: Hashable  # of the call
    total: Any
    loss: Any

    def add(self, x: Any) -> RunningSum:
        """Return the sum with one more number."""
        total = self.total + x
        taken = total - self.total
        lost = (self.total - (total - taken)) + (x - taken)
        return RunningSum(self.place, total, self.loss + lost)


def find_call_of_sum(frame: FrameType) -> Hashable:
    """Return the place where a frame calls `sum`, or None."""
    code = frame.f_code
    if "sum" not in code.co_names:
        return None
    offsets = _offsets.get(code)
    if offsets is None:
        offsets = _offsets[code] = _find_calls(code)
    is_call = frame.f_lasti in offsets and _find_value(frame) is sum
    return (id(frame), frame.f_lasti) if is_call else None


def _find_calls(code: CodeType) -> frozenset[int]:
    """Return the offsets of calls in code whose function is the global name `sum`."""
    begins = {
        i.positions[0::2]
        for i in instructions_of(code)
        if i.opname in _LOADS and i.argval == "sum" and i.positions is not None
    }
    return frozenset(
        i.offset
        for i in instructions_of(code)
        if i.opname in CALL_OPS and i.positions is not None and i.positions[0::2] in begins
    )


def _find_value(frame: FrameType) -> Any:
    return frame.f_globals.get("sum", frame.f_builtins.get("sum"))
