"""The second strategy: one run of the converted source, in which examples diverge and merge again.

Libraries that the function calls are converted in a second attempt. An `Obstacle` says why a call
cannot run so, and where.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from forall._api.execution.single_run import DivergedGroups, needs_plain_numbers, run_together
from forall._compat import pytree
from forall._compat.call_site import SourceLine
from forall._compat.storage import is_out_of_memory
from forall._compat.tensor_subclass import unwrap_posed
from forall._compat.wrapper_tensor import Wrapper
from forall._core import communication_log
from forall._core.code_table import CodeSet, find_code
from forall._core.divergence import Diverged, TimeExceeded
from forall._core.errors import format_columns, name_of, warn_slow_path
from forall._core.reachable import iterate_hidden
from forall._divergence import Refusal, convert, convert_libraries, thread
from forall._divergence.heap import SeveralKinds, Unsplittable
from forall._divergence.user_code import NEVER, find_owner
from forall._divergence.varying import Varying, make_kinds_error
from forall._vmap.active_set.active_mask import CannotMerge
from forall._vmap.active_set.merge import UndefinedForExamples, has_only_some_examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.execution.mapped_call import MappedCall, VmapOptions
    from forall._vmap.vmap_level import VmapLevel

_NEED_LIBRARIES = CodeSet()  # of functions for which libraries had to be converted too
# Errors that converted code raises if it cannot keep diverged examples separate.
CONVERSION_ERRORS = (CannotMerge, UndefinedForExamples, Unsplittable, TimeExceeded)
_NOWHERE = SourceLine("?", 0)


def run_converted(call: MappedCall) -> tuple[list, Any]:
    """Run all examples at once by the converted source.

    Raises:
        DivergedGroups: if that is impossible, with the `Obstacle`. Its groups are the call's if
            there is no converted source, and one of all examples if a run of it failed.
    """
    code = find_code(call.func)
    why: Obstacle | None = None
    for deep in (True,) if code in _NEED_LIBRARIES else (False, True):
        with convert_libraries(deep) as libraries:
            function = convert(call.func, strict=True)
            if isinstance(function, Refusal):
                raise DivergedGroups(call.groups, Obstacle.from_refusal(function))
            try:
                result = _run_attempt(call, function)
            except DivergedGroups as gave_up:
                if isinstance(gave_up.why, TimeExceeded):
                    raise gave_up.why from None
                found = Obstacle.from_cause(gave_up.why)
                # The second attempt converts libraries too; the first names user code as the cause.
                why = found if why is None or not why.has_place else why
                if not libraries.were_called:
                    break
            else:
                if deep and code is not None:
                    _NEED_LIBRARIES.add(code)
                again, thread.ran_again = thread.ran_again, {}
                for refused in again.values():
                    warn_of_groups(call, Obstacle.from_refusal(refused))
                return result
    raise DivergedGroups([[*range(call.arguments.size)]], why)


def _run_attempt(call: MappedCall, function: Callable) -> tuple[list, Any]:
    whole = _check_uniform_results(function, call.func)
    options = call.options._replace(must_rerun=_must_rerun)
    return run_together(call._replace(func=whole, options=options), "converted")


class Obstacle(NamedTuple):
    """The reason why a call was not run converted, and the line of user code that shows it."""

    reason: str
    place: SourceLine
    is_internal: bool = False  # an error of the conversion, for no example has it
    is_of_results: bool = False

    @property
    def has_place(self) -> bool:
        """True if a line of the user's is known."""
        return self.place != _NOWHERE

    @classmethod
    def from_refusal(cls, refused: Refusal) -> Obstacle:
        file, _, line = refused.place.rpartition(":")
        return cls(refused.reason, SourceLine(file, int(line)), refused.is_internal)

    @classmethod
    def from_cause(cls, why: BaseException | SourceLine | None) -> Obstacle:
        """Describe what ended a converted run, without what an exception keeps alive."""
        if isinstance(why, Diverged):
            why = why.place
        if not isinstance(why, BaseException):
            reason = "code that is not converted asks, and cannot be run again on the spot"
            return cls(reason, why or _NOWHERE)
        place = _find_users_line(why)
        if isinstance(why, (CannotMerge, Unsplittable)):
            return cls(str(why), place, is_of_results=isinstance(why, SeveralKinds))
        if needs_plain_numbers(why):
            return cls("a function in C that takes Python's own numbers alone", place)
        text = str(why).partition("\n")[0]
        if isinstance(why, Warning) or (isinstance(why, Exception) and text.startswith("vmap")):
            # an error of forall's own, by design
            return cls(text, place)
        return cls(f"forall itself failed with {type(why).__name__}: {text}", place, True)


def _find_users_line(error: BaseException) -> SourceLine:
    """Return the innermost line of the user's code that an error has gone through."""
    trace = error.__traceback__
    place = _NOWHERE
    while trace is not None:
        if find_owner(trace.tb_frame.f_code) is not NEVER:
            place = SourceLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return place


def warn_of_groups(call: MappedCall, why: Obstacle) -> None:
    """Warn, once for each function and reason, that examples ran in groups, and name the cure."""
    rows = [("reason", why.reason)]
    if why.has_place:
        rows = [("at", f"{why.place.near()}   {why.place.text()}".rstrip()), *rows]
    warn_slow_path(
        f"vmap({name_of(call.func)}): examples diverge in code that could not be converted, so "
        "they ran in groups or one after another, not all at once.\n"
        f"{format_columns(rows)}\n"
        f"{_find_cure(why)} forall.explain tells how a call runs."
    )


_LIST = "Make a list instead: [...] in the place of (...), or append to one and return it."
_CURES = {
    "try .. except": "Test before, or ask for a flag, as torch.linalg.cholesky_ex gives one.",
    "a generator expression": _LIST,
    "a generator": _LIST,
    "a generator or a coroutine": _LIST,
}


def _find_cure(why: Obstacle) -> str:
    if why.is_of_results:
        return "Return one kind of value from all branches: tensors, or numbers of one type."
    if why.reason in _CURES:
        return _CURES[why.reason]
    cure = f"Write {'that line' if why.has_place else 'it'} in another way"
    if why.has_place and not why.place.text():
        cure = "Define the function in a file, where its source can be read"
    if why.is_internal:
        cure = "This is a defect of forall: please report it. Until then, write it in another way"
    return f"{cure}, or without Python's questions: torch.where, forall.cond, forall.while_loop."


def _check_uniform_results(function: Callable, func: Callable) -> Callable:
    """Return a converted function that raises if examples have results of several kinds."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        leaves, spec = pytree.flatten(result)
        keys = pytree.find_odd_keys(spec)
        hidden = iterate_hidden((*leaves, *pytree.find_contexts(spec), *keys))
        for n, leaf in enumerate((*leaves, *hidden)):
            if type(leaf) is Varying:
                raise make_kinds_error(result, n, leaf)
            value = unwrap_posed(leaf)
            if isinstance(value, Wrapper) and has_only_some_examples(value):
                raise SeveralKinds("results that only some examples have")
        return result

    # The state to be undone is found through `__wrapped__`, if the call must run otherwise.
    return functools.update_wrapper(whole, func, assigned=(), updated=())


def _must_rerun(options: VmapOptions, level: VmapLevel, error: BaseException) -> bool:
    """Return True if converted code that ended with an error has to be run in another way.

    An error may come from some examples, or from the conversion. The function itself shows which
    error the loop raises first.
    """
    limit = level.state.limit
    if limit is not None and error is limit.reached:
        return False
    if communication_log.is_final(error) or (options.retries_on_oom and is_out_of_memory(error)):
        return False
    if isinstance(error, Diverged):  # examples diverged in code that cannot run again
        return error.level.root is level
    return isinstance(error, (Exception, *CONVERSION_ERRORS))
