"""Loop carries: a tree that keeps its structure, and its shapes, dtypes and devices.

A Python number in a carry is weakly typed: the body may return another number for it, or a tensor
of shape (), which then keeps its dtype like every other tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short, name_of, type_name_of

NUMBERS = (bool, int, float, complex)


class OperatorCall:
    """A call of an operator, formatted as its user would write it when a message needs it.

    A star in ``text`` stands for the functions.
    """

    __slots__ = ("functions", "text")

    def __init__(self, text: str, *functions: Any) -> None:
        self.text = text
        self.functions = functions
        for f in functions:
            if not callable(f):
                raise documented_error(TypeError, "not-callable")(
                    f"{self}: what it runs must be a function.\n"
                    f"{format_columns([('given', format_short(f), type_name_of(f))])}\n"
                    "Pass the function itself, not its result."
                )

    def __str__(self) -> str:
        names = (name_of(f) if callable(f) else format_short(f) for f in self.functions)
        return self.text.replace("*", ", ".join(names))


def check_carry(call: OperatorCall, name: str, old: Any, new: Any, step: int) -> Any:
    """Return the tree ``new``; raise if its structure, shapes or dtypes differ from ``old``."""
    with functions_off():
        if _is_clearly_alike(old, new):
            return new
    before, spec = pytree.flatten(old)
    after, its_spec = pytree.flatten(order_keys(old, new))
    if spec != its_spec:
        raise _structures_differ(call, name, spec, its_spec, step)
    with functions_off():
        kept = [_check_leaf(a, b) for a, b in zip(before, after, strict=True)]
    for i, found in enumerate(kept):
        if found is NotImplemented:
            raise _leaves_differ(call, name + find_leaf_paths(old)[i], before[i], after[i], step)
    return pytree.unflatten(kept, spec)


def order_keys(old: Any, new: Any) -> Any:
    """Return ``new`` with its dicts in the key order of ``old``, if the keys agree."""
    t = type(old)
    if t is not type(new):
        return new
    if t is dict and old.keys() == new.keys():
        return {k: order_keys(v, new[k]) for k, v in old.items()}
    if (t is tuple or t is list) and len(old) == len(new):
        return t(map(order_keys, old, new))
    return new


def _check_leaf(old: Any, new: Any) -> Any:
    """Return the leaf ``new`` as it replaces ``old``; NotImplemented if it does not fit."""
    if isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor):
            return new if has_same_meta(old, new) else NotImplemented
        return number_as_tensor(old, new) if isinstance(new, NUMBERS) else NotImplemented
    if isinstance(old, NUMBERS):
        fits = isinstance(new, NUMBERS) or (isinstance(new, torch.Tensor) and not new.dim())
        return new if fits else NotImplemented
    return new if is_same_object(old, new) else NotImplemented


def _is_clearly_alike(old: Any, new: Any) -> bool:
    """True if ``new`` is like ``old``, found without flattening, which takes longer than a step."""
    t = type(old)
    if t is not type(new):
        return False
    if t is torch.Tensor or issubclass(t, torch.Tensor):
        return has_same_meta(old, new)
    if t is tuple or t is list:
        return len(old) == len(new) and all(map(_is_clearly_alike, old, new))
    if t is dict:
        return [*old] == [*new] and all(_is_clearly_alike(v, new[k]) for k, v in old.items())
    return t in NUMBERS


def has_same_meta(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def is_same_object(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # noqa: BLE001 - an object may answer with anything, and then is not the same
        return False


def number_as_tensor(tensor: torch.Tensor, number: complex) -> Any:
    """Return a Python number as a tensor like this one; NotImplemented if it does not fit."""
    if tensor.dim() or torch.result_type(tensor, number) != tensor.dtype:
        return NotImplemented
    return torch.full((), number, dtype=tensor.dtype, device=tensor.device)


def stack_ys(call: OperatorCall, column: list, path: str) -> Any:
    """Stack the ys of all steps. Numbers among tensors become tensors."""
    first = next((y for y in column if isinstance(y, torch.Tensor)), None)
    if first is not None:
        found = [y if isinstance(y, torch.Tensor) else number_as_tensor(first, y) for y in column]
        odd = next((i for i, y in enumerate(found) if y is NotImplemented), None)
        if odd is not None:
            raise _leaves_differ(call, path, first, column[odd], odd)
        return torch.stack(found)
    if isinstance(column[0], NUMBERS):
        return torch.tensor(column)
    if column[0] is None:
        return None
    raise documented_error(TypeError, "scan-results")(
        f"{call}: what each step gives must be tensors, numbers or None.\n"
        f"{format_columns([(path, format_short(column[0]), type_name_of(column[0]))])}\n"
        "They are stacked: return a tensor."
    )


def find_leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf of a tree, as text."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def _structures_differ(call: OperatorCall, name: str, old: Any, new: Any, step: int) -> TypeError:
    rows = [("before", pytree.format_tree(old)), (f"step {step}", pytree.format_tree(new))]
    return documented_error(TypeError, "carry-changes")(
        f"{call}: {name} changes its structure.\n{format_columns(rows)}\n"
        "Each step returns a tree like the one before it."
    )


def _leaves_differ(call: OperatorCall, path: str, old: Any, new: Any, step: int) -> TypeError:
    rows = [
        ("before", path, describe_leaf(old, new)),
        (f"step {step}", path, describe_leaf(new, old)),
    ]
    return documented_error(TypeError, "carry-changes")(
        f"{call}: {path} is not what it was.\n{format_columns(rows)}\n"
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


def describe_leaf(value: Any, beside: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{format_short(value)} ({type_name_of(value)})"
    elsewhere = isinstance(beside, torch.Tensor) and beside.device != value.device
    return f"{format_short(value)}{f' on {value.device}' if elsewhere else ''}"
