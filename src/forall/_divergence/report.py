"""The report of a vmap call: where lanes diverged. It is collected only on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from forall._compat.call_site import SourceLine, find_users_frame
from forall._core.divergence import Diverged
from forall._core.errors import name_of
from forall._divergence.report_records import Divergence, Function, Step
from forall._vmap.concretize_listeners import get_code_position

UNDOES = "what one group wrote into older memory another would have seen"


@dataclass
class Report:
    """The divergences of a call, the functions that were not converted, and the reasons."""

    divergences: list[Divergence] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    functions: dict[Any, Function] = field(default_factory=dict)  # by code object, and if converted
    again: Counter[str] = field(default_factory=Counter)  # calls rerun for each group
    ways: list[str] = field(default_factory=list)  # how the call ran, in words, one after another
    groups: list[int] = field(default_factory=list)  # how many examples each one has
    scalar: set[SourceLine] = field(default_factory=set)  # where scalar code begins
    level: Any = None  # of the last run of the whole function, or of a part of its examples
    _first: dict[SourceLine, Any] = field(default_factory=dict)  # the first test at each line
    _began: Any = None
    # The snapshot, None once examples run one by one, and how many groups there were.
    _before_groups: Any = None
    writes = False
    is_idle = False

    def give_up(self, why: str) -> None: ...

    def note_function(self, code: Any, name: str, place: SourceLine, why: str = "") -> None:
        """Note a function that was converted, or that could not be for this reason."""
        self.functions[code, not why] = Function(name, place.near(), why)

    def note_divergence(
        self, construct: str, sizes: tuple[int, ...], filename: str, line: int
    ) -> None:
        self.divergences.append(Divergence(construct, filename, line, sizes))

    def note_test(self, construct: str, place: SourceLine, yes: Any, no: Any) -> None:
        """Note a test that is true for one active set, and false for the other."""
        self.note_divergence(construct, (yes.size, no.size), *place)
        if not self.steps or self.steps[-1].place != place:
            return
        root = self.level.root
        level = yes.get_level(root)
        if level is not no.get_level(root):  # else only examples of a vmap within diverge
            self.steps[-1] = self.steps[-1]._replace(true=level.origin.numbers)

    def split(self, place: SourceLine, sizes: tuple[int, ...]) -> None:
        """Note that unconverted code is rerun for each of these groups."""
        self.note_divergence(_name_construct(place), sizes, *place)

    def wrap_counting_reruns(self, f: Any, run: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``run``, which calls ``f`` unconverted, to count its reruns."""

        def run_and_count() -> Any:
            try:
                return run()
            except Diverged:
                self.again[name_of(f)] += 1
                raise

        return run_and_count

    # --- steps: a line of two tests makes one step, at the first of them

    def on_concretize(self, frame: FrameType, truths: Any = None) -> None:
        frame = find_users_frame(frame)
        place = SourceLine(frame.f_code.co_filename, frame.f_lineno)
        question = get_code_position(frame)
        level = self.level
        if level.active and self._first.setdefault(place, question) == question:
            self.steps.append(Step(place, level.acting_level.origin.numbers))

    def take_snapshot(self) -> tuple[int, int]:
        return len(self.steps), len(self.divergences)

    def restore_snapshot(self, mark: tuple[int, int]) -> None:
        """Drop what was noted since ``mark``, but not the reruns, which explain the undoing."""
        del self.steps[mark[0] :], self.divergences[mark[1] :]

    # --- runs of the whole function

    def begin_run(self, level: Any) -> None:
        self.level, self._first, self._began = level, {}, self.take_snapshot()

    def note_run(self, how: str) -> None:
        self.ways.append(f"{how}, all examples in one run")

    def note_undone(self, how: str, why: Any) -> None:
        """Note that a run was undone: at the line of a test, or because of an error."""
        self.restore_snapshot(self._began)
        reason = (
            f"up to {_format_place(why)}"
            if type(why) is SourceLine
            else f"which gave up: {_format_reason(why)}"
        )
        self.ways.append(f"{how}, {reason}; undone")

    def begin_groups(self) -> None:
        self._before_groups = self.take_snapshot(), len(self.groups)

    def note_group(self, size: int) -> None:
        """Note that a group of this size has run."""
        self.groups.append(size)

    def note_group_undone(self, why: Any, sizes: tuple[int, ...]) -> None:
        """Note that a group was undone because it diverges further."""
        self.restore_snapshot(self._began)
        self.groups.pop()
        if type(why) is SourceLine:
            self.split(why, sizes)

    def note_one_by_one(self) -> None:
        mark, groups = self._before_groups
        self.restore_snapshot(mark)
        del self.groups[groups:]
        self.ways.append(f"in groups, undone: {UNDOES}")
        self._before_groups = None, groups

    def end_groups(self) -> None:
        mark, before = self._before_groups
        sizes = self.groups[before:]
        if mark is None:
            del self.groups[before:]
            self.ways.append(f"one example after another: {len(sizes)} examples")
        else:
            self.ways.append(
                f"in {len(sizes)} groups of {format_range(sizes)} examples, one after another"
            )


def format_range(sizes: Sequence[int]) -> str:
    """Format the range of sizes."""
    least, most = min(sizes), max(sizes)
    return str(most) if least == most else f"{least} to {most}"


def _name_construct(place: SourceLine) -> str:
    word = place.text().split(" ", 1)[0].rstrip(":")
    return word if word in ("if", "while", "for", "assert", "elif", "return") else "reads"


def _format_place(place: SourceLine) -> str:
    return f"{place.near()}, where examples diverge"


def _format_reason(why: BaseException | None) -> str:
    name = type(why).__name__
    return f"{name}: {str(why).splitlines()[0]}" if str(why) else name
