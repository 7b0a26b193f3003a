"""Random programs, replayed without being asked: each call equals the call without.

`FORALL_PROGRAMS` and `FORALL_SEED` as for the other random programs.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given

import forall
from forall import PerformanceWarning, grad, jacfwd, vmap
from forall._torch import trees
from jit.test_random_programs import numbers
from limits.programs import NOT_FORWARD
from limits.test_random_programs import PROGRAMS, B, agree, detached, many, programs

few = partial(many, programs=max(1, PROGRAMS // 8))
TRANSFORMS = {
    "vmap": lambda f: vmap(f),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1))),
    "vmap of jacfwd": lambda f: vmap(jacfwd(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@few  # each is recorded, twice
@given(programs)
def test_a_program(transform, program):
    if transform == "vmap of jacfwd":
        program = program.without(*NOT_FORWARD)

    def made():
        w = torch.zeros(2, dtype=torch.float64)
        return TRANSFORMS[transform](lambda x, v: program.number(x, v, w)), w

    def call(i, f, w):
        w.copy_(numbers(i + 9, 2))
        xs, vs = numbers(i, B + i // 5, *program.example), numbers(i + 5, B + i // 5, 2)
        return [*detached(trees.leaves(f(xs, vs))), xs, vs, w.clone()]

    def replayed(i):
        with replaying():
            return call(i, *ours)

    ours, plain = made(), made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        for i in range(6):
            agree(lambda i=i: replayed(i), lambda i=i: call(i, *plain), program)


@contextmanager
def replaying():
    before = forall.config.replay, forall.config.patience
    forall.config.replay, forall.config.patience = True, 0
    try:
        yield
    finally:
        forall.config.replay, forall.config.patience = before
