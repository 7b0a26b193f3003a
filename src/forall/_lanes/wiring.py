"""Where the runtime's words come from, and what ``x.item()`` gives inside vmap."""

from __future__ import annotations

from typing import Any

import torch

from forall._batching import worlds
from forall._batching.ledger import changed
from forall._batching.parting import answers, plain_numbers
from forall._batching.rerun import apart
from forall._batching.standing import FOLLOWING, memory_of, views
from forall._batching.table import CALLS
from forall._lanes import aliases, in_torch, made, slices  # noqa: F401 - torch.tensor(n), x[n:m]
from forall._lanes.maths import BUILTINS, MATH
from forall._lanes.numbers import Number, number
from forall._lanes.words import use, words
from forall._torch.wrapper import Wrapper


def _item(x: torch.Tensor) -> Any:
    """One Python number where all examples agree, else a `Number`."""
    if not isinstance(x, Wrapper) or x.numel() != 1:
        return NotImplemented
    if not x.dim() and plain_numbers(x) is not None and x.level.parts:
        return number(x)
    _, levels = answers(x)
    if not levels or not all(level.parts and level.active and level.size for level in levels):
        return NotImplemented
    return number(x.detach().reshape(()))


CALLS[torch.Tensor.item] = _item
use(
    now=worlds.now,
    asked=worlds.question,
    running=worlds.running,
    joined=worlds.joined,
    undefined=worlds.Undefined,
    apart=apart,
    tensor=torch.Tensor,
    number=Number,
    again=worlds.asked,
    told=worlds.told,
    memory=memory_of,
    views=views,
    renamed=worlds.renamed,
    changed=changed,
    put=worlds.put,
)
words.mean = in_torch.called
words.convert = lambda n, kind: BUILTINS[kind](n)
words.calculate = lambda f, args, kwargs: MATH[f](*args, **kwargs)
FOLLOWING.append(aliases.follow)
