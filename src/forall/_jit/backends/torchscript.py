"""Execution of long, often used programs by TorchScript's interpreter.

The interpreter calls the same operators in the same order, and frees memory as early as Python. Its
errors differ from Python's. So a program that fails in it is run once more by Python, and a program
that writes into memory that outlasts it is always run by Python.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import get_facts
from forall._compat.ts_interpreter import CannotScript, ScriptBuilder
from forall._core import config
from forall._jit.graph import FusedNode, map_refs

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._jit.graph import Subgraph

LENGTH = 12  # the fewest operators that pay for the call of the interpreter
CALLS = 32  # runs by Python before the interpreter takes over


def switch_when_warm(run: Callable, graph: Subgraph) -> Callable:
    """Return a function like ``run`` that uses the interpreter once it was called often."""
    checked = config.now.replay == "check"
    if (len(graph.nodes) < LENGTH and not checked) or not _can_interpret(graph):
        return run
    line: Callable | None = None
    left = 0 if checked else CALLS

    def run_or_switch(*tensors: Any) -> tuple:
        nonlocal line, left
        if line is None:
            left -= 1
            if left >= 0:
                return run(*tensors)
            line = compile_torchscript(graph) or run
        try:
            return line(*tensors)
        except Exception:  # noqa: BLE001 - Python raises the user's error, or succeeds
            made = run(*tensors)
            line = run
            return made

    return functools.update_wrapper(run_or_switch, run)


def _can_interpret(graph: Subgraph) -> bool:
    program, nodes, given, _ = graph
    if not nodes or any(isinstance(node, FusedNode) for node in nodes):
        return False
    roots = [v.root for v in program.values]
    outside = {roots[n] for n in given}
    return not any(
        get_facts(node.op).has_effect or any(roots[n] in outside for n in node.writes())
        for node in nodes
    )


def compile_torchscript(graph: Subgraph) -> Callable | None:
    """Return the function of a subgraph by the interpreter; None if it cannot run the subgraph."""
    program, nodes, given, results = graph
    try:
        line = ScriptBuilder()
        env = {n: line.argument() for n in given}
        env.update({n: line.constant(t) for n, t in program.constants.items() if n not in env})
        for n in graph.find_changing_constants() & env.keys() - {*given}:
            env[n] = line.call(torch.ops.aten.clone.default, [env[n]], {})[0]
        for node in nodes:
            args, kwargs = (map_refs(a, lambda r: env[r.n]) for a in (node.args, node.kwargs))
            _bind_results(line, node.outs, line.call(node.op, args, kwargs), env)
        return line.function([env[n] for n in results])
    except (CannotScript, RuntimeError, TypeError, AttributeError, KeyError):
        return None  # this version of torch has no such interpreter, or another one


def _bind_results(line: ScriptBuilder, outs: Any, made: list, env: dict[int, Any]) -> None:
    """Enter the results of an operator in ``env``; ``made`` has one entry per returned value."""
    if isinstance(outs, int):
        (env[outs],) = made
    elif isinstance(outs, (list, tuple)):
        if len(made) == 1:  # a list
            made = line.unpack_list(made[0], len(outs))
        for o, m in zip(outs, made, strict=True):
            if isinstance(o, (list, tuple)):
                _bind_results(line, o, [m], env)
            elif o is not None:
                env[o] = m
