"""A mapped call in chunks of its examples, of a given size or as many as memory allows."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from forall._api.chunk_size import make_chunks
from forall._api.execution.groups import join_groups
from forall._api.execution.strategy import run_mapped_call
from forall._compat import rng_state
from forall._compat.storage import empty_cache, has_allocated_on_accelerator, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forall._api.chunk_size import Chunks
    from forall._api.execution.mapped_call import MappedCall
    from forall._api.typing import Chunk


def run_in_chunks(call: MappedCall, chunk: Chunk) -> tuple[list, Any]:
    """Run all examples in chunks, and return the leaves and the tree of their results."""
    size = call.arguments.size
    chunks = make_chunks(chunk)
    if size <= 1 or chunks is None or (chunks.size != "auto" and chunks.size >= size):
        return run_mapped_call(call)
    if chunks.size == "auto":
        call = call._replace(options=call.options._replace(retries_on_oom=True))
    same = call.draws.flag == "same"
    drawn = rng_state.save_states(call.arguments.leaves) if same else {}

    def one(numbers: range) -> tuple:
        if same and numbers.start:
            rng_state.restore_states(
                drawn
            )  # the same for all examples, not only for a chunk of them
        with rng_state.record_new_states(drawn):
            part = call if len(numbers) == size else call.some(numbers)
            return numbers, *run_mapped_call(part)

    parts = [*run_each_chunk(one, size, chunks, call.arguments.leaves, chunks.unit)]
    return join_groups(call.places, parts)


def run_each_chunk(
    run: Callable[[range], Any], size: int, chunk: Chunk, given: Iterable[Any], unit: str
) -> Iterator[Any]:
    """Yield the result of ``run`` for each chunk of ``size`` things, in order.

    With "auto" a chunk for which memory does not suffice is halved, and so are those after it. The
    chunks before it are kept. ``run`` must leave nothing behind of a chunk that failed so.
    """
    chunks = make_chunks(chunk)
    if chunks is None:
        yield run(range(size))
        return
    with chunks.bar(size, unit) as bar:
        for numbers, found in _iterate_chunks(
            run, size, chunks, [x for x in given if isinstance(x, torch.Tensor)]
        ):
            yield found
            if bar is not None:
                bar.update(len(numbers))


def _iterate_chunks(
    run: Callable[[range], Any], size: int, chunks: Chunks, given: list[torch.Tensor]
) -> Iterator[tuple[range, Any]]:
    start, step = 0, size if chunks.size == "auto" else chunks.size
    while start < size:
        numbers = range(start, min(start + step, size))
        try:
            with chunks.budget(given):
                found = run(numbers)
        except (RuntimeError, MemoryError) as error:
            if chunks.size != "auto" or len(numbers) == 1 or not is_out_of_memory(error):
                raise
            found, step = None, (len(numbers) + 1) // 2
        if found is None:  # outside the handler no reference to failed frames is left
            on_gpu = has_allocated_on_accelerator()
            gc.collect(2 if on_gpu else 1)  # a full collection takes a tenth of a second
            if on_gpu:
                empty_cache()
            continue
        yield numbers, found
        start = numbers.stop
