"""Loop carries: a tree that keeps its structure, and its shapes, dtypes and devices.

A Python number in a carry is weakly typed: the body may return another number for it, or a tensor
of shape (), which then keeps its dtype like every other tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._core.errors import columns, kind, name_of, short

NUMBERS = (bool, int, float, complex)


class Called:
    """A call of an operator, formatted as its user would write it when a message needs it.

    A star in ``text`` stands for the functions.
    """

    __slots__ = ("functions", "text")

    def __init__(self, text: str, *functions: Any) -> None:
        self.text = text
        self.functions = functions
        for f in functions:
            if not callable(f):
                raise TypeError(
                    f"{self}: what it runs must be a function.\n"
                    f"{columns([('given', short(f), kind(f))])}\n"
                    "Pass the function itself, not its result."
                )

    def __str__(self) -> str:
        names = (name_of(f) if callable(f) else short(f) for f in self.functions)
        return self.text.replace("*", ", ".join(names))


def settled(call: Called, name: str, old: Any, new: Any, step: int) -> Any:
    """Return the tree ``new``; raise if its structure, shapes or dtypes differ from ``old``."""
    with functions_off():
        if _clearly_like(old, new):
            return new
    before, spec = pytree.flatten(old)
    after, its_spec = pytree.flatten(ordered(old, new))
    if spec != its_spec:
        raise _structures_differ(call, name, spec, its_spec, step)
    with functions_off():
        kept = [_kept(a, b) for a, b in zip(before, after, strict=True)]
    for i, found in enumerate(kept):
        if found is NotImplemented:
            raise _leaves_differ(call, name + paths(old)[i], before[i], after[i], step)
    return pytree.unflatten(kept, spec)


def ordered(old: Any, new: Any) -> Any:
    """Return ``new`` with its dicts in the key order of ``old``, if the keys agree."""
    t = type(old)
    if t is not type(new):
        return new
    if t is dict and old.keys() == new.keys():
        return {k: ordered(v, new[k]) for k, v in old.items()}
    if (t is tuple or t is list) and len(old) == len(new):
        return t(map(ordered, old, new))
    return new


def _kept(old: Any, new: Any) -> Any:
    """Return the leaf ``new`` as it replaces ``old``; NotImplemented if it does not fit."""
    if isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor):
            return new if alike(old, new) else NotImplemented
        return like(old, new) if isinstance(new, NUMBERS) else NotImplemented
    if isinstance(old, NUMBERS):
        fits = isinstance(new, NUMBERS) or (isinstance(new, torch.Tensor) and not new.dim())
        return new if fits else NotImplemented
    return new if same(old, new) else NotImplemented


def _clearly_like(old: Any, new: Any) -> bool:
    """True if ``new`` is like ``old``, found without flattening, which takes longer than a step."""
    t = type(old)
    if t is not type(new):
        return False
    if t is torch.Tensor or issubclass(t, torch.Tensor):
        return alike(old, new)
    if t is tuple or t is list:
        return len(old) == len(new) and all(map(_clearly_like, old, new))
    if t is dict:
        return [*old] == [*new] and all(_clearly_like(v, new[k]) for k, v in old.items())
    return t in NUMBERS


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # noqa: BLE001 - an object may answer with anything, and then is not the same
        return False


def like(tensor: torch.Tensor, number: complex) -> Any:
    """Return a Python number as a tensor like this one; NotImplemented if it does not fit."""
    if tensor.dim() or torch.result_type(tensor, number) != tensor.dtype:
        return NotImplemented
    return torch.full((), number, dtype=tensor.dtype, device=tensor.device)


def stacked(call: Called, column: list, path: str) -> Any:
    """Stack the ys of all steps. Numbers among tensors become tensors."""
    first = next((y for y in column if isinstance(y, torch.Tensor)), None)
    if first is not None:
        found = [y if isinstance(y, torch.Tensor) else like(first, y) for y in column]
        odd = next((i for i, y in enumerate(found) if y is NotImplemented), None)
        if odd is not None:
            raise _leaves_differ(call, path, first, column[odd], odd)
        return torch.stack(found)
    if isinstance(column[0], NUMBERS):
        return torch.tensor(column)
    if column[0] is None:
        return None
    raise TypeError(
        f"{call}: what each step gives must be tensors, numbers or None.\n"
        f"{columns([(path, short(column[0]), kind(column[0]))])}\n"
        "They are stacked: return a tensor."
    )


def paths(tree: Any) -> list[str]:
    """Return the path of each leaf of a tree, as text."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def _structures_differ(call: Called, name: str, old: Any, new: Any, step: int) -> TypeError:
    rows = [("before", pytree.text(old)), (f"step {step}", pytree.text(new))]
    return TypeError(
        f"{call}: {name} changes its structure.\n{columns(rows)}\n"
        "Each step returns a tree like the one before it."
    )


def _leaves_differ(call: Called, path: str, old: Any, new: Any, step: int) -> TypeError:
    rows = [("before", path, told(old, new)), (f"step {step}", path, told(new, old))]
    return TypeError(
        f"{call}: {path} is not what it was.\n{columns(rows)}\n"
        "It keeps its shape, dtype and device from step to step.\n"
        f"{_cure(old, new)}, or start with what the function returns."
    )


def _cure(old: Any, new: Any) -> str:
    if not isinstance(old, torch.Tensor):
        return "Return what the function is given"
    if not isinstance(new, torch.Tensor):
        return f"Return a tensor of shape {tuple(old.shape)} and dtype {old.dtype}"
    if old.shape != new.shape:
        return f"Return a tensor of shape {tuple(old.shape)}"
    to = old.dtype if old.dtype != new.dtype else repr(str(old.device))
    return f"Return it converted, .to({to})"


def told(value: Any, beside: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{short(value)} ({kind(value)})"
    elsewhere = isinstance(beside, torch.Tensor) and beside.device != value.device
    return f"{short(value)}{f' on {value.device}' if elsewhere else ''}"
