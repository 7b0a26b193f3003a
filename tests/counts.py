"""Counts of names, docstrings, imports and sizes in the library's source.

`make report` prints them; the tests beside it hold the ones that matter.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING

import source
from source import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The first word of a docstring that describes instead of saying what is done or returned.
RELATIVE = _words("what whether where who whom whose which of those that why when how as")
PREPOSITIONS = _words(
    "of to by with from in on at for as into onto over under before after behind beside between "
    "among beyond without within since until through across along around against above below "
    "per via off out up down"
)
ADVERBS = _words(
    "again alone apart aside away once twice together anew before often never always ever here "
    "there now then too also else instead still yet afterwards backwards forwards otherwise "
    "first last fewer shorter longer cheaper quicker sooner later"
)
# Participles that no ending tells.
IRREGULAR = _words(
    "told made met left kept held heard seen known given taken shown grown drawn thrown written "
    "read_out put set_out run_once begun done gone been born borne bound bought brought built "
    "caught chosen come cut_off found forgotten frozen got hidden hit laid led lent let_go lost "
    "meant paid said sent sold spent spilt split_up stood stuck sworn taught thought torn woken "
    "won worn wound spared swept slept spun struck"
)
# Verbs and nouns of the field with the ending of a participle or an adverb.
STANDARD = _words(
    "embed feed need seed speed shed exceed proceed apply multiply reply supply imply comply rely "
    "assembly family string ring thing nothing anything everything something sibling ceiling "
    "padding embedding mapping binding meaning setting "
    ""
    "red bed embed bring "
    "ping sting king wing sing spring fly ally only poly"
)


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name without the package's, and its tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def base(self) -> str:
        return self.path.stem


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the library."""
    return tuple(
        Module(
            path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"), ROOT / path, tree
        )
        for path, tree in source.files().items()
    )


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Each function of a module at any depth, with its qualified name; overloads are left out."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                if not any("overload" in ast.unparse(d) for d in child.decorator_list):
                    yield prefix + child.name, child
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    return visit(module.tree, "")


def class_names(module: Module) -> Iterator[str]:
    """Each class of a module at any depth, in words with underscores between them."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name)


def is_bare(name: str) -> bool:
    """True for a function's name that is one participle, adverb or preposition."""
    word = name.strip("_").lower()
    if not word or "_" in word or word in STANDARD or re.fullmatch(r"__\w+__", name):
        return False
    if word in PREPOSITIONS | ADVERBS | IRREGULAR:
        return True
    return len(word) > 4 and re.search(r"(ed|ing|ly)$", word) is not None


def bare_names() -> list[str]:
    """Functions that are named by a participle, an adverb or a preposition alone."""
    return [
        f"{m.name}:{qualified}"
        for m in modules()
        for qualified, f in functions(m)
        if is_bare(f.name)
    ]


def docstrings() -> Iterator[tuple[str, str]]:
    """Each docstring of the library and where it stands."""
    for m in modules():
        for node in ast.walk(m.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (
                text := ast.get_docstring(node)
            ):
                yield f"{m.name}:{getattr(node, 'name', '')}", text


def relative_docstrings() -> list[str]:
    """Docstrings that open with a relative clause, with their first line."""
    return [
        f"{where}: {text.splitlines()[0]}"
        for where, text in docstrings()
        if re.split(r"\W", text, maxsplit=1)[0].lower() in RELATIVE
    ]


def shared_function_names() -> dict[str, list[str]]:
    """Public names of module-level functions that several modules define."""
    found: dict[str, list[str]] = defaultdict(list)
    for m in modules():
        for node in m.tree.body:
            is_public = isinstance(node, Function) and not node.name.startswith("_")
            if is_public and m.name not in found[node.name]:
                found[node.name].append(m.name)
    return {name: where for name, where in found.items() if len(where) > 1}


def shared_class_names() -> dict[str, list[str]]:
    """Names of module-level classes that several modules define."""
    found: dict[str, list[str]] = defaultdict(list)
    for m in modules():
        for node in m.tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(m.name)
    return {name: where for name, where in found.items() if len(where) > 1}


def shared_base_names() -> dict[str, list[str]]:
    """Base names of files that several packages have."""
    found: dict[str, list[str]] = defaultdict(list)
    for m in modules():
        if m.base != "__init__":
            found[m.base].append(m.name)
    return {name: where for name, where in found.items() if len(where) > 1}


def attributes() -> dict[str, int]:
    """How many attributes a class sets on `self` or declares, itself and by its bases."""
    classes = {
        n.name: n for m in modules() for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)
    }

    def own(node: ast.ClassDef) -> set[str]:
        names = {
            s.target.id
            for s in node.body
            if isinstance(s, ast.AnnAssign)
            and isinstance(s.target, ast.Name)
            and "ClassVar" not in ast.unparse(s.annotation)
        }
        for method in node.body:
            if isinstance(method, Function):
                names |= {
                    a.attr
                    for a in ast.walk(method)
                    if isinstance(a, ast.Attribute)
                    and isinstance(a.ctx, ast.Store)
                    and isinstance(a.value, ast.Name)
                    and a.value.id == "self"
                }
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes and base.id != node.name:
                names |= own(classes[base.id])
        return names

    return {name: len(own(node)) for name, node in classes.items()}


def large_classes() -> dict[str, int]:
    """Classes with more than 12 attributes, and how many each has."""
    return {name: count for name, count in attributes().items() if count > 12}


def imports() -> dict[str, set[str]]:
    """The library's modules that each module imports, in functions and for types too."""
    names = {m.name for m in modules()}
    graph: dict[str, set[str]] = {}
    for m in modules():
        reached = set()
        for node in ast.walk(m.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "forall":
                source = (node.module or "").removeprefix("forall").lstrip(".")
                for alias in node.names:
                    longer = f"{source}.{alias.name}".lstrip(".")
                    reached.add(longer if longer in names else source)
            elif isinstance(node, ast.Import):
                reached |= {
                    a.name.removeprefix("forall.")
                    for a in node.names
                    if a.name.startswith("forall.")
                }
        graph[m.name] = (reached & names) - {m.name, "", "forall"}
    return graph


def rings() -> list[set[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm, the largest first."""
    graph = imports()
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(v: str) -> None:
        order[v] = low[v] = len(order)
        path.append(v)
        for w in graph[v]:
            if w not in order:
                visit(w)
            if w in path:
                low[v] = min(low[v], low[w])
        if low[v] == order[v]:
            ring = set(path[path.index(v) :])
            del path[path.index(v) :]
            if len(ring) > 1:
                found.append(ring)

    for v in graph:
        if v not in order:
            visit(v)
    return sorted(found, key=len, reverse=True)


def code_lines() -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    total = 0
    for m in modules():
        text = m.path.read_text().splitlines()
        spent = set()
        for node in ast.walk(m.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
                doc = node.body[0]
                spent |= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
        total += sum(
            1
            for i, line in enumerate(text, 1)
            if i not in spent and line.strip() and not line.strip().startswith("#")
        )
    return total


def crossed() -> tuple[int, int]:
    """The files that an eager `vmap(grad(loss))` runs through, and its Python calls in them."""
    import torch

    import forall

    def loss(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x @ w - y) ** 2).sum()

    forall.config.replay = False
    f = forall.vmap(forall.grad(loss), (None, 0, 0))
    w, xs, ys = torch.randn(3), torch.randn(4, 3), torch.randn(4)
    for _ in range(3):
        f(w, xs, ys)
    files: Counter[str] = Counter()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename  # type: ignore[attr-defined]
            if str(ROOT) in name:
                files[name] += 1

    sys.setprofile(note)
    try:
        f(w, xs, ys)
    finally:
        sys.setprofile(None)
    return len(files), sum(files.values())


def main() -> None:
    """Print all counts; with names of lists as arguments, those lists too."""
    lists = {
        "relative": relative_docstrings(),
        "bare": bare_names(),
        "functions": [f"{n}: {', '.join(w)}" for n, w in shared_function_names().items()],
        "classes": [f"{n}: {', '.join(w)}" for n, w in shared_class_names().items()],
        "bases": [f"{n}: {', '.join(w)}" for n, w in shared_base_names().items()],
        "rings": [", ".join(sorted(ring)) for ring in rings()],
        "attributes": [f"{n}: {k}" for n, k in large_classes().items()],
    }
    every = [f for m in modules() for _, f in functions(m)]
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for f in every]
    sizes = [len(m.path.read_text().splitlines()) for m in modules()]
    print(f"files {len(sizes)}, lines {sum(sizes)}, of code {code_lines()}")
    print(f"file: median {median(sizes):.0f}, longest {max(sizes)}")
    print(f"function: median {median(lengths):.0f}, longest {max(lengths)}, all {len(lengths)}")
    print(
        f"docstrings {sum(1 for _ in docstrings())}, relative clause first {len(lists['relative'])}"
    )
    print(f"functions named by a bare participle, adverb or preposition {len(lists['bare'])}")
    print(f"public function names of several modules {len(lists['functions'])}")
    print(f"class names of several modules {len(lists['classes'])}")
    print(f"base names of several packages {len(lists['bases'])}")
    print(f"import rings {[len(r) for r in rings()]}")
    print(f"classes with more than 12 attributes {len(lists['attributes'])}")
    print("vmap(grad(loss)): files {}, library calls {}".format(*crossed()))
    for name in sys.argv[1:]:
        print(f"\n{name}", *lists[name], sep="\n  ")


if __name__ == "__main__":
    main()
