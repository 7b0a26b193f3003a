"""Installation of forall in the place of torch.func, for code that cannot be edited.

The names of `torch.func` and `functorch`, `torch.vmap`, and the names of modules that have imported
one of these are rebound. `torch._functorch` stays as it is: Dynamo finds torch's transforms there,
and they call each other by these names.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from functools import cache
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from forall._api.debug_unwrap import debug_unwrap
from forall._api.functional_call import functional_call, stack_module_state
from forall._api.grad import grad, grad_and_value
from forall._api.jacobian import hessian, jacfwd, jacrev
from forall._api.jvp import jvp
from forall._api.linearize import linearize
from forall._api.vjp import vjp
from forall._api.vmap import vmap
from forall._compat import functorch_interop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Each is put in the place of what torch.func has under the same name.
OURS = (
    debug_unwrap,
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)


def install() -> tuple[str, ...]:
    """Put forall in the place of torch.func, until `uninstall`.

    Law: a program has the results that it has with each ``torch.func`` in it written ``forall``.

    What is replaced: the transforms in `torch.func` and `functorch`, `torch.vmap`, and each name of
    a loaded module that stands for one of them (``from torch.func import vmap``). Modules that are
    imported later find forall's. Not replaced: what is kept elsewhere, as in an attribute of an
    object or a default argument, and the private `torch._functorch`. All threads of the process
    are concerned, other processes are not, unless they are forked from it. Inside `torch.compile`
    and `torch.export` torch's own transforms do the work, with forall installed or without.

    A second call replaces what has been loaded since; one call of `uninstall` undoes both.

    Cost: a look at the names of all modules, 10 to 50 ms; calls cost what they cost by
    ``forall.vmap``.

    Returns:
        The names that this call replaced, as in ``"torch.func.vmap"``.

    Source: ours.

    Example:
        >>> names = forall.install()
        >>> "torch.func.grad" in names
        True
        >>> torch.func.vmap(lambda x: x.item() * 2)(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
        >>> forall.uninstall()
    """
    with _state.lock:
        _state.is_asked_for = True
        return _install_forall()


def uninstall() -> None:
    """Give torch.func its place back, where `install` put forall there.

    Names that something else has taken since are left alone. What modules have imported by name in
    the meantime is torch's again too; what objects keep is not. Inside ``with installed():`` that
    waits for the block's end. Without an `install` before, nothing happens.

    Cost: that of `install`.

    Source: ours.

    Example:
        >>> torchs = torch.func.vmap
        >>> names = forall.install()
        >>> torch.func.vmap is torchs
        False
        >>> forall.uninstall()
        >>> torch.func.vmap is torchs
        True
    """
    with _state.lock:
        _state.is_asked_for = False
        _restore_torch_unless_needed()


@contextlib.contextmanager
def installed() -> Iterator[tuple[str, ...]]:
    """A block in which forall is in the place of torch.func, as `install` puts it there.

    Blocks nest, and those of several threads may overlap: the last one to end gives torch.func its
    place back, also where it ends by an exception.

    Cost: that of `install` and `uninstall`.

    Returns:
        A context manager, or a decorator; ``as`` gives the names that were replaced.

    Source: ours.

    Example:
        >>> def doubled(xs):                        # as in a library
        ...     return torch.vmap(lambda x: x.item() * 2)(xs)
        >>> with forall.installed():
        ...     doubled(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    with _state.lock:
        _state.blocks += 1
    try:
        with _state.lock:
            names = _install_forall()
        yield names
    finally:
        with _state.lock:
            _state.blocks -= 1
            _restore_torch_unless_needed()


class _Installation:
    """The requests for forall to be installed, and whether it is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_asked_for = False  # by `install`
        self.blocks = 0  # of `installed` that have begun and not ended
        self.is_there = False  # True while forall is installed


_state = _Installation()


def _install_forall() -> tuple[str, ...]:
    _state.is_there = True
    return _rebind_names({id(torchs): ours for torchs, ours in _pair_functions()}, _may_be_rebound)


def _restore_torch_unless_needed() -> None:
    if _state.is_there and not _state.is_asked_for and not _state.blocks:
        _rebind_names({id(ours): torchs for torchs, ours in _pair_functions()}, _is_outside_forall)
        _state.is_there = False


@cache
def _pair_functions() -> tuple[tuple[Any, Any], ...]:
    """Return torch's functions, each with the one of forall's that takes its place.

    Forall's are copies: a name bound to a copy was put there, or imported from there. Names that
    stand for ``forall.vmap`` itself are the user's, and stay when torch's functions come back.
    """
    pairs = []
    for ours in OURS:
        name = ours.__name__
        pairs.append((functorch_interop.OWN[name], _copy(ours, "torch.func")))
        older = getattr(_import_functorch(), name, None)  # one that warns, and calls torch.func's
        if isinstance(older, FunctionType) and older is not functorch_interop.OWN[name]:
            pairs.append((older, _copy(ours, "functorch")))
    return tuple(pairs)


def _import_functorch() -> ModuleType | None:
    """Return the package that torch.func has come from, which torch may leave out one day."""
    try:
        return importlib.import_module("functorch")
    except ImportError:
        return None


def _copy(ours: Any, module: str) -> Any:
    """Return a function with the same code, to be found (by pickle) where it is put."""
    made = FunctionType(
        ours.__code__, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__
    )
    made.__kwdefaults__ = ours.__kwdefaults__
    made.__annotations__ = ours.__annotations__
    made.__doc__ = ours.__doc__
    made.__dict__.update(ours.__dict__)
    made.__qualname__, made.__module__ = ours.__qualname__, module
    return made


def _may_be_rebound(module: str) -> bool:
    """Return True if names of a module may be rebound: torch's private modules call each other."""
    if module in ("torch", "torch.func", "functorch"):
        return True
    return module.partition(".")[0] not in ("torch", "functorch", "forall")


def _is_outside_forall(module: str) -> bool:
    return module.partition(".")[0] != "forall"


def _rebind_names(new: dict[int, Any], is_wanted: Callable[[str], bool]) -> tuple[str, ...]:
    """Rebind names in all modules from these objects, by id, to others: all of them, or none."""
    found = []
    for module, names in _iterate_namespaces():
        if is_wanted(module):
            now = names.copy()  # other threads may be importing
            if not new.keys().isdisjoint(map(id, now.values())):
                found += [(module, names, n, old) for n, old in now.items() if id(old) in new]
    done = []
    try:
        for place in found:
            _, names, name, old = place
            done.append(place)
            names[name] = new[id(old)]
    except BaseException:  # an interrupt
        for _, names, name, old in done:
            names[name] = old
        raise
    return tuple(sorted({f"{module}.{name}" for module, _, name, _ in found}))


def _iterate_namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the namespace of each module that is loaded."""
    seen = set()  # a module may have two names
    for name, module in sys.modules.copy().items():
        if issubclass(type(module), ModuleType):
            names = object.__getattribute__(module, "__dict__")  # a lazy one stays unloaded
            if id(names) not in seen:
                seen.add(id(names))
                yield name, names
