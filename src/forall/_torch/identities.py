"""Identity matrices that are known to be such: the directions that whole Jacobians are made of.

What multiplies one is read instead, and no entry of it meets another entry's zero: with an inf in
it that product would be nan.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._torch.dispatch import made_aside
from forall._torch.names import version
from forall._torch.wrapper import Wrapper


def identity(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An identity matrix that `is_identity` knows for as long as nobody writes into it."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        made: Any = torch.eye(size, dtype=dtype, device=device)
        made.is_identity_at = version(made)
        for told in made_aside:
            told(made)
        return made


def is_identity(t: Any) -> bool:
    while isinstance(t, Wrapper) and getattr(t, "axis", None) is None:
        t = t.value
    if type(t) is not torch.Tensor:
        return False
    with torch._C.DisableTorchFunction():
        return getattr(t, "is_identity_at", -1) == version(t) != -1
