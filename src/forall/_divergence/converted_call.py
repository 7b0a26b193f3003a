"""Calls in converted code: convert the called function, or run it once for each group of lanes."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from forall._ast_rewrite import Refusal, find_template
from forall._compat.call_site import SourceLine
from forall._compat.exception_safety import contextmanager
from forall._compat.rng_state import SEEDERS
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import Diverged
from forall._core.python_snapshot import PythonSnapshot
from forall._core.python_state import PLACEHOLDER
from forall._divergence import pure_call, subscripts
from forall._divergence.heap import CONTAINERS, Unsplittable, slot_of
from forall._divergence.join import merge
from forall._divergence.report import Report
from forall._divergence.thread_state import (
    ThreadState,
    close_down_to,
    inner,
    run_each_set,
    thread,
)
from forall._divergence.user_code import (
    OTHERS,
    USERS,
    find_owner,
    is_library_code,
)
from forall._divergence.varying import (
    Varying,
    find_uniform_sets,
    has_varying,
    resolve_deep,
)
from forall._divergence.vmap_interface import interface
from forall._vmap.fast_path.operators import call_on_stacks

OVERRIDDEN: dict[Any, Callable] = {}  # replacements of builtins (see `py_builtins`)
PASSED_ON: set[Any] = set()  # builtins that only call the functions passed to them
READS_ONLY = frozenset({"index", "count", "copy", "get", "keys", "values", "items"})
# Operators of torch in C that read values, so that lanes may diverge inside
LOOKS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__contains__",
        "is_nonzero",
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
        "masked_select",
        "equal",
        "allclose",
        "bincount",
        "histc",
        "repeat_interleave",
        "combinations",
        "tensor_split",
        "__getitem__",
        "where",
        "index",
        "index_put_",
        "_unique",
        "_unique2",
        "cholesky",
        "eigh",
        "as_tensor",
        "tensor",
        "full",
        "arange",
        "linspace",
        "narrow",
        "select",
    ]
)
# Functions of torch that convert a per-example number to one int before function modes see the call
ASKS_FIRST = frozenset({"select", "roll"})
OPAQUE = object()
# Types whose methods in C change nothing
_CONSTANT = (
    types.ModuleType, type, str, bytes, int, float, complex, tuple, frozenset, range, slice,
    re.Pattern, re.Match, types.FunctionType,
)  # fmt: skip
_plans: dict[types.CodeType, Any] = {}
_deep_plans: dict[types.CodeType, Any] = {}  # of functions of other libraries
_refused: dict[types.CodeType, Refusal] = {}  # why these functions are not converted
_of_torch_alone: set[Any] = set()  # torch functions that need no other treatment here


def call_converted(f: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``f(*args, **kwargs)`` for the running lanes, which all run again when it returns."""
    kind = type(f)
    if kind is types.FunctionType:
        plan = _plans.get(f.__code__) or _make_plan(f)
        if plan is OTHERS:
            plan = _find_library_plan(f)
        if plan is OPAQUE:
            return call_unconverted(f, args, kwargs)
        if plan.straight is not None:
            found = pure_call.call_pure(plan, f, args, kwargs)
            if found is not pure_call.NOTHING:
                return found
        return call_in_scope(plan.make_function(f), args, kwargs)
    if kind is types.MethodType:
        return call_converted(f.__func__, f.__self__, *args, **kwargs)
    if kind is types.BuiltinFunctionType or kind is type:
        if f in _of_torch_alone and not thread.loose:
            return _call_torch(f, f, args, args, kwargs)
        if thread.diverged:
            _refuse_kept_iterators(args)
        override = OVERRIDDEN.get(f)
        if override is not None:
            return override(*args, **kwargs)
        if kind is type:
            return _make_instance(f, args, kwargs)
        return _call_builtin(f, args, kwargs)
    if kind is functools.partial:
        if any(a is PLACEHOLDER for a in f.args):
            return _call_with_places_filled(f, args, kwargs)
        return call_converted(f.func, *f.args, *args, **{**f.keywords, **kwargs})
    if kind is Varying:
        return f.each(lambda g: call_converted(g, *args, **kwargs))
    if isinstance(f, type):
        return _make_instance(f, args, kwargs)
    return _call_object(f, args, kwargs)


def _call_with_places_filled(f: functools.partial, args: tuple, kwargs: dict) -> Any:
    """Call what a partial calls, with the first arguments in the places that it has left open."""
    if sum(a is PLACEHOLDER for a in f.args) > len(args):
        return f(*args, **kwargs)  # an error of Python's
    left = iter(args)
    filled = [next(left) if a is PLACEHOLDER else a for a in f.args]
    return call_converted(f.func, *filled, *left, **{**f.keywords, **kwargs})


def _refuse_kept_iterators(args: tuple) -> None:
    """Raise if some lanes alone would consume an iterator that is kept for the others too."""
    for n in range(len(args)):
        # The tuple and the argument of `getrefcount` are two references; a third one is elsewhere.
        # A local name here would add one on some versions of Python.
        if hasattr(type(args[n]), "__next__") and sys.getrefcount(args[n]) > 2:
            raise Unsplittable("an iterator that is kept, used by some examples alone")


def call_in_scope(g: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a converted function; the lanes that run now run again when it returns or raises."""
    t = thread
    top, depth, diverged = t.top, len(t.entered), t.diverged
    try:
        result = g(*args, **kwargs)
        if t.top is not top:
            close_down_to(t, top)
    except BaseException:
        if t.failed is None:
            t.failed = interface.get_active_set()
        t.leave_sets(depth)
        t.top, t.diverged = top, diverged
        raise
    else:
        return result


def _make_plan(f: types.FunctionType) -> Any:
    """Return the plan of a function: its template, OPAQUE, or OTHERS for `_find_library_plan`."""
    kind = find_owner(f.__code__)
    plan = _convert_plan(f) if kind is USERS else OTHERS if kind is OTHERS else OPAQUE
    _plans[f.__code__] = plan
    return plan


def _find_library_plan(f: types.FunctionType) -> Any:
    """Return the plan of another library's function, which is converted only on demand."""
    thread.libraries.were_called = True
    if not thread.libraries.are_converted:
        return OPAQUE
    plan = _deep_plans.get(f.__code__)
    if plan is None:
        plan = _deep_plans[f.__code__] = _convert_plan(f)
    return plan


def _convert_plan(f: types.FunctionType) -> Any:
    plan = find_template(f)
    if isinstance(plan, Refusal):
        if thread.report is not None:
            report_refusal(f, plan)
        _refused[f.__code__] = plan
        return OPAQUE
    if thread.report is not None:
        code = f.__code__
        thread.report.note_function(code, f.__name__, SourceLine.from_code(code))
    return plan


def find_converted_template(f: types.FunctionType) -> Any:
    """Return the converted template of a function; None if it is not converted."""
    plan = _plans.get(f.__code__) or _make_plan(f)
    if plan is OTHERS:
        plan = _find_library_plan(f)
    return None if plan is OPAQUE else plan


def report_refusal(f: types.FunctionType, refused: Refusal) -> None:
    """Report a function that cannot be converted."""
    file, _, line = refused.place.rpartition(":")
    place = SourceLine(file, int(line))
    thread.report.note_function(f.__code__, f.__name__, place, refused.reason)


@contextmanager
def collect_report(report: Report) -> Iterator[None]:
    """Context that reports each called function: converted, or why not."""
    was, thread.report = thread.report, report
    _plans.clear()  # each plan is reported when it is made
    _deep_plans.clear()
    try:
        yield
    finally:
        thread.report = was


@contextmanager
def collect_inner_reports() -> Iterator[list[Report]]:
    """Context with a list of reports, one of each vmap in the call of another transform."""
    was, found = inner.reports, []
    inner.reports = found
    try:
        yield found
    finally:
        inner.reports = was


def _make_instance(cls: Any, args: tuple, kwargs: dict) -> Any:
    """Make an instance of a class; its ``__init__`` is converted like any function."""
    init = cls.__init__
    if (
        isinstance(init, types.FunctionType)
        and type(cls).__call__ is type.__call__
        and cls.__new__ is object.__new__
        and not is_library_code(init.__code__)
    ):
        made = object.__new__(cls)
        call_converted(init, made, *args, **kwargs)
        return made
    return call_unconverted(cls, args, kwargs)


def _call_builtin(f: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function or method written in C."""
    owner = getattr(f, "__self__", None)
    if f in PASSED_ON:
        args = tuple(wrap_converted(a) if isinstance(a, types.FunctionType) else a for a in args)
    if type(owner) in CONTAINERS:
        return _call_container_method(f, owner, args, kwargs)
    if isinstance(owner, interface.Tensor):
        return _call_tensor_method(f, owner, args, kwargs)
    if slot_of(owner) is not None:
        return call_unconverted(f, args, kwargs, owners=(owner,))
    if thread.diverged and not (owner is None or isinstance(owner, _CONSTANT)):
        raise Unsplittable(f"{f.__name__} of an object that it may change, by some examples alone")
    return call_unconverted(f, args, kwargs)


def _call_container_method(f: Any, owner: Any, args: tuple, kwargs: dict) -> Any:
    """Call a method of a list, dict or set."""
    name = f.__name__
    if thread.mixed and id(owner) in thread.mixed:
        if name not in READS_ONLY and thread.diverged:
            subscripts.log_container(owner)
        return subscripts.run_per_set(
            (owner, *args), lambda: call_converted(getattr(owner, name), *args, **kwargs)
        )
    is_plain = name in ("append", "appendleft", "insert", "clear", "reverse", "popleft")
    if is_plain or (
        name in ("extend", "setdefault", "update") and not _has_loose_or_number(args, kwargs)
    ):
        if thread.diverged:
            subscripts.log_container(owner)
        return f(*args, **kwargs)
    if name == "pop" and all(type(a) in (int, str) for a in args):
        if thread.diverged:
            subscripts.log_container(owner)
        return f(*args)
    if name == "get" and type(args[0]) in (int, str):
        return f(*args)
    if name in ("keys", "values", "items", "copy"):
        return f()
    return call_unconverted(f, args, kwargs, owners=(owner,))


def _has_loose_or_number(args: tuple, kwargs: dict) -> bool:
    """True if what a method reads of its arguments may differ between lanes."""
    given = (*args, *kwargs.values())
    if any(type(a) is interface.BatchedScalar for a in given):
        return True
    return thread.loose and any(map(has_varying, given))


def _call_tensor_method(f: Any, owner: Any, args: tuple, kwargs: dict) -> Any:
    name = f.__name__
    if thread.loose or (name in LOOKS and not _has_numbers_for_ints(f, (*args, *kwargs.values()))):
        return call_unconverted(f, args, kwargs)
    return _call_torch(getattr(type(owner), name, None), f, (owner, *args), args, kwargs)


def _has_numbers_for_ints(f: Any, given: tuple) -> bool:
    """Return True if a call has numbers of the examples where torch would ask for one int."""
    return f.__name__ in ASKS_FIRST and any(type(v) is interface.BatchedScalar for v in given)


def _call_torch(func: Any, f: Any, operands: tuple, args: tuple, kwargs: dict) -> Any:
    """Call ``f(*args)``, which torch's function modes see as ``func(*operands)``."""
    if _has_numbers_for_ints(f, (*operands, *kwargs.values())):
        return interface.call_torch(func, operands, kwargs)
    found = call_on_stacks(func, operands, kwargs)
    if found is not None:
        return found
    if any(map(_holds_number, operands)) or any(map(_holds_number, kwargs.values())):
        return _call_asking(f, args, kwargs)
    return f(*args, **kwargs)


def _call_asking(f: Any, args: tuple, kwargs: dict) -> Any:
    """Call a function of torch that may ask for an int: a size, a dim, how many."""
    ran = False

    def call_group() -> Any:
        nonlocal ran
        if not ran:
            ran = True
            return f(*args, **kwargs)
        named = {name: _concretize_numbers(v) for name, v in kwargs.items()}
        return f(*map(_concretize_numbers, args), **named)

    return interface.run_per_group(call_group, merge)


def _concretize_numbers(value: Any) -> Any:
    if type(value) is interface.BatchedScalar:
        return value.concretize()
    return type(value)(map(_concretize_numbers, value)) if _holds_number(value) else value


def _holds_number(value: Any) -> bool:
    """True for a number of each example, and for a tuple or list with one."""
    kind = type(value)
    if kind is tuple or kind is list:
        return any(type(v) is interface.BatchedScalar for v in value)
    return kind is interface.BatchedScalar


def _call_object(f: Any, args: tuple, kwargs: dict) -> Any:
    """Call an object with ``__call__``, such as a module."""
    kind = type(f)
    own = getattr(kind, "__call__", None)  # noqa: B004 - which function it is
    if isinstance(own, types.FunctionType):
        forward = getattr(f, "forward", None)
        if (
            hasattr(f, "_forward_hooks")
            and forward is not None
            and own.__name__ == "_wrapped_call_impl"
        ):
            return (
                call_converted(forward, *args, **kwargs)
                if not _has_hooks(f)
                else call_unconverted(f, args, kwargs)
            )
        return call_converted(own, f, *args, **kwargs)
    return call_unconverted(f, args, kwargs)


def _has_hooks(module: Any) -> bool:
    """True if a call of a torch module does more than run ``forward``."""
    everywhere = sys.modules["torch.nn.modules.module"]
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if module._compiled_call_impl is not None or any(getattr(module, name) for name in names):
        return True
    return any(getattr(everywhere, f"_global{name}") for name in names)


# --- what is not converted


def call_unconverted(f: Any, args: tuple, kwargs: dict, owners: tuple = ()) -> Any:
    """Run ``f`` unconverted. If lanes diverge inside, rerun it for each group of lanes."""
    if thread.loose:
        values = [*owners, *args, *kwargs.values()]
        if not (type(f) is types.BuiltinFunctionType and _is_torch_function(f)):
            values += thread.find_varying()
        if any(has_varying(v) for v in values):
            worlds = find_uniform_sets(values)
            if len(worlds) > 1 or any(has_varying(v) for v in (*owners, *args, *kwargs.values())):
                return _call_per_set(f, args, kwargs, owners, worlds)
    if type(f) is types.BuiltinFunctionType and _is_torch_function(f):
        if f.__name__ not in LOOKS or _has_numbers_for_ints(f, (*args, *kwargs.values())):
            if isinstance(getattr(f, "__self__", None), interface.Tensor):
                return f(*args, **kwargs)
            if f not in OVERRIDDEN and f not in PASSED_ON:
                _of_torch_alone.add(f)
            return _call_torch(f, f, args, args, kwargs)
        return interface.run_per_group(lambda: f(*args, **kwargs), merge)
    if _has_iterator((*owners, *args, *kwargs.values())):
        return _call_consuming(f, args, kwargs)
    if type(f) is types.FunctionType and inspect.unwrap(f) in SEEDERS:
        _refuse_seed_of_some(f, (*args, *kwargs.values()))
    changed = [a for a in (*owners, *args, *kwargs.values()) if slot_of(a) is not None]

    def run() -> Any:  # not a `functools.partial`, for which some arguments are no values
        return f(*args, **kwargs)

    if thread.report is not None:
        run = thread.report.wrap_counting_reruns(f, run)
    if type(f) is types.FunctionType and f.__code__ in _refused:
        run = _wrap_noting_divergence(f.__code__, run)
    return subscripts.run_changing(changed, run, _take_snapshot(f, args, kwargs))


def _refuse_seed_of_some(f: types.FunctionType, given: tuple) -> None:
    """Raise if a call seeds a generator for some examples, since all of them draw from it."""
    own = (interface.BatchedScalar, Wrapper)
    if thread.diverged or any(isinstance(v, own) for v in given):
        raise Unsplittable(f"{f.__name__} for some examples: all draw from one generator")


def _wrap_noting_divergence(code: types.CodeType, run: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap ``run``, a call of an unconvertible function, to note the reason if lanes diverge."""

    def run_and_note() -> Any:
        try:
            return run()
        except Diverged:
            thread.ran_again[code] = _refused[code]
            raise

    return run_and_note


def _has_iterator(values: tuple) -> bool:
    """True if there is an iterator among these values, which a call may consume."""
    return any(hasattr(type(v), "__next__") for v in values)


def _call_consuming(f: Any, args: tuple, kwargs: dict) -> Any:
    """Call ``f`` with an iterator that it consumes, so that it cannot run a second time."""
    try:
        return f(*args, **kwargs)
    except RuntimeError as error:
        if thread.loose and str(error).endswith("during iteration"):
            raise Unsplittable("an iterator of what differs in length or keys") from None
        raise


def _take_snapshot(f: Any, args: tuple, kwargs: dict) -> PythonSnapshot | None:
    """Take a snapshot of further state that a call may change.

    None is needed if lanes run together and cannot diverge in the user's code.
    """
    code = getattr(getattr(f, "__func__", f), "__code__", None)
    if not thread.diverged and (code is None or is_library_code(code)):
        return None
    given: list[Any] = []
    for a in (*args, *kwargs.values()):
        if slot_of(a) is None:
            given.append(a)
        elif not isinstance(a, bytearray):
            given += a.values() if isinstance(a, dict) else a
    given = [a for a in given if not isinstance(a, interface.Tensor)]
    known = slot_of(getattr(f, "__self__", None)) is not None  # whose slot is one of those noted
    return PythonSnapshot(getattr(f, "__func__", len) if known else f, given)


def _is_torch_function(f: Any) -> bool:
    owner = getattr(f, "__self__", None)
    if isinstance(owner, interface.Tensor):
        return True
    module = getattr(f, "__module__", None) or getattr(owner, "__name__", "") or ""
    return module.startswith("torch")


def _call_per_set(f: Any, args: tuple, kwargs: dict, owners: tuple, worlds: list) -> Any:
    """Call ``f`` once for each of these active sets, within which no argument varies."""
    if len(worlds) > 1 and _has_iterator((*owners, *args, *kwargs.values())):
        raise Unsplittable("an iterator, used up by the first of several examples")
    if thread.diverged or len(worlds) > 1:
        for owner in owners:
            subscripts.log_container(owner)

    def run(_: Any) -> Any:
        for owner in owners:
            resolve_deep(owner)
        plainly = tuple(resolve_deep(a) for a in args)
        return call_unconverted(f, plainly, {k: resolve_deep(v) for k, v in kwargs.items()}, owners)

    return run_each_set([(world, None) for world in worlds], run)


def wrap_converted(f: Callable) -> Callable:
    """Return a function that runs ``f`` converted, to be passed to code that calls it."""
    if getattr(f, "__forall_converts__", None) is not None:
        return f
    if isinstance(f, types.FunctionType) and is_library_code(f.__code__):
        return f

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        return call_converted(f, *args, **kwargs) if thread.runs else f(*args, **kwargs)

    run.__forall_converts__ = f
    return run


ThreadState.call = staticmethod(call_converted)
ThreadState.find_template = staticmethod(find_converted_template)

__all__ = ["Refusal", "call_converted", "wrap_converted", "merge", "call_unconverted"]
