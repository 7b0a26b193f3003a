"""Forty everyday programs in which examples diverge: ten kinds, four of each.

Each is written as one writes it for one example, in plain Python. The module is loaded anew for
each first call that is measured, so that nothing of its functions was seen before.
"""

import bisect
import heapq
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Program(NamedTuple):
    """A function of one example, its arguments for some examples, and the same by others.

    ``by_hand`` takes all examples; ``by_jax(jax)`` gives a function of one.
    """

    kind: str
    func: Callable[..., Tensor]
    inputs: Callable[[int], tuple[Tensor, ...]]
    by_hand: Callable[..., Tensor] | None = None
    by_jax: Callable[[Any], Callable] | None = None


PROGRAMS: dict[str, Program] = {}


def program(
    kind: str,
    inputs: Callable[[int], tuple[Tensor, ...]],
    by_hand: Callable[..., Tensor] | None = None,
    by_jax: Callable[[Any], Callable] | None = None,
) -> Callable[[Callable], Callable]:
    """Enter the decorated function under its name."""

    def enter(func: Callable) -> Callable:
        PROGRAMS[func.__name__] = Program(kind, func, inputs, by_hand, by_jax)
        return func

    return enter


def evenly(low: float, high: float) -> Callable[[int], tuple[Tensor]]:
    """Numbers over an interval, in random order."""
    return lambda n: (torch.linspace(low, high, n)[torch.randperm(n)],)


def normal(*shape: int, scale: float = 1.0) -> Callable[[int], tuple[Tensor]]:
    return lambda n: (torch.randn(n, *shape) * scale,)


def uniform(*shape: int) -> Callable[[int], tuple[Tensor]]:
    return lambda n: (torch.rand(n, *shape),)


# --- numbers of Python's -------------------------------------------------------------------------


def collatz_by_hand(xs: Tensor) -> Tensor:
    n, steps = xs.long(), torch.zeros_like(xs)
    while (going := n != 1).any():
        n = torch.where(going, torch.where(n % 2 == 0, n // 2, 3 * n + 1), n)
        steps += going
    return steps


def collatz_by_jax(jax: Any) -> Callable:
    jnp = jax.numpy

    def collatz(x):
        def step(state):
            n, steps = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1.0

        return jax.lax.while_loop(lambda state: state[0] != 1, step, (x.astype(int), 0.0))[1]

    return collatz


@program("numbers", lambda n: (torch.arange(n) % 97 + 1.0,), collatz_by_hand, collatz_by_jax)
def collatz(x):
    n, steps = int(x), 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return torch.tensor(float(steps))


@program("numbers", evenly(0.1, 3.0))
def adaptive_ode(x):
    t, h, y = 0.0, 0.1, x
    while t < 1.0:
        h = min(h, 1.0 - t)
        k1 = -y
        k2 = -(y + h * k1)
        error = (h * (k2 - k1) / 2).abs().item()
        if error < 1e-3:
            t = t + h
            y = y + h * (k1 + k2) / 2
        h = h * min(5.0, max(0.2, 0.9 * (1e-3 / (error + 1e-12)) ** 0.5))
    return y


def bisected_by_hand(xs: Tensor) -> Tensor:
    low, high = torch.zeros_like(xs), xs.clamp(min=1)
    while (going := high - low > 1e-4).any():
        middle = (low + high) / 2
        below = middle * middle < xs
        low = torch.where(going & below, middle, low)
        high = torch.where(going & ~below, middle, high)
    return low


def bisected_by_jax(jax: Any) -> Callable:
    jnp = jax.numpy

    def bisected(a):
        def step(state):
            low, high = state
            middle = (low + high) / 2
            below = middle * middle < a
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        start = jnp.zeros_like(a), jnp.maximum(a, 1.0)
        return jax.lax.while_loop(lambda state: state[1] - state[0] > 1e-4, step, start)[0]

    return bisected


@program("numbers", evenly(0.0, 50.0), bisected_by_hand, bisected_by_jax)
def bisected(x):
    a = x.item()
    low, high = 0.0, max(a, 1.0)
    while high - low > 1e-4:
        middle = (low + high) / 2
        if middle * middle < a:
            low = middle
        else:
            high = middle
    return torch.tensor(low)


@program("numbers", lambda n: (torch.randint(1, 500, (n,)), torch.randint(1, 500, (n,))))
def common_divisor(a, b):
    m, n = int(a), int(b)
    while n:
        m, n = n, m % n
    return a / m + b / m


# --- places --------------------------------------------------------------------------------------


def crop_by_hand(images: Tensor) -> Tensor:
    i, j = (images[:, 0, 0, 0] * 8).int().long(), (images[:, 1, 0, 0] * 8).int().long()
    each = torch.arange(24)
    rows, columns = (i[:, None] + each)[:, None, :, None], (j[:, None] + each)[:, None, None]
    n = torch.arange(len(images))[:, None, None, None]
    return images[n, torch.arange(3)[:, None, None], rows, columns]


def crop_by_jax(jax: Any) -> Callable:
    def crop(image):
        i, j = (image[0, 0, 0] * 8).astype(int), (image[1, 0, 0] * 8).astype(int)
        return jax.lax.dynamic_slice(image, (0, i, j), (3, 24, 24))

    return crop


@program("places", uniform(3, 32, 32), crop_by_hand, crop_by_jax)
def crop(image):
    i, j = int(image[0, 0, 0] * 8), int(image[1, 0, 0] * 8)
    return image[:, i : i + 24, j : j + 24]


@program("places", uniform(3, 32, 32))
def cut_out(image):
    h = int(image[0, 0, 0] * 12) + 1
    image = image.clone()
    image[:, :h, :h] = 0
    return image.flip(2) if image[1, 20, 0] > 0.5 else image


@program("places", uniform(64))
def rolled(signal):
    shift = int(signal[0] * 60)
    return signal.roll(shift) - signal.narrow(0, shift // 2, 1)


@program("places", lambda n: (torch.randn(n, 20, 8), torch.randint(1, 20, (n,))))
def last_state(states, length):
    n = length.item()
    return states[n - 1] + states[:n].mean(0)


# --- lists and dicts -----------------------------------------------------------------------------


def largest_by_hand(xs: Tensor) -> Tensor:
    return xs.sort(dim=1).values[:, -3:] * 2


def largest_by_jax(jax: Any) -> Callable:
    return lambda x: jax.numpy.sort(x)[-3:] * 2


@program("lists and dicts", normal(8), largest_by_hand, largest_by_jax)
def largest(x):
    best = sorted(x.tolist())[-3:]
    return torch.tensor(best) * 2


@program("lists and dicts", normal(6))
def path_taken(x):
    path = [x]
    while path[-1].norm() > 0.5:
        path.append(path[-1] * 0.6)
    return path[0] + path[-1] * len(path)


ACTIVATIONS = {"up": torch.tanh, "down": torch.sigmoid, "flat": torch.relu}


@program("lists and dicts", normal(16))
def looked_up(x):
    s = x.sum().item()
    name = "up" if s > 1 else "down" if s < -1 else "flat"
    return ACTIVATIONS[name](x) * 2


@program("lists and dicts", lambda n: (torch.randint(0, 5, (n, 12)),))
def most_common(labels):
    counts = {}
    for label in labels.tolist():
        counts[label] = counts.get(label, 0) + 1
    best = max(counts, key=lambda k: (counts[k], -k))
    return torch.tensor([float(best), float(counts[best])])


# --- strings -------------------------------------------------------------------------------------


@program("strings", evenly(-2.0, 2.0))
def by_name(x):
    mode = "positive" if x > 0 else "negative"
    if mode.startswith("pos"):
        return x.sqrt()
    return x * x


@program("strings", lambda n: (torch.randint(0, 256, (n,)),))
def bits_set(x):
    text = f"{x.item():08b}"
    return torch.tensor([float(c == "1") for c in text])


@program("strings", lambda n: (torch.randint(97, 123, (n, 10)),))
def vowels(codes):
    word = "".join(chr(c) for c in codes.tolist())
    return codes.sum() + float(sum(c in "aeiou" for c in word))


@program("strings", evenly(0.0, 3.0))
def by_key(x):
    key = "abc"[min(int(x), 2)]
    scale = {"a": 1.0, "b": 2.0, "c": 0.5}[key]
    return x * scale + len(key)


# --- exceptions ----------------------------------------------------------------------------------


@program("exceptions", evenly(-1.0, 3.0))
def caught(x):
    try:
        if x < 0:
            raise ValueError("negative")
        return x.sqrt()
    except ValueError:
        return -x


@program("exceptions", evenly(-3.0, 3.0))
def root_or_zero(x):
    try:
        return torch.tensor(math.sqrt(x.item()))
    except ValueError:
        return torch.tensor(0.0)


@program("exceptions", lambda n: (torch.randn(n, 3, 3) + 2 * torch.eye(3),))
def factored(a):
    symmetric = a @ a.T - 0.5 * torch.eye(3)
    try:
        return torch.linalg.cholesky(symmetric)
    except RuntimeError:
        return torch.zeros(3, 3)


@program("exceptions", lambda n: (torch.randn(n, 8), torch.randint(0, 12, (n,))))
def or_last(x, place):
    try:
        return [x[0], x[1], x[2], x[3], x[4], x[5]][place.item()] * 2
    except IndexError:
        return x[-1]


# --- recursion -----------------------------------------------------------------------------------


@program("recursion", evenly(0.0, 40.0))
def halved(x):
    return x if x < 1 else halved(x / 2) + 1


@program("recursion", evenly(0.1, 3.0))
def integrated(b):
    def between(low, high, whole):
        middle = (low + high) / 2
        left, right = simpson(low, middle), simpson(middle, high)
        if abs(left + right - whole) < 1e-3:
            return left + right
        return between(low, middle, left) + between(middle, high, right)

    def simpson(low, high):
        middle = (low + high) / 2
        return (high - low) / 6 * (peak(low) + 4 * peak(middle) + peak(high))

    top = b.item()
    return torch.tensor(between(0.0, top, simpson(0.0, top)))


def peak(x):
    return 1 / (1e-2 + (x - 0.5) ** 2)


@program("recursion", lambda n: (torch.randn(n, 16),))
def tree_sum(x):
    if len(x) == 1 or x.abs().max() < 0.8:
        return x.sum()
    half = len(x) // 2
    return tree_sum(x[:half]) - tree_sum(x[half:])


@program("recursion", lambda n: (torch.randint(0, 30, (n,)),))
def staircases(x):
    def count(n):
        return 1 if n < 2 else count(n - 2) + 1

    return torch.tensor(float(count(x.item())))


# --- no source -----------------------------------------------------------------------------------

WITHOUT_SOURCE = """
def shrunk(x):
    while x.norm() > 1:
        x = x * .7
    return x

def flipped(x):
    return x.flip(0) if x[0] > 0 else x

def counted(x):
    n = 0
    while x.sum() < 10:
        x = x + x.abs() + .5
        n += 1
    return x * n

def clipped(x):
    s = x.sum().item()
    return x / s if s > 1 else x
"""
exec(WITHOUT_SOURCE, globals())  # noqa: S102 - as in a session, where no file has the text
for name, inputs in (
    ("shrunk", normal(4, scale=5.0)),
    ("flipped", normal(8)),
    ("counted", uniform(4)),
    ("clipped", normal(4)),
):
    program("no source", inputs)(globals()[name])


# --- code of libraries ---------------------------------------------------------------------------

EDGES = [-1.0, -0.25, 0.0, 0.5, 1.5]


@program("libraries", normal())
def binned(x):
    return x * bisect.bisect(EDGES, x.item())


@program("libraries", normal(12))
def three_best(x):
    return torch.tensor(heapq.nlargest(3, x.tolist()))


@program("libraries", normal(9))
def typical(x):
    return x - statistics.median(x.tolist())


@program("libraries", lambda n: (torch.rand(n, 1, 8, 8), torch.randint(0, 2, (n,))))
def padded(image, wide):
    size = 2 if wide.item() else 1
    big = functional.pad(image, (size, size, size, size))
    return functional.interpolate(big[None], size=(8, 8), mode="nearest")[0]


# --- ragged intermediates ------------------------------------------------------------------------


def mean_positive_by_hand(xs: Tensor) -> Tensor:
    kept = xs > 0
    total = torch.where(kept, xs, 0).sum(1)
    return torch.where(kept.any(1), total / kept.sum(1).clamp(min=1), 0)


def mean_positive_by_jax(jax: Any) -> Callable:
    jnp = jax.numpy
    return lambda x: jnp.where(x > 0, x, 0).sum() / jnp.maximum((x > 0).sum(), 1)


@program("ragged", normal(16), mean_positive_by_hand, mean_positive_by_jax)
def mean_positive(x):
    kept = x[x > 0]
    return kept.mean() if len(kept) else x.new_zeros(())


@program("ragged", lambda n: (torch.randint(0, 6, (n, 10)),))
def how_many_kinds(x):
    return torch.tensor(float(len(x.unique())))


@program("ragged", normal(20))
def spread_of_outliers(x):
    far = x[(x - x.mean()).abs() > x.std()]
    return far.max() - far.min() if far.numel() > 1 else x.sum() * 0


@program("ragged", lambda n: (torch.randn(n, 10, 4), torch.randint(1, 10, (n,))))
def attended(states, length):
    known = states[: length.item()]
    weights = torch.softmax(known @ states[0], 0)
    return weights @ known


# --- several ifs ---------------------------------------------------------------------------------


def banded_by_hand(xs: Tensor) -> Tensor:
    middle = torch.where(xs < 1, xs * xs, torch.where(xs < 2, xs + 1, xs.exp()))
    return torch.where(xs < -1, -xs, torch.where(xs < 0, xs.sin(), middle))


def banded_by_jax(jax: Any) -> Callable:
    jnp = jax.numpy

    def banded(x):
        middle = jnp.where(x < 1, x * x, jnp.where(x < 2, x + 1, jnp.exp(x)))
        return jnp.where(x < -1, -x, jnp.where(x < 0, jnp.sin(x), middle))

    return banded


@program("several ifs", evenly(-3.0, 3.0), banded_by_hand, banded_by_jax)
def banded(x):
    if x < -1:
        return -x
    if x < 0:
        return x.sin()
    if x < 1:
        return x * x
    if x < 2:
        return x + 1
    return x.exp()


@program("several ifs", normal(4))
def ten_ifs(x):
    y = x
    for i in range(10):
        if y[i % 4] > 0:
            y = y * 0.9
        else:
            y = y + 0.1
    return y


@program("several ifs", normal(6))
def guarded(x):
    total = x.sum()
    if total > 0 and x[0] > 0:
        return x / total
    if total < -2 or x[1] > 1:
        return x - total
    return x


@program("several ifs", evenly(-2.0, 2.0))
def signs(x):
    y = x if x > 0 else -x
    if y > 1:
        y = y.log() + 1
    z = y * 2 if x < 0.5 else y
    return z - 1 if z > 1.5 else z
