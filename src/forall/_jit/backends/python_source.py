"""Code generation: a program as Python source, one line per operator; values die at last use."""

from __future__ import annotations

from functools import partial
from keyword import iskeyword
from math import isfinite
from typing import TYPE_CHECKING, Any

from forall._compat.devices import default_device, wait_until_made
from forall._compat.dispatch_state import (
    functions_off,
    is_autocast,
    without_autocast,
    without_history,
)
from forall._jit.backends.fast_calls import binding
from forall._jit.backends.torchscript import warmed
from forall._jit.graph import Ref, refs
from forall._jit.passes.tiling import in_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from forall._jit.graph import Node, Program


class Text:
    """The lines of a generated function, and the objects that they name."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, Any] = {
            "_below": without_history,
            "_uncast": without_autocast,
            "_unseen": functions_off,
        }
        self.lines: list[str] = []
        self._known: dict[int, str] = {}

    def name(self, thing: Any, hint: str) -> str:
        """The name of an object in the source."""
        name = self._known.get(id(thing))
        if name is None:
            # A number of its own after the last `_` keeps names distinct: without it `log` and 2
            # would be `log2`, and a user's operator called `v` could be taken for a value.
            name = self._known[id(thing)] = f"{hint}_{len(self.names)}"
            self.names[name] = thing
        return name

    def argument(self, a: Any) -> str:
        if type(a) is Ref:
            return f"v{a.n}"
        if type(a) is tuple or type(a) is list:
            inside = ", ".join(map(self.argument, a))
            if type(a) is tuple:
                return f"({inside},)" if a else "()"
            return f"[{inside}]" if next(refs(a), None) is not None else self.name(tuple(a), "k")
        if a is None or type(a) in (bool, int, str) or (type(a) is float and isfinite(a)):
            return repr(a)
        return self.name(a, "k")

    def node(self, node: Node, last: Sequence[int]) -> None:
        func, args, kwargs = binding(self.program, node)
        given = [*map(self.argument, args)]
        given += [self._keyword(k, a) for k, a in kwargs.items()]
        hint = getattr(func, "__name__", "")
        call = f"{self.name(func, hint if _is_plain(hint) else 'op')}({', '.join(given)})"
        target = _target(node.outs)
        self.lines.append(f"{target} = {call}" if target else call)
        if last:
            self.lines.append("del " + ", ".join(f"v{n}" for n in last))

    def _keyword(self, name: str, a: Any) -> str:
        """A keyword argument in source; a user's operator may have any text as its name."""
        if _is_plain(name) and not iskeyword(name):
            return f"{name}={self.argument(a)}"
        return f"**{{{self.name(name, 'k')}: {self.argument(a)}}}"

    def function(self, given: Sequence[int], results: Sequence[str], within: str) -> Callable:
        """Compile the lines to a function; ``within`` is the block statement around them."""
        out = f"return ({', '.join(results)}{',' if results else ''})"
        body = "\n        ".join([*self.lines, out])
        arguments = ", ".join(f"v{n}" for n in given)
        source = f"def program({arguments}):\n    {within}\n        {body}\n"
        self.names["__name__"] = __name__
        exec(compile(source, "<forall.jit>", "exec"), self.names)  # noqa: S102 - our own text
        run = self.names["program"]
        run.source = source
        return run


def _is_plain(name: Any) -> bool:
    """True for an ASCII identifier; Python normalizes other identifiers in source."""
    return type(name) is str and name.isascii() and name.isidentifier()


def _target(outs: Any) -> str:
    if outs is None:
        return ""
    if isinstance(outs, int):
        return f"v{outs}"
    return "(" + "".join(f"{_target(o) or '_'}, " for o in outs) + ")"


def function(
    program: Program, nodes: Sequence[Node], given: Sequence[int], results: Sequence[int]
) -> Callable:
    """Return a function of the values ``given`` that runs ``nodes`` and returns ``results``."""
    nodes = in_blocks(program, nodes, results, partial(_within, program))
    # Operators are recorded with their devices; a default device's mode would only cost time.
    below = "_below()" if default_device() is None else "_below(), _unseen()"
    if is_autocast():  # the recorded operators include the casts
        with without_autocast():
            return _function(program, nodes, given, results, f"{below}, _uncast()")
    run = _function(program, nodes, given, results, below)
    return warmed(run, program, nodes, given, results)


def _within(
    program: Program, nodes: Sequence[Node], given: Sequence[int], results: Sequence[int]
) -> Callable:
    """Return a function of a part of a program, called from one that has set up the modes."""
    return _function(program, nodes, given, results, None)


def _function(
    program: Program,
    nodes: Sequence[Node],
    given: Sequence[int],
    results: Sequence[int],
    below: str | None,
) -> Callable:
    text = Text(program)
    there = {*given}
    made = [n for n in program.constants if n not in there]
    wait_until_made(program.constants[n] for n in made)
    changing = program.changing(nodes, results)
    for n in made:
        if n in changing:
            text.names[f"c{n}"] = program.constants[n]
            text.lines.append(f"v{n} = c{n}.clone()")
        else:
            text.names[f"v{n}"] = program.constants[n]
    kept = {*results, *given, *made}
    for node, last in zip(nodes, _last_reads(nodes, kept), strict=True):
        text.node(node, last)
    within = "if True:" if below is None else f"with {below}:"
    return text.function(given, [f"v{n}" for n in results], within)


def in_the_open(program: Program, given: Sequence[int], cut: Collection[int]) -> Callable:
    """Return a function from ``given`` to a program's outputs that autograd records.

    Outputs in ``cut`` are detached.
    """
    text = Text(program)
    for node in program.nodes:
        text.node(node, ())
    results = [f"v{n}.detach()" if n in cut else f"v{n}" for n in program.outputs]
    return text.function(given, results, "if True:")


def _last_reads(nodes: Sequence[Node], kept: set[int]) -> list[list[int]]:
    """For each operator, the values that no later operator reads."""
    seen = set(kept)
    found = []
    for node in reversed(nodes):
        last = list(dict.fromkeys(n for n in (*node.makes(), *node.reads()) if n not in seen))
        seen.update(last)
        found.append(last)
    return found[::-1]
