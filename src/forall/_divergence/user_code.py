"""The distinction of user code, which is converted, from library code, which is not.

Code of other libraries is converted only if vmap would fail otherwise. This happens if it writes or
draws before its examples diverge, so that it cannot be rerun for each group on the spot. A solver
with an adaptive step size is an example.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from forall._compat.exception_safety import contextmanager
from forall._divergence.thread_state import LibraryUse, thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

# Functions of libraries that only call the user's: converted like the user's own
_HANDS_ON = {
    ("torch/utils/_contextlib.py", "decorate_context"),
    ("torch/nn/modules/container.py", "forward"),
    ("contextlib.py", "inner"),
}
# Of the installed packages, these are never converted: each of their operators is intercepted, or
# they do no work on tensors.
_NEVER = frozenset(
    {"torch", "numpy", "scipy", "jax", "sympy", "pandas", "matplotlib", "networkx", "_pytest"}
    | {"forall"}
)
USERS, OTHERS, NEVER = "the user's", "another library's", "never converted"


def is_library_code(code: CodeType) -> bool:
    """True if a function is to run unconverted."""
    kind = find_owner(code)
    return kind is NEVER or (kind is OTHERS and not thread.libraries.are_converted)


def find_owner(code: CodeType) -> str:
    """Return the owner of a function: USERS, OTHERS (converted if needed) or NEVER."""
    return _find_owner(code.co_filename, code.co_name)


@functools.cache
def _find_owner(filename: str, name: str) -> str:
    if filename.startswith("<frozen"):
        return NEVER
    if any(name == known and filename.endswith(ending) for ending, known in _HANDS_ON):
        return USERS
    for home in _find_site_folders():
        if filename.startswith(home):
            package = filename.removeprefix(home).replace("\\", "/").lstrip("/").partition("/")[0]
            return NEVER if package in _NEVER else OTHERS
    return NEVER if filename.startswith(_find_stdlib_folders()) else USERS


@functools.cache
def _find_stdlib_folders() -> tuple[str, ...]:
    import sysconfig  # four milliseconds of `import forall`

    found = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return (*{*found, __file__.rsplit("/_divergence/", 1)[0]},)


@functools.cache
def _find_site_folders() -> tuple[str, ...]:
    import sysconfig

    return (*{sysconfig.get_path(name) for name in ("purelib", "platlib")},)


@contextmanager
def convert_libraries(on: bool) -> Iterator[LibraryUse]:
    """Context in which code of other libraries is converted if ``on`` is True."""
    was = thread.libraries
    now = thread.libraries = LibraryUse(are_converted=was.are_converted or on)
    try:
        yield now
    finally:
        thread.libraries = was
        was.were_called |= now.were_called
