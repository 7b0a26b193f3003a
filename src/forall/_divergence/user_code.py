"""Which functions are not the user's, and run as they are.

Code of other libraries is converted only where a run would else end: where it has written or drawn
before its examples part, so that it cannot be run again for each group on the spot. A solver that
takes steps of its own length is an example.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from forall._compat.exception_safety import contextmanager
from forall._divergence.thread_state import thread

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
_NEVER = frozenset(
    {"torch", "numpy", "scipy", "jax", "sympy", "pandas", "matplotlib", "networkx", "_pytest"}
    | {"forall"}
)
USERS, OTHERS, NEVER = "the user's", "another library's", "never converted"


def is_library(code: CodeType) -> bool:
    """Whether a function is to run as it is."""
    kind = whose(code)
    return kind is NEVER or (kind is OTHERS and not thread.deeply)


def whose(code: CodeType) -> str:
    """Whose function it is: one of `OTHERS` may be converted where need be."""
    return _whose(code.co_filename, code.co_name)


@functools.cache
def _whose(filename: str, name: str) -> str:
    if filename.startswith("<frozen"):
        return NEVER
    if any(name == known and filename.endswith(ending) for ending, known in _HANDS_ON):
        return USERS
    for home in _installed():
        if filename.startswith(home):
            package = filename.removeprefix(home).replace("\\", "/").lstrip("/").partition("/")[0]
            return NEVER if package in _NEVER else OTHERS
    return NEVER if filename.startswith(_libraries()) else USERS


@functools.cache
def _libraries() -> tuple[str, ...]:
    import sysconfig  # four milliseconds of `import forall`

    found = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return (*{*found, __file__.rsplit("/_divergence/", 1)[0]},)


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
