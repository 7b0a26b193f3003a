"""Keys: how to make and split them, and the random bits of a key.

A key is an int64 tensor of shape (2,), each entry a word from 0 to 2**32 - 1, equal to
``jax.random.key_data`` of the same key. Torch's uint32 cannot be added or shifted on any device;
int64 can be made, compared, stacked and printed on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short, type_name_of
from forall._random.threefry import LOW, Words, make_counters, threefry

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor


def key(seed: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """The key that a seed stands for: () -> (2,).

    Seeds from 0 to 2**32 - 1 give the keys of ``jax.random.key``. Others are read as 64 bits in
    two's complement, as JAX does where it has 64-bit numbers.

    Args:
        seed: an int, or an integer tensor of rank 0 (one of each example under `forall.vmap`).
        device: where the key lies, and all that is drawn from it.

    Raises:
        TypeError: for a seed that is neither.

    Example:
        >>> forall.random.key(0)
        tensor([0, 0])
    """
    if not _is_integer(seed):
        raise _no_seed(seed)
    if isinstance(seed, torch.Tensor):
        seed = seed.to(device=device, dtype=torch.int64)
        return torch.stack([(seed >> 32) & LOW, seed & LOW])
    return torch.tensor([(seed >> 32) & LOW, seed & LOW], device=device)


def split(key: Tensor, num: int | Sequence[int] = 2) -> Tensor:
    """Keys that have nothing to do with each other: (2,) -> (num, 2).

    Use each of them once, and ``key`` no more. The same numbers as ``jax.random.split``.

    Args:
        num: how many, or the shape of many.

    Raises:
        TypeError, ValueError: for a key that is none.

    Source: the counters of Threefry are the places in the result, as in JAX since version 0.5
    (``jax_threefry_partitionable``): the first keys of many are those of few.

    Example:
        >>> first, second = forall.random.split(forall.random.key(0))
        >>> first
        tensor([1797259609, 2579123966])
    """
    k0, k1 = split_words("split", key)
    shape = check_shape("split", (num,) if isinstance(num, int) else num)
    return _make_key(threefry(k0, k1, *make_counters(shape, key.device)))


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """The key that ``key`` and a number make: (2,), () -> (2,).

    The same numbers as ``jax.random.fold_in``.

    Args:
        data: an int, or an integer tensor of rank 0; its lowest 32 bits count.

    Raises:
        TypeError, ValueError: for a key that is none, for data that is no integer.

    Example:
        >>> forall.random.fold_in(forall.random.key(0), 7)
        tensor([2716826189,  292468403])
    """
    k0, k1 = split_words("fold_in", key)
    if not _is_integer(data):
        raise _no_data(data)
    if isinstance(data, torch.Tensor):
        low = data.to(device=key.device, dtype=torch.int32)
    else:
        # To fill a tensor does not wait for the device, as a copy does.
        low = torch.full((), data & LOW, device=key.device).to(torch.int32)
    return _fold_words(k0, k1, low)


def fold_each(key: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return `fold_in` of each of these numbers: (2,) -> (len(numbers), 2)."""
    k0, k1 = split_words("fold_in", key)
    if isinstance(numbers, range):  # made on the device: a copy would wait for it
        low = torch.arange(numbers.start, numbers.stop, numbers.step, device=key.device)
    else:
        low = torch.tensor(numbers, device=key.device)
    return _fold_words(k0, k1, low.to(torch.int32))


def _fold_words(k0: Tensor, k1: Tensor, low: Tensor) -> Tensor:
    return _make_key(threefry(k0, k1, torch.zeros_like(low), low))


def _make_key(found: Words) -> Tensor:
    return torch.stack(found, -1).to(torch.int64) & LOW


def split_words(verb: str, key: Any) -> Words:
    """Return the two words of a key, each of shape ()."""
    check_key(f"{verb}(key, ...)", key)
    k = key.to(torch.int32)
    return k[0], k[1]


def check_key(call: str, key: Any) -> None:
    """Raise, naming ``call`` in the message, if this is not a key."""
    if not isinstance(key, torch.Tensor):
        raise documented_error(TypeError, "random-key")(
            f"{call}: a key is a tensor.\n"
            f"{format_columns([('key', format_short(key), type_name_of(key))])}\n"
            "Make one of a seed: forall.random.key(0)."
        )
    if key.dtype != torch.int64:
        raise documented_error(TypeError, "random-key")(
            f"{call}: a key is an int64 tensor of shape (2,).\n"
            f"{format_columns([('key', format_short(key))])}\n"
            "Make one of a seed: forall.random.key(0)."
        )
    if key.shape != (2,):
        raise documented_error(ValueError, "random-key")(
            f"{call}: a key is an int64 tensor of shape (2,).\n"
            f"{format_columns([('key', format_short(key))])}\n"
            "For many keys map over them: vmap(f)(forall.random.split(key, n))."
        )


def check_shape(verb: str, shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple; raise if it is none."""
    is_shape = isinstance(shape, (tuple, list)) and all(
        hasattr(type(n), "__index__") for n in shape
    )
    if not is_shape or any(isinstance(n, int) and n < 0 for n in shape):
        raise documented_error(TypeError, "random-shapes")(
            f"{verb}(key, ...): a shape is a tuple of ints, none of them negative.\n"
            f"{format_columns([('shape', format_short(shape), type_name_of(shape))])}\n"
            "For three numbers write (3,), for one number of no dims ()."
        )
    return tuple(shape)


def _is_integer(value: Any) -> bool:
    """True for an int, or an integer tensor of rank 0."""
    if isinstance(value, torch.Tensor):
        return not (value.dim() or value.is_floating_point() or value.is_complex())
    return isinstance(value, int) and not isinstance(value, bool)


def _no_seed(seed: Any) -> TypeError:
    return documented_error(TypeError, "random-seed")(
        "key(seed): a seed is an int, or an integer tensor of rank 0.\n"
        f"{format_columns([('seed', format_short(seed), type_name_of(seed))])}\n"
        "For many keys write split(key(0), n), or vmap(key)(seeds)."
    )


def _no_data(data: Any) -> TypeError:
    return documented_error(TypeError, "random-seed")(
        "fold_in(key, data): data is an int, or an integer tensor of rank 0.\n"
        f"{format_columns([('data', format_short(data), type_name_of(data))])}\n"
        "Fold in one number after another, or map over them: vmap(fold_in, (None, 0))."
    )


# --- bits ----------------------------------------------------------------------------------------

_WIDTHS = {
    torch.uint8: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def bits(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Random bits, as many as the dtype has: (2,) -> shape.

    The same numbers as ``jax.random.bits``. Torch has few operators on unsigned dtypes but uint8;
    a signed one gives the same bits, to compute on.

    Args:
        dtype: an integer dtype of 8, 16, 32 or 64 bits.

    Raises:
        TypeError, ValueError: for a key that is none, for another dtype.

    Example:
        >>> forall.random.bits(forall.random.key(0), (2,), torch.uint8)
        tensor([167, 146], dtype=torch.uint8)
    """
    signed = _WIDTHS.get(dtype, dtype)
    if signed not in _WIDTHS.values():
        raise documented_error(TypeError, "random-dtype")(
            "bits(key, shape, dtype): the dtype must be an integer one.\n"
            f"{format_columns([('dtype', str(dtype))])}\n"
            "Take torch.uint32, or int32 to compute on; see uniform for numbers from 0 to 1."
        )
    drawn = draw_bits("bits", key, shape, 8 * signed.itemsize).to(signed)
    return drawn if signed == dtype else drawn.view(dtype)


def draw_bits(verb: str, key: Tensor, shape: Sequence[int], width: int) -> Tensor:
    """Return random bits in an int32, of which the lowest ``width`` count; 64 bits in an int64."""
    w0, w1 = draw_words(verb, key, shape)
    if width < 64:
        return w0 ^ w1
    return (w0.to(torch.int64) << 32) | (w1.to(torch.int64) & LOW)


def draw_words(verb: str, key: Tensor, shape: Sequence[int]) -> Words:
    """Return two random words for each entry of ``shape``."""
    words = split_words(verb, key)
    return threefry(*words, *make_counters(check_shape(verb, shape), key.device))
