"""`debug_unwrap`: the plain tensor behind a tensor inside a transform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forall._compat import functorch_interop
from forall._compat.tensor_subclass import unwrap_posed
from forall._compat.wrapper_tensor import Wrapper

if TYPE_CHECKING:
    import torch


def debug_unwrap(tensor: torch.Tensor, *, recurse: bool = True) -> torch.Tensor:
    """The plain tensor behind ``tensor``, for a look at it in a debugger.

    Inside `vmap` that is the stack of all examples, wherever their axis lies; inside `jvp` a
    tensor with its tangent; outside every transform ``tensor`` itself. For an example of shape
    ``(*S)`` that was mapped along dim 0 it has shape ``(B, *S)``.

    It has no history, and what is computed with it is the same for all examples: print it, but do
    not go on with it.

    Args:
        recurse: through all transforms; False takes off the innermost one alone.

    Example:
        >>> def f(x):                                  # one example: (2,)
        ...     print(debug_unwrap(x))
        ...     return x.sum()
        >>> forall.vmap(f, in_dims=1)(torch.arange(6.0).reshape(2, 3))
        tensor([[0., 1., 2.],
                [3., 4., 5.]])
        tensor([3., 5., 7.])
    """
    tensor = unwrap_posed(tensor)
    if not isinstance(tensor, Wrapper):
        return functorch_interop.call_torch_func("debug_unwrap", tensor, recurse=recurse)
    return debug_unwrap(tensor.value) if recurse else tensor.value
