"""What a region keeps of what was written in it."""

from __future__ import annotations

from forall._divergence import subscripts
from forall._divergence.thread_state import Region, thread


def test_a_list_that_nobody_has_any_more_is_forgotten():
    outer = Region(thread)
    thread.diverged += 1
    try:
        inner = Region(thread)
        known = [1]
        subscripts.log_container(known)
        subscripts.log_container([2])
        inner.close()
        assert [*(outer.heap or {})] == [id(known)]
    finally:
        thread.diverged -= 1
        outer.close()
