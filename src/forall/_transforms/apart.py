"""Which way a function is run whose examples part: converted source, where there is any.

The first call of a function runs it as it is; code whose tests agree pays nothing. Where examples
part, all is undone, and its converted form runs: there they part and meet again within one run.
Where that cannot be, each group runs by itself (`groups`). What parted once is converted at once
from then on.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from forall._batching.merging import Undefined, is_partial
from forall._batching.worlds import Apart
from forall._core.parting import Parted
from forall._lanes import Refused, convert, deeply, is_running, thread
from forall._lanes.heap import Unsplittable
from forall._lanes.varying import Varying
from forall._torch import trees
from forall._torch.wrapper import Wrapper
from forall._transforms.groups import Altered, Groups, in_groups, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from forall._batching.interpreter import VmapLevel
    from forall._transforms.vmap import Mapping

_PARTED: WeakSet[CodeType] = WeakSet()
_DEEPLY: WeakSet[CodeType] = WeakSet()  # and where libraries had to be converted besides
# What converted code raises where it cannot hold examples apart.
UNABLE = (Apart, Undefined, Unsplittable)


def run(call: Mapping) -> tuple[list, Any]:
    """All examples at once as long as they agree; then apart, as far as need be."""
    code = _code(call.func)
    known = code in _PARTED or is_running()  # what converted code calls is converted as well
    if not known:
        try:
            return _once(call, "as it is")
        except Groups as parted:
            groups = parted.groups
            if code is not None:
                _PARTED.add(code)
    else:
        groups = [[*range(call.entering.size)]]
    if call.entering.size == 1:
        return _as_it_is(call) if known else _in_groups(call, groups)
    for deep in (True,) if code in _DEEPLY else (False, True):
        with deeply(deep):
            function = convert(call.func, strict=True)
            if isinstance(function, Refused):
                if known:
                    return _as_it_is(call)
                break
            try:
                result = _converted(call, function)
            except Groups:
                groups = [[*range(call.entering.size)]]
                if not thread.met_others:
                    break
            else:
                if deep and code is not None:
                    _DEEPLY.add(code)
                return result
    return _in_groups(call, groups)


def _converted(call: Mapping, function: Callable) -> tuple[list, Any]:
    whole = _whole(function, call.func)
    return _once(call._replace(func=whole, options=Converted(call.options)), "converted")


def _as_it_is(call: Mapping) -> tuple[list, Any]:
    try:
        return _once(call, "as it is")
    except Groups as parted:
        return _in_groups(call, parted.groups)


def _once(call: Mapping, how: str) -> tuple[list, Any]:
    report = call.options.report
    try:
        result = call.once()
    except Groups as parted:
        if report is not None:
            report.undone(how, parted.why)
        raise
    if report is not None:
        report.ended(how)
    return result


def _in_groups(call: Mapping, groups: list[list[int]]) -> tuple[list, Any]:
    result = in_groups(call, groups)
    if call.options.report is not None:
        call.options.report.groups_ended()
    return result


def _whole(function: Callable, func: Callable) -> Callable:
    """A converted function that answers with what all its examples have in common."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for leaf in trees.leaves(result):
            if type(leaf) is Varying or (isinstance(leaf, Wrapper) and is_partial(leaf)):
                raise Unsplittable("results of several kinds")
        return result

    # By its name the state that it can reach is found, where it has to be run otherwise.
    return functools.update_wrapper(whole, func, assigned=(), updated=())


class Converted(Altered):
    """The options of a call that runs converted source."""

    def gave_up(self, level: VmapLevel, error: BaseException | None) -> bool:
        """Whether converted code has to be run otherwise.

        An error may be that of some examples, or of the conversion: which one the loop meets first
        is for the function itself to say.
        """
        if level.limit is not None and error is level.limit.reached:
            return False
        if self.options.spares and is_out_of_memory(error):
            return False
        if isinstance(error, Parted):  # of some of its examples, in code that cannot run again
            return error.level.root is level
        return isinstance(error, (Exception, *UNABLE))


def _code(func: Callable) -> CodeType | None:
    """What tells a function that may be made anew for each call."""
    func = inspect.unwrap(func)
    while isinstance(func, functools.partial):
        func = inspect.unwrap(func.func)
    if isinstance(func, torch.nn.Module):
        func = type(func).forward
    return getattr(getattr(func, "__func__", func), "__code__", None)
