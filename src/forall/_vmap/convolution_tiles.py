"""Many images through one convolution, a piece of them at a time.

NOTE [pieces]
    On CPU torch's fast convolution puts images in blocks of channels, and its results back. For
    many images these buffers exceed the caches, and the allocator asks for that memory with each
    call, and gives it back. A piece at a time it took 0.74 of the time of one call, its derivative
    in the images 0.72, in the geometric mean over random shapes of _ALL bytes and more on one
    thread, 0.85 and 0.78 on two: from 32 MB on 0.5 to 0.8. Below that it took 0.4 in a process that
    has freed nothing larger, for which the allocator waits, and 1.05 to 1.2 in one that has. With
    fewer channels than _BLOCKS torch makes no blocks, and copying the results costs what is gained,
    or more.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from forall._compat.private_api import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
_ALL, _PIECE = 12 << 20, 4 << 20  # bytes of images and results, for one thread or two
_BLOCKS = 16


def can_run_in_pieces(v: Tensor, w: Tensor) -> bool:
    """True if a kernel that gains by pieces takes these images (N, *)."""
    plain = type(v) is Tensor and type(w) in PLAIN and v.is_cpu and v.dim() > 2
    return plain and v.dtype == w.dtype == torch.float32 and v.shape[1] >= _BLOCKS


def run_in_pieces(op: Callable[[Tensor], Tensor], images: Tensor, made: float) -> Tensor:
    """Apply ``op`` to the images (N, *) in pieces; of each image it makes ``made`` entries."""
    share = max(1, torch.get_num_threads() // 2)
    size = len(images) * (prod(images.shape[1:]) + made) * images.element_size()
    if size < _ALL * share:
        return op(images)
    pieces = images.tensor_split(min(len(images), int(size / share) // _PIECE))
    results = op(pieces[0])
    if results.stride(0) != prod(results.shape[1:]):  # an image is not in one place
        return op(images)
    out = results.new_empty_strided((len(images), *results.shape[1:]), results.stride())
    places = out.tensor_split(len(pieces))
    places[0].copy_(results)
    for place, piece in zip(places[1:], pieces[1:], strict=True):
        place.copy_(op(piece))
    return out
