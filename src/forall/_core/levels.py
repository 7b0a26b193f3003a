"""The stack of active transforms, and how a tensor from outside is brought up to one.

NOTE [inside and outside]
    Of two levels one is *outside*: where one was entered while the other was active, the earlier
    one; else the later one. The second half matters when a level that has ended acts again,
    because a backward pass runs through what it recorded: the pass carries the running level's
    values as cotangents into the ended level's operators, so there the ended level wraps the
    running one, and so it stays when both have ended.

    Code that runs once more in such a pass enters its levels as it did when it first ran: they
    count as entered before the levels that have been entered since, and so they wrap those too.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from types import NoneType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from forall._compat import exception_safety, fsdp
from forall._compat.dispatch_state import (
    functions_are_off,
    functions_off,
    in_torch_func,
    is_mode_on,
    outside_torch_func,
    plain_alias,
    torch_funcs,
)
from forall._compat.exception_safety import contextmanager
from forall._compat.jagged_layout import (
    Jagged,
    held_rows,
    with_held_rows,
    with_rows,
)
from forall._compat.private_api import pop_mode, push_mode
from forall._compat.wrapper_tensor import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forall._core.errors import Origin

    Function = Callable[..., tuple[torch.Tensor, ...]]


_numbers = count(1)


def numbered(before: Level | None) -> tuple[Any, Any]:
    """A new level's place, after all others or just ``before`` one; and the room below it."""
    n = next(_numbers)
    if before is None:
        return n, 1
    from fractions import Fraction  # few need it

    below = before.room * Fraction(1, n + 1)
    return before.number - below, below / n


class Level:
    """One active transform. Subclasses say how a tensor from outside becomes a value of theirs."""

    def __init__(self, parent: Level | None) -> None:
        self.parent = self.born_in = parent
        self.number, self.room = numbered(stack.since)
        self.around = _around(parent, stack.place)
        self.active = False
        self.lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # What they were, as long as others keep them: known when the call has ended.
        self.stood_in: dict[int, tuple[ref[torch.Tensor], ref[torch.Tensor]]] = {}

    # For whom of its examples code runs where they have parted; None for all of them. A level must
    # not hold itself, which would keep it, and all that its values hold, beyond its end.
    part: Level | None = None

    @property
    def root(self) -> Level:
        """The level whose examples these are: itself, but for a part of another's."""
        return self

    @property
    def acting(self) -> Level:
        """The level that stands in the root's place now."""
        return self.part or self

    # The user's call that made the level, where there is one.
    origin: Origin | None = None

    # Whether its values are for the time of a call, so that they can be used too late.
    ends = True

    # Whether a derivative hangs on the values, so that a custom Function must be taken to them.
    peels = False
    # Whether random numbers drawn at this level are its own.
    draws = False

    def some(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a value of the root is for the examples of this part of it."""
        raise NotImplementedError

    def push(self, h: Function, args: tuple) -> tuple:
        """`at` for values of this level."""
        raise NotImplementedError

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """This level's stand-in for ``tensor``, a value of the level just outside."""
        raise NotImplementedError

    def by_numpy(self, func: Any, args: tuple, kwargs: dict, /) -> Any:
        """A function of numpy's that torch's own numpy layer cannot answer."""
        name = getattr(func, "__name__", func)
        raise NotImplementedError(
            f"np.{name}: numpy has no derivative of this for a value with a tangent.\n"
            "Use torch's function."
        )

    def afterwards(self, tensor: Wrapper) -> torch.Tensor:
        """What is left of a value when the level has ended; itself, if there is no one answer."""
        raise NotImplementedError

    def kept(self, tensor: Any) -> torch.Tensor:
        """The same with its history, as the user goes on with it."""
        return self.afterwards(tensor)

    def gathered(self, gradient: Any) -> torch.Tensor:
        """What is left of the gradient of a variable that was made at this level."""
        return self.afterwards(gradient)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with what the examples capture in its shared form."""
        return (args, kwargs) if self.parent is None else self.parent.share_captured(args, kwargs)

    def under(self, tensors: list, f: Function) -> torch.Tensor:
        """``f`` of what these values of the level are one level down, as a value of the level."""
        raise NotImplementedError

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operator on values of this level."""
        raise NotImplementedError

    def told(self, error: Exception, func: Any, args: tuple, kwargs: dict, /) -> BaseException:
        """What to raise where an operator failed: a level of examples says for which one."""
        return error if self.parent is None else self.parent.told(error, func, args, kwargs)

    def raise_told(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise what the level tells of an operator's failure, unless that is ``error`` itself.

        Nothing is raised within a handler's work: the operator that it explains will tell.
        """
        theirs = error if functions_are_off() else self.told(error, func, args, kwargs)
        if theirs is not error:
            raise theirs from None

    def run_afterwards(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operator of the user's when the level has ended."""
        raise NotImplementedError

    # Whether its function mode is to share what its examples capture.
    shares = False

    def moves(self, tensor: Wrapper) -> bool:
        """Whether a value of this level has a tangent."""
        return False

    def is_outside(self, other: Level) -> bool:
        """See NOTE [inside and outside]."""
        if self.number < other.number:
            return self.root in other.around
        return self.root is not other.root and other.root not in self.around


class _Stack(exception_safety.Here):
    top: Level | None = None
    parted = 0  # how many levels have a part of their examples act
    ever_parted = False
    again = 0  # how often code of a forward pass runs once more, for such a part
    recomputes = False  # whether code of a forward pass runs once more, for whichever examples
    reversing = 0  # how many calls and passes of ours run with torch's autograd on
    run: Any = None  # whose variables are made now, see `_autodiff.reverse_mode.Run`
    # What runs once more counts as run inside of ``place``, and before ``since`` was entered.
    place: Level | None = None
    since: Level | None = None
    listening: tuple = ()  # who hears of each question of Python's, see `questions`
    asked = False  # whether Python has asked any since a call began
    late: Callable[[], None] | None = None  # raises where a call that is tried takes too long


stack = _Stack.made()


def top() -> Level | None:
    """The innermost active level of this thread."""
    return stack.top


_NONE: frozenset[Level] = frozenset()


def _around(*places: Level | None) -> frozenset[Level]:
    """The levels at these places, and those that they are inside of."""
    around = _NONE
    for level in places:
        if level is not None:
            around |= level.around | {level.root}
    return around


def around_what_runs() -> frozenset[Level]:
    """The levels that the code which runs now is inside of, ended ones too if it runs once more."""
    return _around(stack.top, stack.place)


class entered:
    """A level is active while its transform runs the user's function."""

    __slots__ = ("caches", "level", "previous")

    def __init__(self, level: Level) -> None:
        self.level = level

    def __enter__(self) -> Level:
        if fsdp.needs_patch():
            fsdp.patch(outside_all)
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
        if self.level.lifted:
            _let_go(self.level)


def _abandon(left: list, _: int) -> None:
    """End the levels that an exception between two instructions has left active."""
    inner = stack.top
    while inner is not None:
        left.append(inner.root)
        inner = inner.parent
    for level in left:
        if isinstance(level, Level) and level.active and not is_mode_on(level):
            level.active, level.part = False, None
            level.lifted.clear()


exception_safety.PUT_BACK.append(_abandon)


def _let_go(level: Level) -> None:
    """No tensor is held any longer for what stands in its place.

    But a backward of the user's may have saved that, and captures the tensor again when it runs.
    """
    lifted = level.lifted.items()
    level.stood_in = {i: (ref(t), ref(s)) for i, (t, s) in lifted if s.requires_grad}
    level.lifted.clear()


def _stood_in(tensor: torch.Tensor, level: Level) -> torch.Tensor | None:
    """What stood for a tensor in a call that has ended, where somebody has kept it."""
    of, stand_in = level.stood_in.get(id(tensor), (NoneType, NoneType))
    return stand_in() if of() is tensor and torch.is_grad_enabled() else None


def complete(t: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient of some of the examples that run as one of them all: zero for the others."""
    inner = t
    while isinstance(inner, Wrapper):
        level = inner.level
        if level.acting is not level and level.active:
            return complete(level.completed(t, level.acting))
        inner = inner.value
    return t


def act(root: Level, level: Level) -> None:
    """Let ``level``, the root or a part of its examples, stand in the root's place."""
    was, root.part = root.acting, None if level is root else level
    if was is level:
        return
    stack.parted += (level is not root) - (was is not root)
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
    """The levels of all wrappers among the arguments, and in lists among them."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Wrapper):
            found.append(a.level)
        elif isinstance(a, (list, tuple)):
            found.extend(b.level for b in a if isinstance(b, Wrapper))
    return found


def innermost(levels: Iterable[Level]) -> Level:
    """The level that acts first on an operator that meets values of all of these."""
    best = None
    for level in levels:
        if best is None or best.is_outside(level):
            best = level
    assert best is not None  # noqa: S101 - callers found at least one
    return best


def level_of(tensor: torch.Tensor) -> Level | None:
    """The level a tensor belongs to; None for an ordinary one."""
    if type(tensor) is Jagged:
        tensor = held_rows(tensor)
    return tensor.level if isinstance(tensor, Wrapper) else None


def is_from_outside(tensor: torch.Tensor, level: Level) -> bool:
    """Whether ``tensor`` was there before ``level``: an ordinary tensor or an outer level's.

    One that a transform of torch.func wrapped was not: such a transform runs inside all of ours.
    """
    own = level_of(tensor)
    if own is None:
        return not torch_funcs(tensor)
    return own.root is not level.root and own.is_outside(level)


def lift(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """``tensor`` as a value of ``level``, through every level in between, once per level.

    In between matters: a tensor that requires grad must be recorded by each level's own
    autograd graph on the way, or a derivative taken further out would miss it.
    """
    if level is None or not is_from_outside(tensor, level):
        return tensor
    if level.root is not level:  # once for all examples, so that there is one derivative
        return level.some(lift(tensor, level.root))
    found = level.lifted.get(id(tensor))
    if found is None:
        if in_torch_func():
            with outside_torch_func():
                return lift(tensor, level)
        if level.stood_in and (stood_in := _stood_in(tensor, level)) is not None:
            return stood_in
        with functions_off():
            if type(tensor) is Jagged:
                lifted = with_rows(tensor, lift(tensor.values(), level))
            else:
                lifted = level.share(lift(tensor, level.born_in))
        if (
            not level.active  # after its end nothing clears the cache
            or lifted.requires_grad != tensor.requires_grad  # under no_grad it would stay cut
        ):
            return lifted
        found = level.lifted[id(tensor)] = (tensor, lifted)
    return found[1]


def graph_free(tensor: torch.Tensor) -> torch.Tensor:
    """A second name for ``tensor`` without autograd history, tangents kept.

    ``detach`` would cut tangents, and under a level it would run its operators.
    """
    if isinstance(tensor, Wrapper):
        return tensor.graph_free()
    if type(tensor) is Jagged and isinstance(held_rows(tensor), Wrapper):
        return with_held_rows(tensor, graph_free(held_rows(tensor)))
    if not tensor.requires_grad and tensor.grad_fn is None:
        return tensor
    return plain_alias(tensor)


def second_name(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd gets when it saves a tensor or takes it out again, by a detach of its own.

    A tensor of another level must not become one of ours: autograd would hang the history that
    belongs to it on our wrapper, where the level it comes from does not see it.
    """
    return tensor.graph_free() if isinstance(tensor, Wrapper) else plain_alias(tensor)


class outside:
    """Act as code just outside ``level`` does: its modes, and those of levels in it, are off.

    A mode that is no level's and ``stays`` goes on: what it sees is the user's code all the same.
    """

    __slots__ = ("level", "modes", "stay", "top")

    def __init__(self, level: Level) -> None:
        self.level = level

    def __enter__(self) -> None:
        self.modes = []
        self.top = stack.top
        if self.level.active:
            # Where the level itself runs an operator, torch has taken its mode off, and the inner.
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
def outside_all() -> Iterator[None]:
    """Act as code outside of every level does, and past function modes."""
    level = stack.top
    while level is not None and level.parent is not None:
        level = level.parent
    with functions_off(), nullcontext() if level is None else outside(level):
        yield


def peels(tensor: torch.Tensor) -> bool:
    """Whether a level whose derivative hangs on its values has a part in this one."""
    while isinstance(tensor, Wrapper):
        if tensor.level.peels:
            return True
        known = vars(tensor).get("peels")  # of what is not made yet, and would be if it were asked
        if known is not None:
            return known
        tensor = tensor.value
    return False


def moves(tensor: torch.Tensor) -> bool:
    """Whether this value has a tangent at any level."""
    while isinstance(tensor, Wrapper):
        if tensor.level.moves(tensor):
            return True
        tensor = tensor.value
    return False


def at(level: Level | None, h: Function, args: tuple) -> tuple:
    """``h`` on values of ``level``, run so far out that no operator in it meets a tangent.

    Levels on the way take ``h`` apart: a jvp level derives the tangent from its pull-back, a vmap
    level makes it a function of stacks.
    """
    if level is None or not any(peels(a) for a in args):
        return h(*args)
    return level.push(h, args)


def made_of(h: Function, make: Callable[[Function], Function]) -> Function:
    """``make(h)``, and what gives its tangents made likewise, where ``h`` has a rule for these."""
    made = make(h)
    rule = getattr(h, "rule", None)
    if rule is not None:
        vars(made)["rule"] = lambda *how: make(rule(*how))
    return made


def deepest(args: tuple) -> Level | None:
    """The level that values meet in: the innermost of theirs."""
    levels = [a.level for a in args if isinstance(a, Wrapper)]
    return innermost(levels) if levels else None
