"""Every message to the user: echo the call, point at the argument, show the value, give the cure.

Builders return the exception and the caller raises it, so the traceback ends at the check.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from forall._compat.call_site import SourceLine, find_users_line, warn_users_line
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import Wrapper
from forall._core.code_table import find_code

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType


class PerformanceWarning(UserWarning):
    """A warning that a call gave the right result by a slow path that can be avoided."""


class DataDependentError(RuntimeError):
    """The error of an operator that needs one value where each example has its own."""


class CollectiveError(RuntimeError):
    """An error of a collective that is final: no other way to run the call would be better."""


class AxisError(CollectiveError):
    """The error of a collective that not all examples of its axis come to.

    Example:
        >>> def f(x):
        ...     return forall.psum(x, "b") if x > 1 else x
        >>> try:
        ...     forall.vmap(f, axis_name="b")(torch.tensor([1.0, 2.0]))
        ... except forall.AxisError as error:
        ...     print(str(error).splitlines()[0])
        psum(.., 'b'): 1 of 2 examples of axis 'b' come here; the others took another way.
    """


class RankError(CollectiveError):
    """An error on every rank of a mesh: a rank failed, or the ranks came to different places.

    ``rank`` is the rank that failed, None if none did. ``text`` is what it said of its error.

    Example:
        >>> error = forall.RankError("a rank failed, so no rank has a result.")
        >>> isinstance(error, RuntimeError), error.rank
        (True, None)
    """

    rank: int | None = None
    text: str = ""
    is_lost = False  # the process group cannot be used any more

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.told: set[str] = set()  # the process groups whose ranks all raise it


def warn_slow_path(text: str) -> None:
    """Warn of a slow path at the user's line; once, unless the user's filters show more."""
    warn_users_line(text, PerformanceWarning)


def warn_renamed(old: str, new: str) -> None:
    """Warn at the user's line that a public name has changed; once for each name."""
    warn_users_line(f"{old} is now {new}.", DeprecationWarning)


def format_columns(rows: list[tuple[str, ...]]) -> str:
    """Format rows as aligned, indented text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(f"    {line}" for line in lines)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, in the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def format_short(value: object) -> str:
    """Format a tensor as dtype and shape, also within a tree; anything else as a clipped repr."""
    with functions_off():  # which examples run is no matter here
        text = " ".join(_format_value(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _format_value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:  # it may have no shape
            return f"nested {dtype}, {str(value.layout).removeprefix('torch.')}"
        return f"{dtype}{list(value.shape)}"
    if type(value) is list:
        return f"[{', '.join(map(_format_value, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_format_value, value))}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return f"{{{', '.join(f'{k!r}: {_format_value(v)}' for k, v in value.items())}}}"
    return repr(value)


def format_repr_marks(value: Wrapper) -> str:
    """Return the end of a wrapper's repr: its autograd history, and whether it has escaped."""
    text = ""
    if value.grad_fn is not None:
        text = f", grad_fn=<{type(value.grad_fn).__name__}>"
    elif value.requires_grad:
        text = ", requires_grad=True"
    return text if value.level.active else f"{text}, kept after the call"


def type_name_of(value: object) -> str:
    """Return the name of a value's type as a user knows it: our wrappers are tensors."""
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def name_of(func: object) -> str:
    """Return the name of a function for messages."""
    if isinstance(func, functools.partial):
        return f"partial({name_of(func.func)})"
    return getattr(func, "__name__", None) or type(func).__name__


class TransformCall:
    """A call of a transform, formatted as its user would write it when a message needs it."""

    __slots__ = ("func", "options", "verb")

    def __init__(self, verb: str, func: object, **options: object) -> None:
        self.verb = verb
        self.func = func
        self.options = options

    def __str__(self) -> str:
        options = "".join(f", {name}={format_short(value)}" for name, value in self.options.items())
        return f"{self.verb}({name_of(self.func)}{options})"


class CallOrigin(NamedTuple):
    """The transform's call that a level belongs to, for messages."""

    call: TransformCall
    at: tuple[CodeType, int]  # the user's code, and the instruction that it is at
    numbers: Sequence[int]  # of the level's examples, among all of the call
    size: int  # how many examples the call has

    @property
    def is_users(self) -> bool:
        """True if the user wrote the call, not another transform of ours."""
        return not (getattr(self.call.func, "__module__", None) or "").startswith("forall._")

    @property
    def place(self) -> SourceLine:
        code, at = self.at
        lines = (line for start, end, line in code.co_lines() if start <= at < end)
        return SourceLine(code.co_filename, next(lines, None) or code.co_firstlineno)


def make_data_dependent_error(op: str, cure: str) -> DataDependentError:
    place = find_users_line()
    return documented_error(DataDependentError, "data-dependent")(
        f"vmap: {op} asks for a value that differs between the examples.\n"
        f"{format_columns([('at', str(place), place.text())])}\n"
        "All examples run as one, so there is no single answer here.\n"
        f"{cure}"
    )


_CURES = {
    "numpy": "Give numpy's functions x itself (np.sin(x)), or read the results outside vmap.",
    "tolist": "Use torch's operators, or read the results outside vmap.",
    "__reduce_ex__": "Save the results of vmap, or forall.stacked(x): all examples in one tensor.",
}
_CURES["__array__"] = _CURES["numpy"]


def make_no_memory_error(name: str, value: torch.Tensor, size: int) -> DataDependentError:
    call = {"__reduce_ex__": "pickle", "__array__": "np.asarray(x)"}
    row = ("x", f"{format_short(value)}, one for each of {size} examples")
    cure = _CURES.get(name, "Use torch's operators, or forall.stacked(x): all examples together.")
    return documented_error(DataDependentError, "memory-of-one-example")(
        f"vmap: {call.get(name, f'x.{name}()')} asks for the memory of one example.\n"
        f"{format_columns([row])}\n"
        f"All examples lie in one stack, and none has memory of its own.\n{cure}"
    )


def make_shared_write_error(
    op: str, target: torch.Tensor, data: list[torch.Tensor]
) -> RuntimeError:
    rows = [("written to", format_short(target), "from before the call, one for all examples")]
    rows += [("data", format_short(d), "differs between the examples") for d in data]
    return documented_error(RuntimeError, "shared-write")(
        f"vmap: {op} writes per-example data into a tensor that all examples share.\n"
        f"{format_columns(rows)}\n"
        "Each example would overwrite the last one's result. To give every example its own, map "
        "the tensor (in_dims) or clone it inside the function (.clone())."
    )


def make_collective_error(transform: str, func: object) -> RuntimeError:
    """Return the error for an operator of torch.distributed inside a level.

    A collective knows nothing of examples and tangents: its kernels read memory that a wrapper
    does not have, or answer for all examples at once.
    """
    place = find_users_line()
    return RuntimeError(
        f"{transform}: {func} communicates between processes, which has no meaning for one "
        "example or tangent.\n"
        f"{format_columns([('at', str(place), place.text())])}\n"
        "To combine examples of one process, name their axis: vmap(f, axis_name='b') and "
        "forall.psum(x, 'b').\n"
        "To combine processes, return what is to be communicated, and call torch.distributed on "
        f"the result, outside {transform}."
    )


_WANTS_BATCH = re.compile(
    r"(?i)(expect|should be|has to be|needs|only).*\b[1-5]-?D\b"
    r"|expected at least 2 dimensions"  # GroupNorm, which takes the first dim for the batch
    r"|expected weight to be a vector of size equal to the number of channels"
)


def note_missing_axis(error: BaseException) -> None:
    """Add a note to the error of a layer that expects a batch axis and was given one example."""
    if _WANTS_BATCH.search(str(error)) and not hasattr(error, "__notes__"):
        error.add_note(
            "vmap: the function sees one example, without the axis that in_dims names.\n"
            "A layer that wants a batch takes a batch of one: layer(x.unsqueeze(0)).squeeze(0)."
        )


def make_escaped_value_error(
    func: object, value: torch.Tensor, origin: CallOrigin | None
) -> RuntimeError:
    rows = [("used by", str(func)), ("value", f"{format_short(value)}, one for each example")]
    call = "vmap"
    if origin is not None:
        if origin.is_users:
            call = str(origin.call)
            code = find_code(origin.call.func)
            if code is not None:
                rows.append(
                    ("made in", f"{name_of(origin.call.func)}, at {SourceLine.from_code(code)}")
                )
        rows.append(("called", f"at {origin.place}"))
    return documented_error(RuntimeError, "escaped-value")(
        f"{call}: a value of one example is used after the call.\n"
        f"{format_columns(rows)}\n"
        "The examples are there one by one during the call alone. Return it from the function, or "
        "take all examples together: forall.stacked(value)."
    )
