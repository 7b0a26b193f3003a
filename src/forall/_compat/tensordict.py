"""Collections of tensors that share their first dims, as tensordict's do.

torch's pytrees flatten them, and the context of a collection's node records the shared dims. An
example of a collection has one of them less, and a stack of results one more. The dims of in_dims
and out_dims count among the shared dims. A collection is recognised by its node's ``batch_size``,
without an import of tensordict.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import TreeSpec

from forall._compat.documented_error import documented_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

# Parts of tensordict that do more than make collections of others: they read and write files,
# share memory, run other processes, keep graphs of CUDA.
_MODULES_WITH_EFFECTS = re.compile(
    r"tensordict\.(.*memmap|persistent|store|_ucxx|_archive|_datasets|_reductions|_?tabular|_arrow"
    r"|_safetensors|_base\.serialization|_base\.distributed|nn\.cudagraphs|prototype|_?testing)\b.*"
)
# Functions of the other parts that do.
_FUNCTIONS_WITH_EFFECTS = re.compile(
    r"(?!is_|_is_|_leaf_is_|_maybe_|_check_|load_state_dict|_load_from_state_dict)"
    r".*(memmap|share_memory|pin_mem|save|dump|load|send|recv|remote|all_gather|all_reduce"
    r"|gather_and_stack|consolidate|executor|multithread|proc_|print)"
    r"|_?(map|map_iter|reduce|scatter|broadcast|record_stream|data_ptr|int_generator)"
    r"|(to|from)_(csv|h5|json|pandas|parquet|store|zarr)"
)


def _has_tensordict(spec: TreeSpec) -> bool:
    return is_loaded() and _has_collection(spec)


def _has_collection(spec: TreeSpec) -> bool:
    return (
        _get_batch_size(spec) is not None
        or _is_lazy_stack(spec)
        or any(map(_has_collection, spec.children()))
    )


def _is_lazy_stack(spec: TreeSpec) -> bool:
    """Return True for a lazy stack: a collection of collections, each with its own tensors."""
    return isinstance(spec._context, dict) and "stack_dim" in spec._context


def is_loaded() -> bool:
    """Return True if tensordict was imported: no object is a collection before."""
    return "tensordict" in sys.modules


def is_of_tensordict(module: str) -> bool:
    """Return True for the name of a module of tensordict's."""
    return module.partition(".")[0] == "tensordict"


def is_pure_module(module: str) -> bool:
    """Return True for a module of tensordict's that only makes collections of others."""
    return is_of_tensordict(module) and _MODULES_WITH_EFFECTS.fullmatch(module) is None


def has_effects(code: CodeType, module: str) -> bool:
    """Return True for code of tensordict's with effects besides on collections and tensors."""
    return is_of_tensordict(module) and (
        not is_pure_module(module)
        or _FUNCTIONS_WITH_EFFECTS.fullmatch(code.co_name) is not None
        or (module == "tensordict._utils_options" and code.co_name in ("set", "__exit__"))
    )


def is_context_value(value: Any) -> bool:
    """Return True for an immutable object in the context of a collection's node."""
    kind = type(value)
    return kind.__module__ == "tensordict._pytree" and not kind.__dictoffset__


def is_setting(value: Any) -> bool:
    """Return True for an object that holds one of tensordict's settings, as its ``_mode``."""
    kind = type(value)
    return kind.__name__ == "_ContextManager" and is_of_tensordict(kind.__module__)


def find_params_class() -> Any:
    """Return the class of modules that hold a collection, which torch's pytrees do not flatten.

    It is an empty tuple if tensordict has not been imported: no object is an instance of that.
    """
    module = sys.modules.get("tensordict.nn.params")
    return getattr(module, "TensorDictParams", ())


def get_collection(module: Any) -> Any:
    """Return the collection that such a module holds: its tensors are the module's parameters."""
    return module._param_td


def count_from_front(spec: TreeSpec, dims: list, more: int = 0) -> list:
    """Return the dim of each leaf, from the front; ``more`` shared dims will be added later."""
    if not _has_tensordict(spec):
        return dims
    found: list = []
    left = iter(dims)

    def walk(spec: TreeSpec, among: int | None) -> None:
        among = (
            len(_get_batch_size(spec))
            if among is None and _get_batch_size(spec) is not None
            else among
        )
        if spec.type is None:
            d = next(left)
            if among is not None and isinstance(d, int) and -among - more <= d < 0:
                d += among + more
            found.append(d)
        for child in spec.children():
            walk(child, among)

    walk(spec, None)
    return found


def make_example_spec(spec: TreeSpec, dims: list) -> TreeSpec:
    """Return the tree of an example, whose collections have lost the batch axis."""
    return _replace_dims(spec, iter(dims), [], 1)[0] if _has_tensordict(spec) else spec


def make_batch_spec(spec: TreeSpec, dims: list, size: int) -> TreeSpec:
    """Return the tree of all examples' results, whose collections have one dim more."""
    return _replace_dims(spec, iter(dims), [size], 0)[0] if _has_tensordict(spec) else spec


def _get_batch_size(spec: TreeSpec) -> Any:
    """Return the dims that the tensors of a collection share; None for any other node."""
    kept = spec._context
    size = kept.get("batch_size") if isinstance(kept, dict) else None
    return size if isinstance(size, torch.Size) else getattr(size, "batch_size", None)


def _replace_dims(spec: TreeSpec, dims: Iterator, new: list, gone: int) -> tuple[TreeSpec, set]:
    """Return the tree with ``new`` dims in the place of ``gone`` others, and its leaves' dims."""
    if spec.type is None:
        return spec, {next(dims)}
    children, found = [], set()
    for child in spec.children():
        changed, its = _replace_dims(child, dims, new, gone)
        children.append(changed)
        found |= its
    kept = spec._context
    size = _get_batch_size(spec)
    if _is_lazy_stack(spec) and found != {None}:
        raise documented_error(NotImplementedError, "tensor-subclass")(
            f"vmap: a {spec.type.__name__} keeps its examples apart, one tensor for each.\n"
            f"    stack_dim   {kept['stack_dim']}\n"
            "Stack its tensors (x.contiguous(), or x.to_tensordict())."
        )
    (dim,) = found if len(found) == 1 else (None,)
    if size is not None and isinstance(dim, int) and 0 <= dim <= len(size):
        names = kept["names"]
        size = [*size[:dim], *new, *size[dim + gone :]]
        names = names and [*names[:dim], *[None] * len(new), *names[dim + gone :]]
        kept = {**kept, "batch_size": type(kept["batch_size"])(torch.Size(size)), "names": names}
    return TreeSpec(spec.type, kept, children), found
