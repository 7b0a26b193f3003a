"""Programs handed to torch's compilers (inductor, CUDA graphs), subgraph by subgraph.

NOTE [what a compiler is given]
    A compiler may put its results where it likes, and takes for granted that tensors do not share
    memory. So a compiler is given stretches of operators without random draws, and asked only for
    tensors with memory of their own. Views of these and of arguments, and draws, are made by the
    program's Python lines around it, as is all else that a compiler may not do, or cannot.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from forall._compat import compile_backends
from forall._compat.ambient_settings import get_allowed_precision
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import get_facts
from forall._compat.storage import get_storage_id
from forall._core.errors import TransformCall, format_columns, warn_slow_path
from forall._jit.backends.python_source import compile_python
from forall._jit.graph import (
    FusedNode,
    Layout,
    OpNode,
    Ref,
    Subgraph,
)
from forall._jit.tracing.tracer import ASSERT_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from forall._jit.graph import Program

    Tensor = torch.Tensor

aten = torch.ops.aten
_FEWEST_OPERATORS = 2  # operators for which a compiler is worth it
_MOST_SETTINGS = 8  # settings that a subgraph is compiled for
_PLAIN = (bool, int, float, complex, str, type(None))
_WORDS = (torch.dtype, torch.device, torch.memory_format, torch.layout)


def make_compiler(call: TransformCall, backend: str) -> Callable:
    """Return what makes a function of a subgraph by a backend, as `compile_python` does.

    A backend that does not exist is a ValueError, one that this machine lacks a RuntimeError.
    """
    if backend not in ("inductor", "cudagraphs"):
        raise documented_error(ValueError, "jit-backend")(
            f"{call}: no such backend.\n{format_columns([('backend', repr(backend))])}\n"
            "It is one of 'python' (default), 'inductor' and 'cudagraphs'."
        )
    why = (
        compile_backends.find_inductor_obstacle()
        if backend == "inductor"
        else compile_backends.find_cudagraph_obstacle()
    )
    if why is not None:
        cure = "g++ or clang++; the environment's CXX names another"
        raise documented_error(RuntimeError, "jit-backend")(
            f"{call}: this machine cannot run that backend.\n"
            f"{format_columns([('backend', repr(backend)), ('missing', why)])}\n"
            f"It needs {cure if backend == 'inductor' else 'a GPU'}. "
            "backend='python' needs nothing."
        )
    return partial(_compile_subgraph, call, backend)


def _compile_subgraph(
    call: TransformCall,
    backend: str,
    graph: Subgraph,
) -> Callable:
    """Return the function of a subgraph, as `compile_python` does, with compiled parts."""
    program, nodes, _, results = graph
    asserted = {n for node in nodes if node.op in ASSERT_OPS for n in node.reads()}
    fitting = partial(_can_compile, program, asserted)
    stretches = [(fits, [*part]) for fits, part in groupby(nodes, key=fitting)]
    lines: list[OpNode] = []
    later = {*results}
    for fits, part in reversed(stretches):
        made = _compile_stretch(call, backend, program, part, later) if fits else part
        lines[:0] = made
        later.update(n for node in part for n in node.reads())
    return compile_python(graph._replace(nodes=lines))


def _can_compile(program: Program, asserted: Collection[int], node: OpNode) -> bool:
    if node.outs is None and not node.writes():
        return False  # an assertion, there to raise: a compiler would leave it out
    if program.may_raise(node) and program.is_on_cpu(node):
        return False  # a compiler leaves out its error; on a GPU there is no Python error to lose
    if get_facts(node.op).dynamic and any(n in asserted for n in node.makes()):
        return False  # the shape of the result depends on the data
    return not get_facts(node.op).has_effect and _is_plain_argument((node.args, node.kwargs))


def _is_plain_argument(a: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return all(map(_is_plain_argument, a))
    if isinstance(a, dict):
        return all(map(_is_plain_argument, a.values()))
    return type(a) is Ref or type(a) in _PLAIN or isinstance(a, _WORDS)


def _compile_stretch(
    call: TransformCall, backend: str, program: Program, part: list[OpNode], later: Collection[int]
) -> list[OpNode]:
    """Return a compiled subgraph in place of these operators, and the views of its results.

    ``part`` is returned as it is where a compiler is not worth it, or cannot make a result.
    """
    makers: dict[int, OpNode] = {}
    read: dict[int, None] = {}  # what was there before
    for node in part:
        read.update(dict.fromkeys(n for n in node.reads() if n not in makers))
        makers.update({n: node for n in node.makes() if n not in read and n not in makers})
    wanted: dict[int, None] = {}
    views: dict[int, OpNode] = {}
    for n in sorted(makers.keys() & later):
        if not _trace_to_base(program, n, makers, wanted, views):
            return part
    roots = [v.root for v in program.values]
    changed = {roots[n] for node in part for n in node.writes()}
    written = [n for n in read if roots[n] in changed]
    if len(part) < _FEWEST_OPERATORS or not (wanted or written):
        return part
    core = CompiledSubgraph(call, backend, Subgraph(program, part, [*read], [*wanted]), written)
    piece = FusedNode(core, tuple(map(Ref, read)), {}, [*wanted], written)
    return [piece, *views.values()]


def _trace_to_base(
    program: Program,
    n: int,
    makers: dict[int, OpNode],
    wanted: dict[int, None],
    views: dict[int, OpNode],
) -> bool:
    """Note in ``wanted`` the base that a value is a view of, and in ``views`` the views of it.

    Return False where the value cannot be made by views of one base.
    """
    node = makers.get(n)
    if node is None or n in wanted or id(node) in views:
        return True
    roots = [v.root for v in program.values]
    sources = [m for m in node.reads() if roots[m] == roots[n] and m != n]
    if not sources:
        wanted[n] = None
        return True
    if len(set(sources)) > 1 or not _trace_to_base(program, sources[0], makers, wanted, views):
        return False
    if node.writes():  # its result is an alias of the tensor that it wrote into
        if program.values[sources[0]].layout != program.values[n].layout:
            return False
        node = OpNode(aten.alias.default, (Ref(sources[0]),), {}, n)
        views[~n] = node
    else:
        views[id(node)] = node
    return True


class CompiledSubgraph:
    """The operators of a subgraph, compiled when they are first run."""

    __name__ = "piece"

    def __init__(
        self,
        call: TransformCall,
        backend: str,
        graph: Subgraph,
        written: list[int],
    ) -> None:
        program, nodes, given, results = graph
        self.call = call
        self.backend = backend
        self.layouts = [program.values[n].layout for n in results]
        self.written = [given.index(n) for n in written]
        self.plain = compile_python(graph)
        self.fixed = [n in program.constants and n not in written for n in given]
        self.graph = _build_fx_graph(nodes, given, results)
        self.is_on_accelerator = _is_on_accelerator(program, [*given, *results])
        self.made: dict[tuple, Callable] = {}  # compiled functions, by settings of precision

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        chosen = get_allowed_precision() if self.is_on_accelerator else ()
        run = self.made.get(chosen)
        if (run is None or self.backend == "cudagraphs") and compile_backends.is_capturing():
            return self.plain(*tensors)
        if run is None:
            if len(self.made) >= _MOST_SETTINGS:
                self.made.clear()
            run = self.made[chosen] = self._compile_for(tensors)
        if self.written and _shares_memory(tensors):
            return self.plain(*tensors)
        return run(*tensors)

    def _compile_for(self, tensors: Sequence[Tensor]) -> Callable:
        why = self._find_obstacle(tensors)
        if why is None:
            examples = [_copy_with_layout(t) for t in tensors]
            try:
                run = self._run_backend(examples)
                made = run(*examples)
                if [Layout.from_tensor(y) for y in made] == self.layouts:
                    return _unshare_results(run, examples, made)
                why = "its results would lie otherwise in memory"
            except Exception as error:  # noqa: BLE001 - whatever keeps a compiler from it
                self.plain(
                    *map(_copy_with_layout, tensors)
                )  # the call's own error, if it has one, is raised
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warn_slow_path(
            f"{self.call}: a piece is not compiled, so run by Python: {why}.\n"
            f"Without backend={self.backend!r} nothing is compiled."
        )
        return self.plain

    def _find_obstacle(self, tensors: Sequence[Tensor]) -> str | None:
        if any(t.is_conj() or t.is_neg() for t in tensors):
            return (
                "a tensor's conjugation or negation is yet to be done "
                "(.resolve_conj() or .resolve_neg() does it)"
            )
        if self.backend == "inductor":
            return None
        if not all(t.is_cuda or fixed for t, fixed in zip(tensors, self.fixed, strict=True)):
            return "a tensor is not on the GPU"
        if len({t.device for t in tensors if t.is_cuda}) > 1:
            return "its tensors are on several GPUs"
        if any(0 in t.stride() and t.numel() > 1 for t in tensors):
            return "an expanded tensor has no place of its own on the GPU (.contiguous() makes one)"
        return None

    def _run_backend(self, examples: list[Tensor]) -> Callable:
        if self.backend == "inductor":
            return compile_backends.compile_by_inductor(
                self.graph, examples, writes=bool(self.written)
            )
        return compile_backends.compile_by_cudagraph(self.plain, examples, self.written)


def _is_on_accelerator(program: Program, numbers: Sequence[int]) -> bool:
    """True if a value lies on an accelerator, where settings choose kernels at compile time.

    Kernels of the CPU read the settings when they run, also where they are called from C++.
    """
    return any(program.values[n].layout.device.type != "cpu" for n in numbers)


def _unshare_results(run: Callable, given: Sequence[Tensor], made: Sequence[Tensor]) -> Callable:
    """Return a function like ``run`` whose results share no memory with inputs or each other.

    A compiler may return one tensor for two results; ``made`` are the results for ``given``.
    """
    places = [*map(get_storage_id, given), *map(get_storage_id, made)]
    shared = [i for i, y in enumerate(made) if y.numel() and places.count(get_storage_id(y)) > 1]
    if not shared:
        return run

    def run_unshared(*tensors: Tensor) -> list[Tensor]:
        found = [*run(*tensors)]
        for i in shared:
            found[i] = found[i].clone()
        return found

    return run_unshared


def _shares_memory(tensors: Sequence[Tensor]) -> bool:
    places = [get_storage_id(t) for t in tensors if t.numel()]
    return len({*places}) < len(places)


def _copy_with_layout(t: Tensor) -> Tensor:
    """A copy of a tensor with the same strides and storage offset."""
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    memory = t.as_strided((last + 1 if t.numel() else 0,), (1,), 0).clone()
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


def _build_fx_graph(
    nodes: Sequence[OpNode], given: Sequence[int], results: Sequence[int]
) -> fx.GraphModule:
    """The operators as an `fx.GraphModule`, which torch's compilers read."""
    graph = fx.Graph()
    env: dict[int, Any] = {n: graph.placeholder(f"v{n}") for n in given}

    def convert_argument(a: Any) -> Any:
        if type(a) is Ref:
            return env[a.n]
        if isinstance(a, (tuple, list)):
            return [convert_argument(b) for b in a]
        return a

    def bind_outs(outs: Any, made: Any) -> None:
        if isinstance(outs, int):
            env[outs] = made
        elif isinstance(outs, (tuple, list)):
            for i, o in enumerate(outs):
                if o is not None:
                    bind_outs(o, graph.call_function(getitem, (made, i)))

    for node in nodes:
        kwargs = {k: convert_argument(a) for k, a in node.kwargs.items()}
        made = graph.call_function(node.op, tuple(map(convert_argument, node.args)), kwargs)
        bind_outs(node.outs, made)
    graph.output(tuple(env[n] for n in results))
    return fx.GraphModule(torch.nn.Module(), graph)
