"""What per-example weight gradients of convolutions cost in each form, over many shapes.

    python benchmarks/weight_gradients.py [seconds] [seed]

This is where the choice in `forall._vmap.rules.convolution` comes from: run it after a change
there, or for another release of torch, and move the constants until the first figure is
smallest. Shapes are drawn at random; times are of one thread's processor, the least of several.
"""

import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from forall._vmap.rules import convolution

Shape = tuple[int, ...]


def drawn(rng: random.Random) -> Shape:
    """Examples, images, channels, filters, size of an image and of a filter, stride, padding."""
    while True:
        examples, images = rng.choice([4, 8, 16, 32, 64, 128]), rng.choice([1, 1, 1, 2, 4])
        channels = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 16, 24, 32, 32, 64, 64, 128, 256])
        filters = rng.choice([1, 4, 6, 8, 10, 16, 32, 64, 128, 256])
        image, kernel = (
            rng.choice([4, 6, 7, 8, 12, 14, 16, 28, 32, 56]),
            rng.choice([1, 3, 3, 3, 5, 7]),
        )
        stride, padding = rng.choice([1, 1, 2]), rng.choice([0, kernel // 2])
        places = (image + 2 * padding - kernel) // stride + 1
        copied = examples * images * channels * kernel**2 * places**2
        if kernel <= image and copied < 2e7 and copied * filters < 4e8:
            return examples, images, channels, filters, image, kernel, stride, padding


FORMS = (
    convolution.weight_grad_by_groups,
    convolution.weight_grad_places_last,
    convolution.weight_grad_channels_last,
)


def costs(shape: Shape) -> tuple[dict[str, float], str]:
    """Seconds of each form, and which one the rule would take."""
    examples, images, channels, filters, image, kernel, stride, padding = shape
    places = (image + 2 * padding - kernel) // stride + 1
    x = torch.randn(examples, images, channels, image, image)
    g = torch.randn(examples, images, filters, places, places)
    given = (g, x, (filters, channels, kernel, kernel))
    how = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    cost = {form.__name__: seconds(partial(form, *given, *how)) for form in FORMS}
    return cost, convolution.choose_weight_grad(*given, *how).__name__


def seconds(program: Callable, rounds: int = 5, target: float = 0.004) -> float:
    program()
    started = time.thread_time()
    program()
    repetitions = max(1, int(target / max(time.thread_time() - started, 1e-6)))
    best = math.inf
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(repetitions):
            program()
        best = min(best, (time.thread_time() - started) / repetitions)
    return best


def main(limit: float = 120, seed: int = 0) -> None:
    torch.set_num_threads(1)
    rng, stop = random.Random(seed), time.monotonic() + limit
    names = [form.__name__ for form in FORMS]
    over: dict[str, list[float]] = {name: [] for name in ("the rule", *names)}
    while time.monotonic() < stop:
        shape = drawn(rng)
        cost, chosen = costs(shape)
        cost["the rule"] = cost[chosen]
        for name, values in over.items():
            values.append(cost[name] / min(cost.values()))
        print(*shape, *(f"{cost[n] * 1e6:.0f}" for n in names), sep="\t", flush=True)
    for name, values in over.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{name}: {mean:.3f} of the best form in the mean over {len(values)} shapes")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]))
