"""Code generation: a program as Python source, one line per operator; values die at last use."""

from __future__ import annotations

from keyword import iskeyword
from math import isfinite
from typing import TYPE_CHECKING, Any

from forall._compat.devices import find_default_device, synchronize_devices
from forall._compat.dispatch_state import (
    disable_autocast,
    functions_off,
    is_autocast,
    without_history,
)
from forall._jit.backends.fast_calls import choose_call
from forall._jit.backends.torchscript import switch_when_warm
from forall._jit.graph import Ref, find_refs
from forall._jit.passes.tiling import tile_pointwise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from forall._jit.graph import OpNode, Program, Subgraph


class SourceWriter:
    """The lines of a generated function, and the objects that they name."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, Any] = {
            "_below": without_history,
            "_uncast": disable_autocast,
            "_unseen": functions_off,
        }
        self.lines: list[str] = []
        self._known: dict[int, str] = {}

    def name_object(self, thing: Any, hint: str) -> str:
        """The name of an object in the source."""
        name = self._known.get(id(thing))
        if name is None:
            # A number of its own after the last `_` keeps names distinct: without it `log` and 2
            # would be `log2`, and a user's operator called `v` could be taken for a value.
            name = self._known[id(thing)] = f"{hint}_{len(self.names)}"
            self.names[name] = thing
        return name

    def write_argument(self, a: Any) -> str:
        if type(a) is Ref:
            return f"v{a.n}"
        if type(a) is tuple or type(a) is list:
            inside = ", ".join(map(self.write_argument, a))
            if type(a) is tuple:
                return f"({inside},)" if a else "()"
            return (
                f"[{inside}]"
                if next(find_refs(a), None) is not None
                else self.name_object(tuple(a), "k")
            )
        if a is None or type(a) in (bool, int, str) or (type(a) is float and isfinite(a)):
            return repr(a)
        return self.name_object(a, "k")

    def write_node(self, node: OpNode, last: Sequence[int]) -> None:
        func, args, kwargs = choose_call(self.program, node)
        given = [*map(self.write_argument, args)]
        given += [self._write_keyword(k, a) for k, a in kwargs.items()]
        hint = getattr(func, "__name__", "")
        call = (
            f"{self.name_object(func, hint if _is_plain_name(hint) else 'op')}({', '.join(given)})"
        )
        target = _write_target(node.outs)
        self.lines.append(f"{target} = {call}" if target else call)
        if last:
            self.lines.append("del " + ", ".join(f"v{n}" for n in last))

    def _write_keyword(self, name: str, a: Any) -> str:
        """A keyword argument in source; a user's operator may have any text as its name."""
        if _is_plain_name(name) and not iskeyword(name):
            return f"{name}={self.write_argument(a)}"
        return f"**{{{self.name_object(name, 'k')}: {self.write_argument(a)}}}"

    def compile_function(
        self, given: Sequence[int], results: Sequence[str], within: str
    ) -> Callable:
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


def _is_plain_name(name: Any) -> bool:
    """True for an ASCII identifier; Python normalizes other identifiers in source."""
    return type(name) is str and name.isascii() and name.isidentifier()


def _write_target(outs: Any) -> str:
    if outs is None:
        return ""
    if isinstance(outs, int):
        return f"v{outs}"
    return "(" + "".join(f"{_write_target(o) or '_'}, " for o in outs) + ")"


def compile_python(graph: Subgraph) -> Callable:
    """Return the function of a subgraph: Python text, then TorchScript if that is called often."""
    nodes = tile_pointwise(graph, compile_part)
    graph = graph._replace(nodes=nodes)
    # Operators are recorded with their devices; a default device's mode would only cost time.
    below = "_below()" if find_default_device() is None else "_below(), _unseen()"
    if is_autocast():  # the recorded operators include the casts
        with disable_autocast():
            return _compile_text(graph, f"{below}, _uncast()")
    return switch_when_warm(_compile_text(graph, below), graph)


def compile_part(graph: Subgraph) -> Callable:
    """Return the function of a subgraph that is called from one that has set up the modes."""
    return _compile_text(graph, None)


def _compile_text(graph: Subgraph, below: str | None) -> Callable:
    program, nodes, given, results = graph
    text = SourceWriter(program)
    there = {*given}
    made = [n for n in program.constants if n not in there]
    synchronize_devices(program.constants[n] for n in made)
    changing = graph.find_changing_constants()
    for n in made:
        if n in changing:
            text.names[f"c{n}"] = program.constants[n]
            text.lines.append(f"v{n} = c{n}.clone()")
        else:
            text.names[f"v{n}"] = program.constants[n]
    kept = {*results, *given, *made}
    for node, last in zip(nodes, _find_last_reads(nodes, kept), strict=True):
        text.write_node(node, last)
    within = "if True:" if below is None else f"with {below}:"
    return text.compile_function(given, [f"v{n}" for n in results], within)


def compile_view_function(program: Program, given: Sequence[int], cut: Collection[int]) -> Callable:
    """Return a function from ``given`` to a program's outputs that autograd records.

    Outputs in ``cut`` are detached.
    """
    text = SourceWriter(program)
    for node in program.nodes:
        text.write_node(node, ())
    results = [f"v{n}.detach()" if n in cut else f"v{n}" for n in program.outputs]
    return text.compile_function(given, results, "if True:")


def _find_last_reads(nodes: Sequence[OpNode], kept: set[int]) -> list[list[int]]:
    """For each operator, the values that no later operator reads."""
    seen = set(kept)
    found = []
    for node in reversed(nodes):
        last = list(dict.fromkeys(n for n in (*node.makes(), *node.reads()) if n not in seen))
        seen.update(last)
        found.append(last)
    return found[::-1]
