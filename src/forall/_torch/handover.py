"""Next to torch's own transforms and its compiler, torch's own transforms do the work.

Dynamo traces torch.func natively and cannot trace ours; and inside an active transform of
torch.func ours would not see its tensors, which gives silent zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._torch.dispatch import in_torch_func

if TYPE_CHECKING:
    from collections.abc import Callable


def needed() -> bool:
    """Whether torch's own transforms must run instead of ours."""
    return torch.compiler.is_dynamo_compiling() or in_torch_func()


def call(name: str, *args: Any, **kwargs: Any) -> Callable:
    """torch.func's transform of this name, with these arguments."""
    import torch.func

    return getattr(torch.func, name)(*args, **kwargs)
