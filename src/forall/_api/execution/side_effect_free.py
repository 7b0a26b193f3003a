"""Analysis of functions that compute a result and have no side effects, so may run in any way.

A function is read name by name. It may call functions of torch, of `math` and of Python that
neither draw random numbers nor keep state, and such functions of the user. It may capture numbers,
tensors, layers of torch's, and containers that nothing in it changes. In doubt, a function does not
count as one that only computes.
"""

from __future__ import annotations

import builtins
import cmath
import collections
import functools
import math
import operator
import sys
from math import inf
from operator import is_not
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Module

from forall._api.execution.transform_decorator import TENSOR_OPTION, find_transform
from forall._api.nested_components import NestedExamples
from forall._compat import pure_functions
from forall._compat.private_api import PLAIN
from forall._compat.wrapper_tensor import Wrapper
from forall._core.python_state import (
    CALL_OPS,
    UNSET,
    cell_contents_of,
    find_rebound_names,
    instructions_of,
    is_ours,
    read_signature,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from dis import Instruction

    from forall._api.execution.transform_decorator import Transform

_MOST = 1000  # values that are inspected
_MOST_COPIED = 1 << 20  # entries of a tensor
# For the choice of a plain loop, beside the functions that `pure_functions` trusts. Those are for
# replay too, which also asks that the result depends on the arguments alone.
_NAMES_OF_BUILTINS = """
    abs all any ascii bin bool bytes chr complex dict divmod enumerate filter float format frozenset
    hash hex int isinstance iter len list map max min next oct ord pow range repr reversed round set
    slice sorted str sum tuple zip
"""
# Pure functions and container classes of Python's own library, by their `__module__`.
_NAMES_OF_LIBRARIES = {
    "_bisect": "bisect_left bisect_right insort_left insort_right",
    "_functools": "reduce",
    "_heapq": "heapify heappop heappush heappushpop heapreplace",
    "collections": "Counter OrderedDict defaultdict deque",
    "copy": "copy deepcopy",
    "fractions": "Fraction",
    "functools": "partial reduce",
    "heapq": "merge nlargest nsmallest",
    "itertools": """
        accumulate chain combinations combinations_with_replacement compress count cycle dropwhile
        filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee
        zip_longest
    """,
    "statistics": """
        fmean geometric_mean harmonic_mean mean median median_grouped median_high median_low mode
        multimode pstdev pvariance quantiles stdev variance
    """,
}
# Instructions that rebind, or may rebind, a name that is not local to the function.
_NAMES_OF_REBINDING = """
    STORE_GLOBAL DELETE_GLOBAL STORE_NAME DELETE_NAME LOAD_NAME STORE_ATTR DELETE_ATTR IMPORT_NAME
    IMPORT_FROM IMPORT_STAR LOAD_BUILD_CLASS YIELD_VALUE GET_AWAITABLE GET_AITER GET_ANEXT
"""
_NAMES_OF_CHANGING = """
    add append appendleft clear difference_update discard extend extendleft heapify heappop heappush
    heappushpop heapreplace insert insort_left insort_right intersection_update move_to_end pop
    popitem popleft remove reverse rotate setdefault sort subtract symmetric_difference_update
    update
"""
# Parts of the names of functions that draw random numbers, or may.
_PARTS_OF_DRAWING = """
    rand drop bernoulli multinomial poisson gamma gumbel rrelu fractional attention binomial
    dirichlet exponential cauchy geometric normal_ log_normal lowrank lstm gru rnn
"""
# Beginnings of the names of attributes that do more than return a value computed from it.
_BEGINNINGS = """
    backward register_ retain_grad requires_grad data grad share_memory set_ resize storage numpy
    __array apply map_ record_stream module_load as_subclass _make dlpack cpu cuda to_sparse
"""
# Transforms of forall that a function may call.
_NAMES_OF_TRANSFORMS = "grad grad_and_value hessian hvp jacfwd jacrev jvp vmap"
# Layers of torch's that draw or keep state, or may; those below do so while they train.
_NAMES_OF_LAYERS = """
    AdaptiveLogSoftmaxWithLoss CrossMapLRN2d FractionalMaxPool2d FractionalMaxPool3d GRU LSTM RNN
    RNNBase RReLU SyncBatchNorm Transformer
"""
_PARTS_OF_TRAINING = "Dropout BatchNorm InstanceNorm"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Keywords of torch's functions that write, draw, or keep something.
_NAMES_OF_KEYWORDS_WITH_EFFECTS = """
    out inplace generator dropout_p training running_mean running_var max_norm randomness report
    mesh
"""

_ERRORS = {n for n, e in vars(builtins).items() if isinstance(e, type) and issubclass(e, Exception)}
_BUILTINS = frozenset(_NAMES_OF_BUILTINS.split()) | _ERRORS
_REBINDING = frozenset(_NAMES_OF_REBINDING.split())
_WRITING = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})
_LOADING = frozenset({"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_LIBRARIES = {home: frozenset(names.split()) for home, names in _NAMES_OF_LIBRARIES.items()}
_HOMES = frozenset({*_LIBRARIES, "bisect", "cmath", "math", "operator", "_operator", "torch"})
_OWN = (str, bytes, int, float, complex, list, dict, set, frozenset, tuple, range, slice)
_MADE = (collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict)
_CHANGING = frozenset(_NAMES_OF_CHANGING.split())
_DRAWING = (*_PARTS_OF_DRAWING.split(),)
_MORE = (*_BEGINNINGS.split(),)
_KEEPING = ("batch_norm", "instance_norm", "moving_avg")  # they keep statistics
_KEYWORDS = frozenset(_NAMES_OF_KEYWORDS_WITH_EFFECTS.split())
_TRANSFORMS = frozenset(_NAMES_OF_TRANSFORMS.split())
_DRAWING_OPTIONS = ("different", "same", TENSOR_OPTION)  # of a transform, in its key
_LAYERS = frozenset(_NAMES_OF_LAYERS.split())
_TRAINING = (*_PARTS_OF_TRAINING.split(),)


def _is_pure_attribute(name: str) -> bool:
    """Return True if an attribute of a tensor, a number or a container only returns a value."""
    if name.endswith("_") or name in pure_functions.TELLING or name in ("normal", "new"):
        return False
    return not any(part in name for part in _DRAWING) and not name.startswith(_MORE)


_ATTRIBUTES = frozenset({"weight", "bias"}) | frozenset(
    name
    for kind in (torch.Tensor, *_OWN, *_MADE, BaseException, torch.Size, torch.finfo, torch.iinfo)
    for name in dir(kind)
    if not name.startswith("_") and _is_pure_attribute(name)
)


class Bindings(NamedTuple):
    """The values to which the names in a function are bound, and what it may write into."""

    names: tuple[tuple[Mapping[str, Any], str, Any], ...]
    cells: tuple[tuple[Any, Any], ...]
    containers: tuple[tuple[Any, list], ...]  # that it captures, and what they hold
    states: tuple[_FunctionState, ...]  # of the function, and of others
    functions: tuple[FunctionType, ...]  # these others
    tensors: tuple[torch.Tensor, ...]  # that it captures
    writes: bool  # True if it has statements that would write into a tensor in place

    def hold(self, func: FunctionType) -> bool:
        """Return True if all names of a function, and of those it calls, are bound as they were."""
        for names, name, value in self.names:
            if names.get(name, UNSET) is not value:
                return False
        for cell, value in self.cells:
            if cell_contents_of(cell) is not value:
                return False
        for container, held in self.containers:
            if len(container) != len(held) or any(map(is_not, container, held)):
                return False
        if _has_changed(func, self.states[0]):
            return False
        return not self.functions or not any(map(_has_changed, self.functions, self.states[1:]))

    def may_take(self, leaves: Iterable[Any]) -> bool:
        """Return True if all that a call with these arguments writes can be put back."""
        for value in (*leaves, *self.tensors):
            if type(value) in PLAIN:
                if value.is_inference() or (self.writes and not _may_be_copied(value)):
                    return False
            elif isinstance(value, (Wrapper, NestedExamples)):
                if self.writes:
                    return False
            elif not _is_number(value):
                return False
        return True


def _may_be_copied(x: torch.Tensor) -> bool:
    """Return True if a copy of a tensor costs little, and is enough to put it back."""
    return not x.requires_grad and x.numel() <= _MOST_COPIED and x.layout is torch.strided


class _FunctionState(NamedTuple):
    """The parts of a function that may be replaced."""

    code: CodeType
    defaults: tuple | None
    home: dict[str, Any]
    by_name: dict[str, Any] | None
    named: tuple  # the values of these


def _take_function_state(func: FunctionType) -> _FunctionState:
    by_name = func.__kwdefaults__
    named = (*(by_name or {}).values(),)
    return _FunctionState(func.__code__, func.__defaults__, func.__globals__, by_name, named)


def _has_changed(func: FunctionType, state: _FunctionState) -> bool:
    """Return True if any part of a function has been replaced."""
    code, defaults, home, by_name, named = state
    if func.__code__ is not code or func.__defaults__ is not defaults:
        return True
    if func.__globals__ is not home or func.__kwdefaults__ is not by_name:
        return True
    return by_name is not None and any(map(is_not, by_name.values(), named))


class _DoubtError(Exception):
    """A part of a function that cannot be shown to have no side effects."""


def find_pure_bindings(func: Any) -> Bindings | None:
    """Return the bindings of a function that only computes; None for any other."""
    reading = _PurityReader()
    try:
        reading.function(func)
        if reading.containers and reading.changes:
            return None
    except _DoubtError:
        return None
    return Bindings(
        tuple(reading.names),
        tuple(reading.cells),
        (*reading.containers, *reading.layers),
        tuple(map(_take_function_state, reading.functions)),
        tuple(reading.functions[1:]),  # without the function itself, which would never be freed
        tuple(reading.tensors),
        reading.writes,
    )


class _CodeNames(NamedTuple):
    """The names that code reads, with the attributes that follow, and what the code may change."""

    ways: dict[tuple[str, tuple[str, ...]], float]  # with the most arguments that it is called with
    changes: bool  # containers or tensors
    writes: bool  # tensors, by a statement


@functools.lru_cache(maxsize=4096)
def _read_code(code: CodeType) -> _CodeNames | None:
    """Read one code object, without those inside it; None if the code may rebind a name."""
    ways: list[tuple[str, tuple[str, ...]]] = []
    read_at: list[Instruction] = []  # the last instruction of each
    changes = writes = is_open = False
    is_expression = code.co_name == "<genexpr>"
    for i in instructions_of(code):
        if i.opname in _REBINDING and not (i.opname == "YIELD_VALUE" and is_expression):
            return None
        if i.opname == "DICT_MERGE":  # `f(**keywords)`, whose names are not known
            return None
        if i.opname in _LOADING:
            ways.append((i.argval, ()))
            read_at.append(i)
            is_open = True
        elif i.opname in _ATTRIBUTE and is_open:
            name, attributes = ways.pop()
            ways.append((name, (*attributes, i.argval)))
            read_at[-1] = i
        elif i.opname in _ATTRIBUTE:
            if i.argval not in _ATTRIBUTES:
                return None
            changes |= i.argval in _CHANGING
        elif i.opname not in ("PUSH_NULL", "CACHE"):
            is_open = False
        writes |= i.opname in _WRITING or (i.opname == "BINARY_OP" and i.argrepr.endswith("="))
    for constant in code.co_consts:
        if type(constant) is tuple and not _KEYWORDS.isdisjoint(map(str, constant)):
            return None
    calls = _group_calls(code)
    counts: dict[tuple[str, tuple[str, ...]], float] = {}
    for way, read in zip(ways, read_at, strict=True):
        counts[way] = max(counts.get(way, 0), _count_arguments(calls, read))
    return _CodeNames(counts, changes or writes, writes)


def _group_calls(code: CodeType) -> dict[Any, list[Instruction]]:
    """Return the calls in code by the line and column of their beginning."""
    found: dict[Any, list[Instruction]] = collections.defaultdict(list)
    for i in instructions_of(code):
        if i.opname in CALL_OPS and i.positions is not None:
            found[i.positions[0::2]].append(i)
    return found


def _count_arguments(calls: dict[Any, list[Instruction]], read: Instruction) -> float:
    """Return how many arguments a function is called with where an instruction has read it.

    It is inf where the function is not called at once, or with ``*args``. A call begins where its
    function does, and the innermost of several that begin there ends first. In Python 3.14 calls
    by which a ``with`` enters and leaves a context lie where the context's own call does, after it.
    """
    begin = read.positions
    if begin is None or begin.end_lineno is None:
        return inf
    counts: dict[Any, float] = {}
    for i in calls.get(begin[0::2], ()):
        if i.positions is not None and (end := i.positions[1::2]) > begin[1::2]:
            is_open = i.opname == "CALL_FUNCTION_EX" or i.arg is None
            counts.setdefault(end, inf if is_open else i.arg)
    return counts[min(counts)] if counts else inf


def _is_known_function(value: Any) -> bool:
    return type(value) is FunctionType and pure_functions.is_known_function(value)


@functools.lru_cache(maxsize=4096)
def _count_harmless(func: FunctionType) -> float:
    """Return how many arguments a function of torch's takes before one that writes or draws."""
    names = read_signature(func).parameters
    return next((n for n, name in enumerate(names) if name in _KEYWORDS), inf)


class _PurityReader:
    def __init__(self) -> None:
        self.names: list[tuple[Mapping[str, Any], str, Any]] = []
        self.cells: list[tuple[Any, Any]] = []
        self.functions: list[FunctionType] = []
        self.tensors: list[torch.Tensor] = []
        self.containers: list[tuple[Any, list]] = []
        self.layers: list[tuple[Any, list]] = []  # what modules hold, and their hooks
        self.changes = self.writes = False
        self.seen = 0

    def function(self, func: Any) -> None:
        if any(func is known for known in self.functions):
            return
        if type(func) is not FunctionType:
            raise _DoubtError
        how = find_transform(func)
        if how is not None:
            self.functions.append(func)
            self._transform(how)
            return
        if is_ours(func):
            raise _DoubtError
        self.functions.append(func)
        code = func.__code__
        if not find_rebound_names(code).isdisjoint(code.co_freevars):
            raise _DoubtError
        captured = {}
        for name, cell in zip(code.co_freevars, func.__closure__ or (), strict=True):
            captured[name] = cell_contents_of(cell)
            self.cells.append((cell, captured[name]))
        for value in (*(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).values()):
            self.value(value)
        self._code(code, func.__globals__, captured)

    def _transform(self, how: Transform) -> None:
        """Look at the function inside a transform, which itself only computes."""
        if how.key is None or any(name in repr(how.key) for name in _DRAWING_OPTIONS):
            raise _DoubtError
        self.function(how.func)

    def _code(self, code: CodeType, home: dict[str, Any], captured: dict[str, Any]) -> None:
        read = _read_code(code)
        if read is None:
            raise _DoubtError
        self.changes |= read.changes
        self.writes |= read.writes
        for (name, attributes), count in read.ways.items():
            value = self._way(name, attributes, code, home, captured)
            if _is_known_function(value) and count > _count_harmless(value):
                raise _DoubtError
        own = {*code.co_varnames, *code.co_cellvars}
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                inner = {n: v for n, v in captured.items() if n not in own}
                self._code(constant, home, inner)

    def _way(
        self,
        name: str,
        attributes: tuple[str, ...],
        code: CodeType,
        home: dict[str, Any],
        captured: dict[str, Any],
    ) -> Any:
        """Look at the value of a name, and of the attributes that follow the name of a module.

        Return the value that a call begins with, as far as it is known.
        """
        if name in code.co_cellvars or (name in code.co_freevars and name not in captured):
            self._attributes(attributes)  # a variable of an enclosing function, read as well
            return UNSET
        value = captured[name] if name in code.co_freevars else home.get(name, UNSET)
        if name not in code.co_freevars:
            self.names.append((home, name, value))
        if value is UNSET:
            known = vars(builtins)
            if name not in _BUILTINS or home.get("__builtins__") not in (known, builtins):
                raise _DoubtError
            self.names.append((known, name, known[name]))
        elif _is_known_function(value):
            self._librarys(value, value.__name__)
        elif not isinstance(value, ModuleType):
            self.value(value)
        while attributes and isinstance(value, ModuleType):
            attribute, attributes = attributes[0], attributes[1:]
            value = self._inside(value, attribute)
        if isinstance(value, ModuleType):
            raise _DoubtError
        while attributes and isinstance(value, Module):
            held = {**value._modules, **value._parameters, **value._buffers}
            if attributes[0] not in held:
                raise _DoubtError
            value, attributes = held[attributes[0]], attributes[1:]
        self._attributes(attributes)
        return UNSET if attributes else value

    def _attributes(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in _ATTRIBUTES:
                raise _DoubtError
            self.changes |= name in _CHANGING

    def _inside(self, module: ModuleType, name: str) -> Any:
        """Return the value of a module under a name."""
        value = vars(module).get(name, UNSET)
        self.names.append((vars(module), name, value))
        if module.__name__ == "forall" and name in _TRANSFORMS:
            self.value(value)
            return value
        if module.__name__.partition(".")[0] not in _HOMES:
            raise _DoubtError
        if not isinstance(value, ModuleType):
            self._librarys(value, name)
        return value

    def _librarys(self, value: Any, name: str) -> None:
        if _is_pure_stdlib(value):
            self.changes |= value.__name__ in _CHANGING
            return
        known = id(value) in _CLASSES or pure_functions.is_trusted_value(value) or _is_number(value)
        if not known or pure_functions.is_state_query(value) or not _is_pure_attribute(name):
            raise _DoubtError
        if id(value) in _IN_PLACE or any(part in name for part in _KEEPING):
            raise _DoubtError

    def value(self, value: Any) -> None:
        """Look at a value that a name or a container holds."""
        self.seen += 1
        if self.seen > _MOST:
            raise _DoubtError
        kind = type(value)
        if kind in PLAIN:
            self.tensors.append(value)
        elif kind in (tuple, list, dict, set, frozenset):
            if kind in (list, set):
                self.containers.append((value, [*value]))
            elif kind is dict:
                self.containers += [(value, [*value]), (value.values(), [*value.values()])]
            for inside in _iterate_container(value):
                self.value(inside)
        elif isinstance(value, Module):
            self._layers(value)
        elif _is_pure_stdlib(value):
            self._librarys(value, value.__name__)
        elif kind is FunctionType:
            if value.__name__ in _TRANSFORMS and is_ours(value):
                return
            if not _is_known_function(value):
                self.function(value)
            elif _count_harmless(value) < inf:  # its arguments are not known here
                raise _DoubtError
            else:
                self._librarys(value, value.__name__)
        elif kind is BuiltinFunctionType:
            self._builtin(value)
        elif not (_is_number(value) or id(value) in _CLASSES):
            raise _DoubtError

    def _layers(self, module: Module) -> None:
        """Look at torch's own layers, which keep nothing as long as they do not train."""
        for hooks in vars(torch.nn.modules.module).items():
            if hooks[0].startswith("_global") and isinstance(hooks[1], dict):
                self._is_to_be_empty(hooks[1])
        for part in module.modules():
            self.seen += 1
            kind, own = type(part), vars(part)
            name = kind.__name__
            if vars(torch.nn).get(name) is not kind or self.seen > _MOST:
                raise _DoubtError
            if name in _LAYERS or name.startswith(("Lazy", "Transformer", "Multihead")):
                raise _DoubtError
            if own["training"] and any(known in name for known in _TRAINING):
                raise _DoubtError
            if "forward" in own or own.get("inplace") or own.get("max_norm") is not None:
                raise _DoubtError
            self.names.append((vars(kind), "forward", vars(kind).get("forward", UNSET)))
            for attribute in ("training", "forward", "inplace", "max_norm"):
                self.names.append((own, attribute, own.get(attribute, UNSET)))
            for hooks in _HOOKS:
                self._is_to_be_empty(own[hooks])
            for held in (part._modules, part._parameters, part._buffers):
                self.layers.append((held.values(), [*held.values()]))
            self.tensors += [*part.parameters(recurse=False), *part.buffers(recurse=False)]

    def _is_to_be_empty(self, hooks: dict) -> None:
        if hooks:
            raise _DoubtError
        self.layers.append((hooks, []))

    def _builtin(self, value: Any) -> None:
        if getattr(builtins, value.__name__, None) is value and value.__name__ in _BUILTINS:
            return
        if pure_functions.is_known_function(value) or id(value) in _CALCULATING:
            self._librarys(value, value.__name__)
            return
        raise _DoubtError


# By their ids: a value need have no hash.
_CLASSES = frozenset(
    map(id, [torch.finfo, torch.iinfo, *(getattr(builtins, name) for name in _BUILTINS)])
)
_IN_PLACE = frozenset(
    id(f)
    for n, f in vars(operator).items()
    if n in ("setitem", "delitem", "iconcat", "call")
    or (n.startswith("i") and n[1:] in vars(operator))
)
_CALCULATING = frozenset(
    id(f)
    for home in (math, cmath, operator)
    for f in vars(home).values()
    if isinstance(f, BuiltinFunctionType)
)


def _is_pure_stdlib(value: Any) -> bool:
    """Return True for a pure function of Python's own library that nobody has replaced."""
    home, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if type(home) is not str or name not in _LIBRARIES.get(home, ()):
        return False
    return vars(sys.modules[home]).get(name) is value


def _is_number(value: Any) -> bool:
    return type(value) is bool or type(value) in pure_functions.WORDS


def _iterate_container(value: Any) -> Iterator[Any]:
    return iter([*value.keys(), *value.values()] if type(value) is dict else value)
