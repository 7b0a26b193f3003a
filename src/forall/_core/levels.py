"""The stack of active transforms (levels), and lifting: a tensor from outside enters a level.

NOTE [inside and outside]
    One of any two levels is *outside* the other. If the second was entered while the first was
    active, the first is outside; otherwise the second is. The latter case matters when an ended
    level acts again, because a backward pass runs through its graph. The pass carries values of
    the active level as cotangents into the ended level's operators. There the ended level wraps
    the active one, and this order remains when both have ended.

    Code that is recomputed in such a pass enters its levels in their original order. They count as
    entered before the levels that have been entered since, so they wrap those too.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd import forward_ad

from forall._compat import exception_safety, parallel_modules
from forall._compat.dispatch_state import (
    functions_are_off,
    functions_off,
    has_users_tangents,
    in_torch_func,
    is_functorch_wrapped,
    is_mode_on,
    make_plain_alias,
    outside_torch_func,
)
from forall._compat.documented_error import documented_error
from forall._compat.exception_safety import contextmanager, list_dispatch_modes
from forall._compat.jagged_layout import (
    Jagged,
    get_raw_rows,
    replace_raw_rows,
    replace_rows,
)
from forall._compat.private_api import pop_mode, push_mode
from forall._compat.wrapper_tensor import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from forall._core.errors import CallOrigin
    from forall._core.named_axes import Axis

    Function = Callable[..., tuple[torch.Tensor, ...]]


_numbers = count(1)


class EntryPoint:
    """The point at which a level was entered, after all others or just ``before`` one.

    ``number`` orders levels, ``room`` is left below it for others. ``parent`` is the level just
    outside at that time, ``around`` are all levels outside.
    """

    __slots__ = ("around", "number", "parent", "room")

    number: Any
    room: Any

    def __init__(self, parent: Level | None, before: EntryPoint | None) -> None:
        self.parent = parent
        self.around = _levels_around(parent, stack.place)
        n = next(_numbers)
        if before is None:
            self.number, self.room = n, 1
        else:
            from fractions import Fraction  # few need it

            below = before.room * Fraction(1, n + 1)
            self.number, self.room = before.number - below, below / n


class LiftCache(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """The tensors that were lifted to an active level, by identity, each with its stand-in.

    After the level's end ``past`` has weak references to both. A backward pass that runs then, and
    captures the tensor again, finds the same stand-in through them.
    """

    past: Mapping[int, tuple[ref[torch.Tensor], ref[torch.Tensor]]] = MappingProxyType({})

    def release(self) -> None:
        """Release the tensors with their stand-ins, except for weak references."""
        with functions_off():  # who asks a value of an ended level has what is left of it made
            self.past = {i: (ref(t), ref(s)) for i, (t, s) in self.items() if s.requires_grad}
        self.clear()

    def find_past(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the stand-in of a tensor in an ended call, if it is still alive."""
        of, stand_in = self.past.get(id(tensor), (NoneType, NoneType))
        return stand_in() if of() is tensor and torch.is_grad_enabled() else None


class Level:
    """One active transform. Subclasses define how a tensor from outside becomes their value."""

    def __init__(self, parent: Level | None) -> None:
        self.entry = EntryPoint(parent, stack.since and stack.since.entry)
        self.parent = parent
        self.active = False
        self.lift_cache = LiftCache()

    # The sub-level whose examples run now, where they have diverged; None for all of them. A level
    # must not hold itself: that would keep it alive, with all that its values hold, after its end.
    sub_level: Level | None = None

    @property
    def root(self) -> Level:
        """The level that owns the examples: for a sub-level its root, else the level itself."""
        return self

    @property
    def acting_level(self) -> Level:
        """The level that acts for this root now: a sub-level, or the root itself."""
        return self.sub_level or self

    # The user's call that made the level, if there is one.
    origin: CallOrigin | None = None

    # The named axis whose examples the level's are, if the call has named one.
    axis: Axis | None = None

    # True if values are valid during a call only, so that they can escape from it.
    ends = True

    # True if a derivative is recorded on the values themselves, so that a custom Function must be
    # applied at this level.
    records_on_value = False
    # True if the level decides how random numbers are drawn.
    draws = False

    def take_next_draw(self, scope: Any) -> tuple:
        """Return a scope's key, the number of the next draw, and the count after it.

        Only a level that ``draws`` is asked.
        """
        raise NotImplementedError

    def restrict_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Restrict a value of the root to the examples of this sub-level."""
        raise NotImplementedError

    def apply_further_out(self, h: Function, args: tuple) -> tuple:
        """Apply ``h`` to values of this level: see `apply_at_level`."""
        raise NotImplementedError

    def lift_one_level(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lift ``tensor``, a value of the level just outside, to a value of this level."""
        raise NotImplementedError

    def call_numpy(self, func: Any, args: tuple, kwargs: dict, /) -> Any:
        """Run a numpy function that torch's own numpy layer does not have."""
        name = getattr(func, "__name__", func)
        raise documented_error(NotImplementedError, "numpy")(
            f"np.{name}: numpy has no derivative of this for a value with a tangent.\n"
            "Use torch's function."
        )

    def fallback_value(self, tensor: Wrapper) -> torch.Tensor:
        """Return the fallback of an escaped value, without its history; itself if it has none."""
        raise NotImplementedError

    def fallback_with_history(self, tensor: Any) -> torch.Tensor:
        """Return the fallback of an escaped value with its history, for the user's further use."""
        return self.fallback_value(tensor)

    def fallback_gradient(self, gradient: Any) -> torch.Tensor:
        """Return the fallback of a gradient of a variable that was made at this level."""
        return self.fallback_value(gradient)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments with captured tensors lifted: each is shared by all examples."""
        return (args, kwargs) if self.parent is None else self.parent.share_captured(args, kwargs)

    def apply_to_inner(self, tensors: list, f: Function) -> torch.Tensor:
        """Apply ``f`` to the inner values of these wrappers, and wrap its result."""
        raise NotImplementedError

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator on values of this level."""
        raise NotImplementedError

    def explain_error(
        self, error: Exception, func: Any, args: tuple, kwargs: dict, /
    ) -> BaseException:
        """Return the exception to raise for a failed operator; vmap adds the failing example."""
        return (
            error if self.parent is None else self.parent.explain_error(error, func, args, kwargs)
        )

    def raise_explained(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise the error by which the level explains an operator's failure.

        Return if that is ``error`` itself, so that the caller raises it. Return also within the
        handler of another operator, whose own failure will be explained.
        """
        theirs = error if functions_are_off() else self.explain_error(error, func, args, kwargs)
        if theirs is not error:
            raise theirs from None

    def run_after_exit(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator of the user's on values of this level after its end."""
        raise NotImplementedError

    # True if the level's function mode lifts the tensors that its examples capture.
    shares = False

    def carries_tangent(self, tensor: Wrapper) -> bool:
        """True if a value of this level has a tangent."""
        return False

    def is_outside(self, other: Level) -> bool:
        """True if this level is outside ``other``: see NOTE [inside and outside]."""
        mine, theirs = self.entry, other.entry
        if mine.number < theirs.number:
            return self.root in theirs.around
        return self.root is not other.root and other.root not in mine.around


class _Stack(exception_safety.RestoredState):
    top: Level | None = None
    diverged = 0  # how many levels have a sub-level that acts for them
    ever_parted = False
    again = 0  # the depth of recomputations for such a sub-level
    recomputes = False  # whether code of a forward pass is recomputed, for whichever examples
    reversing = 0  # how many calls and passes of ours run with torch's autograd on
    run: Any = None  # the run that makes variables now, see `_autodiff.reverse_mode.Run`
    # Recomputed code counts as run inside of ``place``, and before ``since`` was entered.
    place: Level | None = None
    since: Level | None = None
    listening: tuple = ()  # to each read of a tensor's value, see `concretize_listeners`
    asked = False  # whether Python has read any value since a call began
    late: Callable[[], None] | None = None  # raises where a call that is tried takes too long


stack = _Stack.make_instance()


def top() -> Level | None:
    """Return the innermost active level of this thread."""
    return stack.top


_NONE: frozenset[Level] = frozenset()


def _levels_around(*places: Level | None) -> frozenset[Level]:
    """Return these levels, and the levels that they are inside of."""
    around = _NONE
    for level in places:
        if level is not None:
            around |= level.entry.around | {level.root}
    return around


def levels_around_current() -> frozenset[Level]:
    """Return the levels around the running code; for recomputed code also ended levels."""
    return _levels_around(stack.top, stack.place)


class activate_level:
    """Context in which a level is active: its transform runs the user's function in it."""

    __slots__ = ("caches", "level", "previous")

    def __init__(self, level: Level) -> None:
        self.level = level

    def __enter__(self) -> Level:
        if parallel_modules.needs_patch():
            parallel_modules.patch(run_outside_all, is_recorded_on_value)
        # Autocast would keep casts that are values of the level, and use them when it has ended.
        self.caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.previous = stack.top
        self.level.active = True
        stack.top = self.level
        return self.level

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self.caches)
        stack.top = self.previous
        self.level.active = False
        if self.level.lift_cache:
            self.level.lift_cache.release()


def _abandon(left: list, _: int) -> None:
    """End the levels that an exception between two instructions has left active."""
    inner = stack.top
    while inner is not None:
        left.append(inner.root)
        inner = inner.parent
    for level in left:
        if isinstance(level, Level) and level.active and not is_mode_on(level):
            level.active, level.sub_level = False, None
            level.lift_cache.clear()


exception_safety.PUT_BACK.append(_abandon)


def complete_gradient(t: torch.Tensor | None) -> torch.Tensor | None:
    """Extend a gradient of a sub-level's examples to all examples, with zeros for the others."""
    inner = t
    while isinstance(inner, Wrapper):
        level = inner.level
        if level.acting_level is not level and level.active:
            return complete_gradient(level.complete_gradient_for(t, level.acting_level))
        inner = inner.value
    return t


def set_acting_level(root: Level, level: Level) -> None:
    """Let ``level``, the root or one of its sub-levels, act for the root."""
    was, root.sub_level = root.acting_level, None if level is root else level
    if was is level:
        return
    stack.diverged += (level is not root) - (was is not root)
    stack.ever_parted = True
    inner = stack.top
    if inner is was:
        stack.top = level
        return
    while inner is not None and inner.parent is not was:
        inner = inner.parent
    if inner is not None:
        inner.root.parent = level


def levels_in(args: tuple, kwargs: dict) -> list[Level]:
    """Return the levels of all wrappers among the arguments, and in lists among them."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Wrapper):
            found.append(a.level)
        elif isinstance(a, (list, tuple)):
            found.extend(b.level for b in a if isinstance(b, Wrapper))
    return found


def find_innermost(levels: Iterable[Level]) -> Level:
    """Return the innermost of these levels: the first to act on an operator on their values."""
    best = None
    for level in levels:
        if best is None or best.is_outside(level):
            best = level
    assert best is not None  # noqa: S101 - callers found at least one
    return best


def level_of(tensor: torch.Tensor) -> Level | None:
    """Return the level that a tensor belongs to; None for an ordinary tensor."""
    if type(tensor) is Jagged:
        tensor = get_raw_rows(tensor)
    return tensor.level if isinstance(tensor, Wrapper) else None


def is_from_outside(tensor: torch.Tensor, level: Level) -> bool:
    """True if ``tensor`` is from outside ``level``: an ordinary tensor or an outer level's value.

    A tensor that a transform of torch.func wrapped is not: that runs inside all levels of ours.
    """
    own = level_of(tensor)
    if own is None:
        return not is_functorch_wrapped(tensor)
    return own.root is not level.root and own.is_outside(level)


def lift(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """Lift ``tensor`` to a value of ``level``, through every level in between, once per level.

    The levels in between matter: a tensor that requires grad must be recorded in each level's own
    autograd graph on the way, or a derivative taken further out would miss it.
    """
    if level is None or not is_from_outside(tensor, level):
        return tensor
    if level.root is not level:  # once for all examples, so that there is one derivative
        return level.restrict_value(lift(tensor, level.root))
    cache = level.lift_cache
    found = cache.get(id(tensor))
    if found is None:
        if in_torch_func():
            with outside_torch_func():
                return lift(tensor, level)
        if cache.past and (stand_in := cache.find_past(tensor)) is not None:
            return stand_in
        with functions_off():
            if type(tensor) is Jagged:
                lifted = replace_rows(tensor, lift(tensor.values(), level))
            else:
                parent = level.entry.parent
                below = tensor if parent is None else lift(tensor, parent)
                lifted = level.lift_one_level(below)
        if (
            not level.active  # after its end nothing clears the cache
            or lifted.requires_grad != tensor.requires_grad  # under no_grad it would stay cut
        ):
            return lifted
        found = cache[id(tensor)] = (tensor, lifted)
    return found[1]


def graph_free(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of ``tensor`` without autograd history, but with its tangents.

    ``detach`` would cut the tangents, and under a level it would run the level's operators.
    """
    if isinstance(tensor, Wrapper):
        return tensor.graph_free()
    if type(tensor) is Jagged and isinstance(get_raw_rows(tensor), Wrapper):
        return replace_raw_rows(tensor, graph_free(get_raw_rows(tensor)))
    if not tensor.requires_grad and tensor.grad_fn is None:
        return tensor
    return make_plain_alias(tensor)


def alias_for_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return the alias that autograd's own detach gets when it saves or unpacks a tensor.

    A tensor of another level must not be wrapped by ours: autograd would put the tensor's history
    on our wrapper, where its own level does not see it.
    """
    return tensor.graph_free() if isinstance(tensor, Wrapper) else make_plain_alias(tensor)


class run_outside:
    """Context that runs code just outside ``level``: its mode, and those of inner levels, are off.

    The mode of a level that has ended, which has ``stays`` set, remains on: it must see all user
    code.
    """

    __slots__ = ("level", "modes", "stay", "top")

    def __init__(self, level: Level) -> None:
        self.level = level

    def __enter__(self) -> None:
        self.modes = []
        self.top = stack.top
        if self.level.active:
            # While the level itself runs an operator, torch has popped its mode and the inner ones.
            inside = is_mode_on(self.level.root)
            while inside:
                mode = pop_mode(None)
                self.modes.append(mode)
                inside = mode is not self.level.root
            stack.top = self.level.parent
        self.stay = [mode for mode in self.modes if getattr(mode, "stays", False)]
        for mode in reversed(self.stay):
            push_mode(mode)

    def __exit__(self, *_: object) -> None:
        for _mode in self.stay:
            pop_mode(None)
        while self.modes:
            push_mode(self.modes.pop())
        stack.top = self.top


@contextmanager
def run_outside_all() -> Iterator[None]:
    """Context that runs code outside of every level, ended ones too, with function modes off."""
    level = stack.top
    while level is not None and level.parent is not None:
        level = level.parent
    with functions_off(), nullcontext() if level is None else run_outside(level):
        modes = []
        while any(getattr(mode, "stays", False) for mode in list_dispatch_modes()):
            modes.append(pop_mode(None))
        others = [mode for mode in modes if not getattr(mode, "stays", False)]
        for mode in reversed(others):
            push_mode(mode)
        try:
            yield
        finally:
            for _mode in others:
                pop_mode(None)
            for mode in reversed(modes):
                push_mode(mode)


def is_recorded_on_value(tensor: torch.Tensor) -> bool:
    """True if a level that records a derivative on its values has wrapped this one."""
    while isinstance(tensor, Wrapper):
        if tensor.level.records_on_value:
            return True
        known = vars(tensor).get(
            "records_on_value"
        )  # a lazy tensor's; reading its value would materialize it
        if known is not None:
            return known
        tensor = tensor.value
    return False


def has_any_tangent(tensor: torch.Tensor) -> bool:
    """True if this value has a tangent at any level."""
    while isinstance(tensor, Wrapper):
        if tensor.level.carries_tangent(tensor):
            return True
        tensor = tensor.value
    return False


def may_carry_tangents() -> bool:
    """True if forward-mode differentiation is active around the running code."""
    level = stack.top
    while level is not None:
        if level.records_on_value:
            return True
        level = level.parent
    return forward_ad._current_level >= 0 and has_users_tangents()


def apply_at_level(level: Level | None, h: Function, args: tuple) -> tuple:
    """Apply ``h`` to values of ``level``, running it so far out that its operators meet no tangent.

    Levels on the way transform ``h``: a jvp level derives the tangent from its pull-back, a vmap
    level makes it a function of stacks.
    """
    if level is None or not any(is_recorded_on_value(a) for a in args):
        return h(*args)
    return level.apply_further_out(h, args)


def map_with_rule(h: Function, make: Callable[[Function], Function]) -> Function:
    """Return ``make(h)`` with the attributes of ``h``; its tangent rule is made anew likewise."""
    made = make(h)
    vars(made).update({**vars(h), **vars(made)})
    rule = getattr(h, "rule", None)
    if rule is not None:
        vars(made)["rule"] = lambda *how: make(rule(*how))
    return made


def find_innermost_of(args: tuple) -> Level | None:
    """Return the innermost level of these values; None if no value has a level."""
    levels = [a.level for a in args if isinstance(a, Wrapper)]
    return find_innermost(levels) if levels else None
