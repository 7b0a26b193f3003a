"""Every message to the user: echo the call, point at the argument, show the value, give the cure.

Builders return the exception and the caller raises it, so the traceback ends at the check.
"""

from __future__ import annotations

import functools

import torch


class PerformanceWarning(UserWarning):
    """Something ran right, but by a slow way that has a cure."""


class DataDependentError(RuntimeError):
    """An operator asked for one value where every example has its own."""


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned, indented text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(f"    {line}" for line in lines)


def short(value: object) -> str:
    """A tensor as dtype and shape, also within a tree; anything else as a clipped repr."""
    text = " ".join(_shown(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) is list:
        return f"[{', '.join(map(_shown, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_shown, value))}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return f"{{{', '.join(f'{k!r}: {_shown(v)}' for k, v in value.items())}}}"
    return repr(value)


def kind(value: object) -> str:
    """The type of a value as a user knows it: our wrappers are tensors."""
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def name_of(func: object) -> str:
    """What a user calls this function."""
    if isinstance(func, functools.partial):
        return f"partial({name_of(func.func)})"
    return getattr(func, "__name__", None) or type(func).__name__


class Call:
    """A call as its user would write it, spelled out only where a message needs it."""

    __slots__ = ("func", "options", "verb")

    def __init__(self, verb: str, func: object, **options: object) -> None:
        self.verb = verb
        self.func = func
        self.options = options

    def __str__(self) -> str:
        options = "".join(f", {name}={short(value)}" for name, value in self.options.items())
        return f"{self.verb}({name_of(self.func)}{options})"


def data_dependent(op: str, cure: str) -> DataDependentError:
    return DataDependentError(
        f"vmap: {op} asks for a value that differs between the examples.\n"
        "All examples run as one, so there is no single answer here.\n"
        f"{cure}"
    )


def shared_write(op: str, target: torch.Tensor, data: list[torch.Tensor]) -> RuntimeError:
    rows = [("written to", short(target), "from before the call, one for all examples")]
    rows += [("data", short(d), "differs between the examples") for d in data]
    return RuntimeError(
        f"vmap: {op} writes per-example data into a tensor that all examples share.\n"
        f"{columns(rows)}\n"
        "Each example would overwrite the last one's result. To give every example its own, map "
        "the tensor (in_dims) or clone it inside the function (.clone())."
    )


def escaped(func: object) -> RuntimeError:
    return RuntimeError(
        f"vmap: {name_of(func)} takes the derivative of a value that was kept from a vmap which "
        "has ended.\n"
        "It stands for an example that is no longer there.\n"
        "Return it from the function, and use the result of vmap."
    )
