"""Which functions are not the user's, and run as they are.

Code of other libraries is converted only where a run would else end: where it has written or drawn
before its examples part, so that it cannot be run again for each group on the spot. A solver that
takes steps of its own length is an example.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forall._lanes.state import thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

# Functions of libraries that only hand on to the user's: converted like the user's own
_HANDS_ON = {
    ("torch/utils/_contextlib.py", "decorate_context"),
    ("torch/nn/modules/container.py", "forward"),
    ("contextlib.py", "inner"),
}
# Of those that pip installs, these are never converted: what they do is told operator by operator,
# or is no work on tensors.
_NEVER = ("torch", "numpy", "scipy", "jax", "sympy", "pandas", "matplotlib", "networkx", "_pytest")


def is_library(code: CodeType) -> bool:
    """Whether a function is not the user's."""
    return _is_library(code.co_filename, code.co_name, thread.deeply)


def is_others(code: CodeType) -> bool:
    """Whether a function is of a library that may be converted where need be."""
    return _is_library(code.co_filename, code.co_name, deeply=False) and not _is_library(
        code.co_filename, code.co_name, deeply=True
    )


@functools.cache
def _is_library(filename: str, name: str, deeply: bool) -> bool:
    if filename.startswith("<frozen"):
        return True
    for ending, known in _HANDS_ON:
        if name == known and filename.endswith(ending):
            return False
    if deeply and filename.startswith(_installed()):
        rest = filename.removeprefix(next(p for p in _installed() if filename.startswith(p)))
        return rest.lstrip("/\\").replace("\\", "/").partition("/")[0] in _NEVER
    return filename.startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    import sysconfig  # four milliseconds of `import forall`

    found = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return (*{*found, *_installed(), __file__.rsplit("/_lanes/", 1)[0]},)


@functools.cache
def _installed() -> tuple[str, ...]:
    import sysconfig

    return (*{sysconfig.get_path(name) for name in ("purelib", "platlib")},)


@contextmanager
def deeply(on: bool) -> Iterator[None]:
    """Other libraries are converted in the body, or only met: `thread.met_others` tells."""
    was, met = thread.deeply, thread.met_others
    thread.deeply, thread.met_others = was or on, False
    try:
        yield
    finally:
        thread.deeply, thread.met_others = was, met or thread.met_others
