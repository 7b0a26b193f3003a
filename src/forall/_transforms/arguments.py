"""Picking the arguments that ``argnums`` names, and putting others in their place."""

from __future__ import annotations

from typing import Any

from forall._core.errors import Call, columns, kind, short


def pick(call: Call, args: tuple, argnums: Any) -> Any:
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
        f"{columns([('argnums', short(argnums), kind(argnums))])}\n"
        "Count the positional arguments from 0."
    )


def _place(call: Call, args: tuple, argnum: Any) -> int:
    if not isinstance(argnum, int):
        raise RuntimeError(
            f"{call}: argnums must be an int or a tuple of ints.\n"
            f"{columns([('argnums', short(argnum), kind(argnum))])}\n"
            "Count the positional arguments from 0."
        )
    n = len(args)
    if not -n <= argnum < n:
        can = f"Give an int in [{-n}, {n}), and pass" if n else "Pass"
        raise RuntimeError(
            f"{call}: argnums names an argument that the call does not have.\n"
            f"{columns([('argnums', str(argnum)), ('positional arguments', str(n))])}\n"
            f"{can} the argument by position."
        )
    return argnum % n


def put(args: tuple, argnums: Any, new: Any) -> tuple:
    """``args`` with ``new`` (shaped as `pick` gave it) in place."""
    out = list(args)
    if isinstance(argnums, int):
        out[argnums] = new
    else:
        for a, x in zip(argnums, new, strict=True):
            out[a] = x
    return tuple(out)
