"""A part of the operator sweep, drawn with a fixed seed; `make coverage` does all of it."""

import random
from typing import Any

import pytest
import torch

from sweep.engines import Engine
from sweep.entries import UNINITIALISED, dtypes_for
from sweep.forms import entries
from sweep.judge import Entry
from sweep.known_gaps import EXCEPTIONS, GAPS, SHOWN_IN
from sweep.run import PART, PART_WORDS, words_of
from sweep.words import WORDS

SEED = 0
SAMPLES = 3
FRACTION = {"vmap": 0.02, **dict.fromkeys([w for w in WORDS if w != "vmap"], 0.006)}
PART_FRACTION = 0.004
OPEN = 12  # known gaps that are looked at

OPS = entries()


def drawn():
    """(entry, dtype, word), others for each word."""
    found = []
    for word, fraction in FRACTION.items():
        able = [n for n in OPS if word in words_of(OPS[n], "float64")]
        draw = random.Random(f"{SEED} {word}")
        for name in sorted(draw.sample(able, round(fraction * len(able)))):
            found += [(name, d, word) for d in dtypes_for(OPS[name], [torch.float64])]
    for part in PART:
        dtype = getattr(torch, part)
        able = [n for n in OPS if dtype in OPS[n].dtypes]
        draw = random.Random(f"{SEED} {part}")
        for name in draw.sample(able, round(PART_FRACTION * len(able))):
            found += [(name, dtype, word) for word in PART_WORDS]
    return sorted(found, key=str)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _marked(entry: tuple) -> Any:
    """With what sets a drawn entry apart where tests are made by `jit` too."""
    apart = pytest.mark.impure("gives memory as it finds it")
    return pytest.param(*entry, marks=apart if entry[0] in UNINITIALISED else ())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "dtype", "word"), [*map(_marked, drawn())])
def test_entry_equals_the_plain_truth_or_is_a_known_gap(name, dtype, word):
    (verdict,) = Entry(name, OPS[name], dtype, SAMPLES).judge(word, [Engine("forall")])
    if verdict.status == "wrong":
        assert (name, word) in EXCEPTIONS, verdict.first["wrong"]
    if verdict.status == "error":
        assert (name, word) in GAPS, verdict.first["error"]


@pytest.mark.parametrize(("name", "word"), sorted(random.Random(SEED).sample(sorted(GAPS), OPEN)))
def test_a_known_gap_is_still_open(name, word):
    (verdict,) = Entry(name, OPS[name], torch.float64).judge(word, [Engine("forall")])
    assert verdict.status == "error", f"{name} under {word} is right now: take it off the list"


@pytest.mark.parametrize(("name", "word"), EXCEPTIONS)
def test_an_exception_still_is_one(name, word):
    dtype = getattr(torch, SHOWN_IN.get((name, word), "float64"))
    (verdict,) = Entry(name, OPS[name], dtype).judge(word, [Engine("forall")])
    assert verdict.status == "wrong"
