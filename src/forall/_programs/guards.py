"""What of Python's state a recorded call depends on, and whether it is still so.

A program knows nothing of Python. So what the function can be seen to reach (its closure, its
defaults, the object it is bound to, the globals that it or a function it calls names, and modules,
classes, containers and objects in these) is compared with each call, by identity. Of a method that
nothing calls, only that it is the same.
"""

from __future__ import annotations

import array
import functools
import gc
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import chain
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize

from forall._core.remembering import (
    UNSET,
    Unwatched,
    Weakly,
    contents,
    is_a_library,
    is_library,
    is_no_users,
    is_ours,
)
from forall._programs.holding import Looks, holding, if_any
from forall._programs.naming import Names
from forall._programs.ran import EVERYTHING
from forall._programs.things import (
    CACHED,
    CONTAINERS,
    LEAVES,
    MOST,
    TELLERS,
    VIEWS,
    WRAPPERS,
    is_array,
    is_hint,
    leads_to,
)
from forall._torch.names import attention_kernels
from forall._torch.trees import is_registered
from forall._torch.trusted import is_torchs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from forall._programs.ran import Everything

_MOST_SEEN = 50_000  # things, where it is known what runs, so most are functions that do not
_MOST_BYTES = 4096  # that are compared with each call


class Guards:
    """The state that a function can be seen to reach, as it is now."""

    def __init__(
        self, func: Callable, given: Iterable[Any] = (), ran: Everything = EVERYTHING
    ) -> None:
        self.ran = ran
        self.tensors: dict[int, torch.Tensor] = {}
        self.generators: list[torch.Generator] = []
        self.why: str | None = None  # what of it cannot be watched
        self._attributes: list[tuple[Any, str, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._missing: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._dicts: list[tuple[Any, tuple, tuple]] = []
        self._lists: list[tuple[Any, tuple]] = []
        self._answers: dict[Callable[[], Any], Any] = {}
        self._sets: list[tuple[Any, Any]] = []
        self._data: list[tuple[Any, bytes]] = []
        self._looks = Looks()
        self._holding: Callable[[], bool] | None = None
        self._modules: set[tuple[int, frozenset[str]]] = set()
        self._asked = Names(ran)
        # Of objects of which only some names are asked, and what holds such an object weakly.
        self._states: list[tuple[dict[str, Any], Weakly | None]] = []
        self._idle: list[FunctionType] = []  # that do not run
        self._kinds: dict[int, type] = {}  # of objects, and what these derive from
        self._held: dict[int, Any] = {}  # all that was met: no other takes its identity
        self._weakly: list[Weakly] = []
        self._others: list[Callable[[], bool]] = []
        self._left = [func, *given]  # to be looked at: objects hang in each other without end
        while self._left and self.why is None:
            value = self._left.pop()
            if not isinstance(value, LEAVES) and id(value) not in self._held:
                self._held[id(value)] = value
                self._look(value)
        self._of_objects()
        if self._asked.asks("__code__") or self._asked.asks("signature"):
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                self._attributes += [(func, name, getattr(func, name)) for func in self._idle]
        del self._asked, self._states  # with what nothing asks for, which may lead anywhere

    def hold(self) -> bool:
        """Whether everything is as it was."""
        if self._holding is None:
            sets, data, answers = self._sets, self._data, self._answers.items()
            self._holding = holding(
                self._attributes,
                self._names,
                self._missing,
                self._dicts,
                self._lists,
                self._looks,
                if_any(sets, lambda: all(known == copy for known, copy in sets))
                + if_any(data, lambda: all(_bytes(known) == copy for known, copy in data))
                + if_any(answers, lambda: all(_answer(ask) == known for ask, known in answers))
                + self._others,
            )
        return self._holding()

    def reached(self) -> Iterable[Any]:
        """All that was met, but for modules that code names."""
        return [*self._held.values(), *self._kinds.values()]

    def homes(self) -> list[dict[str, Any]]:
        """The globals of the functions that run."""
        functions = (f for f in self._held.values() if isinstance(f, FunctionType))
        found = {id(f.__globals__): f.__globals__ for f in functions if self.ran.holds(f.__code__)}
        return [*found.values()]

    def leads_back(self) -> bool:
        """Whether what is held here may hold an object that is to be held weakly."""
        return bool(self._weakly) and leads_to({id(w.of()) for w in self._weakly}, self._held)

    def watch_name(self, names: dict[str, Any], name: str, value: Any) -> None:
        """What a module of a library's has under a name, beyond what is watched otherwise."""
        self._names.append((names, name, value))
        self._holding = None

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are read by the program: they must stay what they are, but for their numbers."""
        self._looks, self._holding = Looks(tensors), None

    def watch_answer(self, question: Callable[[], Any]) -> None:
        """What torch tells of its state when the function asks."""
        self._answers[question] = _answer(question)
        self._holding = None

    def watch_attention(self) -> None:
        """The kernels that it may take, of which the program has one."""
        self._others.append(functools.partial(_may_take, attention_kernels()))
        self._holding = None

    def _look(self, value: Any) -> None:
        look = next((look for kinds, look in _LOOKS if isinstance(value, kinds)), None)
        if len(self._held) > (_MOST_SEEN if self.ran.seen else MOST):
            self.why = "the function reaches too much of Python's state to watch"
        elif look is not None:
            look(self, value)
        elif is_array(value):
            self._numbers(value)
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self.why = "the function reaches an iterator, and nothing tells how far that has come"
        elif not isinstance(value, _NOTHING) and not is_hint(value):
            self._object(value)
        if isinstance(value, CONTAINERS) and type(value) not in CONTAINERS:
            self._object(value)  # a class of the user's with entries: a NamedTuple, a dict

    def _tensor(self, value: torch.Tensor) -> None:
        self.tensors[id(value)] = value
        self._left.append(vars(value))  # attributes of the user's

    def _generator(self, value: torch.Generator) -> None:
        self.generators.append(value)

    def _dict(self, value: Mapping) -> None:
        self._entries(value)
        self._left += value.values()

    def _view(self, value: Any) -> None:
        self._left.append(value.mapping)

    def _list(self, value: Any) -> None:
        if not isinstance(value, tuple):
            self._lists.append((value, tuple(value)))
        self._left += value

    def _set(self, value: Any) -> None:
        self._sets.append((value, value.copy()))
        self._left += value

    def _context(self, value: ContextVar) -> None:
        now = value.get(UNSET)
        self._others.append(lambda: value.get(UNSET) is now)
        self._left.append(now)

    def _teller(self, value: Any) -> None:
        self._attributes.append((value, "__class__", type(value)))

    def _weak(self, value: Weakly) -> None:
        self._weakly.append(value)
        self._object(value.of(), value)

    def _entries(self, names: Mapping[Any, Any]) -> None:
        self._dicts.append((names, tuple(names), tuple(names.values())))

    def _wrapped(self, value: Any) -> None:
        self._left += self._wraps(value)

    def _wraps(self, value: Any) -> Iterator[Any]:
        """What leads to a function, and what goes with it."""
        if isinstance(value, functools.partial):
            return iter([value.func, value.args, value.keywords])
        if isinstance(value, property):
            return iter([value.fget, value.fset, value.fdel])
        if isinstance(value, BuiltinFunctionType):
            alone = isinstance(value.__self__, ModuleType)
            return chain([] if alone else [value.__self__], self._asked.by(value))
        more = self._asked.by_class() if type(value) is classmethod else ()
        return chain([value.__func__, getattr(value, "__self__", None)], more)

    def _cached(self, func: Any) -> None:
        """A function that keeps what it gave, and gives that while nothing is added or goes."""
        info = func.cache_info()
        known = info.misses, info.currsize
        self._others.append(lambda: (i := func.cache_info()) and (i.misses, i.currsize) == known)
        aside = (dict, type) if info.maxsize is not None else type  # with a bound, of links
        self._left += [x for x in gc.get_referents(func) if not isinstance(x, aside)]

    def _function(self, func: FunctionType) -> None:
        if is_torchs(func):
            return
        if is_ours(func):
            # Ours never change, nor what they are bound to.
            self._left += [*map(contents, func.__closure__ or ()), *func.__dict__.values()]
            return
        if not self.ran.holds(func.__code__):
            self._idle.append(func)
            return
        self._left += [*self._asked.by(func), *self._asked.in_code(func)]
        for name in ("__code__", "__defaults__", "__kwdefaults__", "__dict__"):
            value = getattr(func, name)
            self._attributes.append((func, name, value))
            self._left.append(value)
        for cell in func.__closure__ or ():
            value = contents(cell)
            self._attributes.append((cell, "cell_contents", value))
            self._led_to(value, self.ran.names(func.__code__))
        if not is_no_users(func):
            names, given = func.__globals__, vars(func).get("__forall_given__", ())
            wanted = [n for n in self.ran.globals(func.__code__) if n not in given]
            self._names += [(names, n, UNSET) for n in wanted if n not in names]
            self._named(names, wanted, self.ran.names(func.__code__))

    def _named(self, names: dict[str, Any], wanted: Iterable[str], inner: frozenset[str]) -> None:
        """What these names stand for; of a module of the user's, the ``inner`` names in it too."""
        for name in wanted:
            value = names.get(name, UNSET)
            if value is UNSET:
                continue
            self._names.append((names, name, value))
            self._led_to(value, inner)

    def _led_to(self, value: Any, inner: frozenset[str]) -> None:
        if not isinstance(value, ModuleType):
            self._left.append(value)
            return
        self._left += self._asked.by(value)
        if not is_library(value.__name__) and (id(value), inner) not in self._modules:
            self._modules.add((id(value), inner))
            self._named(vars(value), inner, inner)

    def _class(self, kind: type) -> None:
        self._left += [*self._asked.makers(kind), *self._asked.by(kind)]
        self._kind(kind)

    def _kind(self, kind: type) -> None:
        if id(kind) in self._kinds:
            return
        self._kinds[id(kind)] = kind
        if kind.__module__ == parametrize.__name__:
            self._names.append((vars(parametrize), "_cache_enabled", 0))
            if parametrize._cache_enabled:
                self.why = "it is within torch.nn.utils.parametrize.cached()"
        if is_no_users(kind):
            return
        names = vars(kind)
        self._attributes.append((kind, "__mro__", kind.__mro__))
        self._entries(names)
        self._left += self._asked.in_class(kind)
        for base in kind.__mro__:
            self._kind(base)

    def _object(self, thing: Any, weakly: Weakly | None = None) -> None:
        state = getattr(thing, "__dict__", None)
        if state is None and is_a_library(type(thing)):
            return
        row = (thing, "__class__") if weakly is None else (weakly, "of().__class__")
        self._attributes.append((*row, type(thing)))
        self._kind(type(thing))
        for kind in type(thing).__mro__:
            for name, found in () if is_a_library(kind) else vars(kind).items():
                if type(found) is MemberDescriptorType:
                    value = getattr(thing, name, UNSET)
                    self._attributes.append((thing, name, value))
                    self._left.append(value)
        if type(state) is dict:
            if weakly is None:
                self._attributes.append((thing, "__dict__", state))
            kind = type(thing)
            if is_registered(kind) or any(map(is_no_users, kind.__mro__[:-1])):
                self._left.append(state)  # that others may read by any name
            else:
                self._states.append((state, weakly))
                self._left += self._asked.in_object(state)

    def _of_objects(self) -> None:
        for state, weakly in self._states:
            if self._asked.any:
                self._entries(state)
                continue
            asked, missing = self._asked.asked(state)
            if weakly is None:
                self._names += [(state, name, state[name]) for name in asked]
                self._missing.append((state, missing))
            else:  # the state may hold what leads back to the object, under other names
                rows = [(weakly, f"of().__dict__[{name!r}]", state[name]) for name in asked]
                self._attributes += rows
                self._others.append(functools.partial(_has_none, weakly, missing))

    def _numbers(self, value: Any) -> None:
        """Numbers in memory, of numpy's or of Python's own."""
        data = _bytes(value)
        self._data.append((value, data))
        if len(data) > _MOST_BYTES or (is_array(value) and value.dtype.hasobject):
            self.why = "the function reaches an array whose numbers may change, too large to watch"


# In this order: some of these are others too.
_LOOKS: tuple[tuple[Any, Callable[[Guards, Any], None]], ...] = (
    (torch.Tensor, Guards._tensor),
    (torch.Generator, Guards._generator),
    ((dict, MappingProxyType), Guards._dict),
    (VIEWS, Guards._view),
    ((list, tuple, deque), Guards._list),
    ((set, frozenset), Guards._set),
    ((bytearray, memoryview, array.array), Guards._numbers),
    (FunctionType, Guards._function),
    (WRAPPERS, Guards._wrapped),
    (CACHED, Guards._cached),
    (ContextVar, Guards._context),
    (type, Guards._class),
    (TELLERS, Guards._teller),
    (Weakly, Guards._weak),
)
_NOTHING = (ModuleType, Unwatched)  # to be looked at


def _answer(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - of a torch without such devices
        return type(error)


def _may_take(kernels: tuple) -> bool:
    return attention_kernels() == kernels


def _has_none(weakly: Weakly, names: frozenset[str]) -> bool:
    return names.isdisjoint(vars(weakly.of()))


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytearray) else value.tobytes()
