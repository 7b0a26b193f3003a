"""Everything that is swept: op_db, the public names of python_ref_db, and forms that write."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .entries import all_ops, name_of


@dataclass
class Form:
    """Another way to call an entry, with the entry's samples."""

    info: Any
    op: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.info, name)


def entries() -> dict[str, Any]:
    """op_db, then what python_ref_db adds, then forms in place and with out=."""
    ops = all_ops()
    return {**ops, **_public_references(ops), **_forms(ops)}


def _forms(ops: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, info in ops.items():
        if info.inplace_variant is not None:
            found[f"{name} in place"] = Form(info, info.inplace_variant)
        if info.supports_out:
            found[f"{name} out="] = Form(info, _with_out(info.op))
    return found


def _with_out(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        made = op(*args, **kwargs)
        out = [torch.zeros_like(t) for t in tree_leaves(made)]
        op(*args, **kwargs, out=out[0] if isinstance(made, Tensor) else tuple(out))
        return out

    return call


def _public_references(ops: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import python_ref_db
    known = {(op.name, op.variant_test_name) for op in ops.values()}
    found: dict[str, Any] = {}
    for info in python_ref_db:
        public = info.name.removeprefix("_refs.")
        if (public, info.variant_test_name) in known:
            continue
        for where in _namesakes(public):
            found[name_of(info).replace("_refs.", "").replace("_conversions.", "conversion ")] = (
                Form(info, where)
            )
    return found


def _namesakes(name: str) -> Iterator[Callable[..., Any]]:
    """What users call by the name of a reference: a function of torch, or a method of tensors."""
    if name.startswith("_conversions."):
        name = name.removeprefix("_conversions.")
        roots = [Tensor, torch]
    else:
        roots = [torch]
    for root in roots:
        try:
            yield reduce(getattr, name.split("."), root)
        except AttributeError:
            continue
        return
