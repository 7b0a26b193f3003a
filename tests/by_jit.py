"""Tests with each transformed call made by `jit` too: `FORALL_TESTS=jit`, see `make jitted`.

`FORALL_TESTS=fastmath` is the same by ``jit(fastmath=True)``.

A call of a kind that is met for the first time is recorded, and its program is run on the same
arguments; a later one is replayed, and then made as it is. What is written into is put back in
between, and so are the random numbers. Results, what is left in the arguments and in what is
captured, and derivatives taken outside have to be the same.

The function itself runs once with each call, as ever, and what `jit` cannot record is no failure.
What it records although the function does more than `jit` can see is told by the mark `impure`,
and so are tests of how calls run: those of such a test are made as ever.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from forall._auto_replay.policy import AutoReplayCache, _check_replay, _is_same
from forall._compat import pytree, rng_state
from forall._compat.call_site import OURS
from forall._compat.private_api import get_version, has_global_hooks
from forall._compat.storage import has_memory
from forall._compat.transform_call import call_transform
from forall._core import communication_log
from forall._jit.backends.python_source import compile_python
from forall._jit.cache.call_key import is_free
from forall._jit.cache.call_state import EagerKind
from forall._jit.cache.differentiable_entry import DifferentiableEntry
from forall._jit.cache.entry import CacheEntry
from forall._jit.cache.jit_cache import JitCache
from forall._jit.static_args import StaticArguments
from forall._jit.tracing.trace_call import make_guards

FASTMATH = os.environ.get("FORALL_TESTS") == "fastmath"
COUNT: Counter[str] = Counter()
REASONS: Counter[str] = Counter()


class Quiet(JitCache):
    """Kinds of calls; what cannot be recorded is counted, and not warned of."""

    def _keep_eager(
        self, kind: Any, given: tuple[tuple, dict], why: str, place: Any = None
    ) -> EagerKind:
        REASONS[why] += 1
        self.known.keep_last(kind, EagerKind("", why))
        return EagerKind("", why)


class State:
    """What a call may change of what was there before it."""

    def __init__(self, tensors: Sequence[Tensor], others: Sequence[Any]) -> None:
        self.tensors = [t for t in tensors if has_memory(t) and not t.is_meta]
        self.others = [*tensors, *others]
        self.versions = [*map(get_version, self.tensors)]
        self.numbers = [t.detach().clone() for t in self.tensors]
        self.drawn = rng_state.save_states(self.others)

    def put_back(self) -> None:
        """As it was; no version moves, for a graph may have saved what is put back."""
        for t, numbers in zip(self.tensors, self.numbers, strict=True):
            if not torch.equal(t, numbers):  # rules write below autograd, and move no version
                t.data.copy_(numbers)
        rng_state.restore_states(self.drawn)

    def now(self) -> list[Tensor]:
        left = [t.detach().clone() for t in self.tensors]
        return [*left, *rng_state.save_states(self.others).values()]

    def compare(self, left: list[Tensor]) -> None:
        now = self.now()
        if not all(map(_is_same, now, left)):
            raise RuntimeError(f"forall: a replayed call left\n{now}\nand not\n{left}")


def not_the_users(f: FunctionType) -> FunctionType:
    """The function as one of forall's own, so that no message names its lines as the user's."""
    f.__code__ = f.__code__.replace(co_filename=f"{OURS}by_jit.py")
    return f


class ByJit(AutoReplayCache):
    """In the place of what replays the calls of a transformed function."""

    def __init__(self, run: Any, leads_back: Any = None, *, stands_in: bool = False) -> None:
        super().__init__(run, leads_back, stands_in=stands_in)
        self.kinds = Quiet(
            run,
            StaticArguments(run, None, None),
            (),
            compile_graph=compile_python,
            fastmath=FASTMATH,
        )

    @not_the_users
    def run(self, args: tuple, kwargs: dict, instead: Any) -> Any:
        # One outermost call: a transform inside would take what this one has set for its caller's.
        return call_transform(self._compared, args, kwargs, instead)

    @not_the_users
    def _compared(self, args: tuple, kwargs: dict, instead: Any) -> Any:
        COUNT["calls"] += 1
        if not is_free() or sys.gettrace() or has_global_hooks():
            return instead()
        leaves = pytree.get_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        guards = make_guards(self.eager, (args, kwargs))
        state = State([*tensors, *guards.tensors.values()], guards.generators)
        known, hits = [*self.kinds.known.values()], self.kinds.hits
        result, failed, is_replayed = None, None, False
        try:
            result = self.kinds.run(args, kwargs)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            is_replayed = self.kinds.hits > hits
            moved = not guards.hold() or [*map(get_version, state.tensors)] != state.versions
            if communication_log.is_final(error) or (moved and not is_replayed):
                raise
        if failed is not None:  # past the handler: the call's own error has no other as context
            if is_replayed:
                state.put_back()
            else:
                rng_state.restore_states(state.drawn)
            result = instead()
            if is_replayed:
                raise RuntimeError(f"forall: a replayed call failed by\n{failed}")
            return result
        made = next(reversed(self.kinds.known.values()), None)
        if not isinstance(made, CacheEntry):
            return result
        if self.kinds.hits > hits:
            COUNT["replayed calls compared"] += 1
            found, left = _copied(made, result), state.now()
            state.put_back()
            result = instead()
            _check_replay(found, result, made, tensors)
            state.compare(left)
        elif not any(made is k for k in known):
            COUNT["recorded calls compared"] += 1
            truth, left = _copied(made, result), state.now()
            state.put_back()
            _check_replay(made(tensors), truth, made, tensors)
            state.compare(left)
        return result


def _copied(made: CacheEntry, result: Any) -> Any:
    """A result that stays as it is; with a derivative outside, nothing is written into it."""
    if isinstance(made, DifferentiableEntry):
        return result
    leaves, spec = pytree.flatten(result)
    copies = [x.clone() if isinstance(x, Tensor) and has_memory(x) else x for x in leaves]
    return pytree.unflatten(copies, spec)


def counts() -> tuple[dict[str, int], dict[str, int]]:
    """What one process of many has counted, in plain dicts."""
    return {**COUNT}, {**REASONS}


def add(counted: tuple[dict[str, int], dict[str, int]]) -> None:
    COUNT.update(counted[0])
    REASONS.update(counted[1])


def summary() -> list[str]:
    told = [f"{n} {what}" for what, n in COUNT.items()]
    return [*told, *(f"{n} kinds not recorded: {why}" for why, n in REASONS.most_common(30))]
