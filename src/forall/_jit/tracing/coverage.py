"""Coverage of a call by `sys.settrace`: the functions and the user's instructions that ran.

A call need not run each function that its names lead to, and a branch that it does not take may
name anything: a logger, a file, another library. Calls with the same state run the same
instructions, so only the names in these can influence the results.

NOTE [seen by the instruction]
    To trace lines would be cheaper, but a line may hold both branches. ``sys.settrace`` reports
    each instruction, except one after EXTENDED_ARG: there the EXTENDED_ARG is reported instead.
    Other threads are not traced; backward passes run in this thread, on whatever device.

    From Python 3.13 on, a call whose code never asked for its instructions before is not told of
    them if its frame has no trace function yet. In Python 3.12 tracing has to begin after the first
    frame has asked. So both are set here, before anything runs.
"""

from __future__ import annotations

import dis
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from forall._compat.exception_safety import contextmanager
from forall._compat.private_api import PLAIN
from forall._core import python_state
from forall._core.code_table import walk_codes
from forall._jit.deadline import (
    NO_DEADLINE,
    TOO_LONG,
    Deadline,
    clock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType


_LINES_PER_CLOCK_READ = 64  # lines after which the clock is read
MOST_OBSERVATIONS = (
    3  # calls that may be observed before one is recorded: the first may set things up
)
# By these functions code finds a free variable without its name: built-in ones, and those that find
# a frame. `super()` reads `__class__`.
_BY_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec"})
_BY_FRAME = frozenset({"_getframe", "currentframe"})
_BY_ITSELF = frozenset({"__class__"})
# A library may ask in each call which others are installed.
_FIND_SPEC = sys.modules["_frozen_importlib"]._find_spec.__code__
_NAMED = frozenset(dis.hasname)
_CONSTANT = frozenset(dis.hasconst)


class FullCoverage:
    """The coverage of a call that was not observed: all code that names can lead to."""

    seen = False
    why: str | None = None

    def __init__(self, most: int = 10_000) -> None:
        self.most = most  # objects that guards may visit

    def observe_calls(self) -> AbstractContextManager:
        """Return a context within which the code that runs is noted."""
        return nullcontext()

    def cache_instructions(self) -> AbstractContextManager:
        """Return a context within which decoded instructions are cached."""
        return nullcontext()

    def __le__(self, other: FullCoverage) -> bool:
        """True if another coverage includes all of the user's instructions in this one."""
        return not other.seen

    def list_codes(self) -> Iterable[CodeType]:
        """The code of all the user's functions that were seen to run."""
        return ()

    def list_library_codes(self) -> Iterable[tuple[CodeType, str]]:
        """The code of libraries' functions that were seen to run, with their modules."""
        return ()

    def walk_inner_codes(self, code: CodeType) -> Iterable[CodeType]:
        """A function's code and that of the functions nested in it, as far as they ran."""
        return walk_codes(code)

    def may_have_run(self, code: CodeType) -> bool:
        """True if this code ran, or may have run."""
        return True

    def did_not_run(self, thing: Any) -> bool:
        """True if a library's function, or all methods of a library's class, did not run."""
        return False

    def list_call_sites(self, code: CodeType) -> Iterable[tuple[CodeType, int] | None]:
        """The code and the offsets of the user's instructions that called; None for others."""
        return (None,)

    def has_missed_key(self, code: CodeType) -> bool:
        """True if a KeyError may have left an instruction of this code."""
        return True

    def list_instructions(self, code: CodeType) -> Iterable[dis.Instruction]:
        return python_state.instructions_of(code)

    def list_globals(self, code: CodeType) -> Iterable[str]:
        """The globals that a function, or one nested in it, names."""
        return [name for name, _ in python_state.globals_of(code)]

    def list_free_vars(self, code: CodeType) -> Iterable[str]:
        """The free variables that a function, or one nested in it, may read."""
        return code.co_freevars

    def list_names(self, code: CodeType) -> frozenset[str]:
        """All names of globals and attributes in a function, or in one nested in it."""
        return python_state.names_of(code)

    def list_written_names(self, code: CodeType) -> frozenset[str]:
        """All names in a function, or in one nested in it, also those in constant texts."""
        return python_state.find_names_and_text(code)


class ObservedCoverage(FullCoverage):
    """The coverage of an observed call: the code that ran within `observe_calls`."""

    seen = True

    def __init__(self, until: Deadline = NO_DEADLINE) -> None:
        super().__init__(most=50_000)  # most of the visited objects are functions that do not run
        self.why: str | None = None  # the reason if the call was not observed to its end
        self._until = until.call  # the time at which tracing stops
        self._lines = 0
        # Of the user's functions; negative, by ``~``, for those that a KeyError left:
        self._offsets: dict[CodeType, set[int]] = {}
        self._sites: dict[CodeType, set[tuple[CodeType, int] | None]] = {}  # that called these
        self._asked: set[CodeType] = set()  # code whose call sites were asked for
        self._libraries: dict[CodeType, str] = {}  # their functions' code, with its module
        self._idle: set[CodeType] = set()  # code that was asked about and had not run
        # By the id of code, which is kept alive, so that no other code gets the same id:
        self._tracers: dict[int, tuple[CodeType, Callable | None]] = {}
        self._is_finding = False  # within the import system, which looks for a module
        self._read: dict[CodeType, list[dis.Instruction]] = {}

    @contextmanager
    def observe_calls(self) -> Iterator[None]:
        sys._getframe().f_trace_opcodes = True  # before tracing begins: see the NOTE
        sys.settrace(self._trace_call)
        try:
            yield
        finally:
            if sys.gettrace() == self._trace_call:  # not a debugger that was called meanwhile
                sys.settrace(None)
            self._tracers.clear()

    def _trace_call(self, frame: FrameType, event: str, arg: Any) -> Callable | None:
        if self._is_finding:
            return None
        if frame.f_code is _FIND_SPEC:
            self._is_finding = True
            return self._trace_finder
        known = self._tracers.get(id(frame.f_code))
        if known is None:
            known = self._tracers[id(frame.f_code)] = frame.f_code, self._make_tracer(frame)
            if _calls_debugger(frame.f_code):
                self._stop_tracing(frame, "it calls a debugger")
                return None
        tracer = known[1]
        self._check_deadline(frame)
        if tracer is not None:
            frame.f_trace = tracer  # before it asks for instructions: see the NOTE
            frame.f_trace_opcodes = True
            self._sites.setdefault(frame.f_code, set()).add(self._find_site(frame.f_back))
        return tracer

    def _trace_finder(self, frame: FrameType, event: str, arg: Any) -> Callable:
        """Trace the search for a module: its finders, whosever they are, have no say in results."""
        self._is_finding = event != "return"
        return self._trace_finder

    def _find_site(self, frame: FrameType | None) -> tuple[CodeType, int] | None:
        is_seen = frame is not None and frame.f_code in self._offsets
        return (frame.f_code, frame.f_lasti) if is_seen else None

    def _check_deadline(self, frame: FrameType) -> None:
        """Count a line, and stop tracing after the deadline: traced Python runs much slower."""
        self._lines += 1
        is_late = not self._lines % _LINES_PER_CLOCK_READ and clock() > self._until
        if is_late and sys.gettrace() == self._trace_call:  # no other tracer was set by now
            self._stop_tracing(frame, TOO_LONG)

    def _stop_tracing(self, frame: FrameType | None, why: str) -> None:
        """Stop tracing in this frame and its callers; a debugger can then trace them itself."""
        self.why = why
        sys.settrace(None)
        while frame is not None:
            frame.f_trace, frame.f_trace_opcodes = None, False
            frame = frame.f_back

    def _make_tracer(self, frame: FrameType) -> Callable | None:
        home = frame.f_globals.get("__name__") or ""
        made = home.startswith("namedtuple_")  # Python's generated code, in a module of its own
        if made or python_state.is_not_users_module(home) or _hashes_by_identity(frame):
            self._libraries[frame.f_code] = home
            return None
        return _OffsetTracer(self._offsets.setdefault(frame.f_code, set()), self._check_deadline)

    def list_codes(self) -> Iterable[CodeType]:
        return self._offsets

    def list_library_codes(self) -> Iterable[tuple[CodeType, str]]:
        return self._libraries.items()

    def __le__(self, other: FullCoverage) -> bool:
        if not isinstance(other, ObservedCoverage):
            return True
        if self.why is not None:
            return False
        theirs = other._offsets
        if not self._libraries.keys().isdisjoint(other._idle):
            return False
        if any(self._sites.get(code, set()) - other._sites[code] for code in other._asked):
            return False
        return all(code in theirs and ran <= theirs[code] for code, ran in self._offsets.items())

    def may_have_run(self, code: CodeType) -> bool:
        return code in self._offsets or code in self._libraries

    def did_not_run(self, thing: Any) -> bool:
        if isinstance(thing, FunctionType):
            if not self.may_have_run(thing.__code__):
                self._idle.add(thing.__code__)
                return True
            return False
        if not isinstance(thing, type):
            return False
        bases = takewhile(lambda kind: kind not in PLAIN, thing.__mro__[:-1])
        return all(map(self._is_unused_class, bases))

    def _is_unused_class(self, kind: type) -> bool:
        """True if no method of a class in Python ran; for a class in C it is not known."""
        members = [getattr(value, "__func__", value) for value in vars(kind).values()]
        functions = [f for f in members if isinstance(f, FunctionType)]
        return bool(functions) and all(map(self.did_not_run, functions))

    def list_call_sites(self, code: CodeType) -> Iterable[tuple[CodeType, int] | None]:
        self._asked.add(code)
        return self._sites.setdefault(code, set())

    def has_missed_key(self, code: CodeType) -> bool:
        return any(offset < 0 for offset in self._offsets.get(code, ()))

    @contextmanager
    def cache_instructions(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._read.clear()

    def list_instructions(self, code: CodeType) -> Iterable[dis.Instruction]:
        if code not in self._read:
            self._read[code] = [*self._select_executed(code)]
        return self._read[code]

    def _select_executed(self, code: CodeType) -> Iterator[dis.Instruction]:
        ran, extended = self._offsets.get(code, ()), False
        for i in python_state.instructions_of(code) if ran else ():
            if i.opname == "EXTENDED_ARG":
                extended = extended or i.offset in ran
            else:
                if extended or i.offset in ran:
                    yield i
                extended = False

    def walk_inner_codes(self, code: CodeType) -> Iterator[CodeType]:
        if code in self._offsets:
            yield code
            for constant in code.co_consts:
                if isinstance(constant, CodeType):
                    yield from self.walk_inner_codes(constant)

    def _walk_instructions(self, code: CodeType) -> Iterator[dis.Instruction]:
        for inner in self.walk_inner_codes(code):
            yield from self.list_instructions(inner)

    def list_globals(self, code: CodeType) -> Iterable[str]:
        return dict.fromkeys(
            i.argval for i in self._walk_instructions(code) if i.opname in python_state.GLOBAL_OPS
        )

    def list_free_vars(self, code: CodeType) -> Iterable[str]:
        """The free variables that instructions name which ran, also to make a nested closure.

        Of a library's function all free variables, as its instructions are not traced.
        """
        if (
            code not in self._offsets
            or not _BY_LOCALS.isdisjoint(self.list_globals(code))
            or not _BY_FRAME.isdisjoint(self.list_names(code))
        ):
            return code.co_freevars
        named = set(_BY_ITSELF)
        named.update(i.argval for i in self.list_instructions(code) if type(i.argval) is str)
        return [name for name in code.co_freevars if name in named]

    def list_names(self, code: CodeType) -> frozenset[str]:
        return frozenset(i.argval for i in self._walk_instructions(code) if i.opcode in _NAMED)

    def list_written_names(self, code: CodeType) -> frozenset[str]:
        constants = [i.argval for i in self._walk_instructions(code) if i.opcode in _CONSTANT]
        texts = [
            python_state.find_names_in_constant(c) for c in constants if not isinstance(c, CodeType)
        ]
        return self.list_names(code).union(*texts)


def _calls_debugger(code: CodeType) -> bool:
    """True if code names a debugger: the built-in `breakpoint`, or any ``set_trace``."""
    names = code.co_names
    return "set_trace" in names or (
        "breakpoint" in names and "breakpoint" in dict(python_state.globals_of(code))
    )


def _hashes_by_identity(frame: FrameType) -> bool:
    """True for a `__hash__` that returns ``id(self)``, which is the default hash in effect."""
    code, own = frame.f_code, _HashedById.__hash__.__code__
    is_text = code.co_name == "__hash__" and code.co_names == own.co_names
    return is_text and code.co_code == own.co_code and "id" not in frame.f_globals


class _HashedById:
    def __hash__(self) -> int:
        return id(self)


class _OffsetTracer:
    """A local trace function that notes the offsets of instructions.

    An object, since a function that returns itself would be a reference cycle.
    """

    __slots__ = ("goes_on", "offsets")

    def __init__(self, offsets: set[int], goes_on: Callable[[FrameType], None]) -> None:
        self.offsets, self.goes_on = offsets, goes_on

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _OffsetTracer:
        if event == "opcode":
            self.offsets.add(frame.f_lasti)
        elif event == "line":
            self.goes_on(frame)
        elif event == "exception" and issubclass(arg[0], KeyError):
            self.offsets.add(~frame.f_lasti)
        return self


FULL_COVERAGE = FullCoverage()
