"""Random programs of named axes are the same on two ranks as in one process.

One of their axes is over the ranks, which have uneven shares of its examples. `FORALL_PROGRAMS`
sets how many programs there are, and `FORALL_SEED` is the first.
"""

import pytest
import torch
from torch.utils._pytree import tree_map

from mesh.pool import ask
from mesh.random_programs import FIRST_SEEDS, PER_TEST, draw_shares, run_forms

pytestmark = pytest.mark.filterwarnings("ignore:jit.*not recorded")  # it has a branch


@pytest.mark.sweep(15)
@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_a_random_program_on_two_ranks_is_that_of_one_process(pool, first):
    seeds = [*range(first, first + PER_TEST)]
    answers = ask(pool, "random_programs.run_all", seeds, size=2)
    for seed in seeds:
        found = [answer[seed] for answer in answers]
        for one in found:
            assert not isinstance(one, str), f"program {seed}\n{one}"
        _, dim, _ = draw_shares(seed)
        together = tree_map(lambda *parts, dim=dim: torch.cat(parts, dim), *found)
        try:
            torch.testing.assert_close(together, run_forms(seed), rtol=1e-8, atol=1e-9)
        except AssertionError as error:
            error.add_note(f"program {seed}")
            raise
