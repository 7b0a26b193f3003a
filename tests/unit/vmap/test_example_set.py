"""Sets of examples agree with Python's sets, however they were split."""

import random

import torch

from forall._vmap.active_set.sub_level import (
    covers_examples,
    intersect_examples,
    split_by_test,
    subtract_examples,
    unite_examples,
)
from forall._vmap.vmap_level import VmapConfig, VmapLevel


def _numbers(level):
    return level.examples.rows.tolist()


def _split(level, rng):
    """Split a level by random answers; return the sides that have examples."""
    test = torch.tensor([rng.random() < 0.5 for _ in range(level.size)])
    return [side for side in split_by_test(level, test) if side is not None]


def _random_levels(root, rng, asks_rows):
    """Return the levels that random tests, one in the branch of another, split a root into."""
    found = [root]
    while len(found) < 12:
        found += _split(rng.choice(found), rng)
        if asks_rows:
            _numbers(rng.choice(found))
    return found


def test_splits_equal_python_sets():
    for seed in range(40):
        rng = random.Random(seed)
        root = VmapLevel(9, VmapConfig(diverges=True))
        levels = _random_levels(root, rng, asks_rows=seed % 2 == 0)
        for a, b in zip(levels, rng.sample(levels, len(levels)), strict=True):
            mine, theirs = set(_numbers(a)), set(_numbers(b))
            assert _numbers(unite_examples(a, b)) == sorted(mine | theirs)
            both, rest = intersect_examples(a, b), subtract_examples(a, b)
            assert (both is None) == mine.isdisjoint(theirs)
            assert (rest is None) == (mine <= theirs)
            assert both is None or _numbers(both) == sorted(mine & theirs)
            assert rest is None or _numbers(rest) == sorted(mine - theirs)
            assert covers_examples(a, b) == (theirs <= mine)
            if both is not None:
                places = both.examples.find_positions_in(a.examples).tolist()
                assert [_numbers(a)[n] for n in places] == _numbers(both)


def test_both_halves_of_a_split_unite_to_the_level():
    root = VmapLevel(4, VmapConfig(diverges=True))
    yes, no = split_by_test(root, torch.tensor([True, False, True, False]))
    assert unite_examples(yes, no) is root
    assert (_numbers(yes), _numbers(no)) == ([0, 2], [1, 3])


def test_a_sub_level_shares_what_its_root_has():
    root = VmapLevel(3, VmapConfig("same", diverges=True))
    some, _ = split_by_test(root, torch.tensor([True, False, False]))
    root.state.calls = 2
    assert some.config is root.config
    assert some.state.calls == 2
    assert some.state.mutation_log is root.state.mutation_log
