"""`stacked`: all examples of a tensor, as one tensor."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.documented_error import documented_error
from forall._compat.tensor_subclass import (
    convert_to_class,
    get_users_class,
    is_of_users_class,
    unwrap_posed,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import type_name_of
from forall._core.levels import run_outside
from forall._divergence.batched_scalar import BatchedScalar
from forall._vmap import boundary
from forall._vmap.batched_tensor import BatchedTensor


def stacked(tensor: Any) -> torch.Tensor:
    """All examples of ``tensor``, a value from inside a `vmap`, as one tensor.

    For an example of shape ``(*S)`` it has shape ``(B, *S)``, and

        stacked(t)[i] = what t was for example i.

    Its history is kept, so it can be differentiated. Also for values that the function left
    behind, once the call is over: what a forward hook collected, what was put in a cache.
    Then it goes through every `vmap` that has ended, the outermost first: ``(B1, B2, *S)``.
    During the call it takes the innermost one off, and the result is the same for all examples.

    A Python number, as ``x.item()`` gives one for each example, becomes a tensor of shape ``(B,)``
    of dtype bool, int64, float64 or complex128.

    Outside every transform ``tensor`` is its own stack; what the function made without its
    arguments is repeated for each example.

    Cost: none, or one copy where the tensor is an argument's memory or the same for all examples.

    Raises:
        TypeError: for what is neither a tensor nor a number of each example.
        NotImplementedError: for a value of a `jvp` that is running.

    Source: what `torch.nn.Module.register_forward_hook` collects is the batch, when PyTorch is
    used without transforms; this gives back that batch.

    Example:
        >>> layer = torch.nn.Linear(3, 4)
        >>> seen = []
        >>> hook = layer.register_forward_hook(lambda layer, args, out: seen.append(out))
        >>> out = forall.vmap(layer)(torch.ones(5, 3))
        >>> forall.stacked(seen[0]).shape              # (4,) of one example -> (5, 4)
        torch.Size([5, 4])
    """
    if type(tensor) is BatchedScalar:
        tensor = tensor.whole
    if not isinstance(tensor, torch.Tensor):
        raise documented_error(TypeError, "stacked")(
            "stacked: the argument is no tensor, and no number of each example.\n"
            f"    given   {type_name_of(tensor)}\n"
            "Give it one tensor at a time."
        )
    known, tensor = tensor, unwrap_posed(tensor)
    first = True
    while isinstance(tensor, Wrapper) and (first or not tensor.level.active):
        level, first = tensor.level, False
        if isinstance(tensor, BatchedTensor):
            with run_outside(level):
                tensor = boundary.example_to_stack(tensor, 0, level)  # pyright: ignore[reportArgumentType]
        elif level.active:
            raise documented_error(NotImplementedError, "tangent-lost")(
                "stacked: a value of a jvp that is running has a tangent, which would be lost.\n"
                "Take the stack outside the jvp, or of x.detach()."
            )
        else:
            tensor = level.fallback_value(tensor)
    return (
        tensor
        if tensor is unwrap_posed(known) or not is_of_users_class(known)
        else convert_to_class(tensor, get_users_class(known))
    )
