"""The handlers of operators: one dictionary, filled by the rules, completed on first use.

A *handler* is ``handler(level, func, args, kwargs) -> result``: it gets the arguments as autograd
passed them (at least one of them `BatchedTensor` of this level, with an axis) and returns wrapped
results. `rule_makers` make handlers from shorter forms; most rules are a row in one of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Handler = Callable[[Any, Any, tuple, dict], Any]

HANDLERS: dict[Any, Handler] = {}
WAYS: dict[Any, str] = {}
# Handlers of operators where no argument differs between the examples. One replaces the whole
# call: it lowers the operands and wraps the results itself, and each overload needs its own.
SHARED: dict[Any, Handler] = {}
# Makers of the update of a tensor from before the call, for in-place operators that add up
# (`mutation_log`).
UPDATES: dict[Any, Callable] = {}
# Operators that tell the mutation log themselves what they read of older tensors.
BLIND: set[Any] = set()


def register_rows(handlers: dict[Any, Handler], way: str = "row") -> None:
    """Enter rows; an operator has one rule."""
    for op, handler in handlers.items():
        if op in HANDLERS and WAYS[op] in {"row", "pointwise"}:
            raise ValueError(f"register: {op} has a rule already.")
        HANDLERS[op] = handler
        WAYS[op] = way


def list_overloads(packet: Any) -> Iterable[Any]:
    """All overloads of ``torch.ops.aten.<name>``."""
    return [getattr(packet, name) for name in packet.overloads()]


VIEWS: dict[Any, Any] = {}
# Calls of torch's Python API that have a meaning here before any operator is reached.
CALLS: dict[Any, Callable] = {}
# Those that need no function mode, so that they also hold once the level has ended: in hooks and
# recomputations of a backward pass.
AFTER_EXIT_CALLS: dict[Any, Callable] = {}
# What is asked before captured tensors are shared, which costs a node of autograd's for each.
UNSHARED: dict[Any, Callable] = {}
# Those of them that write into their first argument.
IN_PLACE: set[Callable] = set()
# The same, for calls that are given an out=.
OUTS: dict[Any, Callable] = {}
# Calls that a rule answers at once where no derivative is at stake (`api_calls`), each with the
# operators that it would come to. A rule that answers NotImplemented leaves it to these.
DIRECT: dict[Callable, tuple[Handler, set]] = {}
# Classes that are no tensors but say what a call with them means. Torch may take one for an int and
# not ask, so they are looked for.
STRANGERS: set[type] = set()
# View operators whose call, to be made again, needs more than their arguments.
VIEW_CALLS: dict[Any, Callable] = {}


def answer_directly(op: Any, *calls: Callable) -> None:
    """Let the rule of an operator answer these calls, which take its arguments."""

    def rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        return HANDLERS[op](level, op, args, kwargs)

    DIRECT.update((call, (rule, {op})) for call in calls)
