"""Functions whose examples diverge: loops that end at different times, branches, recursion.

The hand-written programs mask: all examples run until the last has ended, and `torch.where` keeps
what has. The plain loop runs over a sample of the examples, evenly over their inputs, where all of
them would take too long, and its time is scaled; how many is said in each summary.
"""

from collections.abc import Callable

import torch

import forall
from registry import DIVERGING, Contestants, loop_contest, workload

D = torch.float64
SIZES = (256, 4096)


def grid(size: int, sample: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The unit interval evenly, in random order, and the places of an even sample of it."""
    order = torch.randperm(size)
    stride = size // sample
    chosen = (order % stride == stride // 2).nonzero()[:, 0].tolist()
    return ((order.to(D) + 0.5) / size).to(device), chosen


def sizes(
    name: str, summary: str, sample: int, by_hand: float | None = None
) -> Callable[[Callable[[int, int, torch.device], Contestants]], None]:
    """Enter a workload at each size; `by_hand` limits the ratio at the largest."""

    def enter(build: Callable[[int, int, torch.device], Contestants]) -> None:
        for size, of_loop in zip(SIZES, (0.5, 0.03), strict=True):
            limits = {(0, 1): of_loop}
            if by_hand is not None and size == SIZES[-1]:
                limits[0, 2] = by_hand
            text = f"{summary}, {size} examples; the loop: {size // sample} times {sample} of them"

            def built(device: torch.device, size: int = size) -> Contestants:
                return build(size, sample, device)

            workload(f"{name}-{size}", text, names=DIVERGING, limits=limits)(built)

    return enter


# --- Newton's iteration --------------------------------------------------------------------------


def newton(a: torch.Tensor) -> torch.Tensor:
    x = a
    while (x * x - a).abs() > 1e-9 * a:
        x = 0.5 * (x + a / x)
    return x


def newton_masked(a: torch.Tensor) -> torch.Tensor:
    x = a
    while (going := (x * x - a).abs() > 1e-9 * a).any():
        x = torch.where(going, 0.5 * (x + a / x), x)
    return x


@sizes("newton", "square roots by Newton, up to 56 steps", sample=32, by_hand=10)
def newtons(size: int, sample: int, device: torch.device) -> Contestants:
    unit, chosen = grid(size, sample, device)
    a = 10 ** (30 * unit)
    return loop_contest(newton, (a,), lambda: newton_masked(a), chosen=chosen)


# --- Collatz -------------------------------------------------------------------------------------


def collatz(n: torch.Tensor) -> int:
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


def collatz_masked(n: torch.Tensor) -> torch.Tensor:
    steps = torch.zeros_like(n)
    while (going := n != 1).any():
        n = torch.where(going, torch.where(n % 2 == 0, n // 2, 3 * n + 1), n)
        steps = steps + going
    return steps


@sizes("collatz", "lengths of Collatz sequences from numbers up to 8000", sample=32)
def collatzes(size: int, sample: int, device: torch.device) -> Contestants:
    unit, chosen = grid(size, sample, device)
    n = (8000 * unit).long() + 1
    return loop_contest(collatz, (n,), lambda: collatz_masked(n), chosen=chosen)


# --- an adaptive Runge-Kutta method --------------------------------------------------------------

END, FINE = 4.0, 1e-6
NODES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERRORS = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def oscillator(mu: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Van der Pol's, for one example or for all: the two coordinates come last."""
    p, v = y.unbind(-1)
    return torch.stack([v, mu * (1 - p * p) * v - p], -1)


def dormand_prince(
    mu: torch.Tensor, y: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of length `h`, and the estimate of its error."""
    step = h.unsqueeze(-1)
    slopes = [oscillator(mu, y)]
    new = y
    for row in NODES:
        new = y + step * sum(a * k for a, k in zip(row, slopes, strict=True) if a)
        slopes.append(oscillator(mu, new))
    error = step * sum(e * k for e, k in zip(ERRORS, slopes, strict=True) if e)
    return new, error.abs().amax(-1)


def factor(error: torch.Tensor) -> torch.Tensor:
    return (0.9 * (FINE / (error + 1e-12)) ** 0.2).clamp(0.2, 5.0)


def runge_kutta(mu: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    t, h = torch.zeros_like(mu), torch.full_like(mu, 0.5)
    while t < END:
        if t + h > END:
            h = END - t
        new, error = dormand_prince(mu, y, h)
        if error <= FINE:
            t, y = t + h, new
        h = h * factor(error)
    return y


def runge_kutta_masked(mu: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    t, h = torch.zeros_like(mu), torch.full_like(mu, 0.5)
    while (going := t < END).any():
        h = torch.where(t + h > END, END - t, h)
        new, error = dormand_prince(mu, y, h)
        taken = going & (error <= FINE)
        t = torch.where(taken, t + h, t)
        y = torch.where(taken.unsqueeze(-1), new, y)
        h = torch.where(going, h * factor(error), h)
    return y


@sizes("runge-kutta", "an adaptive method with steps accepted or not", sample=16, by_hand=3)
def runge_kuttas(size: int, sample: int, device: torch.device) -> Contestants:
    unit, chosen = grid(size, sample, device)
    mu = 0.2 + 4 * unit
    y = torch.stack([1.5 - unit, unit], 1)

    def by_hand() -> torch.Tensor:
        return runge_kutta_masked(mu, y)

    # A step accepted here and not there, by the last bit of its error, moves the result by FINE.
    return loop_contest(runge_kutta, (mu, y), by_hand, chosen=chosen, tolerance=1e-5)


# --- bisection -----------------------------------------------------------------------------------


def cubic(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x * x * x + x - c


def bisection(c: torch.Tensor) -> torch.Tensor:
    low, high = torch.full_like(c, -4.0), torch.full_like(c, 4.0)
    for _ in range(40):
        middle = (low + high) / 2
        value = cubic(middle, c)
        if value.abs() < 1e-6:
            return middle
        if value > 0:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def bisection_masked(c: torch.Tensor) -> torch.Tensor:
    low, high = torch.full_like(c, -4.0), torch.full_like(c, 4.0)
    going, found = torch.ones_like(c, dtype=torch.bool), c
    for _ in range(40):
        middle = (low + high) / 2
        value = cubic(middle, c)
        found = torch.where(going & (value.abs() < 1e-6), middle, found)
        going = going & ~(value.abs() < 1e-6)
        if not going.any():
            return found
        high = torch.where(value > 0, middle, high)
        low = torch.where(value > 0, low, middle)
    return torch.where(going, (low + high) / 2, found)


@sizes("bisection", "bisection with an early return", sample=32)
def bisections(size: int, sample: int, device: torch.device) -> Contestants:
    unit, chosen = grid(size, sample, device)
    c = 60 * unit - 30
    return loop_contest(bisection, (c,), lambda: bisection_masked(c), chosen=chosen)


# --- adaptive quadrature -------------------------------------------------------------------------

DEPTH, CLOSE = 8, 1e-6


def integrand(k: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (k * t * t).sin()


def simpson(k: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    between = integrand(k, (a + b) / 2)
    return (b - a) / 6 * (integrand(k, a) + 4 * between + integrand(k, b))


def quadrature(k: torch.Tensor) -> torch.Tensor:
    def refined(a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor, depth: int) -> torch.Tensor:
        middle = (a + b) / 2
        left, right = simpson(k, a, middle), simpson(k, middle, b)
        if depth == 0 or (left + right - whole).abs() < CLOSE:
            return left + right
        return refined(a, middle, left, depth - 1) + refined(middle, b, right, depth - 1)

    a, b = torch.zeros_like(k), torch.full_like(k, 2.0)
    return refined(a, b, simpson(k, a, b), DEPTH)


def quadrature_masked(k: torch.Tensor) -> torch.Tensor:
    """A stack of the intervals that are still to do, per example: (B, DEPTH + 2, 4)."""
    start, end = torch.zeros_like(k), torch.full_like(k, 2.0)
    todo = torch.zeros(len(k), DEPTH + 2, 4, dtype=k.dtype, device=k.device)
    depth = torch.full_like(k, DEPTH)
    todo[:, 0] = torch.stack([start, end, simpson(k, start, end), depth], 1)
    height = torch.ones(len(k), dtype=torch.long, device=k.device)
    rows = torch.arange(len(k), device=k.device)
    total = torch.zeros_like(k)
    while (going := height > 0).any():
        place = (height - 1).clamp(min=0)
        a, b, whole, depth = todo[rows, place].unbind(1)
        middle = (a + b) / 2
        left, right = simpson(k, a, middle), simpson(k, middle, b)
        done = (depth == 0) | ((left + right - whole).abs() < CLOSE)
        total = torch.where(going & done, total + left + right, total)
        split = going & ~done
        # The right half takes the interval's place, the left one lies above it.
        upper = torch.stack([middle, b, right, depth - 1], 1)
        todo[rows, place] = torch.where(split.unsqueeze(1), upper, todo[rows, place])
        lower = torch.stack([a, middle, left, depth - 1], 1)
        above = (place + 1).clamp(max=DEPTH + 1)
        todo[rows, above] = torch.where(split.unsqueeze(1), lower, todo[rows, above])
        height = torch.where(going, torch.where(done, height - 1, height + 1), height)
    return total


@sizes(
    "quadrature",
    "recursive adaptive quadrature; by hand: a stack of intervals per example",
    sample=16,
    by_hand=3,
)
def quadratures(size: int, sample: int, device: torch.device) -> Contestants:
    unit, chosen = grid(size, sample, device)
    k = 1 + 9 * unit
    return loop_contest(quadrature, (k,), lambda: quadrature_masked(k), chosen=chosen)


# --- branches ------------------------------------------------------------------------------------


def ten_ifs(x: torch.Tensor) -> torch.Tensor:
    for k in range(10):
        if torch.sin((k + 1.7) * x) > 0:
            x = 1.1 * x + 0.03
        else:
            x = x - 0.2
    return x


@workload(
    "ten-ifs",
    "ten `if`s, one after the other, 1024 examples; the loop: all of them",
    names=DIVERGING,
    limits={(0, 1): 0.05},
)
def ten_branches(device: torch.device) -> Contestants:
    x = 4 * grid(1024, 1024, device)[0] - 2

    def by_hand() -> torch.Tensor:
        y = x
        for k in range(10):
            y = torch.where(torch.sin((k + 1.7) * y) > 0, 1.1 * y + 0.03, y - 0.2)
        return y

    return loop_contest(ten_ifs, (x,), by_hand)


# --- places that differ ---------------------------------------------------------------------------

SIDE, CUT = 32, 24


def random_crop(image: torch.Tensor) -> torch.Tensor:
    top, left = int(image[0, 0, 0] * 8), int(image[1, 0, 0] * 8)
    return image[:, top : top + CUT, left : left + CUT]


@sizes("random-crop", "24 x 24 of images (3, 32, 32), at places that each image tells", sample=256)
def random_crops(size: int, sample: int, device: torch.device) -> Contestants:
    images = torch.rand(size, 3, SIDE, SIDE, dtype=D, device=device)
    cut = torch.arange(CUT, device=device)

    def by_hand() -> torch.Tensor:
        top, left = ((8 * images[:, channel, 0, 0]).long() for channel in (0, 1))
        rows = (top[:, None] + cut)[:, None, :, None].expand(-1, 3, -1, SIDE)
        columns = (left[:, None] + cut)[:, None, None, :].expand(-1, 3, CUT, -1)
        return images.gather(2, rows).gather(3, columns)

    chosen = range(0, size, size // sample)
    return loop_contest(random_crop, (images,), by_hand, chosen=chosen)


# --- one example that runs on --------------------------------------------------------------------

LANES = WIDTH = 256
STEPS = 400


class Recurrence:
    """x -> tanh(W x), as often as each example's number says."""

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5
        self.x = torch.randn(LANES, WIDTH, device=device)

    def __call__(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = 0
        while k < n:
            x = torch.tanh(self.weight @ x)
            k += 1
        return x

    def masked(self, n: torch.Tensor) -> torch.Tensor:
        x, k = self.x, 0
        while (going := k < n).any():
            x = torch.where(going.unsqueeze(1), torch.tanh(x @ self.weight.T), x)
            k += 1
        return x


@workload(
    "straggler",
    f"a {WIDTH}-wide tanh map, {LANES} examples: all but one stop after 1 step, one after {STEPS}; "
    "the loop: all of them",
    names=DIVERGING,
    limits={(0, 2): 0.25},
)
def straggler(device: torch.device) -> Contestants:
    recurrence = Recurrence(device)
    n = torch.ones(LANES, dtype=torch.long, device=device)
    n[100] = STEPS
    # Single precision through 400 maps that neither grow nor shrink.
    stacks = (recurrence.x, n)
    return loop_contest(recurrence, stacks, lambda: recurrence.masked(n), tolerance=1e-2)


@workload(
    "no-straggler",
    f"the same map, all {LANES} examples {STEPS} steps; the loop: {LANES // 4} times 4 of them",
    names=DIVERGING,
    limits={(0, 2): 1.3},
)
def no_straggler(device: torch.device) -> Contestants:
    recurrence = Recurrence(device)
    n = torch.full((LANES,), STEPS, device=device)
    stacks = (recurrence.x, n)
    chosen = range(0, LANES, LANES // 4)
    return loop_contest(
        recurrence, stacks, lambda: recurrence.masked(n), chosen=chosen, tolerance=1e-2
    )


# --- tests that agree ----------------------------------------------------------------------------


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """50 pointwise operations, values staying of order one."""
    for _ in range(10):
        x = torch.tanh(torch.sin(x * y + 0.5) - y)
    return x


def guarded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 1e6:
        raise ValueError("an input is out of bounds")
    return chain(x, y)


@workload(
    "agreeing-test",
    "50 pointwise operations behind a test that no example meets, 256 examples of shape (64,); "
    "in the place of a hand-written program forall.vmap without the test; the loop: 16 times 16",
    names=DIVERGING,
    limits={(0, 2): 1.05},
)
def agreeing_test(device: torch.device) -> Contestants:
    x = torch.randn(256, 64, dtype=D, device=device)
    y = torch.randn(256, 64, dtype=D, device=device)
    without = forall.vmap(chain)
    return loop_contest(guarded, (x, y), lambda: without(x, y), chosen=range(0, 256, 16))
