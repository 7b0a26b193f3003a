"""Choice of how to run a call whose examples diverge: converted source first, then groups.

The first call of a function runs it as it is: code whose tests agree pays nothing. If examples
diverge, all effects are undone, and the converted source runs: there examples diverge and merge
again within one run. If that is impossible, each group of examples runs by itself (`groups`). A
function whose examples have diverged once is converted at once from then on.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._api.execution.groups import DivergedGroups, OptionsOverride, run_in_groups
from forall._api.execution.loop_or_batch import find_code, run_cheaper
from forall._api.execution.python_loop import restate_error
from forall._compat import pytree
from forall._compat.storage import is_out_of_memory
from forall._compat.tensor_subclass import unwrap_posed
from forall._compat.wrapper_tensor import Wrapper
from forall._core.call_site import SourceLine, find_users_frame
from forall._core.code_table import CodeSet, CodeTable
from forall._core.divergence import Diverged, TimeExceeded
from forall._core.errors import format_columns, name_of, warn_slow_path
from forall._core.levels import stack
from forall._core.reachable import list_own_attributes
from forall._divergence import (
    Refusal,
    convert,
    convert_libraries,
    is_running,
    thread,
)
from forall._divergence.heap import SeveralKinds, Unsplittable
from forall._divergence.varying import Varying
from forall._divergence.vmap_interface import words
from forall._vmap.active_set.active_mask import CannotMerge
from forall._vmap.active_set.merge import UndefinedForExamples, has_only_some_examples

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from forall._api.execution.mapped_call import MappedCall
    from forall._vmap.vmap_level import VmapLevel

_ASKED = CodeSet()  # of functions that have tested values, whether examples agreed or not
_PARTED: CodeTable[SourceLine] = CodeTable()  # the line where examples first diverged
_DEEPLY = CodeSet()  # of functions for which libraries had to be converted too
# Errors that converted code raises if it cannot keep diverged examples separate.
CONVERSION_ERRORS = (CannotMerge, UndefinedForExamples, Unsplittable, TimeExceeded)
_NOWHERE = SourceLine("?", 0)


def _bindings_of(function: Any) -> Any:
    # Its tables take time to import, and in most programs no examples diverge.
    from forall._api.execution.side_effect_free import find_pure_bindings

    return find_pure_bindings(function)


words.bindings_of = _bindings_of


def run_mapped_call(call: MappedCall) -> tuple[list, Any]:
    """Run all examples at once as long as they agree, and in another way once they diverge."""
    try:
        return _run(call, find_code(call.func))
    except TypeError as error:
        restate_error(error, call)
        raise


def _run(call: MappedCall, code: CodeType | None) -> tuple[list, Any]:
    # Functions that converted code calls are converted as well.
    if is_running():
        return _run_converted_or_groups(call, code, None, known=True)
    if code in _ASKED or call.arguments.size == 1:
        parted_at = None if code is None else _PARTED.get(code)
        return run_cheaper(call, code, lambda: _run_all_at_once(call, code), parted_at)
    return _run_all_at_once(call, code, is_new=True)


def _run_all_at_once(
    call: MappedCall, code: CodeType | None, *, is_new: bool = False
) -> tuple[list, Any]:
    """Run a call as it is, or converted if its examples diverge or have ever done so.

    ``is_new`` says that the function has not tested values so far.
    """
    has_parted = not is_new and code in _PARTED
    if has_parted or call.arguments.size == 1:
        return _run_converted_or_groups(call, code, None, known=has_parted)
    before, stack.asked = stack.asked, False
    try:
        return _run_and_report(call, "as it is")
    except DivergedGroups as parted:
        groups, why = parted.groups, parted.why
    finally:
        if code is not None and stack.asked:
            _ASKED.add(code)
        stack.asked |= before
    parted_at = why if isinstance(why, SourceLine) else _NOWHERE
    if code is not None:
        parted_at = _PARTED.setdefault(code, parted_at)
        _ASKED.add(code)
    if is_new:
        together = functools.partial(_run_converted_or_groups, call, code, groups, known=False)
        return run_cheaper(call, code, together, parted_at)
    return _run_converted_or_groups(call, code, groups, known=False)


def _run_converted_or_groups(
    call: MappedCall, code: CodeType | None, groups: list[list[int]] | None, *, known: bool
) -> tuple[list, Any]:
    """Run a call converted, or in groups; ``groups`` are known if the function has run as it is."""
    if call.arguments.size == 1:
        return _run_unconverted(call, None)
    if groups is None:
        groups = [[*range(call.arguments.size)]]
    why: Obstacle | None = None
    for deep in (True,) if code in _DEEPLY else (False, True):
        with convert_libraries(deep):
            function = convert(call.func, strict=True)
            if isinstance(function, Refusal):
                why = Obstacle.from_refusal(function)
                if known:
                    return _run_unconverted(call, why)
                break
            try:
                result = _run_converted(call, function)
            except DivergedGroups as gave_up:
                if isinstance(gave_up.why, TimeExceeded):
                    raise gave_up.why from None
                found = Obstacle.from_cause(gave_up.why)
                # The second attempt converts libraries too; the first names user code as the cause.
                why = found if why is None or not why.has_place else why
                groups = [[*range(call.arguments.size)]]
                if not thread.met_others:
                    break
            else:
                if deep and code is not None:
                    _DEEPLY.add(code)
                again, thread.ran_again = thread.ran_again, {}
                for refused in again.values():
                    warn_of_groups(call, Obstacle.from_refusal(refused))
                return result
    return _run_in_groups(call, groups, why)


def _run_converted(call: MappedCall, function: Callable) -> tuple[list, Any]:
    whole = _check_uniform_results(function, call.func)
    return _run_and_report(
        call._replace(func=whole, options=ConvertedOptions(call.options)), "converted"
    )


def _run_unconverted(call: MappedCall, why: Obstacle | None) -> tuple[list, Any]:
    try:
        return _run_and_report(call, "as it is")
    except DivergedGroups as parted:
        groups = parted.groups
    return _run_in_groups(call, groups, why)


def _run_and_report(call: MappedCall, how: str) -> tuple[list, Any]:
    report = call.options.report
    try:
        result = call.run_once()
    except DivergedGroups as parted:
        if report is not None:
            report.note_undone(how, parted.why)
        raise
    if report is not None:
        report.note_run(how)
    return result


def run_groups(call: MappedCall, groups: list[list[int]]) -> tuple[list, Any]:
    """Run all examples, of which those of one group may run at once and others may not."""
    together = functools.partial(_run_in_groups, call, groups, None)
    return run_cheaper(call, find_code(call.func), together, None)


def _run_in_groups(
    call: MappedCall, groups: list[list[int]], why: Obstacle | None
) -> tuple[list, Any]:
    """Return the results of all examples; if none fails, warn about what prevented conversion."""
    thread.ran_again = {}
    result = run_in_groups(call, groups)
    if call.options.report is not None:
        call.options.report.end_groups()
    if why is not None and not (why.is_of_results and call.options.ragged):
        warn_of_groups(call, why)
    return result


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
        if find_users_frame(trace.tb_frame) is trace.tb_frame:
            place = SourceLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return place


def warn_of_groups(call: MappedCall, why: Obstacle) -> None:
    """Warn, once for each function and reason, that examples ran in groups, and name the cure."""
    rows = [("reason", why.reason)]
    if why.has_place:
        rows = [("at", f"{why.place.near()}   {why.place.text()}".rstrip()), *rows]
    cure = f"Write {'that line' if why.has_place else 'it'} in another way"
    if why.has_place and not why.place.text():
        cure = "Define the function in a file, where its source can be read"
    if why.is_internal:
        cure = "This is a defect of forall: please report it. Until then, write it in another way"
    warn_slow_path(
        f"vmap({name_of(call.func)}): examples part in code that could not be converted, so they "
        "ran in groups or one after another, not all at once.\n"
        f"{format_columns(rows)}\n"
        f"{cure}, or without Python's questions: torch.where, forall.cond, forall.while_loop. "
        "forall.explain tells how a call runs."
    )


def _check_uniform_results(function: Callable, func: Callable) -> Callable:
    """Return a converted function that raises if examples have results of several kinds."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        leaves, spec = pytree.flatten(result)
        for leaf in (*leaves, *_find_hidden_leaves(leaves, spec)):
            if type(leaf) is Varying or (
                isinstance(unwrap_posed(leaf), Wrapper)
                and has_only_some_examples(unwrap_posed(leaf))
            ):
                raise SeveralKinds("results of several kinds")
        return result

    # The state to be undone is found through `__wrapped__`, if the call must run otherwise.
    return functools.update_wrapper(whole, func, assigned=(), updated=())


def _find_hidden_leaves(leaves: list[Any], spec: Any) -> list[Any]:
    """The leaves of contexts of containers, and of attributes of objects."""
    contexts = pytree.get_leaves(pytree.find_contexts(spec))
    objects = [x for x in (*leaves, *contexts) if not isinstance(x, torch.Tensor)]
    held = [value for x in objects for _, value in list_own_attributes(x)]
    return [*contexts, *pytree.get_leaves(held)]


class ConvertedOptions(OptionsOverride):
    """The options of a call that runs converted source."""

    def must_rerun(self, level: VmapLevel, error: BaseException | None) -> bool:
        """Return True if converted code has to be run in another way.

        An error may come from some examples, or from the conversion. The function itself shows
        which error the loop raises first.
        """
        if level.limit is not None and error is level.limit.reached:
            return False
        if self.options.retries_on_oom and is_out_of_memory(error):
            return False
        if isinstance(error, Diverged):  # examples diverged in code that cannot run again
            return error.level.root is level
        return isinstance(error, (Exception, *CONVERSION_ERRORS))
