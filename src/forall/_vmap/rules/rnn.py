"""Rules of recurrent networks: with unbatched weights, the batch axis is folded into the batch N.

API calls that need no derivative are one fused call. For those that need one, autograd records the
operators that they are made of: ordinary ones, or oneDNN's operator for one LSTM layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.devices import copy_index_to
from forall._compat.dispatch_state import no_dispatch
from forall._compat.op_schema import map_in_lists
from forall._compat.private_api import pack_padded, pad_packed
from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import fold_axis
from forall._core.errors import make_data_dependent_error
from forall._vmap.batched_tensor import is_mapped_at_any, wrap_stack
from forall._vmap.concretize import concretize_for_user
from forall._vmap.registry import CALLS, DIRECT
from forall._vmap.rule_makers.basic import expand_to_stack, is_mapped, lower_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten
Tensor = torch.Tensor


# --- fused calls ---------------------------------------------------------------------------------


def fold_into_sequences(a: Any, dim: int, level: Any) -> Any:
    """Fold the batch axis into ``dim``: (B, *S) -> *S with B * N at ``dim``."""
    if isinstance(a, (list, tuple)):
        return [fold_into_sequences(b, dim, level) for b in a]
    return fold_axis(expand_to_stack(a, level), dim)


def unfold_from_sequences(out: Any, dim: int, level: Any) -> Any:
    """Undo the fold into ``dim`` and wrap the result as a tensor of the level."""
    if isinstance(out, (list, tuple)):
        return tuple(unfold_from_sequences(o, dim, level) for o in out)
    return wrap_stack(out.unflatten(dim, (level.size, -1)), dim, level)


def _are_shared(params: Sequence, level: Any) -> bool:
    return level.size > 0 and not any(is_mapped(p, level) for p in params)


def _cell(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a cell on x (N, I), hidden (N, H) or a pair of them, and the parameters."""
    x, hidden, *params = args
    if kwargs or not _are_shared(params, level) or x.dim() != 2:
        return NotImplemented
    given = (fold_into_sequences(x, 0, level), fold_into_sequences(hidden, 0, level))
    return unfold_from_sequences(func(*given, *(lower_shared(p, level) for p in params)), 0, level)


def _layers(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run layers on x (T, N, I), hidden (L, N, H), a list of parameters, and options."""
    if isinstance(args[1], Tensor) and args[1].dim() == 1:
        return _packed_layers(level, func, args, kwargs)
    x, hidden, params, *words = args
    if not _can_fuse(params, words, level):
        return NotImplemented
    dim = 0 if words[-1] else 1
    given = (fold_into_sequences(x, dim, level), fold_into_sequences(hidden, 1, level))
    out, *state = func(*given, [lower_shared(p, level) for p in params], *words)
    return unfold_from_sequences(out, dim, level), *unfold_from_sequences(state, 1, level)


def _packed_layers(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run layers on a packed sequence: x (S, I) are rows by step, ``sizes`` the rows of each step.

    The examples' rows at one position are adjacent, so that the longest sequences stay in front.
    """
    x, sizes, hidden, params, *words = args
    if not _can_fuse(params, words, level):
        return NotImplemented

    def fold_innermost(a: torch.Tensor, dim: int) -> torch.Tensor:
        return expand_to_stack(a, level).movedim(0, dim + 1).flatten(dim, dim + 1)

    hidden = map_in_lists(partial(fold_innermost, dim=1), hidden)
    given = (fold_innermost(x, 0), lower_shared(sizes, level) * level.size, hidden)
    out, *state = func(*given, [lower_shared(p, level) for p in params], *words)
    found = [(out, 0), *((s, 1) for s in state)]
    return tuple(wrap_stack(o.unflatten(dim, (-1, level.size)), dim + 1, level) for o, dim in found)


def _can_fuse(params: Sequence, words: Sequence, level: Any) -> bool:
    """True if all examples can be one call: the parameters are unbatched, without dropout."""
    _, layers, dropout, train, *_ = words
    return _are_shared(params, level) and not (train and dropout and layers > 1)


_CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _list_overloads(call: Callable) -> set:
    packet = getattr(aten, call.__name__)
    return {getattr(packet, name) for name in packet.overloads()}


DIRECT.update({call: (_cell, _list_overloads(call)) for call in _CELLS})
DIRECT.update({call: (_layers, _list_overloads(call)) for call in _LAYERS})


# --- packed sequences ----------------------------------------------------------------------------


def _read_plain(a: Any, what: str) -> Any:
    """Return a plain tensor for a kernel that reads memory; examples that differ in it diverge."""
    if is_mapped_at_any(a):
        return concretize_for_user(
            a,
            lambda: make_data_dependent_error(
                f"to read {what} of a packed sequence",
                "Pad to one length, and mask what is padded.",
            ),
        )
    while isinstance(a, Wrapper):
        a = a.value
    return a


def _pack_padded(x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """Pack a padded sequence: return its rows step by step, and the number of rows of each step."""
    if not isinstance(x, Wrapper) and not isinstance(lengths, Wrapper):
        return NotImplemented
    lengths = _read_plain(lengths, "lengths")
    with no_dispatch():
        places = torch.arange(x.shape[0] * x.shape[1], device="cpu").view(x.shape[:2])
        places, sizes = pack_padded(places, lengths, batch_first)
    return x.flatten(0, 1).index_select(0, copy_index_to(places, x.device)), sizes


def _pad_packed(x: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int) -> Any:
    """Pad a packed sequence: return the rows at their positions, and the lengths."""
    if not isinstance(x, Wrapper) and not isinstance(sizes, Wrapper):
        return NotImplemented
    sizes = _read_plain(sizes, "batch_sizes")
    rows = x.shape[0]
    with no_dispatch():
        places = torch.arange(rows, device="cpu")
        places, lengths = pad_packed(places, sizes, batch_first, rows, total)
        shape, places = places.shape, places.flatten()
    whole = torch.cat([x, x.new_full((1, *x.shape[1:]), padding)])
    return whole.index_select(0, copy_index_to(places, x.device)).unflatten(0, shape), lengths


def _with_plain_sizes(call: Callable) -> Callable:
    def answer(x: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(sizes, Wrapper) or sizes.dim() != 1:
            return NotImplemented
        return call(x, _read_plain(sizes, "batch_sizes"), *args, **kwargs)

    return answer


CALLS[pack_padded] = _pack_padded
CALLS[pad_packed] = _pad_packed
CALLS.update({call: _with_plain_sizes(call) for call in _LAYERS})
