"""Picking the arguments that ``argnums`` names, and putting others in their place."""

from __future__ import annotations

from typing import Any

from forall._core.errors import columns


def pick(call: str, args: tuple, argnums: Any) -> Any:
    """The argument at ``argnums``, or the tuple of them."""
    if isinstance(argnums, int) and not isinstance(argnums, bool):
        return args[_place(call, args, argnums)]
    if isinstance(argnums, tuple):
        if not argnums:
            raise RuntimeError(f"{call}: argnums must not be empty.\nName at least one argument.")
        places = [_place(call, args, a) for a in argnums]
        if len(set(places)) < len(places):
            raise RuntimeError(
                f"{call}: argnums names an argument twice.\n"
                f"{columns([('argnums', repr(argnums))])}\nName each argument once."
            )
        return tuple(args[p] for p in places)
    raise RuntimeError(
        f"{call}: argnums must be an int or a tuple of ints.\n"
        f"{columns([('argnums', repr(argnums), type(argnums).__name__)])}\n"
        "Count the positional arguments from 0."
    )


def _place(call: str, args: tuple, argnum: Any) -> int:
    if not isinstance(argnum, int) or not -len(args) <= argnum < len(args):
        raise RuntimeError(
            f"{call}: argnums names an argument that the call does not have.\n"
            f"{columns([('argnums', repr(argnum)), ('positional arguments', str(len(args)))])}\n"
            f"Give an int in [{-len(args)}, {len(args)}), and pass the argument by position."
        )
    return argnum % len(args)


def put(args: tuple, argnums: Any, new: Any) -> tuple:
    """``args`` with ``new`` (shaped as `pick` gave it) in place."""
    out = list(args)
    if isinstance(argnums, int):
        out[argnums] = new
    else:
        for a, x in zip(argnums, new, strict=True):
            out[a] = x
    return tuple(out)
