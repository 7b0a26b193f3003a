"""The user's ``vmap`` of an autograd.Function: it runs on batched values in the forward's place.

It gets the batched values of one level, and its results become values of that level. Autograd
records the Function itself on examples, with its own backward, as it does without such a rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from forall._compat import pytree
from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short, type_name_of
from forall._core.levels import find_innermost_of, run_outside, stack
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.rule_makers.basic import is_mapped
from forall._vmap.vmap_level import VmapLevel

_Function = torch.autograd.Function


class FunctionVmapInfo(NamedTuple):
    """The facts about the enclosing `vmap` that torch passes to such a rule."""

    batch_size: int
    randomness: str


def find_batched_form(cls: Any, args: tuple) -> Any:
    """Return ``cls``, or its form for batched values if it has a rule for these arguments."""
    if not has_vmap_method(cls) or _find_level(args) is None:
        return cls
    found = _forms.get(cls)
    if found is None:
        found = _forms[cls] = derive_function(cls, "forward", _make_forward(cls))
    return found


def derive_function(cls: Any, name: str, method: Any) -> Any:
    """Return ``cls`` with another static method of that name; it is still the user's."""
    return type(cls.__name__, (cls,), {name: staticmethod(method), "__module__": cls.__module__})


_forms: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def has_vmap_method(cls: Any) -> bool:
    """True if ``cls`` has a ``vmap`` of its own, and a ``setup_context``, which torch requires."""
    return (
        cls.vmap is not _Function.vmap
        and not cls.generate_vmap_rule
        and cls.setup_context is not _Function.setup_context
    )


def _find_level(args: tuple) -> VmapLevel | None:
    """Return the innermost level of these arguments, if all its examples run as one."""
    level = find_innermost_of(args)
    if not isinstance(level, VmapLevel) or level.records_on_value:
        return None
    if stack.diverged or level.root is not level:
        return None
    leaves = pytree.get_leaves(args)
    return level if any(is_mapped(a, level) for a in leaves) else None


def _make_forward(cls: Any) -> Any:
    def forward(*args: Any) -> Any:
        level = _find_level(args)
        if level is None:  # the examples have diverged since
            return cls.forward(*args)

        leaves, spec = pytree.flatten(args)
        axes = [a.axis if is_mapped(a, level) else None for a in leaves]
        own = [a.value if type(a) is BatchedTensor and a.level is level else a for a in leaves]
        in_dims, stacks = pytree.unflatten(axes, spec), pytree.unflatten(own, spec)
        with run_outside(level):
            given = cls.vmap(
                FunctionVmapInfo(level.size, level.config.randomness), in_dims, *stacks
            )
        if not isinstance(given, tuple) or len(given) != 2:
            raise documented_error(RuntimeError, "custom-function-vmap")(
                f"{cls.__name__}.vmap: returns the outputs and their out_dims.\n"
                f"{format_columns([('returned', format_short(given), type_name_of(given))])}\n"
                "Return (outputs, out_dims), with an int or None for each output."
            )
        known = {id(s): a for s, a in zip(own, leaves, strict=True) if isinstance(a, torch.Tensor)}
        return _wrap_outputs(cls, *given, level, known)

    return forward


def _wrap_outputs(cls: Any, out: Any, out_dims: Any, level: VmapLevel, own: dict[int, Any]) -> Any:
    """Return outputs as values of the level; the batched value of an argument is that argument."""
    if isinstance(out, (tuple, list)):
        dims = out_dims if isinstance(out_dims, (tuple, list)) else (out_dims,) * len(out)
        if len(dims) != len(out):
            rows = [("out_dims", format_short(out_dims)), ("outputs", str(len(out)))]
            raise documented_error(RuntimeError, "custom-function-vmap")(
                f"{cls.__name__}.vmap: out_dims do not fit the outputs.\n"
                f"{format_columns(rows)}\n"
                "Return an int or None for each output."
            )
        return tuple(_wrap_output(o, d, level, own) for o, d in zip(out, dims, strict=True))
    if isinstance(out_dims, (tuple, list)) and len(out_dims) == 1:
        (out_dims,) = out_dims
    return _wrap_output(out, out_dims, level, own)


def _wrap_output(out: Any, dim: int | None, level: VmapLevel, own: dict[int, Any]) -> Any:
    if not isinstance(out, torch.Tensor):
        return out
    if id(out) in own:
        return own[id(out)]
    return wrap_stack(out, None if dim is None else dim % out.dim(), level)
