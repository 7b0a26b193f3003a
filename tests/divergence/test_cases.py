"""The acceptance functions themselves: inputs away from thresholds, on which examples diverge."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._pytree import tree_flatten

from divergence.functions import CASES, GROUPS
from divergence.truth import KEY, by_loop, copies, looped

FILES = {group.__file__ for group in GROUPS}

# Every example runs the same instructions; what differs is a number, a shape, or
# the way inside a builtin, an optimizer or a backward pass.
SAME_WAY = {
    "min_and_max_of_python",
    "sorted_by_python",
    "lbfgs",
    "backward_with_a_branch",
    "draws_of_differing_shape",
    "int_float_bool",
    "arithmetic_of_integers",
    "arithmetic_of_floats",
    "index_of_a_list",
    "slice_by_n",
    "index_of_a_tensor",
    "tensors_made_from_numbers",
    "tensor_from_mapped_entries",
    "counting",
    "number_as_a_dimension",
    "mask_read",
    "mask_written",
    "mask_written_with_as_many",
    "mask_over_rows",
    "where_of_one_argument",
    "masked_select",
    "unique",
    "repeat_interleave",
    "top_of_n",
    "split_at_n",
    "pieces_joined_again",
    "bincount",
    "arange_up_to_x",
    "argmax_as_an_index",
}


def nudged(t):
    return t * (1 + 1e-11) if t.is_floating_point() else t


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_a_last_bit_does_not_decide(name):
    case = CASES[name]
    for size, seed in ((40, 5), (256, 4)):
        stacks = case.stacks(size, seed)
        one = tree_flatten(by_loop(case, copies(stacks)))[0]
        other = tree_flatten(by_loop(case, [nudged(t) for t in stacks]))[0]
        for a, b in zip(one, other, strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
            else:
                assert a == b


def way(f, row):
    """The instructions of the acceptance functions that a call runs, in order."""
    seen = []

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen.append((frame.f_code.co_firstlineno, frame.f_lasti))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f(*row)
    finally:
        sys.settrace(before)
    return tuple(seen)


@pytest.mark.parametrize("name", CASES)
def test_examples_part_ways(name):
    case = CASES[name]
    ways = set()
    looped(
        lambda *row: ways.add(way(case.plain, row)),
        [0] * len(case.makers),
        KEY if case.keyed else None,
    )(*case.stacks(13))
    assert (len(ways) > 1) != (name in SAME_WAY)
