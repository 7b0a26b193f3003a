"""What a workload is, and the list of all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.func

import forall

Program = Callable[[], Any]
Quantity = Literal["time", "peak memory"]

NAMES = ("forall", "torch.func", "hand-written")


@dataclass(frozen=True)
class Contestants:
    """Three programs computing the same values, in the order of NAMES, and their checker."""

    programs: tuple[Program, Program, Program]
    check: Callable[[Any, Any], None]


@dataclass(frozen=True)
class Workload:
    name: str
    summary: str
    quantity: Quantity
    build: Callable[[torch.device], Contestants]


WORKLOADS: dict[str, Workload] = {}


def workload(name: str, summary: str, quantity: Quantity = "time"):
    """Register the decorated builder under `name`."""

    def register(build: Callable[[torch.device], Contestants]):
        if name in WORKLOADS:
            raise ValueError(f"two workloads are called {name}")
        WORKLOADS[name] = Workload(name, summary, quantity, build)
        return build

    return register


def leaves(tree: Any, path: str = "result") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dictionaries, lists and tuples, each with where it stands."""
    if isinstance(tree, dict):
        tree = tree.items()
    elif isinstance(tree, (list, tuple)):
        tree = enumerate(tree)
    else:
        yield path, tree
        return
    for key, branch in tree:
        yield from leaves(branch, f"{path}[{key!r}]")


def assert_agree(actual: Any, expected: Any, tolerance: float) -> None:
    """Compare two results tensor by tensor, each relative to the largest value in it.

    A result has to be a plain tensor without a graph: a subclass could put off the work that is
    being timed, and a graph would hold memory that the other contestants do not hold.
    """
    given, wanted = dict(leaves(actual)), dict(leaves(expected))
    if given.keys() != wanted.keys():
        raise AssertionError(f"has {sorted(given)} instead of {sorted(wanted)}")
    for path, value in given.items():
        if type(value) is not torch.Tensor:
            raise AssertionError(f"{path} is a {type(value).__name__}, not a plain tensor")
        if value.requires_grad:
            raise AssertionError(f"{path} requires grad")
        scale = wanted[path].abs().max().item()
        torch.testing.assert_close(
            value,
            wanted[path],
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text, path=path: f"{path}: {text}",
        )


def contest(
    transformed: Callable[[Any], Program],
    handwritten: Program,
    *,
    tolerance: float = 1e-4,
) -> Contestants:
    """Give `transformed` to both libraries, so that they run the same source text.

    `transformed(api)` returns the program written with `api.vmap`, `api.grad` and so on.
    """

    def check(actual: Any, expected: Any) -> None:
        assert_agree(actual, expected, tolerance)

    return Contestants((transformed(forall), transformed(torch.func), handwritten), check)
