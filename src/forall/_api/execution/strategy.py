"""The strategies by which a mapped function runs, and the choice between them.

Each strategy is a function of a `MappedCall` that returns the results of all examples. If it raises
`DivergedGroups`, it has undone all effects, and another strategy runs the call.

1. `run_together`: all examples in one run, as the function is. Code whose tests agree pays nothing.
2. `run_converted`: all examples in one run of the converted source, where they diverge and merge.
3. `run_in_groups`: one run for each group of examples that agree; one after another if groups see
   each other's writes.
4. `run_loop`: the plain loop, without wrappers, where it is seen to take less time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._api.execution import converted_run
from forall._api.execution.converted_run import run_converted
from forall._api.execution.groups import run_in_groups
from forall._api.execution.loop_or_batch import run_cheaper
from forall._api.execution.python_draws import get_generator_states, warn_of_python_draws
from forall._api.execution.python_loop import restate_error
from forall._api.execution.single_run import DivergedGroups, run_together
from forall._api.nested_components import NestedExamples, group_by_shape
from forall._compat.call_site import SourceLine
from forall._core.code_table import CodeSet, CodeTable, find_code
from forall._core.levels import stack
from forall._divergence import thread
from forall._divergence.vmap_interface import interface

if TYPE_CHECKING:
    from types import CodeType

    from forall._api.execution.converted_run import Obstacle
    from forall._api.execution.mapped_call import MappedCall

# Functions that have tested values, with the line where examples first diverged, if they have.
_TESTED: CodeTable[SourceLine | None] = CodeTable()
_NOWHERE = SourceLine("?", 0)
_WATCHED = CodeSet()  # whose first call has been watched for numbers that Python draws


def _find_pure_bindings(function: Any) -> Any:
    # Its tables take time to import, and in most programs no examples diverge.
    from forall._api.execution.side_effect_free import find_pure_bindings

    return find_pure_bindings(function)


interface.find_pure_bindings = _find_pure_bindings


def run_mapped_call(call: MappedCall) -> tuple[list, Any]:
    """Run all examples by the strategy that suits the function."""
    code = find_code(call.func)
    if code is None or code in _WATCHED or call.arguments.size == 1 or stack.top is not None:
        return _run_by_strategy(call, code)
    before = get_generator_states()
    found = _run_by_strategy(call, code)
    if warn_of_python_draws(before, call.func, call.arguments.size):
        _WATCHED.add(code)
    return found


def _run_by_strategy(call: MappedCall, code: CodeType | None) -> tuple[list, Any]:
    components = [x for x in call.arguments.leaves if type(x) is NestedExamples]
    if components:  # of several shapes
        return run_cheaper(call._replace(groups=group_by_shape(components)), code, _run_groups)
    try:
        if thread.runs:  # converted code calls the function, which is then converted as well
            return _run_diverging(call)
        if code in _TESTED or call.arguments.size == 1:
            return run_cheaper(call, code, _run_without_loop, _find_diverging_line(code))
        try:
            return _run_and_watch(call, code)
        except DivergedGroups as diverged:
            call = call._replace(groups=diverged.groups)
        return run_cheaper(call, code, _run_diverging, _find_diverging_line(code))
    except TypeError as error:
        restate_error(error, call)
        raise


def _run_without_loop(call: MappedCall) -> tuple[list, Any]:
    """Run a call together, unless its examples diverge or have ever done so."""
    code = find_code(call.func)
    if call.arguments.size != 1 and _find_diverging_line(code) is None:
        try:
            return _run_and_watch(call, code)
        except DivergedGroups as diverged:
            call = call._replace(groups=diverged.groups)
    return _run_diverging(call)


def _run_diverging(call: MappedCall) -> tuple[list, Any]:
    """Run a call converted, or else in groups; a single example cannot diverge."""
    why = None
    if call.arguments.size != 1:
        try:
            return run_converted(call)
        except DivergedGroups as refused:
            call, why = call._replace(groups=refused.groups), refused.why
    if call.groups is None:  # it was not run at all, so it is not known which examples agree
        try:
            return run_together(call)
        except DivergedGroups as diverged:
            call = call._replace(groups=diverged.groups)
    return _run_groups(call, why)


def _run_groups(call: MappedCall, why: Obstacle | None = None) -> tuple[list, Any]:
    """Run a call in groups; if no example fails, warn about what prevented conversion."""
    thread.ran_again = {}
    result = run_in_groups(call)
    if call.options.report is not None:
        call.options.report.end_groups()
    if why is not None and not (why.is_of_results and call.options.ragged):
        converted_run.warn_of_groups(call, why)
    return result


def _run_and_watch(call: MappedCall, code: CodeType | None) -> tuple[list, Any]:
    """Run a call together; note if the function tests values, and where its examples diverge."""
    before, stack.asked = stack.asked, False
    try:
        return run_together(call)
    except DivergedGroups as diverged:
        if code is not None and _TESTED.get(code) is None:
            _TESTED[code] = diverged.why if isinstance(diverged.why, SourceLine) else _NOWHERE
        raise
    finally:
        if stack.asked and code is not None and code not in _TESTED:
            _TESTED[code] = None
        stack.asked |= before


def _find_diverging_line(code: CodeType | None) -> SourceLine | None:
    """Return the line where examples of a function first diverged; None if they never have."""
    return None if code is None else _TESTED.get(code)
