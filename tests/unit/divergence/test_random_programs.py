"""Random programs, run converted for all lanes at once: what the loop gives, or a refusal."""

import random
from pathlib import Path
from runpy import run_path

import pytest
import torch

HERE = Path(__file__).parent
TOY = run_path(str(HERE / "toy.py"))
PROGRAMS = run_path(str(HERE / "programs.py"))
runtime = TOY["runtime"]


@pytest.fixture(autouse=True)
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def inputs(seed, size=7):
    r = random.Random(seed)
    x, y = ([r.uniform(-1, 1) for _ in range(size)] for _ in "xy")
    return x, y, [r.randrange(5) for _ in range(size)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_gives_what_the_loop_gives(seed):
    program, text = PROGRAMS["program"](seed, 2)
    columns = inputs(seed)
    expected = TOY["each"](program, *columns)
    try:
        found = TOY["together"](program, *columns)
    except runtime.Unsplittable:  # would be run again from its start
        TOY["forget"]()
        return
    assert TOY["close"](found, expected), text
