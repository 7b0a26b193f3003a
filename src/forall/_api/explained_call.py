"""The parts of an explanation, of which its text, its page and its plot are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forall._core.errors import warn_renamed
from forall._divergence.report import Report

if TYPE_CHECKING:
    from forall._api.operator_costs import OperatorCost
    from forall._compat.call_site import SourceLine
    from forall._divergence.report_records import Divergence, Function, Step


@dataclass(frozen=True)
class ExplainedCall:
    """The parts of an `Explanation`, which documents them."""

    call: str
    result: Any
    ways: tuple[str, ...]
    replay: str = ""
    program: str = ""
    measured: str = ""
    examples: int = 0
    seconds: float = 0.0
    operators: tuple[OperatorCost, ...] = ()
    looped: tuple[tuple[str, int], ...] = ()
    inside: tuple[ExplainedCall, ...] = ()
    _report: Report = field(default_factory=Report, repr=False)

    @property
    def converted(self) -> tuple[Function, ...]:
        """The functions whose source was converted."""
        return tuple(f for f in self._report.functions.values() if not f.why)

    @property
    def refused(self) -> tuple[Function, ...]:
        """The functions whose source was not converted, with the reason."""
        return tuple(f for f in self._report.functions.values() if f.why)

    @property
    def again(self) -> tuple[tuple[str, int], ...]:
        """The calls in which examples diverged, and how often each ran again for a group."""
        return tuple(self._report.again.items())

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of examples in each group, if the call ran in groups."""
        return tuple(self._report.groups)

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Each time that examples diverged."""
        return tuple(self._report.divergences)

    @property
    def partings(self) -> tuple[Divergence, ...]:
        """Return ``divergences``, which had this name."""
        warn_renamed("partings", "divergences")
        return self.divergences

    @property
    def steps(self) -> tuple[Step, ...]:
        """Each test on values, with the examples that took it."""
        return tuple(self._report.steps)

    @property
    def scalar(self) -> tuple[SourceLine, ...]:
        """The lines where code begins that computes with Python's own values alone.

        It runs together in an explained call, to show its steps, and in others one after another.
        """
        return tuple(sorted(self._report.scalar))
