"""A part of the operator sweep, drawn with a fixed seed; run.py does all of it."""

import random

import pytest
import torch

from sweep.engines import Engine
from sweep.entries import all_ops, dtypes_for
from sweep.judge import judge
from sweep.known_gaps import GAPS

FRACTION = 0.45
SEED = 0

OPS = all_ops()
DRAWN = sorted(random.Random(SEED).sample(sorted(OPS), round(FRACTION * len(OPS))))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", DRAWN)
def test_entry_equals_the_loop_or_is_a_known_gap(name):
    engine = Engine("forall")
    op = OPS[name]
    verdicts = [judge(engine, name, op, d) for d in dtypes_for(op, [torch.float64])]
    for verdict in verdicts:
        assert verdict.status != "wrong", verdict.first["wrong"]
        if verdict.status == "error":
            assert name in GAPS, verdict.first["error"]
    statuses = {v.status for v in verdicts}
    assert name not in GAPS or "error" in statuses, f"{name} is mapped now: take it off the list"


def test_known_gaps_are_entries():
    assert set(GAPS) <= set(OPS)
