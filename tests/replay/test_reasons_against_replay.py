"""The reason why calls are not replayed names a function, what it uses, and the line."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn

import forall

GENERATOR = random.Random(0)
CLOCK = time.perf_counter
DRAW = random.random  # a method in C, which does not say its module itself
DRAW_UNBOUND = random.Random.random
TABLE = {"clock": [time.perf_counter]}


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.clock = time.perf_counter

    def forward(self, x):
        return x * self.clock()


class Holder:
    def __init__(self):
        self.tools = {"clock": time.perf_counter}


MODEL, HOLDER = Timed(), Holder()


def by_module(x):
    y = 2 * x
    return y * time.perf_counter()


def by_its_own_name(x):
    return x * perf_counter()


def by_another_name(x):
    return x * CLOCK()


def by_another_function(x):
    return by_module(x)


def by_import(x):
    from time import perf_counter as clock

    return x * clock()


def by_imported_module(x):
    import random as r

    return x * r.random()


def by_default(x, clock=time.perf_counter):
    return x * clock()


def by_text(x):
    return x * getattr(time, "perf_counter")()  # noqa: B009 - this is what is tested


def by_list(x):
    return x * TABLE["clock"][0]()


def by_object(x):
    clock = HOLDER.tools["clock"]
    return x * clock()


def by_generator(x):
    y = GENERATOR
    return x * y.random()


def by_function_of_pythons_library(x):
    return x * secrets.randbelow(3)


def by_method_in_c(x):
    return x * DRAW()


def by_unbound_method_in_c(x):
    return x * DRAW_UNBOUND(GENERATOR)


def by_attribute(x):
    return MODEL(x)


def by_numpy(x):
    return x * np.random.rand()  # noqa: NPY002 - this is what is tested


def by_built_in(x):
    y = 2 * x
    print(end="")
    return y


def by_version(x):
    y = 2 * x
    return y * x._version


def close_over(clock):
    def inner(x):
        return x * clock()

    return inner


by_closure = close_over(time.perf_counter)

# What the reason says, and the line that it names.
REASONS = {
    by_module: ("by_module uses time.perf_counter", "return y * time.perf_counter()"),
    by_its_own_name: ("by_its_own_name uses time.perf_counter", "return x * perf_counter()"),
    by_another_name: ("by_another_name uses CLOCK, which is time.perf_counter", "CLOCK()"),
    by_another_function: ("by_module uses time.perf_counter", "return y * time.perf_counter()"),
    by_import: ("by_import uses time.perf_counter", "import perf_counter as clock"),
    by_imported_module: ("by_imported_module uses random.random", "r.random()"),
    by_default: ("by_default uses clock, which is time.perf_counter", "return x * clock()"),
    by_text: ("by_text uses time.perf_counter", "getattr("),
    by_list: ("by_list uses TABLE, which leads to time.perf_counter", 'TABLE["'),
    by_object: ("by_object uses HOLDER, which leads to time.perf_counter", "clock = HOLDER"),
    by_generator: (
        "by_generator uses GENERATOR, which is an object of class random.Random",
        "y = GENERATOR",
    ),
    by_function_of_pythons_library: (
        "by_function_of_pythons_library uses secrets.randbelow",
        "secrets.randbelow(3)",
    ),
    by_method_in_c: ("by_method_in_c uses DRAW, which is random.Random.random", "x * DRAW()"),
    by_unbound_method_in_c: (
        "by_unbound_method_in_c uses DRAW_UNBOUND, which is _random.Random.random",
        "x * DRAW_UNBOUND(",
    ),
    by_attribute: (
        "Timed.forward uses .clock, which is time.perf_counter",
        "return x * self.clock()",
    ),
    by_numpy: ("by_numpy uses numpy.random.rand", "np.random.rand()"),
    by_built_in: ("by_built_in uses print", "print("),
    by_version: ("by_version asks for ._version", "x._version"),
    by_closure: (
        "close_over.<locals>.inner uses clock, which is time.perf_counter",
        "return x * clock()",
    ),
}


def find_reason(func):
    """Return what `explain` tells of calls of a function once it has looked at some."""
    mapped, x = forall.vmap(func), torch.ones(2)
    for _ in range(8):
        mapped(x)
    return forall.explain(mapped)(x).replay


def find_lines(text):
    """Return the places in this file at which a text is, but for the table of the reasons."""
    lines = Path(__file__).read_text().partition("\nREASONS")[0].splitlines()
    return [f"{__file__}:{n}" for n, line in enumerate(lines, 1) if text in line]


@pytest.fixture
def untimed(monkeypatch, at_once):
    """With "check" a recording has no deadline, after which the reason would be the time."""
    monkeypatch.setattr(forall.config, "replay", "check")


@pytest.mark.filterwarnings("ignore:.*draw numbers once")
@pytest.mark.parametrize("func", REASONS, ids=lambda func: func.__name__)
def test_the_reason_names_function_use_and_line(func, untimed):
    text, line = REASONS[func]
    assert find_reason(func) in [f"no: {text} ({place})" for place in find_lines(line)]


def test_a_module_that_is_mapped_itself(untimed):
    text, line = REASONS[by_attribute]
    (place,) = find_lines(line)
    assert find_reason(MODEL) == f"no: {text} ({place})"


def test_the_reason_does_not_depend_on_hashes():
    program = """
from test_reasons_against_replay import REASONS
from forall._auto_replay.purity import find_impurity
from forall._jit.guards.build import Guards
for func in REASONS:
    print(find_impurity(Guards(func)))
"""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    paths.append(str(Path(forall.__file__).parents[1]))
    outputs = set()
    for seed in "012":
        changes = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", program]
        run = subprocess.run(
            command, env={**os.environ, **changes}, capture_output=True, text=True, check=True
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert "by_module uses time.perf_counter" in outputs.pop()
